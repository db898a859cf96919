"""Translates structures to grammars of llguidance. Every structure is a format.

A structural tag says which parts of a text have a form: the format of xgrammar and vLLM,
`{"format": {...}}`, or the older one, `{"structures": [...], "triggers": [...]}`. The other kinds
of structure are formats for the whole text. Each format becomes a rule:

    tag               begin content end
    triggered_tags    any text, and behind each trigger the rest of one of its tags
    const_string, choice (our own: a list of strings), json_schema, regex, grammar, any_text,
    sequence, or, optional, plus, star, tags_with_separator

A name of a special token, such as `<|python_tag|>`, in a begin, end or trigger is that token.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.model.structured.json_schemas import with_options
from services.model.structured.larks import lark_of_grammar, lark_of_regex
from services.model.structured.structure import Structure, StructureKind

Format = Mapping[str, Any]

_FIELDS = {
    "const_string": {"value"},
    "choice": {"choices"},
    "json_schema": {"json_schema"},
    "regex": {"pattern"},
    "grammar": {"grammar"},
    "any_text": {"excludes"},
    "sequence": {"elements"},
    "or": {"elements"},
    "optional": {"content"},
    "plus": {"content"},
    "star": {"content"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"},
    "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
}
_REPEATS = {"optional": "?", "plus": "+", "star": "*"}
_NO_EFFECT: tuple[Any, ...] = (None, False, [], "json")
"""Values with which other fields ask for nothing, such as `style`."""


_HEAD = '%llguidance {"no_forcing": true}'
"""Without it the library looks for the longest text that must come, to allow its first token only:
seconds for a long text, and tokens that the model would not draw."""


def grammar_of(structure: Structure, special: Mapping[str, int]) -> str:
    """The grammar of a structure. `special` has the ids of special tokens by name. Raises
    ValueError if its text is malformed; whether a grammar is valid is known when it is compiled."""
    rules = _Rules(special)
    start = f"start: {rules.add(format_of(structure))}"
    lark = "\n".join([_HEAD, *rules.lines, start])
    return json.dumps({"grammars": [{"lark_grammar": lark}, *rules.named]})


def format_of(structure: Structure) -> Format:
    """Any structure as the format of a structural tag, which can stand beside others. Raises
    ValueError."""
    text = structure.text
    match structure.kind:
        case StructureKind.JSON:
            schema = json.loads(text) if text else {"type": "object"}
            return {"type": "json_schema", "json_schema": schema}
        case StructureKind.REGEX:
            return {"type": "regex", "pattern": text}
        case StructureKind.GRAMMAR:
            return {"type": "grammar", "grammar": text}
        case StructureKind.CHOICE:
            return {"type": "choice", "choices": json.loads(text)}
        case StructureKind.STRUCTURAL_TAG:
            return _format_of_tags(text)


def _format_of_tags(text: str) -> Format:
    match json.loads(text):
        case {"format": dict() as form}:
            return form
        case {"structures": [*structures], "triggers": [*triggers]}:
            tags = [_tag_of_structure(structure) for structure in structures]
            return {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    raise ValueError('it has neither "format" nor "structures" and "triggers"')


def _tag_of_structure(structure: Any) -> Format:
    match structure:
        case {"begin": str(begin), "schema": schema, "end": str(end)}:
            content = {"type": "json_schema", "json_schema": schema}
            return {"type": "tag", "begin": begin, "content": content, "end": end}
    raise ValueError("a structure has begin, schema and end")


class _Rules:
    """The rules of a grammar, `lines`, and the grammars that they name."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self.named: list[dict[str, Any]] = []
        self._special = special
        names = sorted(special, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def add(self, form: Any) -> str:
        """Add the rule of a format; returns its name."""
        kind = form.get("type") if isinstance(form, dict) else None
        if kind not in _FIELDS:
            raise ValueError(f"a format of type {kind!r} is not one of {', '.join(_FIELDS)}")
        for name, value in form.items():
            if name not in _FIELDS[kind] | {"type"} and value not in _NO_EFFECT:
                raise ValueError(f"{name} of {kind} is not supported")
        match form:
            case {"type": "const_string", "value": str(value)}:
                return self._rule(self._literal(value))
            case {"type": "choice", "choices": choices}:
                return self._choice(choices)
            case {"type": "json_schema", "json_schema": schema}:
                return self._name({"json_schema": with_options(schema)})
            case {"type": "regex", "pattern": str(pattern)}:
                return self._name({"lark_grammar": lark_of_regex(pattern)})
            case {"type": "grammar", "grammar": str(grammar)}:
                return self._name({"lark_grammar": lark_of_grammar(grammar)})
            case {"type": "any_text"}:
                return self._rule(self._text(form))
            case {"type": "sequence", "elements": [_, *_] as elements}:
                return self._rule(" ".join(map(self.add, elements)))
            case {"type": "or", "elements": [_, *_] as elements}:
                return self._rule(" | ".join(map(self.add, elements)))
            case {"type": "optional" | "plus" | "star", "content": content}:
                return self._rule(self.add(content) + _REPEATS[kind])
            case {"type": "tag", "begin": str(begin), "content": content, "end": end}:
                return self._rule(f"{self._literal(begin)} {self._ended(content, end)}")
            case {"type": "triggered_tags", "triggers": [_, *_] as triggers, "tags": [_, *_]}:
                return self._triggered(form, triggers)
            case {"type": "tags_with_separator", "tags": [_, *_], "separator": str(separator)}:
                return self._separated(form, separator)
        raise ValueError(f"a format of type {kind} lacks a field, or has a wrong one")

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def _name(self, grammar: dict[str, Any]) -> str:
        name = f"grammar_{len(self.named)}"
        self.named.append({"name": name, **grammar})
        return f"@{name}"

    def _choice(self, choices: Any) -> str:
        """One expression: as many rules would take seconds, and be too many for the parser."""
        if not isinstance(choices, list) or not choices:
            raise ValueError("a list of at least one string is needed")
        if not all(isinstance(choice, str) for choice in choices):
            raise ValueError("a choice is not a string")
        name = f"CHOICE_{len(self.lines)}"
        self.lines.append(f"{name}: {' | '.join(map(_quoted, choices))}")
        return name

    def _literal(self, text: str) -> str:
        """The text, with special tokens as tokens."""
        parts, begin = [], 0
        for found in self._special_pattern.finditer(text):
            parts += [_quoted(text[begin : found.start()]), f"<[{self._special[found[0]]}]>"]
            begin = found.end()
        return " ".join([*parts, _quoted(text[begin:])])

    def _text(self, form: Format) -> str:
        """Any text without what the format excludes."""
        name = f"TEXT_{len(self.lines)}"
        without = "".join(
            f" & ~/(.|\\n)*{_pattern(excluded)}(.|\\n)*/" for excluded in _strings(form, "excludes")
        )
        self.lines.append(f"{name}: /(.|\\n)*/{without}")
        return name

    def _ended(self, content: Any, end: Any) -> str:
        """Content and its end. Any text ends at its first end."""
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not ends or not all(isinstance(e, str) for e in ends):
            raise ValueError("the end of a tag is a string, or a list of strings")
        alternatives = f"({' | '.join(map(self._literal, ends))})"
        if isinstance(content, dict) and content.get("type") == "any_text":
            if "" in ends:
                raise ValueError("a tag of any_text needs an end")
            return self._up_to(content, alternatives, ends)
        return f"{self.add(content)} {alternatives}"

    def _up_to(self, form: Format, literals: str, of: Iterable[str]) -> str:
        """Any text up to the first of some literals, with it. Special tokens are no text."""
        is_lazy = not any(self._special_pattern.search(text) for text in of)
        return self._rule(f"{self._text(form)} {literals}", "[lazy]" if is_lazy else "")

    def _tags(self, form: Format) -> list[tuple[str, str]]:
        """(begin, the rule of what follows it) of each tag."""
        tags = []
        for tag in form["tags"]:
            match tag:
                case {"begin": str(begin), "content": content, "end": end}:
                    tags.append((begin, self._rule(self._ended(content, end))))
                case _:
                    raise ValueError("a tag has begin (a string), content and end")
        return tags

    def _triggered(self, form: Format, triggers: Sequence[Any]) -> str:
        tags = self._tags(form)
        behind: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for begin, rest in tags:
            found = [trigger for trigger in behind if trigger and begin.startswith(str(trigger))]
            if len(found) != 1:
                raise ValueError(f"the tag {begin!r} begins with {len(found)} of the triggers")
            behind[found[0]].append(f"{self._literal(begin[len(found[0]) :])} {rest}")
        triggered = self._rule(
            " | ".join(
                f"{self._up_to(form, self._literal(trigger), [trigger])} ({' | '.join(tags_of)})"
                for trigger, tags_of in behind.items()
                if tags_of
            )
        )
        first = " | ".join(f"{self._literal(begin)} {rest}" for begin, rest in tags)
        match bool(form.get("at_least_one")), bool(form.get("stop_after_first")):
            case True, True:
                return self._rule(first)
            case True, False:
                return self._rule(f"({first}) {triggered}* {self._text(form)}")
            case False, True:
                return self._rule(f"{triggered} | {self._text(form)}")
        return self._rule(f"{triggered}* {self._text(form)}")

    def _separated(self, form: Format, separator: str) -> str:
        tags = self._tags(form)
        one = self._rule(" | ".join(f"{self._literal(begin)} {rest}" for begin, rest in tags))
        more = "" if form.get("stop_after_first") else f" ({self._literal(separator)} {one})*"
        return self._rule(one + more if form.get("at_least_one") else f"({one}{more})?")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _strings(form: Format, name: str) -> list[str]:
    found = form.get(name) or []
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise ValueError(f"{name} is a list of strings")
    return found
