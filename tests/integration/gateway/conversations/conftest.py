"""A gateway whose workers generate the test's text, and OpenAI's own client."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from tests.integration.gateway.conftest import write_model
from tests.integration.gateway.fakes import decode, prefill

TEMPLATE = """
{%- if tools %}{% for tool in tools %}tool {{ tool | tojson }}\n{% endfor %}{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{%- if m.reasoning_content %} ({{ m.reasoning_content }}){% endif %}
{%- for call in m.tool_calls or [] %} calls {{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value | tojson }}
{%- endfor %}{% endfor %}\n{% endfor %}
{#- <think> </think> <tool_call> #}
##{% if thinks %}<think>\n{% endif %}"""
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Weather of <|city|>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("get_weather", "get_time")
]
TEXT = (
    "<think>\nThe user asks.\n</think>\n\nLook:\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Genève"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>END'
)
USER: Any = [{"role": "user", "content": "What is the weather?"}]


class Script:
    """The text of every worker: `text` after a prompt, which ends with ##."""

    def __init__(self, model_dir: Path) -> None:
        self.text = TEXT
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def next_token(self, tokens: Sequence[int], index: int = 0) -> int:
        end = bytes(tokens).rfind(b"##") + 2
        token_ids: list[int] = self.tokenizer.encode(self.text).ids
        return token_ids[len(tokens) - end]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> Script:
    script = Script(model_dir)
    for module in (prefill, decode):
        monkeypatch.setattr(module, "next_token", script.next_token)
    return script


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(http) as client:
        yield client


def openai_client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    own = openai.DefaultAsyncHttpxClient(timeout=10, trust_env=False)
    url = f"{http.base_url}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=own)
