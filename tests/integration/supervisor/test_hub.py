"""Models of the Hugging Face hub: what the cache does not have is downloaded, from a hub of the
test."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(200_000),
    "README.md": b"not read",
    "pytorch_model.bin": b"not read",
    "original/params.json": b"not read",
}
COMMIT = "0123456789012345678901234567890123456789"


def test_a_model_that_is_not_in_the_cache_is_downloaded_once(hub: "Hub", tmp_path: Path) -> None:
    """The second start asks nobody."""
    first = find(hub.url, tmp_path)
    assert first.returncode == 0, first.stderr
    assert f"org/tiny is downloaded from {hub.url} into the Hugging Face cache" in first.stderr
    assert "100%" in first.stderr  # the progress
    snapshot = Path(first.stdout.strip())
    found = {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}
    assert found == {"config.json", "model.safetensors"}
    hub.paths.clear()
    second = find(hub.url, tmp_path)
    assert (second.stdout, second.stderr, hub.paths) == (first.stdout, "", [])


def test_a_cache_with_a_tokenizer_alone_gets_the_weights(hub: "Hub", tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    assert Path(find(hub.url, tmp_path).stdout.strip(), "model.safetensors").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/none", "there is no directory org/none, and {hub} has no such model"),
        ("org/gated", "accept them at {hub}/org/gated, then set HF_TOKEN"),
        ("org/down", "org/down cannot be downloaded from {hub}: "),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_named_in_one_line(
    hub: "Hub", tmp_path: Path, model: str, message: str
) -> None:
    ended = find(hub.url, tmp_path, model)
    assert message.format(hub=hub.url) in ended.stderr.splitlines()[-1]


def test_a_hub_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    ended = find("http://127.0.0.1:9", tmp_path)
    assert "org/tiny cannot be downloaded from http://127.0.0.1:9: " in ended.stderr


@pytest.mark.parametrize("offline", [("", "1"), ("--offline", "")])
def test_an_offline_start_names_the_download(
    hub: "Hub", tmp_path: Path, offline: tuple[str, str]
) -> None:
    flag, variable = offline
    ended = find(hub.url, tmp_path, "org/tiny", flag, HF_HUB_OFFLINE=variable)
    assert "Download it with: hf download org/tiny" in ended.stderr
    assert hub.paths == []


_FIND = """
import sys
from quire.supervisor.errors import ModelNotFound
from quire.supervisor.model_source import find_model
try:
    print(find_model(sys.argv[1], offline="--offline" in sys.argv).directory)
except ModelNotFound as error:
    sys.exit(str(error))
"""


def find(
    url: str, cache: Path, model: str = "org/tiny", *flags: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`find_model` in a process of its own, since huggingface_hub reads the hub's address once."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", _FIND, model, *flags],
        env={**kept, "HF_ENDPOINT": url, "HF_HOME": str(cache), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


class Hub(ThreadingHTTPServer):
    """A hub with the model `org/tiny`. `paths`: what it was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/tiny/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
                for name, content in FILES.items()
            ]
            self._answer(200, json.dumps(tree).encode())
        elif path.startswith("/api/models/org/tiny"):
            self._answer(200, json.dumps({"id": "org/tiny", "sha": COMMIT}).encode())
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            self._answer(200, FILES[path.partition(f"{COMMIT}/")[2]])
        elif "gated" in path:
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "down" in path:
            self._answer(500, b"{}")
        else:
            self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        known = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT}
        for name, value in {**known, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = Thread(target=hub.serve_forever)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()
