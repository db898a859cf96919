"""New weights of a worker of several ranks: new ranks read them beside the old ones. If one of them
cannot, the worker keeps what it has."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.make_checkpoint import make_checkpoint
from services.engine.models.decoder import ComposedModel
from services.engine.ranks.rank import ShardPlan
from services.runtime.config import load_settings
from services.runtime.errors import InvalidRequest
from services.worker import loading
from services.worker.config import DecodeSettings
from services.worker.loading import LoadedModel, load
from services.worker.new_weights import read_again
from services.worker.ranks.processes import Ranks
from tests.e2e.weights import point


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DecodeSettings]:
    """Two ranks of a model that is a link to `old`."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "model").symlink_to(make_checkpoint(folder / "old", seed=1))
    values = {"MODEL": str(folder / "model"), "TENSOR_PARALLEL_SIZE": "2"}
    values |= {"POOL_MEMORY": "16MiB", "THREADS": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(f"QUIRE_DECODE_{name}", value)
        yield load_settings(DecodeSettings)


@pytest.fixture(scope="module")
def served(settings: DecodeSettings) -> Iterator[LoadedModel]:
    loaded = load(settings, lambda: None)
    assert loaded.ranks is not None
    yield loaded
    loaded.ranks.close()


def children() -> set[int]:
    """The processes that this process has started and that run."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def read(settings: DecodeSettings, served: LoadedModel) -> LoadedModel | None:
    return read_again(settings, served, lambda: None, None)


def test_new_ranks_read_the_new_weights_while_the_old_ones_serve(
    settings: DecodeSettings, served: LoadedModel, tmp_path: Path
) -> None:
    """The old ranks, whose end frees the memory of the old shards, are there until the switch."""
    assert served.ranks is not None
    before = children()
    assert before.issuperset(served.ranks.pids)
    point(settings.model, make_checkpoint(tmp_path / "new", seed=2))
    found = read(settings, served)
    assert found is not None
    assert found.ranks is not None
    assert found.layout.fingerprint != served.layout.fingerprint
    assert children() - before == set(found.ranks.pids)
    assert len(served.ranks.peers.ask("leave")) == 1, "the old rank answers"
    found.ranks.close()
    point(settings.model, settings.model.with_name("old"))


def test_ranks_that_read_the_same_weights_end(
    settings: DecodeSettings, served: LoadedModel
) -> None:
    before = children()
    assert read(settings, served) is None
    assert children() == before


class WithoutDevice(Ranks):
    """Rank 1 has no device."""

    def load(self, plan: ShardPlan, *others: Any) -> ComposedModel:
        return super().load(replace(plan, devices=("cpu", "cuda:9")), *others)


class Killed(Ranks):
    """Rank 1 is killed while it reads, as by a host without memory."""

    def load(self, *arguments: Any) -> ComposedModel:
        for process in self._processes:
            process.kill()
        return super().load(*arguments)


@pytest.mark.parametrize(
    ("ranks", "reason"), [(WithoutDevice, "rank 1: device cuda:9"), (Killed, "")]
)
def test_a_rank_that_cannot_read_refuses_the_reload(
    ranks: type[Ranks],
    reason: str,
    settings: DecodeSettings,
    served: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks that serve are as they were, and none of the new ones is left."""
    assert served.ranks is not None
    before = children()
    monkeypatch.setattr(loading, "Ranks", ranks)
    with pytest.raises(InvalidRequest, match=f"the old weights stay: .*{reason}"):
        read(settings, served)
    assert children() == before
    assert len(served.ranks.peers.ask("leave")) == 1


def test_workers_whose_sums_have_another_order_share_no_pool(
    settings: DecodeSettings, served: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their KV differs in its last bits. GPUs sum so without `deterministic`."""
    monkeypatch.setattr(DecodeSettings, "sums_in_order", False)
    found = load(settings, lambda: None)
    assert found.ranks is not None
    found.ranks.close()
    assert found.engine["sums"] == "all-reduce"
    assert "sums" not in served.engine
    assert found.layout.fingerprint != served.layout.fingerprint
