"""langchain-openai: chat and responses, whole and streamed; a text completion.

usage: as openai_client.py.
"""

import asyncio
import sys

from langchain_openai import ChatOpenAI, OpenAI

url, model, question, max_tokens = sys.argv[1:5]
expected = sys.stdin.read()
options = {
    "base_url": f"{url}/v1",
    "api_key": "none",
    "model": model,
    "temperature": 0,
    "max_tokens": int(max_tokens),
    "max_retries": 0,
}


def same(text: str) -> None:
    assert text == expected, (text, expected)


async def asynchronous() -> None:
    for chat in chats:
        same((await chat.ainvoke(question)).text)


chats = [ChatOpenAI(**options, use_responses_api=each) for each in (False, True)]
for chat in chats:
    same(chat.invoke(question).text)
    same("".join(part.text for part in chat.stream(question)))
asyncio.run(asynchronous())
assert OpenAI(**options).invoke("A block table")
