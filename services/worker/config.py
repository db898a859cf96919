"""Settings of prefill and decode workers."""

import os
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from quire.choices import Quantize
from quire.files import default_name
from quire.options.worker import WorkerOptions
from quire.sizes import parse_size
from quire.supervisor.errors import ModelNotFound
from quire.supervisor.model_source import DEMO, find_model
from services.model.checkpoint.reading import read_model_config
from services.model.checkpoint.shards import SIZES, check_shards, refuse_kind
from services.model.config.model_config import ModelConfig
from services.model.config.quantization import Quantization, StoredKind
from services.pool.sizing import check_capacity
from services.runtime.config import PoolServiceSettings
from services.runtime.errors import StartupError
from services.runtime.numa.topology import parse_cpus
from services.runtime.tracing.opening import check_tracing
from services.worker.computed_kind import computed_kind, is_dequantized, kind_to_make
from services.worker.draft_config import draft_config
from services.worker.preflight import check_cache, check_pool, check_quantize

_BATCHED_TOKENS, _BATCHED_TOKENS_ON_GPU = 512, 8192
_SEQS, _SEQS_ON_GPU = 64, 256
_OF_KERNELS = {"device", "backend", "attention", "isa", "dtype", "kv_dtype", "block_size"}
"""The settings that kernels may refuse."""


class WorkerSettings(WorkerOptions, PoolServiceSettings):
    """Settings of a worker. Each `auto` is resolved once at start, and logged."""

    service: ClassVar[Literal["prefill", "decode"]]

    model: Path = Field(description="checkpoint directory in Hugging Face format, or a GGUF file")
    model_name: str = Field("", description="name that clients use; default: the directory's")
    worker_number: int | None = Field(
        None,
        ge=1,
        description="the worker's number in its run, by which it is named: decode-1; none: its id "
        "is its name",
    )
    first_role: Literal["prefill", "decode"] | None = Field(
        default=None,
        description="the role with which the worker begins, if it is not its service's role",
    )
    num_expected_workers: int = Field(1, ge=1, description="workers that this host has to hold")
    step_limit_s: float = Field(
        default=120.0,
        gt=0,
        description="a step that takes this long is stuck, and ends the worker: more than "
        "max_num_batched_tokens can take here",
    )

    @model_validator(mode="before")
    @classmethod
    def _find_demo(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Put the file of the model `demo` into the values."""
        if str(values.get("model")) != DEMO:
            return values
        try:
            found = find_model(DEMO)
        except ModelNotFound as error:
            raise ValueError(str(error)) from None
        name = values.get("model_name") or found.name
        return {**values, "model": found.directory, "model_name": name}

    @field_validator("tensor_parallel_size")
    @classmethod
    def _check_tensor_parallel_size(cls, size: int) -> int:
        if size not in SIZES:
            raise ValueError(f"{size} is not one of {', '.join(map(str, SIZES))}")
        return size

    @field_validator("cpus")
    @classmethod
    def _check_cpus(cls, text: str) -> str:
        _parse_cpus(text)
        return text

    @property
    def role(self) -> Literal["prefill", "decode"]:
        """The role with which the worker begins."""
        return self.first_role or self.service

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each rank: the named devices, or the named one and those that follow."""
        if "," in self.device:
            return tuple(self.device.split(","))
        kind, _, first = self.device.partition(":")
        ranks = range(self.tensor_parallel_size)
        return tuple(f"{kind}:{int(first) + rank}" if first else kind for rank in ranks)

    @property
    def is_on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def sums_in_order(self) -> bool:
        """Whether ranks add up their parts in one fixed order, as they always do on CPUs."""
        return self.deterministic or self.tensor_parallel_size == 1 or not self.is_on_gpu

    @property
    def kernels(self) -> str:
        """The backend, `auto` resolved."""
        if self.backend != "auto":
            return self.backend
        return "triton" if self.is_on_gpu else "cpu"

    @property
    def divided_cpus(self) -> tuple[int, ...]:
        """CPUs that workers may divide among themselves; empty if `threads` is set."""
        return () if self.threads else _parse_cpus(self.cpus)

    @property
    def divides_cpus(self) -> bool:
        """Whether the worker divides the host's CPUs with others, and lends and borrows them."""
        return self.kernels == "cpu" and not self.threads and self.tensor_parallel_size == 1

    @property
    def num_threads(self) -> int | None:
        """The threads of PyTorch: 1 beside the native kernels, which have threads of their own."""
        return 1 if self.kernels == "cpu" else self.threads

    @property
    def num_seqs(self) -> int:
        """The most sequences that one step computes."""
        default = _SEQS_ON_GPU if self.is_on_gpu else _SEQS
        return self.max_num_seqs or min(default, self.max_num_batched_tokens or default)

    @property
    def num_decode_rows(self) -> int:
        """The most tokens of a decode step on a GPU, drafts included: each is a row of a graph."""
        if self.speculative_config is None:
            return self.num_seqs
        most = self.num_seqs * (1 + self.speculative_config.num_speculative_tokens)
        return min(most, max(self.num_seqs, _SEQS_ON_GPU), self.num_batched_tokens)

    @property
    def graph_lora_rank(self) -> int:
        """The largest rank of adapters in graphs; 0 if graphs have no adapters."""
        return self.max_lora_rank if self.max_loras else 0

    @property
    def num_batched_tokens(self) -> int:
        """The most tokens that one step computes."""
        default = _BATCHED_TOKENS_ON_GPU if self.is_on_gpu else _BATCHED_TOKENS
        return self.max_num_batched_tokens or max(default, self.num_seqs)

    def computed_kind(self, config: ModelConfig) -> StoredKind | Quantization | None:
        """The kind of the model's quantized linears; None if they compute in floating point."""
        return computed_kind(config.quantization, self.dtype, self._served, self.kernels)

    def is_dequantized(self, config: ModelConfig) -> bool:
        """Whether linears that the checkpoint has quantized compute in floating point."""
        return is_dequantized(config.quantization, self.dtype, self._served, self.kernels)

    @property
    def _served(self) -> Quantize:
        """`quantize`; on a CPU, several ranks compute in floating point."""
        return "none" if self.kernels == "cpu" and self.tensor_parallel_size > 1 else self.quantize

    @property
    def kind_to_make(self) -> Quantization | None:
        """The kind to which linears in floating point are quantized; None if they are not."""
        return kind_to_make(self.quantize)

    @property
    def served_name(self) -> str:
        return self.model_name or default_name(self.model)

    @property
    def pool_bytes(self) -> int | None:
        """The size of the pool; None takes half of the memory that is free beside the weights."""
        return parse_size(self.pool_memory) if self.pool_memory else None

    @property
    def swap_bytes(self) -> int | None:
        """The size of the swap pool; None if there is none."""
        has_none = self.preemption == "recompute" or not self.swap_memory
        return None if has_none else parse_size(self.swap_memory)

    @property
    def cache_budget(self) -> int:
        """The most bytes of the cache directory."""
        return parse_size(self.cache_bytes or "0")

    def check(self) -> None:
        """Raises StartupError if there is no checkpoint, if these settings do not fit it (ranks,
        quantization, context, draft model), if the pool has no room or no memory, if the cache
        directory cannot be used, or if the device or its kernels cannot do what is chosen."""
        check_tracing(self, self.otlp_endpoint)
        self.check_speculation()
        config = read_model_config(self.model).for_context(self.max_model_len)
        self.check_ranks(config)
        check_quantize(self, config)
        check_pool(self, config)
        check_cache(self, config)
        self.check_draft(config)
        in_files = (self.pool_bytes or 0) if self.device == "cpu" else 0
        check_capacity(in_files + (self.swap_bytes or 0), self.pool_root)
        if self.model_fields_set & _OF_KERNELS:
            # Imported here because it imports PyTorch, which takes a second and more.
            from services.worker.kernels import check_kernels

            check_kernels(self, config)

    def check_speculation(self) -> None:
        """Raises StartupError if no worker of this kind verifies drafts."""
        if self.speculative_config is None:
            return
        if self.kernels not in ("cpu", "triton") or self.tensor_parallel_size > 1:
            raise StartupError(
                f"speculative_config with backend {self.kernels!r} and tensor_parallel_size "
                f"{self.tensor_parallel_size}: only the backends 'cpu' and 'triton' in one process "
                "verify drafts; remove one of the two settings"
            )

    @property
    def drafts_with_model(self) -> bool:
        """Whether a draft model makes the drafts of decode steps."""
        return self.speculative_config is not None and self.speculative_config.model is not None

    def check_draft(self, config: ModelConfig) -> ModelConfig | None:
        """Return the configuration of the draft model, or None without one. Raises StartupError if
        it does not fit the model."""
        speculative = self.speculative_config
        if speculative is None or speculative.model is None:
            return None
        return draft_config(speculative.model, self.model, config, self.context(config))

    def context(self, config: ModelConfig) -> int:
        """The most positions of a sequence."""
        return self.max_model_len or config.max_position_embeddings

    def check_ranks(self, config: ModelConfig) -> None:
        """Raises StartupError if this model cannot be divided among the ranks."""
        check_shards(config, self.tensor_parallel_size)
        self.check_devices()
        if self.tensor_parallel_size > 1 and self.kernels == "cpu" and self.kind_to_make:
            raise refuse_kind(self.tensor_parallel_size, self.kind_to_make)

    def check_devices(self) -> None:
        """Raises StartupError if `device` does not name one for each rank, or the first one."""
        if (number := len(self.devices)) != self.tensor_parallel_size:
            raise StartupError(
                f"device {self.device} names {number} GPUs, and tensor_parallel_size is "
                f"{self.tensor_parallel_size}: name one for each rank, or the first one only"
            )


class PrefillSettings(WorkerSettings):
    model_config = SettingsConfigDict(env_prefix="QUIRE_PREFILL_")
    service: ClassVar[Literal["prefill", "decode"]] = "prefill"


class DecodeSettings(WorkerSettings):
    model_config = SettingsConfigDict(env_prefix="QUIRE_DECODE_")
    service: ClassVar[Literal["prefill", "decode"]] = "decode"


def _parse_cpus(text: str) -> tuple[int, ...]:
    """ "0-3,6" -> 0, 1, 2, 3, 6; "auto" -> all that this process may use. Raises ValueError."""
    usable = os.sched_getaffinity(0)
    if text == "auto":
        return tuple(sorted(usable))
    try:
        cpus = parse_cpus(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither auto nor a list of CPUs such as 0-3,6") from None
    if not cpus or not cpus <= usable:
        raise ValueError(f"{text!r}: this process may use the CPUs {sorted(usable)}")
    return tuple(sorted(cpus))
