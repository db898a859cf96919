"""Renders a checkpoint's chat template as transformers does, in jinja2's sandbox."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Self

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from services.model.config.json_fields import read_text
from services.model.gguf.file import GgufFile, gguf_file
from services.model.gguf.tokenizer import gguf_chat_template
from services.model.text.added_tokens import TOKENIZER_CONFIG_FILE, read_tokenizer_config
from services.model.text.template_bounds import BoundedEnvironment, time_bound
from services.runtime.errors import InvalidRequest, StartupError

TEMPLATE_FILE = "chat_template.jinja"
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"

_RESERVED = ("chat_template", "continue_final_message", "conversation", "self", "tokenize")
"""Names that a client may not set: parameters of transformers' `apply_chat_template` that are not
variables of the template, and jinja2's own names."""


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template. `special_tokens` are as in `Tokenizer.special_tokens`, text by name
    (`bos_token` ...). `source` is its text, with the text of the template for requests with
    tools."""

    _template: Template
    _tool_template: Template
    source: str
    special_tokens: Mapping[str, str]

    @classmethod
    def from_directory(cls, directory: Path, special_tokens: Mapping[str, str]) -> Self | None:
        """The checkpoint's chat template, or None. Raises StartupError for an invalid template."""
        sources = _sources(directory)
        return None if sources is None else cls.from_source(sources[0], special_tokens, sources[1])

    @classmethod
    def from_source(
        cls, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> Self:
        """`tool_source` is the template for requests with tools; None is the same."""
        environment = _environment()
        try:
            template = environment.bounded_template(source)
            with_tools = (
                template if tool_source is None else environment.bounded_template(tool_source)
            )
        except TemplateError as error:
            raise StartupError(f"the chat template is not valid: {error}") from error
        return cls(template, with_tools, source + (tool_source or ""), special_tokens)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template mentions the tools of a request."""
        names = _environment().parse(self.source).find_all(nodes.Name)
        return any(name.name == "tools" for name in names)

    def has_string(self, text: str) -> bool:
        """Whether the template's code has this string. Its comments and its text do not count."""
        strings = _environment().parse(self.source).find_all(nodes.Const)
        return any(string.value == text for string in strings)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Render a conversation of `{"role": ..., "content": ...}` messages to a prompt.

        The prompt contains its special tokens, so encode it without adding more. `arguments` are
        the variables that the client sets, `tools` the functions that the model may call. Raises
        InvalidRequest if the template refuses the messages, or if a client may not set one of the
        variables.
        """
        given = {
            "messages": messages,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.special_tokens,
        }
        for name in arguments or {}:
            if name in given or name in _RESERVED or name in self._template.globals:
                raise InvalidRequest(
                    f"chat_template_kwargs: {name!r} is not for clients to set",
                    "chat_template_kwargs",
                )
        try:
            template = self._tool_template if tools else self._template
            with time_bound():
                return template.render(**given, **(arguments or {}))
        # A template is a program: a client's messages can make it raise any error.
        except Exception as error:
            text = f"the chat template refuses the messages: {error}"
            raise InvalidRequest(text, "prompt") from error


def _sources(directory: Path) -> tuple[str, str | None] | None:
    """The sources of the template and of the template for tools, if it is another. Their own files
    take precedence over the entry in a GGUF file or in tokenizer_config.json, which may be a list
    of templates by name."""
    path, tool_path = directory / TEMPLATE_FILE, directory / TOOL_TEMPLATE_FILE
    if path.is_file():
        with_tools = read_text(tool_path) if tool_path.is_file() else None
        return read_text(path), with_tools
    if (gguf := gguf_file(directory)) is not None:
        return gguf_chat_template(GgufFile.read(gguf))
    match read_tokenizer_config(directory).get("chat_template"):
        case None:
            return None
        case str(source):
            return source, None
        case [*entries]:
            named: dict[str, str] = {}
            for entry in entries:
                match entry:
                    case {"name": str(name), "template": str(source)}:
                        named[name] = source
            if "default" in named:
                return named["default"], named.get("tool_use")
    raise StartupError(f"{directory / TOKENIZER_CONFIG_FILE}: chat_template has no default")


class _Generation(Extension):
    """Parses `{% generation %}`, which marks the assistant's text for training; it renders just its
    body."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares a set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`; unlike jinja2's filter it escapes no HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
