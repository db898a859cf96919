"""Laws 7 and 10, for every strategy of choosing tokens under every condition: a request's answer,
and all logits that its tokens were drawn from, are equal bit by bit to those of the request alone.
Each condition also asserts that it occurred."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest

from bench.make_checkpoint import make_checkpoint
from quire.messages import Request
from quire.types import Sampling
from tests.adapters import make_adapter
from tests.exactness import Answer
from tests.late_device import LateForward

from .exactness_conditions import PROMPT, SPECULATING, STRATEGIES
from .exactness_disturbances import DisturbedDeployment
from .exactness_matrix import ADAPTED, CELLS, CONDITIONS, Condition
from .exactness_model import Logits, Models
from .exactness_setting import Setting

Open = Callable[[Setting], AbstractAsyncContextManager[DisturbedDeployment]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """No size is a multiple of a panel or tile, or of another size."""
    checkpoint = make_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        hidden_size=148,
        intermediate_size=212,
        vocab_size=601,
        num_heads=6,
        num_kv_heads=2,
        head_dim=20,
    )
    return Models(checkpoint, make_adapter(tmp_path_factory.mktemp("adapter"), checkpoint, 1, r=5))


@pytest.fixture
def opened(models: Models, tmp_path: Path) -> Open:
    numbers = count()

    @asynccontextmanager
    async def opened(setting: Setting) -> AsyncIterator[DisturbedDeployment]:
        directory = tmp_path / str(next(numbers))
        directory.mkdir()
        deployment = DisturbedDeployment(directory, models, setting, PROMPT)
        await deployment.open()
        try:
            yield deployment
            await deployment.until_empty()
        finally:
            await deployment.close()

    return opened


@dataclass(frozen=True, slots=True)
class Result:
    answer: Answer
    logits: Logits


@pytest.fixture(scope="module")
def alone() -> dict[str, Result]:
    """The result of each strategy without any disturbance; the tests fill it."""
    return {}


async def run(
    opened: Open, condition: Condition, sampling: Sampling, known: Result | None = None
) -> Result:
    async with opened(condition.setting) as deployment:
        if known is not None:
            choices = known.answer.choices
            deployment.known = {choice.index: choice.token_ids for choice in choices}
        request = Request(PROMPT, sampling, model=condition.setting.model)
        answer = await condition.run(deployment, request)
        return Result(answer, deployment.logits())


@pytest.mark.parametrize(("strategy", "condition"), CELLS)
async def test_tokens_are_the_same_to_the_bit(
    opened: Open, alone: dict[str, Result], strategy: str, condition: str
) -> None:
    sampling, setting = STRATEGIES[strategy], CONDITIONS[condition].setting
    adapts = setting.adapts
    by = "adapter, alone" if adapts else "int8 KV, alone" if setting.kv_in_int8 else "alone"
    key = strategy if by == "alone" else f"{strategy}, {by}"
    if key not in alone:
        alone[key] = await run(opened, CONDITIONS[by], sampling)
    expected = alone[key]
    result = await run(opened, CONDITIONS[condition], sampling, expected)
    usage = result.answer.usage
    if setting.speculates and strategy in SPECULATING:
        # A draft model has no adapter: it knows little of what the adapter says. On a device it
        # draws without penalties and biases.
        is_late = setting.device is LateForward
        draws_otherwise = setting.has_draft_model and (adapts or (is_late and "adj" in strategy))
        assert usage.num_accepted_drafts > 1 or draws_otherwise
        assert usage.num_rejected_drafts > 1
    else:
        assert usage.num_accepted_drafts == usage.num_rejected_drafts == 0
    assert result.answer == expected.answer
    if setting.device is LateForward:
        # A step that is launched before its sequence's last token is known computes one more.
        extra = result.logits.keys() - expected.logits.keys()
        choices = expected.answer.choices
        ends = {choice.index: len(PROMPT) + len(choice.token_ids) for choice in choices}
        assert all(position >= ends[index] for index, position in extra)
        for place in extra:
            del result.logits[place]
    assert result.logits.keys() == expected.logits.keys()
    assert [key for key, rows in result.logits.items() if rows != expected.logits[key]] == []


async def test_each_strategy_gives_another_answer(opened: Open, alone: dict[str, Result]) -> None:
    for strategy in STRATEGIES.keys() - alone.keys():
        alone[strategy] = await run(opened, CONDITIONS["alone"], STRATEGIES[strategy])
    tokens = {
        strategy: tuple(choice.token_ids for choice in alone[strategy].answer.choices)
        for strategy in STRATEGIES
        if "logprobs" not in strategy  # logprobs change no token
    }
    for strategy in ADAPTED:
        answer = (await run(opened, CONDITIONS["adapter, alone"], STRATEGIES[strategy])).answer
        tokens[f"{strategy}, adapter"] = tuple(choice.token_ids for choice in answer.choices)
    assert len(set(tokens.values())) == len(tokens)
    assert tokens["temperature"] == tokens["4 samples"][:1]


@pytest.mark.parametrize(
    "name",
    [
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
        *("bad_words", "min_tokens", "stop_token_ids", "allowed_token_ids"),
    ],
)
async def test_each_adjustment_changes_the_answer(opened: Open, name: str) -> None:
    """Otherwise the matrix could not detect that the adjustment is lost."""
    adjusted = STRATEGIES["adjusted"]
    without = replace(adjusted, **{name: getattr(Sampling(), name)})
    answers = [await run(opened, CONDITIONS["alone"], each) for each in (adjusted, without)]
    assert answers[0].answer.choices[0].token_ids != answers[1].answer.choices[0].token_ids
