"""The containers' health check, against real gRPC servers."""

import asyncio
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

from quire import probe
from quire.certificates import write_certificates
from services.common.rpc.tls import TlsFiles
from services.common.rpc.transport import RpcServer

LIMIT_S = 30


async def probed(port: int, *directory: str) -> tuple[int | None, str]:
    """Exit status and output of the script, run as in a container."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-IS", probe.__file__, str(port), *directory, stdout=subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode, out.decode().strip()


async def test_a_probe_succeeds_while_the_server_says_serving() -> None:
    server = RpcServer("quire.v1.Toy")
    port = await server.start("127.0.0.1", 0)
    try:
        assert await probed(port) == (1, "not ready")
        await server.set_serving(True)
        assert await probed(port) == (0, "ready")
        await server.set_serving(False)
        assert await probed(port) == (1, "not ready")
    finally:
        await server.stop()


async def test_a_probe_asks_over_tls_where_there_is_tls(tmp_path: Path) -> None:
    write_certificates(tmp_path)
    names = "service.crt", "service.key", "ca.crt"
    for tls in (TlsFiles(*(tmp_path / name for name in names)), None):
        server = RpcServer("quire.v1.Toy", tls=tls)
        port = await server.start("127.0.0.1", 0)
        await server.set_serving(True)
        try:
            assert await probed(port, str(tmp_path)) == (0, "ready")
        finally:
            await server.stop()


async def test_a_probe_fails_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    status, out = await probed(port)
    assert (status, out.partition(":")[0]) == (1, f"no answer at port {port}")


async def test_a_probe_fails_when_the_server_hangs_up() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        status, out = await probed(port)
    assert (status, out.partition(":")[0]) == (1, f"no answer at port {port}")


def test_a_probe_takes_a_small_part_of_the_cpu_time_of_importing_grpc() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = str(unused.getsockname()[1])
    probing = _cpu_s([sys.executable, "-IS", probe.__file__, port])
    importing = _cpu_s([sys.executable, "-c", "import grpc"])
    assert probing < importing / 4


def _cpu_s(command: list[str]) -> float:
    """The CPU time of the best of five runs."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=False, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(5))


def test_the_script_can_be_executed_by_itself() -> None:
    """The images copy it to a directory of commands."""
    path = Path(probe.__file__)
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env -S python3 -IS\n")
