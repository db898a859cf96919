"""Chaos: things happen to a loaded system, and nobody but the clock may notice.

After each event the laws are checked; every now and then the load pauses, and nothing may be left.
"""

import asyncio
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire.client import AsyncClient
from tests.chaos.load import Case, Tally, User, cases, undisturbed
from tests.chaos.schedule import USUAL, Event, schedule
from tests.chaos.system import System
from tests.e2e.deployment import serving

NUM_USERS = 12
CALM_EVERY = 10
"""Events between two pauses of the load."""

QUIET_LIMIT_S = 120.0
ARGS = ("--prefill", "2", "--decode", "3", "--pool-memory", "96MiB")


@dataclass
class Report:
    seed: int
    tally: Tally = field(default_factory=Tally)
    events: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        tally = self.tally
        pauses = sorted(tally.pauses_s) or [0.0]
        p99 = pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))]
        happened = ", ".join(f"{number} {kind}" for kind, number in sorted(self.kinds.items()))
        lines = [
            f"seed {self.seed}: {len(self.events)} events ({happened})",
            f"requests: {tally.num_finished} finished as undisturbed ({tally.num_tokens} tokens), "
            f"{tally.num_cancelled} cancelled, {tally.num_late} past their deadline",
            f"longest pause of a stream: p50 {1000 * statistics.median(pauses):.0f} ms, "
            f"p99 {1000 * p99:.0f} ms, max {1000 * pauses[-1]:.0f} ms",
            f"faults: {len(tally.faults)}",
            *tally.faults[:20],
        ]
        if tally.faults:
            lines += ["what happened:", *self.events]
        return "\n".join(lines)


class Chaos:
    def __init__(self, client: AsyncClient, system: System, known: Sequence[Case]) -> None:
        self._client = client
        self._system = system
        self._known = known
        self._over = asyncio.Event()
        self._calm = asyncio.Event()

    async def run(self, report: Report, events: Sequence[str], duration_s: float) -> None:
        """Faults are noted in the report; the first one ends the torment."""
        users = [
            asyncio.create_task(
                User(number, report.seed, self._client, self._known).run(
                    self._over, self._calm, report.tally
                )
            )
            for number in range(NUM_USERS)
        ]
        try:
            await self._torment(report, events, duration_s)
            self._over.set()
            await asyncio.wait_for(asyncio.gather(*users), QUIET_LIMIT_S)
            await self._settle()
        except (AssertionError, TimeoutError) as error:
            report.tally.faults.append(f"{type(error).__name__}: {error}")
        finally:
            for user in users:
                user.cancel()

    async def _torment(self, report: Report, kinds: Sequence[str], duration_s: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for event in schedule(report.seed, kinds):
            await asyncio.sleep(event.pause_s)
            if loop.time() - began > duration_s or report.tally.faults:
                return
            await self._one(report, event, loop.time() - began)
            if len(report.events) % CALM_EVERY == 0:
                await self._pause()

    async def _one(self, report: Report, event: Event, at_s: float) -> None:
        report.events.append(f"{at_s:7.1f} s  {event}")
        try:
            report.events[-1] += f" hit {await self._system.suffer(event)}"
        except TimeoutError as error:
            raise TimeoutError(f"nobody came back to {event.kind}") from error
        report.kinds[event.kind] += 1
        await self._system.until_clean()

    async def _pause(self) -> None:
        """Let what runs end; then nothing is held."""
        self._calm.set()
        await self._settle()
        self._calm.clear()

    async def _settle(self) -> None:
        try:
            await self._system.until_empty()
        except TimeoutError as error:
            raise TimeoutError("blocks are still held, and nobody asks for anything") from error
        await self._system.until_clean()


async def unleash(
    directory: Path, seed: int, duration_s: float, kinds: Sequence[str] = USUAL
) -> Report:
    """Start a system, see what it says undisturbed, then torment it for so long."""
    report = Report(seed)
    with serving("embedded", directory, *ARGS, num_gateways=2) as deployment:
        async with AsyncClient(deployment.address) as client:
            known = await undisturbed(client, cases(seed))
            system = System(deployment, client)
            try:
                await Chaos(client, system, known).run(report, kinds, duration_s)
            finally:
                system.close()
    return report


def in_a_temporary_directory(seed: int, duration_s: float, kinds: Sequence[str]) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(unleash(Path(folder), seed, duration_s, kinds))
