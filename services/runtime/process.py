"""Runs a service process: settings, logs, OpenMP, signals, the supervisor's pipe, exit status.

    def main() -> None:
        run_service(DecodeSettings, serve)

    async def serve(settings: DecodeSettings, stop: asyncio.Event) -> None:
        ... import torch, serve until `stop` is set, then end the running work ...

Exit status: 0 after a stop; 1 after a fault; 2 if the service cannot start, with the reason as one
line on stderr.
"""

import argparse
import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

from blockstore.errors import StoreUnavailable, StoreUnsuitable
from services.runtime import open_files
from services.runtime.config import S, ServiceSettings, chosen, load_settings, resolved, variables
from services.runtime.errors import StartupError
from services.runtime.logging import configure_logging, get_logger
from services.runtime.starting import end_imports

log = get_logger(__name__)

T = TypeVar("T")

EXIT_FAULT = 1
EXIT_CANNOT_START = 2
PARENT_FD = "QUIRE_PARENT_FD"
"""Variable with the file descriptor of the supervisor's pipe (its reading end); the process ends
when the other end closes."""

_RETRY_INTERVAL_S = 0.1


def run_service(
    settings_class: type[S],
    serve: Callable[[S, asyncio.Event], Coroutine[Any, Any, None]],
    module: str = "",
    arguments: Sequence[str] | None = None,
) -> NoReturn:
    """Run `serve(settings, stop)` to its end and exit the process. `module` and `arguments` are the
    words of the command line, if `module` is not the service's name.

    The first SIGTERM or SIGINT sets `stop`, a second one cancels `serve`. A process that has not
    ended `stop_grace_s` after the first signal exits at once.
    """
    try:
        end_imports()
        _watch_parent()
        settings = _settings(settings_class, module or settings_class.service, arguments)
        set_up_openmp(settings.num_threads)
        open_files.raise_limit()
        configure_logging(settings.service, settings.log_level, settings.log_format)
        log.info("service_starting", pid=os.getpid(), **chosen(settings))
        log.debug("settings_resolved", **_log_keys(settings))
        asyncio.run(_until_stopped(serve, settings))
    except asyncio.CancelledError:
        log.warning("service_cancelled")
    except BaseException as error:
        sys.exit(_exit_status(error))
    sys.exit(0)


def set_up_openmp(num_threads: int | None) -> None:
    """Set OpenMP's variables, which torch reads once, at its import.

    Idle threads must not spin: they would take CPU time from the other workers of the host.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)


async def retry_until_available(
    connect: Callable[[], Awaitable[T]], server: str, timeout_s: float
) -> T:
    """Call `connect` again while it raises StoreUnavailable; returns its result.

    `server` is the server's name, for errors. Raises StartupError if `connect` has not succeeded
    within `timeout_s`, or Quire cannot use the server.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        try:
            return await connect()
        except StoreUnsuitable as error:
            raise StartupError(f"{server} cannot be used: {error}") from error
        except StoreUnavailable as error:
            if loop.time() >= deadline:
                text = f"{server} did not answer in {timeout_s:g} s: {error}"
                raise StartupError(text) from error
        await asyncio.sleep(_RETRY_INTERVAL_S)


async def _until_stopped(
    serve: Callable[[S, asyncio.Event], Coroutine[Any, Any, None]], settings: S
) -> None:
    stop = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def on_signal(name: str) -> None:
        log.info("service_stopping", signal=name)
        if stop.is_set():
            task.cancel()
        else:
            loop.call_later(settings.stop_grace_s, _exit_overdue, settings.stop_grace_s)
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal, signum.name)
    await serve(settings, stop)
    log.info("service_stopped")
    # `serve` has cleaned up. Threads that import or load may still run, and asyncio.run would wait
    # for them: up to `stop_grace_s` where many workers start on few CPUs.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _settings(cls: type[S], module: str, arguments: Sequence[str] | None) -> S:
    """The settings from the environment. The flags only print or check them, and exit."""
    parser = argparse.ArgumentParser(
        prog=f"python -m services.{module}",
        description="Configured by environment variables:",
        epilog="\n".join(f"  {name:<42}{text}" for name, text in variables(cls).items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print every setting as resolved, and exit"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 0 if the service could start here"
    )
    flags = parser.parse_args(arguments)
    settings = load_settings(cls)
    if flags.print_config:
        print("\n".join(f"{name}={value}" for name, value in resolved(settings).items()))
        sys.exit(0)
    if flags.check:
        settings.check()
        sys.exit(0)
    return settings


def _log_keys(settings: ServiceSettings) -> dict[str, str]:
    prefix = str(settings.model_config.get("env_prefix", ""))
    return {name.removeprefix(prefix).lower(): text for name, text in resolved(settings).items()}


def _watch_parent() -> None:
    """End this process when the supervisor's end of the pipe closes, so that a killed supervisor
    leaves no orphans. A thread waits for that, since the event loop may be busy."""
    number = os.environ.get(PARENT_FD)
    if number is None:
        return
    try:
        fd = int(number)
        os.set_inheritable(fd, False)
    except (ValueError, OSError) as error:
        raise StartupError(f"{PARENT_FD}={number!r} is not an open file descriptor") from error
    threading.Thread(target=_exit_with_parent, args=(fd,), name="parent-pipe", daemon=True).start()


def _exit_with_parent(fd: int) -> NoReturn:
    while os.read(fd, 1):
        pass
    os._exit(EXIT_FAULT)


def _exit_overdue(grace_s: float) -> NoReturn:
    """Exit without cleanup: other services wait until this process's locks and connections are
    gone."""
    log.error("stop_overdue", stop_grace_s=grace_s)
    os._exit(EXIT_FAULT)


def _exit_status(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_FAULT
    reason = _startup_error(error)
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return EXIT_CANNOT_START
    log.error("service_failed", exc_info=error)
    return EXIT_FAULT


def _startup_error(error: BaseException) -> StartupError | None:
    """The error itself if it is a StartupError, or the first StartupError of an exception group."""
    if isinstance(error, StartupError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_startup_error, error.exceptions)), None)
    return None
