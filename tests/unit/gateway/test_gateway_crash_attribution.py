"""Requests over which workers die, and the limits of their attempts."""

import pytest
from structlog.testing import capture_logs

from services.gateway.request.status import RequestStatus
from services.protocol.messages import Began
from services.runtime.errors import PoisonRequest, Unavailable

from .test_gateway_beams import goes_on, searching, until_searching
from .walk import MAX_TOKENS, ScriptedWorker, Walk, expected, generated, step


def begin(walk: Walk, worker: ScriptedWorker) -> None:
    """The worker reports that it computes the request."""
    walk.on_event(worker, Began("r1", walk.request.attempt.number))


async def until_computing(walk: Walk) -> None:
    """Wait until a prefill worker has begun the request."""
    await walk.until_prefilling()
    begin(walk, walk.prefill)


async def until_running(walk: Walk) -> None:
    """Wait until a decode worker has begun the request."""
    await walk.until_decoding()
    begin(walk, walk.decode)


async def test_setbacks_without_a_token_have_a_limit() -> None:
    """The client learns their number; their reasons, which name workers, are in the log."""
    walk = Walk()
    with capture_logs() as logs:
        for _ in range(4):
            await walk.until_prefilling()
            walk.on_lost(walk.decode, died=True)  # it had a slot there, and nothing more
    with pytest.raises(Unavailable, match=r"^4 attempts of this request were set back; try again$"):
        await walk.tokens()
    assert [line["why"] for line in logs] == ["decode worker d was lost"] * 4


async def test_a_request_that_waited_at_two_dead_workers_goes_on() -> None:
    """Found by chaos, seed 5: the store was stuck, so that neither worker had begun the request."""
    walk = Walk()
    for _ in range(2):
        await walk.until_prefilling()
        walk.on_lost(walk.prefill, died=True)
        assert walk.request.status is RequestStatus.QUEUED
    await walk.until_decoding()
    step(walk, 0, MAX_TOKENS - 1)
    assert await walk.tokens() == expected(MAX_TOKENS)


@pytest.mark.parametrize("num_waits", [0, 1, 2])
async def test_waiting_elsewhere_clears_nobody(num_waits: int) -> None:
    """A crash counts until the request gets a token; with the second one it is given up."""
    walk = Walk()
    await until_computing(walk)
    walk.on_lost(walk.prefill, died=True)
    for _ in range(num_waits):
        await walk.until_prefilling()
        walk.on_lost(walk.prefill, died=True)
    await until_computing(walk)
    walk.on_lost(walk.prefill, died=True)
    with pytest.raises(PoisonRequest, match="its prefill worker died twice"):
        await walk.tokens()


async def test_a_request_begun_at_one_worker_is_not_begun_at_the_next() -> None:
    walk = Walk()
    await until_computing(walk)
    walk.on_event(walk.decode, Began("r1", walk.request.attempt.number))  # nobody asked it
    walk.on_lost(walk.prefill, died=True)
    late = Began("r1", walk.request.attempt.number - 1)
    await walk.until_prefilling()
    walk.on_event(walk.prefill, late)
    walk.on_lost(walk.prefill, died=True)
    assert walk.request.status is RequestStatus.QUEUED


async def test_a_worker_that_is_lost_alive_did_not_crash() -> None:
    """A worker that is silent or has closed its stream did not die of a request."""
    walk = Walk()
    for _ in range(2):
        await until_computing(walk)
        walk.on_lost(walk.prefill, died=False)
    assert walk.request.status is RequestStatus.QUEUED


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "waiting"])
async def test_workers_that_are_lost_with_a_request_have_a_limit(begun: bool) -> None:
    """Also if a prefill worker gave the request a token each time: no decode worker gave it one. So
    a request ends that makes its workers hang, or kills them before they can report that they
    begin."""
    walk = Walk()
    for _ in range(4):
        assert walk.request.status is not RequestStatus.ENDED
        await (until_running(walk) if begun else walk.until_decoding())
        walk.on_lost(walk.decode, died=not begun)
    with pytest.raises(Unavailable, match="given up after 4 decode workers were lost"):
        await walk.tokens()


async def test_a_request_that_makes_progress_is_never_given_up() -> None:
    """Whatever the number of deaths: between two of them it got a token from a worker of the same
    role."""
    walk = Walk()
    for _ in range(MAX_TOKENS // 2 - 1):
        await until_running(walk)
        step(walk, 0)
        walk.on_lost(walk.decode, died=True)
    await until_running(walk)
    step(walk, 0, MAX_TOKENS - len(walk.output.sequences[0].tokens))
    assert await walk.tokens() == expected(MAX_TOKENS)


@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_a_token_of_the_other_role_clears_nobody(num_tokens: int) -> None:
    """Otherwise a request that kills decode workers would go on until its last token, since each
    attempt gets a token from its prefill worker. A request may kill in mid-stream, too."""
    walk = Walk()
    await until_running(walk)
    walk.on_event(walk.decode, generated(walk, *expected(1 + num_tokens)[1:]))
    walk.on_lost(walk.decode, died=True)
    await until_running(walk)
    walk.on_lost(walk.decode, died=True)
    with pytest.raises(PoisonRequest, match="its decode worker died twice"):
        await walk.tokens()


async def until_stepping(walk: Walk, num_steps: int) -> None:
    """Wait until a decode worker has begun the search and made so many steps after the first
    ticket."""
    await until_searching(walk)
    begin(walk, walk.decode)
    for _ in range(num_steps):
        walk.on_event(walk.decode, goes_on(walk))


async def test_a_search_that_kills_its_workers_at_a_step_is_given_up() -> None:
    """The steps before it are repeated each time, and are no progress."""
    walk = searching()
    for _ in range(2):
        await until_stepping(walk, num_steps=3)
        walk.on_lost(walk.decode, died=True)
    with pytest.raises(PoisonRequest, match="its decode worker died twice"):
        await walk.tokens()


async def test_a_search_is_not_blamed_for_what_others_have_done_before() -> None:
    """Nor for single deaths, as long as it makes progress; but there is a limit."""
    walk = searching()
    for num_steps in (2, 1, 0, 3):
        await until_stepping(walk, num_steps)
        walk.on_lost(walk.decode, died=True)
        assert walk.request.status is RequestStatus.QUEUED
    for _ in range(3):
        await until_stepping(walk, num_steps=1)
        walk.on_lost(walk.decode, died=True)
    with pytest.raises(Unavailable, match="given up after 4 decode workers were lost"):
        await walk.tokens()
