"""A worker's adapters, and a request whose adapter comes late or not at all."""

import asyncio
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.make_checkpoint import make_checkpoint
from services.engine.batch import LoadedAdapter
from services.model.checkpoint.adapter import AdapterFiles
from services.model.checkpoint.reading import read_model_config
from services.model.config.model_config import ModelConfig
from services.protocol.messages import Failed, Prefilled
from services.protocol.ticket import Adapter
from services.runtime.errors import InvalidRequest
from services.worker.adapters import WorkerAdapters
from tests.unit.gateway.test_gateway_adapters import write_adapter

from .conftest import WorkerPair
from .fakes import PROMPT, ticket


class Model:
    """Counts what it loads."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = self.whole_config = config
        self.loaded: list[str] = []

    def load_adapter(self, files: AdapterFiles) -> str:
        self.loaded.append(files.directory.name)
        return files.digest


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_model_config(make_checkpoint(tmp_path_factory.mktemp("model")))


def made(tmp_path: Path, config: ModelConfig, name: str, alpha: int) -> Adapter:
    directory = write_adapter(tmp_path / name, config, alpha)
    return Adapter(name, str(directory), AdapterFiles.read(directory, config, 8).digest)


async def test_the_adapters_that_were_used_last_are_kept(
    tmp_path: Path, config: ModelConfig
) -> None:
    model: Any = Model(config)
    adapters = WorkerAdapters(model.whole_config, model.load_adapter, max_loras=2, max_rank=8)
    a, b, c = (made(tmp_path, config, name, i) for i, name in enumerate("abc", 1))
    await asyncio.gather(*(adapters.load(one) for one in (a, a, b)))
    assert model.loaded == ["a", "b"], "each once"
    in_use = adapters.get(b)
    adapters.get(a)
    await adapters.load(c)
    gc.collect()
    assert adapters.get(b) is in_use, "a request has it"
    assert adapters.get(a) is None
    await adapters.load(a)
    assert model.loaded == ["a", "b", "c", "a"]


async def test_files_that_have_changed_are_refused(tmp_path: Path, config: ModelConfig) -> None:
    """They would give the request's KV another meaning than its hashes have."""
    model: Any = Model(config)
    adapters = WorkerAdapters(model.whole_config, model.load_adapter, max_loras=2, max_rank=8)
    adapter = made(tmp_path, config, "a", 1)
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(path.read_text().replace('"lora_alpha": 1', '"lora_alpha": 2'))
    with pytest.raises(InvalidRequest, match=r"files in .* have changed"):
        await adapters.load(adapter)
    path.unlink()
    with pytest.raises(InvalidRequest, match="No such file"):
        await adapters.load(adapter)
    assert adapters.get(adapter) is None


ADAPTER = Adapter("poet", "/poet", "d1")


class LateAdapters(WorkerAdapters):
    """Loads when the test says so."""

    def __init__(self) -> None:  # without a model
        self.asked = asyncio.Event()
        self.answer: asyncio.Future[LoadedAdapter] = asyncio.get_running_loop().create_future()

    def get(self, adapter: Adapter) -> LoadedAdapter | None:
        return self.answer.result() if self.answer.done() else None

    async def load(self, adapter: Adapter) -> LoadedAdapter:
        self.asked.set()
        return await asyncio.shield(self.answer)


async def test_a_request_waits_for_its_adapter_and_others_do_not(pair: WorkerPair) -> None:
    """It holds no blocks before; its rows have the adapter at both workers."""
    adapters = pair.prefill.adapters = pair.decode.adapters = LateAdapters()
    with_adapter = replace(ticket("r1", PROMPT), adapter=ADAPTER)
    pair.prefill.role.submit(pair.session, with_adapter)
    pair.prefill.role.submit(pair.session, ticket("r2", PROMPT))
    await adapters.asked.wait()
    await pair.until(lambda: bool(pair.session.of(Prefilled)))
    (first,) = pair.session.of(Prefilled)
    assert first.ticket.request_id == "r2"
    assert {holder.holder_id for holder in await pair.store.holders("pool")} == {"h-r2"}
    loaded = LoadedAdapter("d1", None)
    adapters.answer.set_result(loaded)
    await pair.until(lambda: len(pair.session.of(Prefilled)) == 2)
    assert pair.session.of(Prefilled)[1].ticket.adapter == ADAPTER
    assert pair.prefill_model.adapters == {loaded}


async def test_an_adapter_that_cannot_be_loaded_ends_its_request_only(pair: WorkerPair) -> None:
    adapters = pair.prefill.adapters = LateAdapters()
    adapters.answer.set_exception(InvalidRequest("adapter poet: gone"))
    adapters.get = lambda adapter: None  # type: ignore[method-assign]
    pair.prefill.role.submit(pair.session, replace(ticket("r1", PROMPT), adapter=ADAPTER))
    await pair.until(lambda: bool(pair.session.of(Failed)))
    (failed,) = pair.session.of(Failed)
    assert failed.message == "adapter poet: gone"
    await pair.until_empty()


async def test_a_request_that_is_aborted_while_its_adapter_loads(pair: WorkerPair) -> None:
    adapters = pair.prefill.adapters = LateAdapters()
    pair.prefill.role.submit(pair.session, replace(ticket("r1", PROMPT), adapter=ADAPTER))
    await adapters.asked.wait()
    pair.prefill.role.abort(pair.session, "r1", 1)
    adapters.answer.set_result(LoadedAdapter("d1", None))
    await asyncio.sleep(0)
    await pair.until_empty()
    assert pair.session.events == []


async def test_a_worker_without_adapters_refuses_tickets_with_one(pair: WorkerPair) -> None:
    with pytest.raises(InvalidRequest, match="takes no adapters, so not poet"):
        pair.prefill.role.submit(pair.session, replace(ticket("r1", PROMPT), adapter=ADAPTER))
