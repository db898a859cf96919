"""Adapters at the gateway: names, limits, several gateways, and the ticket of a request."""

import asyncio
import json
import math
import struct
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bench.make_checkpoint import make_checkpoint
from services.gateway.config import GatewaySettings, PartOptions
from services.gateway.workers.adapters import GatewayAdapters
from services.model.checkpoint.adapter import CONFIG_FILE, WEIGHTS_FILE
from services.model.checkpoint.reading import read_model_config
from services.model.config.model_config import ModelConfig
from services.runtime.errors import InvalidRequest, StartupError, UnknownModel
from tests.memory_registry import MemoryRegistry


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_model_config(make_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture
def registry() -> MemoryRegistry:
    return MemoryRegistry()


@pytest.fixture
def adapter(tmp_path: Path, config: ModelConfig) -> Path:
    return write_adapter(tmp_path / "adapter", config, 1)


def write_adapter(directory: Path, config: ModelConfig, alpha: int) -> Path:
    """Write an adapter with one linear of rank 2, all zeros, without PyTorch."""
    directory.mkdir()
    (directory / CONFIG_FILE).write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": alpha})
    )
    hidden, outputs = config.hidden_size, config.num_heads * config.head_dim
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    sizes = {f"{name}A.weight": [2, hidden], f"{name}B.weight": [outputs, 2]}
    begin, header = 0, {}
    for tensor, shape in sizes.items():
        end = begin + 4 * shape[0] * shape[1]
        header[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    (directory / WEIGHTS_FILE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(begin))
    return directory


def gateway(
    registry: MemoryRegistry,
    config: ModelConfig,
    max_loras: int = 2,
    initial: tuple[tuple[str, str], ...] = (),
) -> GatewayAdapters:
    options = PartOptions(max_loras=max_loras, max_lora_rank=8, lora=initial)
    return GatewayAdapters(registry, lambda: {"base": config}, options)


def never() -> None:
    pytest.fail("the adapters are not ready")


async def test_an_adapter_loaded_at_one_gateway_is_served_by_all(
    registry: MemoryRegistry, config: ModelConfig, adapter: Path
) -> None:
    one, other = gateway(registry, config), gateway(registry, config)
    loaded = await one.load("poet", str(adapter))
    assert (loaded.model, loaded.adapter.path) == ("base", str(adapter))
    assert other.get("poet") is None
    assert await other.find("poet") == loaded
    assert await other.find("base") is None
    await other.unload("poet")
    await one.refresh()
    assert one.served() == ()
    with pytest.raises(UnknownModel, match="no adapter 'poet' is loaded") as unknown:
        await one.unload("poet")
    assert unknown.value.param == "lora_name"


async def test_adapters_are_listed_again_after_the_registry_was_lost(
    registry: MemoryRegistry, config: ModelConfig, adapter: Path, tmp_path: Path
) -> None:
    """By any gateway that serves them, with what was loaded since; what was unloaded stays away."""
    one, other = gateway(registry, config), gateway(registry, config)
    kept = await one.load("poet", str(adapter))
    await one.load("gone", str(adapter))
    await other.refresh()
    await one.unload("gone")
    await other.refresh()
    registry.lose()
    await other.load("new", str(write_adapter(tmp_path / "new", config, 5)))
    assert await gateway(registry, config).find("poet") == kept
    await one.refresh()
    assert [each.adapter.name for each in one.served()] == ["new", "poet"]
    await one.unload("poet")
    await other.refresh()
    assert [each.adapter.name for each in other.served()] == ["new"]


async def test_names_and_limits(
    registry: MemoryRegistry, config: ModelConfig, adapter: Path, tmp_path: Path
) -> None:
    one = gateway(registry, config)
    another = write_adapter(tmp_path / "another", config, 5)
    first = await one.load("a", str(adapter))
    assert await one.load("a", str(adapter)) == first, "again is no error"
    with pytest.raises(InvalidRequest, match=r"a is another adapter, of .*; unload it first"):
        await one.load("a", str(another))
    with pytest.raises(InvalidRequest, match="base is the name of a model"):
        await one.load("base", str(adapter))
    for name, problem in {
        "": "lora_name '' has 0 characters, not 1 to 200",
        "x" * 201: "has 201 characters, not 1 to 200",
        "none": "lora_name 'none' means no value in settings",
        "a,b": "lora_name 'a,b' has a comma or an equals sign",
        "a\n": r"lora_name 'a\\n' has control characters",
        " a": "or spaces at an end",
    }.items():
        with pytest.raises(InvalidRequest, match=problem) as refused:
            await one.load(name, str(adapter))
        assert refused.value.param == "lora_name"
    with pytest.raises(UnknownModel, match="'other' is not served here; these are: base") as wrong:
        await one.load("b", str(adapter), "other")
    assert wrong.value.param == "base_model_name"
    await one.load("b", str(another))
    assert (await one.load("b", str(adapter), replaces=True)).adapter.path == str(adapter)
    with pytest.raises(InvalidRequest, match="2 adapters are loaded, max_loras is 2"):
        await one.load("c", str(adapter))
    with pytest.raises(InvalidRequest, match="No such file"):
        await one.load("d", str(tmp_path / "nowhere"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_weights_that_are_no_numbers_are_refused(
    registry: MemoryRegistry, config: ModelConfig, adapter: Path, value: float
) -> None:
    """Every request with such an adapter would fail."""
    weights = adapter / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-4] + struct.pack("<f", value))
    wrong = r"lora_B.weight has 1 values that are NaN or infinite"
    with pytest.raises(InvalidRequest, match=wrong) as refused:
        await gateway(registry, config).load("poet", str(adapter))
    assert refused.value.param == "lora_path"


async def test_a_model_with_the_name_of_an_adapter_is_logged_once(
    registry: MemoryRegistry, config: ModelConfig, adapter: Path
) -> None:
    models = {"base": config}
    one = GatewayAdapters(registry, lambda: models, PartOptions(max_loras=2))
    await one.load("poet", str(adapter))
    models["poet"] = config
    with capture_logs() as logs:
        await one.refresh()
        await one.refresh()
    assert [(line["event"], line["adapter"]) for line in logs] == [
        ("adapter_shadows_model", "poet")
    ]


async def test_aliases_of_models(
    registry: MemoryRegistry, config: ModelConfig, adapter: Path
) -> None:
    """An alias names the base model, and no adapter takes its name."""
    models = {"base": config, "other": config}
    one = GatewayAdapters(
        registry, lambda: models, PartOptions(max_loras=2, model_aliases=("b=base",))
    )
    assert (await one.load("poet", str(adapter), "b")).model == "base"
    with pytest.raises(InvalidRequest, match="b is the name of a model"):
        await one.load("b", str(adapter), "base")
    with pytest.raises(InvalidRequest, match="one: b, base, other") as several:
        await one.load("a", str(adapter))
    assert several.value.param == "base_model_name"


async def test_adapters_of_the_start_must_load(
    registry: MemoryRegistry, config: ModelConfig, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=r"--lora x=.*nowhere: adapter .*: .*No such file"):
        await gateway(registry, config, initial=(("x", str(tmp_path / "nowhere")),)).watch(never)


async def test_gateway_is_ready_once_the_adapters_of_the_start_are_served(
    registry: MemoryRegistry, config: ModelConfig, adapter: Path
) -> None:
    models: dict[str, ModelConfig] = {}
    options = PartOptions(max_loras=2, lora=(("poet", str(adapter)),))
    one = GatewayAdapters(registry, lambda: models, options)
    ready = asyncio.Event()
    watching = asyncio.create_task(one.watch(ready.set))
    assert not one.ready
    models["base"] = config
    await asyncio.wait_for(ready.wait(), 10)
    assert one.ready
    assert one.get("poet") is not None
    watching.cancel()
    assert gateway(registry, config).ready


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("QUIRE_GATEWAY_REDIS_URL", "redis://localhost")
    return monkeypatch


@pytest.mark.parametrize(
    ("text", "problem"), [("x", "not name=directory"), ("x=", "not name=dir"), ("x=a,x=b", "twice")]
)
def test_a_list_of_adapters_that_is_wrong(
    environment: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    environment.setenv("QUIRE_GATEWAY_LORA", text)
    with pytest.raises(ValueError, match=problem):
        GatewaySettings()


def test_a_list_of_adapters(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("QUIRE_GATEWAY_LORA", "x=/a, y=/b=c")
    assert GatewaySettings().lora == (("x", "/a"), ("y", "/b=c"))
