"""openai: chat, completions and responses, whole and streamed, sync and async; its own errors.

usage: openai_client.py URL MODEL QUESTION MAX_TOKENS, with the expected text on standard input.
"""

import asyncio
import sys
from collections.abc import Callable

import openai

url, model, question, max_tokens = sys.argv[1:5]
expected = sys.stdin.read()
messages = [{"role": "user", "content": question}]
chat = {"model": model, "messages": messages, "max_tokens": int(max_tokens), "temperature": 0}
response = {
    "model": model,
    "input": question,
    "max_output_tokens": int(max_tokens),
    "temperature": 0,
}
options = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}


def same(text: str) -> None:
    assert text == expected, (text, expected)


def refused(param: str, call: Callable[..., object], **arguments: object) -> None:
    try:
        call(**arguments)
    except openai.BadRequestError as error:
        found = error.param
    else:
        found = "no error"
    assert found == param


def sync() -> None:
    with openai.OpenAI(**options) as client:
        assert [each.id for each in client.models.list()] == [model]
        answer = client.chat.completions.create(**chat)
        same(answer.choices[0].message.content)
        assert answer.choices[0].finish_reason == "stop"
        parts = client.chat.completions.create(
            **chat, stream=True, stream_options={"include_usage": True}
        )
        same("".join(p.choices[0].delta.content or "" for p in parts if p.choices))
        text = client.completions.create(model=model, prompt="A block", max_tokens=4, logprobs=2)
        assert len(text.choices[0].logprobs.tokens) == 4
        vectors = client.embeddings.create(model=model, input=["A block", "a table"]).data
        assert [round(sum(x * x for x in one.embedding), 4) for one in vectors] == [1.0, 1.0]
        same(client.responses.create(**response).output_text)
        with client.responses.stream(**response) as stream:
            same(stream.get_final_response().output_text)
        refused("temperature", client.chat.completions.create, **{**chat, "temperature": -1})
        stored = {**response, "previous_response_id": "resp_1"}
        refused("previous_response_id", client.responses.create, **stored)


async def asynchronous() -> None:
    async with openai.AsyncOpenAI(**options) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**chat) for _ in range(4)))
        for answer in answers:
            same(answer.choices[0].message.content)
        events = await client.responses.create(**response, stream=True)
        same("".join([e.delta async for e in events if e.type == "response.output_text.delta"]))


sync()
asyncio.run(asynchronous())
