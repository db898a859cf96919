"""The LoRA adapters of a worker, loaded when the first request for them comes."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from safetensors import SafetensorError

from services.engine.batch import LoadedAdapter
from services.model.checkpoint.adapter import AdapterFiles
from services.model.config.model_config import ModelConfig
from services.protocol.ticket import Adapter
from services.runtime.errors import InvalidRequest
from services.runtime.logging import get_logger

log = get_logger(__name__)


class WorkerAdapters:
    """Keeps the `max_loras` adapters that were used last, and those that requests here use. `load`
    is `Model.load_adapter`, or the same of all ranks."""

    def __init__(
        self,
        config: ModelConfig,
        load: Callable[[AdapterFiles], Any],
        max_loras: int,
        max_rank: int,
    ) -> None:
        self._config, self._load = config, load
        self._max_loras, self._max_rank = max_loras, max_rank
        self._kept: OrderedDict[str, LoadedAdapter] = OrderedDict()
        self._alive: WeakValueDictionary[str, LoadedAdapter] = WeakValueDictionary()
        self._loading = asyncio.Lock()

    def get(self, adapter: Adapter) -> LoadedAdapter | None:
        """The adapter if it is loaded. The caller keeps it as long as it needs it."""
        if (found := self._alive.get(adapter.digest)) is not None:
            self._keep(found)
        return found

    async def load(self, adapter: Adapter) -> LoadedAdapter:
        """Load the adapter in a thread, unless it is loaded. Raises InvalidRequest if the files are
        not there, differ from the files that the gateway has seen, or do not fit the model."""
        async with self._loading:
            if (found := self.get(adapter)) is not None:
                return found
            loaded = await asyncio.to_thread(self._read, adapter)
            log.info("adapter_loaded", adapter=adapter.name, digest=adapter.digest)
            self._alive[adapter.digest] = loaded
            self._keep(loaded)
            return loaded

    def _read(self, adapter: Adapter) -> LoadedAdapter:
        files = AdapterFiles.read(Path(adapter.path), self._config, self._max_rank)
        if files.digest != adapter.digest:
            raise InvalidRequest(
                f"adapter {adapter.name}: the files in {adapter.path} have changed since it was "
                "loaded; unload and load it again"
            )
        try:
            return LoadedAdapter(files.digest, self._load(files))
        except (OSError, SafetensorError, ValueError) as error:
            raise InvalidRequest(f"adapter {adapter.name}: {error}") from error

    def _keep(self, loaded: LoadedAdapter) -> None:
        self._kept[loaded.digest] = loaded
        self._kept.move_to_end(loaded.digest)
        while len(self._kept) > self._max_loras:
            self._kept.popitem(last=False)
