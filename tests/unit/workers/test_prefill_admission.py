"""Admission at the prefill worker: the order in which requests get blocks, and the cached blocks
that it accepts."""

from typing import Any

import pytest

from blockstore.errors import OutOfBlocks
from blockstore.hashing import prefix_hashes
from blockstore.memory_store import MemoryStore
from blockstore.records import Allocation
from services.protocol.messages import AwaitsBlocks, Requeued, RequeueReason
from services.runtime.errors import InvalidRequest

from .conftest import MakePair, WorkerPair
from .fakes import PROMPT, expected, ticket
from .runs import count, prefilled


async def test_requests_without_blocks_wait_in_order(make_pair: MakePair) -> None:
    """A pool of 4 blocks, and r1 has all. r2 needs 4 and waits, r3 needs 1 and waits behind it."""
    pair = await make_pair(num_blocks=4)
    pair.prefill.role.submit(pair.session, ticket("r1", range(50, 64)))
    await pair.until(lambda: len(pair.session.events) == 1)
    pair.prefill.role.submit(pair.session, ticket("r2", range(14)))
    pair.prefill.role.submit(pair.session, ticket("r3", (1,)))
    await pair.until(lambda: pair.prefill.role.load().num_waiting == 2)
    await pair.until(lambda: bool(pair.session.waiting))
    pair.prefill.role.abort(pair.session, "r1", 1)
    await pair.until(lambda: len(pair.session.events) == 2)
    assert list(prefilled(pair.session)) == ["r1", "r2"]
    pair.prefill.role.abort(pair.session, "r2", 1)
    await pair.until(lambda: len(pair.session.events) == 3)
    assert list(prefilled(pair.session)) == ["r1", "r2", "r3"]
    assert pair.session.waiting[0] == AwaitsBlocks("r2", 1, num_needed=4, num_available=0)


async def test_nothing_is_said_of_a_request_that_ended_while_the_store_was_asked(
    make_pair: MakePair,
) -> None:
    class EndsTheRequest(MemoryStore):
        async def allocate(self, *_: Any, **__: Any) -> Allocation:
            pair.prefill.role.abort(pair.session, "r1", 1)
            raise OutOfBlocks(4, 0)

    pair = await make_pair(num_blocks=4, store=EndsTheRequest())
    pair.prefill.role.submit(pair.session, ticket("r1", range(14)))
    await pair.until(lambda: not pair.prefill.role.jobs)
    await pair.prefill.writer.flush()
    assert not pair.session.waiting


async def test_order_decides_not_the_time_of_coming(make_pair: MakePair) -> None:
    """r9 has all 4 blocks; of the waiting requests, the first in order came last."""
    pair = await make_pair(num_blocks=4)
    pair.prefill.role.submit(pair.session, ticket("r9", range(50, 64)))
    await pair.until(lambda: len(pair.session.events) == 1)
    for number in (5, 3, 1):
        pair.prefill.role.submit(pair.session, ticket(f"r{number}", range(number, number + 14)))
    for number, last in enumerate(("r9", "r1", "r3"), 2):
        pair.prefill.role.abort(pair.session, last, 1)
        await pair.until(lambda num=number: len(pair.session.events) == num)  # type: ignore[misc]
    assert list(prefilled(pair.session)) == ["r9", "r1", "r3", "r5"]


@pytest.mark.parametrize(
    ("max_num_seqs", "num_let_in"), [(3, 3), (100, 8)], ids=["rows", "two steps of four quarters"]
)
async def test_requests_far_from_their_turn_hold_nothing(
    make_pair: MakePair, max_num_seqs: int, num_let_in: int
) -> None:
    """12 prompts of 10 tokens: the engine computes 16 a step, and a prompt counts for 4 at most."""
    pair = await make_pair(num_blocks=64, max_num_seqs=max_num_seqs)
    pair.prefill_model.gate.clear()
    for number in range(1, 13):
        pair.prefill.role.submit(pair.session, ticket(f"r{number}", range(number, number + 10)))
    await pair.until(lambda: pair.prefill.role.load().num_running == num_let_in)
    assert len(await pair.store.holders("pool")) == num_let_in
    pair.prefill_model.gate.set()
    await pair.until(lambda: len(pair.session.events) == 12)


@pytest.mark.parametrize(("wrong", "num_cached_tokens"), [(0, 0), (1, 4)])
async def test_a_block_that_says_something_else_is_never_adopted(
    pair: WorkerPair, wrong: int, num_cached_tokens: int
) -> None:
    """Law 6: an index entry that leads to another prompt's KV is retracted, not served; the right
    blocks before it are."""
    pair.prefill.role.submit(pair.session, ticket("r1", PROMPT, max_tokens=1))
    await pair.until(lambda: bool(pair.session.events))
    pair.prefill.stamps.mark_owned([wrong], "somebody else")
    pair.prefill.role.submit(pair.session, ticket("r2", PROMPT))
    await pair.until(lambda: len(pair.session.events) == 2)
    event = prefilled(pair.session)["r2"]
    assert event.ticket.num_cached_tokens == num_cached_tokens
    assert event.ticket.holder_id == "h-r2+"
    assert event.ticket.sequences[0].token_ids == tuple(expected(PROMPT, 1))
    assert count(pair.prefill.metrics.kv_corrupt) == 1
    pair.prefill.role.abort(pair.session, "r2", 1)
    await pair.until_empty()


@pytest.mark.parametrize(
    ("parent", "tokens"),
    [(b"o" * 16, PROMPT[:4]), (bytes(16), (*PROMPT[:3], 7))],
    ids=["another parent", "other tokens"],
)
async def test_an_equal_hash_is_not_enough(
    pair: WorkerPair, parent: bytes, tokens: tuple[int, ...]
) -> None:
    """Two prompts whose hashes collide: the block's stamp has the tokens."""
    pair.prefill.role.submit(pair.session, ticket("r1", PROMPT, max_tokens=1))
    await pair.until(lambda: bool(pair.session.events))
    pair.arena.stamps.mark_owned([0], "h-r1")
    (first, _) = prefix_hashes(bytes(16), PROMPT, block_size=4)
    pair.arena.stamps.check = None
    pair.arena.stamps.complete(0, first, parent, tokens)
    pair.prefill.role.submit(pair.session, ticket("r2", PROMPT, max_tokens=1))
    await pair.until(lambda: len(pair.session.events) == 2)
    assert prefilled(pair.session)["r2"].ticket.num_cached_tokens == 0
    assert count(pair.prefill.metrics.kv_corrupt) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"pool_id": "another"},
        {"prompt_token_ids": tuple(range(1000))},
        {"prompt_token_ids": tuple(range(128))},  # 32 blocks of 4, and no slot for the token drawn
        {"sequences": ()},
    ],
)
async def test_a_ticket_that_does_not_fit_is_refused(
    pair: WorkerPair, changes: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest):
        pair.prefill.role.submit(pair.session, ticket("r1", PROMPT, **changes))


async def test_a_holder_that_was_used_before_costs_its_request_only(pair: WorkerPair) -> None:
    """The gateway that uses one twice gets an error; the worker goes on."""
    pair.prefill.role.submit(pair.session, ticket("r1", PROMPT, max_tokens=1))
    await pair.until(lambda: len(pair.session.events) == 1)
    pair.prefill.role.submit(pair.session, ticket("r2", PROMPT, holder_id="h-r1"))
    pair.prefill.role.submit(pair.session, ticket("r3", PROMPT, max_tokens=1))
    await pair.until(lambda: len(pair.session.events) == 3)
    (requeued,) = pair.session.of(Requeued)
    assert requeued.request_id == "r2"
    assert requeued.reason is RequeueReason.STALE_TICKET
    assert set(prefilled(pair.session)) == {"r1", "r3"}
    await pair.until_empty()


async def test_an_attempt_submitted_twice_is_refused(pair: WorkerPair) -> None:
    pair.prefill_model.gate.clear()
    pair.prefill.role.submit(pair.session, ticket("r1", PROMPT))
    with pytest.raises(InvalidRequest):
        pair.prefill.role.submit(pair.session, ticket("r1", PROMPT))
