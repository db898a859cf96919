"""Keeps the text of special tokens that a client writes into a chat from becoming special tokens.

Only the chat template may put special tokens into a prompt. A template is a program: it may trim,
cut and join the client's text, so the rendered prompt does not show which characters come from the
client. Therefore encoding has three parts:

1. `hide`: before rendering, each special token's text in the client's messages is replaced by a
   character that occurs nowhere in them.
2. The template is rendered. All text of special tokens in the result comes from the template.
3. `encode`: that text is replaced by stand-ins, strings that a client cannot guess. Then the hidden
   text of the client is put back. A second tokenizer, whose special tokens are the stand-ins,
   encodes the result.

A chat without hidden text is encoded by the checkpoint's own tokenizer.
"""

import secrets
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from services.runtime.errors import InvalidRequest

_STAND_INS = range(0x10FFFD, 0x100000, -1)
"""Private-use characters, which every template treats as text."""


def encoding_of(
    tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False
) -> tokenizers.Encoding:
    """Encode a text. Raises InvalidRequest if the text contains a lone surrogate."""
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except (TypeError, UnicodeEncodeError) as error:
        text = "the text is not valid Unicode: a lone surrogate"
        raise InvalidRequest(text, "prompt") from error


class SpecialTokens:
    """Hides and encodes the special tokens of one tokenizer. Threads may share it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content: token_id for token_id, token in added.items() if token.special}
        self._ids = frozenset(special.values())
        self._sorted = sorted(special)
        self._sorted_reversed = sorted(text[::-1] for text in special)
        self._longest = max(map(len, special), default=0)
        self._first_chars = {text[0] for text in special}
        self._special = _finder(special)
        self._added = _finder(token.content for token in added.values())
        self._nonce = secrets.token_hex(8)
        self._stand_ins = {text: f"<{self._nonce}-{number}>" for number, text in enumerate(special)}
        self._encoder, self._id_of = self._second_tokenizer(tokenizer, added)
        self._unknown_id = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")

    def hide(self, values: Any, keys: Collection[str] = ()) -> tuple[Any, Mapping[str, str]]:
        """Replace the text of special tokens in all strings of `values` (of JSON's types), keys of
        objects included. `keys` of objects stay as they are, because a template names them.

        Return the new values, and the replaced text by the character that stands for it. Raises
        InvalidRequest if a string contains a lone surrogate.
        """
        matches = {string: self._to_hide(string) for string in _strings(values, keys)}
        found = {text for each in matches.values() for _, _, text in each}
        if not found:
            return values, {}
        used = set(chain.from_iterable(matches))
        free = (chr(code) for code in _STAND_INS if chr(code) not in used)
        hidden = dict(zip(sorted(found), free, strict=False))
        new = {
            string: _with(string, [(begin, end, hidden[text]) for begin, end, text in each])
            for string, each in matches.items()
        }
        return _replaced(values, new, keys), {char: text for text, char in hidden.items()}

    def encode(self, text: str, hidden: Mapping[str, str]) -> tuple[int, ...]:
        """The token ids of a rendered chat. `hidden` is the second result of `hide`.

        Raises InvalidRequest if text of a message encodes to a special token by the tokenizer's
        normal rules, so it cannot be encoded as text.
        """
        matches = _matches(self._added, text)
        text = _with(
            text, ((begin, end, self._stand_ins.get(name, name)) for begin, end, name in matches)
        )
        for char, literal in hidden.items():
            text = text.replace(char, literal)
        ids = encoding_of(self._encoder, text).ids
        of_text = set(ids) - self._id_of.keys() - {self._unknown_id}
        if not self._ids.isdisjoint(of_text):
            raise InvalidRequest(
                "a message contains a special token, which cannot be encoded as text", "prompt"
            )
        return tuple(self._id_of.get(token_id, token_id) for token_id in ids)

    def _second_tokenizer(
        self, tokenizer: tokenizers.Tokenizer, added: Mapping[int, AddedToken]
    ) -> tuple[tokenizers.Tokenizer, Mapping[int, int]]:
        """A tokenizer with stand-ins for special tokens, and a map from the ids of its added tokens
        to the original ids. Both tokenizers share the model."""
        second = tokenizers.Tokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            second.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            second.pre_tokenizer = tokenizer.pre_tokenizer
        names = {
            token_id: self._stand_ins.get(token.content, token.content)
            for token_id, token in added.items()
        }
        second.add_tokens(
            [
                AddedToken(
                    names[token_id],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized and not token.special,
                )
                for token_id, token in added.items()
            ]
        )
        own_ids = {token_id: second.token_to_id(name) for token_id, name in names.items()}
        return second, {own: token_id for token_id, own in own_ids.items() if own is not None}

    def _to_hide(self, text: str) -> list[tuple[int, int, str]]:
        """The special tokens in a string, and at both ends parts of special tokens, which a
        template could complete."""
        found = []
        if any(char in text for char in self._first_chars):
            found = _matches(self._special, text)
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        for size in range(min(self._longest, end - begin), 0, -1):
            if _is_beginning(text[begin : begin + size][::-1], self._sorted_reversed):
                found.append((begin, begin + size, text[begin : begin + size]))
                break
        for size in range(min(self._longest, end - begin), 0, -1):
            if _is_beginning(text[end - size : end], self._sorted):
                found.append((end - size, end, text[end - size : end]))
                break
        return _disjoint(found)


def _is_beginning(text: str, longer: Sequence[str]) -> bool:
    """Whether one of these texts, which are sorted, begins with `text` and is longer."""
    place = bisect_right(longer, text)
    return place < len(longer) and longer[place].startswith(text)


def _finder(texts: Iterable[str]) -> tokenizers.Tokenizer:
    """A tokenizer that only finds these texts, as added tokens: in linear time."""
    finder = tokenizers.Tokenizer(models.BPE())
    finder.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]+"), "removed")
    finder.add_tokens([AddedToken(text, normalized=False) for text in texts])
    return finder


def _matches(finder: tokenizers.Tokenizer, text: str) -> list[tuple[int, int, str]]:
    """The matches in `text`: begin and end, in characters, and the matched text."""
    return [(begin, end, text[begin:end]) for begin, end in encoding_of(finder, text).offsets]


def _disjoint(matches: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """The matches in order, without those that overlap an earlier one."""
    kept: list[tuple[int, int, str]] = []
    for match in sorted(matches, key=lambda match: (match[0], -match[1])):
        if not kept or match[0] >= kept[-1][1]:
            kept.append(match)
    return kept


def _with(text: str, replacements: Iterable[tuple[int, int, str]]) -> str:
    parts, position = [], 0
    for begin, end, new in replacements:
        parts += [text[position:begin], new]
        position = end
    return "".join([*parts, text[position:]])


def _replaced(values: Any, new: Mapping[str, str], kept: Collection[str]) -> Any:
    if isinstance(values, str):
        return new[values]
    if isinstance(values, Mapping):
        return {
            key if key in kept else new[key]: _replaced(value, new, kept)
            for key, value in values.items()
        }
    if isinstance(values, list | tuple):
        return [_replaced(value, new, kept) for value in values]
    return values


def _strings(values: Any, kept: Collection[str]) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        yield from (key for key in values if key not in kept)
        yield from chain.from_iterable(_strings(each, kept) for each in values.values())
    elif isinstance(values, list | tuple):
        yield from chain.from_iterable(_strings(each, kept) for each in values)
