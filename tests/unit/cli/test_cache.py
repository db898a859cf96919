"""`quire cache`: what it sends, and what it prints."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main

ANSWER: dict[str, Any] = {
    **{"name": "p", "status": "accepted", "asked_tokens": 1114, "retained_tokens": 1104},
    **{"ttl": 3600, "reason": None, "expires_at": 1, "usage": None},
}
LISTED = {
    **{"name": "p", "tenant": "", "model": "m", "retained_tokens": 1104, "cached_tokens": None},
    "expires_at": 1,
}


class Server:
    """Answers every call with `answer`, and keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self.status, self.answer = 200, dict(ANSWER)
        own = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                own.calls.append((self.command, self.path, body))
                self.send_response(own.status)
                self.end_headers()
                self.wfile.write(json.dumps(own.answer).encode())

            do_POST = do_DELETE = do_GET

            def log_message(self, *_: object) -> None: ...

        self.http = HTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever)
    thread.start()
    monkeypatch.setenv("QUIRE_URL", f"http://127.0.0.1:{server.http.server_port}")
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


def test_warm_tells_what_is_retained(server: Server, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "text").write_text("Be kind.")
    details = {"cached_tokens": 16, "cache_write_tokens": 1088}
    server.answer["usage"] = {"prompt_tokens_details": details}
    assert main(["cache", "warm", "p", "--prompt", str(tmp_path / "text"), "--ttl", "90"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "p: accepted, 1,104 of 1,114 tokens are retained for 1 h",
        "16 tokens were cached, 1,088 were computed into the cache",
    ]
    body = {"name": "p", "model": None, "cache_salt": None, "ttl": 90, "prompt": "Be kind."}
    assert server.calls == [("POST", "/v1/cache", body)]


def test_a_rejected_prefix_is_an_error(server: Server, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "chat").write_text('[{"role": "user", "content": "Hi"}]')
    server.answer |= {"status": "rejected", "reason": "the budget is used up"}
    assert main(["cache", "retain", "p", "--messages", str(tmp_path / "chat")]) == 1
    assert capsys.readouterr().err == "quire: p is not retained: the budget is used up\n"
    (_, _, body) = server.calls[0]
    assert (body["warm"], body["ttl"], body["messages"][0]["content"]) == (False, "1h", "Hi")


def test_prefixes_are_listed_and_dropped(server: Server, capsys: Any) -> None:
    server.answer = {"data": [LISTED]}
    assert main(["cache", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "p",
        "-",
        "m",
        "1,104",
        "-",
        "0",
        "s",
    ]
    assert main(["cache", "drop", "a/b", "--tenant", "acme"]) == 0
    assert capsys.readouterr().out == "a/b is not retained any more\n"
    assert server.calls[1][:2] == ("DELETE", "/v1/cache/a%2Fb?tenant=acme")


def test_the_gateways_error_is_shown(server: Server, capsys: Any) -> None:
    server.status, server.answer = 400, {"error": {"message": "no such model"}}
    assert main(["cache", "list"]) == 1
    assert capsys.readouterr().err == "quire: no such model\n"


def test_one_prefix_is_needed(capsys: Any) -> None:
    assert main(["cache", "warm", "p"]) == 2
    assert "one of --prompt and --messages" in capsys.readouterr().err
