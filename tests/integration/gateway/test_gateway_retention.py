"""The gateway retains prefixes of requests, and by name."""

from dataclasses import replace
from typing import Any

import grpc
import pytest

from blockstore.errors import Recovering, StoreUnavailable
from blockstore.hashing import prefix_hashes
from blockstore.memory_store import MemoryStore
from quire import messages, types
from quire.messages import Request
from quire.types import Retain, RetainAnswer, Sampling, Usage
from quire.v1.worker_pb2 import Requeue
from services.gateway.access.caller import EVERYONE, LOCAL_OPERATOR, Caller
from services.gateway.api import ChatMessage, RetainDirective
from services.runtime.errors import InvalidRequest
from tests.waiting import until

from .conftest import PROMPT, SPEC, Call, GatewayHarness, asked
from .fakes import FakeDecode, FakePrefill

LONG = tuple(range(1, 101))  # 6 blocks of 16 tokens, and 4 tokens
HOUR = RetainDirective(3600, "p")
ACME = Caller(key="alice", tenant="acme", retained_blocks=4)
OTHER = Caller(key="bob", tenant="other")
PREEMPTED = Requeue.REASON_PREEMPTED


async def usage_of(harness: GatewayHarness, **fields: Any) -> Usage:
    fields = {"prompt": LONG, "retain": (HOUR,), "request_id": ""} | fields
    last = await Call(harness.gateway, asked(**fields)).result()
    assert last.usage is not None
    return last.usage


async def held(harness: GatewayHarness) -> list[tuple[str, str, int]]:
    found = await harness.store.retentions("pool")
    return [(each.owner, each.name, each.num_blocks) for each in found]


async def test_a_request_retains_the_full_blocks_of_its_prompt(harness: GatewayHarness) -> None:
    usage = await usage_of(harness)
    assert usage.retained == (RetainAnswer("p", "accepted", 100, 96, 3600),)
    (retention,) = await harness.store.retentions("pool")
    assert (retention.owner, retention.name, retention.num_blocks) == ("~", "p", 6)
    assert 3_590_000 < retention.left_ms <= 3_600_000


async def test_the_retained_blocks_are_those_that_the_worker_commits(harness: Any) -> None:
    """The hashes have the root of the ticket."""
    prefill, _ = harness.workers
    await usage_of(harness, cache_salt="s")
    (ticket,) = prefill.submitted
    assert set(harness.store.ledger("pool").blocks.retained) == set(
        prefix_hashes(ticket.root_hash, LONG, SPEC.block_size)
    )


async def test_a_tenant_is_clipped_to_its_budget(harness: GatewayHarness) -> None:
    """Other tenants retain what the pool's share leaves: 64 of 256 blocks."""
    (clipped,) = (await usage_of(harness, caller=ACME)).retained
    assert (clipped.status, clipped.num_tokens) == ("clipped", 64)
    assert clipped.reason == (
        "the prefix has 6 blocks; this client retains 4 of at most 4, all clients 4 of at most 64"
    )
    (rejected,) = (
        await usage_of(harness, caller=ACME, prompt=(9,) * 32, retain=(RetainDirective(60, "q"),))
    ).retained
    assert (rejected.status, rejected.num_tokens) == ("rejected", 0)
    (accepted,) = (await usage_of(harness, caller=OTHER)).retained
    assert (accepted.status, accepted.num_tokens) == ("accepted", 96)
    assert await held(harness) == [("acme", "p", 4), ("other", "p", 6)]


async def test_nothing_is_retained_without_a_share(make_harness: Any) -> None:
    harness = await make_harness(FakePrefill(), FakeDecode(), retained_share=0)
    (rejected,) = (await usage_of(harness)).retained
    assert (rejected.status, "at most 0" in rejected.reason) == ("rejected", True)


async def test_a_prefix_without_a_full_block_is_rejected(harness: GatewayHarness) -> None:
    (rejected,) = (await usage_of(harness, prompt=PROMPT)).retained
    assert rejected.reason == "the prefix has 15 tokens, less than a block of 16"


async def test_a_chat_is_retained_up_to_its_breakpoints(harness: GatewayHarness) -> None:
    """The prefix ends where the shorter chat differs, and is named after its hashes."""
    system, user = ChatMessage("system", "s" * 40), ChatMessage("user", "u" * 40)
    breaks = (
        RetainDirective(300, until=(system,)),
        RetainDirective(3600, until=(system, replace(user, content="u" * 20))),
    )
    usage = await usage_of(harness, prompt=(system, user), retain=breaks)
    assert [each.num_asked_tokens for each in usage.retained] == [48, 48 + 5 + 20]
    assert [each.num_tokens for each in usage.retained] == [48, 64]
    names = [each.name for each in usage.retained]
    assert len({name for name in names if name.startswith("auto-")}) == 2
    again = await usage_of(harness, prompt=(system, user), retain=breaks)
    assert again.retained == usage.retained
    assert len(await held(harness)) == 2


@pytest.mark.parametrize(
    "retain", [(HOUR,) * 5, (RetainDirective(0),), (RetainDirective(60, "n" * 129),)]
)
async def test_wrong_directives_are_refused(
    harness: GatewayHarness, retain: tuple[RetainDirective, ...]
) -> None:
    with pytest.raises(InvalidRequest):
        await usage_of(harness, retain=retain)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StoreUnavailable("away"), "the block store does not answer; ask again later"),
        (
            Recovering("later"),
            "the block store has lost its data, and gets it back; ask again later",
        ),
    ],
)
async def test_a_request_is_served_although_the_store_refuses(
    make_harness: Any, error: Exception, reason: str
) -> None:
    """A request does not wait for a recovery of the ledger only to retain something."""

    class Refusing(MemoryStore):
        async def retain(self, *_: Any) -> Any:
            raise error

    harness = await make_harness(FakePrefill(), FakeDecode(), store=Refusing())
    (rejected,) = (await usage_of(harness)).retained
    assert rejected.status == "rejected"
    assert rejected.reason == reason


async def test_a_prefix_is_marked_without_computing_it(harness: GatewayHarness) -> None:
    answer = await harness.gateway.retain(asked(prompt=LONG, retain=(HOUR,)))
    assert answer == RetainAnswer("p", "accepted", 100, 96, 3600)
    assert await held(harness) == [("~", "p", 6)]
    assert harness.assembly.dispatcher.num_running == 0


async def test_tenants_list_and_drop_their_own_prefixes(harness: GatewayHarness) -> None:
    """An operator sees and drops all."""
    gateway = harness.gateway
    for caller in (ACME, OTHER, EVERYONE):
        await gateway.retain(asked(prompt=LONG, retain=(HOUR,), caller=caller))
    (own,) = await gateway.retained(ACME)
    assert (own.name, own.tenant, own.model, own.pool_id) == ("p", "acme", "toy", "pool")
    assert (own.num_tokens, own.num_cached_tokens) == (64, 0)
    assert [one.tenant for one in await gateway.retained(LOCAL_OPERATOR)] == ["acme", "other", ""]
    assert not await gateway.drop_retained("q", ACME)
    assert await gateway.drop_retained("p", ACME, "other")  # a tenant names only its own
    assert await gateway.drop_retained("p", LOCAL_OPERATOR, "other")
    assert await held(harness) == [("~", "p", 6)]


async def test_usage_counts_what_is_read_and_written_once_for_all_answers(
    harness: Any,
) -> None:
    """6 full blocks, of which 2 were cached; a prompt that is cached as a whole writes nothing."""
    prefill, _ = harness.workers
    prefill.num_cached = 32
    for n in (1, 3):
        usage = await usage_of(harness, sampling={"n": n})
        assert (usage.num_cached_tokens, usage.num_written_tokens) == (32, 64)
        assert len(usage.retained) == 1
    prefill.num_cached = 95
    usage = await usage_of(harness, prompt=LONG[:96])
    assert (usage.num_cached_tokens, usage.num_written_tokens) == (95, 0)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("event", ["prefill dies", "decode dies", "preempted"])
async def test_usage_is_that_of_the_first_prefill(harness: Any, event: str, n: int) -> None:
    """The next one finds what this request has computed itself. The request retains once."""
    prefill, decode = harness.workers
    prefill.num_cached, prefill.holds, decode.pause_after = 32, event == "prefill dies", 2
    call = Call(harness.gateway, asked(prompt=LONG, retain=(HOUR,), sampling={"n": n}))
    await until(lambda: bool(prefill.held or decode.running))
    await harness.store.end_retention("pool", "~", "p")
    prefill.held.clear()
    prefill.holds, prefill.num_cached = False, 96
    if event == "preempted":
        decode.requeue("r1", PREEMPTED)
    else:
        (prefill if event == "prefill dies" else decode).die()
    decode.go_on(pause_after=8)
    last = await call.result()
    assert last.usage is not None
    assert len(prefill.submitted) == 2
    assert (last.usage.num_cached_tokens, last.usage.num_written_tokens) == (32, 64)
    assert [each.status for each in last.usage.retained] == ["accepted"]
    assert await held(harness) == []


async def test_a_grpc_client_retains_prefixes_and_reads_the_answers(
    harness: GatewayHarness,
) -> None:
    stub = await harness.serve()
    chat = (types.ChatMessage("system", "s" * 40), types.ChatMessage("user", "u" * 40))

    async def usage(*retain: Retain, prompt: types.Prompt = chat) -> Usage:
        request = messages.generate_request(Request(prompt, Sampling(max_tokens=1), retain=retain))
        responses = [each async for each in stub.Generate(request)]
        return messages.usage_of([*messages.deltas(responses[-1])][-1])

    whole, head = (await usage(Retain(60, "p"), Retain(300, num_messages=1))).retained
    assert whole == RetainAnswer("p", "accepted", 94, 80, 60)
    assert (head.status, head.num_asked_tokens, head.ttl_s) == ("accepted", 48, 300)
    assert sorted(blocks for *_, blocks in await held(harness)) == [3, 5]
    (short,) = (await usage(Retain(60), prompt=[1, 2, 3])).retained
    assert (short.status, short.num_tokens) == ("rejected", 0)
    assert "less than a block of 16" in short.reason
    assert not (await usage()).retained
    for wrong, prompt in ((Retain(60, num_messages=3), chat), (Retain(60, num_messages=1), [1])):
        with pytest.raises(grpc.RpcError, match="num_messages"):
            await usage(wrong, prompt=prompt)
