"""Turns the generator's deltas into one JSON answer, or into a stream of its parts."""

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from quire.types import Usage
from services.gateway.http.answering.formats import (
    CHAT_FORMAT,
    COMPLETION_FORMAT,
    AnswerFormat,
    choice_json,
    metrics_json,
    usage_json,
)
from services.gateway.http.answering.logprobs import (
    JSON,
    concatenate,
    echoed_logprobs,
    prompt_logprobs,
)
from services.gateway.http.answering.sending import COMMENT
from services.gateway.http.bodies.schema import ChatBody, CompletionBody
from services.gateway.http.failures import error_body
from services.gateway.output.delta import Delta, PositionLogprobs, PromptReport, joined
from services.gateway.output.parser.parts import Part, Reasoning
from services.protocol.ticket import FinishReason

Deltas = AsyncGenerator[tuple[int, Delta], None]
"""The deltas of all prompts, each with the number of its prompt. Closing the generator cancels all.
The choices of an answer are numbered prompt by prompt: first all choices of prompt 0, then all of
prompt 1, and so on."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Formats the answer to one HTTP request."""

    is_named: ClassVar[bool] = False
    ping: ClassVar[bytes] = COMMENT
    error_event = staticmethod(error_body)

    format: AnswerFormat
    body: CompletionBody | ChatBody
    """The request's body: which parts of an answer the client asked for."""
    request_id: str
    model: Callable[[], str]
    """Known once the first delta is there."""
    created_unix_s: int = field(default_factory=lambda: int(time.time()))

    async def whole(self, deltas: Deltas) -> JSON:
        """All deltas as one answer."""
        gained: defaultdict[int, list[Delta]] = defaultdict(list)
        prompts: dict[int, PromptReport] = {}
        usages: list[Usage] = []
        async with aclosing(deltas):
            async for number, delta in deltas:
                gained[self._index(number, delta)].append(delta)
                if delta.prompt is not None:
                    prompts[number] = delta.prompt
                if delta.usage is not None:
                    usages.append(delta.usage)
        whole = {
            index: joined(gained[index], prompts.get(index // self.body.num_choices))
            for index in sorted(gained)
        }
        choices = [
            self._choice(
                index,
                delta,
                self.format.whole(self._text(delta), self._message_parts(delta)),
                self._num_echoed(delta.prompt),
            )
            for index, delta in whole.items()
        ]
        answer = self._envelope(self.format.kind, choices)
        self._add_prompt_logprobs(answer, [delta.prompt for delta in whole.values()])
        return {**answer, "usage": self._usage(usages), **self._metrics(usages)}

    async def parts(self, deltas: Deltas) -> AsyncGenerator[JSON, None]:
        """Yields each delta as a part of the answer, as it comes."""
        usages: dict[int, Usage] = {}
        prompts: dict[int, PromptReport] = {}
        num_echoed: dict[int, int] = {}
        async with aclosing(deltas):
            async for number, delta in deltas:
                if not num_echoed:
                    for part in self._openings(delta.usage):
                        yield part
                if delta.prompt is not None:
                    prompts[number] = delta.prompt
                index = self._index(number, delta)
                prompt = None if index in num_echoed else prompts.get(number)
                if delta.prompt is not prompt:
                    delta = replace(delta, prompt=prompt)
                num_echoed.setdefault(index, self._num_echoed(prompt))
                if delta.usage is not None:
                    usages[number] = delta.usage
                choices = self._choices(index, delta, num_echoed[index])
                parts = [self._part([choice], usages.values()) for choice in choices]
                if parts and not self.body.include_usage:
                    parts[-1] |= self._metrics(usages.values())
                for part in parts:
                    yield part
        if self.body.include_usage:
            yield {
                **self._part([]),
                "usage": self._usage(usages.values()),
                **self._metrics(usages.values()),
            }

    def _envelope(self, kind: str, choices: list[JSON]) -> JSON:
        """The fields that all parts of the answer have in common, around `choices`."""
        return {
            "id": f"{self.format.id_prefix}-{self.request_id}",
            "object": kind,
            "created": self.created_unix_s,
            "model": self.model(),
            "choices": choices,
        }

    def _index(self, number: int, delta: Delta) -> int:
        return number * self.body.num_choices + delta.index

    def _openings(self, first: Usage | None) -> Iterator[JSON]:
        """The parts before the first delta: one for each choice. `first` is that delta's usage."""
        opening = self.format.opening
        if opening is None:
            return
        usages = () if first is None else (replace(first, num_generated_tokens=0),)
        for index in range(self.body.num_prompts * self.body.num_choices):
            yield self._part([choice_json(index, opening, None, self._ids([]), None)], usages)

    def _choices(self, index: int, gained: Delta, num_echoed: int) -> list[JSON]:
        """The choice in each part of a stream for a delta; none if the delta says nothing."""
        contents = self.format.deltas(self._text(gained), self._message_parts(gained))
        if not contents and not (
            gained.finish_reason
            or gained.logprobs
            or self.body.return_token_ids
            or self.body.running_usage
        ):
            return []
        *early, last = contents or [{"delta": {}}]
        ids = self._ids([])
        choices = [choice_json(index, content, None, ids, None) for content in early]
        return [*choices, self._choice(index, gained, last, num_echoed)]

    def _text(self, gained: Delta) -> str:
        """The generated text that the client gets, after the prompt's if it is echoed."""
        generated = "" if self.body.only_prompt else gained.text
        if gained.prompt is None or not self.body.echoes:
            return generated
        return gained.prompt.text + generated

    def _message_parts(self, gained: Delta) -> Sequence[Part] | None:
        if gained.parts is None or not self.body.without_reasoning:
            return gained.parts
        return [part for part in gained.parts if not isinstance(part, Reasoning)]

    def _choice(self, index: int, gained: Delta, content: JSON, num_echoed: int) -> JSON:
        """`content` has the fields of the choice for its text. `num_echoed` characters of that text
        are the prompt's."""
        echoed = gained.prompt if self.body.echoes else None
        if self.body.only_prompt:
            gained = _without_tokens(gained)
        logprobs = self._logprobs(echoed, gained.logprobs, num_echoed)
        return choice_json(index, content, gained, self._ids(gained.token_ids), logprobs)

    def _logprobs(
        self, echoed: PromptReport | None, tokens: Sequence[PositionLogprobs], num_echoed: int
    ) -> JSON | None:
        num_top = self.body.num_logprobs
        if num_top is None or (echoed is None and not tokens):
            return None
        logprobs = self.format.logprobs(tokens, num_echoed)
        return concatenate(echoed_logprobs(echoed, num_top), logprobs) if echoed else logprobs

    def _num_echoed(self, prompt: PromptReport | None) -> int:
        return len(prompt.text) if prompt is not None and self.body.echoes else 0

    def _add_prompt_logprobs(self, answer: JSON, prompts: Sequence[PromptReport | None]) -> None:
        """Adds the prompt logprobs where vLLM has them: in each choice of a text completion, at the
        top level of a chat completion."""
        num_top = self.body.prompt_logprobs
        if num_top is None:
            return
        places = answer["choices"] if self.format.prompt_logprobs_in_choice else [answer]
        made: dict[int, list[JSON | None]] = {}  # once for all choices of a prompt
        for place, prompt in zip(places, prompts, strict=False):  # a chat has only one place
            if prompt is not None and id(prompt) not in made:
                made[id(prompt)] = prompt_logprobs(prompt, num_top)
            place["prompt_logprobs"] = made[id(prompt)] if prompt is not None else None

    def _usage(self, usages: Iterable[Usage]) -> JSON:
        if self.body.only_prompt:
            usages = [replace(usage, num_generated_tokens=0) for usage in usages]
        return usage_json(usages)

    def _metrics(self, usages: Iterable[Usage]) -> JSON:
        """The figures, if the answer is to one prompt: several prompts are several requests."""
        return metrics_json(next(iter(usages), None)) if self.body.num_prompts == 1 else {}

    def _part(self, choices: list[JSON], usages: Iterable[Usage] = ()) -> JSON:
        part = self._envelope(self.format.chunk_kind, choices)
        if not self.body.include_usage:
            return part
        return {**part, "usage": self._usage(usages) if self.body.running_usage else None}

    def _ids(self, token_ids: Sequence[int]) -> list[int] | None:
        return list(token_ids) if self.body.return_token_ids else None


def _without_tokens(delta: Delta) -> Delta:
    """The delta as if no token was generated: the choice ends at its limit of 0 tokens."""
    reason = FinishReason.LENGTH if delta.finish_reason else None
    return replace(delta, token_ids=(), logprobs=(), finish_reason=reason, stopped_by=None)


COMPLETIONS: Mapping[str, tuple[type[CompletionBody | ChatBody], Callable[..., Answer]]] = {
    "/v1/completions": (CompletionBody, partial(Answer, COMPLETION_FORMAT)),
    "/v1/chat/completions": (ChatBody, partial(Answer, CHAT_FORMAT)),
}
"""The bodies of OpenAI's two endpoints, and what makes the answer to each."""
