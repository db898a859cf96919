"""Quire: LLM serving with prefill and decode on separate workers that share one paged KV cache.

from quire import Client

with Client() as client:
    for delta in client.generate("Why is the sky blue?"):
        print(delta.text, end="", flush=True)
"""

from typing import TYPE_CHECKING, Any

from quire.async_client import AsyncClient
from quire.client import Client
from quire.connections import Tls
from quire.errors import (
    BadTls,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Overloaded,
    QuireError,
    ServerError,
    Unavailable,
    Unreachable,
)
from quire.types import (
    Candidate,
    ChatMessage,
    Choice,
    Completion,
    Delta,
    Embedding,
    LoRARequest,
    Sampling,
    StructuredOutput,
    TokenLogprobs,
    Usage,
)

if TYPE_CHECKING:
    from services.offline.llm import LLM as LLM

SamplingParams = Sampling
"""vLLM's name of `Sampling`."""
StructuredOutputsParams = StructuredOutput
"""vLLM's name of `StructuredOutput`."""


def __getattr__(name: str) -> Any:
    """Import `LLM` when it is first used: it brings PyTorch, which clients do not have."""
    if name == "LLM":
        from services.offline.llm import LLM as LLM

        return LLM
    raise AttributeError(f"module 'quire' has no attribute {name!r}")


__all__ = [
    "AsyncClient",
    "BadTls",
    "Candidate",
    "ChatMessage",
    "Choice",
    "Client",
    "Completion",
    "Conflict",
    "DeadlineExceeded",
    "Delta",
    "Embedding",
    "InvalidRequest",
    "LoRARequest",
    "NotAllowed",
    "NotFound",
    "Overloaded",
    "QuireError",
    "Sampling",
    "SamplingParams",
    "ServerError",
    "StructuredOutput",
    "StructuredOutputsParams",
    "Tls",
    "TokenLogprobs",
    "Unavailable",
    "Unreachable",
    "Usage",
]
