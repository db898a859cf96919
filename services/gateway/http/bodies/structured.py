"""The fields of a body that ask for structured output: OpenAI's `response_format` and vLLM's
`structured_outputs`."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import from_json

from services.gateway.http.bodies.fields import Body, FieldError
from services.model.structured.json_schemas import OPTIONS
from services.model.structured.structure import Structure, StructureKind

_ANY_OBJECT = Structure(StructureKind.JSON, "")

JsonObject = dict[str, Any]


class JsonSchemaBody(Body):
    """A schema is always enforced in full, whether it is `strict` or not."""

    name: str
    json_schema: JsonObject | bool = Field(alias="schema", default={})
    description: str | None = None
    strict: bool | None = None

    def to_structure(self) -> Structure:
        return Structure(StructureKind.JSON, json.dumps(self.json_schema))


class TextFormatBody(Body):
    type: Literal["text"]

    def to_structure(self) -> Structure | None:
        return None


class JsonObjectFormatBody(Body):
    type: Literal["json_object"]

    def to_structure(self) -> Structure:
        return _ANY_OBJECT


class JsonSchemaFormatBody(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchemaBody

    def to_structure(self) -> Structure:
        return self.json_schema.to_structure()


class StructuralTagFormatBody(Body):
    """vLLM's extension; in its form of today, or in the one before."""

    type: Literal["structural_tag"]
    format: JsonObject | None = None
    structures: list[JsonObject] | None = None
    triggers: list[str] | None = None

    def to_structure(self) -> Structure:
        text = json.dumps(self.model_dump(exclude_none=True))
        return Structure(StructureKind.STRUCTURAL_TAG, text)


class FlatJsonSchemaFormatBody(JsonSchemaBody):
    """The format of /v1/responses, which has the schema's fields beside its type."""

    type: Literal["json_schema"]


class OutputFormatBody(FlatJsonSchemaFormatBody):
    """The format of /v1/messages, which needs no name."""

    name: str = ""


ResponseFormat = Annotated[
    TextFormatBody | JsonObjectFormatBody | JsonSchemaFormatBody | StructuralTagFormatBody,
    Field(discriminator="type"),
]
ResponsesFormat = Annotated[
    TextFormatBody | JsonObjectFormatBody | FlatJsonSchemaFormatBody, Field(discriminator="type")
]


class StructuredOutputsBody(Body):
    """vLLM's `structured_outputs`: one of `json` to `structural_tag`, and options for `json`."""

    json_schema: str | JsonObject | None = Field(alias="json", default=None)
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    structural_tag: str | JsonObject | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: str | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> "StructuredOutputsBody":
        given = [self.json_schema, self.regex, self.choice, self.grammar, self.structural_tag]
        number = sum(value is not None for value in given) + bool(self.json_object)
        if number != 1:
            raise ValueError(
                f"{number} of json, json_object, regex, choice, grammar and structural_tag are "
                "given, not exactly one"
            )
        if self._options and self.json_schema is None and not self.json_object:
            raise ValueError("disable_any_whitespace and whitespace_pattern are for JSON")
        return self

    @property
    def _options(self) -> dict[str, Any]:
        """In the names of the compiler's."""
        options: dict[str, Any] = {}
        if self.disable_any_whitespace:
            options["whitespace_flexible"] = False
        if self.whitespace_pattern is not None:
            options["whitespace_pattern"] = self.whitespace_pattern
        return options

    def to_structure(self) -> Structure:
        for kind, value in (
            (StructureKind.REGEX, self.regex),
            (StructureKind.CHOICE, self.choice),
            (StructureKind.GRAMMAR, self.grammar),
            (StructureKind.STRUCTURAL_TAG, self.structural_tag),
        ):
            if value is not None:
                return Structure(kind, value if isinstance(value, str) else json.dumps(value))
        schema = {"type": "object"} if self.json_schema is None else self.json_schema
        if self._options:
            # Unlike json's, this parser refuses a text that is nested too deeply.
            schema = from_json(schema, allow_inf_nan=False) if isinstance(schema, str) else schema
            if not isinstance(schema, dict):
                raise ValueError("a JSON schema is an object")
            schema = {**schema, OPTIONS: self._options}
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return Structure(StructureKind.JSON, text)


def one_structure(
    name: str, given: ResponseFormat | ResponsesFormat | None, other: Structure | None
) -> Structure | None:
    """Return the structure of the field `name`, or the `other` structure, of `structured_outputs`.
    Raises FieldError if there are both."""
    structure = None if given is None else given.to_structure()
    if structure is not None and other is not None:
        text = f"{name} and structured_outputs are both given; give one of them"
        raise FieldError("structured_outputs", text)
    return structure or other
