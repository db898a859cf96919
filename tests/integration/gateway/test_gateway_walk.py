"""A request's way through a gateway and its workers, over real gRPC."""

from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest

from blockstore.registry import Load
from quire.v1 import decode_pb2, inference_pb2, prefill_pb2, worker_pb2
from services.gateway.access.caller import Caller
from services.protocol.ticket import FinishReason
from services.runtime.errors import QueueFull
from tests.waiting import until

from .conftest import PROMPT, Call, asked, finish
from .fakes import FakeDecode, FakePrefill, expected

PREEMPTED = worker_pb2.Requeue.REASON_PREEMPTED
DRAINING = worker_pb2.Requeue.REASON_DRAINING


async def test_a_request_walks_from_prefill_to_decode_and_ends(make_harness: Any) -> None:
    prefill, decode = FakePrefill(), FakeDecode()
    prefill.num_cached = 7
    harness = await make_harness(prefill, decode)

    call = Call(harness.gateway, asked(max_tokens=8))
    last = await call.result()

    assert call.tokens == expected(PROMPT, 8)
    assert call.text == bytes(expected(PROMPT, 8)).decode()
    assert last.finish_reason is FinishReason.LENGTH
    assert last.usage is not None
    assert (last.usage.num_prompt_tokens, last.usage.num_cached_tokens) == (len(PROMPT), 7)
    assert (last.usage.num_generated_tokens, last.usage.num_preemptions) == (8, 0)
    assert last.usage.time_to_first_token_ms > 0
    await until(lambda: bool(prefill.aborted))  # its ticket is claimed
    kinds = [type(command).__name__ for command in (*decode.seen, *prefill.seen)]
    assert kinds == ["Reserve", "Admit", "PrefillSubmit", "Abort"]
    (admit,) = decode.commands(decode_pb2.Admit)
    assert admit.ticket.holder_epoch == 2
    assert list(admit.ticket.sequences[0].block_ids) == [0]


async def test_cached_tokens_are_reported_only_to_a_client_with_a_salt(make_harness: Any) -> None:
    """Among requests that share prefixes, the number would reveal what others have sent. The
    gateway's metrics have it in any case."""
    prefill = FakePrefill()
    harness = await make_harness(prefill, FakeDecode(), report_cached_tokens=False)
    prefill.num_cached = 3
    for request_id, salt, reported in (("r1", "", None), ("r2", "my own", 3)):
        last = await Call(harness.gateway, asked(request_id, cache_salt=salt)).result()
        assert last.usage is not None
        assert last.usage.num_cached_tokens == reported
    labels = {"model_name": "toy"}
    assert harness.request_metrics.get_sample_value("quire:prompt_tokens_cached_total", labels) == 6
    stub = await harness.serve()
    for salt in ("", "my own"):
        request = inference_pb2.GenerateRequest(text="hello", cache_salt=salt)
        request.sampling.max_tokens = 2
        usage = [response.usage async for response in stub.Generate(request)][-1]
        assert usage.HasField("num_cached_tokens") == bool(salt)


async def test_requests_are_served_strictly_in_order(make_harness: Any) -> None:
    """With one slot: lower class first, then arrival; a preempted request keeps its place before
    all that came later."""
    decode = FakeDecode(num_slots=1)
    prefill = FakePrefill()
    harness = await make_harness(prefill, decode)
    decode.pause_after = 2
    calls = [Call(harness.gateway, asked("first"))]
    await until(lambda: "first" in decode.running)
    decode.report(Load(num_free_slots=0))
    num_reports = decode.num_reports + 2  # by then the gateway has read that no slot is free
    await until(lambda: decode.num_reports >= num_reports)
    others = {"late": 1, "second": 0, "third": 0, "urgent": -1}
    for num_waiting, (name, priority) in enumerate(others.items(), 1):
        calls.append(Call(harness.gateway, asked(name, priority=priority)))
        await harness.num_waiting(num_waiting)
    decode.requeue("first", PREEMPTED)
    decode.report(Load(num_free_slots=1))
    decode.go_on(pause_after=8)
    await finish(*calls)
    served = [submit.ticket.request_id for submit in prefill.commands(prefill_pb2.PrefillSubmit)]
    assert served == ["first", "urgent", "first", "second", "third", "late"]
    orders = [submit.ticket.order for submit in prefill.commands(prefill_pb2.PrefillSubmit)]
    assert orders[1:] == sorted(orders[1:])


async def test_a_worker_that_does_not_answer_is_asked_again_when_it_has(make_harness: Any) -> None:
    """It delays no other request."""
    silent, free = FakeDecode("decode-1", num_slots=8), FakeDecode("decode-2", num_slots=4)
    silent.answers_reservations = False
    harness = await make_harness(FakePrefill(), silent, free, reserve_timeout_s=0.05)
    for name in ("r1", "r2"):
        call = Call(harness.gateway, asked(name))
        await finish(call)
    assert silent.aborted == [("r1", 1)]
    assert len(silent.commands(decode_pb2.Reserve)) == 1
    silent.answer_at_last()
    seen = harness.assembly.directory.decode_workers()["pool"]
    await until(lambda: not any(worker.unresponsive for worker in seen))
    await Call(harness.gateway, asked("r3")).result()
    assert [c.request_id for c in silent.commands(decode_pb2.Reserve)] == ["r1", "r3"]


async def test_a_worker_whose_stream_broke_is_asked_again(make_harness: Any) -> None:
    """It never answers what it was asked on the stream before; the only worker would stay
    unused."""
    only = FakeDecode("decode-1", num_slots=8)
    only.answers_reservations = False
    harness = await make_harness(FakePrefill(), only, reserve_timeout_s=0.05)
    call = Call(harness.gateway, asked())
    await until(lambda: len(only.commands(decode_pb2.Reserve)) == 1)
    seen = harness.assembly.directory.decode_workers()["pool"]
    await until(lambda: all(worker.unresponsive for worker in seen))
    only.answers_reservations = True
    only.close_streams()
    await finish(call)


async def test_a_full_queue_says_when_to_come_again(make_harness: Any) -> None:
    decode = FakeDecode(num_slots=1)
    harness = await make_harness(FakePrefill(), decode, max_waiting=1)
    decode.pause_after = 2
    running = Call(harness.gateway, asked("r1"))
    await until(lambda: "r1" in decode.running)
    waiting = Call(harness.gateway, asked("r2"))
    await until(lambda: harness.assembly.dispatcher.num_waiting == 1)
    with pytest.raises(QueueFull) as refused:
        await Call(harness.gateway, asked("r3")).result()
    assert refused.value.retry_delay_s is not None
    assert 0 < refused.value.retry_delay_s <= 30
    decode.go_on(pause_after=8)
    await running.result()
    await waiting.result()


async def test_a_client_holds_its_share_of_the_places_while_others_wait(make_harness: Any) -> None:
    """Of eight places. A client that is alone may have six: then a share is left for others."""
    harness = await make_harness(FakePrefill(), FakeDecode(), max_waiting=8)
    dispatcher = harness.assembly.dispatcher
    numbers = count()
    with ExitStack() as waiting:

        def wait(client: str) -> None:
            waiting.enter_context(dispatcher.admitting(f"r{next(numbers)}", client))

        for _ in range(6):
            wait("a")
        with pytest.raises(QueueFull, match=r"6 requests of this client wait, .* share of 2 of"):
            wait("a")
        wait("b")
        wait("b")
        with pytest.raises(QueueFull, match="the queue is full"):
            wait("b")
    with ExitStack() as waiting:
        wait("b")
        wait("a")
        wait("a")
        with pytest.raises(QueueFull, match=r"2 requests of this client wait"):
            wait("a")
        wait("b")


async def test_requests_in_the_queue_count_for_their_client(make_harness: Any) -> None:
    decode = FakeDecode(num_slots=1)
    harness = await make_harness(FakePrefill(), decode, max_waiting=8)
    decode.pause_after = 2
    calls = [Call(harness.gateway, asked("a0", caller=Caller(host="a")))]
    await until(lambda: "a0" in decode.running)
    for num_waiting, name in enumerate(("a1", "a2", "b1"), 1):
        calls.append(Call(harness.gateway, asked(name, caller=Caller(host=name[0]))))
        await harness.num_waiting(num_waiting)
    with pytest.raises(QueueFull, match=r"2 requests of this client wait"):
        await Call(harness.gateway, asked("a3", caller=Caller(host="a"))).result()
    decode.go_on(pause_after=8)
    for call in calls:
        await call.result()
