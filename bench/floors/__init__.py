"""The lower bounds of a step's time on this machine: the time to read its bytes from memory, or to
do its arithmetic, whichever is longer.

Both rates are measured here, in the same run as what they are compared with (`probe.cpp`, compiled
with $CXX or g++): the bandwidth that a virtual machine's neighbours leave it changes by the hour.
"""

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvops.int8_kv import SCALE_BYTES
from services.model.config.model_config import ModelConfig
from services.model.config.quantization import Quantization

_PROBE = Path(__file__).parent / "probe.cpp"
_CPUS = os.sched_getaffinity(0)
"""Before an engine binds the calling thread to one of them, which a child would inherit."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The highest rates of all threads together: bytes read a second, and operations a second of
    each kind (a multiplication and an addition are two)."""

    read: float
    bf16: float
    int8: float


def measure(num_threads: int) -> Rates:
    """Some seconds. CalledProcessError: no compiler, or one that cannot compile for this CPU."""
    compiler = os.environ.get("CXX", "g++")
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "probe"
        options = ("-std=c++17", "-O3", "-march=native", "-pthread")
        subprocess.run([compiler, *options, str(_PROBE), "-o", str(program)], check=True)
        run = subprocess.run(
            [program, str(num_threads)],
            check=True,
            capture_output=True,
            preexec_fn=lambda: os.sched_setaffinity(0, _CPUS),
        )
    return Rates(**json.loads(run.stdout))


_WEIGHT_BYTES = {"int8": 17 / 16, "int4": 9 / 16, "int4-32": 10 / 16, "int4-128": 17 / 32}
"""Of a layer's weight, its part of a group's scale and zero point included; the head's are int8."""


@dataclass(frozen=True, slots=True)
class Work:
    """`num_bytes` read once, `bf16` and `int8` operations."""

    num_bytes: float
    bf16: float
    int8: float = 0.0

    def floor_s(self, rates: Rates) -> float:
        arithmetic = _seconds(self.bf16, rates.bf16) + _seconds(self.int8, rates.int8)
        return max(self.num_bytes / rates.read, arithmetic)


def _seconds(operations: float, rate: float) -> float:
    if operations and not rate:
        raise ValueError("this CPU has no dot products of this kind: there is no floor for it")
    return operations / rate if operations else 0.0


def decode_step(
    config: ModelConfig,
    num_rows: int,
    context: float,
    quantize: Quantization | None,
    kv_in_int8: bool = False,
) -> Work:
    """One token of each row, `context` positions long."""
    weights = _layer_weights(config) + config.vocab_size * config.hidden_size
    attention = _attention_operations(config) * context * num_rows
    kv_bytes = _kv_bytes(config, kv_in_int8) * context * num_rows
    return _work(config, quantize, kv_bytes, 2 * weights * num_rows, attention)


def prefill_of(config: ModelConfig, num_tokens: int, quantize: Quantization | None) -> Work:
    """A whole prompt, of which the last token draws."""
    operations = 2 * (_layer_weights(config) * num_tokens + config.vocab_size * config.hidden_size)
    attention = _attention_operations(config) * num_tokens * (num_tokens + 1) / 2
    return _work(config, quantize, 0, operations, attention)


def _work(
    config: ModelConfig,
    quantize: Quantization | None,
    kv_bytes: float,
    linears: float,
    attention: float,
) -> Work:
    head = config.vocab_size * config.hidden_size
    if quantize is None:
        return Work(2 * (_layer_weights(config) + head) + kv_bytes, linears + attention)
    head_bytes = head * _WEIGHT_BYTES["int8"]
    num_bytes = _layer_weights(config) * _WEIGHT_BYTES[quantize] + head_bytes + kv_bytes
    return Work(num_bytes, attention, linears)


def _layer_weights(config: ModelConfig) -> int:
    """The number of weights in the linears of all layers."""
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * heads + 2 * kv_heads)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def _attention_operations(config: ModelConfig) -> int:
    """The operations of one query and one position in all layers, for scores and values."""
    return 4 * config.num_layers * config.num_heads * config.head_dim


def _kv_bytes(config: ModelConfig, in_int8: bool) -> int:
    """The bytes of one position in bf16 or int8."""
    head_bytes = config.head_dim + SCALE_BYTES if in_int8 else 2 * config.head_dim
    return 2 * config.num_layers * config.num_kv_heads * head_bytes
