"""Generates names of pools. No name is used twice."""

import re
import secrets

_MAX_SLUG = 48

REMOTE_ROLE = "remote"
"""The role in the names of members on other hosts, which have a lease instead of a lock file."""


def new_pool_id(model: str) -> str:
    """`<model-slug>-<8 hex>`: the id of a new incarnation of a pool of `model`, safe as a directory
    name and as a hash tag of Redis."""
    slug = re.sub(r"[^a-z0-9._]+", "-", model.lower()).strip("-._")[:_MAX_SLUG]
    return f"{slug or 'model'}-{secrets.token_hex(4)}"
