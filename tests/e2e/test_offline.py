"""`quire.LLM` gives, in one process, the tokens of transformers and of a deployment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from bench.make_checkpoint import make_checkpoint
from quire import (
    LLM,
    ChatMessage,
    Client,
    InvalidRequest,
    LoRARequest,
    QuireError,
    Sampling,
    ServerError,
)
from quire.supervisor.models import ModelOptions
from services.engine.runner import Runner
from services.offline.batch import BatchRequest, answer_whole
from services.offline.engine import offline_settings
from tests.adapters import AdapterOracle, make_adapter
from tests.e2e.conftest import POOL_MEMORY, Oracle
from tests.e2e.deployment import Deployment

PROMPTS = [[7 + i, 11, *range(20, 20 + 3 * i), 3] for i in range(12)]
GREEDY = Sampling(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), pool_memory=str(POOL_MEMORY), threads=1) as llm:
        yield llm


def test_greedy_tokens_are_those_of_transformers(llm: LLM, oracle: Oracle) -> None:
    answers = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert list(answer.token_ids) == oracle.choices(prompt, answer.token_ids)


def test_an_answer_has_the_names_of_vllm(llm: LLM) -> None:
    (of_text,) = llm.generate("a b", GREEDY, use_tqdm=False)
    assert of_text.outputs[0].text == of_text.text
    assert of_text.outputs == of_text.choices
    assert of_text.prompt == "a b"
    assert len(of_text.prompt_token_ids) == of_text.usage.num_prompt_tokens
    (of_ids,) = llm.generate([[7, 11]], GREEDY, use_tqdm=False)
    assert (of_ids.prompt, of_ids.prompt_token_ids) == (None, (7, 11))
    (again,) = llm.generate([list(of_text.prompt_token_ids)], GREEDY, use_tqdm=False)
    assert again.token_ids == of_text.token_ids


SCRIPT = """
import os, sys
from quire import LLM, QuireError, Sampling

llm = LLM(sys.argv[1], pool_memory="1MiB", threads=1)
llm.generate([[7, 11]], Sampling(max_tokens=2), use_tqdm=False)
if os.fork() == 0:
    try:
        llm.generate([[7, 11]], Sampling(max_tokens=2), use_tqdm=False)
    except QuireError as error:
        llm.close()
        print(error.code, flush=True)
    os._exit(0)
os.wait()
"""


def test_a_script_without_with_ends_quietly_and_its_forked_child_gets_an_error(
    checkpoint: Path,
) -> None:
    """A script in vLLM's style, which never closes its LLM."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(checkpoint)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("forked\n", "")


def test_the_default_pool_is_that_of_quire_serve(checkpoint: Path) -> None:
    """It depends on the number of workers that a host expects."""
    settings, serve = offline_settings(model=checkpoint), ModelOptions("model", checkpoint)
    assert settings.num_expected_workers == serve.num_prefill + serve.num_decode


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
    # A request that comes back at once must not take the blocks for which it was preempted.
    assert 0 < sum(one.usage.num_preemptions for one in answers) < 200


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    samplings = [Sampling(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5)]
    answers = llm.generate(PROMPTS[:2], samplings, use_tqdm=False)
    assert [len(one.token_ids) for one in answers] == [1, 5]


def test_a_stop_string_ends_one_of_several_sequences(llm: LLM) -> None:
    sampling = Sampling(temperature=1, seed=9, n=4, max_tokens=40, ignore_eos=True)
    (whole,) = llm.generate("a b c", sampling, use_tqdm=False)
    stop = whole.choices[1].text[6:9]
    (stopped,) = llm.generate("a b c", replace(sampling, stop=(stop,)), use_tqdm=False)
    assert [one.text for one in stopped.choices] == [
        one.text.split(stop)[0] for one in whole.choices
    ]
    assert stopped.choices[1].stopped_by == stop


def test_prompts_may_be_vllms_dicts(llm: LLM) -> None:
    (of_text,) = llm.generate("a b", GREEDY, use_tqdm=False)
    text: Any = {"prompt": "a b"}
    ids: Any = {"prompt_token_ids": list(of_text.prompt_token_ids)}
    for given in (text, ids, [text, ids, "a b"], [{**ids, "prompt": "c", "cache_salt": None}]):
        for answer in llm.generate(given, GREEDY, use_tqdm=False):
            assert answer.token_ids == of_text.token_ids
    assert llm.embed([text], use_tqdm=False) == llm.embed("a b", use_tqdm=False)
    for wrong in ({}, {"prompt": None}, {"prompt": "a", "multi_modal_data": {"image": 1}}):
        with pytest.raises(InvalidRequest, match="a prompt has prompt or prompt_token_ids"):
            llm.generate(wrong, GREEDY, use_tqdm=False)


def test_no_prompts_have_no_answers(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    assert llm.embed([], use_tqdm=False) == []


def test_a_parameter_of_another_type_is_named(llm: LLM) -> None:
    sampling = Sampling(temperature=cast("float", "hot"))
    with pytest.raises(InvalidRequest, match="temperature: Input should be a valid number"):
        llm.generate("a", sampling, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="the prompt: 'list' object cannot be interpreted"):
        llm.generate([cast("list[int]", [[1], [2]])], use_tqdm=False)


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
        ({"pool_memory": "900TiB"}, "pool memory 900.00 TiB .* is not available: this host has"),
        ({"device": "cuda:0"}, "cuda:0: a pool on a GPU needs a block manager"),
    ],
)
def test_a_wrong_setting_is_named(checkpoint: Path, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(QuireError, match=problem):
        LLM(str(checkpoint), **settings)


def test_a_failed_engine_fails_the_call(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*args: object) -> None:
        raise RuntimeError("the device is gone")

    with LLM(str(checkpoint), pool_memory=str(POOL_MEMORY), threads=1) as llm:
        monkeypatch.setattr(Runner, "launch", launch)
        for _ in range(2):
            with pytest.raises(ServerError, match=r"engine has ended: .*the device is gone"):
                llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    with pytest.raises(ServerError, match="closed"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)


def test_rows_with_adapters_and_without_have_the_tokens_of_peft(
    checkpoint: Path, tmp_path: Path, llm: LLM
) -> None:
    """One batch of the model and two adapters, of which one prompt has none."""
    poet = LoRARequest("poet", 1, str(make_adapter(tmp_path / "poet", checkpoint, 1)))
    lawyer = LoRARequest("lawyer", 2, str(make_adapter(tmp_path / "lawyer", checkpoint, 2, r=4)))
    asked = [poet, None, lawyer]
    answers = llm.generate([PROMPTS[3]] * 3, GREEDY, lora_request=asked, use_tqdm=False)
    for lora, answer in zip(asked, answers, strict=True):
        oracle = AdapterOracle(checkpoint, Path(lora.lora_path) if lora else None)
        assert list(answer.token_ids) == oracle.greedy(tuple(PROMPTS[3]), 24)[0]
    (again,) = llm.generate(PROMPTS[3], GREEDY, lora_request=poet, use_tqdm=False)
    assert again.token_ids == answers[0].token_ids
    with pytest.raises(InvalidRequest, match="No such file"):
        llm.generate("x", GREEDY, lora_request=LoRARequest("other", 3, "/nowhere"), use_tqdm=False)
    with pytest.raises(InvalidRequest, match="2 LoRA requests for 3 prompts"):
        llm.generate(["x"] * 3, GREEDY, lora_request=[poet, None], use_tqdm=False)


def test_an_llm_without_adapters_says_so(checkpoint: Path) -> None:
    settings: dict[str, Any] = {"pool_memory": str(POOL_MEMORY), "threads": 1}
    with (
        LLM(str(checkpoint), enable_lora=False, **settings) as plain,
        pytest.raises(InvalidRequest, match="max_loras is 0"),
    ):
        plain.generate("x", GREEDY, lora_request=LoRARequest("a", 1, "/a"), use_tqdm=False)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}},
        },
    }
]


TEMPLATE = """
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content or "" }}
{%- for call in m.tool_calls or [] %} calls {{ call.function.arguments.n }}{% endfor %}{% endfor %}
{#- <think> </think> <tool_call> #}{% if thinks %}<think>\n{% endif %}"""


def test_a_chat_with_tools_is_that_of_the_http_api(tmp_path: Path) -> None:
    """The same template, forced call and parsers. The message is part of the next conversation."""
    config = make_checkpoint(tmp_path / "model") / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    asked: list[dict[str, Any]] = [{"role": "user", "content": "Look it up."}]
    forced: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    greedy = Sampling(temperature=0, max_tokens=80)
    with LLM(str(config.parent), pool_memory="16MiB", threads=1) as llm:

        def over_http(**fields: Any) -> dict[str, Any]:
            body = {"messages": asked, "temperature": 0, "max_tokens": 80, **fields}

            work = answer_whole(
                llm.engine, BatchRequest(custom_id="a", url="/v1/chat/completions", body=body)
            )
            return dict(llm.run(work)[1]["choices"][0]["message"])

        def offline(**options: Any) -> dict[str, Any]:
            (found,) = llm.chat(asked, greedy, use_tqdm=False, **options)
            assert len(found.prompt_token_ids) == found.usage.num_prompt_tokens
            assert found.prompt
            return dict(found.choices[0].message or {})

        said = offline(**forced)
        (call,) = said["tool_calls"]
        assert call["function"]["name"] == "look_up"
        (wanted,) = over_http(**forced)["tool_calls"]
        assert call["function"] == wanted["function"]
        thinking = {"chat_template_kwargs": {"thinks": True}}
        assert offline(**thinking) == over_http(**thinking)
        assert offline(**thinking)["reasoning_content"]
        asked += [said, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
        written = {"name": "look_up", "arguments": json.loads(call["function"]["arguments"])}
        as_object = {**said, "tool_calls": [{"id": call["id"], "function": written}]}
        with_text = offline(tools=TOOLS)
        asked[-2] = as_object
        assert offline(tools=TOOLS) == with_text
        assert offline(tools=TOOLS) == over_http(tools=TOOLS)
        named = {"type": "function", "function": {"name": "no"}}
        with pytest.raises(InvalidRequest, match="'no' is not one of the tools"):
            offline(tools=TOOLS, tool_choice=named)


def test_conversations_are_messages_or_dicts() -> None:
    with LLM("demo", pool_memory="16MiB", threads=1) as llm:
        asked = [ChatMessage("user", "Why is the sky blue?")]
        as_dicts = [{"role": "user", "content": "Why is the sky blue?"}]
        greedy = Sampling(temperature=0, max_tokens=8)
        (one,) = llm.chat(asked, greedy, use_tqdm=False)
        (other,) = llm.chat([as_dicts], greedy, use_tqdm=False)
        assert one.text == other.text != ""
        assert one.choices[0].message == {"role": "assistant", "content": one.text}
