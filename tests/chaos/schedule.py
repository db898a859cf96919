"""The faults of a run and their times, which depend on the seed alone."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WORKERS = ("prefill", "decode")
PROCESSES = (*WORKERS, "gateway", "block_manager")
_ROLES = {
    "kill": (*PROCESSES, "redis"),
    "stop": (*PROCESSES, "redis"),
    "terminate": PROCESSES,
    "drain": WORKERS,
    "scale": WORKERS,
    "upgrade": ("run",),
    "reload": ("run",),
    "retain": ("cache",),
    "role": WORKERS,
    "flush": ("redis",),
    "flush_functions": ("redis",),
    "restore_old": ("redis",),
    "disconnect": ("redis",),
}
FAULT_KINDS = tuple(f"{verb} {role}" for verb, roles in _ROLES.items() for role in roles)
"""Faults of which clients may see only a delay. A worker takes the other role (role). All
workers read equal weights from a file with other bytes (reload). A prefix is computed and retained
(retain). Redis is killed and returns empty, or with an old copy of its data
(restore_old); it loses its data, or its functions too (flush_functions), or all its connections
(disconnect)."""

MEAN_PAUSE_S = 0.2
LENGTHS_S = (0.3, 0.3, 1.0, 1.0, 3.0, 10.0)


@dataclass(frozen=True, slots=True)
class Fault:
    """`pause_s`: the time since the fault before. `which`, in [0, 1): chooses the process.
    `length_s`: how long the process is stopped, or dead."""

    pause_s: float
    kind: str
    which: float
    length_s: float

    @property
    def verb(self) -> str:
        return self.kind.split()[0]

    @property
    def role(self) -> str:
        return self.kind.split()[1]

    def __str__(self) -> str:
        lasts = self.verb == "stop" or self.kind in ("kill redis", "restore_old redis")
        length = f" for {self.length_s:.1f} s" if lasts else ""
        return f"+{self.pause_s:.1f} s {self.kind}{length} ({self.which:.3f})"


def schedule(
    seed: int, kinds: Sequence[str] = FAULT_KINDS, *, once: bool = False
) -> Iterator[Fault]:
    """Endless faults; `once`: one of each kind, in an order that the seed determines."""
    chance = random.Random(seed)
    if once:
        yield from (_fault(chance, kind) for kind in chance.sample(kinds, len(kinds)))
        return
    while True:
        yield _fault(chance, chance.choice(kinds))


def _fault(chance: random.Random, kind: str) -> Fault:
    return Fault(
        pause_s=min(chance.expovariate(1 / MEAN_PAUSE_S), 4 * MEAN_PAUSE_S),
        kind=kind,
        which=chance.random(),
        length_s=chance.choice(LENGTHS_S),
    )
