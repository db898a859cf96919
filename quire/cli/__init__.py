"""The `quire` command.

Exit statuses: 0 success; 1 the command failed, `health` found a service that is not ready, or
`audit` found a broken law; 2 wrong usage; 3 no server answers at the address; 130 interrupted.
"""

from quire.cli.app import main

__all__ = ["main"]
