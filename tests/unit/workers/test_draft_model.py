"""The draft model as a drafter: what it computes, and when; with a computation that draws its
tokens from the KV that it finds in the blocks. Blocks of 4."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from services.engine.batch import Draw, Fault, Row, RowResult
from services.engine.forward import known
from services.engine.sequences.sequence import Branch, Rules, Sequence
from services.engine.speculation.draft_model import CHUNK, DraftModel
from tests.late_device import CompleteFlight, LateForward

from .fakes import SAMPLED, next_token, ticket

SIZE = 4
CONTEXT = 1000


class Computing:
    """Keeps the token of each position as its KV, and draws after those that it reads."""

    def __init__(self) -> None:
        self.kv: dict[tuple[int, int], int] = {}
        self.steps: list[Seq[Row]] = []
        self.broken: int | None = None
        """The token after which nothing is finite."""

    def __call__(self, rows: Seq[Row]) -> list[RowResult]:
        self.steps.append(rows)
        return [self._compute(row) for row in rows]

    def _compute(self, row: Row) -> RowResult:
        end = row.start + len(row.token_ids)
        slots = [(row.block_table[i // SIZE], i % SIZE) for i in range(end)]
        for slot, token in zip(slots[row.start :], row.token_ids, strict=True):
            self.kv[slot] = token
        context = [self.kv[slot] for slot in slots]
        if context[-1] == self.broken:
            return Fault.NOT_FINITE
        return tuple(next_token(context, draw) for draw in row.draws)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for rows in self.steps for row in rows)


class Drafts:
    """`is_late`: no draft is known before the last pass is launched."""

    def __init__(
        self, num_blocks: int = 400, context: int = CONTEXT, *, is_late: bool = False
    ) -> None:
        self.computing = Computing()
        forward: Any = SimpleNamespace(
            launch=lambda rows, *_: CompleteFlight(self.computing(rows)), on_idle=None
        )
        self.device = LateForward(forward, most_flights=99)
        if is_late:
            compute: Any = lambda rows: self.device.launch(rows).result()  # noqa: E731  # in order
            self.model = DraftModel(compute, num_blocks, SIZE, context, self.device.launch)
        else:
            self.model = DraftModel(self.computing, num_blocks, SIZE, context)

    def ask(
        self, *sequences: Sequence, most: int = 4, may_catch_up: bool = True
    ) -> list[tuple[int, ...]]:
        """The drafts of one step."""
        asked = dict.fromkeys(sequences, most)
        self.chances = [self.model.chances(*each) for each in asked.items()]
        found, _ = self.model.propose(asked, may_catch_up=may_catch_up)
        return [known(found.get(one, ())) for one in sequences]


def sequence(length: int, first: int = 1, index: int = 0, **changes: Any) -> Sequence:
    tokens = [first + number * number % 89 for number in range(length)]
    sampling = replace(SAMPLED, max_tokens=600, **changes)
    asked = ticket("r1", tokens, sampling=sampling)
    rules = Rules.of(asked, SIZE, frozenset(), 2000)
    return Sequence(rules, [Branch(index)], tokens, block_ids=range(500), num_computed=length - 1)


def right(one: Sequence, number: int = 4) -> tuple[int, ...]:
    """The tokens that the draft model says come next."""
    tokens = list(one.tokens)
    for _ in range(number):
        tokens.append(next_token(tokens, Draw(one.rules.sampling, one.index)))
    return tuple(tokens[len(one.tokens) :])


def test_a_prompt_is_computed_in_chunks_before_its_first_draft() -> None:
    """The last token is left for the pass that draws the first draft."""
    drafts, one = Drafts(), sequence(2 * CHUNK + 20)
    assert drafts.ask(one) == [()]
    assert drafts.ask(one) == [()]
    assert drafts.ask(one) == [right(one)]
    lens = [[len(row.token_ids) for row in rows] for rows in drafts.computing.steps]
    assert lens == [[CHUNK], [CHUNK], [19], [1], [1], [1], [1]]
    assert [row.start for (row,) in drafts.computing.steps[:4]] == [0, CHUNK, 2 * CHUNK, 147]
    assert [bool(row.draws) for (row,) in drafts.computing.steps[:4]] == [False] * 3 + [True]


def test_prompts_share_the_tokens_of_a_step() -> None:
    """The first ones come first, and their drafts do not wait for the others'."""
    drafts = Drafts()
    rows = [sequence(41), sequence(31, first=3), sequence(21, first=5)]
    assert drafts.ask(*rows) == [right(rows[0]), (), ()]
    assert [len(row.token_ids) for row in drafts.computing.steps[0]] == [40, CHUNK - 40]
    assert drafts.ask(*rows) == [right(one) for one in rows]


def test_a_prompt_waits_while_nothing_may_catch_up() -> None:
    drafts, one = Drafts(), sequence(50)
    assert drafts.ask(one, may_catch_up=False) == [()]
    assert drafts.computing.steps == []
    assert drafts.model.num_free_blocks == 400
    drafts.ask(one)
    one.tokens += right(one, 5)
    assert drafts.ask(one, may_catch_up=False) == [right(one)]  # it is not behind


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3, 4])
def test_kv_of_rejected_drafts_is_computed_again(num_accepted: int) -> None:
    """And that of accepted ones is not. After the accepted ones comes another token."""
    drafts, one = Drafts(), sequence(10)
    for _ in range(12):
        (found,) = drafts.ask(one)
        assert found == right(one)
        one.tokens += [*found[:num_accepted], 90 + num_accepted]
    behind = 2 if num_accepted == 4 else 1  # the last draft has no KV yet
    tail = [
        sum(len(row.token_ids) for rows in drafts.computing.steps[i : i + 4] for row in rows)
        for i in range(5, len(drafts.computing.steps), 4)
    ]
    assert tail == [3 + behind] * 11


def test_drafts_that_were_proposed_but_not_verified_may_still_be_tokens() -> None:
    """The step had no room for all drafts, and drew the next ones itself."""
    drafts, one = Drafts(), sequence(10)
    (found,) = drafts.ask(one)
    one.tokens += found[:3]
    assert drafts.ask(one) == [right(one)]
    assert len(drafts.computing.steps[-4][0].token_ids) == 1


def test_drafts_behind_a_wrong_one_do_not_count_though_they_became_tokens() -> None:
    """Their KV is that behind the wrong one. Here the sequence was not asked for in between."""
    drafts, one = Drafts(), sequence(10)
    (found,) = drafts.ask(one)
    one.tokens += [found[0] + 1, *found[1:3]]
    assert drafts.ask(one) in ([()], [right(one)])
    assert drafts.ask(one) == [right(one)]


def test_a_sequence_that_got_no_drafts_for_a_while_catches_up_with_the_tokens_since() -> None:
    drafts, one = Drafts(), sequence(10)
    drafts.ask(one)
    one.tokens += [7] * 100
    before = drafts.computing.num_tokens
    assert drafts.ask(one) == [()]
    assert drafts.ask(one) == [right(one)]
    assert drafts.computing.num_tokens - before == 100 + 3


def test_one_pass_computes_a_draft_of_all_rows() -> None:
    drafts, rows = Drafts(), [sequence(5, first=n, index=n) for n in range(6)]
    assert drafts.ask(*rows, most=3) == [right(one, 3) for one in rows]
    assert [len(step) for step in drafts.computing.steps] == [6, 6, 6, 6]


@pytest.mark.parametrize("is_late", [False, True])
def test_blocks_come_back_when_their_sequence_is_gone(*, is_late: bool) -> None:
    """Also where its last drafts keep their flights, with the rows of these."""
    drafts = Drafts(num_blocks=100, is_late=is_late)
    for number in range(50):
        one, other = sequence(60, index=number), sequence(30)
        drafts.ask(one, other)
        assert drafts.model.num_free_blocks == 100 - 16 - 9
    del one, other
    assert drafts.model.num_free_blocks == 100
    rows = [sequence(60, index=number) for number in range(6)]
    for row in (*rows, *rows):  # no block is given twice
        assert drafts.ask(row) == [right(row)]
    assert drafts.model.num_free_blocks == 100 - 6 * 16


def test_the_sequence_that_was_not_asked_for_the_longest_time_gives_up_its_blocks() -> None:
    """20 blocks, and 3 sequences of 8 to 9."""
    drafts, rows = Drafts(num_blocks=20), [sequence(30, first=n) for n in (1, 2, 3)]
    drafts.ask(rows[0])
    drafts.ask(rows[1])
    drafts.ask(rows[0])
    assert drafts.ask(rows[2]) == [right(rows[2])]
    before = drafts.computing.num_tokens
    assert drafts.ask(rows[0], rows[2]) == [right(rows[0]), right(rows[2])]
    assert drafts.computing.num_tokens == before + 8  # rows[1] gave up its blocks
    assert drafts.ask(rows[1]) == [right(rows[1])]
    assert drafts.computing.num_tokens == before + 8 + 29 + 4
    rows.clear()
    assert drafts.model.num_free_blocks == 20
    pair = [sequence(30, index=number) for number in range(2)]  # no block is given twice
    for _ in range(2):
        assert drafts.ask(*pair) == [right(one) for one in pair]
    assert drafts.model.num_free_blocks == 20 - 2 * 9


def test_sequences_that_are_asked_for_together_take_no_blocks_from_each_other() -> None:
    drafts, rows = Drafts(num_blocks=20), [sequence(30, first=n) for n in (1, 2, 3)]
    for _ in range(3):
        assert drafts.ask(*rows) == [right(rows[0]), right(rows[1]), ()]
    assert drafts.computing.num_tokens == 2 * (29 + 3 * 4)


def test_chances_follow_from_the_drafts_that_became_tokens() -> None:
    """Of each sequence apart."""
    drafts, good, bad = Drafts(), sequence(10), sequence(10, index=1)
    drafts.ask(good, bad)
    assert drafts.chances == [[0.7, 0.7**2, 0.7**3, 0.7**4]] * 2
    for _ in range(20):
        good.tokens += right(good, 5)
        bad.tokens.append(right(bad, 1)[0] - 1)
        drafts.ask(good, bad)
    assert [round(row[0], 2) for row in drafts.chances] == [1.0, 0.06]


def test_no_draft_needs_a_position_behind_the_context() -> None:
    drafts, one = Drafts(context=32), sequence(27)
    for length, number in ((27, 4), (28, 4), (29, 4), (30, 3), (31, 2), (32, 1), (33, 0), (50, 0)):
        one.tokens[:] = sequence(length).tokens
        assert drafts.ask(one) == [right(one, number)]
    ends = [row.start + len(row.token_ids) for rows in drafts.computing.steps for row in rows]
    assert max(ends) == 32


def test_nothing_is_proposed_behind_a_fault() -> None:
    """The others go on."""
    drafts, one, other = Drafts(), sequence(10), sequence(10, first=3)
    drafts.computing.broken = right(one)[1]
    assert drafts.ask(one, other) == [right(one)[:2], right(other)]
    drafts.computing.broken = one.tokens[-1]
    assert drafts.ask(one, other) == [(), right(other)]


def test_nothing_is_proposed_behind_the_end_of_a_text() -> None:
    """There a grammar has no state."""
    one = sequence(10)
    one = sequence(10, stop_token_ids=(right(one)[1],))
    assert Drafts().ask(one) == [right(one)[:2]]


def test_passes_on_a_device_take_their_tokens_there() -> None:
    """Rows end after different numbers of drafts, or at the end of a text; after a fault the device
    goes on with any token. Some drafts are accepted, and their KV counts."""
    drafts = Drafts(is_late=True)
    rows = [sequence(400, first=n, index=n) for n in range(3)]
    rows.append(sequence(10, stop_token_ids=(right(sequence(10))[1],)))
    assert [len(found) for found in drafts.ask(*rows)] == [4, 0, 0, 0]  # 512 tokens of prompts
    for _ in range(3):
        drafts.ask(*rows)
    assert drafts.ask(*rows)[3][:2] == right(rows[3])[:2]
    rows.pop()
    broken = sequence(12, first=5)
    drafts.computing.broken = right(broken)[1]
    for step in range(6):
        asked = dict(zip((*rows, broken), (4, 2, 3, 4), strict=True))
        for each in asked.items():
            drafts.model.chances(*each)
        before = drafts.device.num_ahead
        wanted = [right(one, most) for one, most in asked.items()]
        found, _ = drafts.model.propose(asked)
        proposed = [known(each) for each in found.values()]
        assert proposed == [*wanted[:3], (*wanted[3][:2], -1, -1)]
        assert drafts.device.num_ahead - before == 3 + 1 + 2 + 3
        lens = [len(row.token_ids) for row in drafts.computing.steps[-4]]
        if step:
            assert lens == [2, 1, 1, 1]  # of the first one all drafts were accepted
        for one, tokens, accepted in zip(rows, wanted, (4, 1, 0), strict=False):
            one.tokens += [*tokens[:accepted], 70 + step]


def test_drafts_on_a_device_are_drawn_without_what_depends_on_tokens_there() -> None:
    drafts, one = Drafts(is_late=True), sequence(10, index=3, repetition_penalty=1.5, logprobs=2)
    drafts.ask(one)
    draws = [row.draws[0] for rows in drafts.computing.steps[1:] for row in rows]
    plain = replace(one.rules.sampling, logprobs=None)
    assert draws == [Draw(plain, 3)] * 4


def test_a_draft_is_drawn_as_the_target_draws() -> None:
    """With the sequence's random numbers and penalties; but without logprobs and adapter."""
    drafts = Drafts()
    one = sequence(10, index=3, repetition_penalty=1.5, logprobs=2, min_tokens=5)
    drafts.ask(one)
    draws = [row.draws[0] for rows in drafts.computing.steps[1:] for row in rows]
    assert len(draws) == 4
    for number, draw in enumerate(draws):
        wanted = one.draw_behind(right(one)[:number])
        assert draw.sampling == replace(wanted.sampling, logprobs=None)
        assert draw.sequence_index == 3
        assert draw.adjustment is not None
        assert wanted.adjustment is not None
        assert list(draw.adjustment.banned) == list(wanted.adjustment.banned)
