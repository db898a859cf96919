"""`quire.LLM` gives, in one process, the tokens of transformers and of a deployment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, ChatMessage, Client, InvalidRequest, QuireError, Sampling, ServerError
from tests.e2e.conftest import POOL_MEMORY, Oracle
from tests.e2e.deployment import Deployment

PROMPTS = [[7 + i, 11, *range(20, 20 + 3 * i), 3] for i in range(12)]
GREEDY = Sampling(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def _logs() -> Iterator[None]:
    """Keep the logging of this process: `LLM` configures it if the caller has not, and later tests
    read logs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.offline.llm.configure_logging", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), pool_memory=str(POOL_MEMORY), threads=1) as llm:
        yield llm


def test_greedy_tokens_are_those_of_transformers(llm: LLM, oracle: Oracle) -> None:
    answers = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert list(answer.token_ids) == oracle.choices(prompt, answer.token_ids)


def test_samples_are_those_of_a_deployment(llm: LLM, deployment: Deployment) -> None:
    sampling = Sampling(temperature=1, seed=5, n=3, max_tokens=12, logprobs=2, ignore_eos=True)
    (offline,) = llm.generate(PROMPTS[3], sampling, use_tqdm=False)
    with Client(deployment.address) as client:
        served = client.complete(PROMPTS[3], sampling)
    assert offline.choices == served.choices


def test_a_small_pool_preempts_and_changes_no_token(checkpoint: Path, llm: LLM) -> None:
    sampling = Sampling(temperature=1, seed=3, max_tokens=160, ignore_eos=True)
    expected = [one.token_ids for one in llm.generate(PROMPTS, sampling, use_tqdm=False)]
    with LLM(str(checkpoint), pool_memory=str(POOL_MEMORY // 4), threads=1) as small:
        answers = small.generate(PROMPTS, sampling, use_tqdm=False)
    assert [one.token_ids for one in answers] == expected
    assert sum(one.usage.num_preemptions for one in answers) > 0


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    samplings = [Sampling(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5)]
    answers = llm.generate(PROMPTS[:2], samplings, use_tqdm=False)
    assert [len(one.token_ids) for one in answers] == [1, 5]


def test_an_invalid_prompt_is_named_and_ends_the_others(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="not in the vocabulary") as raised:
        llm.generate([PROMPTS[0], [10**7]], GREEDY, use_tqdm=False)
    assert raised.value.__notes__ == ["prompt 1 of 2, counted from 0"]
    assert len(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].token_ids) == 24


def test_a_number_of_parameters_that_does_not_fit_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="3 sampling parameters for 2 prompts"):
        llm.generate(PROMPTS[:2], [GREEDY] * 3, use_tqdm=False)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"pool_memory": "banana"}, "pool_memory: 'banana' is not a size"),
        ({"num_threads": 2}, "num_threads: Extra inputs are not permitted"),
        ({"max_model_len": 10**9}, "beyond the model's context"),
        ({"device": "cuda:0"}, "cuda:0: a pool on a GPU needs a block manager"),
    ],
)
def test_a_wrong_setting_is_named(
    checkpoint: Path, settings: dict[str, object], problem: str
) -> None:
    with pytest.raises(QuireError, match=problem):
        LLM(str(checkpoint), **settings)


def test_a_failed_engine_fails_the_call(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.offline import deployment

    def launch(*args: object) -> None:
        raise RuntimeError("the device is gone")

    with LLM(str(checkpoint), pool_memory=str(POOL_MEMORY), threads=1) as llm:
        monkeypatch.setattr(deployment.TurnTaking, "launch", launch)
        with pytest.raises(ServerError, match="deployment has ended"):
            llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
        with pytest.raises(ServerError, match="closed"):
            llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)


def test_conversations_are_messages_or_dicts() -> None:
    with LLM("embedded", pool_memory="16MiB", threads=1) as llm:
        asked = [ChatMessage("user", "What is a block table?")]
        as_dicts = [{"role": "user", "content": "What is a block table?"}]
        greedy = Sampling(temperature=0, max_tokens=8)
        (one,) = llm.chat(asked, greedy, use_tqdm=False)
        (other,) = llm.chat([as_dicts], greedy, use_tqdm=False)
        assert one.text == other.text != ""
        with pytest.raises(InvalidRequest, match="role and content"):
            llm.chat([{"role": "user", "text": "?"}], greedy, use_tqdm=False)
