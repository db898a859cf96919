"""A worker's side of the weights that workers on one GPU share, and that the keeper holds.

    first worker                 keeper                 later worker
    key                      ──▶
                             ◀── fill                   key                     ──▶ waits
    (fills its own memory)
    key, bytes + memory      ──▶ sealed
                             ◀── memory                 bytes + memory          ◀──
    (waits for the end)                                 (waits for the end)

Nobody else gets memory that is not sealed: if the first worker ends before, the next one fills. The
keeper gives the memory up when the last connection ends. See `services.pool.keeper`.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from services.pool.keeper import MAX_BYTES, PATIENCE_S, KeptMemory, socket_address
from services.runtime.errors import StartupError

_TURN_S = 0.1
"""How often a worker that waits for another one looks whether it should stop."""


@dataclass(frozen=True, slots=True)
class WeightsKey:
    """Names weights by everything that their bytes depend on. `num_bytes` is 0 until they are
    sealed."""

    weights: str
    gpu_uuid: str
    num_bytes: int = 0

    @property
    def name(self) -> str:
        return f"weights {self.weights}"

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "WeightsKey | None":
        """Returns None for another message. Raises ValueError if this is no message at all."""
        fields = json.loads(data)
        if not isinstance(fields, dict) or set(fields) != {"weights", "gpu_uuid", "num_bytes"}:
            return None
        return cls(str(fields["weights"]), str(fields["gpu_uuid"]), int(fields["num_bytes"]))


class WeightsClaim:
    """A worker's claim on weights. `found` is the descriptor and size of sealed memory; None if
    this worker has to fill memory, and to `seal` it. Until then, or `close`, others wait for it."""

    def __init__(self, root: Path, key: WeightsKey, progress: Callable[[], None]) -> None:
        """Waits while another worker fills; `progress` may raise. Raises StartupError if there is
        no keeper, or if the keeper has gone away."""
        self._root, self._key, self._progress = root, key, progress
        self._connection = self._connect()
        try:
            answer, fds = self._exchange(key, [])
        except BaseException:
            self._connection.close()
            raise
        self.found = (fds[0], int(answer["num_bytes"])) if fds else None

    @property
    def num_bytes(self) -> int:
        """The size of sealed memory."""
        return self._key.num_bytes

    def seal(self, fd: int, num_bytes: int) -> KeptMemory:
        """Give filled memory to the keeper, which gives it to others. The caller keeps `fd`."""
        self._key = WeightsKey(self._key.weights, self._key.gpu_uuid, num_bytes)
        _, (kept,) = self._exchange(self._key, [fd])
        return self._kept(kept)

    def take(self) -> KeptMemory:
        """Keep the memory that was found; the connection shows the keeper that it is in use."""
        assert self.found is not None
        fd, num_bytes = self.found
        self._key = WeightsKey(self._key.weights, self._key.gpu_uuid, num_bytes)
        return self._kept(fd)

    def close(self) -> None:
        """Give the claim up: the next worker fills."""
        self._connection.close()
        if self.found is not None:
            os.close(self.found[0])

    def _kept(self, fd: int) -> KeptMemory:
        self._connection.setblocking(False)
        return KeptMemory(self._root, self._key, [fd], self._connection)

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with socket_address(self._root) as address:
                    connection.connect(address)
                connection.settimeout(_TURN_S)
                return connection
            except OSError as error:
                connection.close()
                if time.monotonic() > deadline:
                    raise StartupError(
                        f"no block manager at {self._root}, which keeps the weights of "
                        f"{self._key.gpu_uuid}: {error}"
                    ) from error
            self._progress()
            time.sleep(_TURN_S)

    def _exchange(self, key: WeightsKey, fds: Sequence[int]) -> tuple[dict[str, int], list[int]]:
        try:
            socket.send_fds(self._connection, [key.encode()], fds)
            while True:
                try:
                    data, received, _, _ = socket.recv_fds(
                        self._connection, MAX_BYTES, 1, socket.MSG_CMSG_CLOEXEC
                    )
                    break
                except TimeoutError:
                    self._progress()
            if not data:
                raise ConnectionResetError("it closed the connection")
        except OSError as error:
            raise StartupError(f"the block manager, which keeps the weights: {error}") from error
        return json.loads(data), received
