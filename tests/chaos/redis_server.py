"""The deployment's Redis and the faults that disturb it. The harness starts it, not the supervisor:
so it can be away for any time, and return with any data."""

import asyncio
from pathlib import Path

from tests.chaos.schedule import Fault
from tests.conftest import Valkey


class RedisServer:
    def __init__(self, directory: Path, *options: str) -> None:
        self._valkey = Valkey(directory, *options)
        self._dump = directory / "dump.rdb"
        self._copies: list[bytes] = []
        self._outage: asyncio.Task[None] | None = None
        self._valkey.start()

    @property
    def url(self) -> str:
        return self._valkey.url

    @property
    def is_away(self) -> bool:
        return self._outage is not None and not self._outage.done()

    async def inject(self, fault: Fault) -> str:
        """Inject a fault while Redis runs; returns a description."""
        self._copies.append(self._copy())
        match fault.verb:
            case "stop":
                self._valkey.stop()
                self._outage = asyncio.create_task(self._resume(fault.length_s))
            case "kill":
                self._valkey.kill()
                self._outage = asyncio.create_task(self._restart(fault.length_s))
            case "restore_old":
                number = int(fault.which * len(self._copies))
                self._valkey.kill()
                self._dump.write_bytes(self._copies[number])
                self._outage = asyncio.create_task(self._restart(fault.length_s))
                return f"copy {number + 1} of {len(self._copies)}"
            case "flush":
                self._valkey.command("FLUSHALL")
            case "flush_functions":
                self._valkey.command("FLUSHALL")
                self._valkey.command("FUNCTION", "FLUSH")
            case "disconnect":
                num_cut = self._valkey.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                return f"{num_cut} connections"
        return "redis"

    async def until_running(self) -> None:
        """Wait until Redis runs."""
        if self._outage is not None:
            await self._outage

    def close(self) -> None:
        if self._outage is not None:
            self._outage.cancel()
        self._valkey.kill()

    async def _resume(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._valkey.resume()

    async def _restart(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await asyncio.to_thread(self._valkey.start)
        self._dump.unlink(missing_ok=True)

    def _copy(self) -> bytes:
        """A file with its present data, for a later start."""
        self._valkey.command("SAVE")
        content = self._dump.read_bytes()
        self._dump.unlink()
        return content
