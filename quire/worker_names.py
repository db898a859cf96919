"""The names of workers.

`quire serve` numbers its workers: decode-1, decode-2 ... Such a worker's id is its name and eight
hex digits, because a worker that starts again is another one to the block store: its id is new, and
its name stays. People read and write the name. A worker without a number has only its id.
"""

import re
import secrets

_NUMBERED = re.compile(r"([a-z]+-\d+)-[0-9a-f]{8}")


def new_worker_id(role: str, number: int | None = None) -> str:
    """Return the id of one incarnation of a member, with the number that a worker has in its
    run."""
    name = role if number is None else f"{role}-{number}"
    return f"{name}-{secrets.token_hex(4)}"


def role_of(worker_id: str) -> str:
    return worker_id.partition("-")[0]


def worker_name(worker_id: str) -> str:
    """Return the name for people: decode-1 for decode-1-3fa85f64."""
    found = _NUMBERED.fullmatch(worker_id)
    return found[1] if found else worker_id
