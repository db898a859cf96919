"""The common behaviour of all service processes, with real processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from blockstore.errors import StoreLost, StoreUnavailable, StoreUnsuitable
from blockstore.registry import Load, Member
from quire.module_command import service_command
from services.runtime.errors import StartupError
from services.runtime.process import retry_until_available
from services.runtime.registry_heartbeat import RegistryHeartbeat
from tests.memory_registry import MemoryRegistry

LIMIT_S = 20
COOK = """
import asyncio, gc, os, sys, time
from typing import ClassVar
from pydantic_settings import SettingsConfigDict
from services.runtime.config import ServiceSettings
from services.runtime.errors import StartupError
from services.runtime.process import run_service
from services.runtime.starting import begin_start, importing

class CookSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="QUIRE_COOK_")
    service: ClassVar[str] = "cook"
    mode: str = "wait"

    @property
    def num_threads(self):
        return 3

async def fail():
    raise StartupError("no gas")

async def serve(settings, stop):
    print("ready", os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"], flush=True)
    if settings.mode == "no-gas":
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
    if settings.mode == "burn":
        raise RuntimeError("burnt")
    if settings.mode == "stuck":
        await asyncio.Event().wait()
    if settings.mode == "busy":
        while True: pass
    if settings.mode == "loading":
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
    if settings.mode == "garbage":
        with importing():
            print(collects_at_start, gc.isenabled(), flush=True)
        print(gc.isenabled(), gc.get_freeze_count() > 10_000, flush=True)
    await stop.wait()
    print("cleaned up", flush=True)

begin_start()
collects_at_start = gc.isenabled()
run_service(CookSettings, serve)
"""


ENDLESS_IMPORT = """
import sys, time

class Endless:
    def find_spec(self, name, path=None, target=None):
        if name == "blockstore":
            print("importing", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Endless())
"""


@contextmanager
def cook(
    *arguments: str, environ: dict[str, str] | None = None, inherits: tuple[int, ...] = ()
) -> Iterator["Cook"]:
    """The service as a process; killed at the end of the test if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", COOK, *arguments],
        env={**os.environ, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=inherits,
    )
    try:
        yield Cook(process)
    finally:
        process.kill()
        process.communicate()


class Cook:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def line(self) -> str:
        stdout: IO[str] | None = self.process.stdout
        assert stdout is not None
        return stdout.readline().strip()

    def end(self) -> tuple[int, str, str]:
        """Exit status, and the rest of stdout and stderr."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_gracefully(signum: signal.Signals) -> None:
    with cook() as service:
        assert service.line() == "ready 3 PASSIVE"
        service.process.send_signal(signum)
        status, out, err = service.end()
    assert (status, out) == (0, "cleaned up\n")
    assert '"event": "service_stopped"' in err


def test_a_thread_that_still_loads_is_not_waited_for() -> None:
    with cook(environ={"QUIRE_COOK_MODE": "loading"}) as service:
        service.line()
        service.process.send_signal(signal.SIGTERM)
        status, out, _ = service.end()
    assert (status, out) == (0, "cleaned up\n")


def test_a_second_signal_ends_what_does_not_stop() -> None:
    with cook(environ={"QUIRE_COOK_MODE": "stuck"}) as service:
        service.line()
        service.process.send_signal(signal.SIGINT)
        service.process.send_signal(signal.SIGTERM)
        status, out, err = service.end()
    assert (status, out) == (0, "")
    assert "service_cancelled" in err


@pytest.mark.parametrize("service", ["gateway", "block_manager", "prefill", "decode"])
def test_a_service_that_still_imports_ends_at_once(service: str, tmp_path: Path) -> None:
    """Also where signals without a handler are ignored, as for a container's first process."""
    (tmp_path / "sitecustomize.py").write_text(ENDLESS_IMPORT)
    process = subprocess.Popen(
        service_command(service),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    )
    assert process.stdout is not None
    with process:
        try:
            assert process.stdout.readline() == b"importing\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=LIMIT_S) == 0
        finally:
            process.kill()


def test_garbage_is_collected_except_during_imports() -> None:
    """Off from a service's first line, on when the service runs, and off again for later
    imports."""
    with cook(environ={"QUIRE_COOK_MODE": "garbage"}) as service:
        assert service.line() == "ready 3 PASSIVE"
        assert service.line() == "False False"
        assert service.line() == "True True"


def test_a_service_that_does_not_stop_in_time_is_ended() -> None:
    environ = {"QUIRE_COOK_MODE": "stuck", "QUIRE_COOK_STOP_GRACE_S": "0.2"}
    with cook(environ=environ) as service:
        service.line()
        service.process.send_signal(signal.SIGTERM)
        status, out, err = service.end()
    assert (status, out) == (1, "")
    assert '"event": "stop_overdue"' in err


@pytest.mark.parametrize("mode", ["stuck", "busy"])
def test_a_service_ends_with_its_supervisor(mode: str) -> None:
    """When the pipe closes, even while the event loop is busy."""
    reader, writer = os.pipe()
    environ = {"QUIRE_PARENT_FD": str(reader), "QUIRE_COOK_MODE": mode}
    with cook(environ=environ, inherits=(reader,)) as service:
        os.close(reader)
        service.line()
        os.close(writer)
        status, _, _ = service.end()
    assert status == 1


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"QUIRE_COOK_PORT": "x"}, "QUIRE_COOK_PORT: Input should be a valid integer"),
        ({"QUIRE_COOK_PROT": "1"}, "QUIRE_COOK_PROT is not a setting"),
        ({"QUIRE_PARENT_FD": "77"}, "QUIRE_PARENT_FD='77' is not an open file descriptor"),
        ({"QUIRE_COOK_MODE": "no-gas"}, "no gas"),
    ],
)
def test_a_service_says_why_it_cannot_start(environ: dict[str, str], message: str) -> None:
    """One line and status 2, without a traceback."""
    with cook(environ=environ) as service:
        status, _, err = service.end()
    assert status == 2
    assert err.splitlines()[-1].startswith("error: ")
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err


def test_the_resolved_configuration_can_be_printed() -> None:
    with cook("--print-config", environ={"QUIRE_COOK_PORT": "7"}) as service:
        status, out, _ = service.end()
    assert status == 0
    assert "QUIRE_COOK_PORT=7\n" in out
    assert "QUIRE_COOK_MODE=wait\n" in out


async def test_the_start_waits_until_the_server_answers() -> None:
    answers = [StoreUnavailable("refused"), StoreUnavailable("refused"), None]

    async def connect() -> str:
        if error := answers.pop(0):
            raise error
        return "connected"

    assert await retry_until_available(connect, "redis", timeout_s=10) == "connected"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (StoreUnavailable("refused"), "redis did not answer in 0 s: refused"),
        (StoreUnsuitable("evicts"), "redis cannot be used: evicts"),
    ],
)
async def test_the_wait_for_a_server_ends_with_a_clear_error(
    error: Exception, message: str
) -> None:
    async def connect() -> None:
        raise error

    with pytest.raises(StartupError, match=message):
        await retry_until_available(connect, "redis", timeout_s=0)


def member(state: str, load: Load) -> Member:
    return Member("d-1", "decode", "127.0.0.1:1", state, 0, 1, load=load)  # type: ignore[arg-type]


class Watched(MemoryRegistry):
    """Records announcements; fails as it is told."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: 0.0)
        self.announced: asyncio.Queue[Member] = asyncio.Queue()
        self.error: Exception | None = None

    async def announce(self, member: Member, ttl_s: float) -> None:
        await self.announced.put(member)
        if self.error:
            raise self.error
        await super().announce(member, ttl_s)


async def test_a_heartbeat_announces_and_withdraws_a_service() -> None:
    """A change is announced at once, with the present load, and the end is announced."""
    registry, running = Watched(), [1]
    heartbeat = RegistryHeartbeat(
        registry, lambda: member("serving", Load(running[0])), interval_s=60
    )
    task = asyncio.create_task(heartbeat.keep())
    async with asyncio.timeout(LIMIT_S):
        assert (await registry.announced.get()).load.num_running == 1
        running[0] = 2
        heartbeat.changed()
        assert (await registry.announced.get()).load.num_running == 2
    assert [m.member_id for m in await registry.members()] == ["d-1"]
    task.cancel()
    await asyncio.wait([task])
    assert await registry.members() == ()


async def test_a_heartbeat_goes_on_while_the_server_is_away() -> None:
    registry = Watched()
    registry.error = StoreUnavailable("refused")
    task = asyncio.create_task(
        RegistryHeartbeat(registry, lambda: member("serving", Load()), interval_s=0.001).keep()
    )
    async with asyncio.timeout(LIMIT_S):
        await registry.announced.get()
        registry.error = None
        while not await registry.members():
            await registry.announced.get()
    task.cancel()
    await asyncio.wait([task])


async def test_a_heartbeat_ends_when_the_server_is_lost() -> None:
    registry = Watched()
    registry.error = StoreLost("another run_id")
    with pytest.raises(StoreLost):
        await RegistryHeartbeat(registry, lambda: member("serving", Load())).keep()
