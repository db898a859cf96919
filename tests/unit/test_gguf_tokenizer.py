"""Tokenizers from the metadata of GGUF files."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from bench.make_checkpoint import SPECIAL_TOKENS, make_checkpoint
from services.model.gguf.file import GgufFile
from services.model.gguf.tokenizer import (
    gguf_chat_template,
    gguf_end_tokens,
    gguf_special_tokens,
    gguf_tokenizer,
)
from services.model.text.pieces import pieces_of
from services.runtime.errors import StartupError

TEXTS = [
    "",
    " ",
    "Hello world, it's me: 12345 days!\n\n\tNaïve 漢字 🙂",
    "the  end   <|im_start|>user\nwe'll see<|im_end|> that",
    "HTTPServer camelCase don't DON'T x86_64",
]


def made(**fields: Any) -> Tokenizer:
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return gguf_tokenizer(GgufFile(Path("model.gguf"), metadata, {}))


def byte_level(reference: Tokenizer, pre: str, **more: Any) -> Tokenizer:
    """The metadata that llama.cpp's converter writes for this tokenizer."""
    vocab = reference.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    special = {token.content for token in reference.get_added_tokens_decoder().values()}
    state = reference.model.__getstate__()
    merges = [" ".join(pair) for pair in json.loads(state)["merges"]]
    types = [3 if token in special else 1 for token in tokens]
    return made(model="gpt2", pre=pre, tokens=tokens, token_type=types, merges=merges, **more)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = make_checkpoint(tmp_path_factory.mktemp("tiny"), vocab_size=5000, hidden_size=8)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_byte_level_bpe_has_the_same_tokens(reference: Tokenizer) -> None:
    found = byte_level(reference, "gpt-2")
    assert found.get_vocab() == reference.get_vocab()
    for text in TEXTS:
        ids = reference.encode(text).ids
        assert found.encode(text).ids == ids
        assert found.decode(ids) == reference.decode(ids)
    added = found.get_added_tokens_decoder().values()
    assert {t.content for t in added if t.special} == set(SPECIAL_TOKENS)
    assert pieces_of(found).following == pieces_of(reference).following


def test_the_default_split_is_gpt_2s_with_a_warning(reference: Tokenizer) -> None:
    """transformers reads these files so too."""
    with capture_logs() as logs:
        found = byte_level(reference, "default")
    (entry,) = logs
    assert (entry["event"], entry["log_level"]) == ("gguf_splits_text_by_default", "warning")
    for text in TEXTS:
        assert found.encode(text).ids == reference.encode(text).ids


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    assert tokenizer.pre_tokenizer is not None
    return [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("llama-bpe", "We'LL pay 12345$ now", ["We", "'LL", " pay", " ", "123", "45", "$", " now"]),
        ("llama-bpe", "a\n\n  b (c)", ["a", "\n\n", " ", " b", " (", "c", ")"]),
        ("qwen2", "We'll pay 123", ["We", "'ll", " pay", " ", "1", "2", "3"]),
        ("qwen2", "!!\nx_y", ["!!\n", "x", "_y"]),
        ("tekken", "camelCase It's 12/\n", ["camel", "Case", " It", "'s", " ", "1", "2", "/\n"]),
        ("gpt-4o", "camelCase It's 1234/\n", ["camel", "Case", " It's", " ", "123", "4", "/\n"]),
        ("gpt-4o", "HTTPServer we'LL", ["HTTPServer", " we'LL"]),
        ("dbrx", "We'LL pay 12345$ now", ["We", "'LL", " pay", " ", "123", "45", "$", " now"]),
        ("glm4", "a\n\n  b (c)", ["a", "\n\n", " ", " b", " (", "c", ")"]),
        ("gpt-2", "We'll pay 123  x", ["We", "'ll", " pay", " 123", " ", " x"]),
        ("smollm", "pay 12 x", ["pay", " ", "1", "2", " x"]),
        ("refact", "pay 12 x", ["pay", " ", "1", "2", " x"]),
    ],
)
def test_text_is_split_as_the_model_expects(
    reference: Tokenizer, pre: str, text: str, expected: list[str]
) -> None:
    assert words(byte_level(reference, pre), text) == expected


def test_qwen2_composes_characters(reference: Tokenizer) -> None:
    found = byte_level(reference, "qwen2")
    assert found.encode("e\u0301").ids == found.encode("\u00e9").ids


def test_the_start_token_is_added_if_the_file_says_so(reference: Tokenizer) -> None:
    plain = byte_level(reference, "qwen2", bos_token_id=257)
    with_start = byte_level(reference, "qwen2", bos_token_id=257, add_bos_token=True)
    ids = plain.encode("hello").ids
    assert with_start.encode("hello").ids == [257, *ids]
    assert with_start.encode("hello", add_special_tokens=False).ids == ids


def test_start_token_of_llama_3_is_added_unless_the_file_says_no(reference: Tokenizer) -> None:
    """As llama.cpp does. A file without a start token has nothing to add."""
    found = {
        name: byte_level(reference, "llama-bpe", **fields).encode("hello").ids[0] == 257
        for name, fields in {
            "unsaid": {"bos_token_id": 257},
            "no": {"bos_token_id": 257, "add_bos_token": False},
            "none": {},
        }.items()
    }
    assert found == {"unsaid": True, "no": False, "none": False}


@pytest.mark.parametrize(
    ("tokens", "fields", "expected"),
    [
        (["a", "<end_of_turn>", "<eos>"], {"eos_token_id": 2}, (2, 1)),
        (["<|im_end|>", "<|endoftext|>"], {"eos_token_id": 0, "eot_token_id": 0}, (0, 1)),
        (["<|end|>", "<|endoftext|>", "b"], {"eos_token_id": 1}, (1, 0)),
        (["<|end|>", "<|call|>", "<|return|>"], {"eos_token_id": 2}, (2, 1)),
        (["a", "b"], {}, ()),
    ],
)
def test_ends_of_answers_are_those_of_the_fields_and_those_known_by_text(
    tokens: list[str], fields: dict[str, int], expected: tuple[int, ...]
) -> None:
    """Where `<|return|>` ends an answer, `<|end|>` ends one of its messages."""
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    file = GgufFile(Path("model.gguf"), {"tokenizer.ggml.tokens": tokens, **metadata}, {})
    assert gguf_end_tokens(file.fields) == expected


def test_chat_template_for_tools_may_be_another() -> None:
    metadata = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    assert gguf_chat_template(GgufFile(Path("model.gguf"), metadata, {})) == ("a", "b")
    del metadata["tokenizer.chat_template.tool_use"]
    assert gguf_chat_template(GgufFile(Path("model.gguf"), metadata, {})) == ("a", None)
    assert gguf_chat_template(GgufFile(Path("model.gguf"), {}, {})) is None


SCORED = {"\u2581": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "ab": -0.5, "bc": -0.25, "abc": -0.75}
SCORED |= {"\u2581a": -0.6, "\u2581ab": -0.3, "aa": -0.9, "cab": -0.1, "\u2581c": -0.8}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentence_piece(**more: Any) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *SCORED]
    return made(
        model="llama",
        tokens=tokens,
        scores=[0.0] * 259 + list(SCORED.values()),
        token_type=[2, 3, 3, *[6] * 256, *[1] * len(SCORED)],
        **{"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **more},
    )


def merged(text: str) -> list[str]:
    """SentencePiece's algorithm: merge the neighbours that make the token with the highest score,
    the leftmost of equal ones, until none do; characters without a token become bytes."""
    parts = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        pairs = [first + second for first, second in pairwise(parts)]
        places = [place for place, pair in enumerate(pairs) if pair in SCORED]
        if not places:
            break
        place = max(places, key=lambda place: SCORED[pairs[place]])
        parts[place : place + 2] = [pairs[place]]
    found = []
    for part in parts:
        found += [part] if part in SCORED else [f"<0x{byte:02X}>" for byte in part.encode()]
    return found


def test_sentence_piece_merges_by_score() -> None:
    tokenizer = sentence_piece(add_bos_token=False)
    generator = random.Random(0)
    for _ in range(500):
        text = "".join(
            generator.choices("abc é", weights=[4, 4, 4, 2, 1], k=generator.randint(1, 12))
        )
        encoding = tokenizer.encode(text)
        assert encoding.tokens == merged(text)
        assert tokenizer.decode(encoding.ids) == text


def test_sentence_piece_starts_with_the_start_token() -> None:
    tokenizer = sentence_piece()
    assert tokenizer.encode("ab").tokens == ["<s>", "\u2581ab"]
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["\u2581ab"]
    assert sentence_piece(add_space_prefix=False).encode("ab").tokens == ["<s>", "ab"]
    assert pieces_of(tokenizer).following[tokenizer.token_to_id("<0x0A>") or 0] == b"\n"


def test_special_tokens_by_role() -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["<s>", "</s>", "x"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    file = GgufFile(Path("model.gguf"), metadata, {})
    assert gguf_special_tokens(file) == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": "bert"}, "model: 'bert' is not supported, only gpt2 and llama"),
        ({"pre": "falcon"}, "pre: 'falcon' is not supported, only llama-bpe, "),
        ({"merges": ["a nothing"]}, "merges: "),
        ({"merges": None}, "merges: missing, or not a list of str"),
        ({"tokens": ["a", 1]}, "tokens: missing, or not a list of str"),
        ({"add_bos_token": True}, "bos_token_id: missing"),
        ({"add_bos_token": True, "bos_token_id": 7}, "bos_token_id: 7 is not among 2 tokens"),
        ({"model": "llama", "scores": [0.0]}, "scores: tokens, scores and types are not as many"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], named: str) -> None:
    good = {"model": "gpt2", "pre": "qwen2", "tokens": ["a", "b"], "merges": []}
    with pytest.raises(StartupError) as error:
        made(**{**good, "token_type": [1, 1], **fields})
    assert str(error.value).startswith(f"model.gguf: tokenizer.ggml.{named}")
