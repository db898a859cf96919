"""Beam search over random models of a few tokens equals a search that evaluates every
continuation."""

import random
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.sequences.beam import FIRST, Beam, BeamSearch, num_candidates
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import BeamParams, EarlyStopping, FinishReason, Hypothesis
from tests.examples import examples

VOCAB = 24


@dataclass(frozen=True)
class Model:
    """Log-probabilities of the next token by the last one and the length, rounded coarsely so that
    ties occur."""

    seed: int
    coarse: bool

    def logprobs(self, tokens: tuple[int, ...]) -> list[float]:
        chance = random.Random(f"{self.seed} {len(tokens)} {tokens[-1:]}")
        logits = np.array([chance.gauss(0, 2) for _ in range(VOCAB)])
        logprobs = logits - np.log(np.exp(logits).sum())
        return [
            float(np.float32(value)) for value in (logprobs.round(0) if self.coarse else logprobs)
        ]


@dataclass(frozen=True)
class Case:
    model: Model
    params: BeamParams
    stop_ids: frozenset[int]
    max_tokens: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    width = draw(st.integers(1, 6))
    return Case(
        Model(draw(st.integers(0, 10**6)), draw(st.booleans())),
        BeamParams(
            width,
            width,
            draw(st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0])),
            draw(st.sampled_from(list(EarlyStopping))),
        ),
        frozenset(draw(st.sets(st.integers(0, VOCAB - 1), max_size=4))),
        draw(st.integers(1, 12)),
    )


def by_beam_search(case: Case) -> tuple[Hypothesis, ...]:
    search = BeamSearch(case.params, case.stop_ids, case.max_tokens)
    beams, finished = [FIRST], tuple[Hypothesis, ...]()
    while beams:
        likeliest = []
        for beam in beams:
            logprobs = case.model.logprobs(tuple(beam.token_ids))
            ids = sorted(range(VOCAB), key=lambda token: (-logprobs[token], token))
            ids = ids[: num_candidates(case.params, case.stop_ids)]
            values = tuple(logprobs[token] for token in ids)
            likeliest.append(Logprobs(values[0], 1, tuple(ids), values))
        step = search.step(beams, finished, likeliest)
        finished = step.finished
        beams = [
            Beam((*beams[branch.parent].token_ids, branch.token_id), branch.score)
            for branch in step.living
        ]
    return finished


def by_looking_at_all(case: Case) -> list[tuple[float, tuple[int, ...]]]:
    """(score, tokens) by the definition, over whole distributions."""
    params, penalty = case.params, case.params.length_penalty
    living: list[tuple[np.float32, tuple[int, ...]]] = [(np.float32(0), ())]
    done: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, case.max_tokens + 1):
        every = [
            (np.float32(total + np.float32(logprob)), (*tokens, token))
            for total, tokens in living
            for token, logprob in enumerate(case.model.logprobs(tokens))
        ]
        every.sort(key=lambda one: -one[0])  # stable: by beam, then by token
        for total, tokens in every[: params.width]:
            if tokens[-1] in case.stop_ids or length == case.max_tokens:
                done.append((float(total / np.float32(length**penalty)), tokens))
        done = sorted(done, key=lambda one: -one[0])[: params.width]
        living = [one for one in every if one[1][-1] not in case.stop_ids][: params.width]
        if len(done) < params.width:
            continue
        best = living[0][0]
        match params.early_stopping:
            case EarlyStopping.WHEN_FULL:
                return done
            case EarlyStopping.WHEN_UNLIKELY:
                hope = best / np.float32(length**penalty)
            case EarlyStopping.WHEN_IMPOSSIBLE:
                hope = best / np.float32((case.max_tokens if penalty > 0 else length) ** penalty)
        if hope <= done[-1][0]:
            return done
    return done


@settings(max_examples=examples(400))
@given(cases())
def test_beam_search_equals_exhaustive_search(case: Case) -> None:
    found = by_beam_search(case)
    assert [(one.score, one.token_ids) for one in found] == by_looking_at_all(case)
    for one in found:
        stopped = one.token_ids[-1] in case.stop_ids
        assert one.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


@settings(max_examples=examples(100))
@given(cases())
def test_beam_search_ends_with_as_many_as_its_width(case: Case) -> None:
    found = by_beam_search(case)
    assert len(found) == case.params.width
    assert len({one.token_ids for one in found}) == len(found)
    assert all(one.token_ids[:-1].count(stop) == 0 for one in found for stop in case.stop_ids)
