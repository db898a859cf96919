"""A request with several sequences: one request, one ticket, and an end for each sequence."""

from dataclasses import replace

import pytest

from services.gateway.output.delta import Received
from services.gateway.request import resuming, sending
from services.gateway.request.status import RequestStatus
from services.gateway.workers.lease import DetachedTicket
from services.protocol.messages import Abort, Admit, HandOver, Reserve, Reserved, Submit
from services.protocol.ticket import FinishReason, Ticket, TicketSequence
from services.runtime.errors import DuplicateRequest

from .walk import (
    MAX_TOKENS,
    PROMPT,
    ROOT,
    ScriptedWorker,
    Walk,
    admitted_at,
    at_rest,
    deltas_of,
    expected,
    generated,
    requeued,
    step,
    text_of,
    tokens_of,
)

NUM = 3


async def test_a_group_walks_as_one_and_ends_with_its_last() -> None:
    walk = Walk(num_sequences=NUM)
    ticket = await walk.until_decoding()
    assert ticket.sequences == tuple(TicketSequence(index) for index in range(NUM))
    assert walk.decode.sent[0] == Reserve("r1", 1, NUM)
    assert walk.decode.num_free_slots == 1
    step(walk, 1, MAX_TOKENS - 1)
    assert walk.decode.num_free_slots == 2  # its slot is another's
    step(walk, 0, 2)
    step(walk, 2, MAX_TOKENS - 1)
    assert not walk.host.ended
    step(walk, 0, 3)
    assert walk.host.ended == [None]
    assert walk.decode.num_taken_slots == 0
    assert [type(command) for command in walk.decode.sent] == [Reserve, Admit]
    deltas = await deltas_of(walk)
    for index, each in deltas.items():
        assert [t for d in each for t in d.token_ids] == expected(MAX_TOKENS, index)
        assert "".join(d.text for d in each) == text_of(expected(MAX_TOKENS, index))
        assert [d.finish_reason for d in each][-1] is FinishReason.LENGTH
    usages = [d.usage for each in deltas.values() for d in each if d.usage]
    assert [usage.num_generated_tokens for usage in usages] == [NUM * MAX_TOKENS]


@pytest.mark.parametrize("stop", [(), (text_of(expected(1, 1)),)], ids=["its end", "a stop string"])
async def test_a_sequence_of_one_token_is_not_in_the_ticket(stop: tuple[str, ...]) -> None:
    """With a stop string, the prefill worker has put it at rest with the others; no decode worker
    gets it."""
    walk = Walk(num_sequences=NUM, stop=stop)
    ticket = await walk.until_prefilling()
    ends = () if stop else (None, FinishReason.STOP)
    walk.on_event(walk.prefill, walk.prefilled(ticket, *ends))
    assert [sequence.index for sequence in walk.admitted.sequences] == [0, 2]
    assert walk.decode.num_taken_slots == 2


async def test_sequences_that_end_with_the_first_token_are_not_sent_to_decode() -> None:
    walk = Walk(num_sequences=2)
    ticket = await walk.until_prefilling()
    walk.on_event(walk.prefill, walk.prefilled(ticket, *[FinishReason.STOP] * 2))
    assert walk.request.status is RequestStatus.ENDED
    assert walk.prefill.sent == [walk.prefill.sent[0]]  # it knows
    assert walk.decode.sent[-1] == Abort("r1", 1)  # a slot
    assert await tokens_of(walk) == {index: expected(1, index) for index in range(2)}


async def test_a_stop_string_ends_its_own_sequence_only() -> None:
    """The worker is told, and tokens that it generates until then are dropped."""
    stopping = expected(3, 1)
    walk = Walk(num_sequences=NUM, stop=(text_of(stopping[1:]),))
    await walk.until_decoding()
    step(walk, 1, 2)
    assert walk.decode.sent[-1] == Abort("r1", 1, 1)
    assert walk.decode.num_taken_slots == 2
    walk.on_event(walk.decode, generated(walk, 200, index=1))
    late = replace(generated(walk, 201, skip=7, index=1), num_drafts=3, num_accepted=1)
    walk.on_event(walk.decode, late)
    stats = walk.output.stats
    assert (stats.num_accepted_drafts, stats.num_rejected_drafts) == (0, 0)
    for index in (0, 2):
        step(walk, index, MAX_TOKENS - 1)
    assert walk.host.ended == [None]
    assert Abort("r1", 1) not in walk.decode.sent
    deltas = await deltas_of(walk)
    assert "".join(d.text for d in deltas[1]) == text_of(stopping[:1])
    assert [t for d in deltas[1] for t in d.token_ids] == stopping
    assert deltas[1][-1].stopped_by == text_of(stopping[1:])
    for index in (0, 2):
        assert [t for d in deltas[index] for t in d.token_ids] == expected(MAX_TOKENS, index)


async def test_the_last_that_a_stop_string_ends_is_the_request() -> None:
    walk = Walk(num_sequences=2, stop=(text_of(expected(2, 0)[1:]),))
    await walk.until_decoding()
    step(walk, 1, MAX_TOKENS - 1)
    step(walk, 0)
    assert walk.host.ended == [None]
    assert walk.decode.sent[-1] == Abort("r1", 1)


async def test_a_group_moves_without_those_that_have_ended() -> None:
    """Also without a sequence that a stop string ended while the ticket was on its way."""
    walk = Walk(num_sequences=NUM, stop=(text_of(expected(3, 1)[2:]),))
    await walk.until_decoding()
    for index in range(NUM):
        step(walk, index)
    other = ScriptedWorker("other")
    slot = sending.reserve_target(walk.request, other, "because d drains")
    assert other.sent == [Reserve("r1", 2, NUM)]
    walk.on_event(other, Reserved("r1", 2, granted=True))
    assert sending.request_move(walk.request, slot)
    assert walk.decode.sent[-1] == HandOver("r1", 1)
    step(walk, 1)
    assert other.num_taken_slots == 2
    walk.on_event(walk.decode, requeued(walk, at_rest(walk, 0, 1, 2)))
    assert [sequence.index for sequence in admitted_at(other).sequences] == [0, 2]
    walk.decode = other
    for index in (0, 2):
        step(walk, index, MAX_TOKENS - 2)
    assert walk.host.ended == [None]


async def test_the_worker_continues_unfinished_sequences_from_the_clients_tokens() -> None:
    walk = Walk(num_sequences=4)
    walk.output.replay(
        (Received(3, (5, 6)), Received(0, (7,), FinishReason.STOP), Received(1, (8,)))
    )
    again = await walk.until_prefilling()
    assert again.sequences == (
        TicketSequence(1, (8,)),
        TicketSequence(2),
        TicketSequence(3, (5, 6)),
    )


async def test_a_group_of_another_gateway_goes_on_from_its_tokens() -> None:
    """The second sequence has ended; each of the others is ahead of the client by another number of
    tokens."""
    walk = Walk(num_sequences=NUM)
    received = (
        Received(2, tuple(expected(1, 2))),
        Received(0, tuple(expected(2, 0))),
        Received(1, tuple(expected(MAX_TOKENS, 1)), FinishReason.LENGTH),
    )
    walk.output.replay(received)
    there = {0: tuple(expected(3, 0)), 2: tuple(expected(4, 2))}
    sequences = tuple(
        TicketSequence(index, tokens, (9, 10), len(PROMPT) + len(tokens) - 1)
        for index, tokens in there.items()
    )
    sampling, issuer = walk.request.sampling, ScriptedWorker("issuer")
    ticket = Ticket(
        "r1",
        7,
        5,
        "h",
        4,
        pool_id="pool",
        root_hash=ROOT,
        prompt_token_ids=PROMPT,
        sampling=sampling,
        sequences=sequences,
        num_cached_tokens=2,
    )
    resuming.adopt(walk.request, DetachedTicket(issuer, ticket))
    assert walk.request.is_computed
    assert walk.output.stats.num_cached_tokens == 2
    assert await walk.reserve()
    sending.admit(walk.request)
    assert {s.index: s.token_ids for s in walk.admitted.sequences} == there
    for index in (0, 2):
        step(walk, index, MAX_TOKENS - len(there[index]))
    assert walk.output.stats.usage().num_generated_tokens == NUM * MAX_TOKENS
    assert await tokens_of(walk) == {0: expected(MAX_TOKENS, 0)[2:], 2: expected(MAX_TOKENS, 2)[1:]}


async def test_a_resumed_call_goes_on_with_a_group() -> None:
    """The client has all of the first sequence, half of the second and nothing of the third; the
    fourth has ended since."""
    walk = Walk(num_sequences=4)
    await walk.until_decoding()
    step(walk, 0, MAX_TOKENS - 1)
    step(walk, 1, 3)
    step(walk, 3, MAX_TOKENS - 1)
    before = walk.output
    assert before.stats.prefilled
    before.stats.num_cached_tokens = 2
    received = (
        Received(0, tuple(expected(MAX_TOKENS, 0)), FinishReason.LENGTH),
        Received(1, tuple(expected(2, 1))),
    )
    for wrong in (
        (Received(1, tuple(expected(2, 1)), FinishReason.STOP),),
        (Received(2, tuple(expected(2, 1))),),
    ):
        with pytest.raises(DuplicateRequest):
            resuming.resume(walk.request, walk.call(wrong))
    with pytest.raises(DuplicateRequest):
        resuming.resume(walk.request, walk.call((), n=3))
    resuming.resume(walk.request, walk.call(received))
    walk.output = walk.request.output
    walk.output.stats.note_prefill(3)
    assert walk.output.stats.num_cached_tokens == 2
    for index in (1, 2):
        step(walk, index, MAX_TOKENS - len(walk.output.sequences[index].tokens))
    deltas = await deltas_of(walk)
    assert {index: [t for d in each for t in d.token_ids] for index, each in deltas.items()} == {
        1: expected(MAX_TOKENS, 1)[2:],
        2: expected(MAX_TOKENS, 2),
        3: expected(MAX_TOKENS, 3),
    }
    assert all(each[-1].finish_reason is FinishReason.LENGTH for each in deltas.values())
    with pytest.raises(DuplicateRequest):
        async for _ in before:
            pass


@pytest.mark.parametrize("is_parked", [False, True])
async def test_logprobs_that_no_gateway_kept_are_computed_again(is_parked: bool) -> None:
    """The request runs here, or another gateway's ticket is ahead of the client."""
    walk, issuer = Walk(), ScriptedWorker("issuer")
    walk.request.sampling = replace(walk.request.sampling, logprobs=1)
    walk.request.prompt_logprobs = 2
    received = (Received(0, tuple(expected(1))),)
    if is_parked:
        walk.output.replay(received)
        state = TicketSequence(0, tuple(expected(3)), (9, 10), len(PROMPT) + 2)
        ticket = Ticket(
            "r1",
            7,
            5,
            "h",
            4,
            pool_id="pool",
            root_hash=ROOT,
            prompt_token_ids=PROMPT,
            sampling=walk.request.sampling,
            sequences=(state,),
        )
        resuming.adopt(walk.request, DetachedTicket(issuer, ticket))
        assert issuer.sent == [Abort("r1", 7)]
    else:
        await walk.until_decoding()
        step(walk, 0, 2)
        resuming.resume(walk.request, walk.call(received))
    assert walk.request.status is RequestStatus.QUEUED
    again = await walk.until_prefilling()
    assert again.sequences[0].token_ids == tuple(expected(1))
    submit = walk.prefill.sent[-1]
    assert isinstance(submit, Submit)
    assert submit.prompt_logprobs is None
    resuming.resume(walk.request, walk.call(()))
    assert walk.request.unsent_prompt_logprobs == 2
    walk.request.close()
