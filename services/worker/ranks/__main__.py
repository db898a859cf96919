"""`python -m services.worker.ranks RANK SOCKET LOG_LEVEL LOG_FORMAT`: a rank other than 0.

Rank 0 starts it. It ends when rank 0 closes the socket, whatever it does then.
"""

import os
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import NoReturn

from services.runtime.logging import configure_logging, get_logger
from services.runtime.process import EXIT_FAULT

log = get_logger(__name__)


def main() -> NoReturn:
    rank, number, level, log_format = sys.argv[1:]
    connection = Connection(int(number))
    threading.Thread(target=_exit_with_rank_0, args=(int(number),), daemon=True).start()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # rank 0 decides: its requests finish first
    configure_logging("rank", level, log_format)  # type: ignore[arg-type]  # rank 0 has checked them
    from services.engine.ranks.rank import Rank, follow  # imports torch

    try:
        follow(connection, Rank(int(rank)))
    except BaseException as error:
        log.error("rank_failed", exc_info=error)
        sys.stderr.flush()
        os._exit(EXIT_FAULT)
    os._exit(0)


def _exit_with_rank_0(fd: int) -> NoReturn:
    """Exit when the other end of the socket is closed: rank 0 has ended, and nobody may wait for
    this rank in an exchange, or for the worker's locks."""
    poll = select.poll()
    poll.register(fd, 0)  # POLLHUP is always reported
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
