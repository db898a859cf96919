"""Messages that are ready together go together on a stream."""

import asyncio

from quire.v1 import decode_pb2
from services.runtime.rpc.message_batching import MAX_BATCH_BYTES, Outbox, pack_batch, unpack_batch


def _reserve(name: str) -> decode_pb2.DecodeConnectRequest:
    return decode_pb2.DecodeConnectRequest(reserve=decode_pb2.Reserve(request_id=name))


async def test_queued_messages_go_together_and_later_ones_next() -> None:
    outbox = Outbox[str](len)
    for one in ("a", "b", "c"):
        outbox.put(one)
    assert await outbox.take() == ["a", "b", "c"]
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.put("d")
    outbox.put("e")
    assert await taking == ["d", "e"]


async def test_together_they_do_not_get_too_large() -> None:
    """A message that is too large goes alone, and none is left out."""
    part = MAX_BATCH_BYTES // 16
    outbox = Outbox[int](lambda size: size)
    for size in (6 * part, 10 * part, 1, 40 * part, 15 * part, part):
        outbox.put(size)
    outbox.close()
    taken = []
    while together := await outbox.take():
        taken.append(together)
    assert taken == [[6 * part, 10 * part], [1], [40 * part], [15 * part, part]]


async def test_a_closed_outbox_gives_what_was_put_and_then_nothing() -> None:
    outbox = Outbox[str](len)
    outbox.put("a")
    outbox.close()
    outbox.put("b")
    assert await outbox.take() == ["a"]
    assert await outbox.take() == []
    outbox.close(drop=True)
    assert await outbox.take() == []


async def test_senders_of_dropped_messages_wait_no_longer() -> None:
    outbox = Outbox[str](len)
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.put("a")
    outbox.close(drop=True)
    assert await taking == []
    assert len(outbox) == 0


def test_batched_messages_come_in_order() -> None:
    names = ["a", "b", "c"]
    together = pack_batch([_reserve(name) for name in names])
    arrived = decode_pb2.DecodeConnectRequest.FromString(together.SerializeToString())
    assert [one.reserve.request_id for one in unpack_batch(arrived)] == names


def test_a_lone_message_is_unchanged() -> None:
    assert pack_batch([_reserve("a")]) == _reserve("a")


def test_a_batch_inside_a_batch_is_ignored() -> None:
    """Nested batches of any depth cause no work."""
    inner = pack_batch([_reserve("b"), _reserve("c")])
    together = pack_batch([_reserve("a"), inner])
    assert [one.reserve.request_id for one in unpack_batch(together)] == ["a", "b"]
