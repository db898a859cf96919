"""Any requests to three workers, in any order and with any delays, end rightly."""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from quire.types import Beam
from services.engine.batch import Draw
from services.protocol.ticket import Ticket, TicketSequence
from services.worker.limits import Limits
from tests.examples import examples
from tests.late_device import DEVICES, Device
from tests.property.gateway import Request
from tests.property.late import LateEngine, VirtualLoop
from tests.property.pair import Pair
from tests.unit.workers.fakes import GREEDY, NUM_LIKELY, SAMPLED, expected, ticket
from tests.unit.workers.searches import right as found_by

MAX_MODEL_LEN = 24
TICKET_TTL_S = 0.5


@dataclass(frozen=True)
class Shape:
    """The sizes of the pool and the workers. The largest request just fits."""

    block_size: int
    num_spare_blocks: int
    max_num_seqs: int
    budget: int
    num_swap_blocks: int

    @property
    def num_blocks(self) -> int:
        return -(-MAX_MODEL_LEN // self.block_size) + self.num_spare_blocks

    @property
    def limits(self) -> Limits:
        return Limits(
            self.max_num_seqs,
            self.budget,
            MAX_MODEL_LEN,
            look_ahead=2,
            ticket_ttl_s=TICKET_TTL_S,
            swapped_ttl_s=2 * TICKET_TTL_S,
        )


@dataclass(frozen=True)
class Ask:
    """A request. `num_shared` tokens begin many prompts, `num_own` belong to this one.
    `num_sequences`: samples, or beams of a search; at most as many as slots and blocks allow.
    `stop_at`: the first sequence's token that ends it; 0: none."""

    gateway: int
    num_sequences: int
    searches: bool
    num_shared: int
    num_own: int
    max_tokens: int
    stop_at: int
    timeout_ms: int

    def do(self, pair: Pair) -> None:
        order = len(pair.requests) + 1
        own = range(1000 * order, 1000 * order + self.num_own)
        prompt = (*range(self.num_shared), *own) or (0,)
        gateway = pair.gateways[self.gateway]
        max_tokens = min(self.max_tokens, MAX_MODEL_LEN - len(prompt))
        num_sequences = min(self.num_sequences, _most_sequences(pair, len(prompt), max_tokens))
        asked = ticket(
            f"r{len(gateway.requests)}",  # the other gateway has one of the same id
            prompt,
            order=order,
            sampling=replace(SAMPLED, max_tokens=max_tokens, stop_token_ids=self._stop_ids(prompt)),
            sequences=tuple(TicketSequence(index) for index in range(num_sequences)),
            timeout_ms=self.timeout_ms,
        )
        gateway.begin(_as_search(asked) if self.searches else asked)

    def _stop_ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        return tuple(expected(prompt, self.stop_at, Draw(SAMPLED, 0))[-1:])


def _as_search(asked: Ticket) -> Ticket:
    """The search is as wide as the request has sequences. Many tokens end a beam, so that finished
    beams must be kept, too."""
    width = len(asked.sequences)
    sampling = replace(
        GREEDY,
        max_tokens=asked.sampling.max_tokens,
        stop_token_ids=tuple(range(0, NUM_LIKELY, 8)),
        n=1 + width // 2,
        beam=Beam(width),
    )
    return replace(asked, sampling=sampling, sequences=(TicketSequence(0),))


def _most_sequences(pair: Pair, num_prompt: int, max_tokens: int) -> int:
    """Sequences share the full blocks of their prompt."""
    spec, size = pair.prefill.spec, pair.prefill.spec.block_size
    num_shared = num_prompt // size
    num_own = -(-(num_prompt + max_tokens) // size) - num_shared
    num_blocks = spec.num_blocks - num_shared
    return min(pair.prefill.limits.max_num_seqs, num_blocks // num_own if num_own else 64)


@dataclass(frozen=True)
class Abort:
    gateway: int
    number: int

    def do(self, pair: Pair) -> None:
        pair.gateways[self.gateway].abort(f"r{self.number}")


@dataclass(frozen=True)
class AbortOne:
    gateway: int
    number: int
    index: int

    def do(self, pair: Pair) -> None:
        pair.gateways[self.gateway].abort_one(f"r{self.number}", self.index)


@dataclass(frozen=True)
class HandOver:
    gateway: int
    number: int

    def do(self, pair: Pair) -> None:
        pair.gateways[self.gateway].hand_over(self.number)


@dataclass(frozen=True)
class Reconnect:
    gateway: int

    def do(self, pair: Pair) -> None:
        pair.gateways[self.gateway].reconnect()


@dataclass(frozen=True)
class Demand:
    """A demand for more blocks than are free."""

    def do(self, pair: Pair) -> None:
        pair.store.ledger("pool")._demand_one()


@dataclass(frozen=True)
class Corrupt:
    """Change all published blocks and all blocks that no one holds. `swap_pool`: those of the swap
    pool."""

    swap_pool: bool

    def do(self, pair: Pair) -> None:
        arena = pair.swap_pool if self.swap_pool else pair.arena
        if arena is None:
            return
        blocks = pair.store.ledger("colder" if self.swap_pool else "pool").blocks
        arena.stamps.mark_owned(tuple(blocks.hash_of), "nobody")
        for block_id in blocks.cached:
            arena.wipe(block_id)


class Action(Protocol):
    def do(self, pair: Pair) -> None: ...


GATEWAYS = st.integers(0, 1)
SHAPES = st.builds(
    Shape,
    block_size=st.sampled_from([1, 4, 256]),
    num_spare_blocks=st.integers(0, 4),
    max_num_seqs=st.integers(1, 4),
    budget=st.sampled_from([4, 16]),
    num_swap_blocks=st.sampled_from([0, 2, 100]),
)
ASKS = st.builds(
    Ask,
    gateway=GATEWAYS,
    num_sequences=st.sampled_from([1, 1, 2, 4]),
    searches=st.sampled_from([False, False, True]),
    num_shared=st.sampled_from([0, 4, 8, 12]),
    num_own=st.integers(0, 11),
    max_tokens=st.sampled_from([1, 2, 6, 12, 24]),
    stop_at=st.sampled_from([0, 0, 1, 3, 5, 9]),
    timeout_ms=st.sampled_from([0, 0, 0, 0, 30, 60, 90, 120, 300]),
)
NUMBERS = st.integers(0, 7)
ABORTS = st.builds(Abort, GATEWAYS, NUMBERS) | st.builds(AbortOne, GATEWAYS, NUMBERS, NUMBERS)
HAND_OVERS = st.builds(HandOver, GATEWAYS, st.integers(0, 7))
DEMANDS = st.builds(Demand)
OTHERS = st.one_of(st.builds(Reconnect, GATEWAYS), st.builds(Corrupt, st.booleans()))
PAUSES_S = st.sampled_from([0, 0, 0.001, 0.02, 0.1])
ACTIONS = st.lists(
    st.tuples(st.one_of(ASKS, ASKS, ASKS, DEMANDS, HAND_OVERS, ABORTS, OTHERS), PAUSES_S),
    min_size=8,
    max_size=24,
)


@pytest.mark.parametrize("device", DEVICES)
@given(
    shape=SHAPES,
    actions=ACTIONS,
    drained_amid=st.booleans(),
    chance=st.builds(random.Random, st.integers(0, 999)),
)
@settings(
    max_examples=examples(200),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes, for little
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_request_ends_rightly_and_leaves_nothing(
    tmp_path: Path,
    shape: Shape,
    actions: Sequence[tuple[Action, float]],
    drained_amid: bool,
    chance: random.Random,
    device: str,
) -> None:
    """Tokens are those of the model, on any worker and after any number of recomputes. Each request
    ends, and then nothing is held or owed. The ledger's laws hold after every operation."""
    with contextlib.closing(VirtualLoop()) as loop, LateEngine.instead(chance):
        loop.run_until_complete(
            live(tmp_path, shape, actions, drained_amid, chance, DEVICES[device])
        )
        assert loop.faults == []


async def live(
    directory: Path,
    shape: Shape,
    actions: Sequence[tuple[Action, float]],
    drained_amid: bool,
    chance: random.Random,
    device: Device,
) -> None:
    pair = Pair(chance, device)
    shaped = shape.num_blocks, shape.block_size, shape.limits, shape.num_swap_blocks
    await pair.open(directory, *shaped)
    try:
        for action, pause_s in actions:
            action.do(pair)
            await asyncio.sleep(pause_s)
        if drained_amid:
            await pair.drain()
        await pair.until(lambda: all(request.over for request in pair.requests))
        await pair.until(lambda: not pair.leftovers)
        await pair.drain()
    finally:
        await pair.close()
    for worker in pair.workers:
        for pool_id in await pair.store.pool_ids():
            await pair.store.leave(pool_id, worker.worker_id)
    for request in pair.requests:
        check(request, drained_amid)


def right_tokens(asked: Ticket, index: int) -> list[int]:
    if asked.sampling.beam is not None:
        return list(found_by(asked)[index].token_ids)
    draw = Draw(asked.sampling, index)
    return expected(asked.prompt_token_ids, asked.sampling.max_tokens, draw)


def check(request: Request, drained_amid: bool) -> None:
    asked = request.asked
    for index, tokens in request.tokens.items():
        right = right_tokens(asked, index)
        assert tokens == right[: len(tokens)]
        assert len(tokens) == len(right) or request.ended.get(index) != "length"
    match request.over:
        case "done":
            assert not request.living
        case "deadline_exceeded":
            assert asked.timeout_ms
        case "drained":
            assert drained_amid
        case over:
            assert over == "aborted"
