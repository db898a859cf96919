"""Checks the parameters of a beam search, and which other parameters it excludes."""

from dataclasses import replace
from typing import Any

from quire.sampling import NUMBERS, Beam
from services.gateway.api import RequestedSampling
from services.protocol.ticket import MAX_BEAM_WIDTH, MAX_LENGTH_PENALTY
from services.runtime.errors import InvalidRequest

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: (number.neutral,) for name, number in NUMBERS.items()},
    "temperature": (0, 1),
    "top_k": (0, -1),
    "logit_bias": ({},),
    "allowed_token_ids": ((),),
    "bad_words": ((),),
    "stop": ((),),
    "logprobs": (),
    "prompt_logprobs": (),
}
"""Parameters that a beam search does not support, each with the values that have no effect and are
therefore accepted. A beam search ignores the model's generation_config, which is about sampling."""


def resolve_beam(asked: RequestedSampling) -> Beam | None:
    """The checked parameters of the beam search; None if the request asks for none.

    Raises InvalidRequest if a parameter is out of range, or not supported by a beam search.
    """
    beam = asked.beam
    if beam is None:
        return None
    for name, neutral in _NEUTRAL.items():
        value = getattr(asked, name)
        if value is not None and value not in neutral:
            raise InvalidRequest(f"{name} is {value!r}: a beam search does without", name)
    width, penalty = beam.width, 1.0 if beam.length_penalty is None else beam.length_penalty
    if not 0 < width <= MAX_BEAM_WIDTH:
        raise InvalidRequest(f"a beam width of {width}, not in [1, {MAX_BEAM_WIDTH}]", "beam_width")
    if asked.n > width:
        raise InvalidRequest(f"n is {asked.n}, the beam width only {width}", "n")
    if not abs(penalty) <= MAX_LENGTH_PENALTY:
        most = MAX_LENGTH_PENALTY
        raise InvalidRequest(
            f"length_penalty is {penalty}, not in [{-most:g}, {most:g}]", "length_penalty"
        )
    return replace(beam, length_penalty=penalty)
