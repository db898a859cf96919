"""Places of workers on a host with two NUMA nodes of four cores with two hyperthreads each:

node   cores  CPUs
0      0-3    0-3, 8-11
1      4-7    4-7, 12-15
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.runtime.numa.topology import HostCpus, Node
from services.worker.config import WorkerSettings
from services.worker.cpu.board import ENTRY_WORDS, CpuBoardEntry
from services.worker.cpu.division import choose_domain, divide, domains, lane_cpus, lanes
from services.worker.cpu.place import Place, take_place

WHOLE = HostCpus(
    (Node(0, (0, 1, 2, 3, 8, 9, 10, 11)), Node(1, (4, 5, 6, 7, 12, 13, 14, 15))),
    tuple((core, core + 8) for core in range(8)),
)
ROLES = {"p": "prefill", "d": "decode"}


def host_of(num_nodes: int, cpus_per_node: int = 4) -> HostCpus:
    nodes = [
        Node(i, tuple(range(i * cpus_per_node, (i + 1) * cpus_per_node))) for i in range(num_nodes)
    ]
    cpus = range(num_nodes * cpus_per_node)
    return HostCpus(tuple(nodes), tuple((cpu,) for cpu in cpus))


def arrivals(host: HostCpus, text: str) -> list[CpuBoardEntry]:
    """ "p d d" -> p0, d1, d2, which arrive in this order."""
    entries: list[CpuBoardEntry] = []
    choices = domains(host, len(text.split()))
    for i, word in enumerate(text.split()):
        nodes = choose_domain(ROLES[word], choices, entries)
        entries.append(CpuBoardEntry(f"{word}{i}", ROLES[word], i, nodes))
    return entries


def homes(host: HostCpus, text: str) -> dict[str, tuple[int, ...]]:
    return {e.worker_id: cpus for e, cpus in divide(host, arrivals(host, text)).items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("d", {"d0": tuple(range(8))}),
        ("p d", {"p0": (4, 5, 6, 7), "d1": (0, 1, 2, 3)}),
        ("d p", {"d0": (0, 1, 2, 3), "p1": (4, 5, 6, 7)}),
        ("p d d", {"p0": (6, 7), "d1": (0, 1, 2, 3), "d2": (4, 5)}),
        ("p p d d", {"p0": (6, 7), "p1": (2, 3), "d2": (0, 1), "d3": (4, 5)}),
        ("d d d p", {"d0": (0, 1), "d1": (4, 5), "d2": (2, 3), "p3": (6, 7)}),
    ],
)
def test_workers_on_two_nodes(text: str, expected: dict[str, tuple[int, ...]]) -> None:
    """One worker of each role have a node each; more workers are spread over both."""
    assert homes(lane_cpus(WHOLE, 1), text) == expected


@pytest.mark.parametrize(
    ("num_nodes", "num_workers", "expected"),
    [
        (1, 5, ((0,),)),
        (2, 1, ((0, 1),)),
        (2, 2, ((0,), (1,))),
        (2, 9, ((0,), (1,))),
        (4, 2, ((0, 1), (2, 3))),
        (4, 3, ((0, 1), (2, 3))),
        (8, 3, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (3, 2, ((0, 1, 2),)),
    ],
)
def test_domains_are_equal_groups_of_neighbouring_nodes(
    num_nodes: int, num_workers: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert domains(host_of(num_nodes), num_workers) == expected


def test_nodes_of_very_unequal_size_are_one_domain() -> None:
    """As with --cpus 0-4, or in a container with these CPUs. Only few lanes would leave their
    node."""
    host = WHOLE.only(range(5))
    assert domains(host, 2) == ((0, 1),)
    assert homes(host, "p d") == {"p0": (2, 3, 4), "d1": (0, 1)}


def test_a_core_is_one_lane_unless_workers_outnumber_cores() -> None:
    assert lane_cpus(WHOLE, 8).cpus == tuple(range(8))
    assert lane_cpus(WHOLE, 9) == WHOLE


def test_prefill_borrows_everywhere_and_decode_on_its_node() -> None:
    host = lane_cpus(WHOLE, 3)
    entries = arrivals(host, "p d d")  # p0 has 6 and 7, d1 has 0 to 3, d2 has 4 and 5
    lent = {
        own.worker_id: {lane.cpu: lane.owners for lane in lanes(host, entries, own) if lane.owners}
        for own in entries
    }
    p, d1, d2 = (entry.index * ENTRY_WORDS for entry in entries)
    assert lent == {
        "p0": {0: (d1,), 1: (d1,), 2: (d1,), 3: (d1,), 4: (d2,), 5: (d2,)},
        "d1": {},
        "d2": {6: (p,), 7: (p,)},
    }


@given(
    st.integers(1, 8),
    st.integers(1, 6),
    st.lists(st.sampled_from("pd"), min_size=1, max_size=12).map(" ".join),
)
def test_no_worker_leaves_its_domain_and_no_domain_is_empty(
    num_nodes: int, cpus_per_node: int, text: str
) -> None:
    host = host_of(num_nodes, cpus_per_node)
    entries = arrivals(host, text)
    found = divide(host, entries)
    for entry, cpus in found.items():
        assert set(cpus) <= set(host.on(entry.nodes))
    assert {cpu for cpus in found.values() for cpu in cpus} == set(host.cpus)
    sizes = [len([e for e in entries if e.nodes == nodes]) for nodes in domains(host, len(entries))]
    assert max(sizes) <= min(sizes) + 2


class Bindings:
    """Stands in for os.sched_setaffinity; raises `error` if it is set."""

    def __init__(self) -> None:
        self.cpus: list[Sequence[int]] = []
        self.error: OSError | None = None

    def __call__(self, pid: int, cpus: Sequence[int]) -> None:
        assert pid == 0
        if self.error is not None:
            raise self.error
        self.cpus.append(cpus)


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    bindings = Bindings()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr("os.sched_setaffinity", bindings)
    return bindings


class Decode(WorkerSettings):
    service = "decode"


def place(root: Path, **given: object) -> Place:
    """The place of a decode worker."""
    values = {"model": "/model", "pool_root": root / "pools", "num_expected_workers": 2, **given}
    return take_place(Decode.model_validate(values), "decode-1", WHOLE)


def test_a_worker_is_bound_to_its_node_and_packs_weights_of_its_own(
    tmp_path: Path, bindings: Bindings
) -> None:
    found = place(tmp_path)
    assert found.entry.nodes == (0,)
    assert found.cpu_board.entries() == (found.entry,)
    assert found.host == lane_cpus(WHOLE, 2)
    assert found.num_cpus == 4
    assert bindings.cpus == [(0, 1, 2, 3, 8, 9, 10, 11)]
    assert found.weights_cache(Path("/cache")) == Path("/cache/node0")
    assert found.weights_cache(None) is None
    assert (found.weights.node_ids, found.arena.node_ids) == ((0,), (0, 1))


def test_a_worker_that_has_all_nodes_interleaves_its_weights(
    tmp_path: Path, bindings: Bindings
) -> None:
    found = place(tmp_path, num_expected_workers=1)
    assert found.entry.nodes == found.weights.node_ids == (0, 1)
    assert bindings.cpus == []
    assert found.weights_cache(Path("/cache")) == Path("/cache")


def test_off_divides_all_cpus_as_one_node(tmp_path: Path, bindings: Bindings) -> None:
    found = place(tmp_path, numa="off")
    assert found.host.nodes == (Node(0, tuple(range(8))),)
    assert found.entry.nodes == found.arena.node_ids == (0,)
    assert bindings.cpus == []


def test_a_list_of_cpus_is_taken_as_it_is(tmp_path: Path, bindings: Bindings) -> None:
    """With both hyperthreads of a core, if the list has them."""
    assert place(tmp_path, cpus="0-1,8-9").host == WHOLE.only([0, 1, 8, 9])


def test_a_refused_binding_is_logged(tmp_path: Path, bindings: Bindings) -> None:
    bindings.error = PermissionError(1, "Operation not permitted")
    with capture_logs() as logs:
        place(tmp_path)
    assert logs[0]["event"] == "place_chosen"
    assert logs[0]["divided_cpus"] == "0-7"
    assert logs[1:] == [
        {
            "event": "threads_not_bound",
            "cpus": "0-3,8-11",
            "reason": "Operation not permitted",
            "log_level": "warning",
        }
    ]
