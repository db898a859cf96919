"""The default model through real processes: what a user of a real model sees."""

import json
from typing import Any

import httpx
import jsonschema
import pytest

from .deployment import Deployment

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
CITY = {
    "type": "object",
    "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def deployment(demo: Deployment) -> Deployment:
    return demo


def asked(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "temperature": 0, "max_tokens": 48, **fields}


def chat(deployment: Deployment, question: str, **fields: Any) -> dict[str, Any]:
    """The first choice of an answer."""
    answer = httpx.post(
        f"{deployment.http}/v1/chat/completions",
        json=asked(question, **fields),
        timeout=60,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_a_question_is_answered_and_the_model_ends_its_turn(deployment: Deployment) -> None:
    choice = chat(deployment, QUESTION)
    assert (choice["message"]["content"], choice["finish_reason"]) == (ANSWER, "stop")


def test_a_stream_has_the_text_of_the_whole_answer(deployment: Deployment) -> None:
    url = f"{deployment.http}/v1/chat/completions"
    body = asked(QUESTION, stream=True)
    with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER


def test_a_stop_string_inside_tokens_ends_the_answer(deployment: Deployment) -> None:
    choice = chat(deployment, QUESTION, stop=["Fran"])
    assert choice["message"]["content"] == "The capital of "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Fran")


def test_an_expression_is_filled_with_the_right_city(deployment: Deployment) -> None:
    form = {"regex": "The capital of France is (Berlin|Madrid|Paris)"}
    content = chat(deployment, QUESTION, structured_outputs=form)["message"]["content"]
    assert content == "The capital of France is Paris"


def test_a_schema_gets_json_with_the_facts(deployment: Deployment) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    choice = chat(deployment, f"{QUESTION} Answer as JSON.", response_format=form)
    found = json.loads(choice["message"]["content"])
    jsonschema.validate(found, CITY)
    assert found["capital"] == "Paris"


def test_the_best_beam_answers_too(deployment: Deployment) -> None:
    choice = chat(deployment, QUESTION, use_beam_search=True, n=3)
    assert "Paris" in choice["message"]["content"]


def test_a_repeated_text_is_drafted(deployment: Deployment) -> None:
    """Repeating a text that is in the prompt is what n-grams draft well."""
    text = "The harbour was quiet. The two sisters walked to the lighthouse with an old dog."
    body = asked(f"Repeat this text word for word: {text}", max_tokens=40)
    url = f"{deployment.http}/v1/chat/completions"
    usage = httpx.post(url, json=body, timeout=60, trust_env=False).json()["usage"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 5
