"""Measures the embedded model: greedy answers of the saved bf16 weights to six sets of questions.

* trained: a question of each fact that training has seen;
* combinations: held-out expansions of the same patterns, such as an unseen pair of verb and topic;
* phrasings: held-out wordings written apart from the patterns;
* declined: questions outside of the domain, about subjects that training never names;
* long: held-out phrasings after a system message of some 500 tokens without sense;
* blind: questions written when the corpus was finished, and never used to improve it.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from tools.embedded_model.corpus import Corpus, Fact
from tools.embedded_model.render import (
    END_OF_TEXT,
    END_OF_TURN,
    filler,
    sentence,
    system_turn,
    user_turn,
)
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
    """The text that the model wrote, without the special tokens."""

    text: str
    ended: bool


@dataclass(frozen=True)
class Probe:
    """A question, the answers that are right, and what the system message says."""

    question: str
    right: tuple[str, ...]
    system: str = ""

    def prompt(self) -> str:
        turn = user_turn(sentence(self.question))
        return system_turn(self.system) + turn if self.system else turn

    def likeness(self, written: str) -> float:
        """Similarity to the right answer that is nearest."""
        return max(
            SequenceMatcher(None, expected.split(), written.split(), autojunk=False).ratio()
            for expected in self.right
        )


def evaluate(corpus: Corpus, folder: Path, questions_per_fact: int = 1) -> dict[str, Score]:
    """Scores the checkpoint in `folder`, and prints the answers that went wrong."""
    model, tokenizer = load(folder)
    scores = {}
    for name, probes in _probes(corpus, questions_per_fact).items():
        replies = answer(model, tokenizer, [probe.prompt() for probe in probes])
        scores[name] = _score(probes, replies)
        print(f"{name}: {json.dumps(asdict(scores[name]))}", flush=True)
        for probe, reply in zip(probes, replies, strict=True):
            if probe.likeness(reply.text) < NEAR:
                print(f"  {probe.question!r}\n    wants {probe.right[0]!r}")
                print(f"    wrote {reply.text!r}", flush=True)
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
            do_sample=False, input_ids=input_ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS
        )
    for row in output[:, length:].tolist():
        written = next((row[:at] for at, token in enumerate(row) if token in ends), row)
        yield Reply(tokenizer.decode(written).strip(), ended=len(written) < len(row))


def _probes(corpus: Corpus, questions_per_fact: int) -> dict[str, list[Probe]]:
    random = Random(0)
    answered = (*corpus.facts, *corpus.lookups)

    def draw(fact: Fact, questions: tuple[str, ...]) -> list[Probe]:
        chosen = random.sample(questions, min(questions_per_fact, len(questions)))
        return [Probe(question, (fact.answer,)) for question in chosen]

    phrasings = [Probe(asked, (fact.answer,)) for fact in answered for asked in fact.phrasings]
    return {
        "trained": [probe for fact in answered for probe in draw(fact, fact.questions)],
        "combinations": [probe for fact in answered for probe in draw(fact, fact.combinations)],
        "phrasings": phrasings,
        "declined": [
            Probe(asked, (corpus.declined.answer,)) for asked in corpus.declined.phrasings
        ],
        "long": [
            replace(probe, system=filler(corpus, random, num_words=300))
            for probe in random.sample(phrasings, 100)
        ],
        "blind": list(_blind(corpus)),
    }


def _blind(corpus: Corpus) -> Iterator[Probe]:
    """Leaves out what a pattern happens to make too."""
    trained = {sentence(question) for fact in corpus.all_facts() for question in fact.questions}
    for question, beginnings in corpus.blind:
        right = tuple(
            fact.answer for fact in corpus.all_facts() if fact.answer.startswith(beginnings)
        )
        if sentence(question) not in trained:
            yield Probe(question, right)


def _score(probes: list[Probe], replies: list[Reply]) -> Score:
    likeness = [probe.likeness(reply.text) for probe, reply in zip(probes, replies, strict=True)]
    return Score(
        num_questions=len(probes),
        exact=round(sum(value == 1 for value in likeness) / len(probes), 4),
        near=round(sum(value >= NEAR for value in likeness) / len(probes), 4),
        ended=round(sum(reply.ended for reply in replies) / len(probes), 4),
    )
