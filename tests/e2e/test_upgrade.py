"""`quire upgrade` replaces the supervisor and every service of a run while requests run: no request
fails or gets another token."""

import asyncio
import json
import operator
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.async_client import AsyncClient
from quire.client import Client
from quire.messages import Request
from tests.exactness import Answer, strategies
from tests.waiting import until, wait_until

from .deployment import Deployment

PROMPT = list(range(259, 299))
NUM_TOKENS = 64
NUM_CLIENTS = 2
"""HTTP clients of each kind."""
STRATEGIES = {
    name: strategies(NUM_TOKENS)[name]
    for name in ("temperature", "4 samples, adjusted", "structured", "4 beams")
}
SERVICES = (
    *("services.gateway", "services.block_manager", "role=prefill", "role=decode"),
    "valkey-server",
)

Ask = Callable[[], Coroutine[Any, Any, Any]]


@pytest.fixture(scope="module")
def deployment(linked: Deployment) -> Deployment:
    """A gateway, a prefill and a decode worker: there is no other one that could serve instead."""
    return linked


def body(**more: Any) -> dict[str, Any]:
    fields = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return fields | {"return_token_ids": True} | more


async def over_grpc(client: AsyncClient, strategy: str) -> Answer:
    request = Request(PROMPT, STRATEGIES[strategy])
    return Answer.of([delta async for delta in client.send(request)])


async def in_a_stream(client: httpx.AsyncClient) -> list[int]:
    """The tokens of an HTTP stream; the client keeps its connections for the next one."""
    tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body(stream=True)) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice["token_ids"]
    return tokens


async def on_a_new_connection(url: str) -> list[int]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post("/v1/completions", json=body())
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens


class Load:
    """Clients that send one request after another, and note every answer by its kind: a strategy,
    or HTTP for greedy tokens."""

    def __init__(self, asks: list[tuple[str, Ask]]) -> None:
        self.answers: list[tuple[str, Any]] = []
        self._ends = asyncio.Event()
        self._tasks = [asyncio.create_task(self._send(*ask)) for ask in asks]

    async def _send(self, kind: str, ask: Ask) -> None:
        while not self._ends.is_set():
            self.answers.append((kind, await ask()))

    async def end(self) -> None:
        """Let the running requests end. Raises the error of a client that had one."""
        self._ends.set()
        await asyncio.gather(*self._tasks)


async def loads(deployment: Deployment) -> AsyncIterator[Load]:
    limits = httpx.Limits(max_keepalive_connections=NUM_CLIENTS)
    async with (
        AsyncClient(deployment.address) as rpc,
        httpx.AsyncClient(base_url=deployment.http, timeout=60, limits=limits) as http,
    ):
        asks: list[tuple[str, Ask]] = [(each, partial(over_grpc, rpc, each)) for each in STRATEGIES]
        for _ in range(NUM_CLIENTS):
            asks.append(("HTTP", partial(in_a_stream, http)))
            asks.append(("HTTP", partial(on_a_new_connection, deployment.http)))
        yield Load(asks)


async def upgrade(deployment: Deployment) -> str:
    """Run the command as a user does; returns what it prints."""
    root = str(deployment.operations.split(",")[0].removeprefix("unix:"))
    command = (sys.executable, "-m", "quire.cli", "upgrade", "--run", str(Path(root).parent))
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode() + deployment.log_tail()
    return output.decode()


async def retained(http: httpx.AsyncClient) -> list[str]:
    """The names of the prefixes that are retained, none while the store is away."""
    answer = await http.get("/v1/cache")
    return [each["name"] for each in answer.json().get("data", ())]


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def names_of_workers(client: Client) -> list[str]:
    return sorted(each.name for each in client.workers() if each.state == "serving")


async def test_every_service_is_replaced_and_no_request_notices(deployment: Deployment) -> None:
    """A retained prefix stays retained, and the next supervisor scales the run."""
    before = {service: deployment.running(service) for service in SERVICES}
    expected: dict[str, Any] = {"HTTP": await on_a_new_connection(deployment.http)}
    assert len(expected["HTTP"]) == NUM_TOKENS
    async with AsyncClient(deployment.address) as client:
        expected |= {each: await over_grpc(client, each) for each in STRATEGIES}
    async with httpx.AsyncClient(base_url=deployment.http, timeout=60) as http:
        prefix = {"name": "system", "tokens": PROMPT, "ttl": "1h"}
        assert (await http.post("/v1/cache", json=prefix)).json()["status"] == "accepted"
    async for load in loads(deployment):
        printed = await upgrade(deployment)
        await load.end()
        assert {kind for kind, _ in load.answers} == expected.keys()
        assert [kind for kind, answer in load.answers if answer != expected[kind]] == []
    assert "decode-2 serves in place of decode-1, which has left.\n" in printed
    assert printed.startswith("the supervisor is version ")
    assert printed.splitlines()[-1].startswith("redis runs anew; it was rebuilt in ")
    assert b"\0--handover=" in command_line(deployment.process.pid)
    wait_until(lambda: all(len(deployment.running(each)) == 1 for each in SERVICES), limit_s=90)
    for service in SERVICES:
        assert not set(before[service]) & set(deployment.running(service)), service
    with Client(deployment.operations.split(",")[0]) as client:
        assert not any(report.violations for report in client.audit())
        assert sorted(each.name for each in client.workers()) == ["decode-2", "prefill-2"]
        for number, names in (
            (2, ["decode-2", "decode-3", "prefill-2"]),
            (1, ["decode-2", "prefill-2"]),
        ):
            client.scale(num_decode=number)
            wait_until(partial(names_of_workers, client), partial(operator.eq, names))
    async with httpx.AsyncClient(base_url=deployment.http, timeout=60) as http:
        await until(partial(retained, http), partial(operator.eq, ["system"]))
