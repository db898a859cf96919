"""What the generator's deltas become: one answer, or a stream of its parts."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from services.gateway.api import Delta, Usage
from services.gateway.http.dialects import (
    JSON,
    Dialect,
    Envelope,
    Transcript,
    choice,
    usage_of,
)

Deltas = AsyncGenerator[tuple[int, Delta], None]
"""With the number of the prompt that they belong to; closing it cancels them all."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How to say it, and what was asked to be told."""

    dialect: Dialect
    envelope: Envelope
    num_prompts: int
    with_token_ids: bool
    with_usage: bool
    """In a stream: a part of its own for the usage; one answer always has it."""

    async def whole(self, deltas: Deltas) -> JSON:
        """All deltas as one answer."""
        transcripts = [Transcript() for _ in range(self.num_prompts)]
        usages: list[Usage] = []
        async with aclosing(deltas):
            async for index, delta in deltas:
                transcripts[index].add(delta)
                if delta.usage is not None:
                    usages.append(delta.usage)
        choices = [self._said(index, told) for index, told in enumerate(transcripts)]
        answer = self.envelope.around(self.dialect.kind, choices)
        return {**answer, "usage": usage_of(usages)}

    async def parts(self, deltas: Deltas) -> AsyncGenerator[JSON, None]:
        """Each delta as a part of the answer, as it comes."""
        usages: list[Usage] = []
        opening = self.dialect.opening()
        async with aclosing(deltas):
            async for index, delta in deltas:
                if opening is not None:
                    yield self._part([choice(index, opening, None, self._ids(()))])
                    opening = None
                content = self.dialect.gained(delta.text)
                yield self._part([choice(index, content, delta, self._ids(delta.token_ids))])
                if delta.usage is not None:
                    usages.append(delta.usage)
        if self.with_usage:
            yield {**self._part([]), "usage": usage_of(usages)}

    def _said(self, index: int, told: Transcript) -> JSON:
        return choice(index, self.dialect.said(told.text), told.last, self._ids(told.token_ids))

    def _part(self, choices: list[JSON]) -> JSON:
        part = self.envelope.around(self.dialect.chunk_kind, choices)
        return {**part, "usage": None} if self.with_usage else part

    def _ids(self, token_ids: list[int] | tuple[int, ...]) -> list[int] | None:
        return list(token_ids) if self.with_token_ids else None
