"""The supervisor's service, which gateways keep a connection to."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc import aio

from quire.supervisor.child import ChildSpec, Stage
from quire.supervisor.run_directory import supervisor_address
from quire.supervisor.service import served
from quire.supervisor.upgrade import Upgrader
from tests.waiting import until

PINGS = (
    ("grpc.keepalive_time_ms", 20),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


async def test_any_error_of_an_upgrade_is_its_failure(tmp_path: Path) -> None:
    """An upgrade that broke is not told as one that has replaced everything."""

    def start(_spec: ChildSpec) -> Any:
        raise OSError("too many processes")

    none = cast("Any", None)
    gateway = cast(
        "Any",
        SimpleNamespace(
            name="gateway",
            is_staying=True,
            spec=ChildSpec("gateway", (), Stage.GATEWAY, {"QUIRE_GATEWAY_PORT": "1"}),
        ),
    )
    upgrader = Upgrader([gateway], start, none, none, tmp_path, {}, none)
    upgrader.resume()
    await until(lambda: not upgrader.upgrade.is_running)
    assert upgrader.upgrade.failure == "too many processes"
    await upgrader.close()


async def test_idle_gateway_may_ask_for_a_sign_of_life_as_often_as_it_wants(tmp_path: Path) -> None:
    """By default a server ends a connection after a few pings within 5 minutes, and gRPC writes a
    line into the gateway's log."""
    none = cast("Any", None)
    async with (
        served(none, Upgrader((), none, none, none, tmp_path, {}, none), none, tmp_path),
        aio.insecure_channel(supervisor_address(tmp_path), PINGS) as channel,
    ):
        await asyncio.wait_for(channel.channel_ready(), 10)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(
                channel.wait_for_state_change(grpc.ChannelConnectivity.READY), timeout=1
            )
