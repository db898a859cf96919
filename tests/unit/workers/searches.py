"""Beam searches of the fake model: their parameters, and the expected hypotheses."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import lru_cache
from typing import Any

from quire.types import Beam
from services.engine.sequences.beam import FIRST, BeamSearch, LivingBeam, num_candidates
from services.protocol.ticket import Hypothesis, SamplingParams, Ticket

from .fakes import GREEDY, PROMPT, likeliest_tokens, ticket

MAX_TOKENS = 30


def asked(
    number: int = 1,
    width: int = 4,
    num_returned: int = 3,
    max_tokens: int = MAX_TOKENS,
    stop_ids: Iterable[int] = (),
    **params: Any,
) -> Ticket:
    sampling = replace(
        GREEDY,
        max_tokens=max_tokens,
        stop_token_ids=tuple(stop_ids),
        n=num_returned,
        beam=Beam(width, **params),
    )
    return ticket(f"r{number}", (*PROMPT, number), sampling=sampling)


def right(ticket: Ticket) -> tuple[Hypothesis, ...]:
    """The result of a search over each beam's whole context at each step."""
    _, finished = steps_of(ticket)[-1]
    return finished[: ticket.sampling.n]


def steps_of(ticket: Ticket) -> Seq[tuple[list[LivingBeam], tuple[Hypothesis, ...]]]:
    """The living beams and the finished hypotheses after each step of a search from its prompt."""
    return _steps(ticket.prompt_token_ids, ticket.sampling)


@lru_cache(maxsize=1000)
def _steps(
    prompt: tuple[int, ...], sampling: SamplingParams
) -> Seq[tuple[list[LivingBeam], tuple[Hypothesis, ...]]]:
    params, stop_ids = sampling.beam, frozenset(sampling.stop_token_ids)
    assert params is not None
    search = BeamSearch(params, stop_ids, sampling.max_tokens)
    beams, finished = [FIRST], tuple[Hypothesis, ...]()
    steps = []
    while beams:
        contexts = [(*prompt, *beam.token_ids) for beam in beams]
        number = num_candidates(params, stop_ids)
        step = search.step(beams, finished, [likeliest_tokens(one, number) for one in contexts])
        finished = step.finished
        beams = [
            LivingBeam((*beams[one.parent].token_ids, one.token_id), one.score)
            for one in step.living
        ]
        steps.append((beams, finished))
    return steps
