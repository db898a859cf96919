"""A model divided among GPUs, a process for each (NCCL), against the same model on the CPU in one.
In a dry run the ranks are on the CPU (gloo)."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import kvops
from bench.gpu.check import Check, Failed, Machine, Passed, Skipped
from bench.gpu.model import BF16_ERROR, BLOCK_SIZE, Steps, make_config, make_model
from kvops import AttentionShape, Backend, choose_attention
from services.engine.models.decoder import ComposedModel, Layer, Linear
from services.engine.ranks.collectives import connect
from services.model.checkpoint.shards import Shard
from services.model.config.model_config import ModelConfig

FP32_ERROR = 1e-3
"""Of logits, root mean square, as a share of their spread."""

LIMIT_S = 120
NUM_STEPS = 8

_PROMPTS = [list(range(5, 5 + length)) for length in (2, 9, 20)]


def checks(machine: Machine) -> Iterator[Check]:
    for size in machine.pick((2, 4, 8), (2,)):
        yield f"logits of {size} ranks in fp32", partial(_logits, machine, size)
        yield f"graphs of {size} ranks", partial(_graphs, machine, size)


def _logits(machine: Machine, size: int) -> Passed:
    wanted = Steps(_config(machine.device), torch.float32, "reference", "cpu").logits(_PROMPTS)
    found = _computed(machine, size, "logits")["logits"]
    error = float((found - wanted).square().mean().sqrt() / wanted.std())
    if not error < FP32_ERROR or not torch.equal(found.argmax(-1), wanted.argmax(-1)):
        raise Failed(f"off by {error:.1e} of their spread, or other tokens; allowed {FP32_ERROR}")
    return Passed(f"off by {error:.1e} of their spread, the same tokens", {"error": error})


def _graphs(machine: Machine, size: int) -> Passed:
    """Decode steps of 5 rows from graphs of 6, with NCCL's exchanges in them, between eager steps:
    the logits of eager steps, and their time. With the attention that a worker chooses."""
    found = _computed(machine, size, "graphs")
    eager, graphed = found["eager"], found["graphed"]
    error = float((graphed - eager).square().mean().sqrt() / eager.std())
    seconds = {name: float(found[f"{name} seconds"]) for name in ("eager", "graphed")}
    text = ", ".join(f"{name} {value * 1e3:.2f} ms a step" for name, value in seconds.items())
    text = f"off by {error:.1e} of their spread; {text}"
    if not error < BF16_ERROR:
        raise Failed(f"{text}; allowed {BF16_ERROR}")
    return Passed(text, {"error": error, **seconds})


def _computed(machine: Machine, size: int, what: str) -> dict[str, Tensor]:
    """The results that rank 0 of `size` ranks has saved."""
    num_gpus = torch.cuda.device_count()
    if not machine.dry_run and num_gpus < size:
        raise Skipped(f"{size} ranks need a GPU each; here are only {num_gpus}")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.gpu.ranks", folder, str(size), machine.device]
        processes = [subprocess.Popen([*command, str(rank), what]) for rank in range(size)]
        try:
            statuses = [process.wait(LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(statuses):
            raise Failed(f"ranks ended with status {statuses}")
        found: dict[str, Tensor] = torch.load(Path(folder) / "found.pt")
    return found


def _config(device: str) -> ModelConfig:
    """8 query heads, 4 KV heads of which 8 ranks have copies; 387 tokens do not divide. A graph's
    attention has programs for the longest context, which a dry run interprets one after another."""
    longest = 4096 if device == "cuda" else 64
    config = make_config(2, 256, 387)
    return replace(config, num_heads=8, num_kv_heads=4, max_position_embeddings=longest)


class _ShardSteps(Steps):
    """The steps of one rank. All ranks run the same."""

    def __init__(
        self, folder: Path, shard: Shard, device: str, ops: Backend, dtype: torch.dtype
    ) -> None:
        there = torch.device("cuda", shard.rank) if device == "cuda" else torch.device("cpu")
        model = cut(make_model(shard.config, ops, dtype, "cpu"), shard, there)
        model.collectives = connect(folder / "store", shard, there, LIMIT_S)
        self._take(model, ops)

    def decode(self, context: int, num_steps: int) -> Tensor:
        """The logits of steps of 5 rows with given tokens: of all of them at rank 0."""
        found = [
            self.runner.logits([self.row(i, [7 * step + i], context + step) for i in range(5)])
            for step in range(num_steps)
        ]
        return torch.cat(found).cpu().float()


def _found(folder: Path, shard: Shard, device: str, what: str) -> dict[str, Tensor]:
    if what == "logits":
        ops = kvops.backend("triton")
        steps = _ShardSteps(folder, shard, device, ops, torch.float32)
        return {"logits": steps.logits(_PROMPTS)}
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    c = shard.own_config
    shape = AttentionShape(c.num_heads, c.num_kv_heads, c.head_dim, BLOCK_SIZE, dtype, dtype)
    steps = _ShardSteps(folder, shard, device, choose_attention("auto", shape)[0], dtype)
    num_steps, context = (NUM_STEPS, 100) if device == "cuda" else (2, 10)
    steps.begin(5, 3 * context, content=0.0)
    found: dict[str, Tensor] = {}
    for name in ("eager", "graphed"):
        if name == "graphed":
            steps.capture(6)
        steps.decode(context, num_steps)
        began = time.perf_counter()
        found[name] = steps.decode(2 * context, num_steps)
        found[f"{name} seconds"] = torch.tensor((time.perf_counter() - began) / num_steps)
    return found


def cut(whole: ComposedModel, shard: Shard, device: torch.device) -> ComposedModel:
    """The shard of a model without biases of row-parallel linears."""
    c = whole.config
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    heads, kv_heads, mlp = shard.part("heads"), shard.part("kv_heads"), shard.part("mlp")

    def qkv(joined: Tensor) -> Tensor:
        q, k, v = torch.tensor_split(joined, (q_size, q_size + kv_size))
        return torch.cat([q[heads], k[kv_heads], v[kv_heads]]).to(device)

    def layer(one: Layer) -> Layer:
        assert one.gate_up is not None
        assert one.down is not None
        gate, up = one.gate_up.weight.chunk(2)

        def norm(weight: Tensor | None) -> Tensor | None:
            return None if weight is None else weight.to(device)

        return Layer(
            attention_in=norm(one.attention_in),
            qkv=Linear(qkv(one.qkv.weight), None if one.qkv.bias is None else qkv(one.qkv.bias)),
            query_norm=norm(one.query_norm),
            key_norm=norm(one.key_norm),
            output=Linear(one.output.weight[:, heads].contiguous().to(device), None),
            attention_out=norm(one.attention_out),
            mlp_in=norm(one.mlp_in),
            gate_up=Linear(torch.cat([gate[mlp], up[mlp]]).to(device), None),
            down=Linear(one.down.weight[:, mlp].contiguous().to(device), None),
            mlp_out=norm(one.mlp_out),
            window=one.window,
            rope=one.rope,
        )

    return ComposedModel(
        config=shard.own_config,
        ops=whole.ops,
        embedding=whole._embedding[shard.vocabulary].to(device),
        layers=tuple(map(layer, whole._layers)),
        final_norm=whole._final_norm.to(device),
        head=whole._head[shard.vocabulary].to(device),
        weights_digest="",
    )


def main() -> None:
    folder, size, device, rank, what = sys.argv[1:]
    if device == "cuda":
        torch.cuda.set_device(int(rank))
    found = _found(Path(folder), Shard(_config(device), int(rank), int(size)), device, what)
    if rank == "0":
        torch.save(found, Path(folder) / "found.pt")


if __name__ == "__main__":
    main()
