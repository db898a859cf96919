"""The counts of a simulation: small cases by hand, large ones compared with a count of every
slot."""

import random
from collections.abc import Callable, Sequence

import pytest

from advisor.advice import DoesNotFit
from advisor.workload import RecordedRequest
from bench.kv.simulation import PagedMemory, SimulatedRequest, Usage, simulate
from blockstore.memory.ledger import Ledger
from services.pool.allotment import blocks_at_admission, blocks_for_decode


async def paged(
    num_slots: int, block_size: int, max_model_len: int | None = None, watermark: float = 0.0
) -> PagedMemory:
    return await PagedMemory.of(num_slots, block_size, max_model_len, watermark)


def test_a_sequence_begins_with_room_for_one_more_token() -> None:
    assert [blocks_at_admission(num_tokens, 4) for num_tokens in (1, 3, 4, 7, 8)] == [1, 1, 2, 2, 3]


def test_a_sequence_goes_on_with_room_ahead_and_never_beyond_its_end() -> None:
    assert [blocks_for_decode(5, 8, longest, 4) for longest in (6, 9, 13, 100)] == [2, 3, 4, 4]


async def test_a_request_equals_hand_computed_times() -> None:
    """A prompt of 4 and 3 tokens more in blocks of 4: two blocks, of which three steps see

    KV    4  5  6
    tail  0  3  2
    ahead 4  0  0   slots
    """
    memory = await paged(32, 4)
    outcome = await simulate([RecordedRequest(4, 3)], memory)
    assert outcome.num_steps == 3
    assert outcome.utilization == 15 / 24
    assert outcome.wasted == (5 / 24, 4 / 24)
    assert outcome.utilization_at_peak == 6 / 8


async def test_an_unknown_length_is_estimated_ahead() -> None:
    """The same request, for which four blocks are held from the second step on: 8 tokens ahead."""
    memory = await paged(32, 4, max_model_len=100)
    outcome = await simulate([RecordedRequest(4, 3)], memory)
    assert outcome.utilization == 15 / 40
    assert outcome.wasted == (5 / 40, 20 / 40)


async def test_a_pool_that_is_too_small_makes_the_last_one_give_way() -> None:
    """Two requests that each end with 3 blocks, in a pool of 4: the second is preempted after the
    first step, waits until the first ends with step 8, and then needs 7 more tokens."""
    memory = await paged(16, 4)
    outcome = await simulate([RecordedRequest(4, 8), RecordedRequest(4, 8)], memory)
    assert outcome.num_preemptions == 1
    assert outcome.num_steps == 15
    assert outcome.mean_running == 16 / 15
    assert outcome.most_running == 2
    assert outcome.utilization == 120 / 180


async def test_a_shared_prefix_counts_once() -> None:
    """Two prompts of two shared blocks; each has an own third block, which is still empty."""
    memory = await paged(32, 4)
    requests = [
        SimulatedRequest(number, RecordedRequest(8, 2, 0.0, "a", 8), num_tokens=8)
        for number in (0, 1)
    ]
    for request in requests:
        assert await memory.admit(request)
        request.num_computed = 8
        await memory.commit(request)
    assert await memory.usage(requests) == Usage(num_reserved=16, num_kv=8, wasted=(0, 8))


async def test_prompts_of_different_prefixes_share_nothing() -> None:
    memory = await paged(32, 4)
    requests = [
        SimulatedRequest(n, RecordedRequest(8, 2, 0.0, f"{n}", 8), num_tokens=8) for n in (0, 1)
    ]
    for request in requests:
        assert await memory.admit(request)
        request.num_computed = 8
        await memory.commit(request)
    assert (await memory.usage(requests)).num_reserved == 24


class Checked(PagedMemory):
    """Counts every slot of every held block itself, from the store's ledger."""

    num_looks = 0

    async def usage(self, running: Sequence[SimulatedRequest]) -> Usage:
        usage = await super().usage(running)
        size, ledger = self._spec.block_size, self.ledger()
        filled: dict[int, int] = {}
        for request in running:
            holder = ledger.holders[f"{request.number}.{request.num_starts - 1}"]
            for index, block_id in enumerate(holder.acquired):
                here = min(max(request.num_computed - index * size, 0), size)
                filled[block_id] = max(filled.get(block_id, 0), here)
        tail = sum(size - here for here in filled.values() if here)
        ahead = size * sum(not here for here in filled.values())
        assert usage == Usage(len(filled) * size, sum(filled.values()), (tail, ahead))
        assert ledger.blocks.num_available + len(filled) == self._spec.num_blocks
        self.num_looks += 1
        return usage

    def ledger(self) -> Ledger:
        return self._store.ledger(self._spec.pool_id)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("max_model_len", [None, 64])
@pytest.mark.parametrize("seed", range(3))
async def test_every_slot_is_accounted_for_at_every_step(
    block_size: int, max_model_len: int | None, seed: int
) -> None:
    """On a pool that is short of blocks, with shared prefixes and preemptions; at the end all of it
    is free."""
    random_ = random.Random(seed)
    asked = []
    for _ in range(40):
        num_prompt = random_.randint(1, 40)
        num_shared = random_.randint(0, num_prompt)
        prefix = random_.choice("abc") if num_shared else ""
        asked.append(RecordedRequest(num_prompt, random_.randint(1, 24), 0.0, prefix, num_shared))
    memory = await Checked.of(160, block_size, max_model_len)
    outcome = await simulate(asked, memory)
    assert memory.num_looks == outcome.num_steps
    assert outcome.num_preemptions > 0
    assert outcome.utilization + sum(outcome.wasted) == pytest.approx(1.0)
    assert memory.ledger().stats().num_held == 0
    assert not memory.ledger().waiters


async def test_requests_are_admitted_in_order() -> None:
    """A long request that does not fit delays the short ones behind it."""
    memory = await paged(64, 4)
    outcome = await simulate(
        [RecordedRequest(20, 30), RecordedRequest(40, 8), RecordedRequest(4, 4)], memory
    )
    assert outcome.most_running == 2  # the second and the third, when the first has ended
    assert outcome.num_steps == 30 + 8


@pytest.mark.parametrize(
    ("asked", "memory"),
    [
        (RecordedRequest(30, 3), lambda: paged(32, 4)),
        (RecordedRequest(30, 2), lambda: paged(40, 64)),
    ],
)
async def test_a_request_that_never_fits_is_reported(
    asked: RecordedRequest, memory: Callable[[], object]
) -> None:
    made = memory()
    with pytest.raises(DoesNotFit, match="never fits a pool of"):
        await simulate([asked], await made)  # type: ignore[misc]


async def test_the_watermark_stays_free_at_admission() -> None:
    """Of 10 blocks 5 stay free for running requests: 2 requests of 2 blocks are admitted, not 5."""
    requests = [RecordedRequest(4, 1)] * 6
    assert (await simulate(requests, await paged(40, 4))).most_running == 5
    assert (await simulate(requests, await paged(40, 4, watermark=0.5))).most_running == 2
