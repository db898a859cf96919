"""The domain's errors. They know nothing of gRPC or HTTP; `services.common.rpc.transport` maps
them in one table.

QuireError
├── InvalidRequest
│   └── PromptTooLong      longer than the context, or can never fit the pool
├── Unauthenticated        a peer that does not prove the deployment's secret
├── UnknownModel
├── UnknownWorker
├── DuplicateRequest
├── Overloaded             try again later
│   ├── QueueFull
│   └── WouldBeLate        its deadline leaves no time for those who wait before it
├── Unavailable            nobody there to do it now
│   ├── NoWorker
│   └── Draining
├── DeadlineExceeded
├── PoisonRequest          it fails by itself, wherever it is computed
├── KVCorrupt              a block does not say what its hash promised
├── VersionMismatch        a peer speaks another protocol
├── LastWorker             draining it would leave its pool without its role
├── NoSupervisor           nobody here starts and ends workers
└── StartupError           bad configuration, model, memory or server; the process ends with its
text
"""

from typing import ClassVar


class QuireError(Exception):
    """Root of the domain's errors; the text is for the client."""

    code: ClassVar[str]


class InvalidRequest(QuireError):
    code = "invalid_request"


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class Unauthenticated(QuireError):
    code = "unauthenticated"


class UnknownModel(QuireError):
    code = "model_not_found"


class UnknownWorker(QuireError):
    code = "unknown_worker"


class DuplicateRequest(QuireError):
    code = "duplicate_request"


class Overloaded(QuireError):
    code = "overloaded"

    def __init__(self, message: str, retry_delay_s: float) -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s


class QueueFull(Overloaded):
    code = "queue_full"


class WouldBeLate(Overloaded):
    code = "would_be_late"


class Unavailable(QuireError):
    code = "unavailable"


class NoWorker(Unavailable):
    code = "no_worker"


class Draining(Unavailable):
    code = "draining"


class DeadlineExceeded(QuireError):
    code = "deadline_exceeded"


class PoisonRequest(QuireError):
    code = "poison_request"


class KVCorrupt(QuireError):
    code = "kv_corrupt"


class VersionMismatch(QuireError):
    code = "version_mismatch"


class LastWorker(QuireError):
    code = "last_worker"


class NoSupervisor(QuireError):
    code = "no_supervisor"


class StartupError(QuireError):
    code = "startup_error"
