"""The tests of the device's sampler in Triton's interpreter: three samplers give the same bits.
pytest does not collect this file: `test_triton.py` runs it."""
# Triton has no types.
# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import kvops
from kvops import _native
from kvops.triton import draw_arithmetic
from services.engine.batch import Answer, Draw, Fault, Query, Row, RowOutput, Scoring
from services.engine.device.drawing import DeviceDrawing
from services.engine.device.flights import DrawnFlight
from services.engine.device.inputs import StepInputs
from services.engine.engine import Engine
from services.engine.messages import Admit
from services.engine.models.fused import native_draw
from services.engine.runner import Runner
from services.engine.sampling import arithmetic
from services.engine.sampling.logit_queries import queries, row_results
from services.engine.sampling.masks import MaskThread
from services.engine.sampling.philox import uniforms
from services.engine.sampling.sampler import sample
from services.engine.sampling.sampling_head import answer
from services.engine.scheduler import Scheduler
from services.engine.sequences.group import Group
from services.engine.sequences.penalty_state import PenaltyState
from services.engine.sequences.sequence import Rules
from services.model.structured.mask import GrammarFault, Mask
from services.protocol.ticket import Ticket

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


def flight(device: DeviceDrawing, logits: Tensor, asked: Sequence[Query]) -> DrawnFlight:
    placed = StepInputs(torch.device("cpu")).place(device.arrays(asked))
    return device.launch([], asked, logits, placed)


def native(logits: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> list[int]:
    tokens = torch.zeros(len(draws), dtype=torch.int64)
    native_draws = list(map(native_draw, draws, positions))
    _native.sample(_native.usable_kernels()[0], logits.contiguous(), native_draws, tokens)
    return tokens.tolist()


EVERY = [37, pytest.param(1, marks=pytest.mark.full)]


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("vocab_size", [6, 4200])
@pytest.mark.parametrize("kind", range(len(ADJUSTMENTS)))
def test_three_samplers_draw_the_same(vocab_size: int, kind: int, every: int) -> None:
    """Every filter on every kind of logits, with each kind of adjustment; `every`: only one of so
    many, since the interpreter is slow."""
    some = slice(kind, None, every)
    logits, draws, positions = cases(vocab_size)[kind]
    logits, draws, positions = logits[some], draws[some], positions[some]
    asked = [Query(i, draw, at) for i, (draw, at) in enumerate(zip(draws, positions, strict=True))]
    expected = wanted(vocab_size, kind)[some]
    assert flight(drawing(vocab_size), logits, asked).drawn.tolist() == expected
    assert native(logits, draws, positions) == expected


@triton.jit
def _arithmetic(scaled, numbers, weights, exponentials, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(weights + i, draw_arithmetic.weights(tl.load(scaled + i)))
    tl.store(exponentials + i, draw_arithmetic.exponentials(tl.load(numbers + i)))


@triton.jit
def _random(seed, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    numbers = draw_arithmetic.uniforms(tl.load(seed), tl.load(seed + 1), tl.load(seed + 2), i)
    tl.store(out + i, numbers)


def test_the_arithmetic_has_the_same_bits_everywhere() -> None:
    """2^20 scaled logits and random numbers of all sizes."""
    generator = torch.Generator().manual_seed(1)
    size = 1 << 20
    scaled = -torch.rand(size, generator=generator) * 10.0 ** (torch.arange(size) % 9 - 6)
    scaled[:3] = torch.tensor([0.0, float("-inf"), -3e38])
    numbers = torch.rand(size, generator=generator) * 10.0 ** -(torch.arange(size) % 9)
    numbers = numbers.clamp(2.0**-33, 1 - 2.0**-24)
    weights, exponentials = torch.empty(size, dtype=torch.int64), torch.empty(size)
    _arithmetic[(16,)](scaled, numbers, weights, exponentials, SIZE=size // 16)
    assert torch.equal(weights, arithmetic.weights(scaled))
    assert torch.equal(exponentials, arithmetic.exponentials(numbers))
    for isa in _native.usable_kernels():
        found = torch.empty(2, size)
        _native.draw_arithmetic(isa, scaled, numbers, found)
        assert torch.equal(found[0].long(), weights), isa
        assert torch.equal(found[1], exponentials), isa


def test_random_numbers_are_those_of_the_host() -> None:
    seed, index, position = 2**64 - 2, 3, 131_071
    out = torch.empty(512)
    key = torch.from_numpy(np.array([seed, index, position], np.uint64).view(np.int64))
    _random[(1,)](key, out, SIZE=512)
    assert torch.equal(out, uniforms(seed, index, position, 512))


def test_penalties_follow_the_tokens_of_sequences_that_come_and_go() -> None:
    """12 steps of up to 6 sequences; each step sends only the new tokens, and slots are reused."""
    vocab_size, generator = 90, torch.Generator().manual_seed(2)
    device = drawing(vocab_size)
    live: list[tuple[list[int], PenaltyState | None, Draw]] = []
    for step in range(12):
        for _ in range(2):
            number = 2 * step + len(live)
            p = replace(PLAIN, seed=number, **ADJUSTMENTS[number % 4], temperature=number % 3 / 2)
            tokens = [number % 4, 1, 5]
            state = PenaltyState(p, tokens, 2, [4]) if number % 4 else None
            live.append((tokens, state, Draw(p, 0)))
        live = live[-6:]
        draws = [
            replace(d, adjustment=state.adjustment() if state else None) for _, state, d in live
        ]
        logits = 2 * torch.randn(len(live), vocab_size, generator=generator)
        positions = [len(tokens) for tokens, _, _ in live]
        asked = [Query(i, d, at) for i, (d, at) in enumerate(zip(draws, positions, strict=True))]
        expected = sample(logits, draws, positions)
        assert flight(device, logits, asked).drawn.tolist() == expected
        for (tokens, _, _), token in zip(live, expected, strict=True):
            assert isinstance(token, int)
            tokens.append(token)
        del draws, asked
    tables = device._penalties._tables
    assert tables is not None
    assert len(tables.counts) == 16
    assert len(device._penalties._sent) <= 6


def test_logprobs_and_prompts_are_those_of_the_host() -> None:
    """Forks, scored prompts longer than a part, and a row without logprobs: one copy to the
    host."""
    vocab_size = 100
    p = replace(PLAIN, seed=5, logprobs=3)
    rows = [
        Row(range(70), 0, (), scoring=Scoring(range(70), 2)),
        Row(range(90), 0, (), draws=(Draw(p, 0), Draw(p, 1)), scoring=Scoring(range(1, 90), 1)),
        Row([1], 7, (), draws=(Draw(replace(p, logprobs=None), 0),)),
        Row([1], 9, (), draws=(Draw(replace(p, temperature=0.0, logprobs=0), 0),)),
    ]
    asked = queries(rows)
    num_states = 1 + max(query.state for query in asked)
    logits = torch.randn(num_states, vocab_size, generator=torch.Generator().manual_seed(3)).round()
    device = drawing(vocab_size)
    placed = StepInputs(torch.device("cpu")).place(device.arrays(asked))
    found = device.launch(rows, asked, logits, placed)
    results = found.result()
    answers = [one for one in answer(logits, asked) if isinstance(one, Answer)]
    prompts = [a.logprobs for q, a in zip(asked, answers, strict=True) if isinstance(q.token, int)]
    assert isinstance(results[0], RowOutput)
    assert isinstance(results[1], RowOutput)
    assert [*results[0].prompt, *results[1].prompt] == prompts
    drawn = [a for q, a in zip(asked, answers, strict=True) if isinstance(q.token, Draw)]
    assert results[1].tokens == (drawn[0].token_id, drawn[1].token_id)
    assert list(results[1].logprobs) == [drawn[0].logprobs, drawn[1].logprobs]
    assert results[2] == (drawn[2].token_id,)
    assert drawn[3].logprobs is not None
    assert results[3] == RowOutput((drawn[3].token_id,), (drawn[3].logprobs,))
    assert found.inputs([1, 2, 3]) == [0, 2, 3]
    assert found.result() == results


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
    p = replace(PLAIN, seed=5, logprobs=2)
    penalties = replace(p, presence_penalty=1.5, bad_words=((0,), (6,)), temperature=0.7)
    adjustment = PenaltyState(penalties, [1, 2, 3, 3], 1, [4]).adjustment()
    grammars: list[Any] = [FixedGrammar(every, vocab_size) for every in (3, 7, 99, 0)]
    rows = [
        Row([1], 7, (), draws=(Draw(p, 0, None, grammars[0]), Draw(p, 1, None, grammars[0]))),
        Row([1], 9, (), draws=(Draw(p, 0), Draw(p, 1))),
        Row([1], 9, (), draws=(Draw(penalties, 0, adjustment, grammars[1]),)),
        Row([1], 2, (), draws=(Draw(replace(p, temperature=0.0), 0, None, grammars[2]),)),
        Row([1], 2, (), draws=(Draw(p, 0, None, grammars[3]),)),
        Row([1], 2, (), draws=(Draw(p, 0, None, grammars[0]),)),
    ]
    asked = queries(rows)
    logits = 3 * torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(3))
    logits[5, 1] = float("nan")  # which the mask excludes
    device, masks = drawing(vocab_size), MaskThread().begin(asked)
    placed = StepInputs(torch.device("cpu")).place(device.arrays(asked))
    found = device.launch(rows, asked, logits, placed, masks).result()
    on_host = masks.checked(answer(logits, masks.applied()))
    assert found == row_results(rows, on_host)
    assert found[4:] == [Fault.GRAMMAR, Fault.NOT_FINITE]
    tokens = [row.tokens for row in found if isinstance(row, RowOutput)]
    assert all(token % 3 == 0 for token in tokens[0])
    assert tokens[2][0] % 7 == 0
    assert tokens[3][0] in (0, 99)


class TableSteps:
    """The steps of a model whose logits after a token are a row of a table."""

    def __init__(self, vocab_size: int) -> None:
        self._table = 2 * torch.randn(
            vocab_size, vocab_size, generator=torch.Generator().manual_seed(4)
        )

    def graph_size(self, num_rows: int) -> None:
        return None

    def compute(self, placed: Any, facts: Any) -> Tensor:
        return self._table[placed["token_ids"]][placed["wanted"]]


class Unready:
    """A flight that is complete only once somebody has waited for it, as on a busy GPU."""

    is_complete = False

    def __init__(self, flight: Any) -> None:
        self.result = flight.result


class LateRunner(Runner):
    def __init__(self, vocab_size: int) -> None:
        model: Any = Head(vocab_size)
        names = {"head_dim": 1, "num_layers": 1, "num_kv_heads": 1, "max_position_embeddings": 64}
        for name, value in names.items():
            setattr(model.config, name, value)
        model.dtype, model.device = torch.float32, torch.device("cpu")
        kv, steps = torch.zeros(8, 1, 2, 64, 1, 1), TableSteps(vocab_size)
        super().__init__(model, kv, 64, OPS, steps)  # type: ignore[arg-type]
        self._inputs.is_copied = True
        self.num_ahead = 0

    def launch(self, rows: Sequence[Row], *args: Any) -> Any:
        self.num_ahead += sum(row.drawn_by is not None for row in rows)
        return Unready(super().launch(rows, *args))


class Alternating:
    """A grammar whose tokens are even and odd in turn, as the token before says."""

    def walk(self) -> "Alternating":
        return self

    def mask_after(self, tokens: Sequence[int], num_drafts: int) -> Mask:
        bits = np.zeros(96, bool)
        bits[(tokens[-1] + 1) % 2 if tokens else 0 :: 2] = True
        return np.packbits(bits, bitorder="little").view(np.int32)


def engine_tokens(*, runs_ahead: bool) -> tuple[dict[str, list[int]], int]:
    """The tokens of requests that begin one step after the other, and how many rows ran ahead."""
    runner, stamps = LateRunner(90), SimpleNamespace(complete=lambda *block: None)
    engine = Engine(runner, Scheduler(64, 8), stamps, one_token=False, look_ahead=2)  # type: ignore[arg-type]
    kinds: list[dict[str, Any]] = [*ADJUSTMENTS[:4], {"logprobs": 2}, {"min_tokens": 4}]
    tokens: dict[str, list[int]] = {}
    for number in range(20):
        commands = []
        if number < len(kinds):
            sampling = replace(PLAIN, seed=number, max_tokens=10, **kinds[number])
            asked = Ticket(
                *(f"r{number}", 1, number, f"h{number}", 0),
                pool_id="pool",
                root_hash=bytes(16),
                prompt_token_ids=(1, 2),
                sampling=sampling,
            )
            grammar: Any = Alternating() if number % 2 else None
            rules = Rules.of(asked, 64, frozenset({3}), 64, grammar=grammar)
            group = Group.to_compute(asked, rules, [number])
            if not runs_ahead:
                group.stay_behind()
            commands.append(Admit(group))
        for advance in engine.step(commands).advances:
            tokens.setdefault(advance.key, []).extend(one.token for one in advance.tokens)
    while (outcome := engine.step()).is_busy:
        for advance in outcome.advances:
            tokens.setdefault(advance.key, []).extend(one.token for one in advance.tokens)
    return tokens, runner.num_ahead


def test_draws_that_depend_on_the_token_in_flight_are_right() -> None:
    """The tokens of penalties, bans, grammars and logprobs are those without a step in flight."""
    ahead, num_ahead = engine_tokens(runs_ahead=True)
    behind, none = engine_tokens(runs_ahead=False)
    assert ahead == behind
    assert len(ahead) == 6
    assert num_ahead > 30
    assert none == 0
