"""The state machine of one request, against workers that a test plays by hand, and by chance."""

import asyncio
import itertools
import random
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from blockstore.registry import Load, Member, Role
from services.common.errors import DeadlineExceeded, KVCorrupt, PoisonRequest, Unavailable
from services.common.text.detokenizer import Detokenizer
from services.common.text.pieces import Pieces
from services.common.text.stop_strings import StopMatcher
from services.common.ticket import (
    FinishReason,
    SamplingParams,
    Ticket,
    TicketSequence,
    successor_of,
)
from services.gateway.admission import Admitted
from services.gateway.journey import Journey, Stage, Start
from services.gateway.line import Place
from services.gateway.messages import (
    Abort,
    Admit,
    Command,
    Failed,
    Generated,
    HandOver,
    Prefilled,
    RequestEvent,
    Requeued,
    RequeueReason,
    Reserve,
    Reserved,
    Submit,
)
from services.gateway.output import Output, Tally
from services.gateway.worker import Errand, Worker

PROMPT = (1, 2, 3)
MAX_TOKENS = 6
ROOT = b"r" * 16


class NoMeter:
    def first_token(self, after_s: float) -> None: ...

    def tokens(self, num_tokens: int, after_s: float) -> None: ...


class ScriptedDesk:
    def __init__(self) -> None:
        self.ended: list[Exception | None] = []
        self.num_waits = 0

    def waits_again(self, journey: Journey) -> None:
        self.num_waits += 1

    def has_ended(self, journey: Journey, error: Exception | None) -> None:
        self.ended.append(error)


class ScriptedWorker(Worker):
    """Keeps what it is sent."""

    def __init__(self, worker_id: str, role: Role = "decode") -> None:
        self.sent: list[Command] = []
        load = Load(num_free_slots=4)
        super().__init__(
            Member(worker_id, role, "host:1", "serving", 1, 1, load=load), self.sent.append
        )
        self.connected = True


def next_token(tokens: Sequence[int]) -> int:
    return zlib.crc32(repr(list(tokens)).encode()) % 200 + 1


def expected(num_tokens: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(PROMPT) :]


class Walk:
    """A journey with one worker of each kind."""

    def __init__(self, deadline: float | None = None) -> None:
        self.prefill, self.decode = ScriptedWorker("p", "prefill"), ScriptedWorker("d")
        self.desk = ScriptedDesk()
        sampling = SamplingParams(0.0, 0, 1.0, 0.0, 7, MAX_TOKENS)
        request = Admitted("r1", "toy", PROMPT, sampling, (), 0, "", 0.0, deadline)
        pieces = [b"%d," % token for token in range(256)]
        self.output = Output(
            "r1",
            Tally(len(PROMPT), 0.0),
            Detokenizer(Pieces(pieces, pieces)),
            StopMatcher(()),
            (),
            NoMeter(),
            asyncio.get_running_loop().time,
        )
        self.journey = Journey(request, Place(0, 1), self.output, self.desk, itertools.count(1))

    async def reserve(self, granted: bool = True) -> bool:
        asking = asyncio.create_task(self.journey.reserve(self.decode, timeout_s=5))
        await asyncio.sleep(0)
        self.journey.on_event(self.decode, Reserved("r1", self.journey.attempt, granted))
        return await asking

    def start(self) -> Ticket:
        self.journey.start(Start("pool", ROOT, self.prefill, Errand(3)))
        submit = self.prefill.sent[-1]
        assert isinstance(submit, Submit)
        return submit.ticket

    def prefilled(self, ticket: Ticket, finish: FinishReason | None = None) -> Prefilled:
        tokens = (*ticket.prompt_token_ids, *ticket.sequences[0].token_ids)
        sequence = TicketSequence(
            0, (*ticket.sequences[0].token_ids, next_token(tokens)), (9,), len(tokens)
        )
        return Prefilled(replace(ticket, holder_epoch=2, sequences=(sequence,)), finish)

    async def until_decoding(self) -> Ticket:
        assert await self.reserve()
        ticket = self.start()
        self.journey.on_event(self.prefill, self.prefilled(ticket))
        return ticket

    async def tokens(self) -> list[int]:
        """All that the client gets, to the end."""
        async with asyncio.timeout(5):
            return [t async for delta in self.output.deltas() for t in delta.token_ids]


def generated(
    walk: Walk, *tokens: int, finish: FinishReason | None = None, skip: int = 0
) -> Generated:
    """What the decode worker says of the attempt and position of the moment, `skip` tokens on."""
    journey = walk.journey
    return Generated("r1", journey.attempt, 0, journey.client.num_tokens + skip, tokens, finish)


async def test_the_walk_from_queue_to_end() -> None:
    walk = Walk()
    await walk.until_decoding()
    assert walk.journey.stage is Stage.DECODING
    rest = expected(MAX_TOKENS)[1:]
    walk.journey.on_event(walk.decode, generated(walk, *rest, finish=FinishReason.LENGTH))
    assert await walk.tokens() == expected(MAX_TOKENS)
    assert [type(command) for command in walk.decode.sent] == [Reserve, Admit]
    assert walk.desk.ended == [None]
    assert not walk.decode.guests
    assert not walk.prefill.errands


async def test_a_ticket_under_a_successor_of_its_holder_is_the_same() -> None:
    """The prefill worker found a wrong block in the cache and allocated again (law 6)."""
    walk = Walk()
    assert await walk.reserve()
    ticket = walk.start()
    ticket = replace(ticket, holder_id=successor_of(successor_of(ticket.holder_id)))
    walk.journey.on_event(walk.prefill, walk.prefilled(ticket))
    assert walk.journey.stage is Stage.DECODING
    admit = walk.decode.sent[-1]
    assert isinstance(admit, Admit)
    assert admit.ticket.holder_id == ticket.holder_id


async def test_a_ticket_without_blocks_goes_to_nobody() -> None:
    walk = Walk()
    assert await walk.reserve()
    event = walk.prefilled(walk.start())
    bare = replace(event.ticket.sequences[0], block_ids=(), num_computed_tokens=0)
    walk.journey.on_event(
        walk.prefill, Prefilled(replace(event.ticket, sequences=(bare,)), finish_reason=None)
    )
    assert walk.journey.stage is Stage.QUEUED
    assert not any(isinstance(command, Admit) for command in walk.decode.sent)


async def test_a_refusal_leaves_it_where_it_was() -> None:
    walk = Walk()
    assert not await walk.reserve(granted=False)
    assert (walk.journey.stage, walk.journey.attempt) == (Stage.QUEUED, 1)
    assert walk.decode.full
    assert not walk.decode.guests
    assert [type(command) for command in walk.decode.sent] == [Reserve]


async def test_a_slot_that_is_granted_too_late_was_given_up() -> None:
    walk = Walk()
    assert not await walk.journey.reserve(walk.decode, timeout_s=0)
    assert walk.decode.sent == [Reserve("r1", 1), Abort("r1", 1)]
    walk.journey.on_event(walk.decode, Reserved("r1", 1, granted=True))
    assert (walk.journey.stage, walk.journey.attempt) == (Stage.QUEUED, 2)


async def test_a_slot_granted_at_the_last_moment_is_taken() -> None:
    """An event loop that was busy sees the answer and the end of the patience at once."""
    walk = Walk()
    asking = asyncio.create_task(walk.journey.reserve(walk.decode, timeout_s=0.002))
    await asyncio.sleep(0)
    granted = Reserved("r1", 1, granted=True)
    asyncio.get_running_loop().call_later(0.001, walk.journey.on_event, walk.decode, granted)
    time.sleep(0.01)  # noqa: ASYNC251 - the loop is busy
    assert await asking
    assert walk.decode.sent == [Reserve("r1", 1)]
    assert walk.decode.guests


async def test_cancelled_while_a_slot_is_asked_for() -> None:
    walk = Walk()
    asking = asyncio.create_task(walk.journey.reserve(walk.decode, timeout_s=5))
    await asyncio.sleep(0)
    walk.journey.end()
    assert not await asking
    assert walk.decode.sent == [Reserve("r1", 1), Abort("r1", 1)]


async def test_a_worker_that_is_lost_while_it_is_asked_has_not_granted() -> None:
    walk = Walk()
    asking = asyncio.create_task(walk.journey.reserve(walk.decode, timeout_s=5))
    await asyncio.sleep(0)
    walk.journey.on_event(walk.decode, Reserved("r1", 1, granted=True))
    walk.journey.on_lost(walk.decode)
    assert not await asking
    assert (walk.journey.stage, walk.journey.attempt) == (Stage.QUEUED, 2)
    assert not walk.decode.guests


async def test_events_at_the_wrong_time_or_of_others_are_dropped() -> None:
    walk = Walk()
    stranger = ScriptedWorker("stranger")
    assert await walk.reserve()
    ticket = walk.start()
    dropped: list[tuple[Worker, RequestEvent]] = [
        (walk.decode, generated(walk, 5)),  # not admitted yet
        (walk.decode, Reserved("r1", 1, granted=False)),  # answered before
        (walk.decode, walk.prefilled(ticket)),  # not the one that has it
        (stranger, walk.prefilled(ticket)),
        (stranger, Requeued("r1", 1, RequeueReason.PREEMPTED)),
        (stranger, Failed("r1", 1, "kv_corrupt", "no")),
        (walk.prefill, Requeued("r1", 2, RequeueReason.PREEMPTED)),  # another attempt
    ]
    for sender, event in dropped:
        walk.journey.on_event(sender, event)
    assert walk.journey.stage is Stage.PREFILLING
    walk.journey.on_event(walk.prefill, walk.prefilled(ticket))
    walk.journey.on_event(walk.prefill, walk.prefilled(ticket))  # said twice
    walk.journey.on_event(stranger, generated(walk, 5))  # not the one that runs it
    walk.journey.on_event(walk.prefill, generated(walk, 5))
    walk.journey.end()
    assert await walk.tokens() == expected(1)


@pytest.mark.parametrize("skip", [-1, 1], ids=["repeated", "lost"])
async def test_a_step_that_is_repeated_or_lost_never_reaches_the_client(skip: int) -> None:
    walk = Walk()
    await walk.until_decoding()
    walk.journey.on_event(walk.decode, generated(walk, 5, skip=skip))
    assert walk.journey.stage is Stage.QUEUED
    assert Abort("r1", 1) in walk.decode.sent
    walk.journey.end()
    assert await walk.tokens() == expected(1)


async def test_more_tokens_than_were_asked_for_never_reach_the_client() -> None:
    walk = Walk()
    await walk.until_decoding()
    walk.journey.on_event(walk.decode, generated(walk, *range(MAX_TOKENS)))
    assert walk.journey.stage is Stage.QUEUED
    assert Abort("r1", 1) in walk.decode.sent
    walk.journey.end()
    assert await walk.tokens() == expected(1)


async def test_who_gave_it_back_is_not_told_but_the_other_is() -> None:
    walk = Walk()
    assert await walk.reserve()
    walk.start()
    walk.journey.on_event(walk.prefill, Requeued("r1", 1, RequeueReason.PREEMPTED))
    assert Abort("r1", 1) in walk.decode.sent
    assert Abort("r1", 1) not in walk.prefill.sent
    assert not walk.prefill.errands
    assert not walk.decode.guests
    assert walk.desk.num_waits == 1
    assert walk.output.tally.num_preemptions == 1


async def test_a_workers_error_is_the_clients() -> None:
    walk = Walk()
    await walk.until_decoding()
    walk.journey.on_event(walk.decode, Failed("r1", 1, "kv_corrupt", "block 9 is not itself"))
    with pytest.raises(KVCorrupt, match="block 9 is not itself"):
        await walk.tokens()
    assert Abort("r1", 1) not in walk.decode.sent


async def test_the_deadline_ends_it_wherever_it_is() -> None:
    walk = Walk(deadline=asyncio.get_running_loop().time() + 0.01)
    await walk.until_decoding()
    with pytest.raises(DeadlineExceeded):
        await walk.tokens()
    assert Abort("r1", 1) in walk.decode.sent
    assert Abort("r1", 1) in walk.prefill.sent


async def test_a_ticket_goes_on_with_what_is_left_of_the_deadline() -> None:
    walk = Walk(deadline=asyncio.get_running_loop().time() + 10)
    assert await walk.reserve()
    old = replace(walk.start(), timeout_ms=60_000)
    walk.journey.on_event(walk.prefill, walk.prefilled(old))
    admit = walk.decode.sent[-1]
    assert isinstance(admit, Admit)
    assert 0 < admit.ticket.timeout_ms <= 10_000
    walk.journey.end()


def handed_over(walk: Walk, ticket: Ticket) -> Requeued:
    """The decode worker has put at rest what it was sent."""
    received = expected(walk.journey.client.num_tokens - len(PROMPT))
    sequence = TicketSequence(0, tuple(received), (9, 10), walk.journey.client.num_tokens - 1)
    at_rest = replace(ticket, attempt=walk.journey.attempt, holder_epoch=4, sequences=(sequence,))
    return Requeued("r1", walk.journey.attempt, RequeueReason.HANDED_OVER, at_rest)


async def moving(walk: Walk) -> tuple[Ticket, ScriptedWorker, asyncio.Task[bool]]:
    """It runs, has been claimed, and asks another decode worker for a slot."""
    ticket = await walk.until_decoding()
    assert walk.journey.settled_at is None
    walk.journey.on_event(walk.decode, generated(walk, expected(2)[1]))
    assert walk.journey.settled_at is walk.decode
    other = ScriptedWorker("other")
    move = asyncio.create_task(walk.journey.move(other, timeout_s=5))
    await asyncio.sleep(0)
    assert other.sent == [Reserve("r1", 2)]
    return ticket, other, move


async def test_a_running_request_moves_when_there_is_a_slot_for_it() -> None:
    """Nothing goes to prefill, and it runs on until the slot is granted."""
    walk = Walk()
    ticket, other, move = await moving(walk)
    walk.journey.on_event(walk.decode, generated(walk, expected(3)[2]))
    walk.journey.on_event(other, Reserved("r1", 2, granted=True))
    assert await move
    assert walk.decode.sent[-1] == HandOver("r1", 1)
    walk.journey.on_event(walk.decode, generated(walk, expected(4)[3]))
    given = handed_over(walk, ticket)
    walk.journey.on_event(walk.decode, given)
    admit = other.sent[-1]
    assert isinstance(admit, Admit)
    assert given.ticket is not None
    assert admit.ticket == replace(given.ticket, attempt=2)
    assert (walk.decode.guests, other.guests) == (set(), {walk.journey})
    assert walk.journey.settled_at is None
    rest = expected(MAX_TOKENS)[4:]
    walk.journey.on_event(other, generated(walk, *rest, finish=FinishReason.LENGTH))
    assert await walk.tokens() == expected(MAX_TOKENS)
    assert len([c for c in walk.prefill.sent if isinstance(c, Submit)]) == 1
    assert not [c for c in (*walk.decode.sent, *other.sent) if isinstance(c, Abort)]
    assert not other.guests


async def test_without_a_slot_elsewhere_it_stays() -> None:
    walk = Walk()
    _, other, move = await moving(walk)
    walk.journey.on_event(other, Reserved("r1", 2, granted=False))
    assert not await move
    assert walk.journey.settled_at is walk.decode
    assert other.full
    assert not other.guests
    assert walk.decode.guests
    walk.journey.end()


@pytest.mark.parametrize("end", ["finished", "preempted", "cancelled", "lost"])
async def test_what_ends_while_it_moves_gives_the_slot_back(end: str) -> None:
    walk = Walk()
    _, other, move = await moving(walk)
    walk.journey.on_event(other, Reserved("r1", 2, granted=True))
    assert await move
    rest = expected(MAX_TOKENS)[2:]
    match end:
        case "finished":
            walk.journey.on_event(walk.decode, generated(walk, *rest, finish=FinishReason.LENGTH))
        case "preempted":
            walk.journey.on_event(walk.decode, Requeued("r1", 1, RequeueReason.PREEMPTED))
        case "cancelled":
            walk.journey.end()
        case "lost":
            walk.journey.on_lost(walk.decode)
    assert Abort("r1", 2) in other.sent
    assert not other.guests
    walk.journey.end()


async def at_rest(walk: Walk) -> ScriptedWorker:
    """Its ticket is at rest at a decode worker, and it waits in line: where it was to move has
    gone."""
    ticket, other, move = await moving(walk)
    walk.journey.on_event(other, Reserved("r1", 2, granted=True))
    assert await move
    walk.journey.on_lost(other)
    walk.journey.on_event(walk.decode, handed_over(walk, ticket))
    assert walk.journey.stage is Stage.QUEUED
    assert walk.journey.at_rest is not None
    issuer = walk.decode
    walk.decode = ScriptedWorker("next")
    return issuer


async def test_who_waits_with_a_ticket_at_rest_goes_on_from_it() -> None:
    walk = Walk()
    issuer = await at_rest(walk)
    assert not await walk.reserve(granted=False)
    assert not await walk.journey.reserve(walk.decode, timeout_s=0)  # no answer
    assert walk.journey.at_rest is not None
    assert await walk.reserve()
    walk.journey.go_on()
    admit = walk.decode.sent[-1]
    assert isinstance(admit, Admit)
    assert admit.ticket.attempt == walk.journey.attempt
    assert admit.ticket.sequences[0].block_ids == (9, 10)
    rest = expected(MAX_TOKENS)[2:]
    walk.journey.on_event(walk.decode, generated(walk, *rest, finish=FinishReason.LENGTH))
    assert await walk.tokens() == expected(MAX_TOKENS)
    assert not [c for c in issuer.sent if isinstance(c, Abort)]


@pytest.mark.parametrize("how", ["taken back", "issuer lost", "given up", "cancelled"])
async def test_a_ticket_at_rest_that_is_gone_leaves_the_tokens(how: str) -> None:
    """It is computed again; the issuer is told to let go unless it knows, or is gone."""
    walk = Walk()
    issuer = await at_rest(walk)
    match how:
        case "taken back":
            walk.journey.on_event(issuer, Requeued("r1", 1, RequeueReason.STALE_TICKET))
        case "issuer lost":
            walk.journey.on_lost(issuer)
        case "given up":
            walk.journey.give_up_ticket()
        case "cancelled":
            walk.journey.end()
    assert walk.journey.at_rest is None
    assert (Abort("r1", 1) in issuer.sent) == (how in ("given up", "cancelled"))
    if how != "cancelled":
        assert await walk.reserve()
        assert walk.start().sequences[0].token_ids == tuple(expected(2))
        walk.journey.end()


async def test_a_ticket_taken_back_when_it_was_sent_on_is_computed_again() -> None:
    walk = Walk()
    issuer = await at_rest(walk)
    assert await walk.reserve()
    walk.journey.go_on()
    attempt = walk.journey.attempt
    walk.journey.on_event(issuer, Requeued("r1", 1, RequeueReason.PREEMPTED))
    assert walk.journey.stage is Stage.QUEUED
    assert Abort("r1", attempt) in walk.decode.sent
    walk.journey.end()


async def test_a_handed_over_ticket_that_does_not_go_on_where_we_are_is_refused() -> None:
    walk = Walk()
    ticket, other, move = await moving(walk)
    walk.journey.on_event(other, Reserved("r1", 2, granted=True))
    assert await move
    given = handed_over(walk, ticket)
    assert given.ticket is not None
    wrong = replace(given.ticket.sequences[0], token_ids=(1, 2))
    walk.journey.on_event(
        walk.decode, replace(given, ticket=replace(given.ticket, sequences=(wrong,)))
    )
    assert walk.journey.stage is Stage.QUEUED
    assert walk.journey.at_rest is None
    assert Abort("r1", 1) in walk.decode.sent
    assert Abort("r1", 2) in other.sent
    walk.journey.end()


async def test_no_stage_is_skipped() -> None:
    walk = Walk()
    with pytest.raises(RuntimeError, match="queued cannot become prefilling"):
        walk.start()


async def test_setbacks_without_a_token_have_a_limit() -> None:
    walk = Walk()
    for _ in range(4):
        assert await walk.reserve()
        walk.start()
        walk.journey.on_lost(walk.decode)  # it had a slot there, and nothing more
    with pytest.raises(Unavailable, match="decode worker d was lost"):
        await walk.tokens()


async def test_a_request_over_which_two_workers_die_is_given_up() -> None:
    walk = Walk()
    for _ in range(2):
        assert await walk.reserve()
        walk.start()
        walk.journey.on_lost(walk.prefill)
    with pytest.raises(PoisonRequest, match="its prefill worker died twice"):
        await walk.tokens()


async def test_a_request_that_makes_progress_is_never_given_up() -> None:
    """However often workers die: between two deaths it got a token from one of the same role."""
    walk = Walk()
    for _ in range(MAX_TOKENS // 2 - 1):
        await walk.until_decoding()
        walk.journey.on_event(
            walk.decode,
            generated(
                walk, next_token([*PROMPT, *expected(walk.journey.client.num_tokens - len(PROMPT))])
            ),
        )
        walk.journey.on_lost(walk.decode)
    await walk.until_decoding()
    rest = expected(MAX_TOKENS)[walk.journey.client.num_tokens - len(PROMPT) :]
    walk.journey.on_event(walk.decode, generated(walk, *rest, finish=FinishReason.LENGTH))
    assert await walk.tokens() == expected(MAX_TOKENS)


async def test_a_token_of_the_other_role_clears_nobody() -> None:
    """Else a request that kills decode workers would go on until its last token: every attempt gets
    one from its prefill worker."""
    walk = Walk()
    await walk.until_decoding()
    walk.journey.on_lost(walk.decode)
    await walk.until_decoding()
    walk.journey.on_lost(walk.decode)
    with pytest.raises(PoisonRequest, match="its decode worker died twice"):
        await walk.tokens()


async def test_suspects_are_sent_to_a_worker_one_at_a_time() -> None:
    """The second goes when the first has a token, the third when the second is cancelled."""
    walks = [Walk() for _ in range(3)]
    decode = ScriptedWorker("d2")
    for walk in walks:
        await walk.until_decoding()
        walk.journey.on_lost(walk.decode)
        walk.decode = decode
        await walk.until_decoding()

    def num_sent() -> int:
        return sum(isinstance(command, Admit) for command in decode.sent)

    first, second, _third = walks
    assert num_sent() == 1
    token = next_token([*PROMPT, *expected(2)])
    first.journey.on_event(decode, generated(first, token))
    assert num_sent() == 2
    second.journey.end()
    assert num_sent() == 3


async def test_who_stood_in_line_when_the_worker_died_is_no_more_suspect_than_before() -> None:
    walks = [Walk() for _ in range(2)]
    decode = ScriptedWorker("d2")
    for walk in walks:
        await walk.until_decoding()
        walk.journey.on_lost(walk.decode)
        walk.decode = decode
        await walk.until_decoding()
    decode.connected = False
    for walk in walks:
        walk.journey.on_lost(decode)
    there, in_line = walks
    assert isinstance(there.desk.ended[0], PoisonRequest)
    assert in_line.journey.stage is Stage.QUEUED
    assert not in_line.desk.ended


@pytest.mark.parametrize("seed", range(100))
async def test_whatever_happens_tokens_are_final_and_nothing_is_left_behind(seed: int) -> None:
    """Law 7 and conservation at the gateway: workers answer, give back, vanish, repeat tickets and
    go on with old attempts by chance. (A stream itself never repeats a step.) The client gets a
    beginning of the expected tokens, all of them if the request finishes; every reservation and
    ticket that was sent out is ended, by the worker itself or by an abort."""
    chance = random.Random(seed)
    walk = Walk()
    journey = walk.journey
    told: set[tuple[str, int]] = set()  # (worker, attempt) that ended by the worker's own word
    said: list[tuple[Worker, Generated | Prefilled]] = []

    def hear(sender: ScriptedWorker, event: Generated | Prefilled) -> None:
        said.append((sender, event))
        journey.on_event(sender, event)

    for _ in range(60):
        if journey.stage is Stage.ENDED:
            break
        late = [
            (by, event)
            for by, event in said
            if event.attempt < journey.attempt or by is walk.prefill
        ]
        if late and chance.random() < 0.3:
            journey.on_event(*chance.choice(late))
            continue
        attempt, last = journey.attempt, chance.random()
        if journey.stage is Stage.QUEUED:
            if not await walk.reserve(granted=last < 0.8):
                told.add(("d", attempt))
            continue
        if journey.stage is Stage.RESERVING:
            walk.start()
        elif last < 0.1:
            reason = chance.choice([RequeueReason.PREEMPTED, RequeueReason.DRAINING])
            sender = walk.prefill if journey.stage is Stage.PREFILLING else walk.decode
            told.add((sender.id, attempt))
            journey.on_event(sender, Requeued("r1", attempt, reason))
            sender.draining = False
        elif last < 0.15:
            lost = chance.choice([walk.prefill, walk.decode])
            told.add((lost.id, attempt))
            journey.on_lost(lost)
        elif journey.stage is Stage.PREFILLING:
            submit = next(c for c in reversed(walk.prefill.sent) if isinstance(c, Submit))
            final = len(submit.ticket.sequences[0].token_ids) + 1 == MAX_TOKENS
            if final:
                told.add(("p", attempt))
            hear(
                walk.prefill,
                walk.prefilled(submit.ticket, FinishReason.LENGTH if final else None),
            )
        else:
            have = list(expected(journey.client.num_tokens - len(PROMPT)))
            token = next_token([*PROMPT, *have])
            final = len(have) + 1 == MAX_TOKENS
            told.add(("p", attempt))  # it was claimed
            if final:
                told.add(("d", attempt))
            finish = FinishReason.LENGTH if final else None
            hear(walk.decode, generated(walk, token, finish=finish))
    finished = journey.client.output.finish_reason is not None
    journey.end()
    try:
        tokens = await walk.tokens()
    except (Unavailable, PoisonRequest):  # too many setbacks, or deaths
        tokens = []
    assert tokens == expected(MAX_TOKENS)[: len(tokens)]
    assert len(tokens) == MAX_TOKENS or not finished
    for worker in (walk.prefill, walk.decode):
        begun = {c.attempt for c in worker.sent if isinstance(c, Reserve)}
        begun |= {c.ticket.attempt for c in worker.sent if isinstance(c, Submit)}
        ended = {c.attempt for c in worker.sent if isinstance(c, Abort)}
        ended |= {attempt for worker_id, attempt in told if worker_id == worker.id}
        assert begun <= ended
        assert not worker.guests
        assert not worker.errands
