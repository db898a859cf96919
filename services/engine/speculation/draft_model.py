"""Drafts by a small model with the target's vocabulary, which keeps KV of its own.

See ADR 165.
"""

from collections.abc import Callable, Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary, finalize

from services.engine.batch import Draw, Fault, Row, RowOutput, RowResult
from services.engine.sequences.sequence import Sequence

Compute = Callable[[Seq[Row]], Seq[RowResult]]
"""Computes rows with the draft model, and stores their KV in its blocks."""

CHUNK = 64
"""The most tokens that catch up in a step."""

_AT_MOST_BEHIND = 2
"""After a step in which all drafts were accepted: the last draft, and the token drawn behind it."""


@dataclass(slots=True)
class _Cache:
    """The draft model's KV of a sequence.

    tokens       |--------- tokens of the sequence ---------|
    KV computed  |==================================|            num_computed
    KV drafted                                      |xxxxxx|     drafts of the last step: KV of
                                                                 those that are tokens now counts
    """

    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    drafted: tuple[int, ...] = ()

    def update(self, tokens: Seq[int]) -> None:
        """Count the KV of drafts that have become tokens. The last token is always computed again:
        the next draft is drawn after it."""
        for draft in self.drafted:
            if self.num_computed == len(tokens) or tokens[self.num_computed] != draft:
                break
            self.num_computed += 1
        self.drafted = ()
        self.num_computed = min(self.num_computed, len(tokens) - 1)

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

    A sequence keeps its blocks until it ends or moves: when the last reference to it is gone. If
    there are none left, the sequence gives up its blocks that was asked for least recently.
    """

    def __init__(self, compute: Compute, num_blocks: int, block_size: int, context: int) -> None:
        self._compute = compute
        self._block_size = block_size
        self._context = context
        self._free = list(range(num_blocks))
        self._caches: WeakKeyDictionary[Sequence, _Cache] = WeakKeyDictionary()
        """In the order of their last use."""

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def prepare(self, asked: Seq[tuple[Sequence, int]], *, may_catch_up: bool) -> list[int]:
        """Compute at most `CHUNK` tokens of sequences that are behind. Those still behind get no
        drafts, nor do those without blocks, or at the end of the context."""
        left, rows = CHUNK * may_catch_up, list[Row]()
        numbers, kept = [], {sequence for sequence, _ in asked}
        for sequence, most in asked:
            cache, tokens = self._cache(sequence), sequence.tokens
            cache.update(tokens)
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

    def propose(self, asked: Seq[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        drafts: list[list[int]] = [[] for _ in asked]
        going = list(range(len(asked)))
        while going:
            rows = [self._row(asked[i][0], tuple(drafts[i])) for i in going]
            results = zip(going, self._compute(rows), strict=True)
            going = [i for i, result in results if _goes_on(drafts[i], result, *asked[i])]
        for (sequence, _), drafted in zip(asked, drafts, strict=True):
            cache = self._caches[sequence]
            cache.num_computed, cache.drafted = len(sequence.tokens), tuple(drafted[:-1])
        return [tuple(drafted) for drafted in drafts]

    def _row(self, sequence: Sequence, drafts: tuple[int, ...]) -> Row:
        """The row that draws the token behind `drafts`."""
        cache, tokens = self._caches[sequence], sequence.tokens
        start = len(tokens) + len(drafts) - 1 if drafts else cache.num_computed
        new = drafts[-1:] if drafts else tokens[start:]
        return Row(new, start, cache.blocks, draws=(_plain(sequence.draw_behind(drafts)),))

    def _cache(self, sequence: Sequence) -> _Cache:
        cache = self._caches.pop(sequence, None)
        if cache is None:
            cache = _Cache()
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
