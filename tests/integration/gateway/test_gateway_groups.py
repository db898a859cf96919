"""Several sequences of one prompt, over real streams, with fake workers."""

from functools import partial
from operator import not_
from typing import Any

import pytest

from quire.v1 import decode_pb2
from services.gateway.output.delta import Delta
from services.runtime.errors import InvalidRequest, NoWorker, PromptTooLong
from tests.waiting import until

from .conftest import PROMPT, SPEC, Call, asked
from .fakes import FakeDecode, FakePrefill, expected

NUM = 3
N = {"n": NUM}


def tokens_of(deltas: list[Delta]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for delta in deltas:
        tokens.setdefault(delta.index, []).extend(delta.token_ids)
    return tokens


def all_of(num_tokens: int = 8, num: int = NUM) -> dict[int, list[int]]:
    return {index: expected(PROMPT, num_tokens, index) for index in range(num)}


async def test_a_group_gets_its_slots_before_those_behind_it(make_harness: Any) -> None:
    """Single requests hold all slots. While the group waits, slots that become free do not go to
    later single requests."""
    prefill, decode = FakePrefill(), FakeDecode(num_slots=4)
    harness = await make_harness(prefill, decode)
    decode.pause_after = 2
    first = [Call(harness.gateway, asked(f"first-{n}", max_tokens=4)) for n in range(4)]
    await until(lambda: len(decode.running) == 4)
    group = Call(harness.gateway, asked("group", sampling={"n": 4}))
    await harness.num_waiting(1)
    later = []
    for number in range(4):
        later.append(Call(harness.gateway, asked(f"later-{number}")))
        await harness.num_waiting(2 + number)
    for number, call in enumerate(first):  # one after another gets free
        await call.cancel()
        await until(partial(decode.running.get, f"first-{number}"), not_)
    decode.go_on(pause_after=8)
    for call in (group, *later):
        await call.result()
    assert tokens_of(group.deltas) == all_of(num=4)
    order = [ticket.request_id for ticket in prefill.submitted[4:]]
    assert order == ["group", *(f"later-{number}" for number in range(4))]


async def test_a_worker_with_room_for_all_is_chosen(make_harness: Any) -> None:
    small, large = FakeDecode("decode-1", num_slots=2), FakeDecode("decode-2", num_slots=3)
    harness = await make_harness(FakePrefill(), small, large)
    await Call(harness.gateway, asked(sampling=N)).result()
    assert not small.commands(decode_pb2.Reserve)


@pytest.mark.parametrize(
    ("n", "error", "problem"),
    [
        (0, InvalidRequest, r"n is 0, not in \[1, 64\]"),
        (65, InvalidRequest, r"n is 65, not in \[1, 64\]"),
        (9, InvalidRequest, "9 sequences; the decode workers run at most 8 at a time"),
    ],
)
async def test_a_group_that_no_worker_takes_is_refused_with_the_numbers(
    make_harness: Any, n: int, error: type[Exception], problem: str
) -> None:
    workers = FakeDecode("decode-1", num_slots=8), FakeDecode("decode-2", num_slots=2)
    harness = await make_harness(FakePrefill(), *workers)
    with pytest.raises(error, match=problem):
        await Call(harness.gateway, asked(sampling={"n": n})).result()
    assert not any(worker.seen for worker in workers)


async def test_a_group_that_never_fits_is_refused_with_the_numbers(harness: Any) -> None:
    """The prompt's full blocks are shared, and each sequence needs the rest."""
    num_own = SPEC.num_blocks // 8
    prompt = (1,) * 40
    num_tokens = (num_own + 2) * 16 - 40
    wide = asked("r1", num_tokens, prompt=prompt, sampling={"n": 8})
    with pytest.raises(PromptTooLong, match=rf", 8 times, need {8 * num_own + 2} blocks"):
        await Call(harness.gateway, wide).result()


async def test_a_group_whose_worker_has_gone_for_good_is_told_so(make_harness: Any) -> None:
    """Another worker is there, but with fewer slots than sequences."""
    large = FakeDecode("decode-1", num_slots=8)
    harness = await make_harness(FakePrefill(), large, patience_s=0.2)
    large.pause_after = 2
    call = Call(harness.gateway, asked(sampling={"n": 8}))
    await until(lambda: "r1" in large.running)
    await harness.add(FakeDecode("decode-2", num_slots=2))
    await harness.registry.withdraw("decode-1")
    large.die()
    with pytest.raises(NoWorker, match="8 sequences at a time"):
        await call.result()
