"""Resolves how the messages of a request are parsed, and what its tools demand of them."""

import json
from dataclasses import replace

from services.gateway.api import GenerationRequest, RequestedTools, ToolChoice
from services.gateway.chat.sampling import check_combination
from services.gateway.chat.tool_grammars import structure_after_reasoning, structure_of_calls
from services.gateway.output.parser.message import CallFormat, Parsing
from services.gateway.workers.models.catalog import Model
from services.gateway.workers.models.structures import STRUCTURE
from services.model.structured.structure import Structure, StructureKind
from services.runtime.errors import InvalidRequest

_NUM_LAST_TOKENS = 16
"""The tokens at the end of a prompt in which its template begins or ends the reasoning."""


def parsing_of(request: GenerationRequest, model: Model, prompt: tuple[int, ...]) -> Parsing | None:
    """How to parse the messages for this prompt; None if the client gets text only.

    Raises InvalidRequest if the model may call functions, but its format of calls is not known.
    """
    if not request.wants_parts:
        return None
    tools, form = request.tools, model.format
    may_call = tools is not None and tools.choice is not ToolChoice.NONE
    if tools is not None and may_call:
        if form.calls is None:
            raise InvalidRequest(
                "this model's chat template shows no known format of tool calls; `quire serve "
                f"--tool-call-parser` names one: {', '.join(CallFormat)}",
                "tools",
            )
    elif form.reasoning is None and form.calls is not CallFormat.HARMONY:
        return None
    begun = over = False
    if form.reasoning is not None:
        end = model.tokenizer.decode(prompt[-_NUM_LAST_TOKENS:], skip_special_tokens=False)
        begun, over = (end.rstrip().endswith(tag) for tag in form.reasoning)
    return Parsing(
        format=form,
        offered=tools.names if tools is not None and may_call else None,
        begins_in_reasoning=begun,
        reasoning_is_over=over,
        max_calls=1 if tools is not None and not tools.parallel else None,
    )


async def form_of(
    request: GenerationRequest, parsing: Parsing | None, model: Model
) -> Structure | None:
    """The form of the whole text, behind the model's reasoning: the calls that the request's tools
    demand, the form that the client gave, or either of them.

    Raises InvalidRequest if the form does not fit another parameter, or if the client's form or a
    function's schema is not supported.
    """
    tools, given = request.tools, request.sampling.structure
    if parsing is None:
        return given
    structure, param = None, "tools"
    if tools is not None and parsing.offered is not None:
        structure = structure_of_calls(tools, parsing, given)
    if structure is None and given is not None:
        structure, param = structure_after_reasoning(given, parsing), STRUCTURE
    if structure is None:
        return None
    check_combination(replace(request.sampling, structure=structure))
    try:
        await model.structures.check(structure, param)
    except InvalidRequest:
        if tools is not None and param == "tools":
            await _check_schemas(tools, model)
        raise
    return structure


async def _check_schemas(tools: RequestedTools, model: Model) -> None:
    """Raises InvalidRequest, which names the function and the path, if a schema alone is wrong."""
    for number, definition in enumerate(tools.definitions):
        name, schema = definition["function"]["name"], definition["function"].get("parameters")
        if schema and tools.has_schema(name):
            structure = Structure(StructureKind.JSON, json.dumps(schema))
            await model.structures.check(structure, "tools", f"tools[{number}].function.parameters")
