"""`best_of` at the gateway: the answer of its client, and the time at which it comes."""

from dataclasses import replace

import pytest

from services.common.errors import DuplicateRequest
from services.gateway.frontend.api import Received
from services.gateway.request.status import RequestStatus
from services.gateway.request.tickets import ticket_sequences
from services.gateway.streaming.output import MAX_UNREAD_TOKENS
from services.protocol.logprobs import Logprobs
from services.protocol.messages import Abort, Generated
from services.protocol.ticket import FinishReason

from .walk import (
    MAX_TOKENS,
    Walk,
    at_rest,
    best_of,
    deltas_of,
    expected,
    mean_logprob,
    output_of,
    requeued,
    step,
    text_of,
)

NUM = 4
ALL = [expected(MAX_TOKENS, index) for index in range(NUM)]
BEST = best_of(ALL, 2)


def choosing(stop: tuple[str, ...] = ()) -> Walk:
    return Walk(num_sequences=NUM, num_best=2, stop=stop)


def finish(walk: Walk, *indices: int) -> None:
    for index in indices:
        step(walk, index, MAX_TOKENS - len(walk.output.sequences[index].tokens))


async def best_outputs(walk: Walk) -> dict[int, list[int]]:
    return {index: list(delta.token_ids) for index, (delta,) in (await deltas_of(walk)).items()}


def test_the_best_are_not_the_first() -> None:
    """Otherwise these tests would show nothing."""
    assert BEST not in (ALL[:2], ALL[1::-1])


async def test_the_best_come_whole_and_best_first_when_all_have_ended() -> None:
    walk = choosing()
    await walk.until_decoding()
    finish(walk, 2, 0, 3)
    assert not any(sequence.has_unread for sequence in walk.output._read_order)
    finish(walk, 1)
    assert walk.lifecycle.status is RequestStatus.ENDED
    deltas = await deltas_of(walk)
    assert list(deltas) == [0, 1]
    for (delta,), tokens in zip(deltas.values(), BEST, strict=True):
        assert (list(delta.token_ids), delta.text) == (tokens, text_of(tokens))
        assert delta.finish_reason is FinishReason.LENGTH
        assert delta.score == pytest.approx(mean_logprob(tokens))
        assert delta.logprobs == ()  # it has not asked for them
    ((first,), (last,)) = deltas.values()
    assert (first.usage, last.usage and last.usage.num_generated_tokens) == (None, NUM * MAX_TOKENS)


async def test_a_sequence_is_as_likely_as_its_tokens_are_on_average() -> None:
    """Tokens after a stop string do not count, and neither does the length."""
    stopped = expected(3, 1)
    walk = choosing(stop=(text_of(stopped[2:]),))
    await walk.until_decoding()
    step(walk, 1, 4)
    assert walk.decode.sent[-1] == Abort("r1", 1, 1)
    finish(walk, 0, 2, 3)
    best = best_of([ALL[0], stopped, ALL[2], ALL[3]], 2)
    assert await best_outputs(walk) == dict(enumerate(best))


async def test_the_first_of_equal_samples_is_the_best() -> None:
    output = choosing().output
    for index in (3, 2, 1, 0):
        output.write(index, (60 + index,), FinishReason.STOP, (Logprobs(-1.5, 1),))
    output.close(None)
    assert [delta.token_ids async for delta in output.deltas()] == [(60,), (61,)]


async def test_sums_do_not_depend_on_their_order() -> None:
    """Tokens come one by one, or several at once after a pause."""
    values = [-(10.0**-power) for power in range(17)]
    logprobs = tuple(Logprobs(value, 1) for value in values)
    tokens = tuple(range(60, 77))
    one_by_one, at_once = choosing().output.sequences[:2]
    at_once.write(tokens, FinishReason.STOP, logprobs)
    for number, (token, each) in enumerate(zip(tokens, logprobs, strict=True), 1):
        one_by_one.write((token,), FinishReason.STOP if number == 17 else None, (each,))
    assert one_by_one.mean_logprob == at_once.mean_logprob


async def test_a_client_without_tokens_to_read_is_not_too_slow() -> None:
    walk = choosing()
    await walk.until_decoding()
    num_tokens = MAX_UNREAD_TOKENS + 1
    tokens, logprobs = (60,) * num_tokens, (Logprobs(-1.0, 1),) * num_tokens
    walk.lifecycle.client.write(Generated("r1", 1, 0, 3, tokens, None, logprobs))
    assert not walk.lifecycle.client.is_paused
    assert walk.lifecycle.status is RequestStatus.DECODING
    walk.lifecycle.close()


async def test_tokens_are_counted_and_scored_once_after_a_loss() -> None:
    walk = choosing()
    await walk.until_decoding()
    finish(walk, 1)
    step(walk, 0, 2)
    walk.on_lost(walk.decode, died=True)
    again = await walk.until_decoding()
    assert [sequence.index for sequence in again.sequences] == [0, 2, 3]
    finish(walk, 0, 2, 3)
    usage = walk.output.stats.usage()
    assert usage.num_generated_tokens == NUM * MAX_TOKENS
    assert await best_outputs(walk) == dict(enumerate(BEST))


async def test_a_detached_ticket_keeps_its_scores() -> None:
    walk = choosing()
    await walk.until_decoding()
    finish(walk, 2)
    for index in (0, 1, 3):
        step(walk, index, 2)
    walk.on_event(walk.decode, requeued(walk, at_rest(walk, 0, 1, 3)))
    assert await walk.reserve()
    walk.lifecycle.admit()
    finish(walk, 0, 1, 3)
    assert len(walk.prefill.sent) == 2  # a submit, and the word that its ticket was claimed
    assert await best_outputs(walk) == dict(enumerate(BEST))


async def test_a_resumed_call_goes_on_with_all_sequences() -> None:
    """The client has received nothing: no token is forgotten, and none computed again."""
    walk = choosing()
    await walk.until_decoding()
    finish(walk, 1)
    step(walk, 0, 3)
    request, before = walk.lifecycle.client.request, walk.output
    commands = [*walk.prefill.sent, *walk.decode.sent]
    walk.output = output_of(request)
    walk.lifecycle.resume(replace(request, received=()), walk.output)
    assert [*walk.prefill.sent, *walk.decode.sent] == commands
    assert walk.lifecycle.status is RequestStatus.DECODING
    finish(walk, 0, 2, 3)
    deltas = await deltas_of(walk)
    assert [list(delta.token_ids) for (delta,) in deltas.values()] == BEST
    (last,) = deltas[1]
    assert last.usage is not None
    assert last.usage.num_generated_tokens == NUM * MAX_TOKENS
    with pytest.raises(DuplicateRequest):
        async for _ in before.deltas():
            pass


async def test_no_sequence_is_delivered_while_others_run() -> None:
    walk = choosing()
    await walk.until_decoding()
    request = walk.lifecycle.client.request
    received = (Received(0, tuple(BEST[0]), FinishReason.LENGTH),)
    output = output_of(request)
    output.replay(received)
    with pytest.raises(DuplicateRequest):
        walk.lifecycle.resume(replace(request, received=received), output)
    with pytest.raises(DuplicateRequest):
        walk.lifecycle.resume(replace(request, num_best=3), output_of(request))
    walk.lifecycle.close()


@pytest.mark.parametrize("position", [0, 1])
async def test_a_resumed_call_with_one_of_the_best_gets_the_other(position: int) -> None:
    """All are computed again, since no gateway knows which one it was."""
    walk = choosing()
    walk.output.replay((Received(position, tuple(BEST[position]), FinishReason.LENGTH),))
    ticket = await walk.until_decoding()
    assert [sequence.token_ids for sequence in ticket.sequences] == [()] * NUM
    finish(walk, *range(NUM))
    other = 1 - position
    (told,) = (await deltas_of(walk))[other]
    assert list(told.token_ids) == BEST[other]
    assert told.usage is not None
    assert told.usage.num_generated_tokens == NUM * MAX_TOKENS


async def test_all_sequences_go_on_elsewhere() -> None:
    """The other gateway looks for the drawn sequences, not for those of the answer."""
    output = choosing().output
    output.replay((Received(0, tuple(BEST[0]), FinishReason.LENGTH),))
    wanted = ticket_sequences(output)
    assert [(each.index, each.token_ids) for each in wanted] == [(i, ()) for i in range(NUM)]
