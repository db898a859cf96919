"""Groups that are preempted at the decode worker of a `WorkerPair`, and return by way of
prefill."""

from collections.abc import Sequence
from dataclasses import replace

from services.protocol.messages import Prefilled, Requeued, RequeueReason
from services.protocol.ticket import Ticket, TicketSequence

from .conftest import WorkerPair
from .fakes import FakeSession
from .runs import admit, outputs, prefill


async def running(pair: WorkerPair, wanted: Ticket, num_steps: int) -> None:
    """A group at the decode worker, whose gate closes after so many steps."""
    pair.decode_model.pause_after = num_steps
    admit(pair, await prefill(pair, wanted))
    await pair.until(lambda: pair.decode_model.num_begun == num_steps + 1)


async def unstarted(pair: WorkerPair, wanted: Ticket) -> None:
    """A group that is claimed, before its first step: its shared blocks still are shared."""
    pair.session.reads = False
    admit(pair, await prefill(pair, wanted))
    await pair.until(lambda: "h-r1" in pair.decode.role.running)


async def preempt(pair: WorkerPair, holder_id: str = "h-r1") -> Ticket:
    """Preempt a group; returns the ticket that its gateway gets."""
    num_seen = len(pair.session.of(Requeued))
    pair.decode.role.preempt([holder_id])
    pair.decode_model.gate.set()
    await pair.until(lambda: len(pair.session.of(Requeued)) > num_seen)
    pair.session.reads = True
    requeued = pair.session.of(Requeued)[-1]
    assert requeued.reason is RequeueReason.PREEMPTED
    returned: Ticket = requeued.ticket
    return returned


async def swapped_out(pair: WorkerPair, wanted: Ticket, num_steps: int = 6) -> Ticket:
    await running(pair, wanted, num_steps)
    back = await preempt(pair)
    assert back.swapped is not None
    await pair.until_empty()
    return back


async def come_back(pair: WorkerPair, back: Ticket) -> Ticket:
    """Send a ticket to prefill under a new holder; returns the issued ticket."""
    session = FakeSession()
    pair.prefill.role.submit(session, replace(back, attempt=2, holder_id="h-again"))
    await pair.until(lambda: bool(session.events))
    (event,) = session.of(Prefilled)
    issued: Ticket = event.ticket
    return issued


async def finish(pair: WorkerPair, issued: Ticket) -> dict[int, tuple[int, ...]]:
    """Run to the end; returns the tokens of all remaining sequences, and checks that nothing is
    left."""
    admit(pair, issued)
    await pair.until(lambda: ended_again(pair) == {state.index for state in issued.sequences})
    await pair.until_empty()
    await pair.until_colder_is_empty()
    drawn = [output for output in outputs(pair.session, "r1") if output.attempt == 2]
    return {
        state.index: (
            *state.token_ids,
            *(output.token_ids[0] for output in drawn if output.index == state.index),
        )
        for state in issued.sequences
    }


def ended_again(pair: WorkerPair) -> set[int]:
    """The sequences that have ended since the return."""
    drawn = outputs(pair.session, "r1")
    return {output.index for output in drawn if output.finish_reason and output.attempt == 2}


def evict_all(pair: WorkerPair) -> None:
    """Evict all cached blocks of the pool."""
    blocks = pair.store.ledger("pool").blocks
    for block_id in list(blocks.cached):
        blocks.retract(block_id, blocks.hash_of[block_id])
        pair.arena.wipe(block_id)


def tables(states: Sequence[TicketSequence]) -> list[tuple[int, ...]]:
    return [state.block_ids for state in states]
