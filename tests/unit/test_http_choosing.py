"""Bodies that ask for several answers: beam searches, and `best_of`."""

from typing import Any

import pytest
from pydantic import ValidationError

from quire.types import Beam
from services.gateway.api import RequestedSampling
from services.gateway.http.bodies.schema import ChatBody, CompletionBody

USER = [{"role": "user", "content": "Hi"}]


def beams(**fields: Any) -> Beam | None:
    body = CompletionBody.model_validate({"prompt": "Hi", **fields})
    return body.requests("r")[0].sampling.beam


def test_a_beam_search_is_as_wide_as_it_says_or_else_as_n() -> None:
    assert beams(n=4) is None
    assert beams(use_beam_search=True, n=4) == Beam(4)
    assert beams(use_beam_search=True, n=2, beam_width=6) == Beam(6)
    assert beams(use_beam_search=True, n=2, length_penalty=0.5, early_stopping="never") == Beam(
        2, 0.5, "never"
    )
    assert beams(use_beam_search=True, n=2, early_stopping=True) == Beam(2, None, True)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"beam_width": 4}, "beam_width is for"),
        ({"length_penalty": 0.5}, "length_penalty is for"),
        ({"early_stopping": True}, "early_stopping is for"),
        ({"early_stopping": "soon", "use_beam_search": True}, "early_stopping"),
    ],
)
def test_wrong_beam_parameters_are_named(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        CompletionBody.model_validate({"prompt": "Hi", **fields})


@pytest.mark.parametrize("fields", [{"length_penalty": 1}, {"use_beam_search": False}])
def test_beam_parameters_without_effect_are_accepted(fields: dict[str, Any]) -> None:
    assert beams(**fields) is None


def sampled(body: type[CompletionBody] | type[ChatBody], **fields: Any) -> RequestedSampling:
    given = {"prompt": "Hi"} if body is CompletionBody else {"messages": USER}
    return body.model_validate({**given, **fields}).requests("r")[0].sampling


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
@pytest.mark.parametrize("fields", [{"best_of": 1}, {"n": 3, "best_of": 3, "stream": True}])
def test_a_best_of_that_chooses_nothing_may_be_said(
    body: type[CompletionBody] | type[ChatBody], fields: dict[str, Any]
) -> None:
    assert sampled(body, **fields).n == fields["best_of"]


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"n": 2, "best_of": 3}, "best_of is 3, n is 2"),
        ({"best_of": 2}, "best_of is 2, n is 1"),
        ({"n": 3, "best_of": 2}, "best_of is 2, n is 3"),
        ({"n": 2, "best_of": 5, "use_beam_search": True}, "best_of is 5, n is 2"),
        ({"best_of": 2.5}, "best_of"),
        ({"best_of": True}, "best_of"),
    ],
)
def test_a_best_of_that_would_choose_is_refused(
    body: type[CompletionBody] | type[ChatBody], fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        sampled(body, **fields)
