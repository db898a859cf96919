"""Checks the arguments of a ledger's operations, by the same rules as functions/10_keys.lua.

Every check raises InvalidArgument unless its docstring names another error.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from blockstore.errors import FingerprintMismatch, GeometryMismatch, InvalidArgument
from blockstore.records import PoolSpec, PrefixHash
from blockstore.store import MAX_BRANCHES


def _short(text: str) -> str:
    if not 0 < len(text.encode()) <= 1024:
        raise ValueError("no text of 1 to 1024 bytes")
    return text


def _without_braces(pool_id: str) -> str:
    if "{" in pool_id or "}" in pool_id:  # it is the hash tag of the pool's keys
        raise ValueError("a pool's id has no braces")
    return pool_id


def _distinct(blocks: tuple[tuple[int, bytes], ...]) -> tuple[tuple[int, bytes], ...]:
    if len(dict(blocks)) != len(blocks):
        raise ValueError("something is named twice")
    return blocks


def _chained(hashes: tuple[bytes, ...]) -> tuple[bytes, ...]:
    if len(set(hashes)) != len(hashes):
        raise ValueError("something is named twice")
    return hashes


def _growing(growth: tuple[str, int, int, int]) -> tuple[str, int, int, int]:
    if growth[2] > growth[3]:
        raise ValueError(f"{growth[0]} has more blocks than it shall have")
    return growth


_Text = Annotated[str, Field(strict=True), AfterValidator(_short)]
# Numbers in the server's functions are doubles, which are exact below 2**53.
_Number = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
_Hash = Annotated[bytes, Field(strict=True, min_length=16, max_length=16)]
_Growth = Annotated[
    tuple[_Text, _Number, _Number, _Number],
    BeforeValidator(attrgetter("holder_id", "epoch", "have", "total")),
    AfterValidator(_growing),
]
_Spec = Annotated[
    tuple[_Text, _Text, _Number, _Number, _Number, _Number],
    BeforeValidator(
        attrgetter(
            "model", "fingerprint", "num_blocks", "block_size", "block_bytes", "watermark_blocks"
        )
    ),
]
_RULES: dict[str, TypeAdapter[Any]] = {
    "pool_id": TypeAdapter(Annotated[_Text, AfterValidator(_without_braces)]),
    **dict.fromkeys(("holder_id", "worker_id", "owner", "name"), TypeAdapter(_Text)),
    **dict.fromkeys(("epoch", "order", "num_blocks", "lease_ms", "ttl_ms"), TypeAdapter(_Number)),
    "block_ids": TypeAdapter(tuple[_Number, ...]),
    "hashes": TypeAdapter(tuple[_Hash, ...]),
    "chain": TypeAdapter(Annotated[tuple[_Hash, ...], AfterValidator(_chained)]),
    "blocks": TypeAdapter(Annotated[tuple[tuple[_Number, _Hash], ...], AfterValidator(_distinct)]),
    "growths": TypeAdapter(tuple[_Growth, ...]),
    "spec": TypeAdapter(_Spec),
}


def check(**arguments: Any) -> None:
    """Check each argument by the rule that `_RULES` has for its name."""
    for name, value in arguments.items():
        try:
            _RULES[name].validate_python(value)
        except ValidationError as error:
            raise InvalidArgument(f"{name}: {error.errors()[0]['msg']}") from error


def check_prefix(
    hashes: Sequence[PrefixHash], branches: Sequence[Sequence[PrefixHash]], num_blocks: int
) -> None:
    """Check the hashes of an allocation of `num_blocks` blocks."""
    for each in (hashes, *branches):
        check(hashes=each)
    if len(set(hashes)) != len(hashes):
        raise InvalidArgument("something is named twice")
    if len(branches) > MAX_BRANCHES:
        raise InvalidArgument(f"{len(branches)} branches, more than {MAX_BRANCHES}")
    num_hashes = len(set(hashes).union(*branches))
    if num_hashes > num_blocks:
        raise InvalidArgument(f"{num_hashes} hashes for {num_blocks} blocks")


def check_same_pool(ours: PoolSpec, theirs: PoolSpec, worker_id: str) -> None:
    """Raises GeometryMismatch or FingerprintMismatch if a worker's spec is not the pool's."""
    for name in ("block_size", "num_blocks", "block_bytes"):
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            raise GeometryMismatch(f"{name} is {here} in the pool, {there} in {worker_id}")
    if theirs.fingerprint != ours.fingerprint:
        raise FingerprintMismatch(
            f"the pool is for {ours.fingerprint}, {worker_id} computes {theirs.fingerprint}"
        )
