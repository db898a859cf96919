"""Ctrl-C while an answer comes."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

from quire.client import Stream
from quire.errors import QuireError


@contextmanager
def ctrl_c_cancels(send: Callable[[], Stream]) -> Iterator[Stream]:
    """Send a request, whose stream Ctrl-C cancels within the block, in another thread.

    KeyboardInterrupt is raised at the end of the stream. Otherwise it would be raised anywhere in
    gRPC's code, which may lose it, or whose connection may not work after it.
    """
    stream: Stream | None = None
    is_pressed = False

    def cancel(*_: object) -> None:
        nonlocal is_pressed
        is_pressed = True
        if stream is not None:
            Thread(target=stream.cancel).start()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        with send() as stream:
            if is_pressed:
                stream.cancel()
            yield stream
    except QuireError as error:
        if not is_pressed:
            raise
        raise KeyboardInterrupt from error
    finally:
        signal.signal(signal.SIGINT, before)
    if is_pressed:
        raise KeyboardInterrupt
