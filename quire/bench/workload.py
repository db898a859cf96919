"""The requests of a run, and their times: random, conversations, shared prefixes, traces."""

import array
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from quire.bench.options import WorkloadOptions
from quire.bench.prompts import Prompts, joined

TRACE_BLOCK = 512
"""The number of tokens that one hash id of Mooncake's traces stands for."""


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


def trace(
    lines: Sequence[str], speed: float, scale: float, draw_block: "Callable[[int, int], Block]"
) -> list[Session]:
    """The requests of a trace in Mooncake's format: a JSON object a line with `timestamp` (ms),
    `input_length`, `output_length` and `hash_ids`, one for each 512 tokens of the prompt. Prompts
    share the blocks of equal hash ids.

    A `speed` of 2 replays twice as fast. A `scale` of 0.1 makes prompts, blocks and answers a tenth
    as long. Raises ValueError if a line is not of this format.
    """
    block = max(1, round(TRACE_BLOCK * scale))
    sessions = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            sessions.append(_recorded(json.loads(line), speed, scale, block, draw_block))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} is no request of a trace: {error!r}") from error
    return sorted(sessions, key=lambda session: session.due)


Block = str | list[int]


def _recorded(
    entry: dict[str, object],
    speed: float,
    scale: float,
    block: int,
    draw_block: Callable[[int, int], Block],
) -> Session:
    timestamp, length, num_tokens, hashes = (
        entry[name] for name in ("timestamp", "input_length", "output_length", "hash_ids")
    )
    if not (isinstance(hashes, list) and all(isinstance(each, int) for each in hashes)):
        raise ValueError("hash_ids is no list of integers")
    wanted = max(1, round(int(str(length)) * scale))
    if not hashes or wanted > (len(hashes) + 1) * block:
        raise ValueError(f"{len(hashes)} hash ids for {length} tokens, {TRACE_BLOCK} each")
    sizes = [block] * (len(hashes) - 1)
    sizes.append(wanted - sum(sizes))

    def prompt() -> Block:
        return joined([draw_block(h, n) for h, n in zip(hashes, sizes, strict=True) if n > 0])

    turn = Turn(prompt, max(1, round(int(str(num_tokens)) * scale)))
    return Session([turn], float(str(timestamp)) / 1000 / speed)


def block_drawer(words: Sequence[str] | None, vocab_size: int, seed: int) -> Callable[..., Block]:
    """Returns a function of (hash id, length) that draws a block's tokens: the same ones for the
    same id, of which a shorter block has the first."""

    @lru_cache(maxsize=8192)
    def whole(hash_id: int, length: int) -> Block:
        # One call of the generator for all tokens: a request of a trace may have 100,000.
        numbers = array.array("I", random.Random(f"{seed}/{hash_id}").randbytes(4 * length))
        if words is None:
            first = 300
            return [first + number % (vocab_size - first) for number in numbers]
        return "".join([words[number % len(words)] for number in numbers])

    return whole


def read_trace(path: Path, num_requests: int | None) -> list[str]:
    with path.open() as lines:
        return list(itertools.islice(lines, num_requests))
