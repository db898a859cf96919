import asyncio
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from blockstore.errors import WorkerFenced
from blockstore.hashing import prefix_hashes
from services.common.errors import InvalidRequest
from services.common.metrics import WorkerMetrics
from services.common.ticket import FinishReason, Ticket, TicketSequence
from services.decode.worker import DecodeWorker
from services.worker.events import (
    Failed,
    Output,
    Prefilled,
    Requeued,
    RequeueReason,
    Reserved,
    Step,
)

from .conftest import Bench, MakeBench, running
from .fakes import FakeForward, FakeSession, expected, join, ticket

PROMPT = tuple(range(100, 110))


async def prefill(bench: Bench, asked: Ticket) -> Ticket:
    """The ticket as the prefill worker issues it."""
    session = FakeSession()
    bench.prefill.submit(session, asked)
    await bench.until(lambda: bool(session.of(Prefilled)))
    ticket: Ticket = session.of(Prefilled)[0].ticket
    return ticket


async def start(bench: Bench, asked: Ticket) -> Ticket:
    issued = await prefill(bench, asked)
    bench.decode.reserve(bench.session, *issued.key, 1)
    bench.decode.admit(bench.session, issued)
    return issued


def outputs(session: FakeSession, request_id: str) -> list[Output]:
    steps = [output for step in session.of(Step) for output in step.outputs]
    return [output for output in steps if output.request_id == request_id]


def tokens(session: FakeSession, issued: Ticket) -> list[int]:
    """What a client has: the prefill worker's token and the decode worker's."""
    drawn = [output.token_id for output in outputs(session, issued.request_id)]
    return [*issued.sequences[0].token_ids, *drawn]


def finished(session: FakeSession, request_id: str) -> bool:
    return any(output.finish for output in outputs(session, request_id))


async def test_a_ticket_is_continued_to_its_end(bench: Bench) -> None:
    issued = await start(bench, ticket("r1", PROMPT, max_tokens=30))
    await bench.until(lambda: finished(bench.session, "r1"))
    assert tokens(bench.session, issued) == expected(PROMPT, 30)
    assert outputs(bench.session, "r1")[-1].finish is FinishReason.LENGTH
    # 10 is the prefill worker's: counted from the start of the prompt, none twice and none left out
    assert [output.position for output in outputs(bench.session, "r1")] == list(range(11, 40))
    await bench.until_empty()
    # 10 + 30 tokens, the last one's KV never computed: 9 full blocks stay cached.
    assert (await bench.store.stats("pool")).num_cached == 9


async def test_a_second_turn_finds_what_the_first_decoded(bench: Bench) -> None:
    issued = await start(bench, ticket("r1", PROMPT, max_tokens=10))
    await bench.until(lambda: finished(bench.session, "r1"))
    await bench.until_empty()
    second = (*PROMPT, *tokens(bench.session, issued), 7, 8)
    again = await prefill(bench, ticket("r2", second))
    assert again.num_cached_tokens == 16  # of the 19 whose KV was computed: 4 full blocks


async def test_many_sequences_run_in_one_batch(make_bench: MakeBench) -> None:
    bench = await make_bench(num_blocks=64)
    prompts = {f"r{n}": tuple(range(n, n + n)) for n in range(1, 9)}
    bench.decode_model.gate.clear()
    issued = [await start(bench, ticket(r, p, max_tokens=12)) for r, p in prompts.items()]
    steps_before = bench.decode_model.num_steps
    bench.decode_model.gate.set()
    await bench.until(lambda: all(finished(bench.session, r) for r in prompts))
    for one in issued:
        assert tokens(bench.session, one) == expected(one.prompt_token_ids, 12)
    assert bench.decode_model.num_steps - steps_before < 2 * 12
    await bench.until_empty()


async def test_a_sequence_that_is_not_finite_fails_alone(bench: Bench) -> None:
    """Those beside it get every token, it gets an error that says why, and nobody adopts its
    blocks: not even the finished ones, which may be what broke it."""
    poisoned = tuple(range(200, 210))
    bench.decode_model.gate.clear()
    good = await start(bench, ticket("r1", PROMPT, max_tokens=20))
    await start(bench, ticket("r2", poisoned, max_tokens=20))
    assert await bench.store.match("pool", prefix_hashes(bytes(16), poisoned, 4)) == 2
    bench.decode_model.poison = poisoned[0]
    bench.decode_model.gate.set()
    await bench.until(lambda: finished(bench.session, "r1") and bool(bench.session.of(Failed)))
    assert tokens(bench.session, good) == expected(PROMPT, 20)
    (failed,) = bench.session.of(Failed)
    assert (failed.request_id, failed.code) == ("r2", "poison_request")
    assert "not finite" in failed.message
    assert not outputs(bench.session, "r2")
    await bench.until_empty()
    assert await bench.store.match("pool", prefix_hashes(bytes(16), poisoned, 4)) == 0
    assert await bench.store.match("pool", prefix_hashes(bytes(16), PROMPT, 4)) == 2
    assert bench.decode_figures.get_sample_value("quire:num_broken_total") == 1


async def test_an_abort_of_a_sequence_that_is_not_finite_is_not_answered(bench: Bench) -> None:
    """And its blocks say nothing any more, so that no recovery publishes them again."""
    bench.decode_model.gate.clear()
    bench.decode_model.poison = PROMPT[0]
    issued = await start(bench, ticket("r1", PROMPT, max_tokens=20))
    await bench.until(lambda: bench.decode_model.num_begun == 1)
    assert len(bench.arena.stamps.complete_blocks([issued.holder_id])[issued.holder_id]) == 2
    bench.decode.abort(bench.session, *issued.key)
    bench.decode_model.gate.set()
    await bench.until_empty()
    assert bench.session.of(Failed) == []
    assert bench.arena.stamps.complete_blocks([issued.holder_id]) == {}


async def test_all_tokens_of_a_step_go_in_one_message(bench: Bench) -> None:
    bench.decode_model.gate.clear()
    for number in (1, 2, 3):
        await start(bench, ticket(f"r{number}", (number,), max_tokens=5))
    await bench.until(lambda: bench.decode.load().num_running == 3)
    bench.decode_model.gate.set()
    await bench.until(lambda: all(finished(bench.session, f"r{n}") for n in (1, 2, 3)))
    assert max(len(step.outputs) for step in bench.session.of(Step)) == 3


@pytest.mark.parametrize("block_size", [1, 4, 16])
async def test_the_youngest_gives_way_when_blocks_run_out(
    make_bench: MakeBench, block_size: int
) -> None:
    """Three sequences need 3 x 30 slots of 64: the youngest goes back, the others end."""
    bench = await make_bench(num_blocks=64 // block_size, block_size=block_size)
    bench.decode_model.gate.clear()
    issued = {
        f"r{n}": await start(bench, ticket(f"r{n}", range(n, n + 10), max_tokens=20))
        for n in (1, 2, 3)
    }
    bench.decode_model.gate.set()
    await bench.until(lambda: all(finished(bench.session, r) for r in ("r1", "r2")))
    for request_id in ("r1", "r2"):
        one = issued[request_id]
        assert tokens(bench.session, one) == expected(one.prompt_token_ids, 20)
    (requeued,) = bench.session.of(Requeued)
    assert requeued.reason is RequeueReason.PREEMPTED
    assert requeued.ticket.request_id == "r3"
    got = tokens(bench.session, issued["r3"])
    assert list(requeued.ticket.sequences[0].token_ids) == got
    await bench.until_empty()
    # The walk goes on with the tokens so far, under a new holder and attempt.
    again = replace(
        requeued.ticket,
        attempt=2,
        holder_id="h-r3-2",
        sequences=(TicketSequence(0, token_ids=tuple(got)),),
    )
    resumed = await start(bench, again)
    await bench.until(lambda: finished(bench.session, "r3"))
    # Outputs hold both attempts; the prefill worker of each drew one token more.
    first, second = issued["r3"].sequences[0].token_ids[0], resumed.sequences[0].token_ids[-1]
    drawn = [output.token_id for output in outputs(bench.session, "r3")]
    assert [first, *drawn[: len(got) - 1], second, *drawn[len(got) - 1 :]] == expected(
        range(3, 13), 20
    )
    await bench.until_empty()


async def test_an_abort_frees_blocks_and_slots_at_once(bench: Bench) -> None:
    await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await bench.until(lambda: len(outputs(bench.session, "r1")) > 3)
    bench.decode.abort(bench.session, "r1", 1)
    await bench.until_empty()
    assert bench.decode.load().num_free_slots == 16
    assert not bench.session.of(Requeued)
    assert not bench.session.of(Failed)


async def test_an_abort_while_it_is_being_claimed_frees_the_blocks(bench: Bench) -> None:
    issued = await prefill(bench, ticket("r1", PROMPT, max_tokens=500))
    bench.decode.reserve(bench.session, "r1", 1, 1)
    bench.decode.admit(bench.session, issued)
    bench.decode.abort(bench.session, "r1", 1)
    await bench.until_empty()
    assert not outputs(bench.session, "r1")


async def test_an_abort_ends_a_reservation(bench: Bench) -> None:
    issued = await prefill(bench, ticket("r1", PROMPT))
    bench.decode.reserve(bench.session, "r1", 1, 1)
    assert bench.decode.load().num_free_slots == 15
    bench.decode.abort(bench.session, "r1", 1)
    assert bench.decode.load().num_free_slots == 16
    with pytest.raises(InvalidRequest):
        bench.decode.admit(bench.session, issued)


async def test_a_lost_gateway_ends_its_sequences_and_reservations(bench: Bench) -> None:
    await start(bench, ticket("r1", PROMPT, max_tokens=500))
    bench.decode.reserve(bench.session, "r2", 1, 4)
    await bench.until(lambda: bool(outputs(bench.session, "r1")))
    bench.decode.close(bench.session)
    await bench.until_empty()
    assert bench.decode.load().num_free_slots == 16


async def test_slots_are_granted_while_there_are_some(bench: Bench) -> None:
    for number in (1, 2, 3):
        bench.decode.reserve(bench.session, f"r{number}", 1, 6)
    bench.decode.reserve(bench.session, "r1", 1, 1)
    assert [event.granted for event in bench.session.of(Reserved)] == [True, True, False, False]


async def test_a_stale_ticket_goes_back(bench: Bench) -> None:
    """Its issuer has taken it back meanwhile, or another worker was faster."""
    issued = await prefill(bench, ticket("r1", PROMPT))
    await bench.store.release("pool", issued.holder_id, issued.holder_epoch)
    bench.decode.reserve(bench.session, "r1", 1, 1)
    bench.decode.admit(bench.session, issued)
    await bench.until(lambda: bool(bench.session.of(Requeued)))
    assert bench.session.of(Requeued)[0].reason is RequeueReason.STALE_TICKET
    assert bench.decode.load().num_free_slots == 16


async def test_the_deadline_ends_a_running_sequence(bench: Bench) -> None:
    issued = await prefill(bench, ticket("r1", PROMPT, max_tokens=900))
    bench.decode_model.gate.clear()
    bench.decode.reserve(bench.session, "r1", 1, 1)
    bench.decode.admit(bench.session, replace(issued, timeout_ms=20))
    await bench.until(lambda: bench.decode.load().num_running == 1)
    await bench.until(lambda: all(job.ending for job in bench.decode._jobs))
    bench.decode_model.gate.set()
    await bench.until(lambda: bool(bench.session.of(Failed)))
    assert bench.session.of(Failed)[0].code == "deadline_exceeded"
    await bench.until_empty()


async def test_a_deadline_during_the_last_step_does_not_hide_the_end(bench: Bench) -> None:
    """The gateway hears one of the two, whichever came first here."""
    issued = await prefill(bench, ticket("r1", PROMPT, max_tokens=2))
    bench.decode_model.gate.clear()
    bench.decode.reserve(bench.session, "r1", 1, 1)
    bench.decode.admit(bench.session, replace(issued, timeout_ms=20))
    await bench.until(lambda: bench.decode_model.num_begun == 1)
    await bench.until(lambda: all(job.ending for job in bench.decode._jobs))
    bench.decode_model.gate.set()
    await bench.until_empty()
    assert finished(bench.session, "r1")
    assert tokens(bench.session, issued) == expected(PROMPT, 2)


async def test_a_fenced_worker_ends(bench: Bench) -> None:
    """Its requests are elsewhere by now; its blocks are free again when it is gone."""
    fenced = await join(bench.store, bench.spec, "fenced", bench.arena.stamps)
    metrics = WorkerMetrics(CollectorRegistry())
    model = FakeForward(bench.arena)
    worker = DecodeWorker(bench.store, fenced, model, bench.decode.limits, metrics)
    running = asyncio.create_task(worker.run())
    await bench.store.fence("pool", "fenced")
    with pytest.raises(WorkerFenced):
        await asyncio.wait_for(running, timeout=10)


async def test_figures_are_those_of_the_worker(bench: Bench) -> None:
    """The prefill worker draws the first of 500 tokens; its load is shown while it has some."""
    bench.decode_model.gate.clear()
    await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await bench.until(lambda: figure(bench, "num_requests_running") == 1)
    assert figure(bench, "num_free_slots") == 15
    assert bench.prefill.metrics.generation_tokens._value.get() == 1
    bench.decode_model.gate.set()
    bench.decode.abort(bench.session, "r1", 1)
    await bench.until(lambda: figure(bench, "num_requests_running") == 0)
    assert figure(bench, "num_free_slots") == 16


def figure(bench: Bench, name: str) -> float | None:
    return bench.decode_figures.get_sample_value(f"quire:{name}")


async def handed_over(bench: Bench, request_id: str, attempt: int = 1) -> Ticket:
    """The ticket at rest of what runs at the decode worker."""
    bench.decode.hand_over(bench.session, request_id, attempt)
    await bench.until(lambda: bool(bench.session.of(Requeued)))
    requeued = bench.session.of(Requeued)[0]
    assert requeued.reason is RequeueReason.HANDED_OVER
    assert requeued.ticket.key == (request_id, attempt)
    ticket: Ticket = requeued.ticket
    return ticket


async def test_a_handed_over_sequence_goes_on_where_it_was(bench: Bench) -> None:
    """At another worker, from block ids alone: each position is computed once, by whoever ran it,
    and the holder stays."""
    other = await another_decode_worker(bench)
    issued = await start(bench, ticket("r1", PROMPT, max_tokens=60))
    await bench.until(lambda: len(outputs(bench.session, "r1")) > 8)
    at_rest = await handed_over(bench, "r1")
    assert at_rest.holder_id == issued.holder_id
    assert at_rest.holder_epoch == 4  # allocated 1, issued 2, claimed 3, at rest 4
    assert bench.decode.load().num_free_slots == 16
    got = tokens(bench.session, issued)
    assert at_rest.sequences[0].token_ids == tuple(got)
    assert at_rest.sequences[0].num_computed_tokens == len(PROMPT) + len(got) - 1

    session = FakeSession()
    async with running(other):
        other.reserve(session, "r1", 2, 1)
        other.admit(session, replace(at_rest, attempt=2))
        await bench.until(lambda: finished(session, "r1"))
        rest = [output.token_id for output in outputs(session, "r1")]
        assert [*got, *rest] == expected(PROMPT, 60)
        assert bench.arena.num_computed == len(PROMPT) + 60 - 1
        await bench.until_empty()


async def test_a_ticket_is_offered_once_it_is_at_rest_in_the_store(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before: whoever claims it would be refused, and all computed again."""
    await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await bench.until(lambda: bool(outputs(bench.session, "r1")))
    detach, may_detach, asked = bench.store.detach, asyncio.Event(), asyncio.Event()

    async def late(*args: Any) -> int:
        asked.set()
        await may_detach.wait()
        return await detach(*args)

    monkeypatch.setattr(bench.store, "detach", late)
    bench.decode.hand_over(bench.session, "r1", 1)
    async with asyncio.timeout(10):
        await asked.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not bench.session.of(Requeued)
    may_detach.set()
    await bench.until(lambda: bool(bench.session.of(Requeued)))
    bench.decode.abort(bench.session, "r1", 1)
    await bench.until_empty()


async def test_a_handed_over_sequence_may_come_back(bench: Bench) -> None:
    issued = await start(bench, ticket("r1", PROMPT, max_tokens=60))
    await bench.until(lambda: len(outputs(bench.session, "r1")) > 8)
    at_rest = await handed_over(bench, "r1")
    bench.decode.reserve(bench.session, "r1", 2, 1)
    bench.decode.admit(bench.session, replace(at_rest, attempt=2))
    await bench.until(lambda: finished(bench.session, "r1"))
    assert tokens(bench.session, issued) == expected(PROMPT, 60)
    assert not bench.decode._resting._on_pool
    await bench.until_empty()


async def test_a_sequence_that_waits_for_its_next_block_is_handed_over_without_it(
    make_bench: MakeBench,
) -> None:
    """It had 12 slots for 13 tokens; whoever claims it gets the fourth block."""
    bench = await make_bench(num_blocks=4)
    await bench.store.allocate("pool", "in the way", "PrefillWorker", 9, [], 1)
    issued = await start(bench, ticket("r1", PROMPT, max_tokens=6))
    await bench.until(lambda: len(tokens(bench.session, issued)) == 3)
    await bench.until(lambda: bool(bench.decode._grower._wanting))
    at_rest = await handed_over(bench, "r1")
    assert len(at_rest.sequences[0].block_ids) == 3
    await bench.store.release("pool", "in the way", 1)
    bench.decode.reserve(bench.session, "r1", 2, 1)
    bench.decode.admit(bench.session, replace(at_rest, attempt=2))
    await bench.until(lambda: finished(bench.session, "r1"))
    assert tokens(bench.session, issued) == expected(PROMPT, 6)


async def test_an_abort_ends_a_ticket_at_rest(bench: Bench) -> None:
    await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await bench.until(lambda: bool(outputs(bench.session, "r1")))
    await handed_over(bench, "r1")
    bench.decode.abort(bench.session, "r1", 1)
    await bench.until_empty()
    assert len(bench.session.of(Requeued)) == 1


async def test_an_abort_on_the_way_to_rest_frees_the_blocks(bench: Bench) -> None:
    await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await bench.until(lambda: bool(outputs(bench.session, "r1")))
    bench.decode.hand_over(bench.session, "r1", 1)
    bench.decode.abort(bench.session, "r1", 1)
    await bench.until_empty()
    assert not bench.session.of(Requeued)


async def test_a_ticket_at_rest_that_nobody_claims_is_taken_back(bench: Bench) -> None:
    bench.decode.limits = replace(bench.decode.limits, ticket_ttl_s=0.02)
    await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await bench.until(lambda: bool(outputs(bench.session, "r1")))
    await handed_over(bench, "r1")
    await bench.until_empty()
    await bench.until(lambda: len(bench.session.of(Requeued)) == 2)
    taken_back = bench.session.of(Requeued)[1]
    assert taken_back.reason is RequeueReason.STALE_TICKET
    assert not taken_back.ticket.sequences[0].block_ids


async def test_a_demand_ends_a_ticket_at_rest(bench: Bench) -> None:
    """The last in order gives way, whether it runs or rests."""
    issued = await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await bench.until(lambda: bool(outputs(bench.session, "r1")))
    await handed_over(bench, "r1")
    bench.decode._on_demands([issued.holder_id])
    await bench.until_empty()
    await bench.until(lambda: len(bench.session.of(Requeued)) == 2)
    assert bench.session.of(Requeued)[1].reason is RequeueReason.PREEMPTED


async def test_a_drained_worker_stays_until_its_tickets_are_claimed(bench: Bench) -> None:
    other = await another_decode_worker(bench)
    await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await bench.until(lambda: bool(outputs(bench.session, "r1")))
    bench.decode.drain()
    at_rest = await handed_over(bench, "r1")
    drained = asyncio.create_task(bench.decode.drained())
    await asyncio.wait([drained], timeout=0.2)
    assert not drained.done()
    session = FakeSession()
    async with running(other):
        other.reserve(session, "r1", 2, 1)
        other.admit(session, replace(at_rest, attempt=2))
        await asyncio.wait_for(drained, timeout=10)
        other.abort(session, "r1", 2)
        await bench.until_empty()


async def test_what_is_left_when_the_grace_is_over_goes_back_to_be_computed_again(
    bench: Bench,
) -> None:
    """What runs, and what is at rest and not claimed."""
    running = await start(bench, ticket("r1", PROMPT, max_tokens=500))
    await start(bench, ticket("r2", PROMPT, max_tokens=500))
    await bench.until(lambda: bool(outputs(bench.session, "r1") and outputs(bench.session, "r2")))
    bench.decode.drain()
    await handed_over(bench, "r2")
    bench.decode.give_back()
    async with asyncio.timeout(10):
        await bench.decode.drained()
    await bench.until_empty()
    back = {r.ticket.request_id: r for r in bench.session.of(Requeued)[1:]}
    assert set(back) == {"r1", "r2"}
    assert all(r.reason is RequeueReason.DRAINING for r in back.values())
    assert not any(r.ticket.sequences[0].block_ids for r in back.values())
    assert list(back["r1"].ticket.sequences[0].token_ids) == tokens(bench.session, running)


async def another_decode_worker(bench: Bench) -> DecodeWorker:
    membership = await join(bench.store, bench.spec, "another", bench.arena.stamps)
    metrics = WorkerMetrics(CollectorRegistry())
    model = FakeForward(bench.arena)
    return DecodeWorker(bench.store, membership, model, bench.decode.limits, metrics)


async def test_draining_lets_what_runs_finish(bench: Bench) -> None:
    issued = await start(bench, ticket("r1", PROMPT, max_tokens=20))
    assert bench.decode.drain() == 1
    bench.decode.reserve(bench.session, "r2", 1, 1)
    assert bench.session.of(Reserved)[-1].granted is False
    async with asyncio.timeout(10):
        await bench.decode.drained()
    assert tokens(bench.session, issued) == expected(PROMPT, 20)
    await bench.until_empty()


@pytest.mark.parametrize(
    "sequence",
    [
        TicketSequence(0, token_ids=(1,), block_ids=(0, 1), num_computed_tokens=10),
        TicketSequence(0, token_ids=(1,), block_ids=(0, 1, 99), num_computed_tokens=10),
        TicketSequence(0, token_ids=(1,), block_ids=(0, 1, 2), num_computed_tokens=11),
    ],
    ids=["too few blocks", "no such block", "nothing to compute"],
)
async def test_a_ticket_that_makes_no_sense_is_refused(
    bench: Bench, sequence: TicketSequence
) -> None:
    bench.decode.reserve(bench.session, "r1", 1, 1)
    with pytest.raises(InvalidRequest):
        bench.decode.admit(bench.session, ticket("r1", PROMPT, sequences=(sequence,)))


async def test_a_ticket_with_blocks_that_its_holder_does_not_have_is_refused(bench: Bench) -> None:
    """Nobody reads another's blocks by naming them, and the ticket can still be claimed rightly."""
    other = await prefill(bench, ticket("r2", range(50, 60)))
    issued = await prefill(bench, ticket("r1", PROMPT))
    (state,) = issued.sequences
    forged = replace(state, block_ids=other.sequences[0].block_ids)
    bench.decode.reserve(bench.session, "r1", 1, 1)
    bench.decode.admit(bench.session, replace(issued, sequences=(forged,)))
    await bench.until(lambda: bool(bench.session.of(Failed)))
    assert bench.session.of(Failed)[0].code == "invalid_request"
    bench.decode.reserve(bench.session, "r1", 1, 1)
    bench.decode.admit(bench.session, issued)
    await bench.until(lambda: finished(bench.session, "r1"))
    assert tokens(bench.session, issued) == expected(PROMPT, 8)


async def test_a_ticket_whose_blocks_hold_other_tokens_is_computed_again(bench: Bench) -> None:
    """It would be written on, and published, as what it is not."""
    issued = await prefill(bench, ticket("r1", PROMPT))
    lie = replace(issued, prompt_token_ids=(99, *PROMPT[1:]))
    bench.decode.reserve(bench.session, "r1", 1, 1)
    bench.decode.admit(bench.session, lie)
    await bench.until(lambda: bool(bench.session.of(Requeued)))
    assert bench.session.of(Requeued)[0].reason is RequeueReason.STALE_TICKET
    await bench.until_empty()


async def test_a_shortened_ticket_does_not_write_into_finished_blocks(bench: Bench) -> None:
    issued = await prefill(bench, ticket("r1", PROMPT))
    (state,) = issued.sequences
    short = replace(
        issued, prompt_token_ids=PROMPT[:4], sequences=(replace(state, num_computed_tokens=4),)
    )
    bench.decode.reserve(bench.session, "r1", 1, 1)
    bench.decode.admit(bench.session, short)
    await bench.until(lambda: bool(bench.session.of(Requeued)))
    assert not outputs(bench.session, "r1")


async def test_a_holder_has_one_sequence(bench: Bench) -> None:
    """The same ticket again, as another attempt or of another gateway: one of them runs."""
    issued = await prefill(bench, ticket("r1", PROMPT, max_tokens=30))
    bench.decode_model.gate.clear()
    for attempt in (1, 2):
        bench.decode.reserve(bench.session, "r1", attempt, 1)
    bench.decode.admit(bench.session, issued)
    with pytest.raises(InvalidRequest, match="claimed here"):
        bench.decode.admit(bench.session, replace(issued, attempt=2))
    bench.decode_model.gate.set()
    await bench.until(lambda: finished(bench.session, "r1"))
    assert tokens(bench.session, issued) == expected(PROMPT, 30)


@pytest.mark.parametrize("token", [50_000, 2**32 - 1])
async def test_tokens_beyond_the_vocabulary_are_refused(bench: Bench, token: int) -> None:
    """They would end the worker, and everybody's request with it."""
    issued = await prefill(bench, ticket("r1", PROMPT))
    bench.decode.limits = replace(bench.decode.limits, vocab_size=50_000)
    (state,) = issued.sequences
    bench.decode.reserve(bench.session, "r1", 1, 1)
    with pytest.raises(InvalidRequest, match="vocabulary"):
        bench.decode.admit(
            bench.session, replace(issued, sequences=(replace(state, token_ids=(token,)),))
        )
