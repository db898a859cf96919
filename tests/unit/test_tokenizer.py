"""A checkpoint's tokenizer, and the errors when it is missing or broken."""

import json
from pathlib import Path

import pytest
from tokenizers import processors

from services.model.text.tokenizer import Tokenizer
from services.runtime.errors import InvalidRequest, StartupError
from tests.byte_level import byte_level


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint's directory with a byte-level tokenizer that puts `<s>` before a text."""
    tokenizer = byte_level(["the block table"], 300)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_text_becomes_ids_and_text_again(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    ids = tokenizer.encode("the block 日")
    assert ids[0] == tokenizer.token_id("<s>") == 0
    assert tokenizer.decode(ids) == "the block 日"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>the block 日"
    assert max(ids) < tokenizer.vocab_size


def test_a_rendered_chat_gets_no_second_start(directory: Path) -> None:
    """Special tokens in the text are recognized, none are added."""
    ids = Tokenizer.from_directory(directory).encode("<s>the</s>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == (0, 1)
    assert ids.count(0) == 1


def test_a_generated_text_streams(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode(" tables 日", add_special_tokens=False)
    assert detokenizer.push(ids[:-1]) + detokenizer.push(ids[-1:]) == " tables 日"


def test_special_tokens_are_known_by_role(directory: Path) -> None:
    assert Tokenizer.from_directory(directory).special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
    }


def test_lone_surrogates_are_refused(directory: Path) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        Tokenizer.from_directory(directory).encode("a\ud800")


def test_a_missing_tokenizer_is_a_startup_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no tokenizer: .*tokenizer\.json does not exist"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"version": "1.0", "model": {"type": "New"}}'])
def test_a_broken_tokenizer_is_a_startup_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(StartupError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", b"\xff".decode("latin-1")])
def test_a_broken_tokenizer_config_is_a_startup_error(directory: Path, text: str) -> None:
    (directory / "tokenizer_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(StartupError, match=r"tokenizer_config\.json: not "):
        Tokenizer.from_directory(directory)


def test_special_tokens_of_a_message_are_shown_to_its_parser(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    begin, end = tokenizer.token_id("<s>"), tokenizer.token_id("</s>")
    assert begin is not None
    assert end is not None
    pieces = tokenizer.pieces_with(frozenset(["</s>", "<tool_call>"])).following
    assert (pieces[begin], pieces[end]) == (None, b"</s>")
    assert tokenizer.pieces.following[end] is None


ROLES = {"bos_token": "<s>", "eos_token": "</s>"}
END = {"content": "</s>", "special": True}
ADDED = {
    "301": {"content": "<|end|>", "special": True, "normalized": False},
    "300": {"content": "<tool>", "special": False, "normalized": False},
}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": ROLES},
        {"tokenizer_config.json": {}, "special_tokens_map.json": ROLES | {"eos_token": END}},
        {"tokenizer_config.json": ROLES | {"eos_token": "<|end|>", "pad_token": "<pad>"}},
        {
            "tokenizer_config.json": ROLES
            | {"eos_token": "<|end|>", "added_tokens_decoder": ADDED},
            "special_tokens_map.json": {"bos_token": "<|end|>"},
        },
        {
            "tokenizer_config.json": ROLES | {"additional_special_tokens": ["<|a|>"]},
            "added_tokens.json": {"<|b|>": 301, "<|c|>": 300},
        },
    ],
)
def test_tokens_of_all_files_are_those_of_transformers(
    directory: Path, files: dict[str, object]
) -> None:
    transformers = pytest.importorskip("transformers")
    for name, content in files.items():
        if name == "tokenizer_config.json":
            content = {**content, "tokenizer_class": "PreTrainedTokenizerFast"}  # type: ignore[dict-item]
        (directory / name).write_text(json.dumps(content))
    expected = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer = Tokenizer.from_directory(directory)
    text = "the<|end|> block <tool>x<pad></s><|a|><|b|><|c|>"
    assert list(tokenizer.encode(text)) == expected(text)["input_ids"]
    assert tokenizer.special_tokens == {
        name: text for name, text in expected.special_tokens_map.items() if isinstance(text, str)
    }
    ids = expected(text)["input_ids"]
    assert tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=True)
