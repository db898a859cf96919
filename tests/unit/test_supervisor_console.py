"""The operator's view of a run."""

import io
import re
from dataclasses import replace

from quire.reports import Model, Pool
from quire.supervisor.banner import banner
from quire.supervisor.console import Console
from quire.supervisor.options import ServeOptions
from quire.supervisor.readiness import Serving


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_lines_begin_with_the_time_and_the_name_of_their_service() -> None:
    lines = Terminal()
    console = Console(notes=io.StringIO(), lines=lines)
    console.line("decode-1", "loading")
    console.line("gateway", "listening")
    console.line("decode-1", "ready")
    shown = lines.getvalue().splitlines()
    plain = [re.sub(r"\033\[[0-9;]*m", "", line) for line in shown]
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in plain)
    assert [line.split()[1:] for line in plain] == [
        ["decode-1", "loading"],
        ["gateway", "listening"],
        ["decode-1", "ready"],
    ]
    colours = [line.split("\033[2;")[1].partition("m")[0] for line in shown]
    assert colours[0] == colours[2] != colours[1]


def test_elsewhere_lines_are_passed_on_as_they_came() -> None:
    lines, notes = io.StringIO(), io.StringIO()
    console = Console(notes, lines)
    console.line("decode-1", '{"event": "service_started"}')
    console.note("waiting for the gateway")
    assert lines.getvalue() == '{"event": "service_started"}\n'
    assert notes.getvalue() == "waiting for the gateway\n"


def serving() -> Serving:
    pool = Pool("p-1", "m", "f", 16, 1 << 20, 2048, 2048, 0, 0, 0, 0, (), 0, 0)
    return Serving((Model("m", 4096, 16, "float32"),), (pool,))


def test_the_banner_is_short_on_the_usual_ports() -> None:
    text = banner(ServeOptions(model="/m", model_name="m"), serving(), 3.21)
    assert text.startswith("Quire is serving, 3.2 s after its start.\n")
    assert "  pool   p-1: 2,048 blocks of 16 tokens, 2,048 MiB\n" in text
    assert '  quire generate --temperature 0 "What is the capital of France?"\n' in text
    assert text.endswith("`quire down`.")


def test_the_banner_warns_of_a_pool_with_less_room_than_the_context() -> None:
    pool = replace(serving().pools[0], num_blocks=85)
    model = Model("m", 1360, 16, "int8", context=8192)
    text = banner(ServeOptions(model="/m", model_name="m"), Serving((model,), (pool,)), 3.21)
    assert "  model  m (int8, up to 1,360 tokens a request)\n" in text
    assert (
        "warning: m has a context of 8,192 tokens, and its pool has room for 1,360: "
        "--pool-memory gives it more\n"
    ) in text


def test_the_banner_names_other_ports_and_an_address_that_can_be_reached() -> None:
    options = ServeOptions(
        model="/m", model_name="m", host="0.0.0.0", grpc_port=6000, http_port=6001
    )
    text = banner(options, serving(), 3.21)
    assert "quire generate --address 127.0.0.1:6000 " in text
    assert "curl http://127.0.0.1:6001/v1/chat/completions" in text
    assert text.endswith("`quire down --run 6000`.")


def test_the_banner_brackets_an_ipv6_address() -> None:
    text = banner(ServeOptions(model="/m", model_name="m", host="::1"), serving(), 3.21)
    assert "quire generate --address [::1]:50051 " in text
    assert "curl http://[::1]:8000/v1/chat/completions" in text
