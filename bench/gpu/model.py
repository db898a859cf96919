"""A model's steps with all tensors on the GPU, against the same model on the CPU."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

import kvops
from bench.gpu.check import Check, Failed, Machine, Passed, Skipped
from kvops import Backend
from services.engine.batch import Draw, Row
from services.engine.models.decoder import ComposedModel, Layer, Linear
from services.engine.models.model import Model
from services.engine.runner import Runner
from services.model.config.families import FAMILIES
from services.model.config.model_config import GenerationDefaults, ModelConfig
from services.model.config.rope_config import RopeConfig
from services.protocol.ticket import SamplingParams

BF16_ERROR = 0.03
"""Of logits, root mean square, as a share of their spread; a CPU's bf16 is at 0.02."""

DRAWS = (
    Draw(SamplingParams(temperature=0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=99), 0),
    Draw(SamplingParams(temperature=1, top_k=0, top_p=0.95, min_p=0.0, seed=7, max_tokens=99), 0),
)
"""Of the prompts in turn."""

BLOCK_SIZE = 16


def checks(machine: Machine) -> Iterator[Check]:
    for name, window in (("all positions", None), ("a window", 50)):
        yield f"tokens in fp32 are the CPU's, {name}", partial(_tokens, machine, window)
        yield f"logits near the CPU's, {name}", partial(_logits, machine, window)
    yield "weights loaded from a checkpoint", lambda: _loader(machine)


class Relaunched:
    """The graph of a dry run: it launches again."""

    def capture(self, launch: Callable[[], Tensor]) -> Tensor:
        self._launch, self._result = launch, launch()
        return self._result

    def replay(self) -> None:
        self._result.copy_(self._launch())


class Steps:
    """A model with random weights and an arena of its own, on one device."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, backend: str, device: str) -> None:
        ops = kvops.backend(backend)
        self._take(make_model(config, ops, dtype, device), ops)

    @classmethod
    def of(cls, model: Model, ops: Backend) -> Self:
        steps = cls.__new__(cls)
        steps._take(model, ops)
        return steps

    def _take(self, model: Model, ops: Backend) -> None:
        self.ops, self._model, self._config = ops, model, model.config
        self._device, self._dtype = model.device, model.dtype

    def begin(self, num_sequences: int, longest: int, content: float = float("nan")) -> None:
        """Each sequence gets blocks for `longest` positions, which hold `content`."""
        config = self._config
        self._blocks_each = -(-longest // BLOCK_SIZE)
        shape = (config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        num_blocks = num_sequences * self._blocks_each
        arena = torch.full((num_blocks, *shape), content, dtype=self._dtype, device=self._device)
        self.runner = Runner(self._model, arena, BLOCK_SIZE, self.ops)

    def capture(self, max_rows: int, max_tokens: int) -> None:
        """Record the graphs of a worker, on a CPU stand-ins for them."""
        new_graph = Relaunched if self._device.type == "cpu" else None
        self.runner.capture_graphs(max_rows, max_tokens, new_graph)

    def row(self, number: int, token_ids: Sequence[int], start: int) -> Row:
        first = number * self._blocks_each
        table = range(first, first + self._blocks_each)
        return Row(token_ids, start, table, 0, (DRAWS[number % 2],))

    def generate(
        self, prompts: list[list[int]], num_tokens: int, chunk: int, graph_rows: int = 0
    ) -> list[list[int]]:
        """Each prompt alone, in chunks; then all together. With `graph_rows`, as graphs of up to so
        many rows and of chunks."""
        self.begin(len(prompts), max(map(len, prompts)) + num_tokens)
        if graph_rows:
            self.capture(graph_rows, min(chunk, max(map(len, prompts))))
        sequences = [list(prompt) for prompt in prompts]
        for i, prompt in enumerate(prompts):
            for start in range(0, len(prompt), chunk):
                rows = [self.row(i, prompt[start : start + chunk], start)]
                (result,) = self.runner.launch(rows).result()
            sequences[i].append(_token(result))
        for _ in range(num_tokens - 1):
            rows = [self.row(i, ids[-1:], len(ids) - 1) for i, ids in enumerate(sequences)]
            for ids, result in zip(sequences, self.runner.launch(rows).result(), strict=True):
                ids.append(_token(result))
        return sequences

    def logits(self, prompts: list[list[int]], graph_rows: int = 0) -> Tensor:
        """The logits of each prompt's last token: all prompts but for their last tokens are
        computed in one batch, then the last tokens. With `graph_rows`, as graphs."""
        self.begin(len(prompts), max(map(len, prompts)))
        if graph_rows:
            self.capture(graph_rows, sum(map(len, prompts)))
        heads = [self.row(i, prompt[:-1], 0) for i, prompt in enumerate(prompts)]
        tails = [self.row(i, prompt[-1:], len(prompt) - 1) for i, prompt in enumerate(prompts)]
        return torch.cat([self.runner.logits(rows).cpu().float() for rows in (heads, tails)])


def make_config(
    num_layers: int, hidden_size: int, vocab_size: int, window: int | None = None
) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        family=FAMILIES["Qwen3ForCausalLM"],
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=hidden_size // 32,
        num_kv_heads=hidden_size // 64,
        head_dim=64,
        intermediate_size=3 * hidden_size,
        vocab_size=vocab_size,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        ropes=(RopeConfig(theta=10_000.0),) * num_layers,
        attention_scale=64**-0.5,
        tied_embeddings=False,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        windows=(window,) * num_layers,
        dtype="float32",
        eos_token_ids=(),
        generation=GenerationDefaults(),
    )


def make_model(config: ModelConfig, ops: Backend, dtype: torch.dtype, device: str) -> ComposedModel:
    """Weights of a fixed seed, drawn on the CPU in fp32, so that all devices get the same; those of
    a model of billions are drawn where they are."""
    origin = device if config.hidden_size > 2048 else "cpu"
    draw = torch.Generator(origin).manual_seed(0)
    hidden, wide = config.hidden_size, config.intermediate_size

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=draw, device=origin) * scale
        return values.to(dtype).to(device)

    def linear(num_out: int, num_in: int, bias: bool = False) -> Linear:
        weight = randn(num_out, num_in, scale=2 * num_in**-0.5)
        return Linear(weight, randn(num_out) if bias else None)

    def norm(size: int) -> Tensor:
        return 1 + randn(size, scale=0.1)

    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layers = tuple(
        Layer(
            attention_in=norm(hidden),
            qkv=linear(heads + 2 * kv_heads, hidden, bias=True),
            query_norm=norm(config.head_dim),
            key_norm=norm(config.head_dim),
            output=linear(hidden, heads),
            attention_out=None,
            mlp_in=norm(hidden),
            gate_up=linear(2 * wide, hidden),
            down=linear(hidden, wide),
            mlp_out=None,
            window=window,
            rope=rope,
        )
        for window, rope in zip(config.windows, config.ropes, strict=True)
    )
    return ComposedModel(
        config=config,
        ops=ops,
        embedding=randn(config.vocab_size, hidden, scale=0.03),
        layers=layers,
        final_norm=norm(hidden),
        head=randn(config.vocab_size, hidden, scale=2 * hidden**-0.5),
        weights_digest="",
    )


def prompts(machine: Machine) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    lengths = machine.pick([2, 7, 64, 130, 300], [2, 20])
    return [torch.randint(300, (length,), generator=draw).tolist() for length in lengths]


def _both(machine: Machine, window: int | None, dtype: torch.dtype) -> tuple[Steps, Steps]:
    """The reference on the CPU in fp32, and the kernels on the device."""
    config = make_config(machine.pick(3, 1), machine.pick(256, 64), 384, window)
    here = Steps(config, torch.float32, "reference", "cpu")
    return here, Steps(config, dtype, "triton", machine.device)


def _tokens(machine: Machine, window: int | None) -> Passed:
    here, there = _both(machine, window, torch.float32)
    texts, num_tokens = prompts(machine), machine.pick(24, 2)
    wanted = here.generate(texts, num_tokens, chunk=1000)
    for chunk in (1000, machine.pick(48, 13)):
        found = there.generate(texts, num_tokens, chunk)
        if found != wanted:
            number = sum(ids != other for ids, other in zip(found, wanted, strict=True))
            raise Failed(f"chunks of {chunk}: {number} of {len(texts)} sequences differ")
    return Passed(f"{len(texts)} prompts whole and in chunks, {num_tokens} tokens each")


def _logits(machine: Machine, window: int | None) -> Passed:
    here, there = _both(machine, window, machine.half)
    wanted, found = (steps.logits(prompts(machine)) for steps in (here, there))
    return near(found, wanted, str(machine.half))


def near(found: Tensor, wanted: Tensor, what: str) -> Passed:
    """Raises Failed unless the logits are about the same."""
    error = float((found - wanted).square().mean().sqrt() / wanted.std())
    if not error < BF16_ERROR:
        raise Failed(f"{what}: off by {error:.1%} of their spread; allowed are {BF16_ERROR:.0%}")
    return Passed(f"{what}, off by {error:.1%} of their spread", {"error": error})


def _token(result: object) -> int:
    if not isinstance(result, tuple):
        raise Failed(f"a row drew no token: {result}")
    return int(result[0])


def _loader(machine: Machine) -> Passed:
    """A checkpoint, loaded as a worker does, on the CPU and on the device."""
    try:
        from bench.make_checkpoint import make_checkpoint
        from services.engine.models.load import load_model
    except ModuleNotFoundError as error:
        raise Skipped(f"runs only with all packages of a worker: {error}") from error
    texts = machine.pick(prompts(machine), [[5, 6, 7]])
    found = []
    with tempfile.TemporaryDirectory() as name:
        directory = make_checkpoint(Path(name) / "model")
        for backend, device in (("reference", "cpu"), ("triton", machine.device)):
            ops = kvops.backend(backend)
            model = load_model(directory, torch.float32, ops, device=device)
            found.append(Steps.of(model, ops).generate(texts, machine.pick(24, 2), chunk=1000))
    if differing := sum(a != b for a, b in zip(*found, strict=True)):
        raise Failed(f"{differing} of {len(texts)} sequences differ")
    return Passed(f"{len(texts)} prompts, the tokens of the CPU")
