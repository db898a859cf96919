"""Running requests move to another decode worker: nothing is lost, and nothing computed again."""

from typing import Any

import pytest

from blockstore.registry import Load
from quire.v1 import decode_pb2, prefill_pb2
from services.gateway.scheduling.migration import Migration
from tests.waiting import until

from .conftest import Call, GatewayHarness, asked, finish
from .fakes import FakeDecode, FakePrefill

Uneven = tuple[GatewayHarness, Migration, FakeDecode, FakeDecode, list[Call]]


async def running_at(harness: GatewayHarness, decode: FakeDecode, *names: str) -> list[Call]:
    """Requests of 8 tokens that have 3 of them; there must be only one decode worker so far."""
    decode.pause_after = 3
    calls = [Call(harness.gateway, asked(name)) for name in names]
    await until(lambda: all(len(call.tokens) == 3 for call in calls))
    return calls


async def test_requests_that_move_are_detached_together(make_harness: Any) -> None:
    """All slots are reserved at once, and no request leaves its batch before all replies are there.
    The worker gets all commands in one message, before its next step."""
    leaving, other = FakeDecode("leaving"), FakeDecode("other")
    harness = await make_harness(FakePrefill(), leaving)
    calls = await running_at(harness, leaving, "r1", "r2", "r3")
    other.answers_reservations = False
    await harness.add(other)
    leaving.report(leaving.load, draining=True)
    await until(lambda: len(other.unanswered) == 3)
    first_come = [reserve.request_id for reserve in other.commands(decode_pb2.Reserve)]
    assert first_come == ["r1", "r2", "r3"]
    assert not leaving.commands(decode_pb2.HandOver)
    other.answer_at_last()
    await finish(*calls)
    assert ["reserve"] * 3 in other.together
    assert ["hand_over"] * 3 in leaving.together


async def test_a_ticket_under_way_to_a_worker_that_leaves_is_moved_once_it_runs(
    make_harness: Any,
) -> None:
    prefill, leaving, other = FakePrefill(), FakeDecode("leaving"), FakeDecode("other")
    harness = await make_harness(prefill, leaving)
    prefill.holds = True
    leaving.pause_after = 2
    call = Call(harness.gateway, asked())
    await until(lambda: bool(prefill.held))
    await harness.add(other)
    leaving.report(leaving.load, draining=True)
    prefill.let_go()
    await finish(call)
    assert len(prefill.commands(prefill_pb2.PrefillSubmit)) == 1


@pytest.fixture
async def uneven(make_harness: Any) -> Uneven:
    """6 requests run at one worker, and none at the other. The migration runs when the test says
    so."""
    busy, idle = FakeDecode("busy"), FakeDecode("idle")
    harness = await make_harness(FakePrefill(), busy, rebalance_s=0)
    calls = await running_at(harness, busy, *(f"r{number}" for number in range(6)))
    idle.pause_after = 3
    await harness.add(idle)
    await reported(harness, busy, 6)
    parts = harness.assembly
    migration = Migration(parts.directory, parts.dispatcher, parts.changes, reserve_timeout_s=0.5)
    return harness, migration, busy, idle, calls


async def reported(harness: GatewayHarness, decode: FakeDecode, num_running: int) -> None:
    """Wait until the gateway knows how many requests run there."""
    decode.report(Load(num_running=num_running, num_free_slots=64 - num_running))
    there = harness.assembly.directory.decode_workers()["pool"]
    (worker,) = [worker for worker in there if worker.id == decode.worker_id]
    await until(lambda: worker.num_running == num_running)


async def test_a_fuller_worker_gives_half_the_difference_the_youngest_first(uneven: Uneven) -> None:
    _, migration, busy, idle, calls = uneven
    await migration.rebalance_once()
    assert not idle.commands(decode_pb2.Reserve)  # it may be over by the next look
    await migration.rebalance_once()
    await until(lambda: len(idle.running) == 3)
    assert set(idle.running) == {"r3", "r4", "r5"}
    assert set(busy.running) == {"r0", "r1", "r2"}
    for worker in (busy, idle):
        worker.go_on(pause_after=8)
    await finish(*calls)


async def test_a_moved_request_is_not_moved_back_at_once(uneven: Uneven) -> None:
    harness, migration, busy, idle, calls = uneven
    for _ in range(2):
        await migration.rebalance_once()
    await until(lambda: len(idle.running) == 3)
    idle.go_on(pause_after=4)  # they are settled there
    await until(lambda: all(len(call.tokens) == 4 for call in calls[3:]))
    await reported(harness, busy, 0)
    await reported(harness, idle, 9)
    for _ in range(2):
        await migration.rebalance_once()
    assert len(busy.commands(decode_pb2.Reserve)) == 6  # those of the beginning
    for worker in (busy, idle):
        worker.go_on(pause_after=8)
    await finish(*calls)


@pytest.mark.parametrize(("most", "least"), [(6, 3), (20, 14)], ids=["in number", "in proportion"])
async def test_a_small_difference_moves_nobody(uneven: Uneven, most: int, least: int) -> None:
    harness, migration, busy, idle, calls = uneven
    await reported(harness, busy, most)
    await reported(harness, idle, least)
    for _ in range(2):
        await migration.rebalance_once()
    assert not idle.commands(decode_pb2.Reserve)
    busy.go_on(pause_after=8)
    await finish(*calls)


async def test_each_of_several_gateways_moves_its_share(uneven: Uneven) -> None:
    """Of 18 sequences 6 belong to this gateway, and 9 are to move."""
    harness, migration, busy, idle, calls = uneven
    await reported(harness, busy, 18)
    for _ in range(2):
        await migration.rebalance_once()
    await until(lambda: len(idle.running) == 3)
    assert len(busy.running) == 3
    for worker in (busy, idle):
        worker.go_on(pause_after=8)
    await finish(*calls)
