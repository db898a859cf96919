"""A model with experts from GGUF files beside the same in bf16 safetensors: loading and decoding.

    python -m bench.gguf_experts --streams 1 8 --kinds BF16 Q8_0 Q4_0 MXFP4

Writes a Qwen 3 MoE with random weights: 8 layers of 32 experts, of which 4 compute a token, 0.42
billion parameters in all. Attention and the head of a file in MXFP4 are in Q8_0, as llama.cpp has
them. Loading is a first start, which packs the weights, without a cache. Then all models decode in
turn, in one process; a figure is the median of --rounds of 32 steps.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import kvops
from bench.engine import Bench
from kvops.native import Lane
from services.engine.models import load_model

_STEPS, _PROMPT = 32, 128
_CONFIG = AutoConfig.for_model(
    "qwen3_moe",
    num_hidden_layers=8,
    hidden_size=1024,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=2048,
    moe_intermediate_size=512,
    num_experts=32,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    vocab_size=8192,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    dtype="bfloat16",
)


def tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """With a tensor for each of the experts' three linears, as GGUF has them."""
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            gate, up = tensor.chunk(2, dim=1)
            yield from ((f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up))
        else:
            yield name + ".weight" * name.endswith("experts.down_proj"), tensor


def write(model: PreTrainedModel, path: Path, kind: str) -> None:
    c = _CONFIG
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, c.num_hidden_layers)
    for name, tensor in tensors(model):
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        is_exact = tensor.dim() == 1 or "ffn_gate_inp" in stored
        usual = "Q8_0" if kind == "MXFP4" and "_exps" not in stored else kind
        type_ = Type["F32" if is_exact else usual]
        values = gguf.quantize(tensor.float().numpy(), type_)
        writer.add_tensor(stored, values, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def size_of(path: Path) -> int:
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


def measure(paths: dict[str, Path], streams: list[int], rounds: int, threads: int) -> None:
    backend = kvops.backend("cpu")
    assert backend.native is not None
    backend.native.assign([Lane()] * threads)
    models, loading = {}, {}
    for name, path in paths.items():
        began = time.perf_counter()
        models[name] = load_model(path, torch.bfloat16, backend)
        loading[name] = time.perf_counter() - began
    speeds: dict[tuple[str, int], list[float]] = {}
    for number in streams:
        benches = {n: Bench(m, number, _PROMPT + _STEPS, False) for n, m in models.items()}
        first = {
            n: [b.prefill(b.prompt(_PROMPT), 512, r) for r in range(number)]
            for n, b in benches.items()
        }
        for _ in range(rounds):
            for name, bench in benches.items():
                took = sum(bench.decode(first[name], _PROMPT, _STEPS))
                speeds.setdefault((name, number), []).append(number * _STEPS / took)
    print("model | file, MB | load, s | " + " | ".join(f"{n} streams, tokens/s" for n in streams))
    for name, path in paths.items():
        figures = " | ".join(f"{statistics.median(speeds[name, n]):.0f}" for n in streams)
        print(f"{name} | {size_of(path) / 1e6:.0f} | {loading[name]:.1f} | {figures}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kinds", nargs="+", default=["BF16", "Q8_0", "Q4_0", "MXFP4"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_CONFIG, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as directory:
        paths = {"safetensors": Path(directory) / "safetensors"}
        model.save_pretrained(paths["safetensors"])
        for kind in args.kinds:
            paths[f"GGUF, {kind}"] = Path(directory) / f"{kind}.gguf"
            write(model, paths[f"GGUF, {kind}"], kind)
        measure(paths, args.streams, args.rounds, args.threads)


if __name__ == "__main__":
    main()
