"""What a request used, and what became of the prefixes that it wants to retain."""

from dataclasses import dataclass
from typing import Literal

from quire.types import Usage


@dataclass(frozen=True, slots=True)
class RetainAnswer:
    """The answer to one `RetainDirective`."""

    name: str
    status: Literal["accepted", "clipped", "rejected"]
    num_asked_tokens: int
    """The tokens of the prefix that the directive names."""
    num_tokens: int
    """The tokens that are retained: the prefix's full blocks, as far as there is room."""
    ttl_s: int
    reason: str = ""
    """Why the prefix is not retained, or not all of it."""


@dataclass(frozen=True, slots=True)
class RequestUsage(Usage):
    """A request's usage with what only HTTP clients can ask for."""

    num_written_tokens: int | None = None
    """The prompt tokens that were computed into blocks of the prefix cache; None where
    `num_cached_tokens` is None."""
    retained: tuple[RetainAnswer, ...] = ()


@dataclass(frozen=True, slots=True)
class RetainedPrefix:
    """A retention, as its owner sees it."""

    name: str
    tenant: str
    model: str
    pool_id: str
    num_tokens: int
    num_cached_tokens: int | None
    """The tokens that the cache has now; None if the caller may not know."""
    left_s: float
