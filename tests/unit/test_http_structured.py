"""The form that a body asks for: all its spellings are one `Structure`."""

import json
from typing import Any

import pytest

from services.gateway.http.bodies.reading import checked
from services.gateway.http.bodies.schema import ChatBody, CompletionBody
from services.gateway.http.responses_api.body import ResponsesBody
from services.gateway.workers.models.structures import STRUCTURE
from services.model.structured.structure import Structure, StructureKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
_OBJECT = {"type": "json_object"}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
_TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": _OBJECT}, "json", ""),
        ({"response_format": _FORMAT}, "json", json.dumps(SCHEMA)),
        ({"response_format": _TAG}, "structural_tag", json.dumps(_TAG)),
        ({"structured_outputs": {"json": SCHEMA}}, "json", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, "json", '{"type": "null"}'),
        ({"structured_outputs": {"json_object": True}}, "json", '{"type": "object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a", "b"]'),
        ({"structured_outputs": {"grammar": "start: x"}}, "grammar", "start: x"),
        ({"structured_outputs": {"structural_tag": _TAG}}, "structural_tag", json.dumps(_TAG)),
        (
            {"structured_outputs": {"json": "{}", "disable_any_whitespace": True}},
            "json",
            '{"x-guidance": {"whitespace_flexible": false}}',
        ),
    ],
)
def test_forms_of_the_text(fields: dict[str, Any], kind: str, text: str) -> None:
    (request,) = ChatBody.model_validate(CHAT | fields).requests("r")
    assert request.sampling.structure == Structure(StructureKind(kind), text)


@pytest.mark.parametrize(
    ("body", "fields", "name"),
    [
        (ChatBody, CHAT | {"response_format": _OBJECT}, "response_format"),
        (CompletionBody, {"prompt": "Hi", "response_format": _OBJECT}, "response_format"),
        (ResponsesBody, {"input": "Hi", "text": {"format": _OBJECT}}, "text.format"),
        (ChatBody, CHAT, STRUCTURE),
    ],
)
def test_structured_output_is_named_as_the_body_names_it(
    body: type[ChatBody], fields: dict[str, Any], name: str
) -> None:
    assert checked(fields, body).names.get(STRUCTURE, STRUCTURE) == name
