"""Bodies that ask for several answers: beam searches, and `best_of`."""

from typing import Any

import pytest

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
