"""Times the kernels of a model one by one: seconds, bytes and operations a second."""

import ctypes
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bench.steps import BLOCK_SIZE
from kvops import int8_kv
from kvops.native import Kind, Lane, NativeCpu, PackedLinear, aligned, packed_bytes
from services.model.config.model_config import ModelConfig

if TYPE_CHECKING:
    from bench.engine import Options

_MIN_S = 0.3
_MOST_DECODING = 64
_READ_BYTES, _COLUMNS, _DEPTH, _TILE_PRODUCTS = 256 << 20, 512, 512, 50_000
_TILE_FLAGS = ("-O3", "-shared", "-fPIC", "-mavx512f", "-mamx-tile", "-mamx-bf16")
_KINDS: dict[str | None, Kind] = {
    None: "bfloat16",
    "int8": "int8",
    "int4": "int4-64",
    "int4-32": "int4-32",
    "int4-128": "int4-128",
}


def kernels(config: ModelConfig, args: "Options") -> Iterator[str]:
    """A line for each kernel and number of rows."""
    num_threads = len(args.cpus) or args.threads
    cpu = NativeCpu(num_threads)
    if args.cpus:
        cpu.assign([Lane(index) for index in args.cpus])
    yield f"{num_threads} threads ({cpu.isa})"
    kind: Kind = _KINDS[args.quantize]
    for name, num_outputs, num_inputs in _linears(config):
        for rows in args.rows:
            floors = _floors(cpu, num_threads) if args.floor else []
            times = _time_linear(cpu, kind, num_outputs, num_inputs, rows, floors)
            num_bytes = packed_bytes(kind, num_outputs, num_inputs)
            yield _line(name, rows, times, num_bytes, 2 * num_outputs * num_inputs * rows)
    for rows in (rows for rows in args.rows if rows <= _MOST_DECODING):
        for in_int8 in (False, True) if args.kv_dtype == "int8" else (False,):
            times = _time_attention(cpu, config, rows, args.context, args.shared, in_int8)
            head_bytes = config.head_dim + int8_kv.SCALE_BYTES if in_int8 else 2 * config.head_dim
            num_bytes = 2 * rows * args.context * config.num_kv_heads * head_bytes
            operations = 4 * rows * args.context * config.num_heads * config.head_dim
            name = "int8 KV" if in_int8 else "attention"
            yield _line(name, rows, times, num_bytes, operations)


def _linears(config: ModelConfig) -> list[tuple[str, int, int]]:
    """(name, outputs, inputs)"""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    return [
        ("qkv", heads + 2 * kv_heads, hidden),
        ("output", hidden, heads),
        ("gate_up", 2 * config.intermediate_size, hidden),
        ("down", hidden, config.intermediate_size),
        ("head", config.vocab_size, hidden),
    ]


def weight_bytes(config: ModelConfig, quantize: str | None) -> int:
    """The bytes of all linears; the head is int8 in a quantized model."""
    *layer, (_, *head) = _linears(config)
    of_layer = sum(packed_bytes(_KINDS[quantize], n, k) for _, n, k in layer)
    head_bytes = packed_bytes("int8" if quantize else "bfloat16", *head)
    return config.num_layers * of_layer + head_bytes


def _time_linear(
    cpu: NativeCpu, kind: Kind, n: int, k: int, rows: int, floors: "Sequence[Floor]"
) -> list[float]:
    """Seconds of one, and the rates of its floors; as many weights take turns as no cache holds."""
    num_bytes = packed_bytes(kind, n, k)
    pieces = torch.cat(list(cpu.packed_pieces(kind, n, [torch.randn(n, k).bfloat16()])))
    packed = []
    for _ in range(max(1, (256 << 20) // num_bytes)):
        memory = aligned(num_bytes)
        memory.copy_(pieces)
        packed.append(PackedLinear(kind, n, k, memory))
    x = torch.randn(rows, k).bfloat16()
    out = torch.empty(rows, n)
    return _seconds([partial(cpu.ops.linear, x, w, out) for w in packed], floors)


class Floor(NamedTuple):
    """Something that the machine cannot do faster."""

    call: Callable[[], object]
    amount: int
    """The bytes that a call reads, or the operations that it computes."""


def _floors(cpu: NativeCpu, num_threads: int) -> list[Floor]:
    """A plain read of memory that no cache holds, and products: of AMX tiles from L1, with their
    loads; on other machines a linear in bf16 that L2 holds."""
    words = torch.zeros(_READ_BYTES, dtype=torch.int8).view(torch.int64)
    read = Floor(lambda: words.sum(), _READ_BYTES)
    if cpu.isa == "amx":
        multiply = _tile_products()
        lanes = ThreadPoolExecutor(num_threads)
        counts = [_TILE_PRODUCTS] * num_threads
        return [read, Floor(lambda: list(lanes.map(multiply, counts)), sum(counts) * 2 * 32**3)]
    x, weight = torch.randn(512, _DEPTH).bfloat16(), torch.randn(_COLUMNS, _DEPTH).bfloat16()
    packed, out = cpu.pack("bfloat16", weight), torch.empty(512, _COLUMNS)
    return [read, Floor(lambda: cpu.ops.linear(x, packed, out), 2 * 512 * _COLUMNS * _DEPTH)]


@cache
def _tile_products() -> Callable[[int], object]:
    """Compiles `tile_floor.cpp`. Raises CalledProcessError if the compiler fails."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "tile_floor.so"
        source = Path(__file__).with_name("tile_floor.cpp")
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, *_TILE_FLAGS, str(source), "-o", str(library)], check=True)
        multiply = ctypes.CDLL(str(library)).multiply_tiles
    multiply.argtypes = [ctypes.c_int64]
    return multiply


def _time_attention(
    cpu: NativeCpu, config: ModelConfig, rows: int, context: int, num_shared: int, in_int8: bool
) -> list[float]:
    """Seconds of one layer of rows that decode, of whose positions all have the first in common."""
    common = num_shared // BLOCK_SIZE
    blocks = -(-context // BLOCK_SIZE) - common
    shape = (config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    kv = torch.randn(common + rows * blocks, *shape).bfloat16()
    if in_int8:
        kv = int8_kv.quantize(kv)
    ids = torch.randperm(len(kv)).to(torch.int32)
    own = ids[common:].view(rows, blocks)
    tables = torch.cat([ids[:common].expand(rows, common), own], dim=1).contiguous()
    q = torch.randn(rows, config.num_heads, config.head_dim).bfloat16()
    cu_query_lens = torch.arange(rows + 1, dtype=torch.int32)
    context_lens = torch.full((rows,), context, dtype=torch.int32)
    scale, out = config.head_dim**-0.5, torch.empty_like(q)

    def attend(layer: Tensor) -> None:
        cpu.ops.attention(q, layer, tables, cu_query_lens, context_lens, scale, 0, out)

    layers = [kv[:, index] for index in range(config.num_layers)]
    return _seconds([partial(attend, layer) for layer in layers])


def _seconds(calls: list[Callable[[], None]], floors: Sequence[Floor] = ()) -> list[float]:
    """The mean time of one call, in the best of the rounds that fit into the time, and the rate of
    each floor in that round: a core may be twice as fast at another moment."""
    best, until = [float("inf")], time.perf_counter() + _MIN_S
    for number in range(1000):
        marks = [time.perf_counter()]
        for call in calls:
            call()
        marks.append(time.perf_counter())
        for floor in floors:
            floor.call()
            marks.append(time.perf_counter())
        took, *others = (end - begin for begin, end in itertools.pairwise(marks))
        rates = [floor.amount / each for floor, each in zip(floors, others, strict=True)]
        best = min(best, [took / len(calls), *rates])
        if number > 1 and marks[-1] > until:
            break
    return best


def _line(name: str, rows: int, times: list[float], num_bytes: int, operations: int) -> str:
    seconds, *floors = times
    rates = [num_bytes / seconds / 1e9, operations / seconds / 1e9]
    line = f"{name:<10}{rows:>5} rows {1e6 * seconds:>9.1f} us"
    line += f" {rates[0]:>6.1f} GB/s {rates[1]:>7.0f} GFLOP/s"
    if floors:
        possible = [floor / 1e9 for floor in floors]
        line += f", floor {possible[0]:.1f} GB/s ({rates[0] / possible[0]:.0%})"
        line += f" {possible[1]:.0f} GFLOP/s ({rates[1] / possible[1]:.0%})"
    return line
