"""Drafts by a small model with the target's vocabulary, which keeps KV of its own."""

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
    """

    chance: Average
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    drafted: Drafts = ()

    def verify(self, tokens: Seq[int]) -> list[bool]:
        """Which of the drafts have become tokens, up to the first that has not. Counts their KV,
        but not the KV of the last token: the next draft is drawn after it."""
        right: list[bool] = []
        new = tokens[self.num_computed : self.num_computed + len(self.drafted)]
        for draft, token in zip(known(self.drafted), new, strict=False):
            right.append(draft == token)
            if draft != token:
                break
        num_stored = max(len(self.drafted) - 1, 0)
        self.num_computed = min(self.num_computed + min(sum(right), num_stored), len(tokens) - 1)
        self.drafted = ()
        return right

    def is_behind(self, tokens: Seq[int]) -> bool:
        return len(tokens) - self.num_computed > _AT_MOST_BEHIND

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
    ) -> None:
        """`launch` is of a device that computes beside the engine."""
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
        right = cache.verify(sequence.tokens)
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
            number = min(most, self._context + 1 - len(tokens))
            can_run = number > 0 and (left > 0 or not cache.is_behind(tokens))
            has_blocks = can_run and self._reserve(cache, len(tokens) + number - 1, kept)
            if has_blocks and cache.is_behind(tokens):
                rows.append(cache.next_row(tokens, left))
                left -= len(rows[-1].token_ids)
            numbers.append(number if has_blocks and not cache.is_behind(tokens) else 0)
        if rows:
            self._compute(rows)
        return numbers

    def propose(self, asked: Seq[tuple[Sequence, int]]) -> Seq[Drafts]:
        found = self._launched(self._launch, asked) if self._launch else self._computed(asked)
        for (sequence, _), drafted in zip(asked, found, strict=True):
            cache = self._caches[sequence]
            cache.num_computed, cache.drafted = len(sequence.tokens), drafted
        return found

    def _computed(self, asked: Seq[tuple[Sequence, int]]) -> list[Drafts]:
        drafts: list[list[int]] = [[] for _ in asked]
        going = list(range(len(asked)))
        while going:
            rows = [self._row(asked[i][0], tuple(drafts[i])) for i in going]
            results = zip(going, self._compute(rows), strict=True)
            going = [i for i, result in results if _goes_on(drafts[i], result, *asked[i])]
        return [tuple(drafted) for drafted in drafts]

    def _launched(self, launch: Launch, asked: Seq[tuple[Sequence, int]]) -> list[Drafts]:
        """Launch all passes. The step that verifies a sequence with penalties or a grammar needs
        its drafts on the host, and waits for them."""
        sources: list[list[tuple[Flight, int]]] = [[] for _ in asked]
        for number in range(max(most for _, most in asked)):
            going = [i for i, (_, most) in enumerate(asked) if most > number]
            rows = []
            for i in going:
                drawn_by = sources[i][-1][1] if number else None
                rows.append(self._row_ahead(asked[i][0], number, drawn_by))
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

    def _row_ahead(self, sequence: Sequence, number: int, drawn_by: int | None) -> Row:
        """The row of pass `number`: from pass 1 on it takes the draft that row `drawn_by` of the
        pass before draws."""
        cache, tokens = self._caches[sequence], sequence.tokens
        draws = (_plain(Draw(sequence.rules.sampling, sequence.index)),)
        if drawn_by is None:
            return Row(tokens[cache.num_computed :], cache.num_computed, cache.blocks, draws=draws)
        start = len(tokens) + number - 1
        return Row((UNKNOWN_TOKEN,), start, cache.blocks, draws=draws, drawn_by=drawn_by)

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
                    unused.num_computed, unused.drafted = 0, ()
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
