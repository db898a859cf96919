"""anthropic: messages, whole and streamed, sync and async; token counts, models, and its errors.

usage: as openai_client.py.
"""

import asyncio
import sys
from collections.abc import Callable

import anthropic

url, model, question, max_tokens = sys.argv[1:5]
expected = sys.stdin.read()
asked = {
    "model": model,
    "max_tokens": int(max_tokens),
    "extra_body": {"temperature": 0},
    "messages": [{"role": "user", "content": question}],
}
options = {"base_url": url, "api_key": "none", "max_retries": 0}


def same(text: str) -> None:
    assert text == expected, (text, expected)


def num_read(usage: anthropic.types.Usage) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens


def refused(
    kind: type[anthropic.APIStatusError], call: Callable[..., object], **more: object
) -> None:
    found = None
    try:
        call(**{**asked, **more})
    except kind as error:
        found = error
    assert found is not None
    assert found.request_id == found.body["request_id"]


def sync() -> None:
    with anthropic.Anthropic(**options) as client:
        assert [each.id for each in client.models.list()] == [model]
        assert client.models.retrieve(model).display_name == model
        message = client.messages.create(**asked)
        (block,) = message.content
        same(block.text)
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        assert message._request_id in message.id
        counted = client.messages.count_tokens(model=model, messages=asked["messages"])
        assert counted.input_tokens == num_read(message.usage) > 0
        events = list(client.messages.create(**asked, stream=True))
        assert num_read(events[0].message.usage) == counted.input_tokens
        with client.messages.stream(**asked) as stream:
            same("".join(stream.text_stream))
            assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens
        figures = {**asked, "extra_body": {"temperature": 0, "include_metrics": True}}
        told = client.messages.create(**figures)
        same(told.content[0].text)
        assert told.quire["placement"]
        with client.messages.stream(**figures) as stream:
            (ending,) = [event for event in stream if event.type == "message_delta"]
            assert ending.quire["decode_ms"] > 0, ending
        cut = client.messages.create(**{**asked, "max_tokens": 2})
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
        word = expected.split()[1]
        stopped = client.messages.create(**asked, stop_sequences=["%%", word])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
        refused(anthropic.BadRequestError, client.messages.create, extra_body={"temperature": -1})
        refused(anthropic.BadRequestError, client.messages.create, messages=[])
        refused(anthropic.NotFoundError, client.messages.create, model="other")
        refused(anthropic.NotFoundError, client.messages.create, model="other", stream=True)


async def asynchronous() -> None:
    async with anthropic.AsyncAnthropic(**options) as client:
        messages = await asyncio.gather(*(client.messages.create(**asked) for _ in range(4)))
        for message in messages:
            same(message.content[0].text)
        async with client.messages.stream(**asked) as stream:
            same("".join([text async for text in stream.text_stream]))


sync()
asyncio.run(asynchronous())
