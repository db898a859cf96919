"""Simulates serving of a trace by prefill and decode workers on shared pools, or by workers that
each do both on a pool of their own.

A split worker computes prompts first come, first served, or runs sequences; an aggregated worker
computes `chunk` prompt tokens in each step of its running sequences. Progress within a step is
continuous, so the simulation goes from event to event: a prompt or a sequence ends. A request goes
to the pool where its queue and its missing tokens take least, among those that have the most of its
prefix and some random ones.
"""

import heapq
import itertools
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from bench.cluster.costs import PREFILL_TOKENS_PER_S, decode_step_s
from bench.cluster.trace import HASHED_TOKENS, Request

_COMPUTE_S = 1 / PREFILL_TOKENS_PER_S
_NUM_KNOWING, _NUM_RANDOM = 8, 16
_ROUNDING = 1e-6


@dataclass(slots=True)
class Served:
    """A request on its way; `left`: prompt tokens that are still to be computed."""

    request: Request
    left: float = 0.0
    num_missing: int = 0
    first_token_s: float = inf
    ended_s: float = inf

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.request.arrived_s

    @property
    def inter_token_s(self) -> float:
        """The mean time between two tokens of the request."""
        return (self.ended_s - self.first_token_s) / max(1, self.request.num_generated_tokens - 1)


class Cache:
    """The prefixes of one pool, least recently used first out. Running requests hold tokens, which
    leave less room for cached ones. `knowing`: which pools have which prefix."""

    def __init__(self, number: int, num_tokens: int, knowing: dict[int, set[int]]) -> None:
        self._number = number
        self._num_tokens = num_tokens
        self._num_held = 0
        self._known: OrderedDict[int, None] = OrderedDict()
        self._knowing = knowing

    def num_found(self, request: Request) -> int:
        found = sum(1 for _ in itertools.takewhile(self._known.__contains__, request.hashes))
        return min(found * HASHED_TOKENS, request.num_prompt_tokens - 1)

    def admit(self, request: Request) -> bool:
        """Hold the request's tokens, if there is room."""
        needed = request.num_prompt_tokens + request.num_generated_tokens
        if self._num_held and self._num_held + needed > self._num_tokens:
            return False
        self._num_held += needed
        return True

    def publish(self, request: Request) -> None:
        """The request's prompt is computed: others may share it."""
        for hashed in request.hashes:
            self._known[hashed] = None
            self._known.move_to_end(hashed)
            self._knowing[hashed].add(self._number)

    def release(self, request: Request) -> None:
        self._num_held -= request.num_prompt_tokens + request.num_generated_tokens
        while len(self._known) * HASHED_TOKENS > max(0, self._num_tokens - self._num_held):
            hashed, _ = self._known.popitem(last=False)
            self._knowing[hashed].discard(self._number)


@dataclass(slots=True, eq=False)
class Worker:
    """A worker's prompts and running sequences. `chunk`: prompt tokens in a step of sequences.
    `rows`: when each sequence ends, in steps of the worker; a number; the request. `version`: of
    its next event."""

    chunk: int
    now: float = 0.0
    num_steps: float = 0.0
    num_pending: float = 0.0
    version: int = 0
    prompts: deque[Served] = field(default_factory=deque)
    rows: list[tuple[float, int, Served]] = field(default_factory=list)

    def _rates(self) -> tuple[float, float]:
        """Steps and prompt tokens a second."""
        if not self.rows:
            return 0.0, PREFILL_TOKENS_PER_S
        step_s = decode_step_s(len(self.rows)) + bool(self.prompts) * self.chunk * _COMPUTE_S
        return 1 / step_s, self.chunk / step_s

    def next_event_s(self) -> float:
        steps_rate, tokens_rate = self._rates()
        row_s = (self.rows[0][0] - self.num_steps) / steps_rate if self.rows else inf
        prompt_s = self.prompts[0].left / tokens_rate if self.prompts and tokens_rate else inf
        return self.now + max(0.0, min(row_s, prompt_s))

    def advance(self, until: float) -> None:
        """Compute until a time that is not after the next event."""
        steps_rate, tokens_rate = self._rates()
        passed, self.now = until - self.now, until
        self.num_steps += passed * steps_rate
        if self.prompts:
            computed = min(self.prompts[0].left, passed * tokens_rate)
            self.prompts[0].left -= computed
            self.num_pending -= computed


@dataclass(frozen=True, slots=True)
class Shape:
    """`num_prefill` of the `per_pool` workers of a pool compute prompts; 0: each does both."""

    num_workers: int
    num_tokens: int
    per_pool: int
    num_prefill: int = 0
    chunk: int = 0


class Pool:
    def __init__(self, number: int, shape: Shape, knowing: dict[int, set[int]]) -> None:
        num_tokens = shape.num_tokens * shape.per_pool // shape.num_workers
        self.cache = Cache(number, num_tokens, knowing)
        self.waiting: deque[Served] = deque()
        workers = [Worker(shape.chunk) for _ in range(shape.per_pool)]
        self.prefill = workers[: shape.num_prefill] or workers
        self.decode = workers[shape.num_prefill :]

    def cost_s(self, request: Request) -> float:
        queued = min(worker.num_pending for worker in self.prefill)
        queued += sum(each.request.num_prompt_tokens for each in self.waiting) / len(self.prefill)
        return (queued + request.num_prompt_tokens - self.cache.num_found(request)) * _COMPUTE_S


class Simulation:
    def __init__(self, shape: Shape, seed: int = 1) -> None:
        self._knowing: dict[int, set[int]] = defaultdict(set)
        self._pools = [
            Pool(number, shape, self._knowing)
            for number in range(shape.num_workers // shape.per_pool)
        ]
        self._events: list[tuple[float, int, int, Worker, Pool]] = []
        self._numbers = itertools.count()
        self._random = random.Random(seed)

    def run(self, requests: Sequence[Request]) -> list[Served]:
        served = [Served(request) for request in requests]
        for one in served:
            self._run_until(one.request.arrived_s)
            pool = min(self._candidates(one.request), key=lambda each: each.cost_s(one.request))
            pool.waiting.append(one)
            self._admit(pool, one.request.arrived_s)
        self._run_until(inf)
        return served

    def _candidates(self, request: Request) -> list[Pool]:
        knowing = next((k for h in reversed(request.hashes) if (k := self._knowing.get(h))), set())
        numbers = self._random.choices(range(len(self._pools)), k=_NUM_RANDOM)
        numbers += itertools.islice(knowing, _NUM_KNOWING)
        return [self._pools[number] for number in numbers]

    def _run_until(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            at, _, version, worker, pool = heapq.heappop(self._events)
            if version == worker.version:
                self._end_due(worker, pool, at)

    def _admit(self, pool: Pool, now: float) -> None:
        """Give waiting requests to prefill workers, while the pool has room."""
        while pool.waiting and pool.cache.admit(pool.waiting[0].request):
            one = pool.waiting.popleft()
            one.num_missing = one.request.num_prompt_tokens - pool.cache.num_found(one.request)
            one.left = one.num_missing
            worker = min(pool.prefill, key=lambda each: each.num_pending)
            worker.advance(now)
            worker.prompts.append(one)
            worker.num_pending += one.left
            self._plan(worker, pool)

    def _end_due(self, worker: Worker, pool: Pool, now: float) -> None:
        """End the prompt and the sequences that end now."""
        worker.advance(now)
        if worker.prompts and worker.prompts[0].left < _ROUNDING:
            one = worker.prompts.popleft()
            one.first_token_s = now
            pool.cache.publish(one.request)
            shares = worker in pool.decode
            decode = worker if shares else min(pool.decode, key=lambda each: len(each.rows))
            decode.advance(now)
            ends = decode.num_steps + one.request.num_generated_tokens - 1
            heapq.heappush(decode.rows, (ends, next(self._numbers), one))
            if decode is not worker:
                self._plan(decode, pool)
        while worker.rows and worker.rows[0][0] <= worker.num_steps + _ROUNDING:
            *_, one = heapq.heappop(worker.rows)
            one.ended_s = now
            pool.cache.release(one.request)
        self._plan(worker, pool)
        self._admit(pool, now)

    def _plan(self, worker: Worker, pool: Pool) -> None:
        """Announce the worker's next event, instead of the one before."""
        worker.version += 1
        if (at := worker.next_event_s()) < inf:
            event = at, next(self._numbers), worker.version, worker, pool
            heapq.heappush(self._events, event)
