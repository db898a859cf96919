"""Quire: LLM serving with prefill and decode on separate workers that share one paged KV cache.

from quire import Client

with Client() as client:
    for delta in client.generate("Why is the sky blue?"):
        print(delta.text, end="", flush=True)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    RequestMetrics,
    Sampling,
    StructuredOutput,
    TokenLogprobs,
    Usage,
)

if TYPE_CHECKING:
    from quire.async_client import AsyncClient
    from quire.client import Client
    from quire.connections import Tls
    from services.offline.llm import LLM as LLM

SamplingParams = Sampling
"""vLLM's name of `Sampling`."""
StructuredOutputsParams = StructuredOutput
"""vLLM's name of `StructuredOutput`."""

_IMPORTED_WHEN_USED = {
    "AsyncClient": "quire.async_client",
    "Client": "quire.client",
    "Tls": "quire.connections",
    "LLM": "services.offline.llm",
}
"""The modules of names that need large libraries: the clients need gRPC, and commands such as
`quire --version` do not; `LLM` needs PyTorch, and the package of the clients does not."""


def __getattr__(name: str) -> Any:
    """Import a name of `_IMPORTED_WHEN_USED` when it is first used."""
    if name not in _IMPORTED_WHEN_USED:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_IMPORTED_WHEN_USED[name]), name)


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
    "RequestMetrics",
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
