"""Families of models between real processes give the tokens of transformers, also when a decode
worker dies."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from quire.async_client import AsyncClient
from quire.types import Sampling
from tests.integration.family_checkpoints import make_served
from tests.waiting import until

from .conftest import Oracle
from .decoders import until_two_serve
from .deployment import serving
from .quiet import quiet

LIMIT_S = 90.0
NUM_TOKENS = 300


@pytest.mark.parametrize("name", ["gemma2", "phi3, partial longrope", "gpt-oss"])
async def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts and answers are longer than the windows, and as long as LongRoPE's long context."""
    checkpoint = make_served(tmp_path / "model", name)
    oracle = Oracle(checkpoint)
    prompts = [[300 + (7 * i + number) % 80 for i in range(40)] for number in range(4)]
    sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    options = ("--dtype", "float32", "--decode", "2", "--pool-memory", "64MiB")
    with serving(checkpoint, tmp_path, *options) as deployment:
        client = AsyncClient(deployment.address, operations=deployment.operations)
        async with asyncio.timeout(LIMIT_S):
            await until_two_serve(client)
            answers: list[list[int]] = [[] for _ in prompts]

            async def read(prompt: list[int], answer: list[int]) -> None:
                async for delta in client.generate(prompt, sampling):
                    answer += delta.token_ids

            reading = [
                asyncio.create_task(read(p, a)) for p, a in zip(prompts, answers, strict=True)
            ]
            await until(lambda: all(answers))
            os.kill(deployment.running("--role=decode")[0], signal.SIGKILL)
            await asyncio.gather(*reading)
        await quiet(client)
        await client.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        assert answer == oracle.choices(prompt, answer)
