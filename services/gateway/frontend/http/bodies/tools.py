"""Tools and their earlier calls in the bodies of chats, in OpenAI's format."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from services.gateway.frontend.api import RequestedTools, ToolChoice
from services.gateway.frontend.http.bodies.fields import Body, FieldError

MAX_TOOLS = 1024
MAX_CALLS = 1024

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionBody(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody

    def definition(self) -> Mapping[str, Any]:
        """The definition that the chat template gets."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": self.type, "function": function}


class NamedFunctionBody(Body):
    name: Name


class NamedChoiceBody(Body):
    type: Literal["function"]
    function: NamedFunctionBody


Tools = Annotated[list[ToolBody], Field(fail_fast=True, max_length=MAX_TOOLS)]
Choice = Literal["auto", "none", "required"] | NamedChoiceBody


def requested_tools(
    tools: Sequence[ToolBody] | None, choice: Choice | None, parallel: bool | None
) -> RequestedTools | None:
    """The tools of a body; None: it has none. FieldError: they do not fit together."""
    if not tools:
        if choice not in (None, "auto", "none"):
            raise FieldError("tool_choice", "tool_choice is for requests with tools")
        return None
    names = [tool.function.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise FieldError("tools", f"tools: {min(twice)!r} is there more than once")
    function = choice.function.name if isinstance(choice, NamedChoiceBody) else None
    if function is not None and function not in names:
        raise FieldError("tool_choice", f"tool_choice: {function!r} is not one of the tools")
    return RequestedTools(
        tuple(tool.definition() for tool in tools),
        ToolChoice(choice) if isinstance(choice, str) else ToolChoice.AUTO,
        function,
        parallel is not False,
        tuple(tool.function.name for tool in tools if tool.function.strict),
    )


class CalledFunctionBody(Body):
    name: Name
    arguments: str


class ToolCallBody(Body):
    """A call of an earlier message."""

    id: str
    type: Literal["function"] | None = None
    function: CalledFunctionBody

    def to_fields(self) -> Mapping[str, Any]:
        """For the chat template, which wants the arguments as an object. Arguments that are no
        JSON object stay text: the model may have written them so."""
        arguments: Any = self.function.arguments
        try:
            value = from_json(arguments, allow_inf_nan=False)
        except ValueError:
            value = None
        if isinstance(value, dict):
            arguments = value
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


ToolCalls = Annotated[list[ToolCallBody], Field(fail_fast=True, max_length=MAX_CALLS)]
