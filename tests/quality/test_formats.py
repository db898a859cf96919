"""Quantized formats on real weights and real texts, beside the same file's weights in fp32.

`pytest -m "full or not full" -s tests/quality/test_formats.py` prints the figures of
docs/benchmarks/quantization.md.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from tests.integration.models_oracle import RecordingRunner

from .conftest import NUM_TEXTS, SAMPLE_TOKENS, TEXT_TOKENS, RealModel, all_logits

NUM_SAMPLES = 2
SAMPLE_SLACK = 0.01
"""By how much the share of a few texts may be less than that of all."""


@dataclass(frozen=True)
class Quality:
    """`perplexity`: of the texts. `same`: the share of positions with the likeliest token of fp32.
    `change`: the mean change of the text's log-probabilities."""

    perplexity: float
    same: float
    change: float

    def __str__(self) -> str:
        return f"{self.perplexity:.3f}, {self.same:.4f}, {self.change:.4f}"


class Comparison:
    """Texts, and what fp32 says about them with the weights of a file."""

    def __init__(self, model: RealModel, num_texts: int) -> None:
        length = TEXT_TOKENS if num_texts == NUM_TEXTS else SAMPLE_TOKENS
        some = model.texts[:: NUM_TEXTS // num_texts][:num_texts]
        self.model, self.texts = model, [text[:length] for text in some]
        self._likeliest, self._logprobs = self._answers(model.exact)

    def quality(self, **options: Any) -> Quality:
        """The quality of the file with the options of a runner, in bf16."""
        likeliest, logprobs = self._answers(self.model.runner(torch.bfloat16, **options))
        return Quality(
            perplexity=math.exp(-float(logprobs.mean())),
            same=float((likeliest == self._likeliest).float().mean()),
            change=float((logprobs - self._logprobs).abs().mean()),
        )

    def _answers(self, runner: RecordingRunner) -> tuple[Tensor, Tensor]:
        """The likeliest tokens, and the log-probabilities of the tokens that follow."""
        likeliest, logprobs = [], []
        for text in self.texts:
            found = all_logits(runner, text).float().log_softmax(-1)
            likeliest.append(found.argmax(-1))
            logprobs.append(found[:-1].gather(1, torch.tensor(text[1:])[:, None]))
        return torch.cat(likeliest), torch.cat(logprobs)


def rewritten(file: Path, path: Path, kind: str) -> RealModel:
    """A copy of a GGUF file with all matrices in another type; the head stays in Q8_0 beside types
    of four bits, as llama.cpp keeps it better than the others."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        stays = tensor.tensor_type.name == "F32" or (kind[1] == "4" and "embd" in tensor.name)
        wanted = tensor.tensor_type if stays else gguf.GGMLQuantizationType[kind]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return RealModel(path)


@pytest.fixture(
    scope="module",
    params=[NUM_SAMPLES, pytest.param(NUM_TEXTS, marks=[pytest.mark.full])],
    ids=["sample", "all"],
)
def num_texts(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(
    scope="module",
    params=[
        *("Q4_1", "Q4_K_M", "BF16"),
        *(pytest.param(kind, marks=pytest.mark.full) for kind in ("Q8_0", "Q4_0")),
    ],
)
def file(
    request: pytest.FixtureRequest,
    models: dict[str, RealModel],
    num_texts: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, Comparison]]:
    """The published files: SmolLM2 (Q4_1) and gemma-3-270m (Q4_K_M). The others are SmolLM2's,
    made from its Q4_1."""
    kind, smollm2 = request.param, models["smollm2"]
    published = {"Q4_1": smollm2, "Q4_K_M": models["gemma3"]}
    path = tmp_path_factory.mktemp("rewritten") / "model.gguf"
    yield kind, Comparison(published.get(kind) or rewritten(smollm2.file, path, kind), num_texts)
    path.unlink(missing_ok=True)


LEAST = {
    "Q4_1": {"auto": 0.99},
    "Q4_K_M": {"auto": 0.99},
    "Q8_0": {"auto": 0.99},
    "Q4_0": {"auto": 0.99},
    "BF16": {"int8": 0.97, "int4": 0.75},
}
"""The least share of likeliest tokens, by the type of a file and by `--quantize`."""


@pytest.fixture(scope="module")
def in_bf16(models: dict[str, RealModel]) -> Callable[[str], tuple[Comparison, Quality]]:
    """Two texts, and what bf16 says about them with the arithmetic of a GPU's kernels."""

    @cache
    def of(name: str) -> tuple[Comparison, Quality]:
        comparison = Comparison(models[name], NUM_SAMPLES)
        return comparison, comparison.quality(backend="reference", dequantize=True)

    return of


def test_quantized_linears_of_a_gpu_cost_no_likeliest_tokens(
    in_bf16: Callable[[str], tuple[Comparison, Quality]],
) -> None:
    """The reference has the arithmetic of the kernels. A bf16 residual stream costs more than on a
    CPU, whatever the weights."""
    comparison, plain = in_bf16("smollm2")
    found = comparison.quality(backend="reference")
    print(f"\nQ4_1 on a GPU: {found}, in bf16: {plain}")
    assert found.same >= 0.97
    assert found.change < plain.change + 0.005


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "least"), [("smollm2", 0.9), pytest.param("gemma3", 0.94, marks=pytest.mark.full)]
)
def test_keys_and_values_in_fp8_change_few_likeliest_tokens(
    in_bf16: Callable[[str], tuple[Comparison, Quality]], name: str, least: float
) -> None:
    """The reference stores what a GPU stores. Beside it: the same file with KV in bf16. Three bits
    of mantissa are few for keys, whatever their scale."""
    comparison, plain = in_bf16(name)
    found = comparison.quality(backend="reference", dequantize=True, kv_in_fp8=True)
    print(f"\n{name}, KV in fp8: {found}, in bf16: {plain}")
    assert found.same >= least
    # PyTorch's products in bf16 differ between processors: 0.086 on AMD, 0.103 on Intel with AMX.
    assert found.change < plain.change + 0.11


@pytest.mark.timeout(1200)
def test_the_likeliest_tokens_are_those_of_the_files_weights(
    file: tuple[str, Comparison], num_texts: int
) -> None:
    kind, comparison = file
    for quantize, least in LEAST[kind].items():
        found = comparison.quality(quantize=None if quantize == "auto" else quantize)
        print(f"\n{kind}, --quantize {quantize}: {found} of {num_texts} texts")
        assert found.same >= least - (SAMPLE_SLACK if num_texts < NUM_TEXTS else 0)
        assert found.change < 3 * (1 - least)
