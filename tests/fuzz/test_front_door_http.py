"""Arbitrary client input over HTTP: each request gets tokens of its own prompt or a clear status,
nothing hangs or is left behind, and the request of another client is not disturbed."""

import asyncio
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.deployment import Deployment
from tests.fuzz.victim import FUZZ, victim

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
CLEAR_HTTP = {200, 400, 404, 405, 409, 413, 429}

HUGE = "9" * 4300  # all that Python turns into a number
JSON_VALUES = st.sampled_from(
    [
        *("null", "true", "0", "1", "-1", "2.5", "1e400", "-1e400", HUGE, f"-{HUGE}", "9" * 5000),
        *('""', '"a"', '"hello"', '"\\ud800"', '"\\u0000"', '"victim"', '"nobody"', "NaN"),
        *("[]", "{}", "[[]]", "[1, 2]", f"[{HUGE}]", '["a", "b"]', "[1.0]", "[-1]", "[[1], [2]]"),
        *("[" * 5000, "[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500),
        *('[{"role": "user", "content": "hi"}]', '[{"role": 1}]', '[{"role": "", "content": ""}]'),
        *('[{"role": "\\udfff", "content": "\\ud800"}]', '{"include_usage": true}', "1" * 300_000),
        *(json.dumps("x" * 300_000), json.dumps(["a"] * 200), json.dumps([[1]] * 200)),
    ]
)
HTTP_FIELDS = st.sampled_from(
    [
        *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature"),
        *("top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "stream", "stream_options"),
        *("cache_salt", "priority", "request_id", "return_token_ids", "ignore_eos", "user"),
        *("n", "logprobs", "logit_bias", "tools", "response_format", "nobody", "\\ud800"),
        *("use_beam_search", "length_penalty", "early_stopping", "prompt_logprobs", "echo"),
        *("top_logprobs", "best_of", "beam_width", "received", "resume_token"),
    ]
)
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions"])


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, str, bytes]:
    path = draw(PATHS)
    chat = '[{"role": "user", "content": "hi"}]'
    fields = {"max_tokens": "4", "temperature": "0"}
    fields |= {"messages": chat} if "chat" in path else {"prompt": '"hello"'}
    fields |= dict(draw(st.lists(st.tuples(HTTP_FIELDS, JSON_VALUES), max_size=3)))
    return "POST", path, ("{" + ", ".join(f'"{k}": {v}' for k, v in fields.items()) + "}").encode()


ELSEWHERE = st.tuples(
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]),
    st.sampled_from(
        [
            *("/v1/models", "/v1/models/toy", "/v1/models/%ff%00", "/v1/models/" + "x" * 5000),
            *("/health", "/metrics", "/", "//", "/v1/completions", "/v1/../v1/models", "/%2e%2e"),
        ]
    ),
    st.binary(max_size=20),
)
ANY_HTTP = (
    bodies() | bodies() | st.tuples(st.just("POST"), PATHS, st.binary(max_size=60)) | ELSEWHERE
)


async def http_beside(deployment: Deployment, asked: Sequence[tuple[str, str, bytes]]) -> None:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    async with victim(deployment):
        answers = await asyncio.gather(
            *(
                deployment.http.request(method, path, content=content, headers=headers)
                for method, path, content in asked
            )
        )
    for answer, (method, _, content) in zip(answers, asked, strict=True):
        assert answer.status_code in CLEAR_HTTP, (answer.status_code, answer.text[:300])
        assert len(answer.content) < 20_000, content[:300]
        if answer.status_code != 200 and method != "HEAD":
            assert answer.json()["error"]["message"]


@given(asked=st.lists(ANY_HTTP, min_size=1, max_size=4))
@FUZZ
def test_http(
    service: tuple[asyncio.Runner, Deployment], asked: Sequence[tuple[str, str, bytes]]
) -> None:
    """JSON of wrong types, huge numbers, lone surrogates, and text that is not JSON."""
    runner, deployment = service
    runner.run(http_beside(deployment, asked))
