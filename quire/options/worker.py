"""The options that prefill and decode workers get."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from quire.choices import Attention, Backend, Dtype, Isa, KvDtype, Numa, Preemption, Quantize
from quire.options.flag import Flag
from quire.options.shared import Options
from quire.sizes import duration, memory_size
from quire.speculative_config import SpeculativeConfig, check_speculative_config

Size = Annotated[str, AfterValidator(memory_size), Flag("SIZE", parser=memory_size)]
"""A size as text, such as 2GiB; empty if there is none."""


class WorkerOptions(Options):
    """The options of both roles."""

    pool_memory: Size = Field(
        default="",
        description="the pool's KV memory, such as 2GiB; the first worker of a host creates the "
        "pool; default: half of what is free beside the weights (1GiB for the demo model)",
    )
    swap_memory: Size = Field(
        default="",
        description="size of the swap pool, to which [preempted requests](cpu.md#preemption) are "
        "copied; default: there is none",
    )
    cache_directory: Annotated[Path | None, Flag("DIR")] = Field(
        default=None,
        description="directory of this host's disk in which blocks that prompts ask for again "
        "outlive the pool and the run: [a tier below memory](cpu.md#a-tier-below-memory); none: "
        "there is no such tier",
    )
    cache_bytes: Size = Field(default="10GiB", description="the most that cache_directory may hold")
    preemption: Preemption = Field(
        default="auto",
        description="how requests are preempted; auto: swap where that costs less, by measured "
        "times",
    )
    tensor_parallel_size: Annotated[int, Flag("N")] = Field(
        default=1,
        ge=1,
        le=8,
        description="[ranks of a worker](gpu.md#tensor-parallelism), processes that divide the "
        "model's weights and KV heads: 1, 2, 4 or 8, the same for all workers of a pool",
    )
    deterministic: bool = Field(
        default=False,
        description="several ranks on GPUs add up their parts in "
        "[one fixed order](gpu.md#deterministic-sums), as they always do on CPUs: slower, and the "
        "same bits whatever else a step computes",
    )
    block_size: Annotated[int, Flag("TOKENS")] = Field(
        default=16, ge=1, le=1024, description="tokens of a KV block"
    )
    dtype: Dtype = Field(
        default="auto", description="weights, activations and KV; auto: as in the checkpoint"
    )
    device: Annotated[str, Flag("DEVICE")] = Field(
        default="cpu",
        description="cpu, or [a GPU](gpu.md#workers-on-a-gpu): cuda:0; the first GPU of several "
        "ranks, or all of them: cuda:0,cuda:2; memfd:0 (for tests) computes on the CPU, and keeps "
        "its pool as on a GPU",
    )
    gpu_memory_utilization: Annotated[float, Flag("SHARE")] = Field(
        default=0.9,
        ge=0.01,
        le=1,
        description="share of the GPU's memory for the pool and all workers of this deployment; "
        "without effect if pool_memory is set",
    )
    backend: Backend = Field(default="auto", description="kernels; auto: cpu, or triton on a GPU")
    attention: Attention = Field(
        default="auto",
        description="[attention](gpu.md#attention-on-a-gpu) beside the backend triton; auto: on "
        "Hopper and Blackwell flashinfer, then flash, then triton, the first that is installed and "
        "serves the model",
    )
    enforce_eager: bool = Field(
        default=False,
        description="launch every kernel of a step instead of replaying CUDA graphs",
    )
    isa: Isa = Field(
        default="auto",
        description="instruction set of the backend cpu, the same for all workers of a host; auto: "
        "[the fastest](cpu.md#cpus) that the CPU has, by its vendor",
    )
    quantize: Quantize = Field(
        default="auto",
        description="auto: as in the checkpoint; none: in dtype, dequantized if the checkpoint is "
        "quantized; int8: linears of 8-bit weights in groups of 32 inputs; int4, int4-32, "
        "int4-128: of 4-bit weights in groups of 64, 32 or 128 inputs, with an int8 head; "
        "activations have 16 bits",
    )
    kv_dtype: KvDtype = Field(
        default="auto",
        description="keys and values; auto: as dtype; in half of bfloat16's memory: int8, with a "
        "scale for each head of a position, on CPUs only, and fp8 (e4m3, no scale), on GPUs only",
    )
    cpus: Annotated[str, Flag("LIST")] = Field(
        default="auto",
        description="CPUs that this host's workers divide, such as 0-3,6; auto: one of each core "
        "that they may use, or all if there are more workers than cores",
    )
    threads: Annotated[int | None, Flag("N")] = Field(
        default=None,
        ge=1,
        description="threads that compute, on any CPU and never lent; excludes cpus; default: one "
        "for each CPU of the worker's part of cpus",
    )
    numa: Numa = Field(
        default="auto",
        description="auto: with several [NUMA nodes](cpu.md#numa-nodes), threads and memory of a "
        "worker are on nodes of its own; off: all CPUs are one node",
    )
    max_gap_ms: Annotated[float | None, Flag("MS", parser=duration)] = Field(
        default=None,
        ge=0,
        description="the inter-token latency while prompts wait: after a step, its CPUs compute "
        "prompts until then; default: twice the time of the step, at most 100; 0: they never do",
    )
    weights_cache: Annotated[Path | None, Flag("DIR")] = Field(
        default=Path("~/.cache/quire"),
        validate_default=True,
        description="directory of packed weights, made once and mapped by all of this host's "
        "workers; none: each packs its own",
    )
    max_model_len: Annotated[int | None, Flag("TOKENS")] = Field(
        default=None, ge=2, description="longest prompt + generation; default: the model's context"
    )
    max_num_seqs: Annotated[int | None, Flag("N")] = Field(
        default=None,
        ge=1,
        description="sequences in one step of a decode worker; default: 64, on a GPU 256, or "
        "max_num_batched_tokens where that is less",
    )
    max_num_batched_tokens: Annotated[int | None, Flag("N")] = Field(
        default=None,
        ge=1,
        description="tokens computed in one step, at least max_num_seqs; default: 512, on a GPU "
        "8192, or max_num_seqs where that is more",
    )
    mix: bool = Field(
        default=False,
        description="decode workers prefill, too, in the steps that decode, and `quire serve` "
        "starts no prefill workers: for [prefill and decode on one GPU]"
        "(gpu.md#prefill-and-decode-in-one-worker)",
    )
    speculative_config: Annotated[
        SpeculativeConfig | None,
        BeforeValidator(lambda value: json.loads(value) if isinstance(value, str) else value),
        Flag("JSON", parser=check_speculative_config),
    ] = Field(
        default=None,
        description="[speculative decoding](../speculative-decoding.md), such as "
        '{"method": "ngram", "num_speculative_tokens": 5}, and for n-grams of other sizes '
        '"prompt_lookup_min" and "prompt_lookup_max"; or {"model": "DIR|FILE|ID", '
        '"num_speculative_tokens": 5} for drafts of a smaller model, with "draft_kv_memory" for '
        "its KV; the backend cpu only; default: no drafts",
    )

    @field_validator("preemption")
    @classmethod
    def _check_swap(cls, preemption: Preemption, others: ValidationInfo) -> Preemption:
        if preemption == "swap" and not others.data.get("swap_memory"):
            raise ValueError("swap, but there is no swap_memory to swap to")
        return preemption

    @field_validator("quantize", mode="before")
    @classmethod
    def _name_none(cls, quantize: str | None) -> str:
        """The word none, which the settings of other options take for no value."""
        return quantize or "none"

    @field_validator("quantize")
    @classmethod
    def _check_dtype(cls, quantize: Quantize, others: ValidationInfo) -> Quantize:
        if quantize not in ("auto", "none") and others.data.get("dtype") == "float32":
            raise ValueError(f"{quantize} computes in bfloat16, and dtype is float32: choose one")
        return quantize

    @field_validator("weights_cache", "cache_directory", mode="before")
    @classmethod
    def _expand_home(cls, path: str | Path | None) -> Path | None:
        if path is None:
            return None
        if not str(path):
            raise ValueError("a directory, or none")
        with suppress(RuntimeError):  # this user has no home: `services.worker.weights_cache` warns
            return Path(path).expanduser()
        return Path(path)

    @field_validator("max_num_batched_tokens")
    @classmethod
    def _check_batched_tokens(cls, num_tokens: int | None, others: ValidationInfo) -> int | None:
        num_seqs = others.data.get("max_num_seqs") or 0
        if num_tokens is not None and num_tokens < num_seqs:
            raise ValueError(f"{num_tokens} is less than max_num_seqs, {num_seqs}")
        return num_tokens

    @field_validator("device")
    @classmethod
    def _check_device(cls, text: str) -> str:
        names = text.split(",")
        is_gpu = re.fullmatch(r"(cuda:\d+,)*cuda:\d+|(memfd:\d+,)*memfd:\d+", text)
        if text != "cpu" and (is_gpu is None or len(set(names)) < len(names)):
            raise ValueError(
                f"{text!r} is neither cpu nor a GPU such as cuda:0, nor several different ones"
            )
        return text
