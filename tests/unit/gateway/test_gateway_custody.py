"""Requests over which workers die, and how often they are begun again."""

import pytest

from services.common.errors import PoisonRequest, Unavailable
from services.common.ticket import FinishReason
from services.gateway.messages import Admit
from services.gateway.stage import Stage

from .walk import MAX_TOKENS, PROMPT, ScriptedWorker, Walk, expected, generated, next_token


async def test_setbacks_without_a_token_have_a_limit() -> None:
    walk = Walk()
    for _ in range(4):
        assert await walk.reserve()
        walk.start()
        walk.journey.on_lost(walk.decode)  # it had a slot there, and nothing more
    with pytest.raises(Unavailable, match="decode worker d was lost"):
        await walk.tokens()


async def test_a_request_over_which_two_workers_die_is_given_up() -> None:
    walk = Walk()
    for _ in range(2):
        assert await walk.reserve()
        walk.start()
        walk.journey.on_lost(walk.prefill)
    with pytest.raises(PoisonRequest, match="its prefill worker died twice"):
        await walk.tokens()


async def test_a_request_that_makes_progress_is_never_given_up() -> None:
    """However often workers die: between two deaths it got a token from one of the same role."""
    walk = Walk()
    for _ in range(MAX_TOKENS // 2 - 1):
        await walk.until_decoding()
        walk.journey.on_event(
            walk.decode,
            generated(
                walk, next_token([*PROMPT, *expected(walk.journey.client.num_tokens - len(PROMPT))])
            ),
        )
        walk.journey.on_lost(walk.decode)
    await walk.until_decoding()
    rest = expected(MAX_TOKENS)[walk.journey.client.num_tokens - len(PROMPT) :]
    walk.journey.on_event(walk.decode, generated(walk, *rest, finish=FinishReason.LENGTH))
    assert await walk.tokens() == expected(MAX_TOKENS)


async def test_a_token_of_the_other_role_clears_nobody() -> None:
    """Else a request that kills decode workers would go on until its last token: every attempt gets
    one from its prefill worker."""
    walk = Walk()
    await walk.until_decoding()
    walk.journey.on_lost(walk.decode)
    await walk.until_decoding()
    walk.journey.on_lost(walk.decode)
    with pytest.raises(PoisonRequest, match="its decode worker died twice"):
        await walk.tokens()


async def suspects(number: int) -> tuple[list[Walk], ScriptedWorker]:
    """Each of them has lost a decode worker, and all go to another one."""
    walks, decode = [Walk() for _ in range(number)], ScriptedWorker("d2")
    for walk in walks:
        await walk.until_decoding()
        walk.journey.on_lost(walk.decode)
        walk.decode = decode
        await walk.until_decoding()
    return walks, decode


async def test_suspects_are_sent_to_a_worker_one_at_a_time() -> None:
    """The second goes when the first has a token, the third when the second is cancelled."""
    walks, decode = await suspects(3)

    def num_sent() -> int:
        return sum(isinstance(command, Admit) for command in decode.sent)

    first, second, _third = walks
    assert num_sent() == 1
    token = next_token([*PROMPT, *expected(2)])
    first.journey.on_event(decode, generated(first, token))
    assert num_sent() == 2
    second.journey.end()
    assert num_sent() == 3


async def test_who_stood_in_line_when_the_worker_died_is_no_more_suspect_than_before() -> None:
    walks, decode = await suspects(2)
    decode.connected = False
    for walk in walks:
        walk.journey.on_lost(decode)
    there, in_line = walks
    assert isinstance(there.desk.ended[0], PoisonRequest)
    assert in_line.journey.stage is Stage.QUEUED
    assert not in_line.desk.ended
