"""LoRA adapters as users run them: two adapters and the base model in one batch
have the tokens of transformers and PEFT."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.async_client import AsyncClient
from quire.cli.app import main
from quire.errors import InvalidRequest, QuireError
from quire.types import Sampling
from tests.adapters import AdapterOracle
from tests.waiting import until

from .deployment import Deployment

NUM_TOKENS = 60
LIMIT_S = 60.0
GREEDY = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPT = tuple(range(260, 310))
"""More than three full blocks, the same for all requests."""


@pytest.fixture(scope="module")
def deployment(observed: Deployment) -> Deployment:
    return observed


def expected(checkpoint: Path, adapter: Path | None) -> list[int]:
    return AdapterOracle(checkpoint, adapter).greedy(PROMPT, NUM_TOKENS)[0]


def post(deployment: Deployment, **body: Any) -> httpx.Response:
    url = f"{deployment.http}/v1/completions"
    return httpx.post(url, json=body, timeout=LIMIT_S, trust_env=False)


async def listed(client: AsyncClient, name: str) -> None:
    """Wait until the adapter is listed: a worker reads it after its start."""
    await until(client.models, lambda models: name in {model.id for model in models})


async def tokens(client: AsyncClient, model: str) -> list[int]:
    completion = await client.complete(list(PROMPT), GREEDY, model=model, timeout_s=LIMIT_S)
    return list(completion.token_ids)


async def test_adapters_and_the_model_in_one_batch(
    deployment: Deployment, client: AsyncClient, checkpoint: Path, adapters: dict[str, Path]
) -> None:
    """Every answer is that of transformers with the request's adapter, although all requests have
    the same prompt: no block is shared between adapters."""
    await listed(client, "poet")
    assert post(deployment, model="lawyer", prompt="x", max_tokens=1).status_code == 404
    await client.load_adapter("lawyer", str(adapters["lawyer"]))
    base = next(m.id for m in await client.models() if m.id not in adapters)
    wanted = {
        base: expected(checkpoint, None),
        **{name: expected(checkpoint, path) for name, path in adapters.items()},
    }
    assert len({tuple(answer) for answer in wanted.values()}) == 3
    asked = [name for name in wanted for _ in range(3)]
    answers = await asyncio.gather(*(tokens(client, name) for name in asked))
    assert answers == [wanted[name] for name in asked]
    with pytest.raises(InvalidRequest, match="No such file"):
        await client.load_adapter("x", "/nowhere")
    running: list[int] = []
    async for delta in client.generate(list(PROMPT), GREEDY, model="lawyer", timeout_s=LIMIT_S):
        if not running:
            await client.unload_adapter("lawyer")
        running += delta.token_ids
    assert running == wanted["lawyer"]
    with pytest.raises(QuireError, match="'lawyer' is not served"):
        await tokens(client, "lawyer")


def test_adapters_by_the_command_line(
    deployment: Deployment, adapters: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Loading the same files again is no error; unloading an unknown name is one."""
    address = ("--address", deployment.operations)
    assert main(["lora", "load", "poet", str(adapters["poet"]), *address]) == 0
    assert "poet is served, on " in capsys.readouterr().out
    assert main(["lora", "unload", "nobody", *address]) != 0
    assert "no adapter 'nobody' is loaded" in capsys.readouterr().err
