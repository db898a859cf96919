"""litellm: chat, whole, streamed and async, a text completion, and responses.

usage: as openai_client.py.
"""

import asyncio
import sys

import litellm

url, model, question, max_tokens = sys.argv[1:5]
expected = sys.stdin.read()
name = f"hosted_vllm/{model}"
options = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0, "temperature": 0}
chat = {
    "model": name,
    "messages": [{"role": "user", "content": question}],
    "max_tokens": int(max_tokens),
    **options,
}


def same(text: str) -> None:
    assert text == expected, (text, expected)


same(litellm.completion(**chat).choices[0].message.content)
parts = litellm.completion(**chat, stream=True)
same("".join(part.choices[0].delta.content or "" for part in parts))
same(asyncio.run(litellm.acompletion(**chat)).choices[0].message.content)
text = litellm.text_completion(
    model=f"text-completion-openai/{model}", prompt="A block", max_tokens=4, **options
)
assert text.choices[0].text
answer = litellm.responses(
    model=f"openai/{model}", input=question, max_output_tokens=int(max_tokens), **options
)
same(answer.output[0].content[0].text)
