"""A service's output, as its supervisor forwards it."""

import asyncio
import io
import os
import signal
import sys
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from quire.supervisor.child import Child, ChildSpec, Stage
from quire.supervisor.console import Console
from quire.supervisor.descriptors import Listeners, ParentPipe
from quire.supervisor.handover import Handover
from quire.supervisor.service_process import MAX_LINE_BYTES
from tests.waiting import until


async def forwarded(program: str) -> list[str]:
    """The lines that come of a service which runs `program` and then waits for its end."""
    lines, pipe = io.StringIO(), ParentPipe()
    script = f"import signal\n{program}\nprint('the end', flush=True)\nsignal.pause()"
    spec = ChildSpec("toy", (sys.executable, "-c", script), Stage.WORKER)
    child = Child(spec, pipe, Listeners(), Console(lines=lines, notes=io.StringIO()), lambda: True)
    running = asyncio.create_task(child.run())
    async with asyncio.timeout(20):
        while "the end" not in lines.getvalue():
            await asyncio.sleep(0.01)
    await child.stop(5.0)
    await running
    pipe.close()
    return lines.getvalue().splitlines()


async def test_a_progress_bar_of_carriage_returns_is_lines() -> None:
    lines = await forwarded("print('10 %\\r20 %\\r\\nx\\r\\ny')")
    assert lines == ["10 %", "20 %", "x", "y", "the end"]


async def test_only_carriage_returns_take_no_memory() -> None:
    tracemalloc.start()
    assert await forwarded("print('\\r' * (64 << 20))") == ["the end"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


async def test_a_line_without_end_is_cut() -> None:
    num_bytes = 3 * MAX_LINE_BYTES
    *pieces, end = await forwarded(f"print('x' * {num_bytes})")
    assert end == "the end"
    assert "".join(pieces) == "x" * num_bytes
    assert max(map(len, pieces)) < 2 * MAX_LINE_BYTES


async def test_a_line_that_the_supervisor_has_read_in_part_is_whole_at_the_next_one() -> None:
    """Also if the part ends within a character. The state goes from one to the other as JSON."""
    script = (
        "import os, signal\n"
        "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'\\xa9 whole\\n'))\n"
        "os.write(1, b'first\\nhalf \\xc3')\n"
        "while True: signal.pause()"
    )
    spec = ChildSpec("toy", (sys.executable, "-c", script), Stage.WORKER)
    lines, pipe = io.StringIO(), ParentPipe()

    def child() -> Child:
        console = Console(lines=lines, notes=io.StringIO())
        return Child(spec, pipe, Listeners(), console, lambda: True)

    first, second = child(), child()
    running = asyncio.create_task(first.run())
    await until(lambda: first.state.process is not None and first.state.process.unfinished)
    state = first.state
    assert state.process is not None
    kept = replace(state, process=replace(state.process, output=os.dup(state.process.output)))
    adapter = TypeAdapter(Handover)
    told = Handover(Path("/run"), 3, pipe.descriptors, (("::", 1, 4),), (kept,), 1, 2, True, None)
    assert adapter.validate_json(adapter.dump_json(told)) == told
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    second.adopt(adapter.validate_json(adapter.dump_json(told)).children[0])
    running = asyncio.create_task(second.run())
    assert second.pid == state.process.pid
    os.kill(state.process.pid, signal.SIGUSR1)
    await until(lambda: "whole" in lines.getvalue())
    await second.stop(5.0)
    await running
    pipe.close()
    assert lines.getvalue().splitlines() == ["first", "half \u00e9 whole"]
