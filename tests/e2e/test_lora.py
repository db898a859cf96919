"""LoRA adapters as users run them: two adapters and the base model in one batch, with the tokens of
transformers and PEFT, and workers that die in mid-stream."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.async_client import AsyncClient
from quire.cli.app import main
from quire.errors import InvalidRequest, QuireError
from quire.types import Sampling
from tests.adapters import ATTENTION, AdapterOracle, make_adapter
from tests.waiting import until

from .conftest import POOL_MEMORY
from .deployment import Deployment, serving
from .test_crashes import all_serve

NUM_TOKENS = 60
LIMIT_S = 60.0
GREEDY = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPT = tuple(range(260, 310))
"""More than three full blocks, the same for all requests."""


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "poet": make_adapter(folder / "poet", checkpoint, 1),
        "lawyer": make_adapter(folder / "lawyer", checkpoint, 2, r=4, target_modules=ATTENTION),
    }


@pytest.fixture(scope="module")
def deployment(
    checkpoint: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Two workers of each kind, with one adapter from the start and room for two."""
    options = ("--prefill", "2", "--decode", "2", "--pool-memory", str(2 * POOL_MEMORY))
    lora = ("--lora", f"poet={adapters['poet']}", "--max-loras", "2")
    with serving(checkpoint, tmp_path_factory.mktemp("run"), *options, *lora) as running:
        yield running


def expected(checkpoint: Path, adapter: Path | None) -> list[int]:
    return AdapterOracle(checkpoint, adapter).greedy(PROMPT, NUM_TOKENS)[0]


def post(deployment: Deployment, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{deployment.http}/v1/{path}", json=body, timeout=LIMIT_S)


def get(deployment: Deployment, path: str) -> httpx.Response:
    return httpx.get(f"{deployment.http}/v1/{path}", timeout=LIMIT_S)


async def listed(client: AsyncClient, name: str) -> None:
    """Wait until the adapter is listed: a worker reads it after its start."""
    await until(client.models, lambda models: name in {model.id for model in models})


async def tokens(client: AsyncClient, model: str) -> list[int]:
    found: list[int] = []
    async for delta in client.generate(list(PROMPT), GREEDY, model=model, timeout_s=LIMIT_S):
        found += delta.token_ids
    return found


async def test_adapters_and_the_model_in_one_batch_while_workers_die(
    deployment: Deployment, client: AsyncClient, checkpoint: Path, adapters: dict[str, Path]
) -> None:
    """Every answer is that of transformers with the request's adapter, although all requests have
    the same prompt: no block is shared between adapters. A decode worker dies in mid-stream."""
    await listed(client, "poet")
    refused = post(deployment, "completions", model="lawyer", prompt="x", max_tokens=1)
    assert refused.status_code == 404
    await client.load_adapter("lawyer", str(adapters["lawyer"]))
    base = next(m.id for m in await client.models() if m.id not in adapters)
    wanted = {
        base: expected(checkpoint, None),
        **{name: expected(checkpoint, path) for name, path in adapters.items()},
    }
    assert len({tuple(answer) for answer in wanted.values()}) == 3
    asked = [name for name in wanted for _ in range(3)]
    for victim in (None, "--role=decode"):
        await all_serve(client)
        started = asyncio.Event()

        async def answer(name: str, started: asyncio.Event = started) -> list[int]:
            found: list[int] = []
            async for delta in client.generate(list(PROMPT), GREEDY, model=name, timeout_s=LIMIT_S):
                found += delta.token_ids
                if len(found) > 5:
                    started.set()
            return found

        running = [asyncio.create_task(answer(name)) for name in asked]
        await started.wait()
        if victim is not None:
            os.kill(deployment.running(victim)[0], signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            answers = await asyncio.gather(*running)
        assert answers == [wanted[name] for name in asked], victim


async def test_adapters_over_http(
    deployment: Deployment, client: AsyncClient, checkpoint: Path, adapters: dict[str, Path]
) -> None:
    await listed(client, "poet")
    answer = post(
        deployment,
        "completions",
        model="poet",
        prompt=list(PROMPT),
        max_tokens=4,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    ).json()
    assert answer["model"] == "poet"
    assert answer["choices"][0]["token_ids"] == expected(checkpoint, adapters["poet"])[:4]
    models = {m["id"]: m for m in get(deployment, "models").json()["data"]}
    assert models["poet"]["parent"] in models
    with pytest.raises(InvalidRequest, match="No such file"):
        await client.load_adapter("x", "/nowhere")


def test_adapters_by_the_command_line(
    deployment: Deployment, adapters: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Loading the same files again is no error; unloading an unknown name is one."""
    address = ("--address", deployment.operations)
    assert main(["lora", "load", "poet", str(adapters["poet"]), *address]) == 0
    assert "poet is served, on " in capsys.readouterr().out
    assert main(["lora", "unload", "nobody", *address]) != 0
    assert "no adapter 'nobody' is loaded" in capsys.readouterr().err


async def test_an_adapter_that_is_unloaded(
    deployment: Deployment, client: AsyncClient, checkpoint: Path, adapters: dict[str, Path]
) -> None:
    """A running request goes on, and new ones are refused."""
    await listed(client, "poet")
    running = client.generate(list(PROMPT), GREEDY, model="poet", timeout_s=LIMIT_S)
    found: list[int] = []
    async for delta in running:
        if not found:
            await client.unload_adapter("poet")
        found += delta.token_ids
    assert found == expected(checkpoint, adapters["poet"])
    with pytest.raises(QuireError, match="'poet' is not served"):
        await tokens(client, "poet")
    await client.load_adapter("poet", str(adapters["poet"]))
    assert await tokens(client, "poet") == found
