"""The division of CPUs: worked examples, and the laws of lending for any host and any workers."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvops.native import Lane
from services.runtime.numa.topology import HostCpus, Node
from services.worker.config import WorkerSettings
from services.worker.cpu.board import ENTRY_WORDS, CpuBoardEntry
from services.worker.cpu.division import divide, lanes, pause_s


def workers(text: str) -> list[CpuBoardEntry]:
    """ "p d d" -> p0, d1, d2, in seats 0, 1, 2."""
    roles = {"p": "prefill", "d": "decode"}
    return [CpuBoardEntry(f"{word}{i}", roles[word], i) for i, word in enumerate(text.split())]


def host_of(cpus: Sequence[int]) -> HostCpus:
    return HostCpus((Node(0, tuple(cpus)),), tuple((cpu,) for cpu in cpus))


def homes(num_cpus: int, text: str) -> dict[str, tuple[int, ...]]:
    return {
        entry.worker_id: cpus
        for entry, cpus in divide(host_of(range(num_cpus)), workers(text)).items()
    }


@pytest.mark.parametrize(
    ("num_cpus", "entries", "expected"),
    [
        (1, "p d", {"p0": (0,), "d1": (0,)}),
        (2, "p d", {"p0": (1,), "d1": (0,)}),
        (3, "p d", {"p0": (1, 2), "d1": (0,)}),
        (8, "p d", {"p0": (4, 5, 6, 7), "d1": (0, 1, 2, 3)}),
        (16, "p d", {"p0": tuple(range(8, 16)), "d1": tuple(range(8))}),
        (1, "p d d d", {"p0": (0,), "d1": (0,), "d2": (0,), "d3": (0,)}),
        (2, "p d d d", {"p0": (1,), "d1": (0,), "d2": (0,), "d3": (0,)}),
        (3, "p d d d", {"p0": (1, 2), "d1": (0,), "d2": (0,), "d3": (0,)}),
        (8, "p d d d", {"p0": (4, 5, 6, 7), "d1": (0,), "d2": (1,), "d3": (2, 3)}),
        (
            16,
            "p d d d",
            {"p0": tuple(range(8, 16)), "d1": (0, 1), "d2": (2, 3, 4), "d3": (5, 6, 7)},
        ),
        (1, "p p d d", {"p0": (0,), "p1": (0,), "d2": (0,), "d3": (0,)}),
        (2, "p p d d", {"p0": (1,), "p1": (1,), "d2": (0,), "d3": (0,)}),
        (3, "p p d d", {"p0": (1,), "p1": (2,), "d2": (0,), "d3": (0,)}),
        (8, "p p d d", {"p0": (4, 5), "p1": (6, 7), "d2": (0, 1), "d3": (2, 3)}),
        (
            16,
            "p p d d",
            {"p0": (8, 9, 10, 11), "p1": (12, 13, 14, 15), "d2": (0, 1, 2, 3), "d3": (4, 5, 6, 7)},
        ),
        (2, "d", {"d0": (0, 1)}),
        (2, "d d", {"d0": (0,), "d1": (1,)}),
        (3, "p p", {"p0": (0,), "p1": (1, 2)}),
    ],
)
def test_division(num_cpus: int, entries: str, expected: dict[str, tuple[int, ...]]) -> None:
    """Decode workers have the lower half, prefill workers the rest; a single role has all CPUs."""
    assert homes(num_cpus, entries) == expected


def test_twenty_workers_on_two_cpus() -> None:
    """The ten workers of each role share its CPU."""
    found = homes(2, "p d " * 10)
    assert found == {f"p{i}": (1,) for i in range(0, 20, 2)} | {
        f"d{i}": (0,) for i in range(1, 20, 2)
    }


def test_cpus_need_not_begin_at_0() -> None:
    p, d = workers("p d")
    assert divide(host_of((3, 7, 9)), [p, d]) == {d: (3,), p: (7, 9)}


def lanes_of(num_cpus: int, text: str) -> list[tuple[Lane, ...]]:
    entries = workers(text)
    return [lanes(host_of(range(num_cpus)), entries, own) for own in entries]


def byte(*entries: int) -> tuple[int, ...]:
    return tuple(entry * ENTRY_WORDS for entry in entries)


def test_two_workers_lend_each_other_their_cpus() -> None:
    assert lanes_of(2, "p d") == [(Lane(1), Lane(0, byte(1))), (Lane(0), Lane(1, byte(0)))]


def test_each_borrower_is_first_in_the_queue_of_some_cpu() -> None:
    """d1 has CPU 0, d2 CPU 1, p0 CPUs 2 and 3. The queues: for CPU 0 p0, d2; for 1 d1, p0; for 2
    d1, d2; for 3 d2, d1."""
    assert lanes_of(4, "p d d") == [
        (Lane(2), Lane(3), Lane(0, byte(1)), Lane(1, byte(2, 1))),
        (Lane(0), Lane(1, byte(2)), Lane(2, byte(0)), Lane(3, byte(0, 2))),
        (Lane(1), Lane(0, byte(1, 0)), Lane(2, byte(0, 1)), Lane(3, byte(0))),
    ]


def test_a_shared_cpu_is_lent_when_all_its_owners_are_idle() -> None:
    p, first, second, third = lanes_of(2, "p d d d")
    assert p == (Lane(1), Lane(0, byte(1, 2, 3)))
    assert first == (Lane(0), Lane(1, byte(0, 2, 3)))
    assert second == (Lane(0), Lane(1, byte(0)))
    assert third == (Lane(0), Lane(1, byte(0, 2)))


def test_a_single_cpu_is_not_lent() -> None:
    assert lanes_of(1, "p d") == [(Lane(0),), (Lane(0),)]


CPUS = st.sets(st.integers(0, 63), min_size=1, max_size=16).map(sorted)
ROLES = st.lists(st.sampled_from("pd"), min_size=1, max_size=20).map(" ".join)


@given(CPUS, ROLES)
def test_every_worker_owns_a_cpu_and_every_cpu_has_an_owner(
    cpus: Sequence[int], roles: str
) -> None:
    entries = workers(roles)
    found = divide(host_of(cpus), entries)
    assert found.keys() == set(entries)
    assert all(found.values())
    assert {cpu for home in found.values() for cpu in home} == set(cpus)


@given(CPUS, ROLES)
def test_every_worker_may_use_every_cpu_and_its_own_first(cpus: Sequence[int], roles: str) -> None:
    entries = workers(roles)
    found = divide(host_of(cpus), entries)
    for own in entries:
        mine = lanes(host_of(cpus), entries, own)
        assert sorted(lane.cpu for lane in mine if lane.cpu is not None) == list(cpus)
        assert len(mine) == len(cpus)
        at_home = mine[: len(found[own])]
        assert tuple(lane.cpu for lane in at_home) == found[own]
        assert not any(lane.owners for lane in at_home)
        assert all(lane.owners for lane in mine[len(at_home) :])
        assert all(own.index * ENTRY_WORDS not in lane.owners for lane in mine)


@given(CPUS, ROLES, st.data())
def test_a_cpu_is_lent_to_one_worker_and_never_while_its_owner_is_busy(
    cpus: Sequence[int], roles: str, data: st.DataObject
) -> None:
    """Whenever all of a CPU's own workers are idle, a busy worker borrows it."""
    entries = workers(roles)
    busy = data.draw(st.sets(st.sampled_from(entries)))
    words = {entry.index * ENTRY_WORDS for entry in busy}
    found = divide(host_of(cpus), entries)
    for cpu in cpus:
        borrowers = [
            own
            for own in busy
            for lane in lanes(host_of(cpus), entries, own)
            if lane.cpu == cpu and lane.owners and not words.intersection(lane.owners)
        ]
        at_home = [entry for entry in busy if cpu in found[entry]]
        assert len(borrowers) == (1 if busy and not at_home else 0)


def settings(**given: object) -> WorkerSettings:
    return WorkerSettings.model_validate({"model": "/model", **given})


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3, 8, 9, 10, 11})


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", (0, 1, 2, 3, 8, 9, 10, 11)),
        ("2", (2,)),
        ("0-3", (0, 1, 2, 3)),
        ("9,0-2,1", (0, 1, 2, 9)),
        ("8-8, 3", (3, 8)),
    ],
)
def test_lists_of_cpus_are_read(text: str, expected: tuple[int, ...]) -> None:
    assert settings(cpus=text).divided_cpus == expected


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is neither auto nor a list of CPUs such as 0-3,6"),
        ("all", "'all' is neither auto nor a list"),
        ("0,", "'0,' is neither auto nor a list"),
        ("-1", "'-1' is neither auto nor a list"),
        ("0x1", "'0x1' is neither auto nor a list"),
        ("0-1-2", "'0-1-2' is neither auto nor a list"),
        ("3-1", "'3-1': this process may use the CPUs"),
        ("0-4", r"'0-4': this process may use the CPUs \[0, 1, 2, 3, 8, 9, 10, 11\]"),
        ("64", "'64': this process may use the CPUs"),
    ],
)
def test_invalid_cpu_lists_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(cpus=text)


def test_a_step_has_a_token_for_every_sequence() -> None:
    assert settings().num_batched_tokens == 512
    assert settings(device="cuda:0").num_batched_tokens == 8192
    assert settings(max_num_seqs=1000).num_batched_tokens == 1000
    assert settings(max_num_batched_tokens=64).num_batched_tokens == 64
    assert settings(max_num_batched_tokens=10).num_seqs == 10
    with pytest.raises(ValidationError, match="10 is less than max_num_seqs, 64"):
        settings(max_num_batched_tokens=10, max_num_seqs=64)


def test_a_gpu_takes_more_sequences_by_default() -> None:
    assert (settings().num_seqs, settings(device="cuda:0").num_seqs) == (64, 256)
    assert settings(device="cuda:0", max_num_seqs=32).num_seqs == 32


def test_with_threads_no_cpus_are_divided() -> None:
    assert settings(threads=3).divided_cpus == ()


def test_a_weights_cache_is_a_directory_or_none() -> None:
    assert settings(weights_cache=None).weights_cache is None
    with pytest.raises(ValueError, match="a directory, or none"):
        settings(weights_cache="")


def test_a_weights_cache_may_be_in_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/cook")
    assert str(settings(weights_cache="~/packed").weights_cache) == "/home/cook/packed"


def test_a_pause_ends_when_the_gap_between_tokens_does() -> None:
    assert pause_s(0.030, max_gap_s=0.1) == pytest.approx(0.070)
    assert pause_s(0.120, max_gap_s=0.1) < 0  # the step alone takes longer
    assert pause_s(0.030, max_gap_s=0) < 0


def test_prompts_have_half_of_the_time_up_to_a_gap_of_100_ms() -> None:
    assert pause_s(0.030, max_gap_s=None) == pytest.approx(0.030)
    assert pause_s(0.080, max_gap_s=None) == pytest.approx(0.020)
    assert pause_s(0.200, max_gap_s=None) < 0
