"""One request at a prefill worker."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from blockstore.records import Allocation, PrefixHash
from services.protocol.block_keys import BlockKeys, ComputedBlocks, num_tokens_of
from services.protocol.logprobs import Logprobs
from services.protocol.messages import Generated, Pooling, PoolingMode, Prefilled
from services.worker.requests.jobs import Job


@dataclass(eq=False, slots=True, kw_only=True)
class PrefillJob(Job):
    """One attempt of a request."""

    block_keys: BlockKeys
    """The block keys of its tokens."""
    num_prompt_logprobs: int | None = None
    """How many of the likeliest tokens to report at each position of the prompt; None: none."""
    pooling: Pooling | None = None
    """How to make the embedding of the prompt; None: it draws tokens."""
    follows: PrefixHash | None = None
    """The hash of a prefix that this worker computes for another job, for which this one waits."""
    allocation: Allocation | None = None
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    """The logprobs of the chunks so far."""
    outputs: list[Generated] = field(default_factory=list)
    """The tokens, or results of a beam search, so far."""
    embedding: tuple[float, ...] = ()
    num_tokens: int = field(init=False)
    """The tokens to compute if nothing is cached."""
    num_uncomputed: int = field(init=False)
    """The tokens that are still to be computed."""

    def __post_init__(self) -> None:
        self.num_tokens = self.num_uncomputed = num_tokens_of(self.ticket)

    @property
    def computes_all(self) -> bool:
        """Whether it computes all tokens, even those in adopted blocks: it needs their states."""
        is_mean = self.pooling and self.pooling.mode is PoolingMode.MEAN
        return bool(is_mean) or self.num_prompt_logprobs is not None

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

    def prefilled(self) -> Prefilled:
        """The event that reports its ticket, detached or finished, with all results."""
        logprobs = tuple(self.prompt_logprobs)
        return Prefilled(self.ticket, tuple(self.outputs), logprobs, self.embedding)
