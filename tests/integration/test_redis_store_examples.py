"""The worked examples of tests/unit/test_memory_store*.py on the server: the same calls, blocks and
errors, not only those that a random walk meets."""

import inspect
from collections.abc import Awaitable, Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from blockstore.redis_store import RedisStore
from blockstore.store import BlockStore
from tests.conftest import Valkey
from tests.unit import (
    test_memory_store,
    test_memory_store_fairness,
    test_memory_store_holders,
    test_memory_store_recovery,
    test_memory_store_retention,
    test_memory_store_shares,
    test_memory_store_workers,
)

Prepare = Callable[[BlockStore], Awaitable[BlockStore]]


async def nothing(store: BlockStore) -> BlockStore:
    return store


SUITES: list[tuple[ModuleType, dict[str, Prepare]]] = [
    (test_memory_store, {"store": test_memory_store.prepare}),
    (
        test_memory_store_fairness,
        {
            "store": test_memory_store_fairness.prepare,
            "full": test_memory_store_fairness.prepare_full,
            "empty": nothing,
        },
    ),
    (test_memory_store_holders, {"store": test_memory_store_holders.prepare}),
    (test_memory_store_recovery, {"store": test_memory_store_recovery.prepare}),
    (test_memory_store_retention, {"store": test_memory_store_retention.prepare}),
    (test_memory_store_shares, {"store": test_memory_store_shares.prepare}),
    (test_memory_store_workers, {"store": test_memory_store_workers.prepare, "empty": nothing}),
]
"""Modules, with the substitutes for their fixtures. An example that needs another fixture (a clock,
a ledger) is about the model alone."""


def examples() -> Iterator[Any]:
    for suite, fixtures in SUITES:
        for name, example in vars(suite).items():
            if name.startswith("test_") and inspect.iscoroutinefunction(example):
                asked = tuple(inspect.signature(example).parameters)
                if len(asked) == 1 and asked[0] in fixtures:
                    yield pytest.param(fixtures[asked[0]], example, id=name)


@pytest.mark.parametrize(("prepare", "example"), list(examples()))
async def test_the_server_does_as_the_model(
    valkey: Valkey, prepare: Prepare, example: Callable[[BlockStore], Awaitable[None]]
) -> None:
    store = await RedisStore.connect(valkey.url)
    try:
        await example(await prepare(store))
    finally:
        await store.close()


def test_there_are_examples() -> None:
    assert len(list(examples())) > 40
