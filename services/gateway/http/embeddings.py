"""/v1/embeddings, as OpenAI defines it."""

import base64
import struct
from collections.abc import Sequence
from itertools import cycle
from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.api import Embedded, EmbeddingRequest
from services.gateway.chat.prompts import PROMPT
from services.gateway.http.bodies.fields import Inputs, TruncatedBody
from services.gateway.http.bodies.unknown_fields import OF_PROMPTS

AT_ONCE = 64
"""Inputs of one body that wait or run at a time: the rest does not fill the queue."""


class PooledBody(TruncatedBody):
    """The fields of every request for embeddings of texts."""

    refused = OF_PROMPTS
    default_side = "right"

    model: str | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None

    @property
    def names(self) -> dict[str, str]:
        return {PROMPT: "documents"}

    def inputs(self) -> tuple[Sequence[str], Sequence[str | tuple[int, ...]]]:
        """The texts to score with the others, one with all or pair by pair; and the others."""
        raise NotImplementedError

    def requests(
        self, request_id: str, timeout_s: float | None = None, *, in_pairs: bool = False
    ) -> list[EmbeddingRequest]:
        """One request for each input, or for each pair, in order."""
        left, right = self.inputs()
        pairs = zip(cycle(left), right, strict=False)
        inputs = list(pairs) if in_pairs else [(None, each) for each in (*left, *right)]
        return [
            EmbeddingRequest(
                prompt,
                request_id if len(inputs) == 1 else f"{request_id}-{index}",
                self.model or "",
                self.dimensions,
                query,
                priority=self.priority or 0,
                cache_salt=self.cache_salt or "",
                timeout_s=timeout_s,
                add_special_tokens=self.add_special_tokens is not False,
                truncation=self.truncation,
                is_further=index > 0,
            )
            for index, (query, prompt) in enumerate(inputs)
        ]


def usage_of(embeddings: Sequence[Embedded]) -> dict[str, int]:
    num_tokens = sum(each.usage.num_prompt_tokens for each in embeddings)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


class EmbeddingBody(PooledBody):
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None

    @property
    def names(self) -> dict[str, str]:
        return {PROMPT: "input"}

    def inputs(self) -> tuple[Sequence[str], Sequence[str | tuple[int, ...]]]:
        return (), self.input

    def answer(self, embeddings: list[Embedded], _answer_id: str, model: str) -> dict[str, Any]:
        encode = _base64 if self.encoding_format == "base64" else list
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": encode(each.values)}
                for index, each in enumerate(embeddings)
            ],
            "model": model,
            "usage": usage_of(embeddings),
        }


def _base64(values: tuple[float, ...]) -> str:
    """Little-endian fp32."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
