"""The measurement of peers, and their arguments."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.peers import llamacpp, peer
from bench.peers.inside.engine import run_batch
from bench.peers.inside.vllm_int8 import quantized
from bench.peers.peer import Command, EngineRun, Figure, ServerOptions, best_of, json_lines
from bench.peers.quire import Quire
from bench.peers.registry import PEERS


class Fake:
    """The second request starts two steps late and gets two tokens a step."""

    def __init__(self) -> None:
        self.steps: Iterator[dict[int, int]] = iter(
            [{0: 1}, {0: 1}, {0: 1, 1: 1}, {0: 1, 1: 2}, {0: 1, 1: 2}]
        )

    def add(self, request: int, prompt: list[int], num_tokens: int) -> None:
        assert num_tokens == 5

    def step(self) -> dict[int, int]:
        return next(self.steps)


def test_decode_is_measured_while_all_requests_decode() -> None:
    """After the third step, in which the second request gets its first token, there are 3 and 3
    tokens."""
    times = run_batch(Fake(), [[1], [2]], 5)
    assert times.num_decoded == 6
    assert times.began < times.all_started < times.first_ended


def test_the_best_of_each_kind_and_size_counts() -> None:
    repeated = [
        Figure("decode", 1, 10.0),
        Figure("prefill", 1, 5.0),
        Figure("decode", 1, 12.0),
        Figure("decode", 8, 11.0),
    ]
    assert best_of(repeated) == [
        Figure("decode", 1, 12.0),
        Figure("prefill", 1, 5.0),
        Figure("decode", 8, 11.0),
    ]


def test_figures_are_found_between_an_engine_s_logs() -> None:
    assert json_lines('INFO {"no"}\n{"tokens_per_s": 1.5}\ndone\n') == [{"tokens_per_s": 1.5}]


def test_a_run_without_prefill_names_none() -> None:
    arguments = " ".join(EngineRun(decode=(1, 8), threads=1).arguments)
    assert arguments == "--decode 1 8 --prompt 128 --tokens 128 --threads 1 --repeats 1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_are_within_half_a_step_of_theirs(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 64, generator=generator).to(dtype)
    norm = torch.ones(64, dtype=dtype)
    result = quantized({"layers.0.q_proj.weight": weight, "norm.weight": norm})
    assert set(result) == {"layers.0.q_proj.weight", "layers.0.q_proj.weight_scale", "norm.weight"}
    packed, scale = result["layers.0.q_proj.weight"], result["layers.0.q_proj.weight_scale"]
    assert packed.dtype == torch.int8
    assert scale.shape == (8, 1)
    # the scale itself is rounded to the checkpoint's dtype: 127 steps of that error at most
    slack = 0.5 + 127 * torch.finfo(dtype).eps
    error = (packed.float() * scale.float() - weight.float()).abs()
    assert bool((error <= slack * scale.float()).all())
    assert result["norm.weight"] is norm


@pytest.mark.parametrize("name", ["llama.cpp", "llama.cpp-k"])
def test_llama_cpp_s_int4_is_made_from_one_file_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    commands: list[tuple[str, ...]] = []

    def converts(command: Command) -> str:
        commands.append(command.arguments)
        (written,) = (Path(word) for word in command.arguments if word.endswith("unfinished.gguf"))
        written.write_text("weights")
        return ""

    monkeypatch.setattr(peer, "DIRECTORY", tmp_path)
    monkeypatch.setattr(llamacpp, "output_of", converts)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_text("weights")
    whole = PEERS["llama.cpp"].prepare(checkpoint, "bfloat16")
    quantized = PEERS[name].prepare(checkpoint, "int4")
    assert PEERS[name].prepare(checkpoint, "int4") == quantized  # made once
    assert [command[3:5] for command in commands[:1]] == [("--outtype", "bf16")]
    unfinished = str(quantized.with_name("unfinished.gguf"))
    ((_, *words),) = commands[1:]
    assert words == [str(whole), unfinished, {"llama.cpp": "Q4_0", "llama.cpp-k": "Q4_K_M"}[name]]


def test_quire_serves_the_weights_that_are_compared() -> None:
    def words(dtype: peer.Dtype) -> str:
        return " ".join(Quire().server(Path("model"), dtype, ServerOptions(8000)).arguments)

    assert "--quantize int4" in words("int4")
    assert "--quantize int8" in words("int8")
    assert "--quantize" not in words("bfloat16")


@pytest.mark.parametrize(
    ("name", "dtype", "group"),
    [
        ("openvino", "bfloat16", None),
        ("openvino", "int8", "32"),
        ("openvino", "int4", "32"),
        ("openvino-128", "int4", "128"),
    ],
)
def test_openvino_quantizes_activations_beside_quantized_weights(
    name: str, dtype: peer.Dtype, group: str | None
) -> None:
    """In its server; the table's header says it."""
    arguments = PEERS[name].server(Path("model"), dtype, ServerOptions(8000)).arguments
    option = dict(itertools.pairwise(arguments)).get("--activation-group")
    assert option == group
    assert (f"activations by {group}" in PEERS[name].formats[dtype]) == (group is not None)
