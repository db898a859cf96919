"""Chat templates: rendered as transformers does, in a sandbox, with the same refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from services.model.text import template_bounds
from services.model.text.chat_template import ChatTemplate
from services.runtime.errors import InvalidRequest, StartupError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>"}]

CHATML = """
{%- for message in messages %}
    {%- if loop.first and message.role != "system" %}
        {{- "<|im_start|>system\\nYou help.<|im_end|>\\n" }}
    {%- endif %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content | trim + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""
BLOCKS = """{{ bos_token }}
{% for message in messages %}
    {% if message['role'] == 'tool' %}
        {% continue %}
    {% endif %}
    {% if loop.index > 2 %}{% break %}{% endif %}
[{{ message | tojson }}]
{% endfor %}
{% generation %}
{{ eos_token }}{% if tools is none and not documents %} no tools{% endif %}
{% endgeneration %}
"""
# As Mistral's: the system's words go into the first instruction, roles must alternate.
INST = """
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] + '\\n\\n' %}{% set turns = messages[1:] %}
{%- else %}
    {%- set first = '' %}{% set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- ' [INST] ' + (first if loop.first else '') + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""


def render(source: str, messages: object = HELLO, **options: bool) -> str:
    return ChatTemplate.from_source(source, SPECIAL).render(messages, **options)  # type: ignore[arg-type]


def test_a_conversation_is_rendered() -> None:
    assert render(CHATML) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert not render(CHATML, add_generation_prompt=False).endswith("assistant\n")


@pytest.mark.parametrize("source", [CHATML, BLOCKS])
@pytest.mark.parametrize("roles", [["user"], ["system", "tool", "user"], ["user"] * 4])
def test_rendering_equals_transformers(source: str, roles: list[str]) -> None:
    """With whitespace, loop controls and JSON."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": role, "content": f" {role} says 'é' "} for role in roles]
    options: dict[str, Any] = {"add_generation_prompt": True, **SPECIAL}
    rendered = render_jinja_template([messages], chat_template=source, **options)[0]
    assert render(source, messages) == rendered[0]


def test_instructions_render_as_transformers_does_and_must_alternate() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    answered = [*HELLO, {"role": "assistant", "content": " Hi! "}, {"role": "user", "content": "?"}]
    options: dict[str, Any] = {"chat_template": INST, **SPECIAL}
    rendered = render_jinja_template([answered], **options)[0]
    assert render(INST, answered) == rendered[0]
    assert rendered[0] == "<s> [INST] Be brief.\n\nHi <b> [/INST] Hi!</s> [INST] ? [/INST]"
    with pytest.raises(InvalidRequest, match="must take turns"):
        render(INST, [HELLO[1], HELLO[1]])


def test_the_templates_own_refusal_reaches_the_client() -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match="refuses the messages: roles must alternate"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ messages[0].content | int / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_errors_in_a_template_are_refusals(source: str) -> None:
    """Also for operations that the sandbox does not allow."""
    with pytest.raises(InvalidRequest, match="the chat template refuses the messages"):
        render(source)


def test_today_is_known() -> None:
    assert render("{{ strftime_now('%Y') | int > 2000 }}") == "True"


def test_a_template_that_is_not_valid_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match="the chat template is not valid"):
        ChatTemplate.from_source("{% if %}", SPECIAL)


def config(directory: Path, chat_template: object) -> None:
    text = json.dumps({"chat_template": chat_template})
    (directory / "tokenizer_config.json").write_text(text)


def loaded(directory: Path) -> str | None:
    template = ChatTemplate.from_directory(directory, SPECIAL)
    return None if template is None else template.render([])


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    """A list of named templates has a default; a separate file has precedence."""
    assert loaded(tmp_path) is None
    config(tmp_path, "text")
    assert loaded(tmp_path) == "text"
    config(tmp_path, [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}])
    assert loaded(tmp_path) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert loaded(tmp_path) == "file"


def test_a_template_beside_a_gguf_file_has_precedence(tmp_path: Path, smollm2: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(smollm2)
    whole = ChatTemplate.from_directory(tmp_path, SPECIAL)
    assert whole is not None
    assert "<|im_start|>" in whole.source
    (tmp_path / "chat_template.jinja").write_text("file")
    assert loaded(tmp_path) == "file"


@pytest.mark.parametrize("chat_template", [7, [], [{"name": "tool_use", "template": "t"}], ["x"]])
def test_no_usable_template_is_a_startup_error(tmp_path: Path, chat_template: object) -> None:
    config(tmp_path, chat_template)
    with pytest.raises(StartupError, match="chat_template has no default"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{% for _ in range(99) %}{{ 'a' * 1000000 }}{% endfor %}",
        "{% macro long() %}{% for _ in range(99) %}{{ 'a' * 1000000 }}{% endfor %}{% endmacro %}"
        "{{ long() | length }}",
    ],
)
def test_a_template_cannot_make_texts_without_end(source: str) -> None:
    template = ChatTemplate.from_source(source, {})
    with pytest.raises(InvalidRequest, match="makes more than 67,108,864 characters"):
        template.render([])


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
        "{% macro call(n) %}{% if n %}{{ call(n - 1) }}{{ call(n - 1) }}{% endif %}{% endmacro %}"
        "{{ call(60) }}",
    ],
)
def test_a_template_cannot_run_without_end(source: str) -> None:
    environment = template_bounds.BoundedEnvironment()
    with template_bounds.time_bound(0.05), pytest.raises(TemplateError, match="takes more than"):
        environment.bounded_template(source).render()
