"""One pass over the head's weights for all queries of a step gives the same results as logits,
whatever other queries there are."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor

from kvops.native import Kind, Lane, NativeCpu, emulated_kernels, usable_kernels
from services.engine.batch import Answer, Draw, Fault, Query
from services.engine.models.fused import native_answers
from services.engine.sampling.sampling_head import answer
from services.engine.sequences.penalty_state import PenaltyState
from services.protocol.ticket import SamplingParams

HIDDEN, VOCAB = 60, 1003
PLAIN = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, max_tokens=1)
ISAS = pytest.mark.parametrize("isa", [*usable_kernels(), *emulated_kernels()])
KINDS: tuple[Kind, ...] = ("float32", "bfloat16", "int8")


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

    def answer(self, hidden: Tensor, queries: Sequence[Query]) -> list[Answer | Fault]:
        return native_answers(self.head, hidden, queries, VOCAB)


def states(num: int) -> Tensor:
    return torch.randn(num, HIDDEN, generator=torch.Generator().manual_seed(num)) / 4


def draw(**changes: Any) -> Draw:
    params = replace(PLAIN, **changes)
    return Draw(params, 0, PenaltyState(params, [3, 4, 3], 2, [7]).adjustment())


QUERIES: list[tuple[Draw | int, int | None]] = [
    (draw(), None),
    (draw(temperature=1.0), None),
    (draw(), 3),
    (412, 0),
    (draw(repetition_penalty=1.5, logit_bias=((3, 9.0),)), 2),
    (draw(temperature=0.9, top_k=30, top_p=0.8), 20),
    (draw(allowed_token_ids=(5, 9, 900), temperature=1.0), 1),
    (draw(min_tokens=4, bad_words=((3,),)), None),
]
"""One query of each kind: for a token to draw or a given one, with each number of likeliest
tokens."""


def mixed(num_states: int) -> list[Query]:
    queries = islice(cycle(QUERIES), num_states)
    return [Query(state, token, state, top) for state, (token, top) in enumerate(queries)]


def assert_same(found: Sequence[Answer | Fault], expected: Sequence[Answer | Fault]) -> None:
    """Tokens and ranks are equal; logprobs are as near as powers in fp32 allow."""
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, Answer)
        assert isinstance(other, Answer)
        assert one.token_id == other.token_id
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert one.logprobs.rank == other.logprobs.rank
            assert one.logprobs.top_token_ids == other.logprobs.top_token_ids
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=4e-6)


@ISAS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_states", "num_lanes"), [(1, 1), (8, 1), (24, 2), (150, 3)])
def test_answers_are_those_of_the_logits(
    isa: str, kind: Kind, num_states: int, num_lanes: int
) -> None:
    random_head = RandomHead(isa, kind, num_lanes)
    hidden, queries = states(num_states), mixed(num_states)
    assert_same(random_head.answer(hidden, queries), answer(random_head.logits(hidden), queries))


@ISAS
@pytest.mark.parametrize("kind", KINDS)
def test_answers_do_not_depend_on_other_states(isa: str, kind: Kind) -> None:
    """Bit by bit: alone, among all queries, and among queries for the likeliest token only."""
    random_head, hidden, queries = RandomHead(isa, kind, num_lanes=2), states(90), mixed(90)
    together = random_head.answer(hidden, queries)
    for state in range(17):
        alone = replace(queries[state], state=0)
        assert random_head.answer(hidden[state : state + 1], [alone]) == [together[state]]
    plain = [Query(state, draw(), state) for state in range(90)]
    likeliest = random_head.answer(hidden, plain)
    assert [likeliest[state] for state in range(0, 90, 8)] == together[::8]


@ISAS
def test_a_state_that_is_queried_again_has_the_same_answer(isa: str) -> None:
    """A draw that changes the logits has no effect on other queries of the same state, in either
    order; scores are those of the unchanged logits."""
    random_head, hidden = RandomHead(isa), states(3)
    asked = [
        *(Query(1, draw(logit_bias=((token, 100.0),)), 4, 2) for token in (17, 900)),
        *(Query(1, draw(allowed_token_ids=(6, 8)), 4, 2), Query(1, draw(), 4, 2)),
        *(Query(1, 333, 4, 2), Query(1, draw(), 4), Query(0, draw(), 4), Query(2, draw(), 4, 1)),
    ]
    expected = answer(random_head.logits(hidden), asked)
    assert_same(random_head.answer(hidden, asked), expected)
    assert_same(random_head.answer(hidden, asked[::-1]), expected[::-1])
    assert [one.token_id for one in expected[:2] if isinstance(one, Answer)] == [17, 900]


@ISAS
def test_a_state_that_is_not_finite_is_a_fault_of_its_own(isa: str) -> None:
    random_head, hidden = RandomHead(isa, num_lanes=2), states(16)
    queries = mixed(16)
    right = random_head.answer(hidden, queries)
    hidden[8:, 5] = float("nan")
    faulty = random_head.answer(hidden, queries)
    assert faulty[:8] == right[:8]
    assert faulty[8:] == [Fault.NOT_FINITE] * 8


@pytest.mark.parametrize(
    ("query", "what"),
    [(Query(2, draw(), 0), "no state"), (Query(0, VOCAB, 0, 1), "outside the vocabulary")],
)
def test_wrong_arguments_are_refused(query: Query, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        RandomHead("portable").answer(states(2), [query])
