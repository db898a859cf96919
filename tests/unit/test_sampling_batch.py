"""A batch finds the states of each row's draws and scores, and gives each row its results."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from services.engine.batch import Draw, Fault, Row, RowOutput, RowResult, Scoring
from services.engine.sampling import sampler
from services.engine.sampling.logprobs import score_tensors
from services.engine.sampling.sampling_batch import NOT_FINITE, SamplingBatch
from services.protocol.logprobs import LogprobColumns, Logprobs
from services.protocol.ticket import SamplingParams


def draw(logprobs: int | None = None) -> Draw:
    return Draw(SamplingParams(0.0, 0, 1.0, 0.0, seed=1, max_tokens=8, logprobs=logprobs), 0)


def row(num_tokens: int, draw: Draw | None = None, scoring: Scoring | None = None) -> Row:
    return Row([1] * num_tokens, 0, [0], 0, () if draw is None else (draw,), scoring)


def outputs(batch: SamplingBatch, broken: Sequence[int] = ()) -> list[Sequence[Tensor]]:
    """Each draw gives 10 + the sequence's index; the logprob of a token is minus its id, its rank
    is one more than the state. The states `broken` give nothing."""

    def scores(tokens: Sequence[int], states: Sequence[int], num_top: int) -> Sequence[Tensor]:
        ids = torch.tensor(tokens).view(-1, 1).repeat(1, 1 + num_top)
        ranks = torch.tensor([0 if state in broken else state + 1 for state in states])
        return ids, -ids.float(), ranks

    drawn = [10 + one.sequence_index for one in batch.draws]
    states = [batch.drawing[place] for place in batch.states]
    tokens = [NOT_FINITE if s in broken else t for s, t in zip(states, drawn, strict=True)]
    of_draws: Sequence[Tensor] = ()
    if batch.scored:
        told = [(drawn[i], states[i]) for i in batch.scored]
        of_draws = scores([t for t, _ in told], [s for _, s in told], batch.num_top)
    found: list[Sequence[Tensor]] = [(torch.tensor(tokens), *of_draws)]
    for number, places in batch.apart:
        scoring, asked = batch.rows[number].scoring, range(places.start, places.stop)
        if scoring is None:
            is_broken = bool(set(asked) & set(broken))
            found.append((torch.full((len(asked), 2), float("nan") if is_broken else 1.0),))
        else:
            found.append(scores(scoring.token_ids, asked, scoring.num_top))
    return found


def results(batch: SamplingBatch, broken: Sequence[int] = ()) -> list[RowResult]:
    return batch.results(outputs(batch, broken), [None] * len(batch.draws))


def scores(token: int, state: int, num_top: int = 0) -> Logprobs:
    return Logprobs(-float(token), state + 1, (token,) * num_top, (-float(token),) * num_top)


def test_rows_that_ask_nothing_are_told_tokens() -> None:
    batch = SamplingBatch.of([row(3), row(1, draw()), row(2, draw())])
    assert batch.wanted == [3, 5]
    assert (batch.states, batch.positions) == ([0, 1], [1, 2])
    assert results(batch, broken=[1]) == [(), (10,), Fault.NOT_FINITE]


def test_each_draw_is_told_as_many_likeliest_tokens_as_it_asks_for() -> None:
    batch = SamplingBatch.of([row(1, draw(0)), row(1, draw()), row(1, draw(2))])
    assert (batch.scored, batch.num_top) == ([0, 2], 2)
    assert results(batch) == [
        RowOutput((10,), (scores(10, 0),)),
        (10,),
        RowOutput((10,), (scores(10, 2, num_top=2),)),
    ]


def test_a_prompt_is_told_chunk_by_chunk() -> None:
    """A chunk in the middle scores after each of its states, the last one after all but its end,
    which draws."""
    rows = [row(2, None, Scoring([8, 9], 1)), row(3, draw(0), Scoring([5, 6], 0)), row(1, draw())]
    batch = SamplingBatch.of(rows)
    assert batch.wanted == [0, 1, 2, 3, 4, 5]
    assert batch.apart == [(0, slice(0, 2)), (1, slice(2, 4))]
    assert (batch.drawing, batch.states, batch.positions) == ([4, 5], [0, 1], [3, 1])
    assert results(batch) == [
        RowOutput((), (), LogprobColumns.of([scores(8, 0, num_top=1), scores(9, 1, num_top=1)])),
        RowOutput((10,), (scores(10, 4),), LogprobColumns.of([scores(5, 2), scores(6, 3)])),
        (10,),
    ]


def test_states_behind_the_prompt_are_not_asked_about() -> None:
    """As when generated tokens are computed again with it."""
    batch = SamplingBatch.of([row(5, draw(), Scoring([8], 0)), row(1, draw())])
    assert batch.wanted == [0, 4, 5]
    assert (batch.apart, batch.drawing) == ([(0, slice(0, 1))], [1, 2])


def test_a_prompt_that_cannot_be_scored_breaks_its_row_alone() -> None:
    batch = SamplingBatch.of([row(2, None, Scoring([8, 9], 0)), row(1, draw(0))])
    assert results(batch, broken=[1]) == [Fault.NOT_FINITE, RowOutput((10,), (scores(10, 2),))]


def test_a_fault_of_the_draw_stays_one() -> None:
    batch = SamplingBatch.of([row(2, draw(3), Scoring([8], 0)), row(1, draw())])
    assert results(batch, broken=[1]) == [Fault.NOT_FINITE, (10,)]


def test_states_are_told_as_they_are() -> None:
    rows = [replace(row(4), num_states=2), row(1, draw()), replace(row(1), num_states=1)]
    batch = SamplingBatch.of(rows)
    assert batch.wanted == [2, 3, 4, 5]
    pooled, drawn, broken = results(batch, broken=[3])
    assert isinstance(pooled, RowOutput)
    assert pooled.states is not None
    assert pooled.states.tolist() == [[1, 1], [1, 1]]
    assert (drawn, broken) == ((10,), Fault.NOT_FINITE)


def test_drafts_are_told_up_to_the_first_fault() -> None:
    """A draw after each draft, and one before them."""
    rows = [replace(row(3), draws=(draw(0),) * 3, num_drafts=2), row(1, draw())]
    batch = SamplingBatch.of(rows)
    assert batch.wanted == [0, 1, 2, 3]
    assert (batch.states, batch.positions) == ([0, 1, 2, 3], [1, 2, 3, 1])
    told = RowOutput((10, 10), (scores(10, 0), scores(10, 1)))
    assert results(batch, broken=[2]) == [told, (10,)]
    assert results(batch, broken=[0]) == [Fault.NOT_FINITE, (10,)]


def test_tokens_of_one_state_are_each_told() -> None:
    """The tokens of a group's sequences, the last two of which have drawn the same."""
    of_group = tuple(replace(draw(0), sequence_index=index) for index in (3, 1, 1))
    batch = SamplingBatch.of([replace(row(2), draws=of_group), row(1, draw(0))])
    assert batch.wanted == [1, 2]
    assert (batch.states, batch.positions) == ([0, 0, 0, 1], [2, 2, 2, 1])
    assert batch.first_draws([0, 1]).tolist() == [0, 3]
    several, one = results(batch)
    assert several == RowOutput((13, 11, 11), tuple(scores(token, 0) for token in (13, 11, 11)))
    assert one == RowOutput((10,), (scores(10, 1),))


def test_rows_are_sampled_with_their_own_state() -> None:
    """Several draws after a state, with scores of the logits as they are."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    hot = replace(draw(), sampling=replace(draw().sampling, temperature=1.0, logprobs=4))
    draws, places = [draw(1), hot, hot, draw()], [2, 2, 1, 0]
    batch = SamplingBatch(draws, [5, 5, 6, 6], places, (), range(3), range(3))
    tokens, *found = sampler.draw(logits, batch, [None] * 4)
    assert torch.equal(tokens, sampler.sample(logits[places], batch))
    assert [tokens[0], tokens[3]] == [logits[2].argmax(), logits[0].argmax()]
    expected = score_tensors(logits[[2, 2, 1]], tokens[:3], 4)
    assert all(map(torch.equal, found, expected))
