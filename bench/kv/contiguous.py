"""KV memory with one contiguous reservation for each request, as in servers without paging."""

from collections.abc import Callable, Sequence

from advisor.advice import DoesNotFit
from advisor.workload import RecordedRequest
from bench.kv.simulation import SimulatedRequest, Usage


class ContiguousMemory:
    """A memory that reserves `reserve(asked)` contiguous slots for each request, from its admission
    to its end. Only their sum counts; the gaps that would be between reservations are left out."""

    waste_kinds = ("for later", "never used")

    def __init__(self, num_slots: int, reserve: Callable[[RecordedRequest], int]) -> None:
        self._num_slots = num_slots
        self._reserve = reserve
        self._num_reserved = 0

    async def admit(self, request: SimulatedRequest) -> bool:
        wanted = self._reserve(request.asked)
        if not request.asked.num_tokens - 1 <= wanted <= self._num_slots:
            raise DoesNotFit(
                f"a request of {request.asked.num_tokens} tokens, for which {wanted} slots are "
                f"reserved, never fits {self._num_slots}"
            )
        if self._num_reserved + wanted > self._num_slots:
            return False
        self._num_reserved += wanted
        return True

    def has_slots(self, _request: SimulatedRequest) -> bool:
        return True

    async def commit(self, _request: SimulatedRequest) -> None:
        """Do nothing, since contiguous reservations share nothing."""

    async def release(self, request: SimulatedRequest) -> None:
        self._num_reserved -= self._reserve(request.asked)

    async def grow(self, _running: Sequence[SimulatedRequest]) -> Sequence[SimulatedRequest]:
        return ()

    async def usage(self, running: Sequence[SimulatedRequest]) -> Usage:
        """Count slots for KV, for later tokens, and for tokens that never come. The last token of a
        request needs no slot, since its KV is never computed."""
        num_kv = sum(request.num_computed for request in running)
        later = sum(request.asked.num_tokens - 1 for request in running) - num_kv
        return Usage(self._num_reserved, num_kv, (later, self._num_reserved - num_kv - later))
