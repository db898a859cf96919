"""The domain errors of the services. They do not depend on gRPC or HTTP;
`services.runtime.rpc.error_table` maps them to statuses.

QuireError
├── InvalidRequest
│   └── PromptTooLong      longer than the context, or can never fit the pool
├── Unauthenticated        the other service does not prove the deployment's secret
│   └── InvalidApiKey      the client sends no API key, or one that does not exist
├── PermissionDenied       the client's API key may not do this
├── UnknownModel
├── UnknownWorker
├── DuplicateRequest
├── Overloaded             the client may try again later
│   ├── QueueFull
│   └── RateLimited        the client's API key is at its limit of requests, tokens or sequences
├── Unavailable            no service can do it now
│   ├── NoWorker
│   └── Draining
├── DeadlineExceeded
├── PoisonRequest          the request itself causes the failure, at any worker
├── KVCorrupt              a block's stamp does not match the tokens of its hash
├── VersionMismatch        the other service uses another version of the protocol
├── LastWorker             draining this worker would leave its pool without its role
├── NoSupervisor           the deployment has no supervisor to start and end workers
└── StartupError           bad configuration, model, memory or server; the process ends with the
                           error's text
"""

from typing import ClassVar


class QuireError(Exception):
    """Root of the domain errors. The text is for the client."""

    code: ClassVar[str]


class InvalidRequest(QuireError):
    """A request is at fault. `param` is its wrong parameter; None if there are several, or none."""

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class Unauthenticated(QuireError):
    code = "unauthenticated"


class InvalidApiKey(Unauthenticated):
    code = "invalid_api_key"


class PermissionDenied(QuireError):
    code = "permission_denied"


class UnknownModel(QuireError):
    """A request names a model that is not served, in its parameter `param`."""

    code = "model_not_found"

    def __init__(self, message: str, param: str = "model") -> None:
        super().__init__(message)
        self.param = param


class UnknownWorker(QuireError):
    code = "unknown_worker"


class UnknownRequest(QuireError):
    code = "unknown_request"


class DuplicateRequest(QuireError):
    code = "duplicate_request"


class Overloaded(QuireError):
    code = "overloaded"

    def __init__(self, message: str, retry_delay_s: float) -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s


class QueueFull(Overloaded):
    code = "queue_full"


class RateLimited(Overloaded):
    code = "rate_limit_exceeded"


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
