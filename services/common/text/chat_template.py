"""Renders a checkpoint's chat template as transformers does, in jinja2's sandbox."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Self

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.errors import InvalidRequest, StartupError
from services.common.gguf.file import GgufFile, gguf_file
from services.common.gguf.tokenizer import gguf_chat_template
from services.common.text.tokenizer import TOKENIZER_CONFIG_FILE, read_tokenizer_config

TEMPLATE_FILE = "chat_template.jinja"

_RESERVED = ("chat_template", "continue_final_message", "conversation", "self", "tokenize")
"""Names that a client may not set: parameters of transformers' `apply_chat_template` that are not
variables of the template, and jinja2's own names."""


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template. `special_tokens`: as in `Tokenizer.special_tokens`, text by name
    (`bos_token` ...)."""

    _template: Template
    special_tokens: Mapping[str, str]

    @classmethod
    def from_directory(cls, directory: Path, special_tokens: Mapping[str, str]) -> Self | None:
        """The checkpoint's chat template; None if it has none. StartupError: it is invalid."""
        source = _source(directory)
        return None if source is None else cls.from_source(source, special_tokens)

    @classmethod
    def from_source(cls, source: str, special_tokens: Mapping[str, str]) -> Self:
        try:
            return cls(_environment().from_string(source), special_tokens)
        except TemplateError as error:
            raise StartupError(f"the chat template is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation of `{"role": ..., "content": ...}` messages to a prompt.

        The prompt contains its special tokens, so encode it without adding more. `arguments`:
        variables that the client sets. InvalidRequest: the template refuses the messages, or a
        client may not set one of the variables.
        """
        given = {
            "messages": messages,
            "tools": None,
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
            return self._template.render(**given, **(arguments or {}))
        # A template is a program: a client's messages can make it raise any error.
        except Exception as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}") from error


def _source(directory: Path) -> str | None:
    """The template's source. Its own file takes precedence over the entry in tokenizer_config.json,
    which may be a list of named templates."""
    if (gguf := gguf_file(directory)) is not None:
        return gguf_chat_template(GgufFile.read(gguf))
    path = directory / TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    match read_tokenizer_config(directory).get("chat_template"):
        case None:
            return None
        case str(source):
            return source
        case [*entries]:
            for entry in entries:
                match entry:
                    case {"name": "default", "template": str(source)}:
                        return source
    raise StartupError(f"{directory / TOKENIZER_CONFIG_FILE}: chat_template has no default")


class _Generation(Extension):
    """Parses `{% generation %}`, which marks the assistant's text for training; it renders just its
    body."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares a set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
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


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
