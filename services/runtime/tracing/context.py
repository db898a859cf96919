"""The trace context that a client sent with a call: the `traceparent` of W3C Trace Context."""

from contextvars import ContextVar

TRACEPARENT = "traceparent"
"""The name of the HTTP header, and of the gRPC metadata."""
MAX_TRACEPARENT_CHARS = 64
"""Version 00 has 55; a longer one is not read."""

_traceparent: ContextVar[str] = ContextVar(TRACEPARENT, default="")


def bind_traceparent(value: str) -> None:
    """Make `value`, unchecked, the trace context of the running call; "": it has none."""
    _traceparent.set(value if len(value) <= MAX_TRACEPARENT_CHARS else "")


def current_traceparent() -> str:
    return _traceparent.get()
