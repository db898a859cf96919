"""Types and checks of the single fields of a body, and of the objects in a body.

The check of a list stops at its first wrong item, and an object with too many fields is refused as
a whole. So even a large body causes few errors.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from services.gateway.api import Truncation
from services.gateway.http.bodies.unknown_fields import EMPTY, without_ignored


class FieldError(ValueError):
    """A field at fault, found by a check of several. `param` is its name in the object that has
    it."""

    def __init__(self, param: str, text: str) -> None:
        super().__init__(text)
        self.param = param


_MOST_BITS = 128
"""Of a whole number. Python refuses to write one of thousands of digits into an error."""

MAX_FIELDS = 128
"""Limit for the fields of one object of a body."""

MAX_INPUTS = 2048
"""Limit for the inputs of a body that asks for embeddings, as in OpenAI's API."""

MAX_PROMPTS = 128
"""Limit for the prompts of one body; each becomes a request of its own."""

_LARGEST_WHOLE = 1 << 53
"""Up to here, every whole number is a float."""

_MOST_DIGITS = 20
_TOKEN_ID = re.compile(f"[0-9]{{1,{_MOST_DIGITS}}}")

Integers = Annotated[list[int], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]


class Body(BaseModel):
    """An object of a body. Ignores unknown fields (`unknown_fields`). A whole number may have a
    fraction of 0, as in JSON Schema: 5.0 is an integer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """The unknown fields that would change the tokens -> the values that change nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        if len(fields) > MAX_FIELDS:
            raise ValueError(f"an object of {len(fields)} fields, at most {MAX_FIELDS}")
        kept = without_ignored(fields, _names(cls), cls.refused)
        for name, value in kept.items():
            if isinstance(value, int) and value.bit_length() > _MOST_BITS:
                text = f"{name} is a whole number of more than {_MOST_BITS} bits"
                raise FieldError(name, text)
        return {
            name: int(value) if isinstance(value, float) and _is_whole(value) else value
            for name, value in kept.items()
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The schema of what is accepted: with any field that is not refused."""
        reference = handler(core)
        schema = handler.resolve_ref_schema(reference)
        del schema["additionalProperties"]
        for name, values in cls.refused.items():
            if name not in cls.model_fields:
                schema.setdefault("properties", {})[name] = {"enum": [*EMPTY, *values]}
        schema["maxProperties"] = MAX_FIELDS
        return reference


class TypedBody(Body):
    """An object whose type says which of its fields it needs."""

    needed: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The fields that an object of each type has, beside those that every object may have."""
    noun: ClassVar[str] = "object"
    default_type: ClassVar[str] = ""

    type: str | None = None

    @field_validator("type")
    @classmethod
    def _check_type(cls, kind: str | None) -> str | None:
        if kind is not None and kind not in cls.needed:
            known = ", ".join(cls.needed)
            raise ValueError(f"{cls.noun}s of type {kind!r} are not supported, only {known}")
        return kind

    @property
    def kind(self) -> str:
        return self.type or self.default_type

    @model_validator(mode="after")
    def _check_needed(self) -> Self:
        missing = [
            name
            for name in self.needed[self.kind]
            if name not in self.model_fields_set or getattr(self, name) is None
        ]
        if missing:
            raise ValueError(f"each {self.noun} of type {self.kind} needs {', '.join(missing)}")
        return self


class TruncatedBody(Body):
    """A body whose prompts may be truncated, by vLLM's fields."""

    default_side: ClassVar[Literal["left", "right"]] = "left"
    """As vLLM's: a text is continued from its end, and embedded from its beginning."""

    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None

    @property
    def truncation(self) -> Truncation | None:
        if self.truncate_prompt_tokens is None:
            return None
        return Truncation(self.truncate_prompt_tokens, self.truncation_side or self.default_side)


@cache
def _names(body: type[BaseModel]) -> frozenset[str]:
    """The names of its fields in JSON."""
    return frozenset(field.alias or name for name, field in body.model_fields.items())


def _is_whole(number: float) -> bool:
    return number.is_integer() and abs(number) <= _LARGEST_WHOLE


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def parse_texts(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a string or a list of strings")
    return tuple(texts)


def parse_biases(value: Any) -> dict[int, float]:
    """The bias of each token id. The keys of a JSON object are strings."""
    biases = {} if value is None else value
    if not isinstance(biases, dict) or any(
        isinstance(bias, bool) or not isinstance(bias, int | float) for bias in biases.values()
    ):
        raise ValueError("must be an object of token ids and numbers")
    for token_id in biases:
        if not _TOKEN_ID.fullmatch(token_id):
            raise ValueError(f"{token_id[:_MOST_DIGITS]!r} is not a token id")
    try:
        return {int(token_id): float(bias) for token_id, bias in biases.items()}
    except OverflowError as error:
        raise ValueError("a bias is too large") from error


def parse_prompts(value: Any, most: int) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and _are_token_ids(value):
        return (tuple(value),)
    wrong = ValueError("must be text, token ids, or a list of either")
    if not isinstance(value, list) or not _types(value) <= {str, list}:
        raise wrong
    if len(value) > most:
        raise ValueError(f"{len(value)} prompts, at most {most}")
    if not all(isinstance(prompt, str) or _are_token_ids(prompt) for prompt in value):
        raise wrong
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in value)


def none_if_false(value: Any) -> Any:
    """None for false. `logprobs` is a flag in a chat, and standard clients send it, as false, in
    text completions too, where it is a number."""
    return None if value is False else value


def _are_token_ids(value: Any) -> bool:
    # An empty list is an empty prompt.
    return isinstance(value, list) and _types(value) <= {int}


def _types(values: list[Any]) -> set[type]:
    return set(map(type, values))


_IDS = {"type": "array", "items": {"type": "integer"}}


def _parsed(parse: Callable[[Any], Any], *forms: dict[str, Any]) -> tuple[Any, Any]:
    """The annotations of a field that `parse` checks: its values have one of `forms`."""
    return PlainValidator(parse), WithJsonSchema({"anyOf": list(forms)})


_STRING, _NULL, _STRINGS = (
    {"type": "string"},
    {"type": "null"},
    {"type": "array", "items": {"type": "string"}},
)
Texts = Annotated[tuple[str, ...], *_parsed(parse_texts, _STRING, _STRINGS, _NULL)]
Biases = Annotated[
    dict[int, float],
    *_parsed(
        parse_biases,
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number"},
        },
        _NULL,
    ),
]


def _up_to(most: int) -> tuple[Any, Any]:
    """The annotations of a field with so many prompts."""
    several = {"type": "array", "items": {"anyOf": [_STRING, _IDS]}, "maxItems": most}
    return _parsed(partial(parse_prompts, most=most), _STRING, _IDS, several)


Prompts = Annotated[tuple[str | tuple[int, ...], ...], *_up_to(MAX_PROMPTS)]
Inputs = Annotated[tuple[str | tuple[int, ...], ...], *_up_to(MAX_INPUTS)]
NumberOrFalse = Annotated[
    int | None,
    BeforeValidator(none_if_false),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"const": False}, _NULL]}),
]
