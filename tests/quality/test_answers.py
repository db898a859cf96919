"""SmolLM2-135M-Instruct answers as in transformers, and as a user of the default expects."""

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, Sampling
from services.model.text.tokenizer import Tokenizer

from .conftest import RealModel

NUM_TOKENS = 32
QUESTIONS = (
    "What is the capital of France?",
    "What is the chemical symbol of gold?",
    "Name three animals that live in the sea.",
    "Write one sentence about the moon.",
    "Translate to French: Good morning, my friend.",
    "What is 2 + 2?",
)


def chat(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


def greedy(llm: LLM, *questions: str) -> list[tuple[int, ...]]:
    sampling = Sampling(temperature=0, max_tokens=NUM_TOKENS)
    found = llm.chat([chat(question) for question in questions], sampling, use_tqdm=False)
    return [answer.choices[0].token_ids for answer in found]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_directory(smollm2)


def test_greedy_answers_in_fp32_are_those_of_transformers(
    models: dict[str, RealModel], smollm2: Path
) -> None:
    """Float32 on a quantized file dequantizes it. One step computes all six chats."""
    model = models["smollm2"]
    with LLM(str(smollm2), dtype="float32", pool_memory="128MiB", threads=2) as llm:
        answers = greedy(llm, *QUESTIONS)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        prompt = model.prompt(question)
        chosen = model.expected([*prompt, *answer])[len(prompt) - 1 : -1]
        assert list(answer) == chosen.tolist(), question


def test_the_default_model_knows_the_capital_of_france(tokenizer: Tokenizer) -> None:
    """With the weights of the file (Q4_1), as `LLM()` and `quire serve` load it."""
    with LLM("demo", pool_memory="128MiB") as llm:
        (answer,) = greedy(llm, QUESTIONS[0])
    assert tokenizer.decode(answer) == "The capital of France is Paris."
