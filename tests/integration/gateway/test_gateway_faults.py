"""Workers that vanish, contradict themselves, or have another version cause neither a hang nor a
wrong token."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from quire.v1 import decode_pb2
from services.protocol.version import PROTOCOL_VERSION
from services.runtime.errors import NoWorker, PoisonRequest
from tests.waiting import until

from .conftest import SPEC, Call, asked, finish
from .fakes import FakeDecode, FakePrefill


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
    await finish(*calls)
    assert sum(worker.num_deaths for worker in deadly) == 2


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
    await finish(Call(harness.gateway, asked()))


async def test_a_request_may_come_a_little_before_the_workers(make_harness: Any) -> None:
    harness = await make_harness()
    call = Call(harness.gateway, asked())
    await asyncio.sleep(0)
    assert harness.gateway.models() == ()
    await harness.add(FakePrefill(), FakeDecode())
    await finish(call)
    assert [model.id for model in harness.gateway.models()] == ["toy"]


PATIENCE_S = 0.5
"""Long enough for the gateway to connect to a worker that has just started."""


@pytest.mark.parametrize("serving", [[FakePrefill], []], ids=["prefill serves", "none serves"])
async def test_request_waits_while_a_worker_that_it_lacks_is_starting(
    make_harness: Any, serving: Any
) -> None:
    """Beyond the patience: a large model takes longer to load."""
    harness = await make_harness(*(kind() for kind in serving), patience_s=PATIENCE_S)
    starting = [kind() for kind in (FakePrefill, FakeDecode) if kind not in serving]
    await harness.announce_starting(*starting)
    call = Call(harness.gateway, asked())
    await asyncio.wait([call.task], timeout=1.2 * PATIENCE_S)
    assert not call.task.done()
    await harness.add(*starting)
    await finish(call)


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


async def test_a_decode_worker_that_says_nothing_any_more_is_left(make_harness: Any) -> None:
    """Its stream stays open without messages, as that of a stopped process. Its requests continue
    elsewhere, and it gets nothing new until it sends something."""
    stuck, other = FakeDecode("decode-1"), FakeDecode("decode-2", num_slots=1)
    harness = await make_harness(FakePrefill(), stuck, other, silence_s=0.4)
    stuck.pause_after = 3
    call = Call(harness.gateway, asked())
    await until(lambda: len(call.tokens) == 3)
    stuck.stuck = True
    await finish(call)
    assert len(other.commands(decode_pb2.Admit)) == 1
    stuck.stuck = False
    await until(lambda: "decode-1" in harness.connected())


async def test_a_worker_that_has_nothing_to_do_is_not_stuck(make_harness: Any) -> None:
    idle = FakePrefill(), FakeDecode()
    await make_harness(*idle, silence_s=0.4)
    await until(lambda: all(worker.num_reports > 40 for worker in idle))
    assert [worker.num_hellos for worker in idle] == [1, 1]


# ── lost workers, and requests that go on ────────────────────────────────────────────────────────


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_of_workers_that_left_go_on(harness: Any, role: str) -> None:
    """A worker that closes its stream did not die of a request."""
    prefill, decode = harness.workers
    prefill.holds = role == "prefill"
    decode.pause_after = 1
    call = Call(harness.gateway, asked())
    worker = prefill if role == "prefill" else decode
    for _ in range(2):
        await until(lambda: bool(prefill.held or decode.running))
        prefill.held.clear()
        worker.close_streams()
        await until(lambda: not worker.sessions and not decode.running)
    await until(lambda: bool(prefill.held or decode.running))
    prefill.let_go()
    decode.go_on(pause_after=8)
    await finish(call)


async def test_requests_of_workers_that_fell_silent_go_on(make_harness: Any) -> None:
    """Stopped or starved workers: a process that sends nothing has not died."""
    prefill = FakePrefill()
    harness = await make_harness(prefill, FakeDecode(), silence_s=0.4)
    prefill.holds = True
    call = Call(harness.gateway, asked())
    for number in (1, 2):
        await until(lambda number=number: len(prefill.held) == number)  # type: ignore[misc]
        prefill.stuck = True
        await until(lambda: "prefill-1" not in harness.connected())
        prefill.stuck = False
    await until(lambda: len(prefill.held) == 3)
    del prefill.held[:2]
    prefill.let_go()
    await finish(call)


async def test_a_worker_that_is_leaving_is_expected_to_end(harness: Any) -> None:
    """It does not matter how its stream ends: not even two of them are deaths."""
    leaving, _ = harness.workers
    leaving.holds = True
    call = Call(harness.gateway, asked())
    for number in (2, 3):
        await until(lambda: bool(leaving.held))  # noqa: B023
        leaving.report(leaving.load, draining=True)
        await until(lambda: leaving.worker_id not in harness.connected())  # noqa: B023
        other = FakePrefill(f"prefill-{number}")
        other.holds = number == 2
        await harness.add(other)
        leaving.holds = False
        leaving.held.clear()
        leaving.die()
        leaving = other
    await finish(call)
