"""Each family gives the greedy tokens of transformers, from checkpoints that transformers has
written, on both backends that a CPU has; and the same bits in any batch."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.model.checkpoint.reading import read_model_config
from services.model.config.quantization import Quantization

from .family_checkpoints import CASES, make
from .models_oracle import NUM_NEW_TOKENS, Oracle, RecordingRunner, Trial, random_prompt

WHOLE = 4096
Checkpoints = Callable[[str], tuple[Path, Oracle]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    @cache
    def of(name: str) -> tuple[Path, Oracle]:
        directory = make(tmp_path_factory.mktemp("family"), CASES[name])
        return directory, Oracle(directory)

    return of


def placed(recording: RecordingRunner, lengths: Sequence[int]) -> list[Trial]:
    return [recording.place(random_prompt(length, seed=length)) for length in lengths]


@pytest.mark.parametrize(
    ("backend", "chunk", "block_size"), [("cpu", 7, 16), ("cpu", WHOLE, 5), ("reference", 64, 16)]
)
@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_transformers(
    checkpoints: Checkpoints, name: str, backend: str, chunk: int, block_size: int
) -> None:
    """All prompts in one batch: the last one joins when the others decode."""
    directory, oracle = checkpoints(name)
    case = CASES[name]
    num_blocks = sum(case.lengths) // block_size + 3 * len(case.lengths) * NUM_NEW_TOKENS
    recording = RecordingRunner(directory, block_size, num_blocks, backend, context=case.context)
    trials = placed(recording, case.lengths)
    recording.decode_all(trials, chunk, late=1)
    for trial in trials:
        answer = oracle.answer(trial.prompt)
        assert trial.new_tokens == answer.token_ids
        torch.testing.assert_close(torch.stack(trial.logits), answer.logits, rtol=0, atol=2e-4)


@pytest.mark.parametrize("model_type", sorted({case.model_type for case in CASES.values()}))
def test_absent_field_has_the_value_of_transformers(model_type: str, tmp_path: Path) -> None:
    """A config.json of sizes alone means what transformers' own config of these sizes says."""
    sizes = {
        "hidden_size": 4096,
        "num_hidden_layers": 40,  # more than the default of max_window_layers
        "num_attention_heads": 32,
        "intermediate_size": 12_288,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    }
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    whole = AutoConfig.for_model(model_type, **sizes).to_dict()
    read = []
    for fields in (sizes, whole):
        config = fields | {"architectures": [architecture], "eos_token_id": None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        read.append(read_model_config(tmp_path))
    assert read[0] == read[1]


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_the_batch(checkpoints: Checkpoints, name: str) -> None:
    """In bf16 on the CPU."""
    check_bits(checkpoints(name)[0], name, torch.bfloat16, None, kv_in_int8=False)


@pytest.mark.parametrize(
    "name", ["olmo2", "phi3, partial longrope", "glm4", "gemma2", "gemma3", "mixtral", "gpt-oss"]
)
@pytest.mark.parametrize(
    ("quantize", "kv_in_int8"), [("int8", False), ("int4", False), (None, True)]
)
def test_quantized_families_have_their_own_bits_too(
    checkpoints: Checkpoints, name: str, quantize: Quantization | None, kv_in_int8: bool
) -> None:
    """Logits are near those of transformers in fp32: their correlation shows a wrong order of rows
    or a missing factor."""
    directory, oracle = checkpoints(name)
    own = check_bits(directory, name, torch.bfloat16, quantize, kv_in_int8=kv_in_int8)
    expected = oracle.answer(own.prompt).logits[0]
    similarity = torch.corrcoef(torch.stack([own.logits[0], expected]))[0, 1]
    least = 0.95 if name == "mixtral" else 0.98  # a rounding may choose another expert
    assert similarity > (0.7 if quantize == "int4" else least)


def check_bits(
    directory: Path,
    name: str,
    dtype: torch.dtype,
    quantize: Quantization | None,
    *,
    kv_in_int8: bool,
) -> Trial:
    """A prompt has the same logits alone in one piece, and in chunks on three threads beside
    others. Returns the logits."""
    case = CASES[name]

    def run(num_others: int, chunk: int, num_threads: int) -> Trial:
        recording = RecordingRunner(
            directory,
            16,
            400,
            "cpu",
            dtype,
            quantize=quantize,
            kv_in_int8=kv_in_int8,
            num_threads=num_threads,
            context=case.context,
        )
        own, *others = placed(recording, (max(case.lengths), *range(5, 5 + num_others)))
        recording.decode_all([*others, own], chunk, late=1)
        return own

    alone, among = run(0, WHOLE, 1), run(9, 29, 3)
    assert torch.equal(torch.stack(alone.logits), torch.stack(among.logits))
    return alone
