"""Logprobs: log-softmax of the model's raw logits, before temperature, penalties and filters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_LOGPROBS = 20
"""The most alternatives that a request can ask for beside each token."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The logprobs of the token at one position and of the likeliest tokens there, which are in
    falling order; of equal ones the lowest id comes first."""

    logprob: float
    rank: int
    """1 + the number of tokens with a larger logit."""
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    @property
    def num_entries(self) -> int:
        return 1 + len(self.top_token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class LogprobColumns:
    """The logprobs of N successive positions, with k of the likeliest tokens each, as arrays: a
    prompt has thousands of positions, which travel from the engine to the answer without an object
    for each."""

    logprobs: NDArray[np.float32]
    """The logprob of the token at each position, [N]."""
    ranks: NDArray[np.uint32]
    """The rank of the token at each position, [N]."""
    top_token_ids: NDArray[np.uint32]
    """The likeliest tokens of each position, [N, k]."""
    top_logprobs: NDArray[np.float32]
    """The logprobs of the likeliest tokens, [N, k]."""

    @classmethod
    def of(cls, rows: Sequence[Logprobs]) -> "LogprobColumns":
        return cls(
            np.array([row.logprob for row in rows], np.float32),
            np.array([row.rank for row in rows], np.uint32),
            np.array([row.top_token_ids for row in rows], np.uint32),
            np.array([row.top_logprobs for row in rows], np.float32),
        )

    @classmethod
    def joined(cls, parts: "Sequence[LogprobColumns]") -> "LogprobColumns":
        """The columns of successive parts, of which there is at least one."""
        names = cls.__dataclass_fields__
        return cls(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        )

    def rows(self) -> Iterator[Logprobs]:
        tops = zip(self.top_token_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        chosen = zip(self.logprobs.tolist(), self.ranks.tolist(), tops, strict=True)
        for logprob, rank, (token_ids, logprobs) in chosen:
            yield Logprobs(logprob, rank, tuple(token_ids), tuple(logprobs))

    def __len__(self) -> int:
        return len(self.logprobs)

    def __eq__(self, other: object) -> bool:
        names = self.__dataclass_fields__
        return isinstance(other, LogprobColumns) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in names
        )

    __hash__ = None  # type: ignore[assignment]
