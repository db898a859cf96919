"""The LoRA adapters that clients can name as a model.

They are listed in the registry, so every gateway serves what one of them has loaded. A gateway
reads the names and shapes of an adapter only; workers load its weights
(`services.worker.adapters`).
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from blockstore.errors import BlockStoreError
from blockstore.registry import AdapterList
from quire.names import name_problem
from services.gateway.config import PartOptions
from services.gateway.workers.models.model_names import choose_model, parse_aliases, with_aliases
from services.model.checkpoint.adapter import AdapterFiles
from services.model.config.model_config import ModelConfig
from services.protocol.ticket import Adapter
from services.runtime.errors import InvalidRequest, StartupError, UnknownModel
from services.runtime.logging import get_logger
from services.runtime.ticks import until_tick

log = get_logger(__name__)

_REFRESH_S = 1.0
_MIN_REFRESH_S = 0.1
"""Between two reads for names that nobody serves."""


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter, with the name of its base model."""

    adapter: Adapter
    model: str


class GatewayAdapters:
    """The adapters of one gateway. `models` returns the served models by name, with their
    configs."""

    def __init__(
        self,
        listed: AdapterList,
        models: Callable[[], Mapping[str, ModelConfig]],
        options: PartOptions,
    ) -> None:
        self._listed = listed
        self._models = models
        self._max_loras, self._max_rank = options.max_loras, options.max_lora_rank
        self._initial, self._aliases = options.lora, parse_aliases(options.model_aliases)
        self._served: dict[str, ServedAdapter] = {}
        self._changing = asyncio.Lock()
        self._read_at = -_REFRESH_S
        self._run_id = ""
        """The history of the list that was read last."""
        self._shadowed: frozenset[str] = frozenset()
        """Models that have the name of an adapter, which clients mean by it."""

    @property
    def ready(self) -> bool:
        """Whether the initial adapters are served."""
        return not self._initial

    def get(self, name: str) -> ServedAdapter | None:
        return self._served.get(name)

    async def find(self, name: str) -> ServedAdapter | None:
        """The adapter `name`, also if another gateway has loaded it just now. Raises
        BlockStoreError."""
        known = self._served, self._models(), self._aliases
        is_known = not name or any(name in names for names in known)
        if not is_known and time.monotonic() - self._read_at > _MIN_REFRESH_S:
            await self.refresh()
        return self.get(name)

    def served(self) -> tuple[ServedAdapter, ...]:
        return tuple(self._served[name] for name in sorted(self._served))

    async def watch(self, on_ready: Callable[[], None]) -> NoReturn:
        """Load the initial adapters once a model is there, and call `on_ready`; then follow the
        registry until cancelled. Raises StartupError if an initial adapter cannot be loaded."""
        while True:
            try:
                await self.refresh()
                if self._initial and self._models():
                    for name, directory in self._initial:
                        await self._load_initial(name, directory)
                    self._initial = ()
                    on_ready()
            except BlockStoreError as error:
                log.warning("adapters_unread", reason=str(error))
            await asyncio.sleep(until_tick(_REFRESH_S))

    async def _load_initial(self, name: str, directory: str) -> None:
        try:
            await self.load(name, directory)
        except (InvalidRequest, UnknownModel) as error:
            raise StartupError(f"--lora {name}={directory}: {error}") from error

    async def refresh(self) -> None:
        """Read the list. If its server has lost it, list again what this gateway serves.
        Raises BlockStoreError."""
        found: dict[str, ServedAdapter] = {}
        self._read_at = time.monotonic()
        listed = await self._listed.adapters()
        if self._listed.run_id != self._run_id:
            for name in self._served.keys() - listed.keys():
                listed[name] = json.dumps(asdict(self._served[name]))
                await self._listed.set_adapter(name, listed[name])
            self._run_id = self._listed.run_id
        for name, entry in listed.items():
            fields = json.loads(entry)
            found[name] = ServedAdapter(Adapter(**fields["adapter"]), fields["model"])
        self._served = found
        shadowed = frozenset(found).intersection(with_aliases(list(self._models()), self._aliases))
        for name in sorted(shadowed - self._shadowed):
            log.warning("adapter_shadows_model", adapter=name)
        self._shadowed = shadowed

    async def load(
        self, name: str, directory: str, model: str = "", replaces: bool = False
    ) -> ServedAdapter:
        """Serve the adapter in `directory` as `name`, on `model` ("": the only one). Loading the
        same adapter again changes nothing. If it `replaces`, another adapter may have the name; its
        running requests go on.

        Raises InvalidRequest if the adapter cannot be served or the name is taken, UnknownModel, or
        BlockStoreError."""
        async with self._changing:
            await self.refresh()
            _check_name(name)
            models = self._models()
            names = with_aliases(list(models), self._aliases)
            if name in names:
                raise InvalidRequest(f"{name} is the name of a model", "lora_name")
            base = choose_model(model, names, "base_model_name")
            path = _absolute(directory)
            files = await asyncio.to_thread(AdapterFiles.read, path, models[base], self._max_rank)
            loaded = ServedAdapter(Adapter(name, str(path), files.digest), base)
            known = self._served.get(name)
            if known is not None and known != loaded and not replaces:
                raise InvalidRequest(
                    f"{name} is another adapter, of {known.adapter.path}; unload it first",
                    "lora_name",
                )
            if known is None and len(self._served) >= self._max_loras:
                raise InvalidRequest(
                    f"{len(self._served)} adapters are loaded, max_loras is {self._max_loras}; "
                    "unload one first",
                    "lora_name",
                )
            await self._listed.set_adapter(name, json.dumps(asdict(loaded)))
            self._served[name] = loaded
            log.info("adapter_served", adapter=name, model=base, path=str(path), rank=files.rank)
            return loaded

    async def unload(self, name: str) -> None:
        """Take no new requests for an adapter; running ones go on. UnknownModel,
        BlockStoreError."""
        async with self._changing:
            await self.refresh()
            if name not in self._served:
                raise UnknownModel(f"no adapter {name!r} is loaded", "lora_name")
            await self._listed.remove_adapter(name)
            del self._served[name]
            log.info("adapter_unloaded", adapter=name)


def _check_name(name: str) -> None:
    if problem := name_problem(name):
        raise InvalidRequest(f"lora_name {name!r} {problem}", "lora_name")


def _absolute(directory: str) -> Path:
    return Path(directory).expanduser().absolute()
