"""Steps that run ahead of drafts, on a runner that works as on a GPU: the device counts the
accepted drafts and moves the rows behind them. The graphs are those of `tests.graph_stand_in`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.make_checkpoint import make_checkpoint
from kvops import Backend
from services.engine.batch import Owner, Row
from services.engine.device.flights import DrawnFlight
from services.engine.engine import Engine
from services.engine.messages import Admit
from services.engine.scheduler import Scheduler
from services.engine.sequences.group import Group
from services.engine.sequences.sequence import Rules
from services.engine.speculation.draft_model import DraftModel
from services.engine.speculation.speculation import Speculation
from tests.drafting import AsMany
from tests.unit.workers.fakes import ticket

from .graph_steps import (
    BLOCKS_EACH,
    PROMPTS,
    SIZE,
    DeviceRunner,
    LaunchedKernels,
    planned_kernels,
    table,
)
from .models_oracle import GREEDY, SPECS

NUM_TOKENS = 18


class Unready(DrawnFlight):
    """A flight that is complete only once somebody has waited for it, as on a busy GPU."""

    is_complete = False


class LateRunner(DeviceRunner):
    """Counts the rows that were launched before the host knew their first token."""

    num_ahead = num_moved = 0

    def launch(self, rows: Sequence[Row], *args: Any) -> Any:
        self.num_ahead += sum(row.num_on_device > row.num_drafts for row in rows)
        self.num_moved += sum(row.num_unknown > 0 for row in rows)
        flight: Any = super().launch(rows, *args)
        flight.__class__ = Unready
        return flight


class Counting(AsMany):
    num_drafts = num_accepted = 0

    def measured(self, num_rows: int, num_drafts: int, num_accepted: int, *times: Any) -> None:
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted


@pytest.fixture(scope="module", params=["qwen3-gqa-tied", "mistral-window"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), SPECS[request.param])


def runner_of(checkpoint: Path, *, has_graphs: bool) -> LateRunner:
    runner = LateRunner(checkpoint, torch.float32, Backend(LaunchedKernels()))
    if has_graphs:
        runner.with_graphs(max_rows=24)
    return runner


def decode(runner: LateRunner, speculation: Speculation | None) -> list[list[int]]:
    """The tokens of requests that begin one step after the other."""
    stamps: Any = SimpleNamespace(complete=lambda *block: None)
    engine = Engine(runner, Scheduler(64, 8), stamps, look_ahead=32, speculation=speculation)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    number, outcome = 0, engine.step()
    while number < len(PROMPTS) or outcome.is_busy:
        commands = []
        if number < len(PROMPTS):
            asked = ticket(f"r{number + 1}", PROMPTS[number], max_tokens=NUM_TOKENS)
            rules = Rules.of(asked, SIZE, frozenset(), SIZE * BLOCKS_EACH)
            commands.append(Admit(Group.to_compute(asked, rules, table(number))))
            number += 1
        outcome = engine.step(commands)
        for advance in outcome.advances:
            found = tokens[int(advance.key.removeprefix("h-r")) - 1]
            found += [token for one in advance.outputs for token in one.token_ids]
    return tokens


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("is_same", [True, False])
def test_tokens_behind_drafts_in_flight_are_those_of_steps_without_drafts(
    checkpoint: Path, *, is_same: bool, has_graphs: bool
) -> None:
    """With the model as its own draft model, and with another head. Each row but a request's first
    ones runs ahead, many of them behind drafts, and the draft model's own rows do so too."""
    plain = decode(runner_of(checkpoint, has_graphs=False), None)
    runner = runner_of(checkpoint, has_graphs=has_graphs)
    draft = runner_of(checkpoint, has_graphs=has_graphs)
    draft.table = runner.table
    if not is_same:
        other: Any = draft.model
        noise = torch.randn(other.head.shape, generator=torch.Generator().manual_seed(1))
        other.head = other.head + 0.2 * other.head.std() * noise
    model = DraftModel(
        lambda rows: draft.launch(rows).result(),
        48,
        SIZE,
        SIZE * BLOCKS_EACH,
        draft.launch,
        runs_ahead=True,
    )
    numbers = Counting()
    assert decode(runner, Speculation(model, 3, numbers)) == plain
    assert runner.num_ahead >= 12
    assert runner.num_moved >= 6
    assert draft.num_moved >= 12
    assert numbers.num_accepted > 30
    assert (numbers.num_accepted == numbers.num_drafts) is is_same


def test_rows_behind_drafts_are_refused_where_the_host_plans_attention(checkpoint: Path) -> None:
    """It would plan other contexts than the device has."""
    with planned_kernels() as new:
        runner = DeviceRunner(checkpoint, torch.bfloat16, new())
        owner = Owner()
        drafts = Row((1, 2), 4, table(0), draws=(GREEDY,) * 2, owner=owner, num_drafts=1)
        runner.launch([drafts])
        behind = replace(drafts, token_ids=(), start=5, draws=(GREEDY,), num_drafts=0)
        behind = replace(behind, num_on_device=1, num_unknown=1)
        with pytest.raises(ValueError, match="the host plans attention"):
            runner.launch([behind])
