"""Users of the deployment: each sends one request after another and knows the expected output."""

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
from tests.chaos.received import ReceivedStream, Violation
from tests.chaos.report import Tally

_DEADLINE_ERRORS = (DeadlineExceeded, Overloaded)
"""The errors with which a request with a deadline may end."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a user treats a request.

    `cancel_after`, in tokens, and `cancel_at_s`: when it cancels; None: never. `stall_at`: the
    token after which it reads nothing for `stall_s`. `salted`: the request has its own cache salt.
    `explains`: it asks for figures, and for the story of the request while it runs.
    """

    deadline_s: float | None = None
    cancel_after: int | None = None
    cancel_at_s: float | None = None
    stall_at: int | None = None
    stall_s: float = 0.0
    salted: bool = False
    explains: bool = False

    @classmethod
    def draw(cls, chance: random.Random, case: Case, slow: bool) -> "Behaviour":
        choice, part, seconds = chance.random(), chance.randrange(case.num_tokens), chance.random()
        salted = chance.random() < 0.2
        if slow:
            cancel_after = part if choice < 0.3 else None
            return cls(stall_at=part // 4, stall_s=2 + 7 * seconds, cancel_after=cancel_after)
        if choice < 0.15 and case.is_delivered_whole:
            return cls(cancel_at_s=2 * seconds, salted=salted)
        if choice < 0.15:
            return cls(cancel_after=part, salted=salted)
        if choice < 0.22:
            return cls(cancel_at_s=0.5 * seconds, salted=salted)
        if choice < 0.30:
            return cls(stall_at=part, stall_s=3 * seconds, salted=salted)
        if choice < 0.40:
            return cls(deadline_s=0.1 + 4 * seconds, salted=salted)
        return cls(salted=salted, explains=choice < 0.60)


class User:
    """`slow`: it stalls in each request. `paused`: while it is set, the user finishes its request
    without stalls and sends no other."""

    def __init__(
        self,
        seed: str,
        client: AsyncClient,
        cases: Sequence[Case],
        paused: asyncio.Event,
        slow: bool,
    ) -> None:
        self._chance = random.Random(seed)
        self._client = client
        self._cases = cases
        self._paused = paused
        self._slow = slow

    async def run(self, until: asyncio.Event, tally: Tally) -> None:
        """Send one request after another until `until` is set."""
        while not until.is_set():
            if self._paused.is_set():
                await asyncio.sleep(0.05)
                continue
            case = self._chance.choice(self._cases)
            behaviour = Behaviour.draw(self._chance, case, self._slow)
            try:
                tally.ended[case.kind, await self._send(case, behaviour, tally)] += 1
            except (Violation, QuireError) as error:
                if behaviour.deadline_s is not None and isinstance(error, _DEADLINE_ERRORS):
                    tally.ended[case.kind, "past_deadline"] += 1
                else:
                    what = f"{type(error).__name__}: {error}"
                    tally.violations.append(f"{case.kind}, {behaviour}: {what}")

    async def _send(self, case: Case, behaviour: Behaviour, tally: Tally) -> str:
        """Send a request; returns how it ended."""
        salt = secrets.token_hex(8) if behaviour.salted else ""
        name = secrets.token_hex(8) if behaviour.explains else ""
        request = Request(
            case.prompt,
            case.sampling,
            request_id=name,
            cache_salt=salt,
            include_metrics=behaviour.explains,
        )
        stream, received = self._client.send(request, behaviour.deadline_s), ReceivedStream(case)
        try:
            async with asyncio.timeout(behaviour.cancel_at_s) as cancelling, aclosing(stream):
                return await self._read(stream, behaviour, received, tally, name)
        except TimeoutError:
            if cancelling.expired():
                return "cancelled"
            raise Violation(f"{received}, and nothing more for {SILENCE_S:g} s") from None

    async def _read(
        self,
        stream: AsyncIterator[Delta],
        behaviour: Behaviour,
        received: ReceivedStream,
        tally: Tally,
        name: str,
    ) -> str:
        stalled = False
        while delta := await asyncio.wait_for(anext(stream, None), SILENCE_S):
            received.add(delta)
            if behaviour.explains and received.num_messages == 1:
                with suppress(QuireError):  # its gateway has died
                    tally.num_explained += bool(await self._client.explain(name))
            if behaviour.cancel_after is not None and received.num_tokens > behaviour.cancel_after:
                return "cancelled"
            stall_at = behaviour.stall_at
            if stall_at is not None and not stalled and received.num_tokens > stall_at:
                stalled = True
                await self._stall(behaviour.stall_s)
        received.check_end()
        tally.num_tokens += received.num_tokens
        if stalled:
            return "stalled"
        if received.num_messages > 1:
            tally.pauses_s.append(received.longest_pause_s)
        return "finished"

    async def _stall(self, length_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(length_s):
                await self._paused.wait()
