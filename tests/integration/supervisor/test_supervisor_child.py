"""A service's output, as its supervisor forwards it."""

import asyncio
import io
import sys
import tracemalloc

from quire.supervisor.child import MAX_LINE_BYTES, Child, ChildSpec, Listeners, ParentPipe, Stage
from quire.supervisor.console import Console


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
