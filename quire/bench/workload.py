"""The requests of a run, and their times: random, conversations, shared prefixes."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.bench.options import WorkloadOptions
from quire.bench.prompts import Prompts, joined


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session. `prompt` is drawn when it is needed."""

    prompt: Callable[[], "str | list[int]"]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that are sent in turn, each after the answer to the one before."""

    turns: Sequence[Turn]
    due: float = 0.0
    """When the first request is sent, in seconds; a closed loop has no such time."""


def synthetic(prompts: Prompts, shape: WorkloadOptions) -> Iterator[Session]:
    """Yield sessions without end."""
    prefixes = [prompts.draw(shape.prefix_len) for _ in range(shape.num_prefixes)]
    for prefix in itertools.cycle(prefixes):
        # Only the first turn has the prefix: the later ones repeat the conversation.
        heads = [prefix, *(prompts.draw(0) for _ in range(shape.turns - 1))]
        yield Session([_turn(prompts, shape, head) for head in heads])


def _turn(prompts: Prompts, shape: WorkloadOptions, head: "str | list[int]") -> Turn:
    length, num_tokens = (
        prompts.between(max(1, math.ceil(n * (1 - shape.spread))), int(n * (1 + shape.spread)))
        for n in (shape.prompt_len, shape.output_len)
    )
    prompt = joined([head, prompts.draw(length)])
    return Turn(lambda: prompt, num_tokens)


def poisson(rate: float, ramp_s: float, seed: int) -> Iterator[float]:
    """Yield random times of arrivals, `rate` a second; over the first `ramp_s` seconds the rate
    rises from 0 in a straight line.

    Arrivals of rate 1 are mapped by the inverse of the expected number until a time.
    """
    draw = random.Random(seed)
    num_in_ramp = rate * ramp_s / 2
    for number in itertools.accumulate(iter(lambda: draw.expovariate(1.0), None)):
        if number < num_in_ramp:
            yield math.sqrt(2 * number * ramp_s / rate)
        else:
            yield ramp_s + (number - num_in_ramp) / rate
