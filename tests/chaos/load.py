"""Users of a system to which things happen: each sends one request after another, and knows what
every one must say."""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from quire.client import AsyncClient
from quire.errors import DeadlineExceeded, Overloaded, QuireError
from quire.types import Prompt, Sampling

LIMIT_S = 90.0
"""A request that takes longer hangs."""

_SHARED = "The following is a long story about a small town by the sea. " * 6
_TOPICS = ("the harbour", "a storm", "two sisters", "the lighthouse", "an old dog", "the winter")


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and all that it says undisturbed."""

    name: str
    prompt: Prompt
    sampling: Sampling
    tokens: tuple[int, ...] = ()
    text: str = ""


def cases(seed: int) -> list[Case]:
    chance = random.Random(seed)
    made = []
    for number, topic in enumerate(_TOPICS * 3):
        greedy = Sampling(temperature=0.0, max_tokens=chance.randrange(20, 160), ignore_eos=True)
        sampled = replace(greedy, temperature=0.9, top_p=0.95, seed=chance.getrandbits(64))
        alone = f"{topic}, number {chance.randrange(1000)}: " * chance.randrange(1, 8)
        kinds = {
            "greedy": (alone, greedy),
            "sampled": (alone, sampled),
            "shared": (_SHARED + topic, greedy),
            "stop": (alone, replace(sampled, stop=("e" + chance.choice("drn"), "zz"))),
        }
        name = list(kinds)[number % len(kinds)]
        made.append(Case(name, *kinds[name]))
    return made


async def undisturbed(client: AsyncClient, asked: Sequence[Case]) -> list[Case]:
    """Each computed alone, before anything happens."""
    known = []
    for case in asked:
        answer = await client.complete(case.prompt, case.sampling, timeout_s=LIMIT_S)
        known.append(replace(case, tokens=answer.token_ids, text=answer.text))
    return known


@dataclass
class Tally:
    """`pauses_s`: of each finished stream, the longest from one token to the next; `faults` is what
    must not be."""

    num_finished: int = 0
    num_cancelled: int = 0
    num_late: int = 0
    num_tokens: int = 0
    pauses_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class User:
    def __init__(self, number: int, seed: int, client: AsyncClient, known: Sequence[Case]) -> None:
        self._chance = random.Random(f"{seed} {number}")
        self._client = client
        self._known = known

    async def run(self, until: asyncio.Event, calm: asyncio.Event, tally: Tally) -> None:
        """One request after another while `calm` is not set, and until the end."""
        while not until.is_set():
            if calm.is_set():
                await asyncio.sleep(0.05)
                continue
            case, fate = self._chance.choice(self._known), self._chance.random()
            stop_after = self._chance.randrange(1, 40) if fate < 0.15 else None
            deadline_s = self._chance.uniform(0.1, 4.0) if fate > 0.9 else None
            try:
                async with asyncio.timeout(LIMIT_S):
                    await self._send(case, stop_after, deadline_s, tally)
            except TimeoutError:
                tally.faults.append(f"hang: {case.name}, {LIMIT_S:g} s")
            except (DeadlineExceeded, Overloaded) as error:
                tally.num_late += 1
                if deadline_s is None:
                    tally.faults.append(f"error: {case.name}: {error.code}: {error}")
            except QuireError as error:
                tally.faults.append(f"error: {case.name}: {error.code}: {error}")

    async def _send(
        self, case: Case, stop_after: int | None, deadline_s: float | None, tally: Tally
    ) -> None:
        tokens: list[int] = []
        text, heard_at, longest_s = "", None, 0.0
        stream = self._client.generate(case.prompt, case.sampling, timeout_s=deadline_s)
        async with aclosing(stream):
            async for delta in stream:
                now = time.monotonic()
                longest_s = max(longest_s, now - (heard_at or now))
                heard_at = now
                tokens += delta.token_ids
                text += delta.text
                if tokens != list(case.tokens[: len(tokens)]) or not case.text.startswith(text):
                    at = next(
                        (i for i, t in enumerate(tokens) if case.tokens[i : i + 1] != (t,)), 0
                    )
                    tally.faults.append(f"wrong: {case.name}: other tokens from number {at} on")
                    return
                if stop_after is not None and len(tokens) > stop_after:
                    tally.num_cancelled += 1
                    return
        if tuple(tokens) != case.tokens or text != case.text:
            tally.faults.append(f"wrong: {case.name}: {len(tokens)} of {len(case.tokens)} tokens")
        tally.num_finished += 1
        tally.num_tokens += len(tokens)
        tally.pauses_s.append(longest_s)
