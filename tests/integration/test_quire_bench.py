"""`quire bench` against a server with known delays reports these delays."""

import asyncio
import json
import statistics
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main
from tests.synthetic_server import Synthetic

TTFT_MS, ITL_MS, NUM_TOKENS = 60.0, 8.0, 21


@pytest.fixture
def server() -> Iterator[tuple[Synthetic, str]]:
    """A synthetic server on a thread of its own, and its URL."""
    synthetic = Synthetic(TTFT_MS / 1000, ITL_MS / 1000)
    serving, loop = synthetic.serving(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield synthetic, asyncio.run_coroutine_threadsafe(serving.__aenter__(), loop).result(10)
    leaving = serving.__aexit__(None, None, None)
    asyncio.run_coroutine_threadsafe(leaving, loop).result(timeout=10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=10)
    loop.close()


def measured(url: str, capsys: Any, *flags: str, status: int = 0) -> dict[str, Any]:
    common = ("--url", url, "--output-len", str(NUM_TOKENS), "--prompt-len", "16", "--json")
    assert main(["bench", *common, *flags]) == status
    summary: dict[str, Any] = json.loads(capsys.readouterr().out)["summary"]
    return summary


def test_the_figures_are_what_the_server_did(server: Any, capsys: Any) -> None:
    """Compared with the times at which the server wrote, because a busy machine delays the server,
    too. The client cannot be faster than the delays."""
    synthetic, url = server
    found = measured(url, capsys, "--concurrency", "4", "--num-requests", "24", "--warmup", "0")
    assert found["num_completed"] == found["num_requests"] == 24
    assert (found["num_prompt_tokens"], found["num_output_tokens"]) == (24 * 16, 24 * NUM_TOKENS)
    answers = list(zip(synthetic.arrivals, synthetic.written, strict=True))
    spans = [1000 * (times[-1] - times[0]) for _, times in answers]
    tpot_ms = statistics.mean(spans) / (NUM_TOKENS - 1)
    assert found["tpot_ms"]["mean"] == pytest.approx(tpot_ms, rel=0.1)
    assert found["itl_ms"]["mean"] == pytest.approx(tpot_ms, rel=0.1)
    for key, index, told in (
        ("ttft_ms", 0, TTFT_MS),
        ("e2e_ms", -1, TTFT_MS + (NUM_TOKENS - 1) * ITL_MS),
    ):
        did = statistics.median(1000 * (times[index] - arrived) for arrived, times in answers)
        assert told <= found[key]["p50"]
        assert found[key]["p50"] == pytest.approx(did, abs=40)
    assert found["max_concurrency"] == 4
    assert found["output_token_throughput"] == pytest.approx(
        24 * NUM_TOKENS / found["duration_s"], rel=1e-6
    )


def test_an_open_loop_does_not_wait_for_answers(server: Any, capsys: Any, tmp_path: Path) -> None:
    """40 requests, 20 a second, each answered after at least 0.22 s: a generator that waits for
    answers sends its last one after 8.6 s. The same seed gives the same times."""
    synthetic, url = server
    due = []
    for _ in range(2):
        synthetic.arrivals.clear()
        flags = ("--request-rate", "20", "--num-requests", "40", "--warmup", "0", "--seed", "3")
        file = tmp_path / "result.json"
        found = measured(url, capsys, *flags, "--json-file", str(file))
        assert found["max_concurrency"] > 1
        assert synthetic.arrivals[-1] - synthetic.arrivals[0] < 6.0
        due.append([each["due_s"] for each in json.loads(file.read_text())["requests"]])
    assert due[0] == due[1] == sorted(due[0])
    assert due[0][-1] == pytest.approx(2.0, rel=0.5)


def test_goodput_counts_what_keeps_every_limit(server: Any, capsys: Any) -> None:
    _, url = server
    flags = ("--concurrency", "4", "--num-requests", "8")
    kept = measured(url, capsys, *flags, "--goodput", "ttft:5000", "tpot:500")
    assert kept["goodput"] == pytest.approx(kept["request_throughput"])
    missed = measured(url, capsys, *flags, "--goodput", "ttft:5000", "tpot:1")
    assert missed["goodput"] == 0


def test_errors_are_counted_by_kind_and_left_out_of_latencies(server: Any, capsys: Any) -> None:
    synthetic, url = server
    synthetic.statuses = [200, 429, 429, 503]
    found = measured(url, capsys, "--concurrency", "1", "--num-requests", "6", "--warmup", "0")
    assert found["errors"] == {"http 429": 2, "http 503": 1}
    assert found["num_completed"] == 3
    assert "refused" in found["error_messages"]["http 429"]
    assert found["ttft_ms"]["p50"] >= TTFT_MS


def test_a_stream_that_breaks_and_a_timeout_are_errors(server: Any, capsys: Any) -> None:
    synthetic, url = server
    synthetic.cut_after = 5
    flags = ("--concurrency", "2", "--num-requests", "2", "--warmup", "0")
    assert measured(url, capsys, *flags, status=1)["errors"] == {"broken stream": 2}
    synthetic.cut_after = None
    found = measured(url, capsys, *flags, "--timeout", "0.15", status=1)
    assert found["errors"] == {"timeout": 2}


@pytest.mark.parametrize("load", [("--concurrency", "2"), ("--request-rate", "20")])
def test_the_end_of_the_duration_is_the_end_of_the_run(
    server: Any, capsys: Any, load: tuple[str, str]
) -> None:
    """An answer takes 16 s here. The tokens that came count; the latencies leave the rest out."""
    _, url = server
    flags = ("--duration", "0.5", "--output-len", "2000", "--warmup", "0")
    found = measured(url, capsys, *load, *flags, status=1)
    assert found["num_cut"] == found["num_requests"] > 0
    assert (found["num_completed"], found["errors"], found["e2e_ms"]) == (0, {}, None)
    assert 0.5 <= found["duration_s"] < 5
    assert 0 < found["num_output_tokens"] < 2000


def test_the_progress_is_a_line_now_and_then(
    server: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.bench_live._LINE_S", 0.1)
    _, url = server
    flags = ("--num-requests", "4", "--prompt-len", "16", "--output-len", "21", "--json")
    assert main(["bench", "--url", url, "--concurrency", "1", *flags]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("quire: warm-up, 0 s: ") for line in lines)
    assert any(line.startswith("quire: load, 0 s: 0 done, 1 running, ") for line in lines)


def test_turns_repeat_the_conversation_and_wait_for_the_answer(server: Any, capsys: Any) -> None:
    synthetic, url = server
    found = measured(
        url, capsys, "--concurrency", "1", "--num-requests", "1", "--turns", "3", "--warmup", "0"
    )
    assert found["num_requests"] == 3
    roles = [[message["role"] for message in body["messages"]] for body in synthetic.bodies]
    assert roles == [["user", "assistant"] * index + ["user"] for index in range(3)]
    assert synthetic.bodies[1]["messages"][1]["content"] == " word" * NUM_TOKENS
    gaps = [b - a for a, b in zip(synthetic.arrivals, synthetic.arrivals[1:], strict=False)]
    assert min(gaps) >= (TTFT_MS + (NUM_TOKENS - 1) * ITL_MS) / 1000


def test_a_shared_prefix_is_shared(server: Any, capsys: Any) -> None:
    synthetic, url = server
    flags = ("--prefix-len", "32", "--num-prefixes", "2", "--warmup", "0")
    measured(url, capsys, "--concurrency", "1", "--num-requests", "4", *flags)
    prompts = [body["prompt"].split() for body in synthetic.bodies]
    assert [len(prompt) for prompt in prompts] == [48] * 4
    assert prompts[0][:32] == prompts[2][:32] != prompts[1][:32] == prompts[3][:32]
    assert prompts[0][32:] != prompts[2][32:]


def test_a_file_has_every_request(server: Any, capsys: Any, tmp_path: Path) -> None:
    _, url = server
    file = tmp_path / "result.json"
    flags = ("--json-file", str(file))
    measured(url, capsys, "--concurrency", "2", "--num-requests", "6", *flags)
    requests = json.loads(file.read_text())["requests"]
    assert len(requests) == 6
    assert len(requests[0]["gaps_ms"]) == NUM_TOKENS - 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "choose one of --request-rate and --concurrency"),
        (["--concurrency", "1", "--request-rate", "1"], "choose one of"),
        (["--concurrency", "1", "--goodput", "speed:5"], "'speed:5' is none of ttft:MS"),
        (["--concurrency", "1", "--extra-body", "[1]"], "'[1]' is no JSON object"),
        (["--concurrency", "1", "--url", "host:8000"], "'host:8000' is no URL, such as http://"),
        (["--concurrency", "1", "--url", "ftp://host"], "'ftp://host' is no URL, such as http://"),
        (["--concurrency", "1", "--json-file", "/no/where/a.json"], "cannot be written"),
        (["--concurrency", "1", "--turns", "2", "--prompts", "ids"], "--prompts ids sends none"),
    ],
)
def test_wrong_usage(flags: list[str], message: str, capsys: Any) -> None:
    assert main(["bench", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_tokenizer_is_named(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    flags = ("--concurrency", "1", "--url", "http://127.0.0.1:1", "--tokenizer", str(file))
    assert main(["bench", *flags]) == 1
    assert "is no tokenizer.json" in capsys.readouterr().err


def test_an_absent_server_has_its_exit_status(capsys: Any) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1", "--concurrency", "1"]) == 3
    told = capsys.readouterr().err
    assert told.startswith("quire: no server answers at http://127.0.0.1:1: ")
    assert "--url names another gateway" in told


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[BaseHTTPRequestHandler], str]]:
    """A handler whose attributes are a server's answer, and its URL. Without `do_GET` and
    `do_POST` it answers with 501."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def answering(status: int, content: bytes) -> Any:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(content)

    return answer


@pytest.mark.parametrize(
    ("models", "answer", "message"),
    [
        ((404, b"nope"), (200, b""), "does not list its models: status 404: nope; name one with"),
        ((200, b"[]"), (200, b""), "the answer is not as OpenAI's"),
        ((200, b'{"data": [{"id": "m"}]}'), (200, b"{}"), "not text/event-stream"),
        ((200, b'{"data": [{"id": "m"}]}'), (200, b"data: [1]\n\n"), "is not as OpenAI's"),
        ((200, b'{"data": [{"id": "m"}]}'), (400, b"ignore_eos?"), "--no-ignore-eos leaves"),
    ],
)
def test_another_servers_answers_are_explained(
    other: Any,
    capsys: Any,
    models: tuple[int, bytes],
    answer: tuple[int, bytes],
    message: str,
) -> None:
    """A list of models without a content type is one."""
    handler, url = other
    handler.do_GET, handler.do_POST = answering(*models), answering(*answer)
    assert main(["bench", "--url", url, "--concurrency", "1", "--num-requests", "1"]) == 1
    assert message in capsys.readouterr().err
