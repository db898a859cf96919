"""A device that is as late as possible: the copies, KV writes and results of a step happen only
when a caller waits for them. A block that is read, stamped or given away too early then has other
contents than it should."""

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from weakref import WeakKeyDictionary

import numpy as np

from services.engine.batch import (
    Draw,
    Fault,
    Owner,
    Row,
    RowOutput,
    RowResult,
    Wait,
    with_draws_behind,
)
from services.engine.forward import ForwardPass


@dataclass(frozen=True, slots=True)
class CompleteFlight:
    """The flight of a step that was computed while it was launched."""

    results: Sequence[RowResult] = ()

    @property
    def is_complete(self) -> bool:
        return True

    def result(self) -> Sequence[RowResult]:
        return self.results


class LateForward:
    """Records a step at its launch; the forward pass behind it computes the step in `result`.

    As on a GPU, a step is fixed at its launch: block tables and adjustments are copied then.
    `flights`: the steps for which no caller has waited yet; the engine launches at most one while
    another is in flight.
    """

    def __init__(self, forward: ForwardPass, most_flights: int = 2) -> None:
        self._forward = forward
        self._most_flights = most_flights
        self._last: LateFlight | None = None
        self.flights: deque[LateFlight] = deque()
        self.num_ahead = 0
        """How many rows took a token that was not known at their launch."""
        self.on_idle = forward.on_idle

    def launch(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = ()) -> "LateFlight":
        assert len(self.flights) < self._most_flights, "too many steps are in flight"
        self.num_ahead += sum(row.num_on_device > row.num_drafts for row in rows)
        if any(row.draw_behind is not None for row in rows):
            assert self._last is not None
            assert not any(row.num_drafts or row.num_unknown for row in rows)
            # As the runner waits for it.
            rows = with_draws_behind(rows, self._last.rows, self._last.result())
        frozen = tuple(_as_now(row) for row in rows)
        entries = [_TABLE.setdefault(row.owner, Entry()) for row in frozen if row.owner is not None]
        before = {id(entry.last): entry.last for entry in entries if entry.last is not None}
        flight = LateFlight(self, tuple(before.values()), frozen, tuple(copies))
        for entry in entries:
            entry.last = flight
        self._last = flight
        self.flights.append(flight)
        return flight

    def yield_device(self, wait: Wait) -> None:
        self._forward.yield_device(wait)

    @property
    def block_ids(self) -> set[int]:
        """All blocks that the steps in flight read or write."""
        return set(chain.from_iterable(flight.block_ids for flight in self.flights))

    def compute(self, until: "LateFlight") -> None:
        """Compute all steps up to this one, in the order of their launches, and the steps before
        them of other devices that have the same sequences."""
        while until.computed is None:
            flight = self.flights[0]
            for other in flight.before:
                other.result()
            flight.rows = tuple(map(_known, flight.rows))
            flight.computed = self._forward.launch(flight.rows, flight.copies).result()
            flight.before = ()
            self.flights.popleft()
            for row, result in zip(flight.rows, flight.computed, strict=True):
                if row.owner is not None:
                    _TABLE[row.owner].write(flight, row, result)


@dataclass(eq=False, slots=True)
class LateFlight:
    device: LateForward
    before: "tuple[LateFlight, ...]"
    rows: tuple[Row, ...]
    copies: tuple[tuple[int, int], ...]
    computed: Sequence[RowResult] | None = field(default=None)

    @property
    def is_complete(self) -> bool:
        return self.computed is not None

    def result(self) -> Sequence[RowResult]:
        self.device.compute(until=self)
        assert self.computed is not None
        return self.computed

    @property
    def block_ids(self) -> set[int]:
        return set(chain(*self.copies, *(row.block_table for row in self.rows)))


@dataclass(slots=True)
class Entry:
    """A sequence's entry on the devices: its tokens by position, and the number of drafts that its
    last step with drafts accepted. `last` is the sequence's last flight that is not computed."""

    tokens: dict[int, int] = field(default_factory=dict)
    accepted: int = 0
    last: LateFlight | None = None

    def write(self, flight: LateFlight, row: Row, result: RowResult) -> None:
        """Note what a row has drawn. After a fault there is no such token: like a GPU, the device
        goes on with any."""
        if self.last is flight:
            self.last = None
        drawn = result.tokens if isinstance(result, RowOutput) else result
        tokens = [0] if isinstance(drawn, Fault) else list(drawn)
        if not row.num_drafts and len(row.draws) != 1:
            return
        first = row.start + len(row.token_ids) - row.num_drafts
        self.tokens |= dict(enumerate(tokens, first))
        if row.num_drafts:
            base, *drafts = row.token_ids[-1 - row.num_drafts :]
            self.tokens[first - 1] = base
            right = [draft == token for draft, token in zip(drafts, tokens, strict=False)]
            self.accepted = min([*right, False].index(False), len(tokens) - 1)


_TABLE: WeakKeyDictionary[Owner, Entry] = WeakKeyDictionary()
"""The token tables of all devices: each sequence is on one device, and its draft model's."""


def _known(row: Row) -> Row:
    """The row with the tokens that only the device knows, behind the drafts that were accepted."""
    if row.owner is None or not (row.num_on_device or row.num_unknown):
        return row
    entry = _TABLE[row.owner]
    moved = entry.accepted if row.num_unknown else 0
    assert moved <= row.num_unknown
    start = row.start + moved
    first = start + len(row.token_ids)
    found = [entry.tokens[place] for place in range(first, first + row.num_on_device)]
    known = replace(row, token_ids=(*row.token_ids, *found), start=start)
    return replace(known, num_on_device=0, num_unknown=0)


def _as_now(row: Row) -> Row:
    draws = tuple(_draw_as_now(draw) for draw in row.draws)
    tables = tuple(row.token_ids), tuple(row.block_table)
    return replace(row, token_ids=tables[0], block_table=tables[1], draws=draws)


def _draw_as_now(draw: Draw) -> Draw:
    """A runner makes the masks of a step before its launch returns."""
    if draw.grammar is not None:
        grammar = copy(draw.grammar)
        grammar._tokens = tuple(draw.grammar._tokens)
        draw = replace(draw, grammar=grammar)
    if draw.adjustment is None:
        return draw
    seen, counts = np.copy(draw.adjustment.seen), np.copy(draw.adjustment.counts)
    return replace(draw, adjustment=replace(draw.adjustment, seen=seen, counts=counts))


def computes_at_launch(forward: ForwardPass) -> ForwardPass:
    """The device of a CPU: a step is computed at its launch."""
    return forward


Device = Callable[[ForwardPass], ForwardPass]

DEVICES: dict[str, Device] = {"computes at launch": computes_at_launch, "late": LateForward}
"""The devices on which the tests of engine and workers run."""
