"""Workers that speak the real messages over real gRPC, and compute nothing."""

from .decode import FakeDecode
from .model import expected, logprobs_of, state_of
from .prefill import FakePrefill
from .worker import FakeWorker, Session, Verbatim, member, start

__all__ = [
    "FakeDecode",
    "FakePrefill",
    "FakeWorker",
    "Session",
    "Verbatim",
    "expected",
    "logprobs_of",
    "member",
    "start",
    "state_of",
]
