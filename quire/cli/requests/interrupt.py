"""Ctrl-C while an answer comes."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from quire.client import Stream
from quire.errors import QuireError


@contextmanager
def ctrl_c_cancels(stream: Stream) -> Iterator[None]:
    """Within the block Ctrl-C cancels the stream, in another thread; KeyboardInterrupt is raised
    when the stream has ended by it. Otherwise it would be raised anywhere in gRPC's code, which may
    lose it, or whose connection may not work after it."""
    is_pressed = False

    def cancel(*_: object) -> None:
        nonlocal is_pressed
        is_pressed = True
        Thread(target=stream.cancel).start()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    except QuireError as error:
        if is_pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
