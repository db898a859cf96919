"""Drafts by a small model with the target's vocabulary, which keeps KV of its own."""

from collections import deque
from collections.abc import Callable, Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import takewhile
from weakref import WeakKeyDictionary, finalize

from services.engine.batch import UNKNOWN_TOKEN, Draw, Fault, Row, RowOutput, RowResult
from services.engine.forward import Drafts, Flight, PendingDrafts, known
from services.engine.sequences.sequence import Sequence
from services.engine.speculation.average import Average

Compute = Callable[[Seq[Row]], Seq[RowResult]]
"""Computes rows with the draft model, and stores their KV in its blocks."""

Launch = Callable[[Seq[Row]], Flight]
"""Launches rows of the draft model, on the worker's device."""

CHUNK, CHUNK_ON_DEVICE = 64, 512
"""The most tokens that catch up in a step."""

_AT_MOST_BEHIND = 2
"""After a step in which all drafts were accepted: the last draft, and the token drawn behind it."""

_FIRST_CHANCE = 0.7
_MOST_DRAFTS = 64
"""How many drafts make a chance, of a sequence and of all of them. Of a few, a chance would often
be so low by accident that none were tried any more."""
_RETURN, _REVIVAL = 0.05, 0.0002
"""Shares of a distance. With each step of a sequence without drafts, its own chance returns by the
first share towards the chance of all sequences, if it is lower, and that chance by the second share
towards `_FIRST_CHANCE`. So drafts that failed are tried again now and then: in the long run
that costs at most _REVIVAL * _FIRST_CHANCE * _MOST_DRAFTS of the time, 0.9 %."""


@dataclass(slots=True)
class _Cache:
    """The draft model's KV of a sequence, and the chance of its drafts.

    tokens       |--------- tokens of the sequence ---------|
    KV computed  |==================================|            num_computed
    drafts                                          |xxxxxx|     of the last step. All but the last
                                                                 have KV, which counts for those
                                                                 that are tokens now

    Where steps run ahead of drafts, two steps may have drafts that are not verified. The first pass
    of the later step has computed the KV of the two tokens before its drafts, whichever drafts of
    the earlier step were accepted.
    """

    chance: Average
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    drafted: deque[Drafts] = field(default_factory=deque)
    """The drafts of each step whose drafts were not verified; the drafts of the first of these
    steps are behind num_computed tokens."""

    def verify(self, sequence: Sequence) -> list[bool]:
        """Which drafts of retired steps have become tokens, up to the first of each step that has
        not. Counts their KV, but not the KV of the last token: the next draft is drawn after it."""
        right, tokens = list[bool](), sequence.tokens
        while self.drafted and len(tokens) > self.num_computed:
            begin, drafts = self.num_computed, known(self.drafted.popleft())
            new = tokens[begin : begin + len(drafts)]
            found = [draft == token for draft, token in zip(drafts, new, strict=False)]
            num_right = [*found, False].index(False)
            right += found[: num_right + 1]
            num_stored = min(num_right, max(len(drafts) - 1, 0))
            if self.drafted:
                num_stored = min(num_right + 1, len(tokens) - begin)
            self.num_computed = begin + num_stored
        if not sequence.num_unknown:
            self.drafted.clear()
        if not self.drafted:
            self.num_computed = min(self.num_computed, len(tokens) - 1)
        return right

    def is_behind(self, sequence: Sequence) -> bool:
        """Whether other tokens have to be computed before those of the next drafts' first pass."""
        if sequence.num_unknown > 1:  # behind drafts in flight: the first pass needs two tokens
            return not self.drafted
        at_most_behind = 1 if sequence.num_unknown else _AT_MOST_BEHIND
        return len(sequence.tokens) - self.num_computed > at_most_behind

    def next_row(self, tokens: Seq[int], most: int) -> Row:
        """The next tokens to compute, without the last one."""
        begin = self.num_computed
        self.num_computed = min(begin + most, len(tokens) - 1)
        return Row(tokens[begin : self.num_computed], begin, self.blocks)


class DraftModel:
    """A drafter with `num_blocks` blocks of `block_size` positions, up to a context of `context`.

    Each draft is drawn by the draft model as the target will draw the token in its place: with the
    same random numbers, penalties and grammar. One forward pass proposes a draft of all rows.

    On a device that computes beside the engine, all passes of a step are launched before the host
    knows a draft, and so is the step that verifies them: rows take drafts on the device.

        host     | launch 1 | launch 2 | launch step | wait |          2 drafts
        device              |  pass 1  |   pass 2    |  step  |

    If it `runs_ahead`, the next step's passes are launched before the host knows which drafts were
    accepted. The rows are moved on the device, and begin one token earlier, since the last draft
    has no KV yet if all were accepted.

        tokens      t | d1 | d2 | d3 |                step 1 draws 3 drafts, and accepts d1
        pass 1        | d1 |  g |                     of step 2: g was drawn behind d1
        pass 2                  | e1 |

    Penalties and grammars depend on the tokens before, so drafts are drawn without them there.

    A sequence keeps its blocks until it ends or moves: when the last reference to it is gone. If
    there are none left, the sequence gives up its blocks that was asked for least recently.
    """

    def __init__(
        self,
        compute: Compute,
        num_blocks: int,
        block_size: int,
        context: int,
        launch: Launch | None = None,
        *,
        runs_ahead: bool = False,
    ) -> None:
        """`launch` is of a device that computes beside the engine. `runs_ahead`: the device can
        move rows by a number of tokens that only it knows."""
        self.runs_ahead = runs_ahead
        self.catches_up = False
        self._compute = compute
        self._launch = launch
        self._block_size = block_size
        self._context = context
        self._free = list(range(num_blocks))
        self._caches: WeakKeyDictionary[Sequence, _Cache] = WeakKeyDictionary()
        """In the order of their last use."""
        self._chance = Average(_FIRST_CHANCE, _MOST_DRAFTS)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def chances(self, sequence: Sequence, most: int) -> list[float]:
        cache = self._caches.get(sequence)
        if cache is None:
            return _powers(max(self._chance.value, _FIRST_CHANCE), most)
        right = cache.verify(sequence)
        for is_right in right:
            cache.chance.add(is_right)
            self._chance.add(is_right)
        if not right:
            self._chance.approach(_FIRST_CHANCE, _REVIVAL)
            if self._chance.value > cache.chance.value:
                cache.chance.approach(self._chance.value, _RETURN)
        return _powers(cache.chance.value, most)

    def prepare(self, asked: Seq[tuple[Sequence, int]], *, may_catch_up: bool) -> list[int]:
        """Compute at most a chunk of tokens of sequences that are behind. Those still behind get no
        drafts, nor do those without blocks, or at the end of the context."""
        chunk = CHUNK_ON_DEVICE if self._launch else CHUNK
        left, rows = chunk * may_catch_up, list[Row]()
        numbers, kept = [], {sequence for sequence, _ in asked}
        for sequence, most in asked:
            cache, tokens = self._cache(sequence), sequence.tokens
            num_tokens = len(tokens) + sequence.num_unknown
            number = min(most, self._context + 1 - num_tokens)
            can_run = number > 0 and (left > 0 or not cache.is_behind(sequence))
            has_blocks = can_run and self._reserve(cache, num_tokens + number - 1, kept)
            if has_blocks and cache.is_behind(sequence) and cache.num_computed < len(tokens) - 1:
                rows.append(cache.next_row(tokens, left))
                left -= len(rows[-1].token_ids)
            numbers.append(number if has_blocks and not cache.is_behind(sequence) else 0)
        self.catches_up = self.runs_ahead and bool(rows)
        if self.catches_up and self._launch:
            self._launch(rows)
        elif rows:
            self._compute(rows)
        return numbers

    def propose(
        self, asked: Seq[tuple[Sequence, int]], behind: Flight | None = None
    ) -> Seq[Drafts]:
        launch = self._launch
        found = self._launched(launch, asked, behind) if launch else self._computed(asked)
        for (sequence, _), drafted in zip(asked, found, strict=True):
            cache = self._caches[sequence]
            if not cache.drafted:
                cache.num_computed = len(sequence.tokens) + sequence.num_unknown
            cache.drafted.append(drafted)
        return found

    def _computed(self, asked: Seq[tuple[Sequence, int]]) -> list[Drafts]:
        drafts: list[list[int]] = [[] for _ in asked]
        going = list(range(len(asked)))
        while going:
            rows = [self._row(asked[i][0], tuple(drafts[i])) for i in going]
            results = zip(going, self._compute(rows), strict=True)
            going = [i for i, result in results if _goes_on(drafts[i], result, *asked[i])]
        return [tuple(drafted) for drafted in drafts]

    def _launched(
        self, launch: Launch, asked: Seq[tuple[Sequence, int]], behind: Flight | None
    ) -> list[Drafts]:
        """Launch all passes. The step that verifies a sequence with penalties or a grammar needs
        its drafts on the host, and waits for them."""
        sources: list[list[tuple[Flight, int]]] = [[] for _ in asked]
        for number in range(max(most for _, most in asked)):
            going = [i for i, (_, most) in enumerate(asked) if most > number]
            rows = []
            for i in going:
                drawn_by = sources[i][-1][1] if number else None
                rows.append(self._row_ahead(asked[i][0], number, drawn_by, behind))
            flight = launch(rows)
            for place, i in enumerate(going):
                sources[i].append((flight, place))
        pending = [PendingDrafts(tuple(of_one)) for of_one in sources]
        return [
            tuple(takewhile(lambda token: token >= 0, drafts.known()))
            if sequence.has_state
            else drafts
            for (sequence, _), drafts in zip(asked, pending, strict=True)
        ]

    def _row_ahead(
        self, sequence: Sequence, number: int, drawn_by: int | None, behind: Flight | None
    ) -> Row:
        """The row of pass `number`: from pass 1 on it takes the draft that row `drawn_by` of the
        pass before draws. It is moved by the step in flight `behind` if that has the sequence."""
        cache, tokens = self._caches[sequence], sequence.tokens
        draws = (_plain(Draw(sequence.rules.sampling, sequence.index)),)
        token_ids, start = tokens[cache.num_computed :], cache.num_computed
        has_unknown = sequence.num_unknown > 0
        if has_unknown:
            token_ids, start = [tokens[-1], UNKNOWN_TOKEN], len(tokens) - 1
        if drawn_by is not None:
            token_ids, start = [UNKNOWN_TOKEN], len(tokens) + has_unknown + number - 1
        return Row(
            *(token_ids, start, cache.blocks),
            draws=draws,
            drawn_by=drawn_by,
            num_unknown=max(0, sequence.num_unknown - 1),
            behind=(behind, sequence.place) if behind and has_unknown else None,
        )

    def _row(self, sequence: Sequence, drafts: tuple[int, ...]) -> Row:
        """The row that draws the token behind `drafts`."""
        cache, tokens = self._caches[sequence], sequence.tokens
        start = len(tokens) + len(drafts) - 1 if drafts else cache.num_computed
        new = drafts[-1:] if drafts else tokens[start:]
        return Row(new, start, cache.blocks, draws=(_plain(sequence.draw_behind(drafts)),))

    def _cache(self, sequence: Sequence) -> _Cache:
        cache = self._caches.pop(sequence, None)
        if cache is None:
            cache = _Cache(Average(max(self._chance.value, _FIRST_CHANCE), _MOST_DRAFTS))
            finalize(sequence, self._free.extend, cache.blocks).atexit = False
        self._caches[sequence] = cache
        return cache

    def _reserve(self, cache: _Cache, num_positions: int, kept: Container[Sequence]) -> bool:
        """Whether the cache has blocks for so many positions now. Others may give up theirs, but
        not those in `kept`."""
        num_missing = -(-num_positions // self._block_size) - len(cache.blocks)
        if num_missing > len(self._free):
            for other, unused in list(self._caches.items()):
                if other not in kept and num_missing > len(self._free):
                    self._free += unused.blocks
                    unused.blocks.clear()
                    unused.num_computed = 0
                    unused.drafted.clear()
        if num_missing > len(self._free):
            return False
        cache.blocks += [self._free.pop() for _ in range(num_missing)]
        return True


def _powers(chance: float, most: int) -> list[float]:
    return [chance**number for number in range(1, most + 1)]


def _goes_on(drafts: list[int], result: RowResult, sequence: Sequence, most: int) -> bool:
    """Add the token of a row to its drafts. Returns whether more may follow: not after a fault, nor
    after a token that ends the text."""
    if isinstance(result, Fault):
        return False
    drafts += result.tokens if isinstance(result, RowOutput) else result
    return len(drafts) < most and drafts[-1] not in sequence.rules.end_ids


def _plain(draw: Draw) -> Draw:
    """The draw without logprobs, which a draft does not need."""
    if draw.sampling.logprobs is None:
        return draw
    return replace(draw, sampling=replace(draw.sampling, logprobs=None))
