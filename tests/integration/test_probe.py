"""The containers' health check, against the metrics port of a service and the HTTP port of a
gateway."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from quire import probe
from services.gateway.http.app import create_app
from services.gateway.http.server import http_server
from services.runtime.config import ServiceSettings
from services.runtime.exposition import metrics_endpoint
from services.runtime.health import Health
from services.runtime.rpc.transport import RpcServer
from tests.integration.http.conftest import FakeGenerator

LIMIT_S = 30


async def probed(port: int | None) -> tuple[int | None, str]:
    """Exit status and output of the script, run as in a container."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-IS", probe.__file__, str(port), stdout=subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode, out.decode().strip()


async def test_a_probe_succeeds_while_the_service_serves() -> None:
    health = Health()
    server = RpcServer("quire.v1.Toy", health=health)
    with metrics_endpoint(ServiceSettings(metrics_port=0), CollectorRegistry(), health) as port:
        await server.start("127.0.0.1", 0)
        try:
            assert await probed(port) == (1, "not ready")
            await server.set_serving(True)
            assert await probed(port) == (0, "ready")
        finally:
            await server.stop()
        assert await probed(port) == (1, "not ready")


def test_a_service_whose_event_loop_does_not_answer_is_not_well() -> None:
    async def make() -> Health:
        health = Health()
        health.is_serving = True
        assert await asyncio.to_thread(health.is_well)
        return health

    with asyncio.Runner() as runner:
        health = runner.run(make())
        assert not health.is_well()  # after 2 s
    assert not health.is_well()


async def test_a_probe_asks_a_gateways_http_port() -> None:
    generator = FakeGenerator()
    async with http_server(create_app(generator, CollectorRegistry()), "127.0.0.1", 0) as port:
        assert await probed(port) == (0, "ready")
        generator.is_ready = False
        assert await probed(port) == (1, "not ready")


async def test_a_probe_fails_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    status, out = await probed(port)
    assert (status, out.partition(":")[0]) == (1, f"no answer at port {port}")


async def test_a_probe_fails_when_the_server_hangs_up() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        assert await probed(server.sockets[0].getsockname()[1]) == (1, "not ready")


def test_the_script_can_be_executed_by_itself() -> None:
    """The images copy it to a directory of commands."""
    path = Path(probe.__file__)
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env -S python3 -IS\n")
