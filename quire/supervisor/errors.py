"""The errors of the supervisor. Each ends its command with the error's text."""


class ServeError(Exception):
    """Root of the supervisor's errors."""


class ModelNotFound(ServeError):
    """No such directory exists, and the model is not in the Hugging Face cache and cannot be
    downloaded."""


class ModelUnusable(ServeError):
    """Files of the model are missing, or Quire does not support the model."""


class WrongModels(ServeError):
    """The names or the options of a run's models do not fit together."""


class WrongOptions(ServeError):
    """A service could not start with the options of the run."""


class PortInUse(ServeError):
    """Another run or program listens on a port of the run."""


class NoSuchRun(ServeError):
    """No run matches the command, or several do."""


class NoValkey(ServeError):
    """The embedded Valkey is not installed."""


class GaveUp(ServeError):
    """A service gave a reason why it cannot start, or failed repeatedly in the same way."""
