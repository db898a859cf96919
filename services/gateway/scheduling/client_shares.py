"""Shares a model queue and the prefill workers behind it among clients.

Of each client, a few requests for each prefill worker are on the way to their first token: eight
to 32, as many as get it in a short time, or one while another client sends requests that do not
have to wait outside. Its further requests wait outside, in the order of service, and only then are
tokenized and get their arrival number. So a client that sends 500 requests at once delays another
client's request by a few of them. See ADR 176, ADR 169 and ADR 175.
"""

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter

from services.gateway.frontend.api import GenerationRequest
from services.protocol.ticket import queue_order

PER_PREFILL_WORKER = 8
"""Enough to keep a prefill worker busy while the next requests are tokenized and placed."""
MOST_PER_PREFILL_WORKER = 32
"""With short prompts, a prefill worker computes more of them in a step."""
DELAY_S = 0.15
"""The number between these two: as many requests as get their first token in this time."""
_NUM_INTERVALS = 16
"""Over about how many requests the time between two of them is averaged."""
BESIDE_LIGHT_CLIENTS = 1
"""The number for each prefill worker while there is a light client."""
LIGHT_FOR_S = 1.0
"""A client is light for this long after a request of it that did not have to wait outside."""


_Place = tuple[int, int, asyncio.Future[None]]
"""Of a request that waits outside: its order, were it to arrive now; a number that tells equal
orders apart; and the future that lets it in."""

_order_of = itemgetter(0)


@dataclass(slots=True)
class _Share:
    """`outside`: the requests that wait, the first in order first."""

    client: str
    num_prefill_workers: int = 1
    num_inside: int = 0
    outside: list[_Place] = field(default_factory=list)


class ClientShares:
    """The shares of one model queue: one for each client, whatever the priorities of its requests.
    The most urgent of a client's requests enters first, with the head start of the queue."""

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}
        self._light: dict[str, float] = {}
        """Light clients, and when the last request of each entered; the earliest first."""
        self._clock = asyncio.get_running_loop().time
        self._numbers = count()
        self._left_at = self._clock()
        self._interval_s = 1.0
        """The mean time between two requests that leave."""

    def __len__(self) -> int:
        """All requests that wait outside."""
        return sum(len(share.outside) for share in self._shares.values())

    def num_outside(self, request: GenerationRequest) -> int:
        """Requests that wait outside and go before this new one."""
        share = self._shares.get(request.caller.client)
        return bisect_right(share.outside, self._order(request), key=_order_of) if share else 0

    def _order(self, request: GenerationRequest) -> int:
        return queue_order(request.priority, int(self._clock() * 1000))

    @asynccontextmanager
    async def entered(
        self, request: GenerationRequest, num_prefill_workers: int
    ) -> AsyncIterator[Callable[[], None]]:
        """Wraps the admission of a request, and lets it wait outside first if its client has as
        many inside as it may. Yields the function to call, once or more, when the request has its
        first token or has ended; an error in the block calls it."""
        client = request.caller.client
        share = self._shares.setdefault(client, _Share(client))
        share.num_prefill_workers = max(1, num_prefill_workers)
        is_inside = True

        def leave() -> None:
            nonlocal is_inside
            if is_inside:
                is_inside = False
                self._leave(share)

        await self._enter(share, request, leave)
        try:
            yield leave
        except BaseException:
            leave()
            raise

    async def _enter(
        self, share: _Share, request: GenerationRequest, leave: Callable[[], None]
    ) -> None:
        self._light.pop(share.client, None)
        if self._has_room(share) and not share.outside:
            share.num_inside += 1
            self._light[share.client] = self._clock()
            return
        entered = asyncio.get_running_loop().create_future()
        place = self._order(request), next(self._numbers), entered
        insort(share.outside, place)
        self._let_in(share)
        try:
            await entered
        except asyncio.CancelledError:
            index = bisect_left(share.outside, place)
            if share.outside[index : index + 1] == [place]:
                del share.outside[index]
            if not entered.cancelled():  # it was let in at the same moment
                leave()
            raise

    def _leave(self, share: _Share) -> None:
        now = self._clock()
        self._interval_s += (now - self._left_at - self._interval_s) / _NUM_INTERVALS
        self._left_at = now
        share.num_inside -= 1
        self._let_in(share)
        if not share.num_inside:
            del self._shares[share.client]

    def _let_in(self, share: _Share) -> None:
        """Let in as many as there is room for, which changes."""
        while share.outside and self._has_room(share):
            first = share.outside.pop(0)[-1]
            if not first.cancelled():  # its request was just cancelled, and has not run since
                first.set_result(None)
                share.num_inside += 1

    def _has_room(self, share: _Share) -> bool:
        num_workers = share.num_prefill_workers
        if self._others_are_light(share):
            return share.num_inside < BESIDE_LIGHT_CLIENTS * num_workers
        fewest, most = PER_PREFILL_WORKER * num_workers, MOST_PER_PREFILL_WORKER * num_workers
        return share.num_inside < min(most, max(fewest, DELAY_S // max(self._interval_s, 1e-6)))

    def _others_are_light(self, share: _Share) -> bool:
        since = self._clock() - LIGHT_FOR_S
        while self._light and self._light[first := next(iter(self._light))] < since:
            del self._light[first]
        return len(self._light) > (share.client in self._light)
