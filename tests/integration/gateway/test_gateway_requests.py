"""The requests that clients may send, and the errors of the others."""

import asyncio
import time
from dataclasses import replace
from typing import Any, cast

import httpx
import pytest

from quire.types import Beam
from services.gateway.api import ChatMessage, EmbeddingRequest, GenerationRequest, RequestedSampling
from services.gateway.chat.admission import resolve_max_tokens
from services.gateway.workers.directory import ModelPools
from services.gateway.workers.pool import Pool
from services.model.structured.structure import Structure, StructureKind
from services.runtime.errors import (
    InvalidRequest,
    NoWorker,
    PromptTooLong,
    UnknownModel,
)
from tests.waiting import until

from .conftest import PROMPT, SPEC, Call, asked, finish
from .fakes import FakeDecode, FakePrefill, Verbatim, expected

POOL_TOKENS = SPEC.num_blocks * SPEC.block_size
FORM = Structure(StructureKind.REGEX, "a+")
ODD_TAG = r'{"format": {"type": "any_text", "\ud800": 1}}'


async def refused(harness: Any, request: GenerationRequest) -> Exception:
    """The error that refuses the request; a good request is served right after it."""
    with pytest.raises(InvalidRequest) as error:
        await Call(harness.gateway, request).result()
    await finish(Call(harness.gateway, asked("good")))
    return error.value


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"top_p": 1.01}, "top_p is 1.01"),
        (
            {"max_tokens": 4096 - len(PROMPT) + 1},
            "maximum context length is 4096 tokens. However, you requested 4097",
        ),
        ({"stop": ("x" * 1025,)}, "1025 characters"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens is 3, max_tokens only 2"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": 21}, "logprobs is 21, not in [0, 20]"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"structure": FORM, "allowed_token_ids": (7,)}, "combined with allowed_token_ids"),
        ({"structure": FORM, "ignore_eos": True}, "combined with ignore_eos"),
        ({"structure": FORM, "beam": Beam(2)}, "combined with use_beam_search"),
        ({"structure": Structure(FORM.kind, "é" * 131_073)}, "has 262146 bytes, at most 262144"),
        ({"structure": Structure(FORM.kind, "(")}, "regex cannot be compiled"),
        ({"structure": Structure(StructureKind.STRUCTURAL_TAG, ODD_TAG)}, r"\ud800 of any_text"),
    ],
)
async def test_bad_sampling_parameters(harness: Any, sampling: Any, text: str) -> None:
    """tests/unit/gateway/test_gateway_sampling.py has the bounds of every number and list."""
    request = GenerationRequest(prompt=PROMPT, sampling=RequestedSampling(**sampling))
    assert text in str(await refused(harness, request))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": (1, 300)}, "300 is not in the vocabulary"),
        ({"prompt": (1, -1)}, "-1 is not in the vocabulary"),
        ({"prompt": "a \ud800 b"}, "not valid Unicode"),
        ({"prompt": (ChatMessage("", "hi"),)}, "message 0 has no role"),
        ({"priority": 128}, "priority is 128"),
        ({"priority": -129}, "priority is -129"),
        ({"request_id": "x" * 257}, "request_id has 257"),
        ({"request_id": "a\x1b[2J"}, "request_id has characters that cannot be printed"),
        ({"cache_salt": "\udfff"}, "cache_salt is not valid Unicode"),
        ({"resume_token": "x" * 21}, "resume_token has 21 characters; it needs 128 random bits"),
        ({"resume_token": "x" * 257}, "resume_token has 257 characters, at most 256"),
    ],
)
async def test_bad_requests(harness: Any, fields: Any, text: str) -> None:
    assert text in str(await refused(harness, asked(**({"request_id": "bad"} | fields))))


@pytest.mark.parametrize("priority", [-1, 1, 1000])
async def test_a_priority_is_refused_unless_the_deployment_allows_it(
    make_harness: Any, priority: int
) -> None:
    """As vLLM refuses it without its priority scheduler; the error names the flag."""
    harness = await make_harness(FakePrefill(), FakeDecode(), client_priority=False)
    error = await refused(harness, asked(priority=priority))
    assert isinstance(error, InvalidRequest)
    assert f"priority is {priority}" in str(error)
    assert "--client-priority" in str(error)
    await Call(harness.gateway, asked(priority=0)).result()


async def test_a_prompt_of_ten_megabytes_is_refused_and_the_loop_goes_on(harness: Any) -> None:
    longest_s, seen_at = 0.0, time.perf_counter()
    call = Call(harness.gateway, asked("r", prompt="prefill and decode " * ((10 << 20) // 19)))
    while not call.task.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest_s, seen_at = max(longest_s, now - seen_at), now
    with pytest.raises(PromptTooLong, match="more than 4096 tokens"):
        await call.result()
    assert longest_s < 1.0


async def test_a_chat_that_fits_no_context_is_refused_before_it_is_rendered(harness: Any) -> None:
    """No token of this model stands for more than one character."""
    harness.assembly.directory.served("toy").model.chat_template.__dict__["_template"] = None
    prompt = (ChatMessage("user", "<" * 3000), ChatMessage("user", "<" * 3000))
    with pytest.raises(PromptTooLong, match="more than 4096 tokens"):
        await Call(harness.gateway, asked("r", prompt=prompt)).result()


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(10, 16), (4090, 6)])
async def test_an_absent_max_tokens_may_have_a_usual_number(
    harness: Any, num_prompt: int, max_tokens: int
) -> None:
    """Less, where the context leaves less."""
    prefill, _ = harness.workers
    prefill.holds = True
    prompt, sampling = (65,) * num_prompt, {"default_max_tokens": 16}
    call = Call(harness.gateway, asked(max_tokens=None, prompt=prompt, sampling=sampling))
    await until(lambda: bool(prefill.held))
    assert prefill.held[0][1].sampling.max_tokens == max_tokens
    await call.cancel()


async def test_a_template_gets_what_its_client_tells_it(harness: Any) -> None:
    """Names, and variables that are not the template's own."""
    told = ChatMessage("user", "hi", "Ann")
    call = Call(harness.gateway, asked("a", prompt=(told,), template_arguments={"mark": "!"}))
    last = await call.result()
    assert last.usage is not None
    assert last.usage.num_prompt_tokens == len("Ann@user:hi!;")
    for name in ("messages", "add_generation_prompt", "range", "raise_exception", "tokenize"):
        request = asked("b", prompt=(told,), template_arguments={name: 1})
        assert f"'{name}' is not for clients to set" in str(await refused(harness, request))


async def test_a_request_that_fits_no_pool_any_more_fails_and_delays_no_other(
    make_harness: Any,
) -> None:
    """It was admitted for a pool that is gone since, and the model has a smaller one."""
    decode = FakeDecode(num_slots=1)
    harness = await make_harness(FakePrefill(), decode)
    decode.pause_after = 2
    other = Call(harness.gateway, asked("other"))
    await until(lambda: "other" in decode.running)
    large = Call(harness.gateway, asked("large", max_tokens=200))
    await harness.num_waiting(1)
    await harness.store.register_pool(replace(SPEC, pool_id="small", num_blocks=4))
    smaller = FakePrefill("prefill-2", pool_id="small"), FakeDecode("decode-2", pool_id="small")
    await harness.add(*smaller)
    for name in ("prefill-1", "decode-1"):
        await harness.registry.withdraw(name)
    with pytest.raises(PromptTooLong, match="the pool has 4"):
        await large.result()
    await finish(other)


@pytest.mark.parametrize("others_token", ["", "of another client, 128 bits"])
async def test_a_request_id_of_another_client_is_no_obstacle(
    make_harness: Any, others_token: str
) -> None:
    """Nobody can keep an id from others, or find out that it is in use."""
    prefill, decode = FakePrefill(), FakeDecode()
    prefill.names, decode.names = Verbatim(), Verbatim()
    harness = await make_harness(prefill, decode)
    decode.pause_after = 2
    others = Call(harness.gateway, asked("same", resume_token=others_token))
    await until(lambda: len(decode.running) == 1)
    mine = Call(harness.gateway, asked("same"))
    await until(lambda: len(decode.running) == 2)
    decode.go_on(pause_after=8)
    for call in (others, mine):
        assert (await call.result()).request_id == "same"
        assert call.tokens == expected(PROMPT, 8)


def served_by(num_blocks: int, max_model_len: int = 4096) -> ModelPools:
    """A model's pools: one with so many blocks of 16 tokens."""
    pool = Pool(replace(SPEC, num_blocks=num_blocks), (), ())
    return ModelPools(cast("Any", None), max_model_len, (pool,))


def test_longest_request_is_what_the_pool_has_room_for() -> None:
    assert served_by(num_blocks=85).longest_request == 1360
    assert served_by(num_blocks=5000).longest_request == 4096


def test_request_beyond_the_pool_is_told_the_context_and_the_room() -> None:
    pools = served_by(num_blocks=85).specs
    with pytest.raises(PromptTooLong) as refused:
        resolve_max_tokens(1300, 100, 4096, pools, 1)
    assert str(refused.value) == (
        "This model's maximum context length is 4096 tokens. However, its KV pool has room for "
        "1360 tokens: prompt (1300 tokens) and max_tokens (100) need 88 blocks of 16 tokens; the "
        "pool has 85"
    )


@pytest.mark.parametrize(("max_model_len", "room"), [(100, 100), (8192, POOL_TOKENS)])
def test_an_absent_max_tokens_is_what_context_and_pool_leave(max_model_len: int, room: int) -> None:
    assert resolve_max_tokens(15, None, max_model_len, [SPEC], 1) == room - 15


@pytest.mark.parametrize("asked", [None, 1])
def test_prompt_that_fills_the_context_leaves_none_to_generate(asked: int | None) -> None:
    pools = served_by(num_blocks=5000).specs
    assert resolve_max_tokens(4095, asked, 4096, pools, 1) == 1
    with pytest.raises(PromptTooLong) as refused:
        resolve_max_tokens(4096, asked, 4096, pools, 1)
    assert str(refused.value) == (
        "This model's maximum context length is 4096 tokens. However, the prompt has 4096 tokens, "
        "which leave none to generate"
    )


async def test_embedding_beyond_the_context_is_not_told_of_a_token_to_generate(
    harness: Any,
) -> None:
    with pytest.raises(PromptTooLong) as refused:
        await harness.gateway.embed(EmbeddingRequest((7,) * 4097))
    assert str(refused.value) == (
        "This model's maximum context length is 4096 tokens. However, the prompt has 4097 tokens"
    )


async def test_model_of_the_deployment_without_workers_is_unavailable_not_unknown(
    make_harness: Any,
) -> None:
    """Its workers have died and do not start again, while those of another model serve."""
    harness = await make_harness(FakePrefill(), FakeDecode(), models=("toy", "big"), patience_s=0.1)
    with pytest.raises(NoWorker, match="no prefill and no decode worker serves 'big' now"):
        await Call(harness.gateway, asked(model="big")).result()
    with pytest.raises(UnknownModel, match="'other' is not served here; these are: toy"):
        await Call(harness.gateway, asked(model="other")).result()
    await Call(harness.gateway, asked(model="toy")).result()


async def test_detokenize_inverts_tokenize(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/tokenize", json={"prompt": "hello"})).json()
    assert (answer["tokens"], answer["count"]) == (list(b"hello"), 5)
    text = await http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert text.json() == {"prompt": "hello"}
    assert (await http.post("/tokenize", json={"prompt": ""})).json()["count"] == 0
    for path, body, status, param in (
        ("/detokenize", {"tokens": [300]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/tokenize", {"prompt": "x", "model": "nobody"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
    ):
        refused = await http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
