"""The form that a body asks for: all its spellings are one `Structure`."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from services.gateway.http.bodies.schema import ChatBody, CompletionBody
from services.model.structured.structure import Structure, StructureKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
_TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json", ""),
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
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    (request,) = ChatBody.model_validate(body).requests("r")
    assert request.sampling.structure == Structure(StructureKind(kind), text)


@pytest.mark.parametrize("text", ["[" * 60_000, "[1", '{"minimum": NaN}'])
def test_a_schema_that_is_no_json_is_a_fault_of_the_client(text: str) -> None:
    body = {"prompt": "Hi", "structured_outputs": {"json": text, "disable_any_whitespace": True}}
    with pytest.raises(ValidationError, match=r"recursion limit|EOF|expected value"):
        CompletionBody.model_validate(body)
