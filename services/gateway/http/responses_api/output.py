"""The items of a response's output, one after another, with the events of each."""

from collections.abc import Iterator
from typing import Any

from services.gateway.http.answering.logprobs import JSON, chat_logprobs
from services.gateway.output.delta import Delta
from services.gateway.output.parser.parts import CallArguments, CallStart, Content, Reasoning


class OutputItems:
    """Collects the parts of one message as items. Every method yields events: (type, fields)."""

    def __init__(self, response_id: str) -> None:
        self.items: list[JSON] = []
        self._response_id = response_id
        self._is_open = False
        self._texts: list[str] = []
        """Of the item that is open: what it says so far."""
        self._logprobs: list[JSON] = []
        """Of tokens that are no part yet, such as the beginning of what may become a call."""

    def add(self, delta: Delta) -> Iterator[tuple[str, JSON]]:
        """The parts of a delta; if the message is not parsed, its text. Logprobs are of all its
        tokens, and stand with the first text. Those of a delta without parts stand with the next
        delta's."""
        parts = delta.message_parts
        logprobs = self._logprobs + chat_logprobs(delta.logprobs)["content"]
        self._logprobs = [] if parts else logprobs
        for part in parts:
            match part:
                case Content(text):
                    yield from self._begin("message")
                    if text or logprobs:
                        yield from self._text(text, logprobs)
                    logprobs = []
                case Reasoning(text):
                    yield from self._begin("reasoning")
                    yield from self._text(text, None)
                case CallStart(_, call_id, name):
                    yield from self.end("completed")
                    yield from self._begin("function_call", call_id, name)
                case CallArguments(_, text):
                    self._texts.append(text)
                    yield "response.function_call_arguments.delta", {**self._place, "delta": text}

    def end(self, status: str) -> Iterator[tuple[str, JSON]]:
        """The item that is open is whole, or cut."""
        if not self._is_open:
            return
        self._is_open = False
        item, place, text = self.items[-1], self._place, "".join(self._texts)
        self._texts.clear()
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            said = {"arguments": text, "name": item["name"]}
            yield "response.function_call_arguments.done", {**place, **said}
        else:
            (part,) = item["content"]
            part["text"], place["content_index"] = text, 0
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield f"response.{part['type']}.done", {**place, **said}
            yield "response.content_part.done", {**place, "part": part}
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}

    def finish(self, status: str) -> Iterator[tuple[str, JSON]]:
        if not self.items:
            yield from self._begin("message")
        if self._logprobs and self._is_open and self.items[-1]["type"] == "message":
            yield from self._text("", self._logprobs)
        yield from self.end(status)

    @property
    def _place(self) -> JSON:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _begin(self, kind: str, call_id: str = "", name: str = "") -> Iterator[tuple[str, JSON]]:
        """Begin an item, unless one of this kind is open."""
        if self._is_open and self.items[-1]["type"] == kind:
            return
        yield from self.end("completed")
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: JSON = {
            "id": f"{prefix}_{self._response_id}_{len(self.items)}",
            "type": kind,
            "status": "in_progress",
        }
        part: JSON = {}
        if kind == "message":
            item["role"] = "assistant"
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        elif kind == "reasoning":
            item["summary"] = []
            part = {"type": "reasoning_text", "text": ""}
        else:
            item |= {"call_id": call_id, "name": name, "arguments": ""}
        shown = {**item, "content": []} if part else dict(item)
        self._is_open = True
        self.items.append({**item, "content": [part]} if part else item)
        place = self._place
        yield "response.output_item.added", {"output_index": place["output_index"], "item": shown}
        if part:
            began = {**part, "logprobs": []} if "logprobs" in part else dict(part)
            yield "response.content_part.added", {**place, "content_index": 0, "part": began}

    def _text(self, text: str, logprobs: list[JSON] | None) -> Iterator[tuple[str, JSON]]:
        (part,) = self.items[-1]["content"]
        self._texts.append(text)
        fields: dict[str, Any] = {**self._place, "content_index": 0, "delta": text}
        if logprobs is not None:
            part["logprobs"] += logprobs
            fields["logprobs"] = logprobs
        yield f"response.{part['type']}.delta", fields
