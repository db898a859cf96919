"""API keys of two users of different tenants, and of an operator."""

import json
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from prometheus_client import CollectorRegistry

from quire.api_keys import hash_key
from services.gateway.access.keyring import Keyring
from services.runtime.metrics import KeyringMetrics

ALICE, BOB, OPERATOR = "qk-" + "a" * 40, "qk-" + "b" * 40, "qk-" + "o" * 40


def entry(name: str, key: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "hash": hash_key(key), **fields}


def text_of(**changes: Any) -> str:
    """The text of a key file; `changes`: limits of Alice's key."""
    keys = [
        entry("alice", ALICE, **{"tenant": "acme", **changes}),
        entry("bob", BOB, tenant="bobs"),
        entry("root", OPERATOR, role="operator"),
    ]
    return json.dumps({"keys": keys})


def keyring(**changes: Any) -> Keyring:
    with NamedTemporaryFile("w") as file:
        file.write(text_of(**changes))
        file.flush()
        return keyring_of(Path(file.name), CollectorRegistry())


def keyring_of(path: Path, registry: CollectorRegistry) -> Keyring:
    return Keyring(path, KeyringMetrics(registry))


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)
