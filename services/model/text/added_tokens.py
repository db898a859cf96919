"""The added and special tokens of a checkpoint, which are spread over several files.

All files are read as transformers reads them: tokenizer_config.json, and special_tokens_map.json
and added_tokens.json unless tokenizer_config.json has an `added_tokens_decoder`.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from services.model.config.json_fields import JsonFields
from services.model.gguf.file import GgufFile, gguf_file
from services.model.gguf.tokenizer import gguf_special_tokens
from services.runtime.errors import StartupError

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"

_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_MAX_ADDED_TOKENS = 1 << 16
"""Ten times the most that a published tokenizer has (Gemma 3: 6,400). They take 130 MB."""

_MAX_CHARACTERS = 1024
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_tokenizer_config(directory: Path) -> Mapping[str, Any]:
    """The content of tokenizer_config.json; empty if the file does not exist. Raises StartupError
    if the file is not a JSON object."""
    return _read(directory / TOKENIZER_CONFIG_FILE)


def special_tokens(directory: Path) -> dict[str, str]:
    """The text of each special token, by role. In the files a token is a string, or an object with
    the string in `content`. Raises StartupError if a file is not a JSON object."""
    if (gguf := gguf_file(directory)) is not None:
        return gguf_special_tokens(GgufFile.read(gguf))
    config = _merged(directory)
    found = {role: _content(config.get(role)) for role in _ROLES}
    return {role: text for role, text in found.items() if text is not None}


def add_tokens(tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
    """Add to a tokenizer the tokens that only the files beside tokenizer.json name, in the order in
    which transformers adds them. Raises StartupError if a file is wrong."""
    config = _merged(directory)
    known = set(tokenizer.get_added_tokens_decoder().values())
    missing = [token for token in _listed(directory, config) if token not in known]
    named = {_content(config.get(role)) for role in _ROLES}
    for token in missing:
        token.special = token.special or token.content in named
    texts = {token.content for token in [*known, *missing]}
    for text in _special_texts(config):
        if text not in texts:
            texts.add(text)
            missing.append(AddedToken(text, special=True, normalized=False))
    for special, group in groupby(missing, key=lambda token: token.special):
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(list(group))


def check_added_tokens(tokenizer: tokenizers.Tokenizer, path: Path) -> None:
    """Raises StartupError if there are so many added tokens, or so long ones, that they would take
    hundreds of MB, or that to look for them in a text would take seconds."""
    added = tokenizer.get_added_tokens_decoder().values()
    if len(added) > _MAX_ADDED_TOKENS:
        raise StartupError(f"{path}: {len(added)} added tokens, at most {_MAX_ADDED_TOKENS}")
    if (longest := max((len(token.content) for token in added), default=0)) > _MAX_CHARACTERS:
        text = f"an added token of {longest} characters, at most {_MAX_CHARACTERS}"
        raise StartupError(f"{path}: {text}")


def _read(path: Path) -> Mapping[str, Any]:
    return JsonFields.read(path).values if path.exists() else {}


def _merged(directory: Path) -> Mapping[str, Any]:
    config = read_tokenizer_config(directory)
    if "added_tokens_decoder" in config:
        return config
    return {**config, **_read(directory / SPECIAL_TOKENS_FILE)}


def _listed(directory: Path, config: Mapping[str, Any]) -> list[AddedToken]:
    """The tokens that are listed with their ids, in the order of these."""
    if "added_tokens_decoder" in config:
        listed = config["added_tokens_decoder"]
        try:
            return [_token(listed[key]) for key in sorted(listed, key=int)]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            text = f"added_tokens_decoder: not tokens by their ids: {error!r}"
            raise StartupError(f"{directory / TOKENIZER_CONFIG_FILE}: {text}") from error
    path = directory / ADDED_TOKENS_FILE
    ids = _read(path)
    if not all(isinstance(token_id, int) for token_id in ids.values()):
        raise StartupError(f"{path}: not ids of tokens")
    special = set(_special_texts(config))
    return [
        AddedToken(text, special=text in special, normalized=text not in special)
        for text in sorted(ids, key=lambda text: ids[text])
    ]


def _token(fields: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(fields[name]) for name in _FLAGS if name in fields}
    return AddedToken(str(fields["content"]), **flags)


def _special_texts(config: Mapping[str, Any]) -> Iterable[str]:
    tokens = [config.get(role) for role in _ROLES]
    for name in _EXTRA:
        extra = config.get(name) or []
        tokens += extra.values() if isinstance(extra, Mapping) else extra
    return [text for text in map(_content, tokens) if text]


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None
