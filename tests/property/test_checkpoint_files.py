"""A checkpoint's tokens, ends and context are those that transformers reads, whichever of its files
has them."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from services.model.checkpoint.reading import read_model_config
from services.model.text.tokenizer import Tokenizer
from tests.byte_level import byte_level

TOKENS = ["<s>", "</s>", "<|end|>", "<pad>", "<tool>"]
TEXT = "the<|end|> block <tool>x<pad></s> <s>the"
VOCAB_SIZE = 400

token = st.sampled_from(TOKENS)
role = st.sampled_from(["bos_token", "eos_token", "pad_token"])


def named(**more: str) -> st.SearchStrategy[Any]:
    """A token by its text, or as an object."""
    flags = {"lstrip": False, "normalized": False, "special": True}
    return st.one_of(token, token.map(lambda text: {"content": text, **flags, **more}))


in_config = st.dictionaries(role, named(__type="AddedToken"))
in_map = st.dictionaries(role, named())
listed = st.builds(
    lambda text, special: {"content": text, "special": special, "normalized": False},
    token,
    st.booleans(),
)
decoder = st.lists(listed, max_size=3, unique_by=lambda entry: entry["content"]).map(
    lambda entries: {str(300 + number): entry for number, entry in enumerate(entries)}
)
tokenizer_config = st.builds(
    lambda roles, decoder, extra: {
        **roles,
        **({} if decoder is None else {"added_tokens_decoder": decoder}),
        **({} if extra is None else {"additional_special_tokens": extra}),
    },
    in_config,
    st.none() | decoder,
    st.none() | st.lists(token, max_size=2, unique=True),
)
added_tokens = st.lists(token, max_size=3, unique=True).map(
    lambda texts: {text: 300 + number for number, text in enumerate(texts)}
)
end = st.none() | st.integers(0, 299) | st.lists(st.integers(0, 299), min_size=1, max_size=2)
scaling = st.none() | st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["linear", "yarn", "dynamic"]), "factor": st.sampled_from([2, 4])}
)


@cache
def tokenizer_json() -> str:
    """A byte-level tokenizer that knows two of the tokens."""
    return byte_level(["the block table"], 300).to_str()


def write(directory: Path, files: dict[str, dict[str, Any] | None]) -> None:
    (directory / "tokenizer.json").write_text(tokenizer_json())
    for name, content in files.items():
        if content is not None:
            (directory / name).write_text(json.dumps(content))


def config(end: Any, rope_scaling: dict[str, Any] | None, context: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "rope_scaling": rope_scaling,
        "eos_token_id": end,
    }


def ids(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


@settings(max_examples=40, deadline=None)
@given(
    tokenizer_config, st.none() | in_map, st.none() | added_tokens, end, st.none() | end, scaling
)
def test_every_file_is_read_as_transformers_reads_it(
    tokenizer_fields: dict[str, Any],
    map_fields: dict[str, Any] | None,
    added: dict[str, int] | None,
    end: Any,
    generation_end: Any,
    rope_scaling: dict[str, Any] | None,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write(
            directory,
            {
                "tokenizer_config.json": {
                    **tokenizer_fields,
                    "tokenizer_class": "PreTrainedTokenizerFast",
                },
                "special_tokens_map.json": map_fields,
                "added_tokens.json": added,
                "config.json": config(end, rope_scaling, 4096),
                "generation_config.json": {"eos_token_id": generation_end},
            },
        )
        theirs = AutoTokenizer.from_pretrained(directory)
        tokenizer = Tokenizer.from_directory(directory)
        expected = theirs(TEXT)["input_ids"]
        assert list(tokenizer.encode(TEXT)) == expected
        assert tokenizer.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
        their_roles = {role: str(text) for role, text in theirs.special_tokens_map.items()}
        their_roles.pop("additional_special_tokens", None)
        assert tokenizer.special_tokens == their_roles

        read = read_model_config(directory)
        their_config: Any = AutoConfig.from_pretrained(directory)
        generation = GenerationConfig.from_pretrained(directory)
        ends = [generation.eos_token_id, their_config.eos_token_id, theirs.eos_token_id]
        assert read.eos_token_ids == ids(next((each for each in ends if each is not None), None))
        context = their_config.max_position_embeddings
        ropes = their_config.rope_parameters
        if ropes["rope_type"] in ("linear", "yarn"):
            context *= ropes["factor"]
        assert read.max_position_embeddings == context
