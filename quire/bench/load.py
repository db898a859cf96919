"""Sends the requests of a workload and records what comes.

The open loop sends each session when it is due, however many are running: a slow server gets no
fewer requests. The closed loop keeps a number of sessions running.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from quire.bench.record import Record
from quire.bench.target import Call, RequestFailed, Target
from quire.bench.workload import Session
from quire.types import ChatMessage, Prompt


@dataclass(slots=True)
class Load:
    """One run against `target`. Its counters may be read while it runs."""

    target: Target
    as_chat: bool = False
    """Whether prompts are messages of a user, and the turns of a session one conversation."""
    limit_s: float | None = None
    """The longest duration of the run. The requests that still run then are cut off."""
    records: list[Record] = field(default_factory=list)
    num_running: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    began: float = field(default_factory=time.perf_counter)

    @property
    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.perf_counter() - self.began

    async def open_loop(self, sessions: Iterable[Session]) -> float:
        """Run sessions at their times; returns the duration of the run."""
        self.began = time.perf_counter()
        async with self._limit(), asyncio.TaskGroup() as running:
            for session in sessions:
                await asyncio.sleep(max(0.0, session.due - self.now))
                running.create_task(self.send(session, session.due))
        return self.now

    async def closed_loop(
        self, sessions: Iterator[Session], concurrency: int, ramp_s: float
    ) -> float:
        """Keep `concurrency` sessions running, the last of them from `ramp_s` seconds on; returns
        the duration of the run."""
        self.began = time.perf_counter()

        async def client(index: int) -> None:
            await asyncio.sleep(ramp_s * index / concurrency)
            for session in sessions:
                await self.send(session)

        async with self._limit(), asyncio.TaskGroup() as running:
            for index in range(concurrency):
                running.create_task(client(index))
        return self.now

    @asynccontextmanager
    async def _limit(self) -> AsyncIterator[None]:
        """End what runs inside at the limit of the run."""
        try:
            async with asyncio.timeout(self.limit_s) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise

    async def send(self, session: Session, due: float | None = None) -> None:
        """Send the turns. `due` is when the first one had to be sent, if a schedule says so."""
        turns: list[ChatMessage] = []
        for turn in session.turns:
            prompt: Prompt = turn.prompt()
            if self.as_chat:
                turns.append(ChatMessage("user", str(prompt)))
                prompt = list(turns)
            sent = self.now
            record = Record(sent if due is None else due, sent)
            self.records.append(record)
            answer = await self._observe(Call(prompt, turn.num_tokens), record)
            if record.error:
                break
            turns.append(ChatMessage("assistant", answer))
            due = None

    async def _observe(self, call: Call, record: Record) -> str:
        """Send a request and record what comes; returns the answer's text."""
        texts: list[str] = []
        self.num_running += 1
        try:
            async with aclosing(self.target.stream(call)) as chunks:
                async for chunk in chunks:
                    if chunk.num_tokens:
                        record.arrivals.append(self.now)
                        record.counts.append(chunk.num_tokens)
                        self.num_tokens += chunk.num_tokens
                        texts.append(chunk.text)
                    if chunk.num_prompt_tokens is not None:
                        record.num_prompt_tokens = chunk.num_prompt_tokens
                        record.num_reported = chunk.num_output_tokens
            if not record.arrivals:
                raise RequestFailed("the answer has no tokens", "no tokens")
        except asyncio.CancelledError:
            record.is_cut, record.failed_at = True, self.now
            raise
        except RequestFailed as error:
            record.error, record.message, record.failed_at = error.kind, str(error), self.now
            self.num_failed += 1
        finally:
            self.num_running -= 1
        self.num_done += 1
        return "".join(texts)
