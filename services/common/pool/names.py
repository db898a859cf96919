"""Names of pools and workers: each is drawn once and never used again."""

import re
import secrets

_MAX_SLUG = 48


def new_pool_id(model: str) -> str:
    """`<model-slug>-<8 hex>`: a new incarnation of a pool of `model`; safe as a directory and as a
    hash tag."""
    slug = re.sub(r"[^a-z0-9._]+", "-", model.lower()).strip("-._")[:_MAX_SLUG]
    return f"{slug or 'model'}-{secrets.token_hex(4)}"


def new_worker_id(role: str) -> str:
    """`<role>-<8 hex>`: one incarnation of a worker."""
    return f"{role}-{secrets.token_hex(4)}"
