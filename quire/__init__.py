"""Quire: LLM serving with prefill and decode on separate workers that share one paged KV cache.

from quire import Client

with Client() as client:
    for delta in client.generate("What is a block table?"):
        print(delta.text, end="", flush=True)
"""

from quire.async_client import AsyncClient
from quire.client import Client
from quire.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
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
    Sampling,
    TokenLogprobs,
    Usage,
)

__all__ = [
    "AsyncClient",
    "Candidate",
    "ChatMessage",
    "Choice",
    "Client",
    "Completion",
    "Conflict",
    "DeadlineExceeded",
    "Delta",
    "InvalidRequest",
    "NotFound",
    "Overloaded",
    "QuireError",
    "Sampling",
    "ServerError",
    "TokenLogprobs",
    "Unavailable",
    "Unreachable",
    "Usage",
]
