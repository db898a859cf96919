"""Prompts that are asked again come back from files when the pool has lost them."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

from blockstore.errors import WorkerFenced
from blockstore.hashing import prefix_hashes
from blockstore.records import Allocation
from services.engine.batch import Fault
from services.engine.sequences.results import Advance
from services.pool.stamps import Stamps
from services.protocol.block_keys import BlockKeys
from services.protocol.ticket import Ticket, TicketSequence
from services.runtime.metrics import WorkerMetrics
from services.worker.file_cache.block_files import BlockFiles
from services.worker.file_cache.file_cache import FileCache
from tests.waiting import wait_until

from .conftest import MakePair, WorkerPair
from .fakes import SAMPLED, expected, ticket
from .kept_blocks import BUDGET, FINGERPRINT, kept
from .preempting import evict_all
from .runs import count, prefill

PROMPT = tuple(range(100, 122))  # 5 blocks of 4 tokens, and 2 tokens
HASHES = prefix_hashes(bytes(16), PROMPT, 4)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
async def pair(make_pair: MakePair, cache: Path) -> WorkerPair:
    return await make_pair(cache=cache)


async def ask(pair: WorkerPair, number: int, prompt: tuple[int, ...] = PROMPT) -> Ticket:
    issued = await prefill(pair, ticket(f"r{number}", prompt))
    assert issued.sequences[0].token_ids == tuple(expected(prompt, 1))
    return issued


async def asked_twice(pair: WorkerPair, cache: Path, prompt: tuple[int, ...] = PROMPT) -> None:
    """Two prompts, whose blocks are in files and no longer in the pool."""
    for number in (1, 2):
        await ask(pair, number, prompt)
    await pair.until(lambda: len(kept(cache)) == len(prompt) // 4)
    pair.prefill.role.requeue_all()
    await pair.until_empty()
    evict_all(pair)
    pair.arena.num_computed = 0


def metric(pair: WorkerPair, name: str) -> float:
    return count(getattr(pair.prefill.metrics, f"file_cache_{name}"))


async def test_prompt_that_was_asked_twice_comes_back(pair: WorkerPair, cache: Path) -> None:
    await asked_twice(pair, cache)
    assert (await ask(pair, 3)).num_cached_tokens == 20
    assert pair.arena.num_computed == 2
    assert [metric(pair, name) for name in ("written_blocks", "hits", "errors")] == [5, 5, 0]
    assert await pair.store.match("pool", HASHES) == 5, "other prompts find the blocks in the pool"
    await ask(pair, 4)
    assert metric(pair, "hits") == 5


async def test_prompt_that_was_asked_once_has_no_files(pair: WorkerPair, cache: Path) -> None:
    """Nor has what comes behind the tokens that two prompts share."""
    await ask(pair, 1)
    await ask(pair, 2, (*PROMPT[:8], *range(200, 220)))
    await pair.until(lambda: len(kept(cache)) == 2)
    assert {path.name for path in kept(cache)} == {each.hex() for each in HASHES[:2]}


async def test_prompt_that_files_have_as_a_whole_computes_its_last_token(
    pair: WorkerPair, cache: Path
) -> None:
    await asked_twice(pair, cache, PROMPT[:8])
    assert (await ask(pair, 3, PROMPT[:8])).num_cached_tokens == 7
    assert pair.arena.num_computed == 1


async def test_files_continue_what_the_pool_still_has(pair: WorkerPair, cache: Path) -> None:
    """For all sequences of a request."""
    await asked_twice(pair, cache)
    await ask(pair, 3, PROMPT[:10])
    pair.arena.num_computed = 0
    two = ticket("r4", PROMPT, sampling=SAMPLED, sequences=(TicketSequence(0), TicketSequence(1)))
    issued = await prefill(pair, two)
    assert (metric(pair, "hits"), pair.arena.num_computed) == (5, 2)
    assert len({state.block_ids[:5] for state in issued.sequences}) == 1


@pytest.mark.parametrize("damaged", [0, 2])
async def test_flipped_byte_is_computed_instead(
    pair: WorkerPair, cache: Path, damaged: int
) -> None:
    """The blocks before it come from files."""
    await asked_twice(pair, cache)
    path = cache / FINGERPRINT / HASHES[damaged].hex()
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    assert (await ask(pair, 3)).num_cached_tokens == 4 * damaged
    assert pair.arena.num_computed == len(PROMPT) - 4 * damaged
    assert metric(pair, "errors") == 1


async def test_blocks_of_a_broken_sequence_leave_the_files(pair: WorkerPair, cache: Path) -> None:
    """Their KV may be the cause, and would break the next request too."""
    await asked_twice(pair, cache)
    pair.decode.retract(Advance("h", broken=tuple(enumerate(HASHES[:3]))), Fault.NOT_FINITE)
    await pair.until(lambda: len(kept(cache)) == 2)
    assert (await ask(pair, 3)).num_cached_tokens == 0


class Alone:
    """A file cache of one committed block. Its thread asks `clock` once for each block."""

    def __init__(self, cache: Path) -> None:
        self.stamps, self.clock, self.check_fence = (
            Stamps(None, 1, 4),
            Mock(return_value=1),
            Mock(),
        )
        self.stamps.mark_owned([0], "h")
        self.stamps.complete(0, HASHES[0], bytes(16), PROMPT[:4])
        self.block = Mock(side_effect=lambda block_id: memoryview(bytearray(64)))
        files = BlockFiles(cache, FINGERPRINT, "prefill-1", BUDGET, 1)
        self.metrics, self.check_fence = WorkerMetrics(CollectorRegistry()), Mock()
        checks = self.check_fence, self.clock
        blocks = Mock(content=self.block)
        self.files = FileCache(files, self.stamps, lambda: blocks, self.metrics, *checks)

    def keep(self) -> None:
        num_asked = self.clock.call_count
        self.files.keep([(0, HASHES[0])], {HASHES[0]: 0})
        wait_until(lambda: self.clock.call_count > num_asked)


@pytest.fixture
def alone(cache: Path) -> Iterator[Alone]:
    made = Alone(cache)
    yield made
    made.files.close()


def test_block_that_the_pool_overwrites_is_not_written(cache: Path, alone: Alone) -> None:
    """Neither while it is read, nor before the thread comes to it."""

    def overwritten(block_id: int) -> memoryview:
        alone.stamps.mark_owned([0], "another")
        return memoryview(bytearray(64))

    alone.block.side_effect = overwritten
    alone.keep()
    alone.keep()
    alone.files.close()
    assert kept(cache) == []
    assert alone.block.call_count == 1


def test_blocks_are_kept_once_a_minute(alone: Alone) -> None:
    """So that files of a prompt that the pool always has are not removed as unused."""
    assert alone.files.asked(HASHES) == {}
    assert alone.files.asked(HASHES[:2]) == {HASHES[0]: 0, HASHES[1]: 1}
    assert alone.files.asked(HASHES[:3]) == {HASHES[2]: 2}
    alone.clock.return_value = 62
    assert alone.files.asked(HASHES[:1]) == {HASHES[0]: 0}


def test_full_disk_pauses_the_writing(cache: Path, alone: Alone) -> None:
    """A file in the place of the directory is the error here."""
    cache.touch()
    errors = alone.metrics.file_cache_errors
    alone.keep()
    wait_until(lambda: count(errors) == 1)
    alone.keep()
    cache.unlink()
    alone.clock.return_value = 62
    alone.keep()
    wait_until(lambda: kept(cache))
    assert count(errors) == 1


def test_slow_disk_is_not_read(cache: Path, alone: Alone) -> None:
    """At 1 ms for a block of 4 tokens."""
    asked = Allocation("h", 1, (0, 1, 2, 3, 4, 5), 0), BlockKeys.of(ticket("r1", PROMPT), 4)
    alone.files.block_s = 0.001
    assert not alone.files.helps(*asked, 251_000), "there is no file"
    alone.keep()
    wait_until(lambda: kept(cache))
    assert alone.files.helps(*asked, 251_000)
    assert alone.files.helps(*asked, 0), "nobody knows yet how long computing takes"
    assert not alone.files.helps(*asked, 249_000)
    assert alone.files.helps(*asked, 249_000), "it is tried, and measured, again"


async def test_fenced_worker_reads_no_file(alone: Alone) -> None:
    """Its blocks may be another worker's by then (law 5)."""
    alone.check_fence.side_effect = WorkerFenced("w")
    asked = ticket("r1", PROMPT)
    with pytest.raises(WorkerFenced):
        await alone.files.fetch(asked, Allocation("h", 1, (0,), 0), BlockKeys.of(asked, 4))
    alone.block.assert_not_called()
