"""What happens to a system, and when: a function of the seed alone."""

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
    "flush": ("redis",),
    "wipe": ("redis",),
    "age": ("redis",),
    "cut": ("redis",),
}
KINDS = tuple(f"{verb} {role}" for verb, roles in _ROLES.items() for role in roles)
"""What no stream may notice but by a pause. Of Redis: it is killed and comes back empty, or with an
old copy of its data (age); it loses its data, or its functions too (wipe); all its connections
break (cut)."""

MEAN_PAUSE_S = 0.2
LENGTHS_S = (0.3, 0.3, 1.0, 1.0, 3.0, 10.0)


@dataclass(frozen=True, slots=True)
class Event:
    """`pause_s`: after the one before. `which`: in [0, 1), of those that it may hit. `length_s`: of
    standing still, or being away."""

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
        lasts = self.verb == "stop" or self.kind in ("kill redis", "age redis")
        length = f" for {self.length_s:.1f} s" if lasts else ""
        return f"+{self.pause_s:.1f} s {self.kind}{length} ({self.which:.3f})"


def schedule(seed: int, kinds: Sequence[str] = KINDS) -> Iterator[Event]:
    """Without end."""
    chance = random.Random(seed)
    while True:
        yield Event(
            pause_s=min(chance.expovariate(1 / MEAN_PAUSE_S), 4 * MEAN_PAUSE_S),
            kind=chance.choice(kinds),
            which=chance.random(),
            length_s=chance.choice(LENGTHS_S),
        )
