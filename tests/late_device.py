"""A device that is as late as possible: the copies, KV writes and results of a step happen only
when a caller waits for them. A block that is read, stamped or given away too early then has other
contents than it should."""

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from services.engine.batch import Draw, Fault, Row, RowOutput, RowResult, Wait, with_draws_behind
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
        self.num_ahead += sum(row.drawn_by is not None for row in rows)
        if any(row.draw_behind is not None for row in rows):
            assert self._last is not None
            assert not any(row.num_drafts or row.num_unknown for row in rows)
            rows = with_draws_behind(rows, self._last.result())  # as the runner waits for it
        frozen = tuple(_as_now(row) for row in rows)
        flight = LateFlight(self, self._last, frozen, tuple(copies))
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
        """Compute all steps up to this one, in the order of their launches."""
        while until.computed is None:
            flight = self.flights[0]
            flight.rows = tuple(flight.known(row) for row in flight.rows)
            flight.computed = self._forward.launch(flight.rows, flight.copies).result()
            flight.before = None
            self.flights.popleft()


@dataclass(eq=False, slots=True)
class LateFlight:
    device: LateForward
    before: "LateFlight | None"
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

    def known(self, row: Row) -> Row:
        """The row with the tokens that other steps drew for it, behind the drafts that were
        accepted. After a fault there is no such token: like a GPU, the device goes on with any."""
        token_ids = [*row.token_ids]
        if row.drafted_by:
            found = [flight.result()[number] for flight, number in row.drafted_by]
            drafts = [token[0] if isinstance(token, tuple) else 0 for token in found]
            token_ids[-len(drafts) :] = drafts
        moved = 0
        if row.behind is not None:
            target, place = row.behind
            assert isinstance(target, LateFlight)
            drawn, moved = target.accepted(place)
            if row.drawn_by is None:
                token_ids = [*token_ids[:1], *drawn][-2:]
        if row.drawn_by is not None:
            assert self.before is not None
            drawn, accepted = self.before.accepted(row.drawn_by)
            token_ids[0], moved = drawn[-1], moved or accepted
        assert moved <= row.num_unknown
        known = replace(row, token_ids=token_ids, start=row.start + moved, drafted_by=())
        return replace(known, drawn_by=None, behind=None, num_unknown=0)

    def accepted(self, place: int) -> tuple[list[int], int]:
        """The draws of a row up to the first token that is no draft of its own, and how many tokens
        before that token are drafts."""
        result = self.result()[place]  # then the row is known
        row = self.rows[place]
        tokens = result.tokens if isinstance(result, RowOutput) else result
        if isinstance(tokens, Fault):
            return [0], 0
        drafts = row.token_ids[len(row.token_ids) - row.num_drafts :]
        right = [draft == token for draft, token in zip(drafts, tokens, strict=False)]
        number = min([*right, False].index(False), len(tokens) - 1)
        return list(tokens[: number + 1]), number


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
