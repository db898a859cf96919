"""KV in int8 between real processes: streams that are swapped out, or whose worker is drained or
dies, have the tokens of a model without other requests."""

import asyncio
import os
import signal
from pathlib import Path

import torch

from kvops.native import usable_kernels
from quire.async_client import AsyncClient
from services.pool.layout import PoolLayout
from tests.integration.models_oracle import NUM_NEW_TOKENS, RecordingRunner
from tests.waiting import until

from .conftest import STAMP_BYTES
from .decoders import busiest, decoder_states, figures, pid_of, until_left
from .deployment import serving
from .quiet import quiet
from .test_moves import LIMIT_S, NUM_STREAMS, Stream

LAYOUT = PoolLayout("tiny", "any", 2, 2, 16, dtype="int8", block_size=16)
NUM_BLOCKS = 256


def computed_alone(checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The first greedy tokens of each prompt, computed alone."""
    runner = RecordingRunner(checkpoint, 16, 256, dtype=torch.float32, kv_in_int8=True)
    trials = [runner.place(tuple(each)) for each in prompts]
    for trial in trials:
        runner.decode_all([trial], 512)
    return [trial.new_tokens for trial in trials]


async def test_streams_are_exact_through_swaps_moves_and_deaths(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Six streams of up to 67 blocks on a pool of 256. Two of three decode workers leave, one
    after the other."""
    size = str(NUM_BLOCKS * (LAYOUT.block_bytes + STAMP_BYTES))
    memory = ("--pool-memory", size, "--swap-memory", size, "--preemption", "swap")
    options = ("--kv-dtype", "int8", "--isa", usable_kernels()[0], "--decode", "3", *memory)
    with serving(checkpoint, tmp_path, *options) as deployment:
        client = AsyncClient(deployment.address, operations=deployment.operations)
        async with asyncio.timeout(LIMIT_S):
            await until(lambda: decoder_states(client), lambda now: now == ["serving"] * 3)
            assert {pool.num_blocks for pool in await client.pools()} == {NUM_BLOCKS}
            assert {worker.engine["kv_dtype"] for worker in await client.workers()} == {"int8"}
            streams = [Stream(client, number) for number in range(NUM_STREAMS)]
            await until(lambda: all(stream.tokens for stream in streams))
            leaving = await busiest(deployment, client)
            await client.drain(leaving.worker_id)
            await until_left(client, leaving)
            os.kill(pid_of(deployment, await busiest(deployment, client)), signal.SIGKILL)
            await asyncio.gather(*(stream.reading for stream in streams))
            num_moves, num_preemptions = await figures(deployment, "num_moves", "num_preemptions")
            assert num_moves > 0
            assert num_preemptions > 0
            for stream in streams:
                again = await client.complete(stream.prompt, stream.sampling)
                assert stream.tokens == list(again.token_ids)
        await quiet(client)
        await client.close()
    greedy = [stream for stream in streams if stream.sampling.temperature == 0]
    found = [stream.tokens[:NUM_NEW_TOKENS] for stream in greedy]
    assert found == computed_alone(checkpoint, [stream.prompt for stream in greedy])
