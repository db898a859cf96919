"""Turns the generator's deltas into one message, or into the events of a stream."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

from quire.types import Usage
from services.gateway.http.answering.answer import Deltas
from services.gateway.http.answering.formats import metrics_json, retained_json
from services.gateway.http.answering.logprobs import JSON
from services.gateway.http.bodies.tools import arguments_of
from services.gateway.http.failures import anthropic_error, error_body
from services.gateway.http.messages_api.body import MessagesBody
from services.gateway.output.delta import Delta
from services.gateway.output.parser.parts import CallArguments, CallStart, Content, Reasoning
from services.protocol.ticket import FinishReason


class ContentBlocks:
    """Collects the parts of one message as blocks. Every method yields events."""

    def __init__(self) -> None:
        self.blocks: list[JSON] = []
        self._is_open = False
        self._texts: list[str] = []
        """The text of the open block so far."""

    def add(self, delta: Delta) -> Iterator[JSON]:
        for part in delta.message_parts:
            match part:
                case Content(text):
                    yield from self._text("text", text, {})
                case Reasoning(text):
                    yield from self._text("thinking", text, {"signature": ""})
                case CallStart(_, call_id, name):
                    yield from self._begin("tool_use", {"id": call_id, "name": name, "input": {}})
                case CallArguments(_, text):
                    yield self._delta("input_json_delta", "partial_json", text)

    def end(self) -> Iterator[JSON]:
        """The open block is whole, or cut."""
        if not self._is_open:
            return
        self._is_open = False
        block, text = self.blocks[-1], "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = arguments_of(text, may_be_cut=True)
        else:
            block[block["type"]] = text
        yield self._event("content_block_stop")

    def _text(self, kind: str, text: str, more: JSON) -> Iterator[JSON]:
        if not text:
            return
        if not self._is_open or self.blocks[-1]["type"] != kind:
            yield from self._begin(kind, {kind: "", **more})
        yield self._delta(f"{kind}_delta", kind, text)

    def _begin(self, kind: str, fields: JSON) -> Iterator[JSON]:
        yield from self.end()
        self._texts.clear()
        self._is_open = True
        self.blocks.append({"type": kind, **fields})
        yield self._event("content_block_start", content_block=dict(self.blocks[-1]))

    def _delta(self, kind: str, name: str, text: str) -> JSON:
        self._texts.append(text)
        return self._event("content_block_delta", delta={"type": kind, name: text})

    def _event(self, kind: str, **fields: Any) -> JSON:
        return {"type": kind, "index": len(self.blocks) - 1, **fields}


class MessageAnswer:
    """Formats the answer to one request. `model` is known once the first delta is there."""

    is_named = True
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, body: MessagesBody, request_id: str, model: Callable[[], str]) -> None:
        self._max_tokens = body.max_tokens
        self._request_id = request_id
        self._model = model
        self._blocks = ContentBlocks()
        self._usage = Usage(0, None, 0, 0.0, 0)
        self._last: Delta | None = None

    async def whole(self, deltas: Deltas) -> JSON:
        """All deltas as one message."""
        async with aclosing(self.parts(deltas)) as events:
            async for _ in events:
                pass
        return {**self._message(), **metrics_json(self._usage)}

    async def parts(self, deltas: Deltas) -> AsyncGenerator[JSON, None]:
        """Yields the events of a stream."""
        async with aclosing(deltas):
            async for _, delta in deltas:
                is_first, self._usage = self._last is None, delta.usage or self._usage
                if is_first:
                    yield {"type": "message_start", "message": self._message()}
                self._last = delta
                for event in self._blocks.add(delta):
                    yield event
        for event in self._blocks.end():
            yield event
        ending = {"type": "message_delta", "delta": self._ending(), "usage": self._usage_json()}
        yield {**ending, **metrics_json(self._usage)}
        yield {"type": "message_stop"}

    def error_event(self, error: Exception) -> JSON:
        """The last event of a stream that failed."""
        return error_body(error, partial(anthropic_error, self._request_id))

    def _message(self) -> JSON:
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model(),
            "content": list(self._blocks.blocks),
            **self._ending(),
            "usage": self._usage_json(),
        }

    def _ending(self) -> JSON:
        """Why the message ended, which is null at its beginning."""
        last, sequence = self._last, None
        if last is None:
            reason = None
        elif last.finish_reason is FinishReason.LENGTH:
            is_limit = self._usage.num_generated_tokens >= self._max_tokens
            reason = "max_tokens" if is_limit else "model_context_window_exceeded"
        elif last.ends_with_calls:
            reason = "tool_use"
        elif isinstance(last.stopped_by, str):
            reason, sequence = "stop_sequence", last.stopped_by
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage_json(self) -> JSON:
        """The input's tokens are in three numbers: those that the prefix cache had, those that were
        computed into retained blocks, and all others."""
        usage = self._usage
        num_cached, retained = usage.num_cached_tokens or 0, usage.retained
        num_retained = max((each.num_tokens for each in retained), default=0)
        num_created = min(usage.num_written_tokens or 0, num_retained)
        return {
            "input_tokens": usage.num_prompt_tokens - num_cached - num_created,
            "cache_creation_input_tokens": num_created,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage.num_generated_tokens,
            **({"retained": list(map(retained_json, retained))} if retained else {}),
        }
