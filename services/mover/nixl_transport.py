"""The transport over NIXL: RDMA, TCP or shared memory, as UCX finds them (UCX_TLS).

Over TCP the side that is read takes part: UCX answers reads whenever it is called. NIXL's own
progress thread calls it without a pause, which takes a third to two thirds of a core of an idle
process, and halves the bandwidth of two busy cores. So a thread here calls it, often while others
read and seldom otherwise: each read announces itself by a notification.
"""

import json
import mmap
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from services.mover.transport import Area, Region, State, Transfer, TransportError
from services.runtime.errors import StartupError

_BUSY_S, _IDLE_S = 0.0005, 0.01
_BUSY_FOR_S = 1.0
"""How long this side counts as read after a notification."""

_STATES = {"DONE": State.DONE, "PROC": State.RUNNING, "ERR": State.FAILED}


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A region of this process, with one prepared descriptor for each item."""

    region: Region
    descriptors: Any
    registration: Any = None


@dataclass(frozen=True, slots=True)
class _Source:
    """The memory of another mover, which its NIXL agent serves."""

    agent: str
    areas: dict[Area, _Prepared]


class NixlTransport:
    """One NIXL agent. An agent's name is used once: NIXL confuses the connections of two agents
    with one name."""

    name: ClassVar[str] = "nixl"

    def __init__(self, agent_name: str) -> None:
        """Raises StartupError if NIXL is not installed, or finds no way to communicate."""
        try:
            from nixl_cu12 import nixl_agent, nixl_agent_config, nixl_thread_sync_t

            config = nixl_agent_config(
                enable_prog_thread=False,
                backends=["UCX"],
                sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            self._agent = nixl_agent(agent_name, config)
        except (ImportError, RuntimeError) as error:
            raise StartupError(
                f"a mover needs NIXL (pip install 'quire-serve[mover]'): {error}"
            ) from error

        self._closed = threading.Event()
        threading.Thread(target=self._progress, name="nixl", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def share(self, blocks: Region, stamps: Region) -> bytes:
        for region in (blocks, stamps):
            self._register(region)
        areas = {Area.BLOCKS.value: _described(blocks), Area.STAMPS.value: _described(stamps)}
        metadata = b64encode(self._agent.get_agent_metadata()).decode()
        return json.dumps({"agent": metadata, "areas": areas}).encode()

    def allocate(self, num_parts: int, item_bytes: int, num_items: int) -> Region:
        memories = [mmap.mmap(-1, num_items * item_bytes) for _ in range(num_parts)]
        return Region.of(memories, item_bytes, num_items)

    def prepare(self, region: Region) -> _Prepared:
        registration = self._register(region)
        return replace(self._prepare(region, "NIXL_INIT_AGENT"), registration=registration)

    def forget(self, prepared: _Prepared) -> None:
        with _translated("forget memory"):
            self._agent.release_dlist_handle(prepared.descriptors)
            self._agent.deregister_memory(prepared.registration)

    def connect(self, memory: bytes) -> _Source:
        try:
            described = json.loads(memory)
            areas = {
                Area(name): Region(tuple(parts), size, number)
                for name, (parts, size, number) in described["areas"].items()
            }
            metadata = b64decode(described["agent"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TransportError(f"not a description of memory: {error}") from error
        with _translated("connect"):
            found = self._agent.add_remote_agent(metadata)
            agent = found.decode() if isinstance(found, bytes) else str(found)
            prepared = {area: self._prepare(region, agent) for area, region in areas.items()}
        return _Source(agent, prepared)

    def read(
        self,
        source: _Source,
        area: Area,
        items: Sequence[int],
        target: _Prepared,
        places: Sequence[int],
    ) -> Transfer:
        remote = source.areas[area]
        with _translated(f"read from {source.agent}"):
            handle = self._agent.make_prepped_xfer(
                "READ",
                target.descriptors,
                np.array(target.region.places(places), np.int32),
                remote.descriptors,
                np.array(remote.region.places(items), np.int32),
            )
            self._agent.send_notif(source.agent, b"read")
            self._agent.transfer(handle)
        return _NixlTransfer(self._agent, handle)

    def disconnect(self, source: _Source) -> None:
        with _translated(f"forget {source.agent}"):
            for prepared in source.areas.values():
                self._agent.release_dlist_handle(prepared.descriptors)
            self._agent.remove_remote_agent(source.agent)

    def _progress(self) -> None:
        """Answer the reads of others."""
        busy_until = 0.0
        while not self._closed.is_set():
            try:
                is_read = any(self._agent.get_new_notifs().values())
            except Exception:  # a peer is gone: its own reads fail
                is_read = False
            now = time.monotonic()
            busy_until = now + _BUSY_FOR_S if is_read else busy_until
            time.sleep(_BUSY_S if now < busy_until else _IDLE_S)

    def _register(self, region: Region) -> Any:
        num_bytes = region.item_bytes * region.num_items
        parts = [(at, num_bytes, 0, "") for at in region.parts]
        with _translated("register memory"):
            return self._agent.register_memory(parts, "DRAM")

    def _prepare(self, region: Region, agent: str) -> _Prepared:
        size, number = region.item_bytes, region.num_items
        descriptors = np.array([(at, size, 0, size, number) for at in region.parts], np.uint64)
        return _Prepared(region, self._agent.prep_xfer_dlist(agent, descriptors, "DRAM"))


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Raises NIXL's exceptions as TransportError. NIXL has one for each status, without a common
    base."""
    try:
        yield
    except Exception as error:
        raise TransportError(f"NIXL does not {doing}: {error}") from error


def _described(region: Region) -> tuple[object, ...]:
    return region.parts, region.item_bytes, region.num_items


class _NixlTransfer:
    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent = agent
        self._handle = handle

    def poll(self) -> State:
        try:
            return _STATES[self._agent.check_xfer_state(self._handle)]
        except Exception:  # NIXL raises some failures and returns others
            return State.FAILED

    def release(self) -> None:
        self._agent.release_xfer_handle(self._handle)
