"""The sampling parameters that clients, gateway and workers share, each declared once. See "A new
sampling parameter" in docs/development.md."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar, get_type_hints


@dataclass(frozen=True, slots=True)
class Number:
    """A sampling parameter that is a number."""

    neutral: float
    """The value that changes nothing; an int if the parameter is a whole number."""
    accepts: Callable[[float], bool]
    """Whether a value is allowed; no parameter allows NaN."""
    bounds: str
    """The allowed values in words, for the end of an error message after "not"."""
    remark: str | None = None
    """A remark for the help of commands."""


_ANY_K = Number(0, lambda k: -1 <= k < 1 << 31, "-1, 0 (all) or a number of tokens", "0 keeps all")
_ADDED = Number(0.0, lambda value: -2 <= value <= 2, "in [-2, 2]", "0 is none")
_COUNT = Number(0, lambda count: count >= 0, "0 or more", "go on for N tokens at least")
_HEAT = Number(1.0, lambda value: 0 <= value < math.inf, "0 or more", "0 is greedy")
_FACTOR = Number(1.0, lambda value: 0 < value < math.inf, "above 0", "1 is none")
_ABSENT: Any = None
EarlyStopping = bool | Literal["never"]
Real = TypeVar("Real", bound=float | None)
Whole = TypeVar("Whole", bound=int | None)


@dataclass(frozen=True, slots=True)
class SamplingNumbers(Generic[Real, Whole]):
    """The numbers as a client asks for them (`quire.types.Sampling`), where None takes the value of
    the model's generation_config or else the neutral one, and as workers apply them."""

    temperature: Annotated[Real, _HEAT] = _ABSENT
    top_k: Annotated[Whole, _ANY_K] = _ABSENT
    top_p: Annotated[Real, Number(1.0, lambda p: 0 < p <= 1, "in (0, 1]")] = _ABSENT
    min_p: Annotated[Real, Number(0.0, lambda p: 0 <= p <= 1, "in [0, 1]")] = _ABSENT
    _: KW_ONLY
    repetition_penalty: Annotated[Real, _FACTOR] = _ABSENT
    presence_penalty: Annotated[Real, _ADDED] = _ABSENT
    frequency_penalty: Annotated[Real, _ADDED] = _ABSENT
    min_tokens: Annotated[Whole, _COUNT] = _ABSENT
    """The number of tokens before which nothing ends the generation."""


_HINTS = get_type_hints(SamplingNumbers, include_extras=True)
NUMBERS: dict[str, Number] = {name: _HINTS[name].__metadata__[0] for name in _HINTS if name != "_"}


@dataclass(frozen=True, slots=True)
class Beam:
    """Beam search with `width` beams (1 to 16). It gives the results of transformers' `generate`
    with the same `num_beams`, `length_penalty` and `early_stopping`."""

    width: int
    length_penalty: float | None = None
    """The power of the length by which a sum of logprobs is divided; None means 1."""
    early_stopping: EarlyStopping = False
    """Whether `width` results end the search; "never": once no beam can become one of them."""
