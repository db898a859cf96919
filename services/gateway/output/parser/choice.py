"""Chooses a model's `MessageFormat`: by its chat template, or as the deployment sets it."""

import re
from dataclasses import dataclass

from quire.choices import ReasoningParser, ToolCallParser
from services.gateway.output.parser.message import CallFormat, MessageFormat

_TAGS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}

_PATTERNS: tuple[tuple[CallFormat, str], ...] = (
    (CallFormat.HARMONY, r"<\|channel\|>"),
    (CallFormat.MISTRAL, r"\[TOOL_CALLS\]"),
    (CallFormat.TOOL_CALL_LIST, r"<\|tool_call\|>"),
    # Others write XML between the same tags.
    (CallFormat.HERMES, r"\A(?!.*(?:<function=|<arg_key>)).*<tool_call>"),
    (CallFormat.PYTHONIC, r"<\|python_start\|>|\[func_name1\("),
    (CallFormat.LLAMA3_JSON, r"<\|python_tag\|>|\"name\": function name, \"parameters\":"),
)
"""The text that shows a template's format; the first pattern that matches counts."""


@dataclass(frozen=True, slots=True)
class Parsers:
    """The deployment's choice for all of its models; `auto` chooses for each model."""

    calls: ToolCallParser = "auto"
    reasoning: ReasoningParser = "auto"

    def format(self, template: str | None) -> MessageFormat:
        """Return the format of a model with this chat template; None if it has no template."""
        source = template or ""
        calls: CallFormat | None = None
        if self.calls == "auto":
            found = (each for each, p in _PATTERNS if re.search(p, source, re.DOTALL))
            calls = next(found, None)
        elif self.calls != "none":
            calls = CallFormat(self.calls)
        reasoning = _TAGS.get(self.reasoning)
        if self.reasoning == "auto":
            reasoning = next((tags for tags in _TAGS.values() if tags[1] in source), None)
        return MessageFormat(calls, reasoning)
