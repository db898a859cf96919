"""A model's steps with all tensors on the GPU, against the same model on the CPU."""

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import kvops
from bench.gpu.check import Check, Failed, Machine, Passed, Skipped
from bench.steps import GREEDY, Steps
from kvops import Backend
from services.engine.batch import Draw
from services.engine.models.decoder import ComposedModel, Layer, Linear
from services.model.config.families import FAMILIES
from services.model.config.model_config import GenerationDefaults, ModelConfig
from services.model.config.rope_config import RopeConfig
from services.protocol.ticket import SamplingParams

BF16_ERROR = 0.03
"""Of logits, root mean square, as a share of their spread; a CPU's bf16 is at 0.02."""

DRAWS = (GREEDY, Draw(SamplingParams(temperature=1.0, top_p=0.95, seed=7), 0))
"""The draws of steps on one device. Devices of different kinds need not draw the same tokens."""


def checks(machine: Machine) -> Iterator[Check]:
    for name, window in (("all positions", None), ("a window", 50)):
        yield f"tokens in fp32 are the CPU's, {name}", partial(_tokens, machine, window)
        yield f"logits near the CPU's, {name}", partial(_logits, machine, window)
    yield "weights loaded from a checkpoint", lambda: _loader(machine)


def random_steps(config: ModelConfig, dtype: torch.dtype, backend: str, device: str) -> Steps:
    """Steps of a model with random weights on a device."""
    ops = kvops.backend(backend)
    return Steps(make_model(config, ops, dtype, device), ops)


def generate(
    steps: Steps,
    prompts: list[list[int]],
    num_tokens: int,
    chunk: int,
    draws: Sequence[Draw] = (GREEDY,),
    graph_rows: int = 0,
) -> list[list[int]]:
    """Each prompt alone, in chunks; then all together. The prompts have the draws in turn. With
    `graph_rows`, as graphs of up to so many rows and of chunks."""
    longest = max(map(len, prompts))
    steps.begin(len(prompts), longest + num_tokens)
    if graph_rows:
        steps.capture(graph_rows, min(chunk, longest))
    of_each = [draws[number % len(draws)] for number in range(len(prompts))]
    sequences = [
        [*prompt, _token(steps.prefill(number, prompt, chunk, (draw,)))]
        for number, (prompt, draw) in enumerate(zip(prompts, of_each, strict=True))
    ]
    for _ in range(num_tokens - 1):
        rows = [
            steps.row(number, ids[-1:], len(ids) - 1, (draw,))
            for number, (ids, draw) in enumerate(zip(sequences, of_each, strict=True))
        ]
        for ids, result in zip(sequences, steps.runner.launch(rows).result(), strict=True):
            ids.append(_token(result))
    return sequences


def last_logits(steps: Steps, prompts: list[list[int]], graph_rows: int = 0) -> Tensor:
    """The logits of each prompt's last token: all prompts but for their last tokens are computed
    in one batch, then the last tokens. With `graph_rows`, as graphs."""
    steps.begin(len(prompts), max(map(len, prompts)))
    if graph_rows:
        steps.capture(graph_rows, sum(map(len, prompts)))
    heads = [steps.row(i, prompt[:-1], 0) for i, prompt in enumerate(prompts)]
    tails = [steps.row(i, prompt[-1:], len(prompt) - 1) for i, prompt in enumerate(prompts)]
    return torch.cat([steps.runner.logits(rows).cpu().float() for rows in (heads, tails)])


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
    here = random_steps(config, torch.float32, "reference", "cpu")
    return here, random_steps(config, dtype, "triton", machine.device)


def _tokens(machine: Machine, window: int | None) -> Passed:
    here, there = _both(machine, window, torch.float32)
    texts, num_tokens = prompts(machine), machine.pick(24, 2)
    wanted = generate(here, texts, num_tokens, chunk=1000)
    for chunk in (1000, machine.pick(48, 13)):
        found = generate(there, texts, num_tokens, chunk)
        same_texts(found, wanted, f"chunks of {chunk}")
    return Passed(f"{len(texts)} prompts whole and in chunks, {num_tokens} tokens each")


def same_texts(found: list[list[int]], wanted: list[list[int]], what: str) -> None:
    """Raises Failed with the number of sequences that differ."""
    if differing := sum(a != b for a, b in zip(found, wanted, strict=True)):
        raise Failed(f"{what}: {differing} of {len(wanted)} sequences differ")


def _logits(machine: Machine, window: int | None) -> Passed:
    wanted, found = (
        last_logits(steps, prompts(machine)) for steps in _both(machine, window, machine.half)
    )
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
            steps = Steps(load_model(directory, torch.float32, ops, device=device), ops)
            found.append(generate(steps, texts, machine.pick(24, 2), chunk=1000))
    same_texts(found[1], found[0], "on the device")
    return Passed(f"{len(texts)} prompts, the tokens of the CPU")
