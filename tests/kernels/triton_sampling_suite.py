"""The tests of the device's sampler in Triton's interpreter, beside the host's. pytest does not
collect this file: `test_triton.py` runs it."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvops
from services.engine.batch import Draw, Fault, Row, RowOutput, Scoring
from services.engine.device.drawing import DeviceDrawing
from services.engine.device.flights import DrawnFlight
from services.engine.device.inputs import StepInputs
from services.engine.engine import Engine
from services.engine.messages import Admit
from services.engine.runner import Runner
from services.engine.sampling.masks import MaskThread
from services.engine.sampling.sampler import draw
from services.engine.sampling.sampling_batch import NOT_FINITE, SamplingBatch
from services.engine.scheduler import Scheduler
from services.engine.sequences.group import Group
from services.engine.sequences.penalty_state import PenaltyState
from services.engine.sequences.results import Advance
from services.engine.sequences.sequence import Rules
from services.engine.sequences.sequence import Sequence as EngineSequence
from services.engine.speculation.draft_model import DraftModel
from services.engine.speculation.speculation import Speculation
from services.model.structured.mask import GrammarFault, Mask
from services.protocol.ticket import Ticket
from tests.drafting import AsMany, oracle
from tests.draws import batch_of, filtered_weights, sample

from .draw_cases import ADJUSTMENTS, PLAIN, cases, wanted

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

OPS = kvops.backend("triton")


class Head:
    """A head whose states are the logits: all of a model that drawing needs."""

    def __init__(self, vocab_size: int) -> None:
        self.config = type("Config", (), {"vocab_size": vocab_size})

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def drawing(vocab_size: int) -> DeviceDrawing:
    return DeviceDrawing(Head(vocab_size), OPS, torch.device("cpu"))  # type: ignore[arg-type]


def drawn(device: DeviceDrawing, logits: Tensor, batch: SamplingBatch) -> list[int]:
    placed = StepInputs(torch.device("cpu")).place(device.arrays(batch))
    tokens: list[int] = device.draw(logits, batch, placed, [None] * len(batch.draws))[0].tolist()
    return tokens


@pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("vocab_size", [6, 4200])
@pytest.mark.parametrize("kind", range(len(ADJUSTMENTS)))
def test_draws_are_of_tokens_that_the_filters_leave(vocab_size: int, kind: int, every: int) -> None:
    """Every filter on every kind of logits, with each kind of adjustment; `every`: only one of so
    many, since the interpreter is slow. Draws of the likeliest token are the host's."""
    some = slice(kind, None, every)
    logits, draws, positions = cases(vocab_size)[kind]
    logits, draws, positions = logits[some], draws[some], positions[some]
    found = drawn(drawing(vocab_size), logits, batch_of(draws, positions))
    for row, (token, expected) in enumerate(
        zip(found, wanted(vocab_size, kind)[some], strict=True)
    ):
        sampling, adjustment = draws[row].sampling, draws[row].adjustment
        if expected == NOT_FINITE or sampling.temperature == 0:
            assert token == expected
            continue
        adjusted = logits[row] if adjustment is None else adjustment.applied(logits[row])
        assert filtered_weights(adjusted[None], [sampling])[0, token] > 0, (row, sampling)


def test_draws_follow_the_filtered_distribution() -> None:
    """150 draws at successive positions; min_p leaves four of five tokens. The limit is the 99.99th
    percentile of chi-square with 3 degrees of freedom; the seed is fixed, and so is the result."""
    p, logits = replace(PLAIN, min_p=0.2), torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]]).log()
    found = drawn(drawing(5), logits.repeat(150, 1), batch_of([Draw(p, 0)] * 150, range(150)))
    left = filtered_weights(logits, [p])[0].double()
    expected, counts = 150 * left / left.sum(), torch.bincount(torch.tensor(found), minlength=5)
    assert counts[left == 0].sum() == 0
    assert ((counts - expected).square() / expected)[left > 0].sum() < 21.1


@pytest.mark.parametrize("changes", [{"top_k": 3}, {"top_p": 0.75}])
def test_all_tokens_that_the_filters_leave_are_drawn(changes: dict[str, Any]) -> None:
    p, logits = replace(PLAIN, **changes), torch.tensor([[0.3, 0.31, 0.05, 0.29, 0.05]]).log()
    found = drawn(drawing(5), logits.repeat(10, 1), batch_of([Draw(p, 0)] * 10, range(10)))
    assert set(found) == {0, 1, 3}


def test_a_draw_is_the_same_alone_and_among_others() -> None:
    """Other seeds, sequences and positions draw other tokens."""
    p, vocab_size = replace(PLAIN, seed=2**64 - 2), 4200
    draws = [Draw(p, 0), Draw(p, 1), Draw(p, 0), Draw(replace(p, seed=2**63), 0)]
    positions, device = [131_071, 131_071, 131_072, 131_071], drawing(vocab_size)
    logits = torch.zeros(4, vocab_size)
    together = drawn(device, logits, batch_of(draws, positions))
    assert len(set(together)) == 4
    for row in range(4):
        alone = batch_of(draws[row : row + 1], positions[row : row + 1])
        assert drawn(device, logits[:1], alone) == together[row : row + 1]


def test_penalties_follow_the_tokens_of_sequences_that_come_and_go() -> None:
    """12 steps of up to 6 sequences; each step sends only the new tokens, and slots are reused."""
    vocab_size, generator = 90, torch.Generator().manual_seed(2)
    device = drawing(vocab_size)
    live: list[tuple[list[int], PenaltyState | None, Draw]] = []
    for step in range(12):
        for _ in range(2):
            number = 2 * step + len(live)
            p = replace(PLAIN, **ADJUSTMENTS[number % 4], temperature=0.0)
            tokens = [number % 4, 1, 5]
            state = PenaltyState(p, tokens, 2, [4]) if number % 4 else None
            live.append((tokens, state, Draw(p, 0)))
        live = live[-6:]
        draws = [
            replace(d, adjustment=state.adjustment() if state else None) for _, state, d in live
        ]
        logits = 2 * torch.randn(len(live), vocab_size, generator=generator)
        positions = [len(tokens) for tokens, _, _ in live]
        expected = sample(logits, draws, positions)
        assert drawn(device, logits, batch_of(draws, positions)) == expected
        for (tokens, _, _), token in zip(live, expected, strict=True):
            tokens.append(token)
        del draws
    tables = device._penalties._tables
    assert tables is not None
    assert len(tables.counts) == 16
    assert len(device._penalties._sent) <= 6


def test_logprobs_are_those_of_the_host() -> None:
    """Forks, states that do not draw, and a row without logprobs."""
    vocab_size = 100
    p = replace(PLAIN, temperature=0.0, logprobs=3)
    rows = [
        Row(range(7), 0, (), scoring=Scoring(range(7), 2)),
        Row(range(9), 0, (), draws=(Draw(p, 0), Draw(p, 1)), scoring=Scoring(range(1, 9), 1)),
        Row([1], 7, (), draws=(Draw(replace(p, logprobs=None), 0),)),
        Row([1], 9, (), draws=(Draw(replace(p, logprobs=0), 0),)),
    ]
    batch = SamplingBatch.of(rows)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(batch.wanted), vocab_size, generator=generator).round()
    device = drawing(vocab_size)
    placed = StepInputs(torch.device("cpu")).place(device.arrays(batch))
    found = device.draw(logits, batch, placed, [None] * 4)
    assert all(map(torch.equal, found, draw(batch.states_of(logits), batch, [None] * 4)))
    flight = DrawnFlight(SamplingBatch.of(rows[2:]), [found[:1]], lambda: [None] * 4)
    assert flight.result() == [(token,) for token in found[0].tolist()[:2]]


class FixedGrammar:
    """A grammar state that allows one token of `every`; 0: it fails."""

    def __init__(self, every: int, vocab_size: int) -> None:
        self.every = every
        bits = np.zeros(-(-vocab_size // 32) * 32, bool)
        bits[:: every or 1] = True
        self._mask = np.packbits(bits, bitorder="little").view(np.int32)

    def mask(self) -> Mask:
        if not self.every:
            raise GrammarFault("too complex")
        return self._mask


def test_masked_draws_are_those_of_the_host() -> None:
    """Draws with and without masks of the same state; logprobs are those of unmasked logits. A mask
    hides neither NaN nor a grammar that fails."""
    vocab_size = 100
    p = replace(PLAIN, temperature=0.0, logprobs=2)
    penalties = replace(p, presence_penalty=1.5, bad_words=((0,), (6,)))
    adjustment = PenaltyState(penalties, [1, 2, 3, 3], 1, [4]).adjustment()
    grammars: list[Any] = [FixedGrammar(every, vocab_size) for every in (3, 7, 99, 0)]
    rows = [
        Row([1], 7, (), draws=(Draw(p, 0, None, grammars[0]), Draw(p, 1, None, grammars[0]))),
        Row([1], 9, (), draws=(Draw(p, 0), Draw(p, 1))),
        Row([1], 9, (), draws=(Draw(penalties, 0, adjustment, grammars[1]),)),
        Row([1], 2, (), draws=(Draw(p, 0, None, grammars[2]),)),
        Row([1], 2, (), draws=(Draw(p, 0, None, grammars[3]),)),
        Row([1], 2, (), draws=(Draw(p, 0, None, grammars[0]),)),
    ]
    batch = SamplingBatch.of(rows)
    logits = 3 * torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(3))
    logits[5, 1] = float("nan")  # which the mask excludes
    device, masks = drawing(vocab_size), MaskThread().begin(batch.draws)()
    placed = StepInputs(torch.device("cpu")).place(device.arrays(batch))
    on_device = device.draw(logits, batch, placed, masks)
    found = batch.results([on_device], masks)
    assert found == batch.results([draw(logits, batch, masks)], masks)
    assert found[4:] == [Fault.GRAMMAR, Fault.NOT_FINITE]
    tokens = [row.tokens for row in found if isinstance(row, RowOutput)]
    assert all(token % 3 == 0 for token in tokens[0])
    assert tokens[2][0] % 7 == 0
    assert tokens[3][0] in (0, 99)


class TableSteps:
    """The steps of a model whose logits after a token are a row of a table; with `noise`, of a
    table that is like it."""

    def __init__(self, vocab_size: int, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(4)
        tables = torch.randn(2, vocab_size, vocab_size, generator=generator)
        self._table = 2 * tables[0] + noise * tables[1]

    def graph_for(self, num_tokens: int, num_rows: int, has_adapters: bool) -> None:
        return None

    def compute(self, placed: Any, facts: Any) -> Tensor:
        return self._table[placed["token_ids"]][placed["wanted"]]


class Unready(DrawnFlight):
    """A flight that is complete only once somebody has waited for it, as on a busy GPU."""

    is_complete = False


class LateRunner(Runner):
    def __init__(self, vocab_size: int, noise: float = 0.0) -> None:
        model: Any = Head(vocab_size)
        names = {"head_dim": 1, "num_layers": 1, "num_kv_heads": 1, "max_position_embeddings": 64}
        for name, value in names.items():
            setattr(model.config, name, value)
        model.dtype, model.device = torch.float32, torch.device("cpu")
        kv, steps = torch.zeros(8, 1, 2, 64, 1, 1), TableSteps(vocab_size, noise)
        super().__init__(model, kv, 64, OPS, steps)  # type: ignore[arg-type]
        self._inputs.is_copied = True
        self.num_ahead = 0

    def launch(self, rows: Sequence[Row], *args: Any) -> Any:
        self.num_ahead += sum(row.num_on_device > row.num_drafts for row in rows)
        flight: Any = super().launch(rows, *args)
        flight.__class__ = Unready
        return flight


class Alternating:
    """A grammar whose tokens are even and odd in turn, as the token before says."""

    def walk(self) -> "Alternating":
        return self

    def mask_after(self, tokens: Sequence[int], num_drafts: int) -> Mask:
        bits = np.zeros(96, bool)
        bits[(tokens[-1] + 1) % 2 if tokens else 0 :: 2] = True
        return np.packbits(bits, bitorder="little").view(np.int32)


KINDS: Sequence[dict[str, Any]] = (*ADJUSTMENTS[:4], {"logprobs": 2}, {"min_tokens": 4})


def engine_tokens(
    *,
    runs_ahead: bool,
    speculation: Speculation | None = None,
    kinds: Sequence[dict[str, Any]] = KINDS,
    has_grammars: bool = True,
    draft: LateRunner | None = None,
) -> tuple[dict[str, list[int]], int]:
    """The tokens of requests that begin one step after the other, and how many rows ran ahead.
    `draft` is the runner of the speculation's draft model."""
    runner, stamps = LateRunner(90), SimpleNamespace(complete=lambda *block: None)
    if draft is not None:
        draft.table = runner.table
    engine = Engine(
        runner,
        Scheduler(64, 8),
        stamps,  # type: ignore[arg-type]
        look_ahead=2,
        speculation=speculation,
    )
    tokens, advances = dict[str, list[int]](), list[Advance]()
    for number in range(20):
        commands = []
        if number < len(kinds):
            sampling = replace(PLAIN, seed=number, max_tokens=10, **kinds[number])
            asked = Ticket(
                f"r{number}",
                1,
                number,
                f"h{number}",
                0,
                pool_id="pool",
                root_hash=bytes(16),
                prompt_token_ids=(1, 2),
                sampling=sampling,
            )
            grammar: Any = Alternating() if number % 2 and has_grammars else None
            rules = Rules.of(asked, 64, frozenset({3}), 64, grammar=grammar)
            group = Group.to_compute(asked, rules, [number])
            if not runs_ahead:
                group.stay_behind()
            commands.append(Admit(group))
        advances += engine.step(commands).advances
    while (outcome := engine.step()).is_busy:
        advances += outcome.advances
    for advance in advances:
        found = tokens.setdefault(advance.key, [])
        found += [token for one in advance.outputs for token in one.token_ids]
    return tokens, runner.num_ahead


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """The tokens without a step in flight."""
    tokens, num_ahead = engine_tokens(runs_ahead=False)
    assert num_ahead == 0
    assert len(tokens) == 6
    return tokens


def test_draws_that_depend_on_the_token_in_flight_are_right(expected: dict[str, list[int]]) -> None:
    """The tokens of penalties, bans, grammars and logprobs are those without a step in flight."""
    ahead, num_ahead = engine_tokens(runs_ahead=True)
    assert ahead == expected
    assert num_ahead > 30


def test_draws_behind_drafts_are_right_where_the_logits_are(expected: dict[str, list[int]]) -> None:
    """A third of the drafts is wrong: what they changed in the tables of penalties is gone."""

    def next_token(sequence: EngineSequence, tokens: list[int]) -> int | None:
        known = expected[f"h{sequence.rules.sampling.seed}"]
        return next(iter(known[len(tokens) - 2 :]), None)

    found, num_ahead = engine_tokens(runs_ahead=True, speculation=oracle(next_token))
    assert found == expected
    assert num_ahead == 0


class Counting(AsMany):
    num_accepted = 0

    def measured(self, num_rows: int, num_drafts: int, num_accepted: int, *times: Any) -> None:
        self.num_accepted += num_accepted


def test_a_draft_model_on_a_device_changes_no_token(expected: dict[str, list[int]]) -> None:
    """It is the target itself, and draws as the target does. So only penalties and grammars, which
    the host knows, make drafts wrong."""
    draft, numbers = LateRunner(90), Counting()
    model = DraftModel(lambda rows: draft.launch(rows).result(), 8, 64, 64, draft.launch)
    found, _ = engine_tokens(
        runs_ahead=True, speculation=Speculation(model, 3, numbers), draft=draft
    )
    assert found == expected
    assert draft.num_ahead > 15
    assert numbers.num_accepted > 10


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_draws_behind_drafts_that_the_device_accepts_have_their_own_random_numbers(
    noise: float,
) -> None:
    """The position of a draw, by which it is drawn, is known to the device alone. With noise, some
    drafts are wrong. No step but the first of a request, and one behind its end, waits."""
    kinds: Sequence[dict[str, Any]] = ({}, {"top_k": 5}, {"logprobs": 2}, {"temperature": 0.0})
    plain, _ = engine_tokens(runs_ahead=True, kinds=kinds, has_grammars=False)
    draft, numbers = LateRunner(90, noise), Counting()
    model = DraftModel(
        lambda rows: draft.launch(rows).result(), 8, 64, 64, draft.launch, runs_ahead=True
    )
    speculation = Speculation(model, 2, numbers)
    found, num_ahead = engine_tokens(
        runs_ahead=True, speculation=speculation, kinds=kinds, has_grammars=False, draft=draft
    )
    assert found == plain
    assert num_ahead >= 8
    assert 8 < numbers.num_accepted < (30 if noise else 99)
