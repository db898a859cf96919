"""Two hosts and four pools: a short run of what `python -m tests.chaos --hosts` does, and how long
requests take that were being copied when the network was cut."""

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from quire.async_client import AsyncClient
from quire.types import Sampling
from tests.chaos.hosts import FAULT_KINDS, Hosts, deployed, run_chaos
from tests.e2e.hosts import Host
from tests.e2e.network import why_not
from tests.e2e.quiet import quiet
from tests.waiting import until

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it may")

SEED = 7110
"""The network is cut one way, and both ways, for 10 s: longer than the lease of a mover and an
entry of the registry. One host does not reach Redis for 3 s. A mover is killed when it has read the
stamps of a pull."""
DEADLINE_AND_LEASE_S = 30.0
"""PULL_TIMEOUT_S and LEASE_S by default."""


@pytest.mark.parametrize(
    ("seed", "duration_s", "num_cases"),
    [
        pytest.param(SEED, None, 8, id="each kind once"),
        *(pytest.param(s, 120.0, None, marks=pytest.mark.full, id=f"seed{s}") for s in range(1, 4)),
    ],
)
async def test_clients_of_two_hosts_notice_no_fault(
    tmp_path: Path, seed: int, duration_s: float | None, num_cases: int | None
) -> None:
    report = await run_chaos(tmp_path, seed, duration_s, num_cases=num_cases)
    assert not report.tally.violations, str(report)
    assert report.tally.num_finished > 5, str(report)
    if duration_s is None:
        assert report.kinds == Counter(FAULT_KINDS), str(report)
    else:
        assert report.kinds.total() >= 3, str(report)
    print(report)


@pytest.mark.full
async def test_requests_are_computed_again_after_a_cut(tmp_path: Path) -> None:
    """The network stays cut. The requests that were being copied across it decode on their own
    host, within the deadline of a pull and a lease."""
    fill = Sampling(temperature=0.0, max_tokens=2000, ignore_eos=True)
    short = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = [f"Request {number} of this test: " * 20 for number in range(4)]
    async with (
        deployed(tmp_path) as (hosts, system),
        AsyncClient(hosts.sockets.split(",")[0]) as client,
    ):
        wanted = [await client.complete(p, short, timeout_s=60) for p in prompts]
        filling = [
            asyncio.create_task(client.complete(f"Fill {n}", fill, timeout_s=120)) for n in range(6)
        ]
        await until(lambda: num_free_slots(client, hosts.pools["a2"]), lambda number: not number)
        system.network.bytes_per_s, before = 200_000, num_reading(hosts)
        asked = [asyncio.create_task(client.complete(p, short, timeout_s=90)) for p in prompts]
        await until(lambda: num_reading(hosts) != before, longest_pause_s=0.005)
        system.network.blocked = {("a", "b"), ("b", "a")}
        began = time.monotonic()
        for task in filling:
            task.cancel()
        found = await asyncio.gather(*asked)
        took_s = time.monotonic() - began
        for one, other in zip(found, wanted, strict=True):
            assert one.token_ids == other.token_ids
        assert took_s < DEADLINE_AND_LEASE_S
        print(f"computed again {took_s:.1f} s after the cut")
        system.network.heal()
        await quiet(client)


def num_reading(hosts: Hosts) -> int:
    """Pulls of host b that have begun to read blocks so far."""
    logs = (hosts.pools[name].events("mover", "pull_step") for name in ("b1", "b2"))
    return sum(event["step"] == "stamps_read" for events in logs for event in events)


async def num_free_slots(client: AsyncClient, host: Host) -> int:
    return sum(
        worker.num_free_slots
        for worker in await client.workers()
        if any((host.pool_root).glob(f"*/workers/{worker.worker_id}.lock"))
    )
