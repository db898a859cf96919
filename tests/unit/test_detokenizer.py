"""Tokens to text: deltas add up to the whole text, and characters stay whole, for any number of
tokens at a time."""

import itertools
from collections.abc import Callable
from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from services.model.text.detokenizer import Detokenizer
from services.model.text.pieces import Pieces, pieces_of, special_token_ids
from services.runtime.errors import StartupError
from tests.byte_level import byte_level

no_deadline = settings(deadline=None)  # how fast the machine is, is no property

CORPUS = ["the block table of a sequence", " naïve 日本語 🙂 café  two  spaces", "a\nb\tc"]
MARK = "▁"  # SentencePiece's
Kind = Callable[[], tokenizers.Tokenizer]


@cache
def with_added() -> tokenizers.Tokenizer:
    """A tokenizer like those of Qwen and Llama 3: BPE over bytes; `<think>` is added, `<|end|>` is
    special."""
    tokenizer = byte_level(CORPUS, 320, ["<|end|>"])
    tokenizer.add_tokens(["<think>", "é 日"])
    return tokenizer


@cache
def byte_fallback() -> tokenizers.Tokenizer:
    """A tokenizer like Llama 2's: pieces with a mark for the space, and bytes for text without a
    piece."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [MARK, MARK + "the", "block", MARK + "table", MARK + MARK, "日", "a" + MARK + "b"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def word_level(decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    words = [MARK + "the", "block", MARK + "table", MARK + MARK, "s" + MARK, "<pad>"]
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>")
    )
    tokenizer.add_special_tokens(["<pad>"])
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


@cache
def metaspace() -> tokenizers.Tokenizer:
    return word_level(decoders.Metaspace())


@cache
def metaspace_without_prefix() -> tokenizers.Tokenizer:
    return word_level(decoders.Metaspace(prepend_scheme="never"))


@cache
def words() -> tokenizers.Tokenizer:
    return word_level(None)


KINDS = [with_added, byte_fallback, metaspace, metaspace_without_prefix, words]


def shown(tokenizer: tokenizers.Tokenizer) -> Pieces:
    """The text without special tokens."""
    return pieces_of(tokenizer).without(special_token_ids(tokenizer))


def stream(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]


def ids_of(kind: Kind) -> st.SearchStrategy[list[int]]:
    """Any tokens, also special ones and ids beyond the vocabulary (of a padded embedding); of
    byte-fallback tokens only whole characters, since another test covers the rest."""
    num_ids = kind().get_vocab_size() + 4
    if kind is not byte_fallback:
        return st.lists(st.integers(0, num_ids), max_size=24)
    others = st.integers(fallback_ids(b"\xff")[0] + 1, num_ids).map(lambda token_id: [token_id])
    characters = st.characters(codec="utf-8").map(lambda char: fallback_ids(char.encode()))
    runs = st.lists(others | characters, max_size=12)
    return runs.map(lambda runs: list(itertools.chain(*runs)))


def fallback_ids(data: bytes) -> list[int]:
    return [2 + byte for byte in data]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skips", [True, False], ids=["skips special tokens", "shows all"])
@no_deadline
@given(st.data())
def test_deltas_add_up_to_the_whole_text(kind: Kind, skips: bool, data: st.DataObject) -> None:
    """Any tokens of any kind of tokenizer, one by one or many at once."""
    tokenizer = kind()
    token_ids = data.draw(ids_of(kind))
    whole = tokenizer.decode(token_ids, skip_special_tokens=skips)
    pieces = shown(tokenizer) if skips else pieces_of(tokenizer)
    assert "".join(stream(Detokenizer(pieces, starts_text=True), token_ids)) == whole
    at_once = Detokenizer(pieces, starts_text=True)
    assert at_once.push(token_ids) + at_once.flush() == whole


@pytest.mark.parametrize("kind", KINDS)
@no_deadline
@given(st.data())
def test_a_generation_goes_on_where_the_prompt_ended(kind: Kind, data: st.DataObject) -> None:
    """The prompt's text and the deltas are the text of both together: a leading space is kept."""
    tokenizer = kind()
    token_ids = data.draw(ids_of(kind))
    prompt = [tokenizer.get_vocab()["e" if kind is with_added else "block"]]
    deltas = stream(Detokenizer(shown(tokenizer)), token_ids)
    assert tokenizer.decode(prompt) + "".join(deltas) == tokenizer.decode(prompt + token_ids)


@no_deadline
@given(st.text(max_size=12))
def test_characters_are_never_split(text: str) -> None:
    """No delta of a valid text contains a replacement character of its own."""
    tokenizer = with_added()
    deltas = stream(Detokenizer(shown(tokenizer)), tokenizer.encode(text).ids)
    assert "".join(deltas) == text.replace("<|end|>", "")
    assert sum(delta.count("\ufffd") for delta in deltas) == text.count("\ufffd")


def test_an_emoji_of_four_tokens_comes_with_the_last() -> None:
    detokenizer = Detokenizer(shown(byte_fallback()))
    assert stream(detokenizer, fallback_ids("🙂".encode())) == ["", "", "", "🙂", ""]


def test_incomplete_characters_are_replaced_at_the_end() -> None:
    detokenizer = Detokenizer(shown(byte_fallback()))
    assert stream(detokenizer, fallback_ids(b"\xf0\x9f")) == ["", "", "\ufffd"]


@no_deadline
@given(st.binary(max_size=12))
def test_wrong_bytes_do_not_take_right_ones_with_them(data: bytes) -> None:
    """Text that the client has is never changed: only bytes that are not UTF-8 are replaced."""
    deltas = stream(Detokenizer(shown(byte_fallback())), fallback_ids(data))
    assert "".join(deltas) == data.decode(errors="replace")


def test_a_decoder_that_cannot_be_streamed_is_refused() -> None:
    tokenizer = word_level(decoders.CTC())
    with pytest.raises(StartupError, match="CTC"):
        pieces_of(tokenizer)
