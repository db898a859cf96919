"""The corpus: facts (one answer, many ways to ask), chats, system messages, and what to decline.

Everything is read from `data/*.toml`. Questions are written as patterns (see `grammar`), in lower
case where English allows it and without the final mark; `render` dresses them up.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from tools.embedded_model.grammar import expand, fill

DATA = Path(__file__).parent / "data"
UNSEEN_SHARE = 0.08
"""Share of a pattern's questions that training never sees: the test of unseen combinations."""


@dataclass(frozen=True)
class Fact:
    """One answer and the questions that it answers."""

    answer: str
    groups: tuple[tuple[str, ...], ...]
    """Questions to train on; the groups are drawn alike, however large they are."""
    combinations: tuple[str, ...]
    """Held out: expansions of the same patterns as the questions."""
    phrasings: tuple[str, ...]
    """Held out: wordings written apart, which no pattern makes."""

    @property
    def questions(self) -> tuple[str, ...]:
        return tuple(question for group in self.groups for question in group)


@dataclass(frozen=True)
class Chat:
    """A scripted conversation: (question patterns, answer) per turn."""

    turns: tuple[tuple[tuple[str, ...], str], ...]


@dataclass(frozen=True)
class Corpus:
    """Everything that the model is trained and measured on."""

    facts: tuple[Fact, ...]
    """The facts that it should answer, in its domain."""
    lookups: tuple[Fact, ...]
    """Tables of small general knowledge: capitals, sums."""
    declined: Fact
    """The facts that it should not answer; its one answer is the refusal."""
    chats: tuple[Chat, ...]
    systems: tuple[str, ...]
    statements: tuple[str, ...]
    """Plain text, without a chat around it."""
    words: tuple[str, ...]
    """Words for meaningless prompts, which are declined too."""
    syllables: tuple[str, ...]
    """The parts of invented names."""
    requests: tuple[str, ...]
    """The questions about a subject `{}` that nobody has heard of."""
    synonyms: tuple[tuple[str, ...], ...]
    """Phrases that may stand for each other in a question."""
    blind: tuple[tuple[str, tuple[str, ...]], ...]
    """Questions that are only for measuring: (question, beginnings of right answers)."""

    @cached_property
    def held_out(self) -> frozenset[str]:
        """Questions, in lower case, that training must never see."""
        facts = self.all_facts()
        held_out = (asked for fact in facts for asked in (*fact.combinations, *fact.phrasings))
        return frozenset(question.lower() for question in held_out)

    def all_facts(self) -> tuple[Fact, ...]:
        return (*self.facts, *self.lookups, self.declined)


def load() -> Corpus:
    """Reads `data/*.toml`; the same files give the same corpus."""
    stems = _read("stems")
    facts = [
        _fact(entry, stems)
        for name in ("quire", "concepts", "commands", "talk", "general")
        for entry in _read(name)["fact"]
    ]
    refusals = _read("refusals")
    plain = _read("plain")
    return Corpus(
        facts=tuple(facts),
        lookups=tuple(_lookups(_read("lookups")["table"])),
        declined=_declined(refusals),
        chats=tuple(_chat(entry) for entry in _read("chats")["chat"]),
        systems=tuple(plain["systems"]),
        statements=tuple(plain["statements"]),
        words=tuple(refusals["words"].split()),
        syllables=tuple(refusals["syllables"].split()),
        requests=tuple(
            asked for kind in refusals["kind"] for asked in kind["requests"] if "(" not in asked
        ),
        synonyms=tuple(tuple(group) for group in _read("synonyms")["groups"]),
        blind=tuple((entry["ask"], tuple(entry["right"])) for entry in _read("blind")["question"]),
    )


def _read(name: str) -> dict[str, Any]:
    with (DATA / f"{name}.toml").open("rb") as file:
        return tomllib.load(file)


def _fact(entry: dict[str, Any], stems: dict[str, Any]) -> Fact:
    names = entry.get("topic", [])
    groups = [entry.get("ask", []), fill(stems["topic"], names)]
    phrasings = entry.get("held_out", []) + fill(stems["held_out"], names[:1])
    return _split(entry["answer"], groups, phrasings)


def _lookups(tables: list[dict[str, Any]]) -> Iterator[Fact]:
    for table in tables:
        for row in table["rows"]:
            patterns = [pattern.format(*row) for pattern in table["ask"]]
            phrasings = [pattern.format(*row) for pattern in table["held_out"]]
            yield _split(table["answer"].format(*row), [patterns], phrasings)


def _declined(refusals: dict[str, Any]) -> Fact:
    """Refusals pair every request with every subject of its kind, and hold some subjects out."""
    groups: list[list[str]] = [refusals["ask"]]
    phrasings: list[str] = list(refusals["held_out"])
    for kind in refusals["kind"]:
        groups.append(fill(kind["requests"], kind["subjects"]))
        phrasings += fill(
            [expand(request)[0] for request in kind["requests"][:2]], kind["held_out"]
        )
    return _split(refusals["answer"], groups, phrasings)


def _split(answer: str, groups: list[list[str]], phrasings: list[str]) -> Fact:
    """Expands groups of patterns, and holds out the phrasings and a random part of the rest."""
    random = Random(answer)
    written_apart = {question.lower() for question in phrasings}
    kept: list[tuple[str, ...]] = []
    combinations: list[str] = []
    for patterns in groups:
        expanded = dict.fromkeys(question for pattern in patterns for question in expand(pattern))
        asked = [question for question in expanded if question.lower() not in written_apart]
        unseen = {question for question in asked[1:] if random.random() < UNSEEN_SHARE}
        kept.append(tuple(question for question in asked if question not in unseen))
        combinations += sorted(unseen)
    return Fact(
        answer=answer.strip(),
        groups=tuple(group for group in kept if group),
        combinations=tuple(combinations),
        phrasings=tuple(phrasings),
    )


def _chat(entry: dict[str, Any]) -> Chat:
    turns = []
    for turn in entry["turn"]:
        asked = [question for pattern in turn["ask"] for question in expand(pattern)]
        turns.append((tuple(asked), turn["answer"].strip()))
    return Chat(tuple(turns))
