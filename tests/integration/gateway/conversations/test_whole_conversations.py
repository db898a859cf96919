"""Whole conversations of OpenAI's client, Codex and Cline: a program of theirs runs against the
gateway, and sends back every object that it gets. `make test-clients` plays it with real workers.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.gateway.http.app import create_app
from services.gateway.http.server import http_server
from tests.integration.gateway.conftest import GatewayHarness
from tests.integration.gateway.fakes import FakeDecode, FakePrefill

from .conftest import TEMPLATE, Script

PROGRAM = Path(__file__).parents[3] / "clients" / "programs" / "openai_conversations.py"
LIMIT_S = 60

THOUGHT = "<think>\nHm.\n</think>\n\n"
FORMED = '{"city": "Geneva", "is_warm": true}'
CALL = f'<tool_call>\n{{"name": "report", "arguments": {FORMED}}}\n</tool_call>'
TAKES_ONE_OF_EACH = """
{%- for m in messages %}
{%- if m.role == "system" and not loop.first %}{{ raise_exception("one system") }}{% endif %}
{%- if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception("one call") }}{% endif %}
{%- endfor %}"""


class ObedientPrefill(FakePrefill):
    """Lets the workers write what each request asks for: calls, JSON, or a word."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    def on_submit(self, session: Any, submit: Any) -> None:
        asked = str(submit.ticket.sampling.structured_output)
        text = CALL + CALL if "tool_call" in asked else FORMED if "is_warm" in asked else "Yes."
        self._script.text = f"{THOUGHT}{text}END"
        super().on_submit(session, submit)


@pytest.mark.parametrize("more", [pytest.param("", marks=pytest.mark.full), TAKES_ONE_OF_EACH])
async def test_every_object_is_taken_back(
    make_harness: Callable[..., Awaitable[GatewayHarness]],
    script: Script,
    model_dir: Path,
    more: str,
) -> None:
    """Also by a template that takes one system message and one call at a time."""
    (model_dir / "chat_template.jinja").write_text(more + TEMPLATE)
    harness = await make_harness(ObedientPrefill(script), FakeDecode())
    app = create_app(harness.gateway, harness.request_metrics)
    async with http_server(app, "127.0.0.1", 0, grace_s=1) as port, asyncio.timeout(LIMIT_S):
        command = [sys.executable, str(PROGRAM), f"http://127.0.0.1:{port}", "toy"]
        program = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, errors = await program.communicate()
    assert program.returncode == 0, errors.decode()[-4000:]
