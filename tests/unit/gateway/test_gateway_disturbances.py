"""Requests of one and of several sequences under random disturbances."""

import random

import pytest

from services.common.errors import PoisonRequest, Unavailable
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

from .walk import (
    MAX_TOKENS,
    PROMPT,
    ScriptedWorker,
    Walk,
    at_rest,
    best_of,
    deltas_of,
    expected,
    generated,
    next_token,
    requeued,
    text_of,
    tokens_of,
)

NUM = 3


async def disturb(walk: Walk, chance: random.Random) -> bool:
    """Workers give back, hand over and vanish at random, and sequences end at different times.
    Prefill workers repeat tickets, and old attempts continue. (A stream itself never repeats a
    step.) Every reservation and every ticket is ended, by the worker itself or by an abort. Returns
    whether all sequences reached their ends."""
    lifecycle = walk.lifecycle
    ended_by_worker: set[tuple[str, int]] = set()
    """(worker, attempt)"""
    sent: list[tuple[ScriptedWorker, Generated | Prefilled]] = []

    def send(sender: ScriptedWorker, event: Generated | Prefilled) -> None:
        sent.append((sender, event))
        walk.on_event(sender, event)

    for _ in range(100):
        if lifecycle.status is RequestStatus.ENDED:
            break
        attempt, last = lifecycle.attempt.number, chance.random()
        late = [(by, one) for by, one in sent if one.attempt < attempt or by is walk.prefill]
        if late and chance.random() < 0.2:
            walk.on_event(*chance.choice(late))
            continue
        if lifecycle.status is RequestStatus.QUEUED:
            if not await walk.reserve(granted=last < 0.8):
                ended_by_worker.add(("d", attempt))
            elif lifecycle.is_computed:
                lifecycle.admit()
        elif lifecycle.status is RequestStatus.RESERVING:
            walk.start()
        elif last < 0.05:
            sender = walk.prefill if lifecycle.status is RequestStatus.PREFILLING else walk.decode
            ended_by_worker.add((sender.id, attempt))
            reason = chance.choice([RequeueReason.PREEMPTED, RequeueReason.DRAINING])
            walk.on_event(sender, Requeued("r1", attempt, reason))
            sender.draining = False
        elif last < 0.1:
            lost = chance.choice([walk.prefill, walk.decode])
            ended_by_worker |= {(lost.id, number) for number in range(attempt + 1)}
            walk.on_lost(lost, died=True)
        elif lifecycle.status is RequestStatus.PREFILLING:
            submit = next(c for c in reversed(walk.prefill.sent) if isinstance(c, Submit))
            ended = [
                FinishReason.LENGTH if len(s.token_ids) + 1 == MAX_TOKENS else None
                for s in submit.ticket.sequences
            ]
            if all(ended):
                ended_by_worker.add(("p", attempt))
            send(walk.prefill, walk.prefilled(submit.ticket, *ended))
        elif last < 0.2 and lifecycle.attempt.detached is None:
            ended_by_worker.add(("d", attempt))  # of the slot; the ticket is its own to claim again
            living = [s.index for s in lifecycle.client.living]
            walk.on_event(walk.decode, requeued(walk, at_rest(walk, *living)))
        else:
            sequence = chance.choice(lifecycle.client.living)
            token = next_token([*PROMPT, *sequence.tokens], sequence.index)
            is_last = len(sequence.tokens) + 1 == MAX_TOKENS
            if is_last and len(lifecycle.client.living) == 1:
                ended_by_worker.add(("d", attempt))
            finish = FinishReason.LENGTH if is_last else None
            send(walk.decode, generated(walk, token, finish=finish, index=sequence.index))
    finished = walk.output.has_ended
    lifecycle.close()
    for worker in (walk.prefill, walk.decode):
        begun = {c.attempt for c in worker.sent if isinstance(c, Reserve)}
        begun |= {c.ticket.attempt for c in worker.sent if isinstance(c, Submit)}
        over = {c.attempt for c in worker.sent if isinstance(c, Abort) and c.index is None}
        over |= {attempt for worker_id, attempt in ended_by_worker if worker_id == worker.id}
        assert begun <= over
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


@pytest.mark.parametrize("seed", range(60))
async def test_disturbances_do_not_change_best_of(seed: int) -> None:
    """All computed tokens are counted once."""
    chance = random.Random(seed)
    stop = likely_stop(chance)
    walk = Walk(num_sequences=NUM, stop=stop, num_best=2)
    finished = await disturb(walk, chance)
    try:
        deltas = await deltas_of(walk)
    except (Unavailable, PoisonRequest):
        assert not finished
        return
    lengths = [MAX_TOKENS, MAX_TOKENS, 4 if stop else MAX_TOKENS]
    best = best_of([expected(length, index) for index, length in enumerate(lengths)], 2)
    got = {index: list(delta.token_ids) for index, (delta,) in deltas.items()}
    assert got == (dict(enumerate(best)) if finished else {})
    usages = [delta.usage.num_generated_tokens for (delta,) in deltas.values() if delta.usage]
    assert usages == ([sum(lengths)] if finished else [])
