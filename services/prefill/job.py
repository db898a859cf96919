"""One request at a prefill worker."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from blockstore.records import Allocation, PrefixHash
from services.engine.batch import LoadedAdapter
from services.protocol.block_keys import BlockKeys, ComputedBlocks, num_tokens_of
from services.protocol.logprobs import Logprobs
from services.protocol.messages import Generated, Prefilled
from services.protocol.ticket import Ticket
from services.worker.requests.events import Ending, Session
from services.worker.requests.trace import NO_TRACE, JobTrace


class State(Enum):
    """Where a request stands at this worker.

        LOADING -> WAITING -> COMPUTING -> ISSUED -> ENDED
        WAITING -> FETCHING -> COMPUTING -> ...      if its KV was swapped out

    LOADING: its adapter is being read. WAITING: for blocks. FETCHING: its KV is being copied back
    from the swap pool. COMPUTING: in the engine. ISSUED: its detached ticket waits for a claim.
    Every state may go to ENDED.
    """

    LOADING = auto()
    WAITING = auto()
    FETCHING = auto()
    COMPUTING = auto()
    ISSUED = auto()
    ENDED = auto()


@dataclass(eq=False, slots=True)
class Job:
    """One attempt of a request.

    `block_keys`: the block keys of its tokens. `suspect`: whether the request may have killed a
    worker. `follows`: the hash of a prefix that this worker is computing for another request, for
    which this one waits. `ending`: set once the request is to end early. `num_prompt_logprobs`:
    report the logprobs of the prompt, with that many of the likeliest tokens at each position;
    None: do not. `prompt_logprobs`: those of the chunks so far. `outputs`: the tokens, or beam
    search results, so far. `num_tokens`: to compute if nothing is cached. `num_uncomputed`: still
    to compute. `adapter`: kept while the job is here.
    """

    session: Session
    ticket: Ticket
    block_keys: BlockKeys
    suspect: bool = False
    state: State = State.WAITING
    follows: PrefixHash | None = None
    allocation: Allocation | None = None
    ending: Ending | None = None
    num_prompt_logprobs: int | None = None
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    outputs: list[Generated] = field(default_factory=list)
    trace: JobTrace = NO_TRACE
    adapter: LoadedAdapter | None = None
    num_tokens: int = field(init=False)
    num_uncomputed: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_uncomputed = num_tokens_of(self.ticket)

    @property
    def key(self) -> tuple[int, str, int]:
        """(gateway session, request id, attempt)."""
        return id(self.session), *self.ticket.key

    @property
    def computes_all(self) -> bool:
        """Whether it computes all tokens, even those in adopted blocks: it needs their states."""
        return self.num_prompt_logprobs is not None or self.ticket.sampling.needs_all_states

    @property
    def hashes(self) -> Sequence[PrefixHash]:
        """The hashes of the full blocks with which all sequences begin."""
        return self.block_keys.trunk.hashes

    @property
    def chains(self) -> tuple[Sequence[PrefixHash], Sequence[Sequence[PrefixHash]]]:
        """The hashes to look for in the prefix index: those with which all sequences begin, and
        behind them each sequence's own. A request that computes everything looks for the first
        only."""
        shared, behind = self.block_keys.chains
        return shared, () if self.computes_all else behind

    def computed_blocks(self) -> list[ComputedBlocks]:
        """For each sequence, the adopted blocks and how many of their tokens count as computed: 0
        if the request computes everything."""
        assert self.allocation is not None
        computed = self.block_keys.computed_blocks(self.allocation.cached(*self.chains))
        if not self.computes_all:
            return computed
        return [replace(blocks, num_tokens=0) for blocks in computed]

    def prefilled(self, ticket: Ticket) -> Prefilled:
        """The event that reports this ticket, issued or finished, with all results."""
        return Prefilled(ticket, tuple(self.outputs), tuple(self.prompt_logprobs))
