"""A model on a GPU against the same model on the CPU, and how fast attention reads the KV.

    python -m bench.gpu_check tokens [--backend triton] [--device cuda]
    python -m bench.gpu_check bandwidth [--backend triton]

`tokens`: tokens in fp32, greedy and sampled, must be those of the reference, and logits in bf16
within 3 % of their spread (root mean square; the CPU's own bf16 is at 2 %); of a model without and
of one with a sliding window; prompts in one piece, in chunks, and decoded in one batch. Exit status
1 if not. flash-attn has no fp32: there the logits are all. On the CPU (`--device cpu`,
TRITON_INTERPRET=1) Triton's interpreter computes: no bf16, and little of everything, since it takes
its time.

`bandwidth`: bytes of keys and values per second in decode, beside what copying a gigabyte within
the GPU's memory reaches, and arithmetic per second in prefill.
"""

import argparse
import copy
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvops
from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from kvops import Backend
from services.common.pool.layout import PoolLayout
from services.engine.batch import Draw, Row, RowResult
from services.engine.models import Model, load_model
from services.engine.models.decoder import Layer, Linear
from services.engine.pool import KVPool
from services.engine.runner import Runner
from services.protocol.ticket import SamplingParams

SPECS = {
    "grouped queries": CheckpointSpec(head_dim=64, num_layers=3, dtype="bfloat16"),
    "sliding window": CheckpointSpec(
        "mistral", head_dim=64, num_layers=3, sliding_window=50, dtype="bfloat16"
    ),
}
BF16_ERROR = 0.03
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=64)
DRAWS = (Draw(GREEDY, 0), Draw(replace(GREEDY, temperature=1.0, top_p=0.95, seed=7), 0))
"""Of the prompts in turn."""

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
DECODE_SHAPES = ((1, 1024), (1, 32768), (8, 4096), (64, 1024), (64, 8192), (256, 2048))
PREFILL_LENGTHS = (512, 2048, 8192)
TIMED_RUNS = 20


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts, how many tokens each gets, and the chunks that they are computed in."""

    prompts: tuple[list[int], ...]
    num_tokens: int
    chunk: int

    @classmethod
    def of(cls, lengths: Sequence[int], num_tokens: int, chunk: int) -> "Load":
        draw = random.Random(0).choices
        return cls(tuple(draw(range(256), k=length) for length in lengths), num_tokens, chunk)

    @property
    def longest(self) -> int:
        return max(len(prompt) for prompt in self.prompts)


ON_GPU = Load.of((1, 7, 64, 130, 300), num_tokens=24, chunk=48)
INTERPRETED = Load.of((1, 7, 60), num_tokens=3, chunk=48)


class Engine:
    """A model with a pool of its own, on one device."""

    def __init__(self, model: Model, load: Load, device: str, block_size: int) -> None:
        config = model.config
        self._load = load
        self._num_blocks = -(-(load.longest + load.num_tokens) // block_size)
        layout = PoolLayout(
            model="check",
            fingerprint="",
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype="float32" if model.dtype == torch.float32 else "bfloat16",
            block_size=block_size,
        )
        pool = KVPool.private(layout, self._num_blocks * len(load.prompts), device)
        self._runner = Runner(model, pool.kv, block_size, kvops.backend("reference"))

    def tokens(self, chunk: int) -> list[list[int]]:
        """Each prompt computed alone, in chunks, then all decoded together."""
        sequences = [list(prompt) for prompt in self._load.prompts]
        for i, prompt in enumerate(self._load.prompts):
            for start in range(0, len(prompt), chunk):
                (token,) = self._runner.run([self._row(i, prompt[start : start + chunk], start)])
            sequences[i].append(_drawn(token))
        for _ in range(self._load.num_tokens - 1):
            rows = [self._row(i, ids[-1:], len(ids) - 1) for i, ids in enumerate(sequences)]
            for ids, token in zip(sequences, self._runner.run(rows), strict=True):
                ids.append(_drawn(token))
        return sequences

    def logits(self) -> Tensor:
        """Of every prompt but for its last token, all in one batch, then of the last tokens:
        [2 * prompts, vocab_size], on the CPU."""
        prompts = [prompt for prompt in self._load.prompts if len(prompt) > 1]
        heads = [self._row(i, prompt[:-1], 0) for i, prompt in enumerate(prompts)]
        tails = [self._row(i, prompt[-1:], len(prompt) - 1) for i, prompt in enumerate(prompts)]
        return torch.cat([self._runner.logits(rows).cpu() for rows in (heads, tails)])

    def _row(self, i: int, token_ids: Sequence[int], start: int) -> Row:
        first = i * self._num_blocks
        return Row(token_ids, start, range(first, first + self._num_blocks), 0, (DRAWS[i % 2],))


def _drawn(drawn: RowResult) -> int:
    if not isinstance(drawn, tuple):
        raise RuntimeError("a row with a draw drew no token")
    return drawn[0]


def on_device(model: Model, backend: Backend, device: str) -> Model:
    """The same model computing there, with all tensors that it holds."""
    there = copy.copy(model)
    for name, value in vars(model).items():
        setattr(there, name, backend if isinstance(value, Backend) else _moved(value, device))
    return there


def _moved(value: Any, device: str) -> Any:
    match value:
        case Tensor():
            return value.to(device)
        case tuple():
            return tuple(_moved(part, device) for part in value)
        case Layer() | Linear():
            parts = {field.name: getattr(value, field.name) for field in fields(value)}
            return replace(value, **{name: _moved(part, device) for name, part in parts.items()})
        case _:
            return value


def check_tokens(backend_name: str, device: str) -> bool:
    backend, reference = kvops.backend(backend_name), kvops.backend("reference")
    load = INTERPRETED if device == "cpu" else ON_GPU
    good = True
    for name, spec in SPECS.items():
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = make_checkpoint(Path(directory), spec)
            exact = load_model(checkpoint, torch.float32, reference)
            if backend_name != "flash":
                there = Engine(on_device(exact, backend, device), load, device, 16)
                good &= _same_tokens(name, Engine(exact, load, "cpu", 16), there, load)
            if device != "cpu":
                rough = load_model(checkpoint, torch.bfloat16, reference)
                there = Engine(on_device(rough, backend, device), load, device, 256)
                good &= _near_logits(name, Engine(exact, load, "cpu", 256), there)
    return good


def _same_tokens(name: str, here: Engine, there: Engine, load: Load) -> bool:
    wanted = here.tokens(load.longest)
    good = True
    for chunk in (load.longest, load.chunk):
        same = there.tokens(chunk) == wanted
        good &= same
        print(f"{name}, fp32, chunks of {chunk}: tokens {'equal' if same else 'DIFFER'}")
    return good


def _near_logits(name: str, here: Engine, there: Engine) -> bool:
    wanted = here.logits()
    error = float((there.logits() - wanted).square().mean().sqrt() / wanted.std())
    good = error < BF16_ERROR
    print(f"{name}, bf16: logits {'within' if good else 'OFF BY'} {error:.1%} of their spread")
    return good


def print_bandwidth(backend_name: str) -> None:
    ops = kvops.backend(backend_name)
    block_size = 256 if backend_name == "flash" else 16
    copied = _copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copying moves {copied / 1e9:,.0f} GB/s\n")
    print(f"{NUM_HEADS} heads, {NUM_KV_HEADS} KV heads, head size {HEAD_DIM}, bf16, {ops.name}\n")
    print("| decode: rows | context | us | GB/s | of copying |\n|---:|---:|---:|---:|---:|")
    for rows, context in DECODE_SHAPES:
        seconds = _seconds(_attention(ops, rows, 1, context, block_size))
        rate = rows * context * NUM_KV_HEADS * HEAD_DIM * 2 * 2 / seconds
        share = f"{rate / 1e9:,.0f} | {rate / copied:.0%}"
        print(f"| {rows} | {context} | {seconds * 1e6:,.0f} | {share} |")
    print("\n| prefill: tokens | us | TFLOP/s |\n|---:|---:|---:|")
    for length in PREFILL_LENGTHS:
        seconds = _seconds(_attention(ops, 1, length, length, block_size))
        rate = 4 * NUM_HEADS * HEAD_DIM * length * (length + 1) / 2 / seconds
        print(f"| {length} | {seconds * 1e6:,.0f} | {rate / 1e12:,.0f} |")


def _attention(
    ops: Backend, rows: int, new: int, context: int, block_size: int
) -> Callable[[], object]:
    """One call over blocks in random order."""
    per_row = -(-context // block_size)
    shape = (rows * per_row, 1, 2, block_size, NUM_KV_HEADS, HEAD_DIM)
    arena = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    tables = torch.randperm(rows * per_row, device="cuda").int().view(rows, per_row)
    q = torch.randn(rows * new, NUM_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    begins = torch.arange(0, rows * new + 1, new, device="cuda", dtype=torch.int32)
    contexts = torch.full((rows,), context, device="cuda", dtype=torch.int32)
    return lambda: ops.paged_attention(q, arena[:, 0], tables, begins, contexts, HEAD_DIM**-0.5)


def _copy_bandwidth() -> float:
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def _seconds(call: Callable[[], object]) -> float:
    """The best of some runs. Before each, a gigabyte goes through the cache, which also takes
    longer than the host needs to launch the call."""
    cache = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    call()
    best = float("inf")
    for _ in range(TIMED_RUNS):
        begin, end = _event(), _event()
        cache.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return best


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def main() -> None:
    parser = argparse.ArgumentParser(description="A model and its attention on a GPU.")
    parser.add_argument("what", choices=("tokens", "bandwidth"))
    parser.add_argument("--backend", choices=("triton", "flash"), default="triton")
    parser.add_argument("--device", default="cuda", help="of `tokens`; cpu: Triton's interpreter")
    args = parser.parse_args()
    if args.what == "bandwidth":
        print_bandwidth(args.backend)
    elif not check_tokens(args.backend, args.device):
        sys.exit(1)


if __name__ == "__main__":
    main()
