"""Drafts by a small model with the target's vocabulary, which keeps KV of its own."""

import time
from collections import deque
from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import takewhile
from weakref import WeakKeyDictionary, finalize

from services.engine.batch import Draw, Fault, Row, RowOutput, RowResult
from services.engine.forward import Drafts, Flight, PendingDrafts, known
from services.engine.sequences.sequence import Sequence
from services.engine.speculation.average import Average, acceptance

Compute = Callable[[Seq[Row]], Seq[RowResult]]
"""Computes rows with the draft model, and stores their KV in its blocks."""

Asked = Mapping[Sequence, int]
"""The number of drafts that each sequence may get at most."""

Launch = Callable[[Seq[Row]], Flight]
"""Launches rows of the draft model, on the worker's device."""

CHUNK, CHUNK_ON_DEVICE = 64, 512
"""The most tokens that catch up in a step."""


@dataclass(slots=True)
class _Cache:
    """The draft model's KV of a sequence, and how many of its drafts are accepted.

    tokens       |--------- tokens of the sequence ---------|
    KV computed  |==================================|            num_computed
    drafts                                          |xxxxxx|     of the last step. All but the last
                                                                 have KV, which counts for those
                                                                 that are tokens now

    Where steps run ahead of drafts, two steps may have drafts that are not verified. The first pass
    of the later step has computed the KV of the two tokens before its drafts, whichever drafts of
    the earlier step were accepted.
    """

    acceptance: Average = field(default_factory=acceptance)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    drafted: deque[Drafts] = field(default_factory=deque)
    """The drafts of each step whose drafts were not verified; the drafts of the first of these
    steps are behind num_computed tokens."""

    def verify(self, sequence: Sequence) -> None:
        """Learn which drafts of retired steps have become tokens, up to the first of each step that
        has not. Counts their KV, but not the KV of the last token: the next draft is drawn after
        it."""
        tokens = sequence.tokens
        while self.drafted and len(tokens) > self.num_computed:
            begin, drafts = self.num_computed, known(self.drafted.popleft())
            new = tokens[begin : begin + len(drafts)]
            found = [draft == token for draft, token in zip(drafts, new, strict=False)]
            num_right = [*found, False].index(False)
            for is_right in found[: num_right + 1]:
                self.acceptance.add(is_right)
            num_stored = min(num_right, max(len(drafts) - 1, 0))
            if self.drafted:
                num_stored = min(num_right + 1, len(tokens) - begin)
            self.num_computed = begin + num_stored
        if not sequence.num_unknown:
            self.drafted.clear()
        if not self.drafted:
            self.num_computed = min(self.num_computed, len(tokens) - 1)

    def is_behind(self, sequence: Sequence) -> bool:
        """Whether other tokens have to be computed before the next drafts' first pass, which takes
        up to two tokens: the last draft, if all were accepted, and the token drawn behind it."""
        if sequence.num_unknown > 1:  # behind drafts in flight: the first pass needs two tokens
            return not self.drafted
        return len(sequence.tokens) + min(sequence.num_unknown, 1) - self.num_computed > 2

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
        self._compute = compute
        self._launch = launch
        self._block_size = block_size
        self._context = context
        self._free = list(range(num_blocks))
        self._caches: WeakKeyDictionary[Sequence, _Cache] = WeakKeyDictionary()
        """In the order of their last use."""

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def chances(self, sequence: Sequence, most: int) -> list[float]:
        cache = self._caches.get(sequence) or _Cache()
        cache.verify(sequence)
        return [cache.acceptance.value**number for number in range(1, most + 1)]

    def propose(
        self, asked: Asked, *, may_catch_up: bool = True
    ) -> tuple[dict[Sequence, Drafts], float | None]:
        """Compute at most a chunk of tokens of sequences that are behind. Those still behind get no
        drafts, nor do those without blocks, or at the end of the context."""
        catch_up_s: float | None = 0.0
        launch, ready, rows = self._launch, dict[Sequence, int](), list[Row]()
        left = (CHUNK_ON_DEVICE if launch else CHUNK) * may_catch_up
        for sequence, most in asked.items():
            cache, tokens = self._cache(sequence), sequence.tokens
            num_tokens = len(tokens) + sequence.num_unknown
            number = min(most, self._context + 1 - num_tokens)
            if number <= 0 or (left <= 0 and cache.is_behind(sequence)):
                continue
            if not self._reserve(cache, num_tokens + number - 1, asked):
                continue
            if cache.is_behind(sequence) and cache.num_computed < len(tokens) - 1:
                rows.append(cache.next_row(tokens, left))
                left -= len(rows[-1].token_ids)
            if not cache.is_behind(sequence):
                ready[sequence] = number
        if rows and launch and self.runs_ahead:
            launch(rows)
            catch_up_s = None
        elif rows:
            began = time.perf_counter()
            self._compute(rows)
            catch_up_s = time.perf_counter() - began
        found = self._launched(launch, ready) if launch else self._computed(ready)
        for sequence, drafts in found.items():
            cache = self._caches[sequence]
            if not cache.drafted:
                cache.num_computed = len(sequence.tokens) + sequence.num_unknown
            cache.drafted.append(drafts)
        return found, catch_up_s

    def _computed(self, asked: Asked) -> dict[Sequence, Drafts]:
        drafts = {sequence: list[int]() for sequence in asked}
        going = list(asked)
        while going:
            rows = [self._row(one, tuple(drafts[one])) for one in going]
            results = zip(going, self._compute(rows), strict=True)
            going = [one for one, row in results if _goes_on(drafts[one], row, one, asked[one])]
        return {sequence: tuple(drafted) for sequence, drafted in drafts.items()}

    def _launched(self, launch: Launch, asked: Asked) -> dict[Sequence, Drafts]:
        """Launch all passes. The step that verifies a sequence with penalties or a grammar needs
        its drafts on the host, and waits for them."""
        sources = {sequence: list[tuple[Flight, int]]() for sequence in asked}
        for number in range(max(asked.values(), default=0)):
            going = [sequence for sequence, most in asked.items() if most > number]
            flight = launch([self._row_ahead(one, number) for one in going])
            for place, sequence in enumerate(going):
                sources[sequence].append((flight, place))
        found = dict[Sequence, Drafts]()
        for sequence, of_one in sources.items():
            drafts = PendingDrafts(tuple(of_one))
            found[sequence] = drafts
            if sequence.has_state:
                found[sequence] = tuple(takewhile(lambda token: token >= 0, drafts.known()))
        return found

    def _row_ahead(self, sequence: Sequence, number: int) -> Row:
        """The row of pass `number`. From pass 1 on its token is the draft of the pass before. The
        last two tokens of a sequence in flight are on the device, or the last one alone if no
        drafts are in flight."""
        cache, tokens = self._caches[sequence], sequence.tokens
        num_unknown = sequence.num_unknown
        token_ids, start = tokens[cache.num_computed :], cache.num_computed
        if number:
            token_ids, start = [], len(tokens) + min(num_unknown, 1) + number - 1
        elif num_unknown:
            token_ids, start = tokens[-1:] if num_unknown == 1 else [], len(tokens) - 1
        return Row(
            token_ids,
            start,
            cache.blocks,
            draws=(_plain(Draw(sequence.rules.sampling, sequence.index)),),
            owner=sequence.owner,
            num_on_device=1 if number else min(num_unknown, 2),
            num_unknown=max(0, num_unknown - 1),
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
                    unused.num_computed = 0
                    unused.drafted.clear()
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
