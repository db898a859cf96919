"""Requests with several sequences at the workers: one prompt, one ticket, one holder."""

from dataclasses import replace

import pytest

from blockstore.hashing import prefix_hashes
from services.protocol.messages import (
    Failed,
    Generated,
    Prefilled,
    Requeued,
    RequeueReason,
    Resume,
)
from services.protocol.ticket import TicketSequence
from services.runtime.errors import InvalidRequest

from .conftest import MakePair, WorkerPair, counts_steps
from .fakes import PROMPT, FakeSession, asked, right
from .groups import answer, ended, num_held, tokens
from .runs import admit, outputs, prefill, start

# Prefill


async def test_a_group_is_issued_with_a_token_for_each(pair: WorkerPair) -> None:
    """One pass over the prompt; 2 blocks stay shared, a tail is shared until it is written, and
    there is a block for each copy."""
    event = await answer(pair, asked(4))
    assert event.outputs == tuple(Generated("r1", 1, i, 10, (right(i, 1)[0],)) for i in range(4))
    assert [state.block_ids for state in event.ticket.sequences] == [(0, 1, 2)] * 4
    assert pair.arena.num_computed == 10
    assert await num_held(pair) == 2 + 4


async def test_a_group_that_cannot_have_its_blocks_at_once_is_refused(make_pair: MakePair) -> None:
    """2 + 6 x 1 of 7."""
    pair = await make_pair(num_blocks=7)
    with pytest.raises(InvalidRequest, match="6 sequences need 8 blocks"):
        pair.prefill.role.submit(pair.session, asked(6))
    await prefill(pair, asked(5))


async def test_a_group_finds_its_prompt_in_the_cache(pair: WorkerPair) -> None:
    await prefill(pair, asked(1, number=2))
    issued = await prefill(pair, asked(4))
    assert issued.num_cached_tokens == 8
    assert [state.token_ids for state in issued.sequences] == [(right(i, 1)[0],) for i in range(4)]
    assert pair.arena.num_computed == 10 + 2


async def test_an_abort_at_prefill_is_of_the_only_sequence_or_of_none(pair: WorkerPair) -> None:
    """Each of several sequences draws one token; the gateway leaves the aborted one out later."""
    pair.prefill_model.gate.clear()
    for wanted in (asked(3), asked(1, prompt=PROMPT[::-1], number=2)):
        pair.prefill.role.submit(pair.session, wanted)
    await pair.until(lambda: pair.prefill.role.load().num_running == 2)
    pair.prefill.role.abort(pair.session, "r1", 1, 0)
    pair.prefill.role.abort(pair.session, "r2", 1, 1)  # of nobody
    pair.prefill.role.abort(pair.session, "r2", 1, 0)
    pair.prefill_model.gate.set()
    await pair.until(lambda: set(pair.prefill.role.running) == set())
    await pair.prefill.writer.flush()
    (event,) = pair.session.of(Prefilled)
    assert [state.index for state in event.ticket.sequences] == [0, 1, 2]
    pair.prefill.role.abort(pair.session, "r1", 1)
    await pair.until_empty()


# Decode


@counts_steps
async def test_a_sequence_that_ends_gives_its_blocks_back_at_once(pair: WorkerPair) -> None:
    """0 ends at position 20, when 3 blocks of its own are full: they are cached without a holder.
    Its last block goes to the others."""
    pair.decode_model.pause_after = 10
    await start(pair, asked(3, 100, stop_token_ids=right(0, 11)[-1:]))
    await pair.until(lambda: ended(pair.session) == {0})
    await pair.decode.writer.flush()
    assert (await pair.store.stats("pool")).num_cached == 3
    assert pair.decode.role.load().num_free_slots == 16 - 2
    hashes = prefix_hashes(bytes(16), (*PROMPT, *right(0, 10)), 4)
    assert await pair.store.match("pool", hashes) == 5  # it stays in the cache
    pair.decode.role.abort(pair.session, "r1", 1)
    pair.decode_model.gate.set()
    await pair.until_empty()


# Tickets that make no sense


SOUND = (
    TicketSequence(0, (5, 6), (0, 1, 2, 3), 11),
    TicketSequence(1, (7,), (0, 1, 4), 10),
    TicketSequence(3, (8,), (0, 1, 4), 10),
)


@pytest.mark.parametrize(
    ("which", "changes", "problem"),
    [
        (1, {"block_ids": (0, 1, 99)}, "slots in the pool"),
        (2, {"num_computed_tokens": 9}, "9 of 11 tokens"),
    ],
    ids=str,
)
async def test_tables_of_another_length_are_refused(
    pair: WorkerPair, which: int, changes: dict[str, object], problem: str
) -> None:
    """Before the blocks are claimed."""
    states = list(SOUND)
    states[which] = replace(states[which], **changes)  # type: ignore[arg-type]
    detached = replace(asked(1), holder_epoch=2)
    pair.decode.role.reserve(pair.session, "r1", 1, 3)
    with pytest.raises(InvalidRequest, match=problem):
        pair.decode.role.admit(pair.session, replace(detached, sequences=tuple(states)))
    pair.decode.role.admit(pair.session, replace(detached, sequences=SOUND))  # it is only not there
    await pair.until(lambda: bool(pair.session.of(Requeued)))


async def test_tables_of_siblings_that_are_exchanged_are_not_believed(pair: WorkerPair) -> None:
    """The finished blocks of each sequence are compared with its tokens."""
    pair.decode_model.pause_after = 8
    await start(pair, asked(2, 20))
    await pair.until(lambda: pair.decode_model.num_begun == 9)
    pair.decode.role.hand_over(pair.session, "r1", 1)
    pair.decode_model.gate.set()
    await pair.until(lambda: bool(pair.session.of(Requeued)))
    detached = pair.session.of(Requeued)[0].ticket
    first, second = detached.sequences
    swapped = (
        replace(first, block_ids=second.block_ids),
        replace(second, block_ids=first.block_ids),
    )
    admit(pair, replace(detached, attempt=2, sequences=swapped))
    await pair.until(lambda: len(pair.session.of(Requeued)) == 2)
    assert pair.session.of(Requeued)[1].reason is RequeueReason.STALE_TICKET
    await pair.until_empty()


@counts_steps
async def test_blocks_missing_from_a_ticket_are_released(pair: WorkerPair) -> None:
    """A stop string ended one sequence while the ticket was under way."""
    pair.decode_model.pause_after = 8
    await start(pair, asked(3, 20))
    await pair.until(lambda: pair.decode_model.num_begun == 9)
    pair.decode.role.hand_over(pair.session, "r1", 1)
    pair.decode_model.gate.set()
    await pair.until(lambda: bool(pair.session.of(Requeued)))
    detached = pair.session.of(Requeued)[0].ticket
    before = await num_held(pair)
    left = (detached.sequences[0], detached.sequences[2])
    pair.decode_model.gate.clear()
    admit(pair, replace(detached, attempt=2, sequences=left))
    await pair.until(lambda: pair.decode_model.num_begun == 10)
    assert await num_held(pair) == before - 2  # 2 full ones; its tail will be somebody's next
    pair.decode_model.gate.set()
    await pair.until(lambda: ended(pair.session) == {0, 2})
    await pair.until_empty()


@counts_steps
async def test_a_parked_group_goes_on_where_its_client_wants_it(make_pair: MakePair) -> None:
    """With all sequences that have not ended."""
    pair = await make_pair(park_window_s=30.0)
    pair.decode_model.pause_after = 3
    issued = await start(pair, asked(3, 20, stop_token_ids=right(1, 3)[-1:]))
    await pair.until(lambda: pair.decode_model.num_begun == 4)
    pair.decode.role.close(pair.session)
    pair.decode_model.gate.set()
    other = FakeSession()
    await pair.until(lambda: all(job.num_slots == 0 for job in pair.decode.role.jobs))
    pair.decode.role.resume(other, Resume("r1", 6, issued.digest))
    await pair.until(lambda: bool(other.of(Requeued)))
    detached = other.of(Requeued)[0].ticket
    assert [state.token_ids for state in detached.sequences] == [right(0, 5), right(2, 5)]
    pair.decode.role.abort(other, "r1", 6)
    await pair.until_empty()


async def test_an_abort_of_one_at_rest_is_not_offered_again(make_pair: MakePair) -> None:
    """The gateway that resumes the parked request gets the sequences that live."""
    pair = await make_pair(park_window_s=30.0)
    issued = await start(pair, asked(3, 500))
    await pair.until(lambda: bool(outputs(pair.session, "r1")))
    pair.decode.role.hand_over(pair.session, "r1", 1)
    await pair.until(lambda: bool(pair.session.of(Requeued)))
    pair.decode.role.abort(pair.session, "r1", 1, 1)
    pair.decode.role.close(pair.session)
    other = FakeSession()
    pair.decode.role.resume(other, Resume("r1", 6, issued.digest))
    await pair.until(lambda: bool(other.of(Requeued)))
    assert [state.index for state in other.of(Requeued)[0].ticket.sequences] == [0, 2]
    pair.decode.role.abort(other, "r1", 6)
    await pair.until_empty()


async def test_an_abort_of_one_lets_the_others_go_on(pair: WorkerPair) -> None:
    pair.decode_model.gate.clear()
    issued = await start(pair, asked(3, 12))
    await pair.until(lambda: pair.decode_model.num_begun == 1)
    pair.decode.role.abort(pair.session, "r1", 1, 1)
    assert pair.decode.role.load().num_free_slots == 16 - 2
    pair.decode.role.abort(pair.session, "r1", 1, 1)  # again, or of nobody: no error
    pair.decode.role.abort(pair.session, "r1", 1, 7)
    pair.decode_model.gate.set()
    await pair.until(lambda: ended(pair.session) == {0, 2})
    got = tokens(pair.session, issued)
    assert (tuple(got[0]), tuple(got[2])) == (right(0, 12), right(2, 12))
    assert len(got[1]) == 1  # nothing of the step in flight either
    await pair.until_empty()


async def test_an_abort_that_crosses_the_end_of_the_others(pair: WorkerPair) -> None:
    """1 ends in the step in flight, and 0 is aborted: no sequence is left, and the gateway gets the
    reason."""
    pair.decode_model.gate.clear()
    await start(pair, asked(2, 500, stop_token_ids=right(1, 2)[-1:]))
    await pair.until(lambda: pair.decode_model.num_begun == 1)
    pair.decode.role.abort(pair.session, "r1", 1, 0)
    pair.decode_model.gate.set()
    await pair.until_empty()
    assert ended(pair.session) == {1}
    assert pair.decode.role.load().num_free_slots == 16


async def test_the_abort_of_the_last_one_is_that_of_the_request(pair: WorkerPair) -> None:
    pair.decode_model.gate.clear()
    await start(pair, asked(2, 500))
    await pair.until(lambda: pair.decode_model.num_begun == 1)
    for index in (1, 0):
        pair.decode.role.abort(pair.session, "r1", 1, index)
    pair.decode_model.gate.set()
    await pair.until_empty()
    assert pair.decode.role.load().num_free_slots == 16
    assert not pair.session.of(Failed)
