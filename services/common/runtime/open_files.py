"""How many files, which connections are too, this process may have open."""

import resource

_OTHERS = 128
"""For everything but connections of clients: Redis, workers, libraries that are being loaded."""


def raise_limit() -> None:
    """Use all that the administrator allows; shells leave most programs at 1,024, for the sake of
    those that call select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def room_for_connections(num_listeners: int) -> int:
    """How many connections each of so many listeners may have, with enough left for the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (soft - _OTHERS) // num_listeners)
