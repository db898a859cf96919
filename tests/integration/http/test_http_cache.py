"""/v1/cache, and the fields with which requests retain prefixes, through the official client."""

from typing import Any

import httpx
import openai
import pytest

from services.gateway.api import ChatMessage, RetainDirective

from .conftest import HI, FakeGenerator

BREAK = {"type": "ephemeral"}
ANSWER = {**{"status": "clipped", "asked_tokens": 6, "retained_tokens": 4}, "reason": "no room"}


async def test_a_prompt_is_retained_for_a_day(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    messages: Any = HI["messages"]
    answer = await client.chat.completions.create(
        model="", messages=messages, prompt_cache_key="k", prompt_cache_retention="24h"
    )
    assert answer.usage is not None
    assert answer.usage.model_extra == {"retained": [{"name": "k", "ttl": 86400, **ANSWER}]}
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cache_write_tokens == 2
    response = await client.responses.create(input="Hi", prompt_cache_retention="24h")
    assert response.usage is not None
    assert response.usage.model_extra == {"retained": [{"name": "auto", "ttl": 86400, **ANSWER}]}
    in_memory: Any = {"prompt_cache_key": "k", "prompt_cache_retention": "in_memory"}
    await client.completions.create(model="", prompt="Hi", extra_body=in_memory)
    day = RetainDirective(86400, "k")
    asked = [request.retain for request in generator.requests]
    assert asked == [(day,), (RetainDirective(86400),), ()]


async def test_a_chat_is_retained_up_to_each_breakpoint(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    """A breakpoint in the middle of a message retains its text up to there."""
    parts = [
        {"type": "text", "text": "one", "cache_control": {**BREAK, "ttl": "1h"}},
        {"type": "text", "text": "two", "cache_control": {}},
    ]
    messages: Any = [
        {"role": "system", "content": "Be kind.", "cache_control": BREAK},
        {"role": "user", "content": parts},
    ]
    stream = await client.chat.completions.create(
        model="", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    *_, last = [part async for part in stream]
    assert last.usage is not None
    assert [each["ttl"] for each in last.usage.model_extra["retained"]] == [300, 3600]  # type: ignore[index]
    (request,) = generator.requests
    system = ChatMessage("system", "Be kind.")
    assert request.prompt == (system, ChatMessage("user", "one\ntwo"))
    assert request.retain == (
        RetainDirective(300, until=(system,)),
        RetainDirective(3600, until=(system, ChatMessage("user", "one"))),
    )


@pytest.mark.parametrize(
    ("prefix", "prompt"),
    [({"prompt": "Hi"}, "Hi"), ({"tokens": [1, 2]}, (1, 2)), (HI, (ChatMessage("user", "Hi"),))],
)
async def test_a_prefix_is_retained_by_name(
    http: httpx.AsyncClient, generator: FakeGenerator, prefix: dict[str, Any], prompt: object
) -> None:
    """It is computed with one token of an answer, unless the client does not want that."""
    body = {"name": "p", "ttl": 60, "model": "org/tiny", **prefix}
    answer = await http.post("/v1/cache", json={**body, "request_id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    warm = answer.json()
    marked = (await http.post("/v1/cache", json={**body, "warm": False})).json()
    expires_at = warm.pop("expires_at")
    usage = warm.pop("usage")
    assert warm == {"object": "cache.retention", "name": "p", "ttl": 60, **ANSWER}
    assert (usage["completion_tokens"], "retained" in usage) == (3, False)
    assert marked == {**warm, "expires_at": pytest.approx(expires_at, abs=5), "usage": None}
    for request in generator.requests:
        assert (request.prompt, request.model) == (prompt, "org/tiny")
        assert request.retain == (RetainDirective(60, "p"),)
        assert (request.sampling.max_tokens, request.add_generation_prompt) == (1, False)


async def test_retained_prefixes_are_listed_and_dropped(http: httpx.AsyncClient) -> None:
    (prefix,) = (await http.get("/v1/cache")).json()["data"]
    assert (prefix["name"], prefix["pool"], prefix["retained_tokens"]) == ("p", "pool-1", 32)
    assert prefix["cached_tokens"] is None
    dropped = await http.delete("/v1/cache/a/b", params={"tenant": "acme"})
    assert dropped.json() == {"object": "cache.retention", "name": "a/b", "deleted": True}
    missing = await http.delete("/v1/cache/p")
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == "no prefix is retained as 'p'"
