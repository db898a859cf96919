"""One request at a prefill worker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from blockstore.records import Allocation, PrefixHash
from services.protocol.block_keys import BlockKeys, ComputedBlocks, num_tokens_of
from services.protocol.logprobs import LogprobColumns
from services.protocol.messages import Generated, Pooling, PoolingMode, Prefilled
from services.worker.requests.jobs import Job


@dataclass(eq=False, slots=True, kw_only=True)
class PrefillJob(Job):
    """One attempt of a request."""

    block_keys: BlockKeys
    """The block keys of the request's tokens."""
    num_prompt_logprobs: int | None = None
    """The number of likeliest tokens to report for each token of the prompt; None reports none."""
    pooling: Pooling | None = None
    """The pooling of the prompt's embedding; None if the request draws tokens."""
    follows: PrefixHash | None = None
    """The hash of a prefix that another job of this worker computes and this job waits for."""
    awaits_blocks: bool = False
    """Whether the gateway was told that the job waits for blocks."""
    allocation: Allocation | None = None
    to_keep: Mapping[PrefixHash, int] = field(default_factory=dict)
    """The blocks to keep in files (`FileCache.asked`)."""
    prompt_logprobs: list[LogprobColumns] = field(default_factory=list)
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
        """Whether the job computes all tokens, also in adopted blocks, to get their states."""
        is_mean = self.pooling and self.pooling.mode is PoolingMode.MEAN
        return bool(is_mean) or self.num_prompt_logprobs is not None

    @property
    def hashes(self) -> Sequence[PrefixHash]:
        """The hashes of the full blocks with which all sequences begin."""
        return self.block_keys.trunk.hashes

    @property
    def chains(self) -> tuple[Sequence[PrefixHash], Sequence[Sequence[PrefixHash]]]:
        """The hashes to look for in the prefix index: the hashes with which all sequences begin,
        and the further hashes of each sequence, which a request that computes everything omits."""
        shared, behind = self.block_keys.chains
        return shared, () if self.computes_all else behind

    def computed_blocks(self) -> list[ComputedBlocks]:
        """Return the adopted blocks of each sequence, with the number of their tokens that count as
        computed: 0 if the request computes everything."""
        assert self.allocation is not None
        computed = self.block_keys.computed_blocks(self.allocation.cached(*self.chains))
        if not self.computes_all:
            return computed
        return [replace(blocks, num_tokens=0) for blocks in computed]

    def prefilled(self) -> Prefilled:
        """Return the event that reports the ticket, detached or finished, with all results."""
        parts = self.prompt_logprobs
        logprobs = LogprobColumns.joined(parts) if parts else None
        return Prefilled(self.ticket, tuple(self.outputs), logprobs, self.embedding)
