"""Resolves how the messages of a request are parsed."""

from services.common.errors import InvalidRequest
from services.gateway.frontend.api import GenerationRequest, RequestedTools, ToolChoice
from services.gateway.intake.catalog import Model
from services.gateway.parsing.message import CallFormat, Parsing

_NUM_LAST_TOKENS = 16
"""The tokens at the end of a prompt in which its template begins or ends the reasoning."""


def parsing_of(request: GenerationRequest, model: Model, prompt: tuple[int, ...]) -> Parsing | None:
    """How to parse the messages for this prompt; None: the client gets text only.

    InvalidRequest: the model may call functions, but its format of calls is not known.
    """
    if not request.wants_parts:
        return None
    tools, form = request.tools, model.format
    may_call = tools is not None and tools.choice is not ToolChoice.NONE
    if tools is not None and may_call:
        check_choice(tools)
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


def check_choice(tools: RequestedTools) -> None:
    """Raises InvalidRequest if the model must call a function, which is not supported."""
    if tools.choice is ToolChoice.REQUIRED or tools.function is not None:
        raise InvalidRequest("tool_choice: only auto and none are supported", "tool_choice")
