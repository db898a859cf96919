"""Prompts with logprobs: the text of each token, and its offset."""

from pathlib import Path

import pytest

from services.gateway.api import ChatMessage, Prompt
from services.gateway.output.delta import PromptReport
from services.gateway.output.logprob_text import PromptReporter, with_text
from services.model.text.tokenizer import Tokenizer
from services.protocol.logprobs import LogprobColumns, Logprobs


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_directory(smollm2)


def special(tokenizer: Tokenizer) -> tuple[int, str]:
    """A special token and its text."""
    name = tokenizer.special_tokens["eos_token"]
    token_id = tokenizer.token_id(name)
    assert token_id is not None
    return token_id, name


def report(tokenizer: Tokenizer, prompt: Prompt, token_ids: tuple[int, ...]) -> PromptReport:
    logprobs = [Logprobs(-float(n), n, token_ids[:1], (0.0,)) for n in range(1, len(token_ids))]
    return PromptReporter(prompt, token_ids, tokenizer).report(
        LogprobColumns.of(logprobs) if logprobs else None
    )


@pytest.mark.parametrize("text", ["Where are my blocks?", "é, 日本 and 🦀🦀", " x\n\n  y ", "a"])
def test_tokens_spell_the_text_from_their_offsets(tokenizer: Tokenizer, text: str) -> None:
    """Tokens of one character all begin where it does."""
    token_ids = tokenizer.encode(text)
    told = report(tokenizer, text, token_ids)
    assert (told.text, told.token_ids) == (text, token_ids)
    chosen = [(entries[0], entries[1]) for entries in told.entries()]
    first = token_ids[0], 0.0, 1
    assert chosen == [((i, -n, n), first) for n, i in enumerate(token_ids[1:], 1)]
    spelled = [told.tokens[token_id] for token_id in told.token_ids]
    assert b"".join(spelled).decode() == text
    whole = text.encode()
    for number, offset in enumerate(told.offsets()):
        before = b"".join(spelled[:number])
        assert len(before.decode(errors="ignore")) == offset
        assert whole.startswith(before + spelled[number])


def test_a_special_token_is_in_the_text_by_its_name_or_not_at_all(tokenizer: Tokenizer) -> None:
    token_id, name = special(tokenizer)
    hi, there = tokenizer.encode("Hi"), tokenizer.encode(" there")
    token_ids = (*hi, token_id, *there)
    named = report(tokenizer, f"Hi{name} there", token_ids)
    assert named.offsets()[len(hi) :][:2] == [2, 2 + len(name)]
    silent = report(tokenizer, "Hi there", token_ids)
    assert silent.offsets()[len(hi) :][:2] == [2, 2]
    assert silent.tokens[token_id] == name.encode()


def test_a_prompt_of_tokens_or_messages_is_what_its_tokens_say(tokenizer: Tokenizer) -> None:
    """Special tokens too, as the model reads them."""
    token_id, name = special(tokenizer)
    token_ids = (token_id, *tokenizer.encode("Hi there"))
    for prompt in (token_ids, (ChatMessage("user", "whatever the template makes of it"),)):
        told = report(tokenizer, prompt, token_ids)
        assert told.text == f"{name}Hi there"
        assert told.tokens[token_ids[0]] == name.encode()
        assert told.offsets()[1] == len(name)


def test_without_logprobs_there_is_the_text(tokenizer: Tokenizer) -> None:
    told = PromptReporter("Hi", tokenizer.encode("Hi"), tokenizer).report(None)
    assert (told.text, list(told.entries())) == ("Hi", [])


def test_the_likeliest_are_ranked_as_they_come(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("one two three")
    top = Logprobs(-1.0, 7, token_ids, tuple(-float(n) for n in range(len(token_ids))))
    spelled = with_text(tokenizer, token_ids[0], top, 5)
    assert (spelled.chosen.rank, spelled.text_offset) == (7, 5)
    assert [each.rank for each in spelled.top] == list(range(1, len(token_ids) + 1))
    assert b"".join(each.token for each in spelled.top) == b"one two three"


def test_an_id_without_a_token_has_no_name(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(10**6) == b""
