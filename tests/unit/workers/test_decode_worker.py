import asyncio
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from blockstore.errors import WorkerFenced
from blockstore.hashing import prefix_hashes
from services.engine.batch import Fault
from services.model.structured.grammar import Grammar
from services.model.structured.structure import Structure, StructureKind
from services.protocol.messages import Failed, Requeued, RequeueReason, Reserved, Step
from services.protocol.ticket import FinishReason
from services.protocol.worker_stream import RELOAD
from services.runtime.errors import InvalidRequest
from services.worker.roles.decode import Decode

from .conftest import WorkerPair
from .fakes import PROMPT, expected, ticket
from .runs import count, finished, outputs, prefill, start, tokens


async def test_a_ticket_is_continued_to_its_end(pair: WorkerPair) -> None:
    issued = await start(pair, ticket("r1", PROMPT, max_tokens=30))
    await pair.until(lambda: finished(pair.session, "r1"))
    assert tokens(pair.session, issued) == expected(PROMPT, 30)
    assert outputs(pair.session, "r1")[-1].finish_reason is FinishReason.LENGTH
    # 10 is the prefill worker's: counted from the start of the prompt, none twice and none left out
    assert [output.position for output in outputs(pair.session, "r1")] == list(range(11, 40))
    await pair.until_empty()
    # 10 + 30 tokens, the last one's KV never computed: 9 full blocks stay cached.
    assert (await pair.store.stats("pool")).num_cached == 9


async def test_a_second_turn_finds_what_the_first_decoded(pair: WorkerPair) -> None:
    issued = await start(pair, ticket("r1", PROMPT, max_tokens=10))
    await pair.until(lambda: finished(pair.session, "r1"))
    await pair.until_empty()
    second = (*PROMPT, *tokens(pair.session, issued), 7, 8)
    again = await prefill(pair, ticket("r2", second))
    assert again.num_cached_tokens == 16  # of the 19 whose KV was computed: 4 full blocks


async def test_a_sequence_that_is_not_finite_fails_alone(pair: WorkerPair) -> None:
    """The sequences beside it get every token, it gets an error with the reason, and none of its
    blocks can be adopted: not even finished ones, whose KV may be the cause."""
    poisoned = tuple(range(200, 210))
    pair.decode_model.gate.clear()
    good = await start(pair, ticket("r1", PROMPT, max_tokens=20))
    await start(pair, ticket("r2", poisoned, max_tokens=20))
    assert await pair.store.match("pool", prefix_hashes(bytes(16), poisoned, 4)) == 2
    pair.decode_model.poison = poisoned[0]
    pair.decode_model.gate.set()
    await pair.until(lambda: finished(pair.session, "r1") and bool(pair.session.of(Failed)))
    assert tokens(pair.session, good) == expected(PROMPT, 20)
    (failed,) = pair.session.of(Failed)
    assert (failed.request_id, failed.code) == ("r2", "poison_request")
    assert "not finite" in failed.message
    assert not outputs(pair.session, "r2")
    await pair.until_empty()
    assert await pair.store.match("pool", prefix_hashes(bytes(16), poisoned, 4)) == 0
    assert await pair.store.match("pool", prefix_hashes(bytes(16), PROMPT, 4)) == 2
    assert pair.decode_figures.get_sample_value("quire:num_broken_total") == 1


async def test_a_grammar_that_cannot_go_on_ends_its_request_and_breaks_no_block(
    pair: WorkerPair,
) -> None:
    pair.decode_model.gate.clear()
    good = await start(pair, ticket("r1", PROMPT, max_tokens=20))
    prompt = tuple(range(200, 210))
    await start(pair, ticket("r2", prompt, max_tokens=20))
    pair.decode_model.poison, pair.decode_model.poisoned_by = prompt[0], Fault.GRAMMAR
    pair.decode_model.gate.set()
    await pair.until(lambda: finished(pair.session, "r1") and bool(pair.session.of(Failed)))
    assert tokens(pair.session, good) == expected(PROMPT, 20)
    (failed,) = pair.session.of(Failed)
    assert (failed.request_id, failed.code) == ("r2", "invalid_request")
    assert "its structured output cannot go on" in failed.message
    await pair.until_empty()
    assert await pair.store.match("pool", prefix_hashes(bytes(16), prompt, 4)) == 2
    assert pair.decode_figures.get_sample_value("quire:num_broken_total") == 0


async def test_a_worker_without_a_tokenizer_refuses_structured_output(pair: WorkerPair) -> None:
    asked = ticket("r1", PROMPT)
    structure = Structure(StructureKind.REGEX, "a")
    asked = replace(asked, sampling=replace(asked.sampling, structure=structure))
    with pytest.raises(InvalidRequest, match="no tokenizer for structured output"):
        pair.prefill.role.submit(pair.session, asked)


async def test_an_abort_of_a_sequence_that_is_not_finite_is_not_answered(pair: WorkerPair) -> None:
    """Its blocks get no valid stamps, so that no recovery publishes them again."""
    pair.decode_model.gate.clear()
    pair.decode_model.poison = PROMPT[0]
    issued = await start(pair, ticket("r1", PROMPT, max_tokens=20))
    await pair.until(lambda: pair.decode_model.num_begun == 1)
    assert len(pair.arena.stamps.complete_blocks([issued.holder_id])[issued.holder_id]) == 2
    pair.decode.role.abort(pair.session, *issued.key)
    pair.decode_model.gate.set()
    await pair.until_empty()
    assert pair.session.of(Failed) == []
    assert pair.arena.stamps.complete_blocks([issued.holder_id]) == {}


async def test_all_tokens_of_a_step_go_in_one_message(pair: WorkerPair) -> None:
    pair.decode_model.gate.clear()
    for number in (1, 2, 3):
        await start(pair, ticket(f"r{number}", (number,), max_tokens=5))
    await pair.until(lambda: pair.decode.role.load().num_running == 3)
    pair.decode_model.gate.set()
    await pair.until(lambda: all(finished(pair.session, f"r{n}") for n in (1, 2, 3)))
    assert max(len(step.outputs) for step in pair.session.of(Step)) == 3


async def test_slots_are_granted_while_there_are_some(pair: WorkerPair) -> None:
    for number in (1, 2, 3):
        pair.decode.role.reserve(pair.session, f"r{number}", 1, 6)
    pair.decode.role.reserve(pair.session, "r1", 1, 1)
    assert [event.granted for event in pair.session.of(Reserved)] == [True, True, False, False]


async def test_the_deadline_ends_a_running_sequence(pair: WorkerPair) -> None:
    issued = await prefill(pair, ticket("r1", PROMPT, max_tokens=900))
    pair.decode_model.gate.clear()
    pair.decode.role.reserve(pair.session, "r1", 1, 1)
    pair.decode.role.admit(pair.session, replace(issued, timeout_ms=20))
    await pair.until(lambda: pair.decode.role.load().num_running == 1)
    await pair.until(lambda: all(job.ending for job in pair.decode.role.jobs))
    pair.decode_model.gate.set()
    await pair.until(lambda: bool(pair.session.of(Failed)))
    assert pair.session.of(Failed)[0].code == "deadline_exceeded"
    await pair.until_empty()


async def test_a_fenced_worker_ends(pair: WorkerPair) -> None:
    """Its requests continue elsewhere; its blocks are free once it is gone."""
    worker = await pair.another("fenced", Decode)
    running = asyncio.create_task(worker.run())
    await pair.store.fence("pool", "fenced")
    with pytest.raises(WorkerFenced):
        await asyncio.wait_for(running, timeout=10)


async def test_figures_are_those_of_the_worker(pair: WorkerPair) -> None:
    """The prefill worker draws the first of 500 tokens; the decode worker's load is shown while it
    runs."""
    pair.decode_model.gate.clear()
    await start(pair, ticket("r1", PROMPT, max_tokens=500))
    await pair.until(lambda: figure(pair, "num_requests_running") == 1)
    assert figure(pair, "num_free_slots") == 15
    assert count(pair.prefill.metrics.generation_tokens) == 1
    pair.decode_model.gate.set()
    pair.decode.role.abort(pair.session, "r1", 1)
    await pair.until(lambda: figure(pair, "num_requests_running") == 0)
    assert figure(pair, "num_free_slots") == 16


def figure(pair: WorkerPair, name: str) -> float | None:
    return pair.decode_figures.get_sample_value(f"quire:{name}")


async def test_draining_lets_what_runs_finish(pair: WorkerPair) -> None:
    issued = await start(pair, ticket("r1", PROMPT, max_tokens=20))
    assert pair.decode.drain() == 1
    pair.decode.role.reserve(pair.session, "r2", 1, 1)
    assert pair.session.of(Reserved)[-1].granted is False
    async with asyncio.timeout(10):
        await pair.decode.drained()
    assert tokens(pair.session, issued) == expected(PROMPT, 20)
    await pair.until_empty()


async def test_a_worker_that_reloads_returns_what_runs_and_what_comes_late(
    pair: WorkerPair,
) -> None:
    """A ticket may come on slots that were reserved before; it is returned, too."""
    await start(pair, ticket("r1", PROMPT, max_tokens=500))
    late = await prefill(pair, ticket("r2", PROMPT, max_tokens=500))
    pair.decode.role.reserve(pair.session, "r2", 1, 1)
    pair.decode.drain(RELOAD)
    with pytest.raises(InvalidRequest, match="drains already"):
        pair.decode.drain("prefill")
    drained = asyncio.create_task(pair.decode.drained())
    pair.decode.role.admit(pair.session, late)
    async with asyncio.timeout(10):
        await drained
    back = {(one.request_id, one.reason) for one in pair.session.of(Requeued)}
    assert back == {(name, RequeueReason.DRAINING) for name in ("r1", "r2")}
    await pair.until_empty()


class SlowGrammars:
    """Grammars that are compiled when the test says so."""

    def __init__(self) -> None:
        self.compiled: Future[Any] = Future()

    def get(self, structure: Structure) -> Grammar:
        return Grammar(self.compiled, 1000)


async def test_others_run_while_a_grammar_is_compiled(pair: WorkerPair) -> None:
    """Its request begins when the grammar is compiled, and fails if that fails; one that was
    aborted before does not begin."""
    grammars = pair.prefill.grammars = SlowGrammars()  # type: ignore[assignment]
    structure = Structure(StructureKind.REGEX, "a")
    for name in ("r1", "r2"):
        asked = ticket(name, PROMPT)
        asked = replace(asked, sampling=replace(asked.sampling, structure=structure))
        pair.prefill.role.submit(pair.session, asked)
    await prefill(pair, ticket("r3", tuple(range(50, 60))))
    pair.prefill.role.abort(pair.session, "r2", 1)
    grammars.compiled.set_exception(InvalidRequest("no such form"))
    await pair.until(lambda: bool(pair.session.of(Failed)))
    (failed,) = pair.session.of(Failed)
    assert (failed.request_id, failed.code, failed.message) == (
        "r1",
        "invalid_request",
        "no such form",
    )


async def test_a_worker_that_ends_cancels_no_compilation_that_others_need(pair: WorkerPair) -> None:
    """The grammars outlive the worker's role: the next role would get a cancelled compilation."""
    grammars = pair.prefill.grammars = SlowGrammars()  # type: ignore[assignment]
    asked = ticket("r1", PROMPT)
    structure = Structure(StructureKind.REGEX, "a")
    asked = replace(asked, sampling=replace(asked.sampling, structure=structure))
    pair.prefill.role.submit(pair.session, asked)
    await pair.until(lambda: bool(pair.prefill.role.running))
    pair.prefill.role.abort(pair.session, "r1", 1)
    await pair.until_empty()
    await pair.prefill.stop()
    assert not grammars.compiled.cancelled()


async def test_a_deadline_during_the_last_step_does_not_hide_the_end(pair: WorkerPair) -> None:
    """The gateway gets the one of the two that came first."""
    issued = await prefill(pair, ticket("r1", PROMPT, max_tokens=2))
    pair.decode_model.gate.clear()
    pair.decode.role.reserve(pair.session, "r1", 1, 1)
    pair.decode.role.admit(pair.session, replace(issued, timeout_ms=20))
    await pair.until(lambda: pair.decode_model.num_begun == 1)
    await pair.until(lambda: all(job.ending for job in pair.decode.role.jobs))
    pair.decode_model.gate.set()
    await pair.until_empty()
    assert finished(pair.session, "r1")
    assert tokens(pair.session, issued) == expected(PROMPT, 2)
