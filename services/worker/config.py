"""Settings that prefill and decode workers share."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from services.common.config import PoolServiceSettings


class WorkerSettings(PoolServiceSettings):
    """`auto` is resolved once at start, from the checkpoint, and logged."""

    model: Path = Field(description="checkpoint directory in Hugging Face format")
    model_name: str = Field("", description="name that clients use; default: the directory's")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="of weights, activations and KV; auto: as in the checkpoint"
    )
    backend: Literal["cpu", "reference", "triton", "flash"] = Field(
        "cpu", description="kernels that compute"
    )
    block_size: int = Field(16, ge=1, le=1024, description="tokens a KV block")
    pool_memory: str = Field(
        "", description="KV pool's size, e.g. 2GiB; empty: half of what is free beside the weights"
    )
    num_expected_workers: int = Field(
        1, ge=1, description="workers that this host's memory has to hold"
    )
    threads: int | None = Field(None, ge=1, description="threads that compute; none: all cores")
    max_model_len: int | None = Field(
        None, ge=2, description="longest prompt + generation; none: the model's context"
    )
    max_num_seqs: int = Field(64, ge=1, description="sequences in one step")
    max_num_batched_tokens: int = Field(512, ge=1, description="tokens computed in one step")
    drain_grace_s: float = Field(
        10.0, ge=0, description="how long running requests may go on after SIGTERM"
    )

    @property
    def num_threads(self) -> int | None:
        return self.threads

    @property
    def served_name(self) -> str:
        return self.model_name or self.model.resolve().name
