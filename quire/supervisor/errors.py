"""The errors of the supervisor. Each ends its command with the error's text.

ServeError
├── ModelNotFound      no such directory, and no such model in the Hugging Face cache
├── ModelUnusable      files of the model are missing, or Quire does not support the model
├── PortInUse          another run or program listens on a port of the run
├── NoSuchRun          no run matches the command, or several do
├── NoValkey           the embedded Valkey is not installed
└── GaveUp             a service named a reason why it cannot start, or failed repeatedly in one way
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
