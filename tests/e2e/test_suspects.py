"""Requests at workers that die: only the request that kills them is given up."""

import asyncio
from pathlib import Path

import pytest

from quire.async_client import AsyncClient
from quire.errors import ServerError
from quire.types import Sampling

from .conftest import POOL_MEMORY, Oracle
from .deployment import serving
from .quiet import quiet

LIMIT_S = 60.0
PROMPTS = [list(range(260 + number, 300 + number)) for number in range(8)]
NUM_TOKENS = 120
GREEDY = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

DIES = '''
"""The next step of a worker of a role that has the token in its rows is its last: it is killed
before it has computed anything."""
import os, signal, sys, threading, time

def patch():
    while not hasattr(module := sys.modules.get("services.engine.runner"), "Runner"):
        time.sleep(0.01)
    launch = module.Runner.launch

    def launch_or_die(self, rows, *args):
        if any(int(os.environ["DEADLY_TOKEN"]) in row.token_ids for row in rows):
            os.kill(os.getpid(), signal.SIGKILL)
        return launch(self, rows, *args)

    module.Runner.launch = launch_or_die

if "--role=prefill" in sys.orig_argv:
    threading.Thread(target=patch, daemon=True).start()
'''
DEADLY = 383


async def test_a_prompt_that_kills_at_once_is_found_among_others(
    checkpoint: Path, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers die although the request gives them no time to report anything. All other
    requests get every token."""
    (tmp_path / "sitecustomize.py").write_text(DIES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DEADLY_TOKEN", str(DEADLY))
    options = ("--prefill", "3", "--decode", "1", "--pool-memory", str(2 * POOL_MEMORY))
    with serving(checkpoint, tmp_path, *options) as running:
        client = AsyncClient(running.address, operations=running.operations)
        good = [
            asyncio.create_task(client.complete(prompt, GREEDY, timeout_s=LIMIT_S))
            for prompt in PROMPTS
        ]
        with pytest.raises(ServerError, match="its prefill worker died twice"):
            await client.complete([*PROMPTS[0][:20], DEADLY], GREEDY, timeout_s=LIMIT_S)
        for prompt, task in zip(PROMPTS, good, strict=True):
            assert list((await task).token_ids) == oracle.greedy(prompt, NUM_TOKENS)
        log = running.log.read_text()
        assert log.count("worker_died") <= 2
        await quiet(client)
        await client.close()
