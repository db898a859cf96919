"""Turns the generator's deltas into one response object, or into the events of a stream."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from quire.types import Usage
from services.gateway.http.answering.answer import Deltas
from services.gateway.http.answering.formats import metrics_json, retained_json
from services.gateway.http.answering.logprobs import JSON
from services.gateway.http.answering.sending import COMMENT
from services.gateway.http.failures import error_body
from services.gateway.http.responses_api.body import ResponsesBody
from services.gateway.http.responses_api.output import OutputItems
from services.gateway.output.delta import Delta
from services.protocol.ticket import FinishReason


class ResponseAnswer:
    """Formats the answer to one request: the items of one message. `model` is known once the first
    delta is there."""

    is_named = True
    ping = COMMENT

    def __init__(self, body: ResponsesBody, request_id: str, model: Callable[[], str]) -> None:
        self._body = body
        self._model = model
        self._id = f"resp_{request_id}"
        self._items = OutputItems(request_id)
        self._created_unix_s = int(time.time())
        self._num_events = 0

    async def whole(self, deltas: Deltas) -> JSON:
        """All deltas as one response, which the last event of a stream carries."""
        response: JSON = {}
        async with aclosing(self.parts(deltas)) as events:
            async for event in events:
                response = event.get("response", response)
        return response

    async def parts(self, deltas: Deltas) -> AsyncGenerator[JSON, None]:
        """Yields the events of a stream."""
        last, usage = None, None
        async with aclosing(deltas):
            async for _, delta in deltas:
                if last is None:
                    response = self._response("in_progress")
                    yield self._event("response.created", {"response": response})
                    yield self._event("response.in_progress", {"response": response})
                last, usage = delta, delta.usage or usage
                for event in self._items.add(delta):
                    yield self._event(*event)
        status = _status(last)
        is_cut = last is not None and last.is_in_call
        for event in self._items.finish("incomplete" if is_cut else status):
            yield self._event(*event)
        yield self._event(f"response.{status}", {"response": self._response(status, usage, last)})

    def error_event(self, error: Exception) -> JSON:
        """The last event of a stream that failed."""
        failed = error_body(error)  # OpenAI's clients raise what is in the field `error`
        return self._event("error", {**failed["error"], **failed})

    def _event(self, kind: str, fields: JSON) -> JSON:
        event = {**fields, "type": kind, "sequence_number": self._num_events}
        self._num_events += 1
        return event

    def _response(self, status: str, usage: Usage | None = None, last: Delta | None = None) -> JSON:
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
            "output": list(self._items.items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": {"format": body.format_json},
            "tool_choice": body.chosen_json,
            "tools": [tool.model_dump() for tool in body.functions],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": usage and last and _usage_json(usage, last.num_reasoning_tokens),
            "user": body.user,
            **metrics_json(usage),
        }


def _status(last: Delta | None) -> str:
    is_cut = last is not None and last.finish_reason is FinishReason.LENGTH
    return "incomplete" if is_cut else "completed"


def _usage_json(usage: Usage, num_reasoning_tokens: int) -> JSON:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens or 0,
            "cache_write_tokens": usage.num_written_tokens or 0,
        },
        "output_tokens": usage.num_generated_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
        **({"retained": list(map(retained_json, usage.retained))} if usage.retained else {}),
    }
