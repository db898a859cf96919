"""/v1/embeddings, as OpenAI defines it."""

import base64
import struct
from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.api import Embedding, EmbeddingRequest
from services.gateway.chat.prompts import PROMPT
from services.gateway.http.bodies.fields import Inputs, TruncatedBody
from services.gateway.http.bodies.unknown_fields import OF_PROMPTS

AT_ONCE = 64
"""Inputs of one body that wait or run at a time: the rest does not fill the queue."""


class EmbeddingBody(TruncatedBody):
    refused = OF_PROMPTS
    default_side = "right"

    input: Inputs
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool | None = None

    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None

    @property
    def names(self) -> dict[str, str]:
        return {PROMPT: "input"}

    def requests(self, request_id: str, timeout_s: float | None = None) -> list[EmbeddingRequest]:
        """One request for each input, in order."""
        is_one = len(self.input) == 1
        return [
            EmbeddingRequest(
                prompt,
                request_id if is_one else f"{request_id}-{index}",
                self.model or "",
                self.dimensions,
                priority=self.priority or 0,
                cache_salt=self.cache_salt or "",
                timeout_s=timeout_s,
                add_special_tokens=self.add_special_tokens is not False,
                truncation=self.truncation,
                is_further=index > 0,
            )
            for index, prompt in enumerate(self.input)
        ]

    def answer(self, embeddings: list[Embedding], model: str) -> dict[str, Any]:
        num_tokens = sum(each.usage.num_prompt_tokens for each in embeddings)
        encode = _base64 if self.encoding_format == "base64" else list
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": encode(each.values)}
                for index, each in enumerate(embeddings)
            ],
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


def _base64(values: tuple[float, ...]) -> str:
    """Little-endian fp32."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
