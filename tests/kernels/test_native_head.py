"""One pass over the head's weights for all draws of a step gives the same results as logits,
whatever other draws there are."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor

from kvops.native import Kind, Lane, NativeCpu, emulated_kernels, usable_kernels
from services.engine.batch import Draw, Fault
from services.engine.models.fused import native_draw
from services.engine.sampling import sampler
from services.engine.sampling.logprobs import scores_of
from services.engine.sampling.sampling_batch import SamplingBatch
from services.engine.sequences.penalty_state import PenaltyState
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import SamplingParams
from tests.draws import batch_of

HIDDEN, VOCAB = 60, 1003
PLAIN = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, max_tokens=1)
ISAS = pytest.mark.parametrize("isa", [*usable_kernels(), *emulated_kernels()])
KINDS: tuple[Kind, ...] = ("float32", "bfloat16", "int8")

Told = list[tuple[int, Logprobs | Fault | None]]
"""The token of each draw, with its logprobs if it asks for them."""


class RandomHead:
    """A head of random weights."""

    def __init__(self, isa: str, kind: Kind = "bfloat16", num_lanes: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        self.cpu = NativeCpu(isa=isa)
        self.cpu.assign([Lane()] * num_lanes)
        weights = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.head = self.cpu.head(self.cpu.pack(kind, weights))

    def logits(self, hidden: Tensor) -> Tensor:
        out = torch.empty(len(hidden), VOCAB)
        self.head.logits(hidden, out)
        return out

    def draw(self, hidden: Tensor, batch: SamplingBatch) -> Told:
        masks = [None] * len(batch.draws)
        return told(batch, native_draw(self.head, hidden, batch, masks, VOCAB))


def told(batch: SamplingBatch, found: Sequence[Tensor]) -> Told:
    tokens, *scores = found
    logprobs = dict(zip(batch.scored, scores_of(*scores), strict=True)) if scores else {}
    return [(token, logprobs.get(i)) for i, token in enumerate(tokens.tolist())]


def by_logits(head: RandomHead, hidden: Tensor, batch: SamplingBatch) -> Told:
    return told(batch, sampler.draw(head.logits(hidden), batch, [None] * len(batch.draws)))


def states(num: int) -> Tensor:
    return torch.randn(num, HIDDEN, generator=torch.Generator().manual_seed(num)) / 4


def draw(**changes: Any) -> Draw:
    params = replace(PLAIN, **changes)
    return Draw(params, 0, PenaltyState(params, [3, 4, 3], 2, [7]).adjustment())


DRAWS = [
    draw(),
    draw(temperature=1.0),
    draw(logprobs=3),
    draw(logprobs=0),
    draw(repetition_penalty=1.5, logit_bias=((3, 9.0),), logprobs=2),
    draw(temperature=0.9, top_k=30, top_p=0.8, logprobs=20),
    draw(allowed_token_ids=(5, 9, 900), temperature=1.0, logprobs=1),
    draw(min_tokens=4, bad_words=((3,),)),
]
"""A draw of each kind, with each number of likeliest tokens."""


def mixed(num_states: int) -> SamplingBatch:
    return batch_of(list(islice(cycle(DRAWS), num_states)), range(num_states))


def assert_same(found: Told, expected: Told) -> None:
    """Tokens and ranks are equal; logprobs are as near as powers in fp32 allow."""
    for (token, one), (other_token, other) in zip(found, expected, strict=True):
        assert token == other_token
        assert (one is None) == (other is None)
        if isinstance(one, Logprobs) and isinstance(other, Logprobs):
            assert one.rank == other.rank
            assert one.top_token_ids == other.top_token_ids
            assert one.logprob == pytest.approx(other.logprob, abs=4e-6)


@ISAS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_states", "num_lanes"), [(1, 1), (8, 1), (24, 2), (150, 3)])
def test_draws_are_those_of_the_logits(
    isa: str, kind: Kind, num_states: int, num_lanes: int
) -> None:
    random_head = RandomHead(isa, kind, num_lanes)
    hidden, batch = states(num_states), mixed(num_states)
    assert_same(random_head.draw(hidden, batch), by_logits(random_head, hidden, batch))


@ISAS
@pytest.mark.parametrize("kind", KINDS)
def test_draws_do_not_depend_on_other_states(isa: str, kind: Kind) -> None:
    """Bit by bit: alone, among all draws, and among draws of the likeliest token only."""
    random_head, hidden, batch = RandomHead(isa, kind, num_lanes=2), states(90), mixed(90)
    together = random_head.draw(hidden, batch)
    for state in range(17):
        token, logprobs = together[state]
        (alone,) = random_head.draw(
            hidden[state : state + 1], batch_of([batch.draws[state]], [state])
        )
        assert alone[0] == token
        if isinstance(logprobs, Logprobs) and isinstance(alone[1], Logprobs):
            assert alone[1].logprob == logprobs.logprob
            num_top = len(alone[1].top_logprobs)
            assert alone[1].top_logprobs == logprobs.top_logprobs[:num_top]
    likeliest = random_head.draw(hidden, batch_of([draw()] * 90, range(90)))
    assert [likeliest[state] for state in range(0, 90, 8)] == together[::8]


@ISAS
def test_a_state_that_is_drawn_from_again_has_the_same_result(isa: str) -> None:
    """A draw that changes the logits has no effect on other draws of the same state, in either
    order; scores are those of the unchanged logits."""
    random_head, hidden = RandomHead(isa), states(3)
    draws = [
        *(draw(logit_bias=((token, 100.0),), logprobs=2) for token in (17, 900)),
        *(draw(allowed_token_ids=(6, 8), logprobs=2), draw(logprobs=2)),
        *(draw(), draw(), draw(logprobs=1)),
    ]
    places = [1, 1, 1, 1, 1, 0, 2]
    for step in (1, -1):
        batch = SamplingBatch(draws[::step], [4] * 7, places[::step], (), range(3), range(3))
        found = random_head.draw(hidden, batch)
        assert_same(found, by_logits(random_head, hidden, batch))
        assert [token for token, _ in found[::step][:2]] == [17, 900]


@ISAS
def test_a_state_that_is_not_finite_is_a_fault_of_its_own(isa: str) -> None:
    random_head, hidden = RandomHead(isa, num_lanes=2), states(16)
    right = random_head.draw(hidden, mixed(16))
    hidden[8:, 5] = float("nan")
    faulty = random_head.draw(hidden, mixed(16))
    assert faulty[:8] == right[:8]
    assert [token for token, _ in faulty[8:]] == [-1] * 8


def test_a_draw_after_no_state_is_refused() -> None:
    batch = SamplingBatch([draw()], [0], [2], (), range(2), range(2))
    with pytest.raises(ValueError, match="no state"):
        RandomHead("portable").draw(states(2), batch)
