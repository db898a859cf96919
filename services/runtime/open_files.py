"""The limit of open files, which also limits this process's connections."""

import resource

_OTHERS = 128
"""Files kept for everything but client connections: Redis, workers, libraries being loaded."""


def raise_limit() -> None:
    """Raise the soft limit to the hard limit. Shells start programs with a limit of 1,024 for the
    sake of those that call select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def room_for_connections(num_listeners: int) -> int:
    """The number of connections that each of `num_listeners` listeners may accept, so that enough
    files remain for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (soft - _OTHERS) // num_listeners)
