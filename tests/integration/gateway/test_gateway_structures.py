"""The checks of structured output by a gateway, in a child process."""

import asyncio
import subprocess
import sys
import weakref
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from services.gateway.workers.models import structures
from services.gateway.workers.models.structures import StructureChecker
from services.model.checkpoint.reading import read_model_config
from services.model.structured.structure import Structure, StructureKind
from services.runtime.errors import InvalidRequest, StartupError


async def test_checks_that_nobody_waits_for_are_left_out(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that ask for costly checks and leave do not keep others waiting."""
    config = read_model_config(smollm2)
    checker = StructureChecker(smollm2, config.vocab_size, config.eos_token_ids)
    begin, checked = Event(), list[str]()
    verdict = checker._verdict

    def slow(structure: Structure) -> Any:
        begin.wait()
        answer = verdict(structure)
        checked.append(structure.text if answer is None else answer.text)
        return answer

    monkeypatch.setattr(checker, "_verdict", slow)
    forms = [Structure(StructureKind.REGEX, text) for text in ("a", "b", "c")]
    asks = [asyncio.create_task(checker.check(form)) for form in (*forms, forms[1])]
    while len(checker._waiting) < len(forms):
        await asyncio.sleep(0)
    asks[0].cancel()
    asks[1].cancel()  # but another request waits for the same
    await asyncio.wait(asks[:2])
    again = asyncio.create_task(checker.check(forms[0]))
    asks[2].cancel()
    await asyncio.wait(asks[2:3])
    begin.set()
    await asyncio.gather(asks[3], again)
    assert sorted(set(checked) & {"a", "b", "c"}) == ["a", "b"]


async def test_a_verdict_of_a_killed_child_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(make_checkpoint(tmp_path, CheckpointSpec()))
    config = read_model_config(directory)
    checker = StructureChecker(directory, config.vocab_size, config.eos_token_ids)
    form = Structure(StructureKind.REGEX, "a")
    with monkeypatch.context() as patch:
        patch.setattr(
            checker, "_start", lambda: started(checker, "print('null', flush=True); input()")
        )
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="cannot be compiled"):
                await checker.check(form)
            assert checker._at_exit is None
    await checker.check(form)
    assert checker._child is not None
    finalizer = checker._at_exit
    assert isinstance(finalizer, weakref.finalize)
    assert finalizer.alive
    checker._forget()
    assert checker._verdicts[form] is None


def started(checker: StructureChecker, program: str) -> subprocess.Popen[bytes]:
    """A child that runs another program than the checker."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe)


def test_a_child_that_does_not_start_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def silent(*_: object, **kept: Any) -> subprocess.Popen[bytes]:
        children.append(popen([sys.executable, "-c", "input()"], **kept))
        return children[-1]

    monkeypatch.setattr(structures, "_WALL_LIMIT_S", 0.0)
    monkeypatch.setattr(subprocess, "Popen", silent)
    checker = StructureChecker(tmp_path, 400, [1])
    with pytest.raises(StartupError):
        checker._running()
    assert [child.poll() for child in children] == [-9]


HOSTILE = (
    Structure(StructureKind.JSON, '{"type": "integer", "multipleOf": 999983}'),
    Structure(
        StructureKind.GRAMMAR,
        "start: a0\na3000: /x/\n"
        + "".join(f"a{i}: a{i + 1} a{i + 1} a{i + 1}\n" for i in range(3000)),
    ),
)


async def test_a_form_that_takes_too_long_ends_the_child_and_is_refused(tmp_path: Path) -> None:
    """The library has no limit that these forms reach. The next form gets another child."""
    directory = Path(make_checkpoint(tmp_path, CheckpointSpec()))
    config = read_model_config(directory)
    checker = StructureChecker(directory, config.vocab_size, config.eos_token_ids)
    for form in HOSTILE:
        with pytest.raises(InvalidRequest, match="is too large, too deep or too complex"):
            await checker.check(form)
        await checker.check(Structure(StructureKind.REGEX, f"after {len(form.text)}"))
    checker._forget()


async def test_the_child_reads_the_vocabulary_before_the_first_form(smollm2: Path) -> None:
    config = read_model_config(smollm2)
    checker = StructureChecker(smollm2, config.vocab_size, config.eos_token_ids)
    checker.warm_up()
    loop = asyncio.get_running_loop()
    child = await loop.run_in_executor(checker._thread, lambda: checker._child)
    assert child is not None
    await checker.check(Structure(StructureKind.REGEX, "a"))
    assert checker._child is child
    checker._forget()
