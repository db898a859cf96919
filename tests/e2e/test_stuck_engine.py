"""An engine hangs in a step while its worker's event loop runs: the worker ends, and the others go
on."""

import asyncio
from pathlib import Path

import pytest

from quire.async_client import AsyncClient

from .conftest import POOL_MEMORY
from .deployment import serving
from .test_crashes import LIMIT_S, all_serve, streams

HANGS = '''
"""Every decode worker's step looks for a file; who finds it takes it away, and never returns."""
import os, sys, threading, time

def patch():
    while not hasattr(module := sys.modules.get("services.engine.runner"), "Runner"):
        time.sleep(0.01)
    launch = module.Runner.launch

    def launch_or_hang(*args):
        try:
            os.remove(os.environ["HANG_FILE"])
        except FileNotFoundError:
            return launch(*args)
        threading.Event().wait()

    module.Runner.launch = launch_or_hang

if "--role=decode" in sys.orig_argv:
    threading.Thread(target=patch, daemon=True).start()
'''


async def test_an_engine_that_hangs_only_delays_streams(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = tmp_path / "hang"
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HANG_FILE", str(hang))
    monkeypatch.setenv("QUIRE_DECODE_STEP_LIMIT_S", "2")
    options = ("--prefill", "2", "--decode", "2", "--pool-memory", str(2 * POOL_MEMORY))
    with serving(checkpoint, tmp_path, *options) as running:
        client = AsyncClient(running.address, operations=running.operations)
        await all_serve(client)
        undisturbed = [await stream.run(client) for stream in streams(1)]
        disturbed = streams(1)
        tasks = [asyncio.create_task(stream.run(client)) for stream in disturbed]
        await disturbed[0].reaches(40)
        hang.touch()
        async with asyncio.timeout(LIMIT_S):
            assert await asyncio.gather(*tasks) == undisturbed
        await all_serve(client)
        assert "engine_stuck" in running.log.read_text()
        await client.close()
    assert not hang.exists()
