"""Hosts as network namespaces, and the wire between them: a thread that forwards their packets, and
loses, delays or drops them as a test says.

    namespace a [10.x.y.2] ──┐
    namespace b [10.x.y.3] ──┼── Network: loss, delay, one-way drops
    this host   [10.x.y.1] ──┘

`netem` does the same in the kernel, where the kernel has it; containers often run without it.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

NAMES = ("here", "a", "b")
_SUBNET = f"10.{100 + os.getpid() % 100}.{os.getpid() % 251}"
"""Each test run uses its own subnet."""
ADDRESSES = {name: f"{_SUBNET}.{number}" for number, name in enumerate(NAMES, 1)}
_TUNSETIFF, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000
_MTU = 9000
_BY_ADDRESS = {bytes(map(int, ip.split("."))): name for name, ip in ADDRESSES.items()}


def why_not() -> str:
    """The reason why this process may not make namespaces; "" if it may."""
    probe = ["ip", "netns", "add", f"quire-probe-{os.getpid()}"]
    try:
        made = subprocess.run(probe, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "there is no `ip` (iproute2)"
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe[-1]], check=True)
    return "" if Path("/dev/net/tun").exists() else "there is no /dev/net/tun"


class Network:
    """A network with three ends. Each direction of a pair has its own settings, by (from, to):
    `loss`: the share of packets that are lost; `delay_s`; `blocked`."""

    def __init__(self, seed: int = 0) -> None:
        self.loss = 0.0
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        """The rate of each direction; 0: no limit."""
        self.blocked: set[tuple[str, str]] = set()
        self._random = random.Random(seed)
        self._free_at: dict[tuple[str, str], float] = {}
        self._prefix = f"quire-{os.getpid()}"
        self._ends = {name: self._open(name) for name in NAMES}
        self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._forward, name="network", daemon=True)
        self._thread.start()

    def within(self, name: str) -> Sequence[str]:
        """The command prefix that runs a process on that host."""
        return ("ip", "netns", "exec", f"{self._prefix}-{name}")

    def heal(self) -> None:
        self.loss = self.delay_s = self.bytes_per_s = 0.0
        self.blocked = set()

    def close(self) -> None:
        os.write(self._stopped[1], b"x")
        self._thread.join()
        for fd in (*self._ends.values(), *self._stopped):
            os.close(fd)
        for name in NAMES[1:]:
            _run("ip", "netns", "del", f"{self._prefix}-{name}")

    def _open(self, name: str) -> int:
        """The host's end: a TUN device, moved into its namespace."""
        device = f"qtun{os.getpid() % 100000}{name[0]}"
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", device.encode(), _TUN | _NO_HEADER))
        inside: tuple[str, ...] = ()
        if name != "here":
            namespace = f"{self._prefix}-{name}"
            _run("ip", "netns", "add", namespace)
            _run("ip", "link", "set", device, "netns", namespace)
            inside = ("-n", namespace)
            _run("ip", *inside, "link", "set", "lo", "up")
        _run("ip", *inside, "address", "add", f"{ADDRESSES[name]}/24", "dev", device)
        _run("ip", *inside, "link", "set", device, "mtu", str(_MTU), "up")
        return fd

    def _forward(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        number = 0
        names = {fd: name for name, fd in self._ends.items()}
        while True:
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, fd, packet = heapq.heappop(waiting)
                with suppress(OSError):  # the other end's queue is full
                    os.write(fd, packet)
            pause_s = max(0.0, waiting[0][0] - now) if waiting else None
            readable, _, _ = select.select([*names, self._stopped[0]], [], [], pause_s)
            if self._stopped[0] in readable:
                return
            for fd in readable:
                for packet in _packets(fd):
                    target = _BY_ADDRESS.get(packet[16:20])
                    if target is None or (due := self._due(names[fd], target, packet)) is None:
                        continue
                    number += 1
                    heapq.heappush(waiting, (due, number, self._ends[target], packet))

    def _due(self, source: str, target: str, packet: bytes) -> float | None:
        """The time at which a packet arrives; None: never."""
        pair = source, target
        if pair in self.blocked or (self.loss and self._random.random() < self.loss):
            return None
        sent_at = time.monotonic()
        if self.bytes_per_s:
            sent_at = max(sent_at, self._free_at.get(pair, 0.0)) + len(packet) / self.bytes_per_s
            self._free_at[pair] = sent_at
        return sent_at + self.delay_s


def _packets(fd: int) -> Sequence[bytes]:
    packets: list[bytes] = []
    with suppress(BlockingIOError):
        while len(packets) < 64:
            packets.append(os.read(fd, _MTU + 100))
    return packets


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
