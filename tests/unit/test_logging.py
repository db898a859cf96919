"""Logs: one JSON object a line, for Quire's and foreign loggers, with the values bound to the
task."""

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator

import pytest
import structlog

from services.runtime.logging import bind_request_id, configure_logging, get_logger


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """The stream of the logs; afterwards the standard library's logging is restored."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_our_lines_and_foreign_ones_look_the_same(stream: io.StringIO) -> None:
    configure_logging("cook", stream=stream)
    get_logger("a").info("pan_heated", temperature_c=180)
    logging.getLogger("a.library").warning("started on %s", 80)
    ours, foreign = lines(stream)
    assert (ours["event"], ours["temperature_c"], ours["level"]) == ("pan_heated", 180, "info")
    assert (foreign["event"], foreign["level"]) == ("started on 80", "warning")
    assert ours["service"] == foreign["service"] == "cook"
    for line in ours, foreign:
        assert list(line)[:4] == ["timestamp", "level", "service", "event"]


def test_the_level_is_a_threshold(stream: io.StringIO) -> None:
    configure_logging("cook", level="warning", stream=stream)
    get_logger("a").info("not_written")
    logging.getLogger("b").info("not written")
    get_logger("a").warning("written")
    assert [line["event"] for line in lines(stream)] == ["written"]


def test_tracebacks_are_one_line(stream: io.StringIO) -> None:
    configure_logging("cook", stream=stream)
    try:
        raise RuntimeError("burnt")
    except RuntimeError as error:
        get_logger("a").error("failed", exc_info=error)
    (line,) = lines(stream)
    assert "RuntimeError: burnt" in str(line["exception"])


async def test_the_request_id_is_on_every_line_of_its_task(stream: io.StringIO) -> None:
    """It is on no line of another task."""
    configure_logging("cook", stream=stream)

    async def serve(request_id: str) -> None:
        bind_request_id(request_id)
        await asyncio.sleep(0)
        get_logger("a").info("served", expected=request_id)

    await asyncio.gather(*(asyncio.create_task(serve(name)) for name in ("r-1", "r-2")))
    assert [line["request_id"] == line["expected"] for line in lines(stream)] == [True, True]
    get_logger("a").info("idle")
    assert "request_id" not in lines(stream)[-1]


def test_a_line_on_a_console_has_the_time_and_what_happened_with_its_figures(
    stream: io.StringIO,
) -> None:
    configure_logging("cook", log_format="console", stream=stream)
    get_logger("a").info("pan_heated", temperature_c=180, num_eggs=12, reason=None, took_ms=4.25)
    get_logger("a").warning("pan_lost", size_bytes=2048, worker_id="decode-1-3fa85f64")
    heated, lost = stream.getvalue().splitlines()
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d pan heated: temperature c 180, 12 eggs, took 4.25 ms", heated
    )
    assert lost.endswith("warning: pan lost: size 2.0 KiB, decode-1")


def test_a_line_under_a_supervisor_leaves_the_time_to_it(stream: io.StringIO) -> None:
    configure_logging("cook", log_format="supervised", stream=stream)
    get_logger("a").info("pan_heated")
    assert stream.getvalue() == "pan heated\n"


def test_a_finished_request_is_one_short_line_for_people(stream: io.StringIO) -> None:
    """As `services.gateway.request.metrics` logs it."""
    configure_logging("gateway", log_format="supervised", stream=stream)
    get_logger("a").info(
        "request_ended",
        request_id="r-1",
        model="m",
        outcome="length",
        reason=None,
        num_prompt_tokens=6,
        num_cached_tokens=0,
        num_sequences=1,
        num_generated_tokens=1200,
        num_attempts=1,
        time_to_first_token_ms=12.3,
        duration_ms=2032.9,
    )
    assert stream.getvalue() == (
        "request ended: length, 6 prompt tokens, 1,200 generated tokens, time to first token "
        "12.3 ms, duration 2,033 ms, request id r-1\n"
    )


def test_a_traceback_on_a_console_has_no_values_of_variables(stream: io.StringIO) -> None:
    configure_logging("cook", log_format="console", stream=stream)
    try:
        secret = "a prompt"
        raise RuntimeError("burnt")
    except RuntimeError as error:
        get_logger("a").error("failed", exc_info=error)
        del secret
    assert "RuntimeError: burnt" in stream.getvalue().splitlines()[-1]
    assert "a prompt" not in stream.getvalue().replace('secret = "a prompt"', "")
