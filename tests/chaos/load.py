"""Users of a disturbed deployment: each sends one request after another, and knows every answer."""

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from quire.async_client import AsyncClient
from quire.errors import DeadlineExceeded, Overloaded, QuireError
from quire.messages import Request
from quire.types import Delta
from tests.chaos.cases import Case
from tests.chaos.limits import SILENCE_S
from tests.chaos.received import Fault, Heard
from tests.chaos.report import Tally

_LATE = (DeadlineExceeded, Overloaded)
"""The errors with which a request with a deadline may end."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a user treats a request.

    `leaves_after`, in tokens, and `leaves_at_s`: when it cancels; None: never. `stalls_at`: the
    token after which it reads nothing for `stall_s`. `salted`: the prompt has its own cache salt.
    """

    deadline_s: float | None = None
    leaves_after: int | None = None
    leaves_at_s: float | None = None
    stalls_at: int | None = None
    stall_s: float = 0.0
    salted: bool = False

    @classmethod
    def drawn(cls, chance: random.Random, case: Case, slow: bool) -> "Manner":
        fate, part, seconds = chance.random(), chance.randrange(case.num_tokens), chance.random()
        salted = chance.random() < 0.2
        if slow:
            leaves_after = part if fate < 0.3 else None
            return cls(stalls_at=part // 4, stall_s=2 + 7 * seconds, leaves_after=leaves_after)
        if fate < 0.15 and case.is_told_at_the_end:
            return cls(leaves_at_s=2 * seconds, salted=salted)
        if fate < 0.15:
            return cls(leaves_after=part, salted=salted)
        if fate < 0.22:
            return cls(leaves_at_s=0.5 * seconds, salted=salted)
        if fate < 0.30:
            return cls(stalls_at=part, stall_s=3 * seconds, salted=salted)
        if fate < 0.40:
            return cls(deadline_s=0.1 + 4 * seconds, salted=salted)
        return cls(salted=salted)


class User:
    """`slow`: it stalls in each request. `calm`: while it is set, the user finishes its request
    without stalls and sends no other."""

    def __init__(
        self, seed: str, client: AsyncClient, known: Sequence[Case], calm: asyncio.Event, slow: bool
    ) -> None:
        self._chance = random.Random(seed)
        self._client = client
        self._known = known
        self._calm = calm
        self._slow = slow

    async def run(self, until: asyncio.Event, tally: Tally) -> None:
        """Send one request after another until `until` is set."""
        while not until.is_set():
            if self._calm.is_set():
                await asyncio.sleep(0.05)
                continue
            case = self._chance.choice(self._known)
            manner = Manner.drawn(self._chance, case, self._slow)
            try:
                tally.ended[case.kind, await self._send(case, manner, tally)] += 1
            except (Fault, QuireError) as fault:
                if manner.deadline_s is not None and isinstance(fault, _LATE):
                    tally.ended[case.kind, "late"] += 1
                else:
                    what = f"{type(fault).__name__}: {fault}"
                    tally.faults.append(f"{case.kind}, {manner}: {what}")

    async def _send(self, case: Case, manner: Manner, tally: Tally) -> str:
        """Send a request; returns how it ended."""
        salt = secrets.token_hex(8) if manner.salted else ""
        request = Request(case.prompt, case.sampling, cache_salt=salt)
        stream, heard = self._client.send(request, manner.deadline_s), Heard(case)
        try:
            async with asyncio.timeout(manner.leaves_at_s) as leaving, aclosing(stream):
                return await self._read(stream, manner, heard, tally)
        except TimeoutError:
            if leaving.expired():
                return "cancelled"
            raise Fault(f"{heard}, and nothing more for {SILENCE_S:g} s") from None

    async def _read(
        self, stream: AsyncIterator[Delta], manner: Manner, heard: Heard, tally: Tally
    ) -> str:
        stalled = False
        while delta := await asyncio.wait_for(anext(stream, None), SILENCE_S):
            heard.take(delta)
            if manner.leaves_after is not None and heard.num_tokens > manner.leaves_after:
                return "cancelled"
            if manner.stalls_at is not None and not stalled and heard.num_tokens > manner.stalls_at:
                stalled = True
                await self._stall(manner.stall_s)
        heard.check_end()
        tally.num_tokens += heard.num_tokens
        if stalled:
            return "stalled"
        if heard.num_messages > 1:
            tally.pauses_s.append(heard.longest_s)
        return "finished"

    async def _stall(self, length_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(length_s):
                await self._calm.wait()
