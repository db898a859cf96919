"""header.json: geometry and identity of a pool, for each process that opens its directory."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from blockstore.records import PoolSpec
from blockstore.store import FUNCTION_LIBRARY, PREVIOUS_LIBRARY
from services.pool.layout import PoolLayout

ArenaKind = Literal["file", "cuda"]
"""Where a pool's arena is: in the file `kv` of its directory, or in the memory of a GPU."""


class BadHeader(Exception):
    """A header.json that this version cannot read."""


@dataclass(frozen=True, slots=True)
class PoolHeader:
    """The content of header.json."""

    pool_id: str
    run_id: str
    """The run id of the Redis server with the pool's ledger; a server with another id has lost
    it."""
    layout: PoolLayout
    num_blocks: int
    watermark_blocks: int
    colder_of: str | None = None
    """The pool that swaps its blocks to this pool; None if this is no swap pool."""
    ledger_epoch: int = 1
    """1 + the number of times that the ledger was lost."""
    kind: ArenaKind = "file"
    gpu_uuids: tuple[str, ...] = ()
    """The GPU that has the arena of each rank; empty for files."""
    library: str = FUNCTION_LIBRARY
    """The function library of the pool's ledger: workers of another version do not join."""
    memory_bytes: int = 0
    """The size of an arena's allocation, which may be more than its blocks take."""

    @property
    def spec(self) -> PoolSpec:
        """The pool's description for the block store."""
        return PoolSpec(
            pool_id=self.pool_id,
            model=self.layout.model,
            fingerprint=self.layout.fingerprint,
            num_blocks=self.num_blocks,
            block_size=self.layout.block_size,
            block_bytes=self.layout.block_bytes * self.layout.tensor_parallel_size,
            watermark_blocks=self.watermark_blocks,
        )

    @property
    def arena_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    def write(self, path: Path) -> None:
        path.touch(mode=0o600, exist_ok=False)
        path.write_bytes(self.dump())

    @classmethod
    def read(cls, path: Path) -> "PoolHeader":
        """Read a header. Raises BadHeader if it is invalid, OSError if the file cannot be read."""
        return cls.parse(path.read_bytes(), str(path))

    @classmethod
    def parse(cls, text: bytes, name: str = "header") -> "PoolHeader":
        """Raises BadHeader if it is invalid. `name` names the header in the error."""
        try:
            header = _ADAPTER.validate_json(text, strict=True)
            return header if b'"library"' in text else replace(header, library=PREVIOUS_LIBRARY)
        except ValidationError as error:
            raise BadHeader(f"{name}: {error}") from error

    def dump(self) -> bytes:
        return _ADAPTER.dump_json(self, indent=2)


_ADAPTER = TypeAdapter(PoolHeader)
