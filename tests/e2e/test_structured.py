"""Structured output through real processes: every text that ends has its form, and a form that
costs too much delays no other request."""

import asyncio
import json
import re
from typing import Any

import httpx
import jsonschema
import pytest

from quire import InvalidRequest, StructuredOutput
from quire.async_client import AsyncClient
from quire.types import Sampling
from tests.waiting import until

from .deployment import Deployment

LIMIT_S = 90.0
PROMPT = [300, 280, 310, 299]
NUM = 4
NUMBERS = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 100_000, "maximum": 999_999},
            "minItems": 60,
            "maxItems": 70,
        },
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}
HOSTILE = {
    "a prime number": StructuredOutput(json={"type": "integer", "multipleOf": 999_983}),
    "rules of rules": StructuredOutput(
        grammar="start: a0\na3000: /x/\n"
        + "".join(f"a{i}: a{i + 1} a{i + 1} a{i + 1}\n" for i in range(3000))
    ),
}


@pytest.fixture(scope="module")
def deployment(roomy: Deployment) -> Deployment:
    return roomy


def numbers(**changes: Any) -> Sampling:
    """Sampling parameters for objects of some 700 tokens."""
    form = StructuredOutput(json=NUMBERS)
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 4000, "n": NUM}
    return Sampling(structured_outputs=form, **(fields | changes))


class Stream:
    """A request whose answer is streamed."""

    def __init__(self, client: AsyncClient, sampling: Sampling) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(sampling.n)]
        self.texts = [""] * sampling.n
        self.reading = asyncio.create_task(self._read(client, sampling))

    async def _read(self, client: AsyncClient, sampling: Sampling) -> None:
        async for delta in client.generate(PROMPT, sampling, timeout_s=LIMIT_S):
            self.tokens[delta.index] += delta.token_ids
            self.texts[delta.index] += delta.text
        for text in self.texts:
            jsonschema.validate(json.loads(text), NUMBERS)

    async def is_in_mid_object(self) -> None:
        await until(lambda: self.reading.done() or min(map(len, self.tokens)) >= 100)
        assert not self.reading.done()


async def test_forms_compose_with_other_parameters(client: AsyncClient, two_decoders: None) -> None:
    sampling = numbers(
        logprobs=3,
        min_tokens=50,
        bad_words=("7", "88"),
        logit_bias={ord("3"): -100.0},
        presence_penalty=0.5,
        repetition_penalty=1.1,
        stop=("no such text",),
        top_p=0.9,
    )
    completion = await client.complete(PROMPT, sampling, timeout_s=LIMIT_S)
    for choice in completion.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), NUMBERS)
        assert "7" not in choice.text
        assert [one.chosen.token_id for one in choice.logprobs] == list(choice.token_ids)
        assert all(len(one.top) == 3 for one in choice.logprobs)


async def test_min_tokens_and_bad_words_give_way_to_the_form(
    client: AsyncClient, two_decoders: None
) -> None:
    form = StructuredOutput(choice=["yes", "no"])
    sampling = Sampling(
        temperature=1.0, seed=1, max_tokens=20, min_tokens=15, bad_words=("y", "n"), n=8,
        structured_outputs=form,
    )  # fmt: skip
    completion = await client.complete(PROMPT, sampling, timeout_s=LIMIT_S)
    assert {choice.text for choice in completion.choices} <= {"yes", "no"}


@pytest.mark.parametrize(
    ("path", "fields", "pattern"),
    [
        ("chat", {"response_format": {"type": "json_object"}}, r"\{.*"),
        (
            "chat",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": {"const": {"a": 1}}},
                }
            },
            r'\{\s*"a"\s*:\s*1\s*\}',
        ),
        ("completions", {"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        (
            "completions",
            {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}},
            "[a-c]{3}-[0-9]{2}",
        ),
        ("chat", {"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}}, "b*a"),
        (
            "chat",
            {"structured_outputs": {"json": {"const": [1, 2]}, "disable_any_whitespace": True}},
            re.escape("[1,2]"),
        ),
        (
            "chat",
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {
                        "type": "tag",
                        "begin": "<f>",
                        "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
                        "end": "</f>",
                    },
                }
            },
            "<f>[12]</f>",
        ),
        ("responses", {"text": {"format": {"type": "json_object"}}}, r"\{.*"),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"const": "x"}}}},
            '"x"',
        ),
    ],
)
async def test_forms_over_http(
    deployment: Deployment, two_decoders: None, path: str, fields: dict[str, Any], pattern: str
) -> None:
    said: dict[str, Any] = {"input": "hi", "max_output_tokens": 100}
    if path == "chat":
        said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
    elif path == "completions":
        said = {"prompt": "hi", "max_tokens": 100}
    url = f"{deployment.http}/v1/{path.replace('chat', 'chat/completions')}"
    async with httpx.AsyncClient(timeout=LIMIT_S) as http:
        answer = (await http.post(url, json={**said, **fields, "seed": 3})).json()
    if path == "responses":
        text = answer["output"][0]["content"][0]["text"]
    else:
        (choice,) = answer["choices"]
        text = choice["message"]["content"] if path == "chat" else choice["text"]
    assert re.fullmatch(pattern, text, re.DOTALL), text


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_form_is_refused_and_disturbs_nobody(
    deployment: Deployment, client: AsyncClient, two_decoders: None, name: str
) -> None:
    async with asyncio.timeout(LIMIT_S):
        stream = Stream(client, numbers())
        await stream.is_in_mid_object()
        asked = Sampling(structured_outputs=HOSTILE[name], max_tokens=5)
        with pytest.raises(InvalidRequest, match="is too large, too deep or too complex"):
            await client.complete(PROMPT, asked, timeout_s=LIMIT_S)
        await stream.reading
        good = Sampling(structured_outputs=StructuredOutput(regex=f"after {name}"), max_tokens=50)
        assert (await client.complete(PROMPT, good, timeout_s=LIMIT_S)).text == f"after {name}"
