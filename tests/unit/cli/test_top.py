"""`quire top`: the document of the dashboard's feed as a screen."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from rich.console import Console

from quire.cli import main
from quire.cli.state.top import TopFlags, read_document, render
from quire.errors import QuireError, Unreachable

POOL: dict[str, Any] = {
    **{"num_blocks": 170, "block_bytes": 49152, "free": 100, "cached": 40, "held": 30},
    **{"num_holders": 3, "waiters": 1, "hits": 3, "queries": 4, "recovering": False, "fenced": []},
    "shares": {"acme": 51, "beta": 17, "~": 1},
}
WORKER: dict[str, Any] = {
    **{"role": "decode", "state": "serving", "running": 5, "slots": 64, "free_slots": 57},
    "pending_tokens": 0,
}
REQUEST: dict[str, Any] = {
    **{"id": "gen-1", "prompt": 14, "cached": 0, "tokens": 36, "preemptions": 1, "moves": 0},
    "spans": [["waiting", 1000], ["decode", 1500]],
}
DOCUMENT: dict[str, Any] = {
    **{"now_ms": 4000, "gateway": "gateway-1", "models": ["m"], "block_manager": True},
    **{"num_running": 1, "num_waiting": 0, "oldest_wait_ms": 0},
    **{"workers": {"decode-1": WORKER}, "requests": {"7": REQUEST}, "pools": {"m-1": POOL}},
    "ttft": {"bounds": [0.1, 1.0], "counts": [9, 1, 0]},
    "inter_token": {"bounds": [0.1, 1.0], "counts": [0, 0, 0]},
    **{"generated_tokens": 1234.0, "preemptions": 1.0, "moves": 0.0},
    "failures": {"no_worker": 2.0, "queue_full": 1.0},
}


def screen(document: dict[str, Any], width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(document))
    console.file.close()
    return console.export_text()


def test_screen_shows_figures_pools_workers_and_requests() -> None:
    text = screen(DOCUMENT, width=120)
    for shown in (
        "1,234",
        "p50 100 ms",
        "p99 1 s",
        "30",
        "75.0%",
        "3 errors",
        "acme 30%",
        "beta 10%",
    ):
        assert shown in text
    assert "7 of 64" in text
    assert "gen-1" in text
    assert "2.5 s" in text  # in the phase decode, since 1,500 ms


def test_screen_names_what_is_wrong() -> None:
    document = DOCUMENT | {"block_manager": False}
    document["pools"] = {"m-1": POOL | {"recovering": True, "fenced": ["decode-2"]}}
    text = screen(document)
    for shown in ("the block manager does not answer", "recovering", "decode-2 is fenced"):
        assert shown in text


def test_screen_of_an_empty_deployment() -> None:
    empty = DOCUMENT | {"models": [], "workers": {}, "requests": {}, "pools": {}}
    assert "no model" in screen(empty)


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ([0, 0, 0], "p50 -"),
        ([1, 2, 0], "p50 1 s"),
        ([2, 1, 0], "p50 100 ms"),
        ([0, 0, 1], "p50 inf"),
    ],
)
def test_a_quantile_is_the_bound_of_its_bucket(counts: list[int], shown: str) -> None:
    histogram = {"bounds": [0.1, 1.0], "counts": counts}
    assert f"ttft {shown}" in screen(DOCUMENT | {"ttft": histogram})


def test_what_a_client_has_chosen_is_no_markup() -> None:
    request = REQUEST | {"id": "[red]x[/red]"}
    assert "[red]x[/red]" in screen(DOCUMENT | {"requests": {"7": request}}, width=120)


@contextmanager
def serving(status: int, body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body + self.headers.get("Authorization", "").encode())

        def log_message(self, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_first_event_of_the_feed_is_the_state() -> None:
    events = b'data: {"a": 1}\n\ndata: {"a": 2}\n\n'
    with serving(200, events) as url:
        assert read_document(TopFlags(url=url)) == {"a": 1}


def test_refusal_is_told_in_the_gateways_words() -> None:
    with (
        serving(401, b'{"error": {"message": "this path needs an API key"}}') as url,
        pytest.raises(QuireError, match="needs an API key"),
    ):
        read_document(TopFlags(url=url))


def test_a_gateway_that_does_not_answer_is_named() -> None:
    with serving(200, b"") as url:
        pass
    with pytest.raises(Unreachable, match=f"no gateway answers at {url}"):
        read_document(TopFlags(url=url, api_key="key"))


def test_without_a_terminal_the_state_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    events = f"data: {json.dumps(DOCUMENT)}\n\n" * 2
    with serving(200, events.encode()) as url:
        assert main(["top", "--url", url]) == 0
    assert capsys.readouterr().out.count("gateway-1") == 1


def test_absent_gateway_and_wrong_url_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(200, b"") as url:
        pass
    assert main(["top", "--url", url]) == 3
    assert "--url names another gateway" in capsys.readouterr().err
    assert main(["top", "--url", "127.0.0.1:8000"]) == 2
    assert "'127.0.0.1:8000' is no URL, such as http://127.0.0.1:8000" in capsys.readouterr().err
