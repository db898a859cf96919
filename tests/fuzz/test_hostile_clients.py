"""Clients open and leave connections in every way: the gateway serves, its memory stays bounded,
and nothing of them is left."""

import asyncio
from pathlib import Path

import httpx
import pytest

from quire.client import Client
from tests.e2e.deployment import Deployment
from tests.fuzz import attacks
from tests.fuzz.attacks import Attack

LIMIT_S = 60
MAX_GROWTH_MIB = 200
CHAT = {"prompt": "A block table", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def deployment(demo: Deployment) -> Deployment:
    return demo


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize(
    ("attack", "number", "port"),
    [
        (attacks.idle, 1000, "http"),
        (attacks.slow_loris, 200, "http"),
        (attacks.endless_bodies, 16, "http"),
        (attacks.cancel_storm, 50, "http"),
        (attacks.rapid_reset, 1000, "grpc"),
    ],
)
async def test_another_client_gets_its_answers_and_nothing_is_left(
    deployment: Deployment, attack: Attack, number: int, port: str
) -> None:
    pid, before = deployment.gateway(deployment.address), 0.0
    address = deployment.address if port == "grpc" else deployment.http
    async with httpx.AsyncClient(base_url=deployment.http, timeout=LIMIT_S) as client:
        expected = (await client.post("/v1/completions", json=CHAT)).json()["choices"]
        before = resident_mib(pid)
        attacking = asyncio.ensure_future(attack(int(address.rpartition(":")[2]), number, 2.0))
        while not attacking.done():
            answer = await client.post("/v1/completions", json=CHAT)
            assert answer.json()["choices"] == expected
        await attacking
    assert deployment.gateway(deployment.address) == pid
    async with asyncio.timeout(LIMIT_S):  # the kernel gets what the last bodies took
        while resident_mib(pid) - before > MAX_GROWTH_MIB:
            await asyncio.sleep(0.05)
    with Client(deployment.address, operations=deployment.operations) as operator:
        async with asyncio.timeout(LIMIT_S):
            while any(worker.num_running for worker in operator.workers()):
                await asyncio.sleep(0.05)
