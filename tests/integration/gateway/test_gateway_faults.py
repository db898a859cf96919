"""Workers that vanish, contradict themselves, or have another version cause neither a hang nor a
wrong token."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from quire.v1 import decode_pb2, worker_pb2
from services.protocol.version import PROTOCOL_VERSION
from services.runtime.errors import DeadlineExceeded, NoWorker, PoisonRequest
from tests.waiting import until

from .conftest import PROMPT, SPEC, Call, asked
from .fakes import FakeDecode, FakePrefill, expected

PREEMPTED = worker_pb2.Requeue.REASON_PREEMPTED
DRAINING = worker_pb2.Requeue.REASON_DRAINING
STALE = worker_pb2.Requeue.REASON_STALE_TICKET


@pytest.mark.parametrize("received", [1, 4])
async def test_a_broken_decode_stream_is_only_a_delay(make_harness: Any, received: int) -> None:
    prefill, decode = FakePrefill(), FakeDecode()
    harness = await make_harness(prefill, decode)
    decode.pause_after = received
    call = Call(harness.gateway, asked())
    await until(lambda: len(call.tokens) == received and "r1" in decode.running)
    decode.pause_after = None
    decode.die()
    await call.result()
    assert call.tokens == expected(PROMPT, 8)


async def test_a_broken_prefill_stream_is_only_a_delay(make_harness: Any) -> None:
    prefill, decode = FakePrefill(), FakeDecode()
    harness = await make_harness(prefill, decode)
    prefill.holds = True
    call = Call(harness.gateway, asked())
    await until(lambda: bool(prefill.held))
    prefill.holds = False
    prefill.die()
    await call.result()
    assert call.tokens == expected(PROMPT, 8)
    assert ("r1", 1) in decode.aborted


async def test_a_prefill_worker_may_leave_once_its_ticket_is_claimed(make_harness: Any) -> None:
    prefill, decode = FakePrefill(), FakeDecode()
    harness = await make_harness(prefill, decode)
    decode.pause_after = 4
    call = Call(harness.gateway, asked())
    await until(lambda: len(call.tokens) == 4)
    prefill.die()
    decode.go_on(pause_after=8)
    await call.result()
    assert call.tokens == expected(PROMPT, 8)
    assert len(decode.commands(decode_pb2.Admit)) == 1


async def test_a_request_gives_up_after_its_second_worker(make_harness: Any) -> None:
    prefill, decode = FakePrefill(), FakeDecode()
    harness = await make_harness(prefill, decode)
    prefill.holds = True
    call = Call(harness.gateway, asked())
    for _ in range(2):
        await until(lambda: bool(prefill.held))
        prefill.held.clear()
        prefill.die()
    with pytest.raises(PoisonRequest, match="its prefill worker died twice"):
        await call.result()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("position", [0, 5, 9])
async def test_a_request_that_kills_its_workers_is_found_among_others(
    make_harness: Any, role: str, position: int
) -> None:
    """The request is found after two deaths, and no other request fails."""
    prefill = [FakePrefill("prefill-1"), FakePrefill("prefill-2")]
    decode = [FakeDecode("decode-1"), FakeDecode("decode-2")]
    harness = await make_harness(*prefill, *decode)
    deadly = prefill if role == "prefill" else decode
    for worker in deadly:
        worker.dies_of = f"r{position}"
    calls = [Call(harness.gateway, asked(f"r{n}")) for n in range(10)]
    with pytest.raises(PoisonRequest, match=f"its {role} worker died twice"):
        await calls.pop(position).result()
    for call in calls:
        await call.result()
        assert call.tokens == expected(PROMPT, 8)
    assert sum(worker.num_deaths for worker in deadly) == 2


async def test_a_worker_that_leaves_the_registry_loses_its_requests(make_harness: Any) -> None:
    gone, other = FakeDecode("decode-1"), FakeDecode("decode-2", num_slots=1)
    harness = await make_harness(FakePrefill(), gone, other)
    gone.pause_after = 3
    call = Call(harness.gateway, asked())
    await until(lambda: len(call.tokens) == 3)
    await harness.registry.withdraw("decode-1")
    await call.result()
    assert call.tokens == expected(PROMPT, 8)
    assert len(other.commands(decode_pb2.Admit)) == 1


@pytest.mark.parametrize(
    "corrupt",
    [
        pytest.param(lambda t: t.sequences[0].token_ids.insert(0, 5), id="a token too many"),
        pytest.param(lambda t: t.sequences[0].token_ids.pop(), id="no new token"),
        pytest.param(lambda t: t.ClearField("sequences"), id="no sequence"),
        pytest.param(lambda t: setattr(t.sequences[0], "index", 1), id="another sequence"),
    ],
)
async def test_a_wrong_ticket_is_refused_and_computed_again(
    make_harness: Any, corrupt: Any
) -> None:
    prefill, decode = FakePrefill(), FakeDecode()
    harness = await make_harness(prefill, decode)

    def once(ticket: Any) -> None:
        prefill.corrupt = lambda ticket: None
        corrupt(ticket)

    prefill.corrupt = once
    call = Call(harness.gateway, asked())
    await call.result()
    assert call.tokens == expected(PROMPT, 8)
    await until(lambda: ("r1", 1) in prefill.aborted and ("r1", 1) in decode.aborted)
    assert len(decode.commands(decode_pb2.Admit)) == 1


async def test_workers_of_another_protocol_version_are_not_used(make_harness: Any) -> None:
    harness = await make_harness(FakePrefill(), patience_s=0.2)
    old = FakeDecode(protocol_version=99)
    await harness.announce(old)
    await until(lambda: old.num_hellos == 1 and not old.sessions)
    with pytest.raises(NoWorker):
        await Call(harness.gateway, asked()).result()
    assert not harness.gateway.ready()
    assert not old.seen


async def test_workers_of_the_version_before_serve_during_an_upgrade(make_harness: Any) -> None:
    harness = await make_harness(
        FakePrefill(protocol_version=PROTOCOL_VERSION - 1),
        FakeDecode(protocol_version=PROTOCOL_VERSION - 1),
    )
    call = Call(harness.gateway, asked())
    await call.result()
    assert call.tokens == expected(PROMPT, 8)


async def test_a_request_may_come_a_little_before_the_workers(make_harness: Any) -> None:
    harness = await make_harness()
    call = Call(harness.gateway, asked())
    await asyncio.sleep(0)
    assert harness.gateway.models() == ()
    await harness.add(FakePrefill(), FakeDecode())
    await call.result()
    assert call.tokens == expected(PROMPT, 8)
    assert [model.id for model in harness.gateway.models()] == ["toy"]


async def test_without_workers_a_request_is_told_so(make_harness: Any) -> None:
    harness = await make_harness(patience_s=0.05)
    with pytest.raises(NoWorker):
        await Call(harness.gateway, asked()).result()
    await harness.add(FakePrefill())
    with pytest.raises(NoWorker, match="no decode worker serves 'toy'"):
        await Call(harness.gateway, asked()).result()


PATIENCE_S = 1.0
"""Long enough for the gateway to connect to a worker that has just started."""


async def test_request_waits_while_the_worker_that_it_lacks_is_starting(make_harness: Any) -> None:
    """Beyond the patience: a large model takes longer to load."""
    harness = await make_harness(FakePrefill(), patience_s=PATIENCE_S)
    decode = FakeDecode()
    await harness.announce_starting(decode)
    call = Call(harness.gateway, asked())
    await harness.num_waiting(1)
    await asyncio.wait([call.task], timeout=1.5 * PATIENCE_S)
    assert not call.task.done()
    await harness.add(decode)
    await call.result()
    assert call.tokens == expected(PROMPT, 8)


async def test_request_waits_while_all_workers_of_its_model_are_starting(make_harness: Any) -> None:
    harness = await make_harness(patience_s=PATIENCE_S)
    workers = FakePrefill(), FakeDecode()
    await harness.announce_starting(*workers)
    call = Call(harness.gateway, asked())
    await asyncio.wait([call.task], timeout=1.5 * PATIENCE_S)
    assert not call.task.done()
    await harness.add(*workers)
    await call.result()
    assert call.tokens == expected(PROMPT, 8)


async def test_request_fails_when_the_worker_that_was_starting_is_gone(make_harness: Any) -> None:
    harness = await make_harness(FakePrefill(), patience_s=0.01)
    decode = FakeDecode()
    await harness.announce_starting(decode)
    call = Call(harness.gateway, asked())
    await harness.num_waiting(1)
    await harness.registry.withdraw(decode.worker_id)
    with pytest.raises(NoWorker, match="no decode worker serves 'toy'"):
        await call.result()


@pytest.mark.parametrize("serving", [[FakePrefill], []])
async def test_wait_for_a_starting_worker_has_a_limit(make_harness: Any, serving: Any) -> None:
    harness = await make_harness(
        *(kind() for kind in serving), patience_s=0.01, start_patience_s=0.05
    )
    await harness.announce_starting(FakeDecode())
    with pytest.raises(NoWorker):
        await Call(harness.gateway, asked()).result()


async def test_prefill_workers_that_no_mover_reaches_are_told_apart(make_harness: Any) -> None:
    harness = await make_harness(FakeDecode(), patience_s=0.05)
    with pytest.raises(NoWorker, match="no prefill worker serves 'toy'"):
        await Call(harness.gateway, asked()).result()
    await harness.store.register_pool(replace(SPEC, pool_id="other"))
    await harness.add(FakePrefill(pool_id="other"))
    with pytest.raises(NoWorker, match="in different pools now, and no mover copies"):
        await Call(harness.gateway, asked()).result()


async def test_a_failed_request_ends_with_the_workers_error(make_harness: Any) -> None:
    prefill, decode = FakePrefill(), FakeDecode()
    harness = await make_harness(prefill, decode)
    prefill.holds = True
    call = Call(harness.gateway, asked(timeout_s=60))
    await until(lambda: bool(prefill.held))
    failed = worker_pb2.RequestFailed(
        request_id="r1", attempt=1, code="deadline_exceeded", message="too late"
    )
    prefill.held[0][0].send(failed=failed)
    with pytest.raises(DeadlineExceeded, match="too late"):
        await call.result()
    await until(lambda: decode.aborted == [("r1", 1)])
    assert not prefill.aborted


async def test_a_decode_worker_that_says_nothing_any_more_is_left(make_harness: Any) -> None:
    """Its stream stays open without messages, as that of a stopped process. Its requests continue
    elsewhere, and it gets nothing new until it sends something."""
    stuck, other = FakeDecode("decode-1"), FakeDecode("decode-2", num_slots=1)
    harness = await make_harness(FakePrefill(), stuck, other, silence_s=0.4)
    stuck.pause_after = 3
    call = Call(harness.gateway, asked())
    await until(lambda: len(call.tokens) == 3)
    stuck.stuck = True
    await call.result()
    assert call.tokens == expected(PROMPT, 8)
    assert len(other.commands(decode_pb2.Admit)) == 1
    stuck.stuck = False
    await until(lambda: "decode-1" in harness.connected())


async def test_a_worker_that_has_nothing_to_do_is_not_stuck(make_harness: Any) -> None:
    idle = FakePrefill(), FakeDecode()
    await make_harness(*idle, silence_s=0.4)
    await until(lambda: all(worker.num_reports > 40 for worker in idle))
    assert [worker.num_hellos for worker in idle] == [1, 1]
