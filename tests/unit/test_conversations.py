"""A conversation is brought into the form that its template takes."""

from typing import Any

import pytest

from services.gateway.api import ChatMessage
from services.gateway.chat.conversations import fitted
from services.gateway.workers.models.template_traits import TemplateTraits
from services.model.text.chat_template import ChatTemplate

EACH = """{% for m in messages %}[{{ m.role }}] {{ m.content }}
{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}
{% endfor %}{% endfor %}"""
FIRST_ONLY = """{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"""
AT_THE_BEGINNING = """{% for m in messages %}
{% if m.role == 'system' and not loop.first %}
{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{{ m.role }}: {{ m.content }}{% endfor %}"""
NO_SYSTEM = """{% for m in messages %}
{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{{ m.content }}{% endfor %}"""
ONE_CALL = """{% for m in messages %}{% if m.tool_calls %}
{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls at once') }}{% endif %}
{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{{ m.content }}{% endfor %}"""
FIRST_CALL = ONE_CALL.replace("!= 1", "== 0")
CALLS_BY_ITEMS = """{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}
{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}{% endfor %}{% endfor %}"""


def traits(source: str) -> TemplateTraits:
    return TemplateTraits.of(ChatTemplate.from_source(source, {}))


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        (EACH, (True, True)),
        (FIRST_ONLY, (False, True)),
        (AT_THE_BEGINNING, (False, True)),
        (NO_SYSTEM, (True, True)),
        (ONE_CALL, (True, False)),
        (FIRST_CALL, (True, False)),
        (CALLS_BY_ITEMS, (True, True)),
    ],
)
def test_traits_are_found_by_rendering(source: str, takes: tuple[bool, bool]) -> None:
    found = traits(source)
    assert (found.takes_later_systems, found.takes_parallel_calls) == takes


def test_role_in_a_comment_or_in_text_is_not_known() -> None:
    assert not traits(EACH + "{# role == 'developer' #}").knows_developer
    assert not traits(EACH + "developer").knows_developer
    assert traits(EACH + "{% if messages[0].role == 'developer' %}{% endif %}").knows_developer
    assert traits(
        EACH + "{% if messages[0].role in ['system', 'developer'] %}{% endif %}"
    ).knows_developer


def said(*pairs: tuple[str, str]) -> list[ChatMessage]:
    return [ChatMessage(*pair) for pair in pairs]


def pairs(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


TALK = said(
    ("system", "S1"),
    ("developer", "D"),
    ("user", "U"),
    ("assistant", "A"),
    ("system", "S2"),
    ("user", "V"),
)


def test_instructions_are_merged_where_a_template_takes_one() -> None:
    together = [("system", "S1\n\nD\n\nS2"), ("user", "U"), ("assistant", "A"), ("user", "V")]
    assert pairs(fitted(TALK, traits(AT_THE_BEGINNING))) == together
    assert pairs(fitted(TALK, traits(FIRST_ONLY))) == together
    assert pairs(fitted(TALK[4:], traits(FIRST_ONLY))) == [("system", "S2"), ("user", "V")]


def test_instructions_stay_in_place_where_a_template_takes_several() -> None:
    as_system = [("system" if one.role == "developer" else one.role, one.content) for one in TALK]
    assert pairs(fitted(TALK, traits(EACH))) == as_system
    assert pairs(fitted(TALK, traits(NO_SYSTEM))) == as_system


def call(call_id: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": {"at": call_id}}
    return {"id": call_id, "type": "function", "function": function}


def result(text: str, call_id: str) -> ChatMessage:
    return ChatMessage("tool", text, fields={"tool_call_id": call_id})


def shown(messages: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (each["role"], each["content"], *(one["id"] for one in each.get("tool_calls", ())))
        for each in messages
    ]


def test_parallel_calls_become_one_by_one_where_a_template_takes_one() -> None:
    both = {"tool_calls": [call("c1"), call("c2")], "thinking": "Hm"}
    talk = [
        ChatMessage("user", "U"),
        ChatMessage("assistant", "A", fields=both),
        result("R2", "c2"),
        result("R1", "c1"),
        result("other", "c9"),
        ChatMessage("user", "V"),
    ]
    divided = fitted(talk, traits(ONE_CALL))
    assert shown(divided) == [
        ("user", "U"),
        ("assistant", "A", "c1"),
        ("tool", "R1"),
        ("assistant", "", "c2"),
        ("tool", "R2"),
        ("tool", "other"),
        ("user", "V"),
    ]
    assert [message.get("thinking") for message in divided if message["role"] == "assistant"] == [
        "Hm",
        None,
    ]
    assert [len(one.get("tool_calls", ())) for one in fitted(talk, traits(EACH))][1] == 2
