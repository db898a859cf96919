"""Checks the structured output that requests ask for, before any worker sees it.

A structure is compiled in a child process (`services.model.structured.checker`) with limits on its
CPU time and memory: whatever a client sends, the answer comes in bounded time, and nobody else
notices. Workers compile what has passed.
"""

import asyncio
import json
import subprocess
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from select import POLLIN, poll

from services.gateway.checks import check_text, require
from services.model.structured.checker import CPU_LIMIT_S, MEMORY_LIMIT_BYTES
from services.model.structured.structure import MAX_STRUCTURE_BYTES, Structure
from services.runtime.errors import InvalidRequest, Overloaded, StartupError

STRUCTURE = "structured_outputs"
"""The name in errors of whatever field has the structure; the HTTP server names its own."""

_MODULE = "services.model.structured.checker"
_MOST_VERDICTS = 256
_MOST_WAITING = 256
_WALL_LIMIT_S = 30.0
"""For a machine so loaded that the child gets little CPU time."""


@dataclass(frozen=True, slots=True)
class _Fault:
    path: str
    """The place of the fault in the structure's schema."""
    text: str
    is_final: bool = True
    """Whether the verdict is kept. That of a check that did not end is not: the structure may be
    right, and the machine busy, or the child killed from outside."""


class StructureChecker:
    """Checks structures for one model, one at a time, and remembers the last verdicts."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._arguments = [str(directory), str(vocab_size), *map(str, eos_token_ids)]
        self._has_end = bool(eos_token_ids)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="structures")
        self._is_warm = self._is_ready = False
        self._child: subprocess.Popen[bytes] | None = None
        self._at_exit: weakref.finalize[..., StructureChecker] | None = None
        self._verdicts: OrderedDict[Structure, _Fault | None] = OrderedDict()
        self._waiting: dict[Structure, Future[_Fault | None]] = {}
        self._num_asking = Counter[Structure]()
        """The requests that wait for a structure. Without one, its check is left out: clients that
        ask and leave must not keep others waiting."""

    def warm_up(self) -> None:
        """Start the child, if none was started, so that it reads the vocabulary."""
        if self._has_end and not self._is_warm:
            self._is_warm = True
            self._thread.submit(self._started)

    async def check(
        self, structure: Structure, param: str = STRUCTURE, subject: str | None = None
    ) -> None:
        """Raises InvalidRequest, which names `param`, if the structure is wrong, or costs too much;
        Overloaded if too many others wait for their check. `subject` is the name of the structure
        in the message."""
        subject = subject or f"structured output: {structure.kind.value}"
        check_text("structured output", structure.text, MAX_STRUCTURE_BYTES, param)
        size = len(structure.text.encode())
        require(
            size <= MAX_STRUCTURE_BYTES,
            f"structured output has {size} bytes, at most {MAX_STRUCTURE_BYTES}",
            param,
        )
        require(
            self._has_end, "structured output needs a model with an end-of-sequence token", param
        )
        if structure in self._verdicts:
            self._verdicts.move_to_end(structure)
            fault = self._verdicts[structure]
        else:
            fault = await self._asked(structure)
        if fault is not None:
            problem = f"{subject}.{fault.path}".rstrip(".") + f" {fault.text}"
            # It may quote names with lone surrogates, which no answer can have.
            raise InvalidRequest(problem.encode(errors="backslashreplace").decode(), param)

    async def _asked(self, structure: Structure) -> _Fault | None:
        """The verdict of one check, for all requests that wait for it."""
        if structure not in self._waiting:
            if len(self._waiting) >= _MOST_WAITING:
                raise Overloaded(f"{_MOST_WAITING} structures wait for their check; try again", 1.0)
            self._waiting[structure] = self._thread.submit(self._verdict, structure)
        check = self._waiting[structure]
        self._num_asking[structure] += 1
        try:
            verdict = await asyncio.shield(asyncio.wrap_future(check))
        finally:
            self._num_asking[structure] -= 1
            if not self._num_asking[structure]:
                check.cancel()
                del self._num_asking[structure], self._waiting[structure]
        if verdict is None or verdict.is_final:
            self._verdicts[structure] = verdict
            while len(self._verdicts) > _MOST_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    def _verdict(self, structure: Structure) -> _Fault | None:
        """The fault of the structure, if it has one. A child that ended between two checks is no
        verdict."""
        child = self._running()
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps([structure.kind.value, structure.text]).encode() + b"\n")
            child.stdin.flush()
            line = _line_of(child)
        except BrokenPipeError:
            line = b""
        if line:
            fault = json.loads(line)
            return None if fault is None else _Fault(*fault)
        self._forget()
        problem = (
            "is too large, too deep or too complex: it cannot be compiled with "
            f"{CPU_LIMIT_S} s of CPU time and {MEMORY_LIMIT_BYTES >> 20} MiB"
        )
        return _Fault("", problem, is_final=False)

    def _running(self) -> "subprocess.Popen[bytes]":
        """The child, once it has read the vocabulary. Raises StartupError."""
        child = self._started()
        if not self._is_ready and not _line_of(child):
            self._forget()
            raise StartupError("the process that checks structured output does not start")
        self._is_ready = True
        return child

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._child is None or self._child.poll() is not None:
            self._forget()
            self._child = self._start()
            self._at_exit = weakref.finalize(self, _end, self._child)
        return self._child

    def _forget(self) -> None:
        """End the child, if there is one."""
        self._child, self._is_ready = None, False
        if self._at_exit is not None:
            self._at_exit()
            self._at_exit = None

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the backtraces of those that end beyond a limit
        )


def _line_of(child: "subprocess.Popen[bytes]") -> bytes:
    """The next line; none if the child has ended, or does not answer."""
    assert child.stdout is not None
    answered = poll()
    answered.register(child.stdout, POLLIN)
    return child.stdout.readline() if answered.poll(_WALL_LIMIT_S * 1000) else b""


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.communicate()
