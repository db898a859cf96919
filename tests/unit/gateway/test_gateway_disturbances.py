"""Requests of one and of several sequences under random disturbances."""

import random

import pytest

from services.gateway.request import sending
from services.gateway.request.status import RequestStatus
from services.protocol.messages import (
    Abort,
    Generated,
    Prefilled,
    Requeued,
    RequeueReason,
    Reserve,
    Submit,
)
from services.protocol.ticket import FinishReason
from services.runtime.errors import PoisonRequest, Unavailable

from .walk import (
    MAX_TOKENS,
    PROMPT,
    ScriptedWorker,
    Walk,
    at_rest,
    expected,
    generated,
    next_token,
    requeued,
    text_of,
    tokens_of,
)

NUM = 3


class Disturbances:
    """Workers give back, hand over and vanish at random, and sequences end at different times.
    Prefill workers repeat tickets, and old attempts continue. (A stream itself never repeats a
    step.) `released`: (worker, attempt) of the leases that workers ended by themselves."""

    def __init__(self, walk: Walk, chance: random.Random) -> None:
        self._walk, self._chance = walk, chance
        self._request = walk.request
        self._sent: list[tuple[ScriptedWorker, Generated | Prefilled]] = []
        self.released: set[tuple[str, int]] = set()

    async def run(self) -> None:
        for _ in range(100):
            if self._request.status is RequestStatus.ENDED:
                return
            late = [
                (by, one)
                for by, one in self._sent
                if one.attempt < self._attempt or by is self._walk.prefill
            ]
            if late and self._chance.random() < 0.2:
                self._walk.on_event(*self._chance.choice(late))
            else:
                await self._go_on(self._chance.random())

    @property
    def _attempt(self) -> int:
        return self._request.attempt.number

    async def _go_on(self, last: float) -> None:
        status = self._request.status
        if status is RequestStatus.QUEUED:
            if not await self._walk.reserve(granted=last < 0.8):
                self.released.add(("d", self._attempt))
            elif self._request.is_computed:
                sending.admit(self._request)
        elif status is RequestStatus.RESERVING:
            self._walk.start()
        elif last < 0.05:
            self._give_back()
        elif last < 0.1:
            lost = self._chance.choice([self._walk.prefill, self._walk.decode])
            self.released |= {(lost.id, number) for number in range(self._attempt + 1)}
            self._walk.on_lost(lost, died=True)
        elif status is RequestStatus.PREFILLING:
            self._prefill()
        elif last < 0.2 and self._request.attempt.detached is None:
            self.released.add(("d", self._attempt))  # the slot; it may claim its own ticket again
            living = [s.index for s in self._request.output.living]
            self._walk.on_event(
                self._walk.decode, requeued(self._walk, at_rest(self._walk, *living))
            )
        else:
            self._decode()

    def _give_back(self) -> None:
        is_prefilling = self._request.status is RequestStatus.PREFILLING
        sender = self._walk.prefill if is_prefilling else self._walk.decode
        self.released.add((sender.id, self._attempt))
        reason = self._chance.choice([RequeueReason.PREEMPTED, RequeueReason.DRAINING])
        self._walk.on_event(sender, Requeued("r1", self._attempt, reason))
        sender.draining = False

    def _prefill(self) -> None:
        submit = next(c for c in reversed(self._walk.prefill.sent) if isinstance(c, Submit))
        ended = [
            FinishReason.LENGTH if len(s.token_ids) + 1 == MAX_TOKENS else None
            for s in submit.ticket.sequences
        ]
        if all(ended):
            self.released.add(("p", self._attempt))
        self._send(self._walk.prefill, self._walk.prefilled(submit.ticket, *ended))

    def _decode(self) -> None:
        living = self._request.output.living
        sequence = self._chance.choice(living)
        token = next_token([*PROMPT, *sequence.tokens], sequence.index)
        is_last = len(sequence.tokens) + 1 == MAX_TOKENS
        if is_last and len(living) == 1:
            self.released.add(("d", self._attempt))
        finish = FinishReason.LENGTH if is_last else None
        event = generated(self._walk, token, finish=finish, index=sequence.index)
        self._send(self._walk.decode, event)

    def _send(self, sender: ScriptedWorker, event: Generated | Prefilled) -> None:
        self._sent.append((sender, event))
        self._walk.on_event(sender, event)


async def disturb(walk: Walk, chance: random.Random) -> bool:
    """Disturb a request and close it. Every reservation and every ticket is ended, by the worker
    itself or by an abort. Returns whether all sequences reached their ends."""
    disturbances = Disturbances(walk, chance)
    await disturbances.run()
    finished = walk.output.has_ended
    walk.request.close()
    for worker in (walk.prefill, walk.decode):
        begun = {c.attempt for c in worker.sent if isinstance(c, Reserve)}
        begun |= {c.ticket.attempt for c in worker.sent if isinstance(c, Submit)}
        ended = {c.attempt for c in worker.sent if isinstance(c, Abort) and c.index is None}
        ended |= {number for worker_id, number in disturbances.released if worker_id == worker.id}
        assert begun <= ended
        assert worker.num_taken_slots == 0
        assert not worker.prefill_loads
    return finished


def likely_stop(chance: random.Random) -> tuple[str, ...]:
    """A stop string that in half of the cases ends sequence 2 with its fourth token."""
    return (text_of(expected(4, 2)[3:]),) if chance.random() < 0.5 else ()


@pytest.mark.parametrize("num_sequences", [1, NUM])
@pytest.mark.parametrize("seed", range(60))
async def test_disturbances_change_no_token(seed: int, num_sequences: int) -> None:
    """Each sequence is a prefix of its own expected tokens, or all of them if it ends."""
    chance = random.Random(seed)
    stop = likely_stop(chance)
    walk = Walk(num_sequences=num_sequences, stop=stop)
    finished = await disturb(walk, chance)
    try:
        tokens = await tokens_of(walk)
    except (Unavailable, PoisonRequest):  # too many setbacks, or deaths
        tokens = {}
    for index, got in tokens.items():
        most = 4 if stop and index == 2 else MAX_TOKENS
        assert got == expected(most, index)[: len(got)]
        assert len(got) == most or not finished
