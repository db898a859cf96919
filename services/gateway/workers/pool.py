"""A pool, as the gateway sees it."""

from dataclasses import dataclass

from blockstore.records import PoolSpec
from services.gateway.workers.worker import Worker

_S_PER_TOKEN = 50e-6
"""The time of a prompt's token at prefill workers that have not measured it yet."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool, and its workers that take work now."""

    spec: PoolSpec
    prefill: tuple[Worker, ...]
    decode: tuple[Worker, ...]

    @property
    def max_slots(self) -> int:
        """Most sequences of one request that can run here."""
        return max((worker.num_slots for worker in self.decode), default=0)

    def has_open(self, num_slots: int) -> bool:
        """Whether a decode worker may grant the slots; 0 slots need none."""
        return not num_slots or bool(self.open_decode(num_slots))

    def open_decode(self, num_sequences: int = 1) -> tuple[Worker, ...]:
        """The decode workers that may grant `num_sequences` slots, the least loaded first."""
        workers = [worker for worker in self.decode if worker.is_open(num_sequences)]
        return tuple(sorted(workers, key=lambda worker: (-worker.num_free_slots, worker.id)))

    @property
    def s_per_token(self) -> float:
        measured = [worker.prefill_ns_per_token for worker in self.prefill]
        return min(filter(None, measured), default=0) * 1e-9 or _S_PER_TOKEN

    @property
    def num_pending_tokens(self) -> int:
        return min((worker.num_pending_tokens for worker in self.prefill), default=0)
