"""Law 10: a sequence's logits and KV have the same bits in any batch, in any chunks, with a cached
or decoded prefix, on any number of threads, and with any source of the packed weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from kvops import int8_kv
from kvops.native import emulated_kernels, usable_kernels
from services.model.config.quantization import Quantization

from .models_oracle import NUM_NEW_TOKENS, RecordingRunner, Trial, random_prompt

# No size is a multiple of a panel, of a tile or of another one's.
_SIZES = CheckpointSpec(hidden_size=148, intermediate_size=212, vocab_size=601, head_dim=20)
SPECS = {
    "qwen3": replace(_SIZES, num_heads=6, num_kv_heads=2),
    "llama": replace(_SIZES, family="llama", num_layers=3, num_kv_heads=4, tied=False),
    "mistral": replace(_SIZES, family="mistral", num_kv_heads=1, sliding_window=70),
}
KINDS: dict[str, tuple[torch.dtype, Quantization | None, bool]] = {
    "float32": (torch.float32, None, False),
    "bfloat16": (torch.bfloat16, None, False),
    "int8": (torch.bfloat16, "int8", False),
    "int4": (torch.bfloat16, "int4", False),
    "KV in int8": (torch.bfloat16, None, True),
}
"""Computation, weights, and whether KV is in int8."""
PROMPT = random_prompt(150, seed=0)
BLOCK_SIZE = 16
WHOLE = 4096

Make = Callable[[str], Path]


@dataclass(frozen=True, slots=True)
class Outcome:
    """logits: [new tokens, vocab_size]. kv: [positions, layers, 2, kv heads, head size]."""

    token_ids: list[int]
    logits: Tensor
    kv: Tensor

    def assert_equals(self, other: "Outcome") -> None:
        assert self.token_ids == other.token_ids
        assert torch.equal(self.logits, other.logits)
        assert torch.equal(self.kv, other.kv)


class Sequence:
    """The sequence that is computed again and again."""

    def __init__(self, directory: Path, kind: str, isa: str | None = None) -> None:
        self._directory = directory
        self._kind = kind
        self._isa = isa
        self.expected = self.compute()

    def recording(self, *, block_size: int = BLOCK_SIZE, **options: Any) -> RecordingRunner:
        dtype, quantize, kv_in_int8 = KINDS[self._kind]
        num_blocks = 2048 // block_size + 256
        return RecordingRunner(
            self._directory,
            block_size,
            num_blocks,
            dtype=dtype,
            quantize=quantize,
            kv_in_int8=kv_in_int8,
            isa=self._isa,
            **options,
        )

    def compute(self, *, chunk: int = WHOLE, **options: Any) -> Outcome:
        recording = self.recording(**options)
        trial = recording.place(PROMPT)
        recording.decode_all([trial], chunk)
        return outcome(recording, trial)


def outcome(recording: RecordingRunner, trial: Trial) -> Outcome:
    positions = recording.arena[trial.block_table].permute(0, 3, 1, 2, 4, 5).flatten(0, 1)
    stored = len(trial.prompt) + NUM_NEW_TOKENS - 1  # the last token is drawn and not computed
    kv = positions[:stored].clone()
    in_int8 = kv.dtype == torch.int8
    assert (int8_kv.dequantize(kv) if in_int8 else kv).isfinite().all()
    return Outcome(trial.new_tokens, torch.stack(trial.logits), kv)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(name: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(name), SPECS[name])

    return make


SAMPLE = {"float32": "qwen3", "int8": "mistral", "int4": "llama", "KV in int8": "qwen3"}
"""The model of each kind in `make test`, which has bf16, the default, with every model."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((kind, name), marks=() if SAMPLE.get(kind, name) == name else pytest.mark.full)
        for kind, name in product(KINDS, SPECS)
    ],
    ids=", ".join,
)
def sequence(checkpoints: Make, request: pytest.FixtureRequest) -> Sequence:
    kind, name = request.param
    return Sequence(checkpoints(name), kind)


@pytest.mark.parametrize("chunk", [1, 7, 64, 149])
def test_logits_do_not_depend_on_the_chunks_of_the_prompt(sequence: Sequence, chunk: int) -> None:
    """In chunks of 1 it is decoded token by token."""
    sequence.compute(chunk=chunk).assert_equals(sequence.expected)


@pytest.mark.parametrize(("batch", "chunk"), [(2, WHOLE), (5, 33), (17, 64), (64, 7), (64, WHOLE)])
def test_logits_do_not_depend_on_the_batch(sequence: Sequence, batch: int, chunk: int) -> None:
    """It joins a batch with half of the other prompts and decoding rows, and the rest joins
    later."""
    recording = sequence.recording()
    others = [random_prompt(1 + i * 37 % 100, seed=i) for i in range(1, batch)]
    suspects = [recording.place(prompt) for prompt in others]
    suspects.insert(batch // 2, own := recording.place(PROMPT))
    recording.decode_all(suspects, chunk, late=1)
    outcome(recording, own).assert_equals(sequence.expected)


def test_logits_do_not_depend_on_a_cached_prefix(sequence: Sequence) -> None:
    """First of another prompt, computed in other chunks; then its own whole prompt."""
    recording = sequence.recording()
    donor = recording.place((*PROMPT[:100], *random_prompt(30, seed=5)))
    recording.decode_all([donor], chunk=11)
    partly = recording.place(PROMPT, donor)
    assert partly.num_cached == 96
    recording.decode_all([partly], WHOLE)
    outcome(recording, partly).assert_equals(sequence.expected)
    wholly = recording.place(PROMPT, partly)
    assert wholly.num_cached == 144
    recording.decode_all([wholly], WHOLE)
    outcome(recording, wholly).assert_equals(sequence.expected)


def test_logits_of_decoded_tokens_equal_those_of_a_prompt(sequence: Sequence) -> None:
    """As after a recompute: the first tokens of the answer are computed with the prompt."""
    recording = sequence.recording()
    again = recording.place(PROMPT + tuple(sequence.expected.token_ids[:4]))
    recording.decode_all([again], WHOLE)
    found = outcome(recording, again)
    assert found.token_ids[:2] == sequence.expected.token_ids[4:]
    assert torch.equal(found.logits[:2], sequence.expected.logits[4:])
    assert torch.equal(found.kv[:-4], sequence.expected.kv)


@pytest.mark.parametrize("block_size", [1, 5, 256])
def test_logits_do_not_depend_on_the_block_size(sequence: Sequence, block_size: int) -> None:
    sequence.compute(block_size=block_size).assert_equals(sequence.expected)


@pytest.mark.parametrize(("num_threads", "chunk"), [(2, WHOLE), (4, WHOLE), (4, 50), (3, 1)])
def test_logits_do_not_depend_on_the_number_of_threads(
    sequence: Sequence, num_threads: int, chunk: int
) -> None:
    sequence.compute(num_threads=num_threads, chunk=chunk).assert_equals(sequence.expected)


def test_logits_do_not_depend_on_packed_weights(sequence: Sequence, tmp_path: Path) -> None:
    """In the process that packs them, and in one that finds them packed."""
    for _ in range(2):
        sequence.compute(cache=tmp_path).assert_equals(sequence.expected)
    assert len([path for path in tmp_path.iterdir() if path.suffix != ".lock"]) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", [*usable_kernels()[1:], *emulated_kernels()])
def test_logits_do_not_depend_on_the_batch_on_any_instruction_set(
    checkpoints: Make, kind: str, isa: str
) -> None:
    """Separately: between them the bits may differ, and such workers share no pool."""
    sequence = Sequence(checkpoints("qwen3"), kind, isa)
    recording = sequence.recording(num_threads=3)
    assert recording.ops.numerics(torch.float32)["isa"] == isa
    others = [recording.place(random_prompt(1 + i * 37 % 100, seed=i)) for i in range(1, 40)]
    recording.decode_all([*others, own := recording.place(PROMPT)], chunk=29, late=1)
    outcome(recording, own).assert_equals(sequence.expected)
    sequence.compute(chunk=1).assert_equals(sequence.expected)
