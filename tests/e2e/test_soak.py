"""For a minute, processes are killed and stopped at random, under a load that does not fit the
pool."""

import asyncio
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.types import Sampling

from .conftest import Oracle
from .deployment import Deployment, serving
from .quiet import quiet

SOAK_S = 60.0
QUIET_S = 15.0
NUM_USERS = 16
MAX_TOKENS = 120
WORKERS = ("--role=prefill", "--role=decode")
EVERYTHING = (*WORKERS, "services.gateway", "services.block_manager", "valkey")


class Users:
    """Clients that send one request after another, and cancel a fifth of the streams in the
    middle."""

    def __init__(self, client: AsyncClient, oracle: Oracle) -> None:
        chance = random.Random(5)
        lengths = [chance.randrange(3, 120) for _ in range(24)]
        self._prompts = [[chance.randrange(259, 384) for _ in range(size)] for size in lengths]
        self._expected = [oracle.greedy(prompt, MAX_TOKENS) for prompt in self._prompts]
        self._client = client
        self.num_finished = 0
        self.errors: list[QuireError] = []

    async def one(self, number: int, until: float) -> None:
        chance = random.Random(number)
        while asyncio.get_running_loop().time() < until:
            which = chance.randrange(len(self._prompts))
            num_tokens = chance.randrange(1, MAX_TOKENS + 1)
            stop_after = num_tokens // 2 if chance.random() < 0.2 else num_tokens
            tokens = await self._stream(which, num_tokens, stop_after)
            assert tokens == self._expected[which][: len(tokens)]

    async def _stream(self, which: int, num_tokens: int, stop_after: int) -> list[int]:
        sampling = Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        tokens: list[int] = []
        try:
            async for delta in self._client.generate(
                self._prompts[which], sampling, timeout_s=60.0
            ):
                tokens += delta.token_ids
                if len(tokens) > stop_after:
                    break
            self.num_finished += 1
        except QuireError as error:
            self.errors.append(error)
            await asyncio.sleep(0.2)
        return tokens


async def inject_faults(deployment: Deployment, victims: tuple[str, ...], until: float) -> None:
    """Kill or stop a process every few seconds."""
    chance, loop = random.Random(9), asyncio.get_running_loop()
    while loop.time() < until:
        await asyncio.sleep(chance.uniform(2, 6))
        pids = deployment.children(chance.choice(victims))
        if not pids:
            continue
        pid = chance.choice(pids)
        if chance.random() < 0.75:
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
            loop.call_later(chance.uniform(0.5, 12), _resume, pid)


def _resume(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.full
@pytest.mark.parametrize("victims", [WORKERS, EVERYTHING], ids=["workers", "everything"])
async def test_no_wrong_token_and_nothing_lost(
    checkpoint: Path, oracle: Oracle, tmp_path: Path, victims: tuple[str, ...]
) -> None:
    """Streams may fail when a gateway or Redis dies; no token is wrong, no stream hangs, and
    afterwards nothing is held."""
    args = ("--prefill", "2", "--decode", "2", "--pool-memory", "1200KiB")
    with serving(checkpoint, tmp_path, *args) as deployment:
        client = AsyncClient(deployment.address, operations=deployment.operations)
        users = Users(client, oracle)
        end = asyncio.get_running_loop().time() + SOAK_S
        async with asyncio.timeout(SOAK_S + 90), asyncio.TaskGroup() as tasks:
            tasks.create_task(inject_faults(deployment, victims, end - QUIET_S))
            for number in range(NUM_USERS):
                tasks.create_task(users.one(number, end))
        assert users.num_finished > 100
        assert victims is EVERYTHING or not users.errors
        await quiet(client, 30.0)
        await client.close()
