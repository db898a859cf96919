"""The draft model with real models: its drafts are transformers' greedy tokens of it, and an answer
is the same whichever model drafts."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.make_checkpoint import make_checkpoint
from quire import LLM, Choice, Sampling
from quire.types import Beam, StructuredOutput
from services.engine.forward import known
from services.engine.sequences.sequence import Branch, Rules, Sequence
from services.engine.speculation.draft_model import DraftModel
from tests.drafting import AsMany
from tests.unit.workers.fakes import GREEDY, ticket

from .models_oracle import NUM_NEW_TOKENS, Oracle, RecordingRunner, random_prompt

VOCABULARY = 601
NUM_TOKENS = 60
PROMPTS = [list(random_prompt(length, seed=length)) for length in (3, 40, 150)]
DRAWN = Sampling(temperature=1.0, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
STRATEGIES = {
    "greedy": replace(DRAWN, temperature=0.0),
    "temperature": DRAWN,
    "top_p and min_p": replace(DRAWN, top_p=0.8, min_p=0.01, temperature=1.3),
    "3 samples, logprobs": replace(DRAWN, n=3, logprobs=2, top_k=30),
    "penalties": replace(DRAWN, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=20),
    "structured": replace(
        DRAWN,
        ignore_eos=False,
        structured_outputs=StructuredOutput(regex=rf"([a-z]{{2,5}}[.,] ){{{NUM_TOKENS}}}"),
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), vocab_size=VOCABULARY, seed=1)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another family, another shape and with other weights."""
    return make_checkpoint(
        tmp_path_factory.mktemp("other"),
        family="llama",
        vocab_size=VOCABULARY,
        num_layers=1,
        hidden_size=48,
        num_heads=3,
        num_kv_heads=1,
        seed=2,
    )


@pytest.fixture(scope="module", autouse=True)
def _quiet_and_eager() -> Iterator[None]:
    """Every possible draft is verified, whether it pays or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.engine.speculation.speculation.Payoff", AsMany)
        yield


def serve(target: Path, draft: Path | None = None) -> LLM:
    speculative = None
    if draft is not None:
        speculative = {"model": str(draft), "num_speculative_tokens": 4}
    settings: dict[str, Any] = {"pool_memory": "16MiB", "threads": 1}
    return LLM(str(target), speculative_config=speculative, **settings)


@pytest.fixture(scope="module")
def expected(target: Path) -> dict[str, list[tuple[Choice, ...]]]:
    """The answers without drafts."""
    with serve(target) as llm:
        answers = {
            name: llm.generate(PROMPTS, sampling, use_tqdm=False)
            for name, sampling in {**STRATEGIES, "beams": beams()}.items()
        }
    return {name: [one.choices for one in found] for name, found in answers.items()}


def beams() -> Sampling:
    return replace(DRAWN, temperature=0.0, beam=Beam(2), max_tokens=10)


def test_all_drafts_of_the_same_model_are_accepted(
    target: Path, expected: dict[str, list[tuple[Choice, ...]]]
) -> None:
    """It draws with the random numbers, the penalties and the grammar of the target."""
    with serve(target, target) as llm:
        for name, sampling in STRATEGIES.items():
            answers = llm.generate(PROMPTS, sampling, use_tqdm=False)
            assert [one.choices for one in answers] == expected[name]
            for one in answers:
                assert one.usage.num_rejected_drafts == 0
                # 4 of 5 tokens are drafts, but for those drawn while the prompt catches up.
                assert one.usage.num_accepted_drafts > 0.6 * NUM_TOKENS * len(one.choices)


def test_another_model_changes_no_token(
    target: Path, other: Path, expected: dict[str, list[tuple[Choice, ...]]]
) -> None:
    with serve(target, other) as llm:
        for name, sampling in STRATEGIES.items():
            answers = llm.generate(PROMPTS, sampling, use_tqdm=False)
            assert [one.choices for one in answers] == expected[name]
            usage = [one.usage for one in answers]
            assert sum(u.num_rejected_drafts for u in usage) > 100
            assert sum(u.num_accepted_drafts for u in usage) < 100
        answers = llm.generate(PROMPTS, beams(), use_tqdm=False)
        assert [one.choices for one in answers] == expected["beams"]
        assert all(one.usage.num_rejected_drafts == 0 for one in answers)


def test_drafts_are_the_greedy_tokens_of_transformers(other: Path) -> None:
    """For rows of one step, with a prompt of several chunks among them, and after rejections."""
    oracle, runner = Oracle(other), RecordingRunner(other, 16, 100)
    model = DraftModel(runner.run, 100, 16, 4096)
    sequences = [_sequence(prompt) for prompt in PROMPTS]
    for _ in range(3):
        left = dict.fromkeys(sequences, NUM_NEW_TOKENS)
        while left:
            for one, found in model.propose(left)[0].items():
                assert list(known(found)) == oracle.answer(tuple(one.tokens)).token_ids
                one.tokens += [*known(found)[:2], 77]
                del left[one]


def _sequence(tokens: Seq[int]) -> Sequence:
    request = ticket("r1", tuple(tokens), sampling=replace(GREEDY, max_tokens=600))
    rules = Rules.of(request, 16, frozenset(), 2000)
    return Sequence(rules, [Branch(0)], tokens, block_ids=range(99), num_computed=len(tokens) - 1)
