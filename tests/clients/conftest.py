"""A deployment of the embedded model, and the table of results by client."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.make_checkpoint import make_checkpoint
from quire.client import Client
from quire.types import ChatMessage, Sampling
from tests.e2e.deployment import Deployment, serving
from tests.real_models import transformers_tokenizer

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
MAX_TOKENS = 200
"""More tokens than the answer has: OpenAI's stream reader takes only a completed response."""
TABLE = "QUIRE_CLIENTS_TABLE"
"""The variable that names the file for the table of results."""

TABLE_HEAD = "|---|---|---|---|\n"
"""The last line before the rows, which end the page."""


@dataclass
class Table:
    rows: dict[str, tuple[str, str, str]] = field(default_factory=dict)

    def add(self, client: str, version: str, called: str, outcome: str) -> None:
        self.rows[f"{client} {called}"] = (client, version, f"{called} | {outcome}")


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    table = Table()
    yield table
    if path := os.environ.get(TABLE):
        lines = [" | ".join(("", *row, "")).strip() for row in sorted(table.rows.values())]
        page = Path(path).read_text().partition(TABLE_HEAD)[0]
        Path(path).write_text(page + TABLE_HEAD + "\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def deployment(demo: Deployment) -> Deployment:
    return demo


@pytest.fixture(scope="session")
def short_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment whose answers have at most 256 tokens less their prompt: made-up requests seldom
    name `max_tokens`, and some of them (`ignore_eos`) write until the context is full."""
    with serving("demo", tmp_path_factory.mktemp("short"), "--max-model-len", "256") as run:
        yield run


TOOLS_TEMPLATE = """
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}"""


@pytest.fixture(scope="session")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment of a model with random weights, called MODEL, whose template takes tools."""
    directory = tmp_path_factory.mktemp("tools") / MODEL
    checkpoint = make_checkpoint(directory, max_position_embeddings=16384)
    (checkpoint / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    with serving(checkpoint, tmp_path_factory.mktemp("run"), "--pool-memory", "64MiB") as run:
        yield run


@pytest.fixture(scope="session")
def tokenizer_directory(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's tokenizer in Hugging Face's format: clients that count tokens read no GGUF."""
    directory = tmp_path_factory.mktemp("tokenizer")
    transformers_tokenizer(smollm2).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def expected(deployment: Deployment) -> str:
    """The greedy answer to QUESTION."""
    with Client(deployment.address) as client:
        sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0.0)
        return client.complete([ChatMessage("user", QUESTION)], sampling).choices[0].text
