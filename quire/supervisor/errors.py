"""The errors of the supervisor. Each ends its command with the error's text."""


class ServeError(Exception):
    """Root of the supervisor's errors."""


class ModelNotFound(ServeError):
    """No such directory exists, and the model is not in the Hugging Face cache and cannot be
    downloaded."""
