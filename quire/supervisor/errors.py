"""Why a run cannot start or go on; each ends `quire serve` with its text.

ServeError
├── ModelNotFound      no such directory, and not in the Hugging Face cache
├── ModelUnusable      its files are not all there, or not of a kind that Quire serves
├── PortInUse          another run or program listens there
├── NoSuchRun          nothing to stop
├── NoValkey           the embedded server is not installed
└── GaveUp             a service failed to start again and again, for the same reason
"""


class ServeError(Exception):
    """Root of the supervisor's errors."""


class ModelNotFound(ServeError):
    pass


class ModelUnusable(ServeError):
    pass


class PortInUse(ServeError):
    pass


class NoSuchRun(ServeError):
    pass


class NoValkey(ServeError):
    pass


class GaveUp(ServeError):
    pass
