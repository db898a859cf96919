"""Measures the embedded model: greedy answers of the saved bf16 weights to four sets of questions.

* trained: a question of each fact that training has seen;
* combinations: held-out expansions of the same patterns, such as an unseen pair of verb and topic;
* phrasings: held-out wordings written apart from the patterns;
* declined: questions outside of the domain, about subjects that training never names.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from tools.embedded_model.corpus import Corpus, Fact
from tools.embedded_model.render import END_OF_TEXT, END_OF_TURN, sentence, user_turn
from tools.embedded_model.train import Model

NEAR = 0.9
"""Similarity (0 to 1, of words in order) from which an answer counts as a near match."""
MAX_NEW_TOKENS = 320
BATCH_SIZE = 48


@dataclass(frozen=True)
class Score:
    """Shares (0 to 1) of one set of questions."""

    num_questions: int
    exact: float
    near: float
    ended: float
    """Answers that the model ended by itself."""


@dataclass(frozen=True)
class Reply:
    """What the model wrote, without the special tokens."""

    text: str
    ended: bool


Pair = tuple[str, str]
"""A question, and its right answer."""


def evaluate(corpus: Corpus, folder: Path, questions_per_fact: int = 1) -> dict[str, Score]:
    """Scores the checkpoint in `folder`, and prints the answers that went wrong."""
    model, tokenizer = load(folder)
    scores = {}
    for name, pairs in _question_sets(corpus, questions_per_fact).items():
        replies = answer(model, tokenizer, [user_turn(sentence(asked)) for asked, _ in pairs])
        scores[name] = _score(pairs, replies)
        print(f"{name}: {json.dumps(asdict(scores[name]))}", flush=True)
        for (asked, expected), reply in zip(pairs, replies, strict=True):
            if _similarity(expected, reply.text) < NEAR:
                print(f"  {asked!r}\n    wants {expected!r}\n    wrote {reply.text!r}")
    return scores


def load(folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[Model, Tokenizer]:
    """The checkpoint, ready to answer."""
    model: Model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def answer(model: Model, tokenizer: Tokenizer, prompts: list[str]) -> list[Reply]:
    """Greedy replies to prompts of any length, in the order of the prompts."""
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    by_length = sorted(range(len(prompts)), key=lambda index: len(encoded[index]))
    replies: dict[int, Reply] = {}
    for start in range(0, len(by_length), BATCH_SIZE):
        chosen = by_length[start : start + BATCH_SIZE]
        written = _generate(model, tokenizer, [encoded[index] for index in chosen])
        replies.update(zip(chosen, written, strict=True))
    return [replies[index] for index in range(len(prompts))]


def _generate(model: Model, tokenizer: Tokenizer, prompts: list[list[int]]) -> Iterator[Reply]:
    """One batch, padded on the left."""
    length = max(map(len, prompts))
    pad = tokenizer.token_to_id(END_OF_TEXT)
    ends = {pad, tokenizer.token_to_id(END_OF_TURN)}
    input_ids = torch.tensor([[pad] * (length - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in prompts])
    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS
        )
    for row in output[:, length:].tolist():
        written = next((row[:at] for at, token in enumerate(row) if token in ends), row)
        yield Reply(tokenizer.decode(written).strip(), ended=len(written) < len(row))


def _question_sets(corpus: Corpus, questions_per_fact: int) -> dict[str, list[Pair]]:
    random = Random(0)
    answered = (*corpus.facts, *corpus.lookups)

    def draw(fact: Fact, questions: tuple[str, ...]) -> list[Pair]:
        chosen = random.sample(questions, min(questions_per_fact, len(questions)))
        return [(question, fact.answer) for question in chosen]

    declined = corpus.declined
    return {
        "trained": [pair for fact in answered for pair in draw(fact, fact.questions)],
        "combinations": [pair for fact in answered for pair in draw(fact, fact.combinations)],
        "phrasings": [(asked, fact.answer) for fact in answered for asked in fact.phrasings],
        "declined": [(asked, declined.answer) for asked in declined.phrasings],
    }


def _score(pairs: list[Pair], replies: list[Reply]) -> Score:
    likeness = [
        _similarity(expected, reply.text)
        for (_, expected), reply in zip(pairs, replies, strict=True)
    ]
    return Score(
        num_questions=len(pairs),
        exact=round(sum(value == 1 for value in likeness) / len(pairs), 4),
        near=round(sum(value >= NEAR for value in likeness) / len(pairs), 4),
        ended=round(sum(reply.ended for reply in replies) / len(pairs), 4),
    )


def _similarity(expected: str, written: str) -> float:
    return SequenceMatcher(None, expected.split(), written.split(), autojunk=False).ratio()
