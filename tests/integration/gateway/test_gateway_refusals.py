"""Refused requests are visible: in a line of the log, and in a metric."""

from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from quire.v1 import inference_pb2
from services.runtime.errors import InvalidRequest, PromptTooLong, QuireError, UnknownModel

from .conftest import PROMPT, Call, GatewayHarness, asked
from .fakes import FakePrefill


def num_failed(harness: GatewayHarness, code: str, model: str = "toy") -> float | None:
    labels = {"model_name": model, "code": code}
    return harness.request_metrics.get_sample_value("quire:request_failure_total", labels)


@pytest.mark.parametrize(
    ("fields", "error", "model"),
    [
        ({"model": "gpt-4"}, UnknownModel, ""),
        ({"prompt": ()}, InvalidRequest, "toy"),
        ({"model": "toy", "sampling": {"top_p": 3.0}}, InvalidRequest, "toy"),
        ({"prompt": PROMPT * 1000}, PromptTooLong, "toy"),
    ],
)
async def test_a_refusal_is_counted_and_logged_once(
    harness: Any, fields: dict[str, Any], error: type[QuireError], model: str
) -> None:
    with capture_logs() as logs, pytest.raises(error) as refused:
        await Call(harness.gateway, asked("r1", **fields)).result()
    assert num_failed(harness, error.code, model) == 1
    (line,) = [line for line in logs if line["event"].startswith("request_")]
    assert line == {
        "event": "request_refused",
        "log_level": "info",
        "request_id": "r1",
        "model": model,
        "outcome": error.code,
        "reason": str(refused.value),
    }


async def test_a_refusal_tells_no_more_of_a_text_than_a_line_can_hold(harness: Any) -> None:
    with capture_logs() as logs, pytest.raises(UnknownModel):
        await Call(harness.gateway, asked(model="x" * 1_000_000)).result()
    (line,) = [line for line in logs if line["event"] == "request_refused"]
    assert len(str(line)) < 2000


async def test_a_message_without_input_is_counted_too(harness: Any) -> None:
    stub = await harness.serve()
    with pytest.raises(grpc.aio.AioRpcError, match="no input"):
        async for _ in stub.Generate(inference_pb2.GenerateRequest(model="toy")):
            pass
    assert num_failed(harness, "invalid_request") == 1


async def test_a_request_that_was_in_line_is_counted_once(make_harness: Any) -> None:
    """The request ends with an error, but was not refused."""
    harness = await make_harness(FakePrefill(), patience_s=0.05)
    with capture_logs() as logs, pytest.raises(QuireError):
        await Call(harness.gateway, asked()).result()
    assert num_failed(harness, "no_worker") == 1
    events = [line["event"] for line in logs if line["event"].startswith("request_")]
    assert events == ["request_ended"]
