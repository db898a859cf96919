"""A small model with random weights, transformers as its oracle, and deployments of it."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.make_checkpoint import make_checkpoint
from quire.async_client import AsyncClient
from quire.client import Client
from quire.supervisor.run_directory import free_port
from tests.adapters import ATTENTION, make_adapter
from tests.collector import Collector, collecting

from .deployment import Deployment, serving
from .weights import point

POOL_BLOCKS = 128
BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # layers, K and V, tokens, KV heads, head size, fp32
STAMP_BYTES = 48 + 4 * 16
JOBS = ("gateway", "prefill", "decode", "block-manager")
POOL_MEMORY = POOL_BLOCKS * (BLOCK_BYTES + STAMP_BYTES)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


class Oracle:
    """Hugging Face transformers on the same weights. It generates past end-of-sequence tokens."""

    def __init__(self, checkpoint: Path) -> None:
        torch.set_num_threads(1)
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        return self.greedy_of([prompt], num_tokens)[0]

    def greedy_of(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """The greedy tokens of several prompts of one length, computed together."""
        inputs = torch.tensor([list(prompt) for prompt in prompts])
        with torch.inference_mode():
            output = self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens: list[list[int]] = output[:, inputs.shape[1] :].tolist()
        return tokens

    def choices(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The greedy choice of transformers in the place of each of `tokens`, given the tokens
        before it. The result equals `tokens` if and only if they are the greedy tokens. It takes
        one forward pass instead of one a token."""
        chosen: list[int] = self._logits(prompt, tokens).argmax(-1).tolist()
        return chosen

    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[list[float]]:
        """The logits that each of `tokens` was chosen from, given the tokens before it."""
        rows: list[list[float]] = self._logits(prompt, tokens).tolist()
        return rows

    def _logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([[*prompt, *tokens]])).logits[0]
        return logits[len(prompt) - 1 : -1]


@pytest.fixture(scope="session")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest.fixture(scope="session")
def deployment(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """1 prefill and 2 decode workers on a pool of 128 blocks of 16 tokens, with as many blocks to
    swap to."""
    memory = ("--pool-memory", str(POOL_MEMORY), "--swap-memory", str(POOL_MEMORY))
    options = ("--decode", "2", *memory, "--preemption", "swap")
    with serving(checkpoint, tmp_path_factory.mktemp("run"), *options) as running:
        yield running


@pytest.fixture(scope="session")
def pairs(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """2 prefill and 2 decode workers on a pool of 256 blocks. A test leaves as many as it found."""
    options = ("--prefill", "2", "--decode", "2", "--pool-memory", str(2 * POOL_MEMORY))
    with serving(checkpoint, tmp_path_factory.mktemp("run"), *options) as running:
        yield running


@pytest.fixture(scope="session")
def of_a_link(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """1 worker of each kind; the model is the link `model` beside the log. The gateway has a port
    for metrics."""
    folder = tmp_path_factory.mktemp("link")
    (folder / "model").symlink_to(checkpoint)
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QUIRE_GATEWAY_METRICS_PORT", str(free_port("127.0.0.1")))
            options = ("--pool-memory", str(POOL_MEMORY))
            running = stack.enter_context(serving(folder / "model", folder, *options))
        yield running


@pytest.fixture(scope="module")
def linked(of_a_link: Deployment, checkpoint: Path) -> Deployment:
    """The deployment of a link, which serves `checkpoint` at first. A test may point the link
    elsewhere."""
    point(of_a_link.log.parent / "model", checkpoint)
    with Client(of_a_link.operations.split(",")[0]) as client:
        client.reload()
    return of_a_link


@pytest.fixture(scope="session")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "poet": make_adapter(folder / "poet", checkpoint, 1),
        "lawyer": make_adapter(folder / "lawyer", checkpoint, 2, r=4, target_modules=ATTENTION),
    }


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="session")
def targets() -> dict[str, str]:
    """The address of the metrics of each of the services of `observed`, by its job."""
    return {job: f"127.0.0.1:{free_port('127.0.0.1')}" for job in JOBS}


@pytest.fixture(scope="session")
def observed(
    checkpoint: Path,
    adapters: dict[str, Path],
    collector: Collector,
    targets: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    """1 worker of each kind with a LoRA adapter and room for two; all services expose metrics, and
    requests are traced if their client asks for that."""
    lora = ("--lora", f"poet={adapters['poet']}", "--max-loras", "2")
    options = "--pool-memory", str(POOL_MEMORY), *lora, "--otlp-endpoint", collector.address
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
            for job, target in targets.items():
                service = job.upper().replace("-", "_")
                patch.setenv(f"QUIRE_{service}_METRICS_PORT", target.rpartition(":")[2])
            folder = tmp_path_factory.mktemp("run")
            running = stack.enter_context(serving(checkpoint, folder, *options))
        yield running


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[AsyncClient]:
    client = AsyncClient(deployment.address, operations=deployment.operations)
    yield client
    await client.close()
