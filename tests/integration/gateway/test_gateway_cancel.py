"""A client, a deadline or a stop string ends a request, and its workers are told."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from quire.v1 import decode_pb2, prefill_pb2
from services.runtime.errors import DeadlineExceeded
from tests.waiting import until

from .conftest import PROMPT, Call, asked
from .fakes import FakeDecode, FakePrefill, expected


async def test_a_cancelled_request_leaves_the_queue(make_harness: Any) -> None:
    decode = FakeDecode(num_slots=1)
    prefill = FakePrefill()
    harness = await make_harness(prefill, decode)
    decode.pause_after = 2
    first, second, third = (Call(harness.gateway, asked(name)) for name in ("r1", "r2", "r3"))
    await until(lambda: harness.assembly.dispatcher.num_waiting == 2)
    await second.cancel()
    assert harness.assembly.dispatcher.num_waiting == 1
    decode.go_on(pause_after=8)
    await first.result()
    await third.result()
    submitted = [s.ticket.request_id for s in prefill.commands(prefill_pb2.PrefillSubmit)]
    assert submitted == ["r1", "r3"]


@pytest.mark.parametrize("end", ["cancelled", "deadline"])
async def test_the_end_of_a_request_reaches_every_hop(harness: Any, end: str) -> None:
    prefill, decode = harness.workers
    prefill.holds = True
    call = Call(harness.gateway, asked(timeout_s=0.2))
    await until(lambda: bool(prefill.held))
    assert 0 < prefill.held[0][1].timeout_ms <= 200
    if end == "cancelled":
        await call.cancel()
    else:
        with pytest.raises(DeadlineExceeded):
            await call.result()
    await until(lambda: prefill.aborted == [("r1", 1)] and decode.aborted == [("r1", 1)])
    prefill.let_go()  # it crossed the abort: nobody listens any more
    await Call(harness.gateway, asked("r2")).result()
    assert [admit.ticket.request_id for admit in decode.commands(decode_pb2.Admit)] == ["r2"]


async def test_an_id_may_be_used_again_before_the_workers_have_released_it(
    harness: Any,
) -> None:
    """For the workers, a retry with the same id is another attempt, although it is the first
    attempt of its request. Their events about the old request do not reach it."""
    prefill, _ = harness.workers
    prefill.holds = True
    first = Call(harness.gateway, asked("same", max_tokens=5))
    await until(lambda: len(prefill.held) == 1)
    await first.cancel()
    again = Call(harness.gateway, asked("same", prompt=PROMPT[:5]))
    await until(lambda: len(prefill.held) == 2)
    prefill.let_go()
    await again.result()
    assert again.tokens == expected(PROMPT[:5], 8)
    attempts = [s.ticket.attempt for s in prefill.commands(prefill_pb2.PrefillSubmit)]
    assert len(set(attempts)) == 2


async def test_a_client_that_leaves_in_admission_is_logged_and_counted(make_harness: Any) -> None:
    """Here it waits for a worker that serves its model."""
    harness = await make_harness(patience_s=60)
    with capture_logs() as logs:
        call = Call(harness.gateway, asked("r1"))
        await until(lambda: harness.assembly.dispatcher.num_admitting == 1)
        await call.cancel()
    (line,) = [line for line in logs if line["event"] == "request_refused"]
    assert (line["request_id"], line["outcome"]) == ("r1", "cancelled")
    labels = {"model_name": "", "code": "cancelled"}
    assert harness.request_metrics.get_sample_value("quire:request_failure_total", labels) == 1
    assert harness.assembly.dispatcher.num_waiting == 0


async def test_a_deadline_is_kept_where_there_is_no_worker_yet(make_harness: Any) -> None:
    harness = await make_harness(patience_s=60)
    with pytest.raises(DeadlineExceeded):
        await Call(harness.gateway, asked(timeout_s=0.02)).result()
    assert harness.assembly.dispatcher.num_waiting == 0
