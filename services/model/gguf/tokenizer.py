"""Makes a tokenizer from a GGUF file's metadata.

Two kinds are read. `gpt2` is byte-level BPE with merges; the name in `tokenizer.ggml.pre` says how
text is split before. `llama` is SentencePiece's BPE, with a score for each token; the merges are
made from the scores.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from services.model.config.json_fields import JsonFields
from services.model.gguf.file import GgufFile
from services.runtime.logging import get_logger

log = get_logger(__name__)

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
_ENDING = rf"{_CONTRACTIONS}?"
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)


class _Split(NamedTuple):
    """How a tokenizer splits texts."""

    expression: str | None
    """The expression that matches the pieces of a text; None is GPT-2's."""
    digits: bool = False
    """Whether each digit is split from the others before."""
    whole_words: bool = False
    """Whether words of the vocabulary are tokens even if no merges lead to them."""
    starts: bool = False
    """Whether texts begin with the start token if the file does not tell."""


_LLAMA_BPE = _Split(_LLAMA3, whole_words=True, starts=True)
_SPLITS: Mapping[str, _Split] = {
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "dbrx": _Split(_LLAMA3),
    "smaug-bpe": _Split(_LLAMA3),
    "glm4": _Split(_LLAMA3, whole_words=True),
    "chatglm-bpe": _Split(_LLAMA3),
    "qwen2": _Split(_QWEN2),
    "deepseek-r1-qwen": _Split(_QWEN2),
    "tekken": _Split(_TEKKEN, whole_words=True, starts=True),
    "gpt-4o": _Split(_GPT_4O),
    "default": _Split(None),
    "gpt-2": _Split(None),
    "phi-2": _Split(None),
    "olmo": _Split(None),
    "smollm": _Split(None, digits=True),
    "refact": _Split(None, digits=True),
}
"""How text is split, by `tokenizer.ggml.pre`."""

_END_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
)
"""Tokens that end an answer although no field says so: llama.cpp finds them by their text."""


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


def gguf_end_tokens(fields: JsonFields) -> tuple[int, ...]:
    """The tokens that end an answer; some may be beyond the vocabulary."""
    ids = [
        fields.integer(f"{_FIELD}{name}", least=0)
        for name in _END_FIELDS
        if fields.has(f"{_FIELD}{name}")
    ]
    tokens = fields.values.get(f"{_FIELD}tokens")
    found = {t: i for i, t in enumerate(tokens) if t in _ENDS} if isinstance(tokens, list) else {}
    if "<|return|>" in found and "<|call|>" in found:  # then it ends a message of several
        found.pop("<|end|>", None)
    return tuple(dict.fromkeys([*ids, *found.values()]))


def gguf_chat_template(file: GgufFile) -> tuple[str, str | None] | None:
    """The template, and that for requests with tools, if it is another."""
    name, fields = "tokenizer.chat_template", file.fields
    if not fields.has(name):
        return None
    with_tools = f"{name}.tool_use"
    return fields.text(name), fields.text(with_tools) if fields.has(with_tools) else None


def _byte_level(fields: JsonFields, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    name = fields.text(f"{_FIELD}pre", "gpt-2")
    if name not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise fields.wrong(f"{_FIELD}pre", f"{name!r} is not supported, only {known}")
    if name == "default":
        log.warning("gguf_splits_text_by_default", path=str(fields.path), as_in="gpt-2")
    split = _SPLITS[name]
    merges = [merge.partition(" ")[::2] for merge in _list(fields, "merges", str)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab, merges, ignore_merges=split.whole_words)
    except Exception as error:  # tokenizers raises a plain Exception
        raise fields.wrong(f"{_FIELD}merges", str(error)) from error
    tokenizer = tokenizers.Tokenizer(model)
    is_gpt_2 = split.expression is None
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_gpt_2)]
    if split.expression is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(split.expression), "isolated"))
    if split.digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if split.expression == _QWEN2:
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
    split = _SPLITS.get(fields.text(f"{_FIELD}pre", ""))
    starts = split is not None and split.starts and fields.has(f"{_FIELD}bos_token_id")
    if fields.boolean(f"{_FIELD}add_bos_token", default=kind == "llama" or starts):
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
