"""Groups that give way at the decode worker of a `Bench`, and come back by way of prefill."""

from collections.abc import Sequence
from dataclasses import replace

from services.engine.batch import Draw
from services.protocol.ticket import Ticket, TicketSequence
from services.worker.events import Prefilled, Requeued, RequeueReason

from .conftest import Bench
from .fakes import GREEDY, PROMPT, SAMPLED, FakeSession, expected, ticket
from .groups import admit
from .runs import outputs, prefill

MAX_TOKENS = 16


def asked(n: int, greedy: bool = False, stop: Sequence[int] = ()) -> Ticket:
    sampling = GREEDY if greedy else SAMPLED
    return ticket(
        "r1",
        PROMPT,
        sampling=replace(sampling, max_tokens=MAX_TOKENS, stop_token_ids=tuple(stop)),
        sequences=tuple(TicketSequence(index) for index in range(n)),
    )


def right(index: int, num_tokens: int = MAX_TOKENS) -> tuple[int, ...]:
    return tuple(expected(PROMPT, num_tokens, Draw(SAMPLED, index)))


async def running(bench: Bench, wanted: Ticket, num_steps: int) -> None:
    """At the decode worker, whose gate is closed after so many steps."""
    bench.decode_model.pause_after = num_steps
    admit(bench, await prefill(bench, wanted))
    await bench.until(lambda: bench.decode_model.num_begun == num_steps + 1)


async def unstarted(bench: Bench, wanted: Ticket) -> None:
    """Claimed, and before its first step: whatever it shares is still shared."""
    bench.session.reads = False
    admit(bench, await prefill(bench, wanted))
    await bench.until(lambda: "h-r1" in bench.decode._running)


async def give_way(bench: Bench, holder_id: str = "h-r1") -> Ticket:
    """What its gateway gets back."""
    num_seen = len(bench.session.of(Requeued))
    bench.decode._on_demands([holder_id])
    bench.decode_model.gate.set()
    await bench.until(lambda: len(bench.session.of(Requeued)) > num_seen)
    bench.session.reads = True
    requeued: Requeued = bench.session.of(Requeued)[-1]
    assert requeued.reason is RequeueReason.PREEMPTED
    return requeued.ticket


async def swapped_out(bench: Bench, wanted: Ticket, num_steps: int = 6) -> Ticket:
    await running(bench, wanted, num_steps)
    back = await give_way(bench)
    assert back.swapped is not None
    await bench.until_empty()
    return back


async def come_back(bench: Bench, back: Ticket) -> Ticket:
    """Through prefill, under a new holder; the ticket that it issues."""
    session = FakeSession()
    bench.prefill.submit(session, replace(back, attempt=2, holder_id="h-again"))
    await bench.until(lambda: bool(session.events))
    (event,) = session.of(Prefilled)
    issued: Ticket = event.ticket
    return issued


async def finish(bench: Bench, issued: Ticket) -> dict[int, tuple[int, ...]]:
    """The tokens of all that went on, to their ends; and nothing is left."""
    admit(bench, issued)
    await bench.until(lambda: ended_again(bench) == {state.index for state in issued.sequences})
    await bench.until_empty()
    await bench.until_colder_is_empty()
    drawn = [output for output in outputs(bench.session, "r1") if output.attempt == 2]
    return {
        state.index: (
            *state.token_ids,
            *(output.token_id for output in drawn if output.index == state.index),
        )
        for state in issued.sequences
    }


def ended_again(bench: Bench) -> set[int]:
    """Since they came back."""
    drawn = outputs(bench.session, "r1")
    return {output.index for output in drawn if output.finish and output.attempt == 2}


def evict_all(bench: Bench) -> None:
    """What the pool has cached is gone."""
    blocks = bench.store.ledger("pool").blocks
    for block_id in list(blocks.cached):
        blocks.retract(block_id, blocks.hash_of[block_id])
        bench.arena.wipe(block_id)


def tables(states: Sequence[TicketSequence]) -> list[tuple[int, ...]]:
    return [state.block_ids for state in states]
