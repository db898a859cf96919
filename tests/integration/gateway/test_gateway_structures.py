"""The checks of structured output by a gateway, in a child process."""

import asyncio
from pathlib import Path
from threading import Event

import pytest

from services.common.structured.structure import Structure, StructureKind
from services.common.text.model_config import ModelConfig
from services.gateway.intake.structures import StructureChecker


async def test_checks_that_nobody_waits_for_are_left_out(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that ask for costly checks and leave do not keep others waiting."""
    config = ModelConfig.from_directory(smollm2)
    checker = StructureChecker(smollm2, config.vocab_size, config.eos_token_ids)
    begin, checked = Event(), list[str]()
    verdict = checker._verdict

    def slow(structure: Structure) -> str | None:
        begin.wait()
        answer = verdict(structure)
        checked.append(structure.text if answer is None else answer)
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
    await asyncio.wait([*checker._waiting.values(), again])
    assert sorted(set(checked) & {"a", "b", "c"}) == ["a", "b"]
