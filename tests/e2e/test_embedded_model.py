"""The embedded checkpoint loads with Hugging Face transformers and answers readably."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EMBEDDED = Path(__file__).parents[2] / "quire" / "embedded"
DTYPES = (torch.bfloat16, torch.float32)


def written_after(prompt: str, dtype: torch.dtype) -> str:
    """The greedy continuation of the prompt, special tokens included."""
    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED)
    model: Any = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=dtype)
    encoded = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**encoded, max_new_tokens=100, do_sample=False)[0]
    text: str = tokenizer.decode(output[encoded["input_ids"].shape[1] :])
    return text


def chat_prompt(question: str) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED)
    messages = [{"role": "user", "content": question}]
    prompt: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return prompt


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("question", "beginning"),
    [
        ("Hello!", "Hello! I am the small model that comes with Quire."),
        ("What is paged attention?", "Paged attention is attention over a KV cache"),
        ("How do I start Quire?", "Type `make up`."),
    ],
)
def test_a_question_is_answered(question: str, beginning: str, dtype: torch.dtype) -> None:
    """A chat question gets the trained answer, and the model ends its turn by itself."""
    answer = written_after(chat_prompt(question), dtype)
    assert answer.startswith(beginning)
    assert answer.endswith("<|im_end|>")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_plain_prompt_is_completed(dtype: torch.dtype) -> None:
    """A sentence without a chat template is continued to its end."""
    assert written_after("The capital of France is", dtype) == " Paris.<|endoftext|>"
