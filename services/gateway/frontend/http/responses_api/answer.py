"""Turns the generator's deltas into one response object, or into the events of a stream."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from quire.types import Usage
from services.gateway.frontend.api import Delta
from services.gateway.frontend.http.answers import Deltas
from services.gateway.frontend.http.failures import error_body
from services.gateway.frontend.http.formats import Transcript
from services.gateway.frontend.http.logprobs import JSON, chat_logprobs
from services.gateway.frontend.http.responses_api.body import ResponsesBody
from services.protocol.ticket import FinishReason


class ResponseAnswer:
    """Formats the answer to one request. Its output is one message with one text. `model`: known
    once the first delta is there."""

    def __init__(self, body: ResponsesBody, request_id: str, model: Callable[[], str]) -> None:
        self._body = body
        self._model = model
        self._id = f"resp_{request_id}"
        self._item_id = f"msg_{request_id}"
        self._created_unix_s = int(time.time())
        self._num_events = 0

    async def whole(self, deltas: Deltas) -> JSON:
        """All deltas as one response."""
        transcript, usage = Transcript(), None
        async with aclosing(deltas):
            async for _, delta in deltas:
                transcript.add(delta)
                usage = delta.usage or usage
        return self._ended(transcript, usage)

    async def parts(self, deltas: Deltas) -> AsyncGenerator[JSON, None]:
        """Yields the events of a stream. An error before the first delta is raised; a later one
        is the last event."""
        transcript, usage = Transcript(), None
        async with aclosing(deltas):
            try:
                async for _, delta in deltas:
                    if transcript.last is None:
                        for event in self._openings():
                            yield event
                    transcript.add(delta)
                    usage = delta.usage or usage
                    if delta.text or delta.logprobs:
                        yield self._text_event("delta", delta.text, delta)
            except Exception as error:
                if transcript.last is None:
                    raise
                failed = error_body(error)  # OpenAI's clients raise what is in the field `error`
                yield self._event("error", **failed["error"], **failed)
                return
        for event in self._closings(transcript, usage):
            yield event

    def _openings(self) -> list[JSON]:
        response = self._response("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._item_event("added", self._item("in_progress", [])),
            self._part_event("added", self._part("", Transcript())),
        ]

    def _closings(self, transcript: Transcript, usage: Usage | None) -> list[JSON]:
        response = self._ended(transcript, usage)
        (item,) = response["output"]
        (part,) = item["content"]
        return [
            self._event(
                "response.output_text.done",
                **self._place,
                text=part["text"],
                logprobs=part["logprobs"],
            ),
            self._part_event("done", part),
            self._item_event("done", item),
            self._event(f"response.{response['status']}", response=response),
        ]

    @property
    def _place(self) -> JSON:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> JSON:
        event = {**fields, "type": kind, "sequence_number": self._num_events}
        self._num_events += 1
        return event

    def _text_event(self, kind: str, text: str, delta: Delta) -> JSON:
        logprobs = chat_logprobs(delta.logprobs)["content"]
        event = f"response.output_text.{kind}"
        return self._event(event, **self._place, delta=text, logprobs=logprobs)

    def _part_event(self, kind: str, part: JSON) -> JSON:
        return self._event(f"response.content_part.{kind}", **self._place, part=part)

    def _item_event(self, kind: str, item: JSON) -> JSON:
        return self._event(f"response.output_item.{kind}", output_index=0, item=item)

    def _part(self, text: str, transcript: Transcript) -> JSON:
        logprobs = chat_logprobs(transcript.logprobs)["content"]
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item(self, status: str, content: list[JSON]) -> JSON:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _ended(self, transcript: Transcript, usage: Usage | None) -> JSON:
        reason = transcript.last and transcript.last.finish_reason
        status = "incomplete" if reason is FinishReason.LENGTH else "completed"
        item = self._item(status, [self._part(transcript.text, transcript)])
        return self._response(status, [item], usage)

    def _response(self, status: str, output: list[JSON], usage: Usage | None = None) -> JSON:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_unix_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model(),
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": usage and _usage_json(usage),
            "user": body.user,
        }


def _usage_json(usage: Usage) -> JSON:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens or 0},
        "output_tokens": usage.num_generated_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
    }
