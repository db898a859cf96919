"""Models of GGUF files compute what transformers computes with the same dequantized weights.

The bounds are for weights in floating point; `test_formats.py` has those of quantized formats.
"""

import pytest
import torch

from .conftest import NUM_TEXTS, SAMPLE_TOKENS, TEXT_TOKENS, RealModel, all_logits

SAMPLES = {"smollm2": 3, "gemma3": 1}
SAMPLE_SLACK = 0.02
"""By how much the share of a few texts may be less than that of all, in bf16."""

FULL = (pytest.mark.full, pytest.mark.timeout(1200))


@pytest.mark.parametrize("texts", ["sample", pytest.param("all", marks=FULL)])
@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.float32, 1.0), (torch.bfloat16, 0.99)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_the_likeliest_tokens_of_real_texts_are_those_of_transformers(
    models: dict[str, RealModel], name: str, dtype: torch.dtype, least: float, texts: str
) -> None:
    """After every token in fp32; after 99 of 100 in bf16, which rounds."""
    is_exact = dtype == torch.float32
    model, number, length = models[name], NUM_TEXTS, TEXT_TOKENS
    if texts == "sample":
        number, length = SAMPLES[name], SAMPLE_TOKENS
        least -= 0 if is_exact else SAMPLE_SLACK
    runner, same = model.exact if is_exact else model.runner(dtype, dequantize=True), 0
    for text in model.texts[:number]:
        assert len(text) == TEXT_TOKENS
        found = all_logits(runner, text[:length]).argmax(-1)
        same += int((found == model.expected(text[:length])).sum())
    print(f"\n{name} {dtype}: {same / (number * length):.4f} of {number} texts")
    assert same >= least * number * length
