"""Makes a tokenizer from a GGUF file's metadata.

Two kinds are read. `gpt2` is byte-level BPE with merges; the name in `tokenizer.ggml.pre` says how
text is split before. `llama` is SentencePiece's BPE, with a score for each token; the merges are
made from the scores.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from services.common.gguf.file import GgufFile
from services.common.text.json_fields import JsonFields

_FIELD = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Types of tokens. Control tokens are special; user-defined ones are found before text is split."""

_SPACE = "\u2581"
"""SentencePiece's mark for a space."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_SPLITS: Mapping[str, str | None] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-2": None,
    "smollm": None,
}
"""The expression whose matches are split from a text, by `tokenizer.ggml.pre`. None: GPT-2's."""

_WHOLE_WORDS = (_LLAMA3, _TEKKEN)
"""The vocabularies whose words are tokens even if no merges lead to them."""


def gguf_tokenizer(file: GgufFile) -> tokenizers.Tokenizer:
    """StartupError, with file and field: the metadata is incomplete or of an unknown kind."""
    fields = file.fields
    kind = fields.text(f"{_FIELD}model")
    tokens = _list(fields, "tokens", str)
    types = _list(fields, "token_type", int) if fields.has(f"{_FIELD}token_type") else []
    match kind:
        case "gpt2":
            tokenizer = _byte_level(fields, tokens)
        case "llama":
            tokenizer = _sentence_piece(fields, tokens, types)
        case _:
            raise fields.wrong(f"{_FIELD}model", f"{kind!r} is not supported, only gpt2 and llama")
    added = [
        AddedToken(token, normalized=False, special=type_ != _USER_DEFINED)
        for token, type_ in zip(tokens, types, strict=False)
        if type_ in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    _add_start(fields, kind, tokens, tokenizer)
    return tokenizer


def gguf_special_tokens(file: GgufFile) -> dict[str, str]:
    """The text of each special token, by role, as in chat templates."""
    fields = file.fields
    tokens = _list(fields, "tokens", str)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        f"{role}_token": tokens[_token_id(fields, f"{name}_token_id", tokens)]
        for role, name in names.items()
        if fields.has(f"{_FIELD}{name}_token_id")
    }


def gguf_chat_template(file: GgufFile) -> str | None:
    name = "tokenizer.chat_template"
    return file.fields.text(name) if file.fields.has(name) else None


def _byte_level(fields: JsonFields, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    name = fields.text(f"{_FIELD}pre", "gpt-2")
    if name not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise fields.wrong(f"{_FIELD}pre", f"{name!r} is not supported, only {known}")
    split = _SPLITS[name]
    merges = [merge.partition(" ")[::2] for merge in _list(fields, "merges", str)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab, merges, ignore_merges=split in _WHOLE_WORDS)
    except Exception as error:  # tokenizers raises a plain Exception
        raise fields.wrong(f"{_FIELD}merges", str(error)) from error
    tokenizer = tokenizers.Tokenizer(model)
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    if split is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(split), "isolated"))
    if name == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if split == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(
    fields: JsonFields, tokens: Sequence[str], types: Sequence[int]
) -> tokenizers.Tokenizer:
    scores = _list(fields, "scores", float)
    if not len(tokens) == len(scores) == len(types):
        raise fields.wrong(f"{_FIELD}scores", "tokens, scores and types are not as many")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = next((t for t, type_ in zip(tokens, types, strict=True) if type_ == _UNKNOWN), None)
    made = {
        t: score for t, score, type_ in zip(tokens, scores, types, strict=True) if type_ == _NORMAL
    }
    merges = [pair for _, pair in sorted(_merges(vocab, made), key=lambda found: found[0])]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = fields.boolean(f"{_FIELD}add_space_prefix", default=True)
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    tail: list[Any] = [decoders.Strip(" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    return tokenizer


def _merges(
    vocab: Mapping[str, int], scores: Mapping[str, float]
) -> Iterator[tuple[tuple[float, int, int], tuple[str, str]]]:
    """Every pair of tokens that together are a token with a score, with its order: SentencePiece
    merges the pair with the highest score first."""
    for token, score in scores.items():
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in vocab and second in vocab:
                yield (-score, vocab[first], vocab[second]), (first, second)


def _add_start(
    fields: JsonFields, kind: str, tokens: Sequence[str], tokenizer: tokenizers.Tokenizer
) -> None:
    """Make `encode` begin with the start token, if the file says so or as its kind does."""
    if fields.boolean(f"{_FIELD}add_bos_token", default=kind == "llama"):
        token_id = _token_id(fields, "bos_token_id", tokens)
        name = tokens[token_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[name, "$A"], pair=[name, "$A", name, "$B:1"], special_tokens=[(name, token_id)]
        )


def _token_id(fields: JsonFields, name: str, tokens: Sequence[str]) -> int:
    token_id = fields.integer(f"{_FIELD}{name}", least=0)
    if token_id >= len(tokens):
        raise fields.wrong(f"{_FIELD}{name}", f"{token_id} is not among {len(tokens)} tokens")
    return token_id


def _list(fields: JsonFields, name: str, kind: type) -> list[Any]:
    values = fields.values.get(f"{_FIELD}{name}")
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise fields.wrong(f"{_FIELD}{name}", f"missing, or not a list of {kind.__name__}")
    return values
