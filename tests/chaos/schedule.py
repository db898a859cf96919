"""What happens to a system, and when: a function of the seed alone."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KILLS = ("kill prefill", "kill decode", "kill gateway", "kill block_manager")
KINDS = (*KILLS, "kill redis", "stop prefill", "stop decode", "drain decode")
USUAL = (*KINDS, "kill decode")
"""What no stream may notice but by a pause; what comes twice is drawn twice as often."""

MEAN_PAUSE_S = 3.0


@dataclass(frozen=True, slots=True)
class Event:
    """`pause_s`: after the one before. `which`: in [0, 1), of those that it may hit. `length_s`: of
    a stop."""

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
        length = f" for {self.length_s:.1f} s" if self.verb == "stop" else ""
        return f"+{self.pause_s:.1f} s {self.kind}{length} ({self.which:.3f})"


def schedule(seed: int, kinds: Sequence[str] = USUAL) -> Iterator[Event]:
    """Without end."""
    chance = random.Random(seed)
    while True:
        yield Event(
            pause_s=min(chance.expovariate(1 / MEAN_PAUSE_S), 3 * MEAN_PAUSE_S),
            kind=chance.choice(kinds),
            which=chance.random(),
            length_s=chance.choice([0.3, 1.0, 3.0, 8.0]),
        )
