"""The checks of structured output by a gateway, in a child process."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL
from threading import Event
from typing import Any

import pytest

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from services.gateway.workers.models.structures import StructureChecker
from services.model.checkpoint.reading import read_model_config
from services.model.structured.structure import Structure, StructureKind
from services.runtime.errors import InvalidRequest, StartupError
from tests.waiting import until


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


HOSTILE = (
    Structure(StructureKind.JSON, '{"type": "integer", "multipleOf": 999983}'),
    Structure(
        StructureKind.GRAMMAR,
        "start: a0\na3000: /x/\n"
        + "".join(f"a{i}: a{i + 1} a{i + 1} a{i + 1}\n" for i in range(3000)),
    ),
)


def children() -> set[int]:
    """The processes that this one has started and not ended."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


@pytest.fixture
def checker(tmp_path: Path) -> Iterator[StructureChecker]:
    directory, before = Path(make_checkpoint(tmp_path, CheckpointSpec())), children()
    config = read_model_config(directory)
    yield StructureChecker(directory, config.vocab_size, config.eos_token_ids)
    for child in children() - before:
        os.kill(child, SIGKILL)


async def test_a_form_that_takes_too_long_ends_the_child_and_is_refused(
    checker: StructureChecker,
) -> None:
    """The library has no limit that these forms reach. The next form gets another child. Such a
    verdict is not kept: on a quiet machine the form might be checked in time."""
    before = children()
    for form in (*HOSTILE, HOSTILE[0]):
        is_there = children() - before
        with pytest.raises(InvalidRequest, match="is too large, too deep or too complex"):
            await checker.check(form)
        assert not is_there & children()
        await checker.check(Structure(StructureKind.REGEX, f"after {len(form.text)}"))


async def test_a_child_that_was_killed_is_replaced(checker: StructureChecker) -> None:
    before = children()
    for text in "ab":
        await checker.check(Structure(StructureKind.REGEX, text))
        (child,) = children() - before
        os.kill(child, SIGKILL)
        stat = Path(f"/proc/{child}/stat")
        await until(lambda: " Z " in stat.read_text())  # noqa: B023


async def test_a_child_that_does_not_start_is_ended(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(StartupError):
        await StructureChecker(tmp_path, 400, [1]).check(Structure(StructureKind.REGEX, "a"))
    assert children() == before


async def test_the_child_reads_the_vocabulary_before_the_first_form(
    checker: StructureChecker,
) -> None:
    before = children()
    checker.warm_up()
    child = await until(lambda: children() - before)
    await checker.check(Structure(StructureKind.REGEX, "a"))
    assert children() - before == child
