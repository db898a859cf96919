"""The items of a response's output, as OpenAI's Responses API streams them."""

from typing import Any

from quire.types import Candidate
from services.gateway.http.responses_api.output import OutputItems
from services.gateway.output.delta import Delta, PositionLogprobs
from services.gateway.output.parser.parts import CallStart, Content, Part


def delta(token: str, parts: tuple[Part, ...]) -> Delta:
    logprobs = (PositionLogprobs(Candidate(1, -0.5, 1, token.encode()), (), 0),)
    return Delta("r", 0, (1,), token, parts=parts, logprobs=logprobs)


def tokens(fields: dict[str, Any]) -> list[str]:
    return [each["token"] for each in fields["logprobs"]]


def test_logprobs_of_a_delta_without_parts_stand_with_the_next_text() -> None:
    """A parser keeps a text back that may become a call; at the end there may be no next text."""
    items = OutputItems("r")
    came = [delta("a", (Content("a"),)), delta("<", ()), delta("b", (Content("<b"),))]
    events = [event for each in [*came, delta("STOP", ())] for event in items.add(each)]
    events += items.finish("completed")
    told = [tokens(fields) for kind, fields in events if kind == "response.output_text.delta"]
    assert told == [["a"], ["<", "b"], ["STOP"]]
    assert tokens(items.items[0]["content"][0]) == ["a", "<", "b", "STOP"]


def test_logprobs_of_a_call_stand_nowhere() -> None:
    items = OutputItems("r")
    for each in (delta("<call>", ()), delta("f", (CallStart(0, "c", "f"),))):
        list(items.add(each))
    list(items.finish("completed"))
    assert [item["type"] for item in items.items] == ["function_call"]
