"""API keys, their accounts and their limits."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from quire.api_keys import ApiKey, hash_key
from quire.types import Beam, Sampling
from quire.v1.block_manager_pb2 import DrainWorkerRequest, ListWorkersRequest
from quire.v1.supervisor_pb2 import ScaleRequest, UpgradeRequest
from services.gateway.access.account import Account
from services.gateway.access.audit import audited
from services.gateway.access.caller import (
    EVERYONE,
    Caller,
    bind_caller,
    current_caller,
    require_operator,
)
from services.gateway.access.client_address import client_address
from services.gateway.access.guards import KeyGuard
from services.gateway.api import GenerationRequest
from services.gateway.chat.admission import check_priority
from services.gateway.identity import scoped_id
from services.runtime.errors import (
    InvalidApiKey,
    InvalidRequest,
    PermissionDenied,
    RateLimited,
    StartupError,
    Unauthenticated,
)
from tests.api_keys import ALICE, BOB, OPERATOR, entry, keyring, keyring_of, text_of
from tests.clock import Clock

HASH = hash_key(ALICE)


def account(**limits: Any) -> tuple[Account, Clock]:
    clock = Clock()
    return Account(ApiKey(name="alice", hash=HASH, **limits), clock), clock


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", f"Basic {ALICE}", f"Bearer {ALICE}x", f"Bearer {HASH}", ALICE],
)
def test_a_key_is_found_only_whole_and_as_a_bearer(header: str | None) -> None:
    ring = keyring()
    assert ring.account(f"Bearer {ALICE}").caller.tenant == "acme"
    assert ring.account(f"bearer  {OPERATOR} ").caller.is_operator
    with pytest.raises(InvalidApiKey):
        ring.account(header)


def test_a_changed_file_replaces_the_keys_and_a_broken_one_does_not(tmp_path: Path) -> None:
    path, metrics = tmp_path / "keys.json", CollectorRegistry()
    path.write_text(text_of(max_concurrency=3))
    ring = keyring_of(path, metrics)
    alice = ring.account(f"Bearer {ALICE}")
    for broken in ("{", '{"keys": [{"name": "x"}]}', text_of() + "x"):
        path.write_text(broken)
        ring.reload_if_changed()
        assert ring.account(f"Bearer {BOB}")
    path.unlink()
    ring.reload_if_changed()
    assert ring.account(f"Bearer {BOB}")
    path.write_text(json.dumps({"keys": [entry("alice", ALICE, max_concurrency=5)]}))
    ring.reload_if_changed()
    assert ring.account(f"Bearer {ALICE}") is alice
    assert (alice.key.max_concurrency, alice.caller.tenant) == (5, "alice")
    with pytest.raises(InvalidApiKey):
        ring.account(f"Bearer {BOB}")
    value = metrics.get_sample_value
    assert value("quire:api_key_reloads_total", {"outcome": "refused"}) == 4
    assert value("quire:api_key_reloads_total", {"outcome": "ok"}) == 1
    assert value("quire:api_keys") == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "Invalid JSON"),
        (json.dumps({"keys": [entry("a b", ALICE)]}), r"keys\[0\].name"),
        (json.dumps({"keys": [entry("a", ALICE, max_concurency=1)]}), "max_concurency"),
        (json.dumps({"keys": [entry("a", ALICE, tokens_per_minute=0)]}), "tokens_per_minute"),
        (json.dumps({"keys": [{"name": "a", "hash": ALICE}]}), r"keys\[0\].hash"),
        (json.dumps({"keys": [entry("a", ALICE), entry("a", BOB)]}), "two keys are named a"),
        (json.dumps({"keys": [entry("a", ALICE), entry("b", ALICE)]}), "the same hash"),
    ],
)
def test_a_file_that_cannot_be_used_names_its_mistake(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(StartupError, match="No such file"):
        keyring_of(path, CollectorRegistry())
    path.write_text(text)
    with pytest.raises(StartupError, match=problem) as error:
        keyring_of(path, CollectorRegistry())
    assert ALICE not in str(error.value)


def test_a_request_of_many_sequences_counts_as_many() -> None:
    one, _ = account(max_concurrency=5)
    with one.admitted(Sampling(n=4)):
        with pytest.raises(RateLimited, match=r"has 4 sequences .* may have 5; .* needs 2"):
            one.admitted(Sampling(n=2)).__enter__()
        with one.admitted():
            assert one.num_sequences == 5
    assert one.num_sequences == 0
    with one.admitted(Sampling(n=-5)):  # while it waits for its refusal, it makes no room
        assert one.num_sequences == 1


def test_requests_a_minute_refill_and_do_not_count_refused_ones() -> None:
    one, clock = account(requests_per_minute=6, max_concurrency=10)
    for _ in range(6):
        with one.admitted():
            pass
    for _ in range(3):
        with pytest.raises(RateLimited) as error:
            one.admitted().__enter__()
        assert error.value.retry_delay_s == 10
    clock.now_s += 10
    with one.admitted():
        pass


def test_tokens_that_were_overdrawn_are_paid_back() -> None:
    one, clock = account(tokens_per_minute=60)
    with one.admitted():
        one.charge(90)
    with pytest.raises(RateLimited) as error:
        one.admitted().__enter__()
    assert error.value.retry_delay_s == 31  # to one token from 30 below none
    clock.now_s += 31
    with one.admitted():
        pass


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (Sampling(n=3), "n is 3; key alice may ask for at most 2"),
        (Sampling(beam=Beam(3)), "beam_width is 3;"),
    ],
)
@pytest.mark.parametrize("limit", ["max_sequences", "max_concurrency"])
def test_too_many_sequences_are_refused_with_the_numbers(
    asked: Sampling, text: str, limit: str
) -> None:
    """They are too many for ever, so the client must not try again."""
    one, _ = account(**{limit: 2})
    with one.admitted(Sampling(n=2)):
        assert one.num_sequences == 2
    with pytest.raises(InvalidRequest, match=text):
        one.admitted(asked).__enter__()
    assert one.num_sequences == 0


def test_a_key_has_a_priority_ceiling_instead_of_the_gateways_setting() -> None:
    for priority, ceiling in ((0, 0), (5, 0), (-2, -2)):
        check_priority(priority, client_priority=False, ceiling=ceiling)
    with pytest.raises(InvalidRequest, match="priority is -3; this API key may ask for -2"):
        check_priority(-3, client_priority=True, ceiling=-2)


def test_ids_and_salts_are_scoped() -> None:
    ids = {scoped_id("r", "token", key) for key in ("", "alice", "bob")}
    assert len(ids) == 3
    acme, other = Caller(tenant="acme"), Caller(tenant="acm")
    assert len({EVERYONE.salt("x"), acme.salt("x"), other.salt("e/x"), acme.salt("")}) == 4


async def test_without_a_bound_caller_nobody_is_an_operator() -> None:
    """A coroutine: the callers that it binds are bound in no other test."""
    with pytest.raises(Unauthenticated):
        require_operator()
    bind_caller(Caller(key="alice"))
    with pytest.raises(PermissionDenied, match="alice"):
        require_operator()
    bind_caller(EVERYONE)
    with pytest.raises(PermissionDenied, match="no keys"):
        require_operator()
    bind_caller(Caller(key="root", is_operator=True))
    require_operator()


@pytest.mark.parametrize(
    ("forwarded_for", "host"),
    [
        ((), ""),
        (("192.0.2.7",), "192.0.2.7"),
        (("198.51.100.1, 192.0.2.7",), "192.0.2.7"),
        (("198.51.100.1", "192.0.2.7"), "192.0.2.7"),
        (("192.0.2.7, 127.0.0.1", "::1"), "192.0.2.7"),
        (("192.0.2.7:4000",), "192.0.2.7"),
        (("2001:db8::7",), "2001:db8::7"),
        (("[2001:db8::7]:4000",), "2001:db8::7"),
        (("127.0.0.1",), ""),
        ((" , ",), ""),
    ],
)
def test_a_proxy_on_this_host_names_the_client(forwarded_for: tuple[str, ...], host: str) -> None:
    """Another host's word counts for nothing. `host`: empty for the proxy's own."""
    for peer in ("127.0.0.1", "127.8.0.1", "::1"):
        client = (host, 0) if host else (peer, 4000)
        assert client_address((peer, 4000), forwarded_for) == client
    for peer in ("192.0.2.1", "2001:db8::1", ""):
        assert client_address((peer, 4000), forwarded_for) == (peer, 4000)


def test_an_ipv4_client_of_a_socket_for_both_families_has_its_ipv4_address() -> None:
    assert client_address(("::ffff:192.0.2.1", 4000), ()) == ("192.0.2.1", 4000)
    proxied = client_address(("::ffff:127.0.0.1", 4000), ("192.0.2.7",))
    assert proxied == ("192.0.2.7", 0)


async def test_without_keys_a_grpc_client_is_its_address() -> None:
    proxied = (("x-forwarded-for", "198.51.100.1"), ("x-forwarded-for", "192.0.2.7"))
    for peer, metadata, client in (
        ("ipv4:192.0.2.1:4000", (), "192.0.2.1"),
        ("ipv4:192.0.2.1:4000", proxied, "192.0.2.1"),
        ("ipv6:%5B2001:db8::1%5D:4000", proxied, "2001:db8::1"),
        ("ipv4:127.0.0.1:4000", (), "127.0.0.1"),
        ("ipv4:127.0.0.1:4000", proxied, "192.0.2.7"),
        ("ipv6:%5B::1%5D:4000", proxied, "192.0.2.7"),
        ("unix:", (), "~local"),
    ):
        context = SimpleNamespace(
            peer=lambda peer=peer: peer, invocation_metadata=lambda found=metadata: found
        )
        await KeyGuard(None).admit("/quire.v1.Inference/Generate", context)  # type: ignore[arg-type]
        assert current_caller().client == client
        assert GenerationRequest("x").caller.client == client
    assert Caller(key="alice", tenant="acme").client == "acme"


@pytest.mark.parametrize(
    ("method", "request_", "level"),
    [
        ("Upgrade", UpgradeRequest(begin=True), "info"),
        ("Upgrade", UpgradeRequest(), "debug"),
        ("Scale", ScaleRequest(num_decode=0), "info"),
        ("Scale", ScaleRequest(), "debug"),
        ("ListWorkers", ListWorkersRequest(), "debug"),
        ("DrainWorker", DrainWorkerRequest(worker_id="w-1"), "info"),
    ],
)
def test_only_operations_that_change_something_are_logged_as_performed(
    method: str, request_: Message, level: str
) -> None:
    """`quire upgrade` and `quire scale --wait` ask several times a second how far it is."""
    with capture_logs() as lines, audited(method, request_):
        pass
    (line,) = lines
    assert (line["event"], line["log_level"]) == ("operation_performed", level)
