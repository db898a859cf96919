"""Tools and their earlier calls in the bodies of chats, in OpenAI's format."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import from_json

from services.gateway.api import RequestedTools, ToolChoice
from services.gateway.http.bodies.fields import Body, FieldError

MAX_TOOLS = 1024
MAX_CALLS = 1024

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionBody(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def definition(self) -> Mapping[str, Any]:
        """The definition that the chat template gets."""
        shown = {"name", "description", "parameters"}
        return {"type": "function", "function": self.model_dump(exclude_none=True, include=shown)}


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody


class OtherToolBody(Body):
    """A tool that is no function, such as a web search of the server. It is left out."""

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"const": "function"}})]


def tagged(value: Any, own: tuple[str, ...] = ("function",)) -> str:
    """Which of the two kinds of tools a JSON value is; `own` are the types of functions."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "other_tool" if isinstance(kind, str) and kind not in own else "function_tool"


OtherTool = Annotated[OtherToolBody, Tag("other_tool")]


class NamedFunctionBody(Body):
    name: Name


class NamedChoiceBody(Body):
    type: Literal["function"]
    function: NamedFunctionBody


NamedTool = Annotated[
    Annotated[NamedChoiceBody, Tag("function_tool")] | OtherTool, Discriminator(tagged)
]


class AllowedBody(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class AllowedChoiceBody(Body):
    """OpenAI's choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedBody


Tool = Annotated[Annotated[ToolBody, Tag("function_tool")] | OtherTool, Discriminator(tagged)]
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]
Choice = Literal["auto", "none", "required"]
ChatChoice = Choice | Annotated[NamedChoiceBody | AllowedChoiceBody, Discriminator("type")]


def functions_of(tools: Sequence[ToolBody | OtherToolBody] | None) -> list[FunctionBody]:
    return [tool.function for tool in tools or () if isinstance(tool, ToolBody)]


def requested_tools(
    functions: Sequence[FunctionBody],
    choice: Choice | NamedFunctionBody | None,
    parallel: bool | None,
    allowed: Collection[str] | None = None,
) -> RequestedTools | None:
    """Return the functions of a body; None if it has none. If several have one name, the last one
    counts. `allowed` are the names of the functions that count; None allows all. Raises FieldError
    if the fields do not fit together."""
    by_name = {function.name: function for function in functions}
    name = choice.name if isinstance(choice, NamedFunctionBody) else None
    named = allowed or ([] if name is None else [name])
    if by_name and (unknown := [each for each in named if each not in by_name]):
        raise FieldError("tool_choice", f"tool_choice: {unknown[0]!r} is not one of the tools")
    if allowed is not None:
        wanted = frozenset(allowed)
        by_name = {each: function for each, function in by_name.items() if each in wanted}
    if not by_name:
        if choice not in (None, "auto", "none"):
            raise FieldError("tool_choice", "tool_choice is for requests with tools")
        return None
    return RequestedTools(
        tuple(function.definition() for function in by_name.values()),
        ToolChoice(choice) if isinstance(choice, str) else ToolChoice.AUTO,
        name,
        parallel is not False,
        tuple(name for name, function in by_name.items() if function.strict),
    )


def arguments_of(value: Any, *, may_be_cut: bool = False) -> dict[str, Any]:
    """The arguments of an earlier call as an object, as chat templates want them. A model may have
    written anything, and a limit may have cut it: what is no object counts as an empty one. The
    object's text may itself stand in a JSON string. With `may_be_cut`, a text that ends
    within the object has the fields that are complete, as Anthropic's client reads a stream."""
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = from_json(value, allow_inf_nan=False, allow_partial=may_be_cut)
            except ValueError:
                return {}
    return value if isinstance(value, dict) else {}


def call_fields(call_id: str | None, name: str | None, arguments: Any) -> Mapping[str, Any]:
    """An earlier call for the chat template."""
    function = {"name": name or "", "arguments": arguments_of(arguments)}
    return {"id": call_id or "", "type": "function", "function": function}


class CalledFunctionBody(Body):
    name: str
    """As the model wrote it, which is not always a function's name."""
    arguments: Any = None


class ToolCallBody(Body):
    """A call of an earlier message."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionBody


ToolCalls = Annotated[list[ToolCallBody], Field(fail_fast=True, max_length=MAX_CALLS)]
