"""The errors that the client library raises."""


class QuireError(Exception):
    """Root of the client library's errors. `code` is the server's code for the error, or gRPC's
    status in lower case."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


STOPPING = "stopping"
"""The code of Unreachable for a call that came just as its server stopped: another one may take
that server's place."""


class Unreachable(QuireError):
    """No server answers at the address."""


class UnreachableUrl(Unreachable):
    """No HTTP server answers at the URL."""


class BadTls(QuireError):
    """The TLS files cannot be used, or the server's certificate is not trusted."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "tls")


class NotAllowed(QuireError):
    """The API key is missing or wrong, or has no right to this call."""


class InvalidRequest(QuireError):
    """The request can never succeed without a change."""


class NotFound(InvalidRequest):
    """No such model, worker or pool exists."""


class Conflict(QuireError):
    """A request with this id is running."""


class Overloaded(QuireError):
    """The queue is full; try again after `retry_delay_s`."""

    def __init__(self, message: str, code: str, retry_delay_s: float | None) -> None:
        super().__init__(message, code)
        self.retry_delay_s = retry_delay_s


class Unavailable(QuireError):
    """The gateway answers, but it has no worker or no block store, or it is stopping."""


class DeadlineExceeded(QuireError):
    """The request's time limit has passed."""


class ServerError(QuireError):
    """The server failed; the text has an error id, under which the server's log has the details."""
