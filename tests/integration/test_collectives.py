"""Sums over ranks, on gloo with a thread for each rank: in the order of the ranks, in every batch,
or by an all-reduce, as NCCL sums on GPUs."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import rmtree
from threading import Barrier, local
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from bench.make_checkpoint import make_checkpoint
from services.engine.ranks.collectives import Collectives, connect
from services.engine.ranks.one_shot import GROUP, MOST_BYTES, OneShot, between_gpus
from services.model.checkpoint.reading import read_model_config
from services.model.checkpoint.shards import Shard, shards

from .models_oracle import SPECS

SIZE = 4
TERMS = (1e8, 1.0, -1e8, 0.5)
"""Their sum in this order is 0.5, because 1e8 + 1 is 1e8 in fp32; backwards 0; in pairs from the
ends 1."""


def connected(folder: Path, *, in_order: bool = True) -> list[Collectives]:
    config = read_model_config(make_checkpoint(folder / "model", SPECS["llama-gqa"]))
    cpu = torch.device("cpu")

    def joined(rank: int) -> Collectives:
        where = folder / "meeting", shards(config, SIZE)[rank], cpu, 30.0
        return connect(*where, in_order=in_order)

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(joined, range(SIZE)))


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> list[Collectives]:
    return connected(tmp_path_factory.mktemp("ranks"))


def sums(group: list[Collectives], terms: list[Tensor]) -> list[Tensor]:
    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(Collectives.sum, group, terms))


REAL_GROUP: Any = dist.ProcessGroupGloo


class GroupThatConnectsLate:
    """As NCCL's: it meets the other ranks, by its store, at the first exchange."""

    _Options = REAL_GROUP._Options
    create_device = REAL_GROUP.create_device

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._group: Any = None
        self.rank, self.size = lambda: arguments[1], lambda: arguments[2]

    def __getattr__(self, name: str) -> Any:
        self._group = self._group or REAL_GROUP(*self._arguments)
        return getattr(self._group, name)


def test_ranks_have_met_when_they_are_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 removes the place where they meet."""
    config = read_model_config(make_checkpoint(tmp_path / "model", SPECS["llama-gqa"]))
    monkeypatch.setattr(dist, "ProcessGroupGloo", GroupThatConnectsLate)
    meeting = tmp_path / "meeting"
    meeting.mkdir()

    def joined(shard: Shard) -> Collectives:
        return connect(meeting / "store", shard, torch.device("cpu"), 2.0)

    with ThreadPoolExecutor(2) as threads:
        group = list(threads.map(joined, shards(config, 2)))
        rmtree(meeting)
        terms = [torch.ones(1), torch.full((1,), 2.0)]
        assert list(threads.map(Collectives.sum, group, terms)) == [3.0, 3.0]


@pytest.mark.parametrize("num_rows", [1, 3, 5, 64, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_terms_are_added_in_the_order_of_the_ranks(
    group: list[Collectives], dtype: torch.dtype, num_rows: int
) -> None:
    """Law 10: an all-reduce would rotate the order by the message's size and the value's place."""
    terms = [torch.full((num_rows, 96), value, dtype=dtype) for value in TERMS]
    for total in sums(group, terms):
        assert total.dtype == dtype
        assert torch.equal(total, torch.full((num_rows, 96), 0.5, dtype=dtype))


def test_a_sum_is_rounded_once(group: list[Collectives]) -> None:
    """In bf16, 1 + 2^-9 is 1: a sum that is rounded after each term loses the small terms."""
    terms = [torch.full((2, 8), value, dtype=torch.bfloat16) for value in (1.0, *[2**-9] * 3)]
    expected = torch.tensor(1 + 3 * 2**-9).bfloat16()
    for total in sums(group, terms):
        assert (total == expected).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_all_reduce_gives_all_ranks_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    """So the residual streams of the ranks never drift apart, whatever the order of the sum."""
    group = connected(tmp_path, in_order=False)
    for num_rows in (1, 3, 700):
        terms = [torch.randn(num_rows, 96).to(dtype) for _ in range(SIZE)]
        wanted = torch.stack(terms).float().sum(dim=0)
        first, *others = sums(group, [term.clone() for term in terms])
        assert first.dtype == dtype
        assert all(torch.equal(first, other) for other in others)
        tolerance = 1e-5 if dtype == torch.float32 else 0.06  # bf16 is rounded after each term
        torch.testing.assert_close(first.float(), wanted, atol=tolerance, rtol=0)


def test_an_all_reduce_takes_tensors_with_gaps(tmp_path: Path) -> None:
    group = connected(tmp_path, in_order=False)
    terms = [torch.full((6, 8), float(rank))[:, ::2] for rank in range(SIZE)]
    assert all((total == 6.0).all() for total in sums(group, terms))


class SharedBuffers:
    """Symmetric memory between threads: each rank's kernel reads the buffers of all ranks."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}
        self._ready, self._read = Barrier(SIZE), Barrier(SIZE)
        self.num_sums = 0

    def sum(self, buffer: Tensor, terms: Tensor, operation: str, group: str) -> Tensor:
        assert (operation, group) == ("sum", GROUP)
        assert (buffer.dtype, buffer.shape) == (terms.dtype, terms.shape)
        buffer.copy_(terms)
        self._buffers[buffer.data_ptr()] = buffer
        self._ready.wait(10)
        total = sum(self._buffers[place] for place in sorted(self._buffers))
        if self._read.wait(10) == 0:
            self.num_sums += 1
        assert isinstance(total, Tensor)
        return total


def test_small_messages_are_summed_from_shared_buffers(group: list[Collectives]) -> None:
    shared = SharedBuffers()
    memory = torch.empty(SIZE, MOST_BYTES, dtype=torch.uint8)
    registering: Any = torch.library.Library
    library = registering("symm_mem", "IMPL")
    library.impl("one_shot_all_reduce_copy", shared.sum, "CPU")
    ranks = [
        Collectives(each._group, each._vocabularies, OneShot(memory[rank]), in_order=False)
        for rank, each in enumerate(group)
    ]
    most = MOST_BYTES // 4
    for shape, is_small in (((3, 8), True), ((most,), True), ((most + 4,), False), ((3,), False)):
        before, terms = shared.num_sums, [torch.randn(shape) for _ in range(SIZE)]
        expected = torch.stack(terms).sum(0)
        totals = sums(ranks, terms)
        assert all(torch.equal(total, totals[0]) for total in totals)
        torch.testing.assert_close(totals[0], expected)
        assert shared.num_sums == before + is_small


@pytest.mark.parametrize("failing", ["set_group_info", "rendezvous", None])
def test_ranks_sum_by_one_kernel_if_all_of_them_can(
    failing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that summed otherwise than the others would wait for them for ever. After a reload,
    PyTorch refuses rank 0, which has had other ranks before."""
    ranks = local()

    def fail_at_rank_0(step: str) -> None:
        if ranks.number == 0 and step == failing:
            raise RuntimeError(f"{step} fails")

    class Memory:
        @staticmethod
        def set_group_info(group: str, rank: int, size: int, store: object) -> None:
            ranks.number = rank
            fail_at_rank_0("set_group_info")

    def rendezvous(buffer: Tensor, group: str) -> Tensor:
        fail_at_rank_0("rendezvous")
        return buffer

    monkeypatch.setattr(_symmetric_memory, "_SymmetricMemory", Memory)
    monkeypatch.setattr(_symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    store, cpu = dist.HashStore(), torch.device("cpu")  # type: ignore[attr-defined]
    with ThreadPoolExecutor(SIZE) as threads:
        found = list(threads.map(lambda rank: between_gpus(store, rank, SIZE, cpu), range(SIZE)))
    assert [one is None for one in found] == [failing is not None] * SIZE
