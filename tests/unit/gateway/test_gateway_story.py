"""The sentences about a request, for each kind of event, and what they keep from other clients."""

from dataclasses import replace

import pytest

from services.gateway.access.caller import EVERYONE, Caller
from services.gateway.output.output import RequestStats
from services.gateway.request.events import (
    BlocksAwaited,
    Computed,
    Entered,
    Event,
    Moved,
    Phase,
    Placed,
    Preempted,
    PrefillOption,
    SetBack,
    SlotsAwaited,
    WorkersAwaited,
)
from services.gateway.request.record import Record, Root
from services.gateway.request.story import Story

ROOT = Root(1, "", "fingerprint", "pool")
PLACED = Placed(
    "pool",
    "fingerprint",
    16,
    (PrefillOption("prefill-1", 0, 40, 0.08), PrefillOption("prefill-2", 100, 40, 0.3)),
    "decode-1",
    (("decode-1", 3, 4), ("decode-2", 1, 4)),
)
HOLDERS = (("r7", 30), ("r9", 1))
WAITED = BlocksAwaited("prefill-1", 8, 2, HOLDERS)
PREEMPTED = Preempted("decode-1", False, HOLDERS)


def record(
    *events: Event,
    name: str = "r1",
    at_s: float = 0.0,
    blocks: str = "abc",
    root: Root = ROOT,
    outcome: str = "length",
) -> Record:
    """A request that came `at_s` seconds after the first one, with an event each tenth of a second.
    `blocks`: a letter for the hash of each block."""
    return Record(
        name,
        Caller(host="host"),
        RequestStats(50, 0.0, num_generated_tokens=6),
        model="toy",
        cache_salt=root.cache_salt,
        adapter=root.adapter,
        hashes="".join(letter * 8 for letter in blocks).encode(),
        outcome=outcome,
        arrived_ms=round(at_s * 1000),
        events=[(number / 10, _in_pool(root, event)) for number, event in enumerate(events)],
        ended_s=len(events) / 10,
    )


def _in_pool(root: Root, event: Event) -> Event:
    if not isinstance(event, Placed):
        return event
    return replace(event, pool_id=root.pool, fingerprint=root.fingerprint)


def computed(num_cached: int = 0, at_s: float = 0.0, **fields: object) -> Record:
    one = record(PLACED, Computed(50, num_cached), at_s=at_s, **fields)  # type: ignore[arg-type]
    assert one.stats is not None
    one.stats.num_cached_tokens = num_cached
    return one


def told(one: Record, *others: Record, tells_all: bool = True) -> str:
    return "\n".join(Story(one, others, tells_all=tells_all).sentences())


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (
            SlotsAwaited(2, (("decode-1", 0, 4), ("decode-2", 1, 4))),
            "It was the first in the queue, and waited for 2 decode slots: decode-1 had 0 of 4 "
            "free, decode-2 had 1 of 4 free.",
        ),
        (WorkersAwaited("no worker is there"), "No worker could take it: no worker is there."),
        (
            PLACED,
            "For the prefill it went to prefill-1 (0 tokens before it and 40 of its own, about "
            "80 ms), not to prefill-2 (100 tokens before it and 40 of its own, about 300 ms).\n"
            "For the decode it got slots at decode-1: decode-1 had 3 of 4 free, decode-2 had 1 of "
            "4 free.",
        ),
        (
            replace(PLACED, prefill=PLACED.prefill[:1], decode_id="", source_pool_id="other"),
            "about 80 ms).\nA cached prefix was copied from other first.\nIt ended",
        ),
        (
            WAITED,
            "it had to wait for blocks at prefill-1: it needed 8 new blocks and the pool had 2; "
            "most of the others were held by r7 (30 blocks), r9 (1 block).",
        ),
        (BlocksAwaited("p", 0, 0, ()), "at p: an earlier request already waited for blocks."),
        (
            PREEMPTED,
            "it was preempted at decode-1, because the pool had no block left for an earlier "
            "request and this one was the last in order; most of the others were held by r7 (30 "
            "blocks), r9 (1 block). Its KV is computed again.",
        ),
        (Preempted("decode-1", True, ()), "in order. Its KV was kept in the swap pool."),
        (
            Moved("decode-1", "decode-2", "because decode-1 drains"),
            "it moved from decode-1 to decode-2, because decode-1 drains.",
        ),
        (SetBack("prefill-1 was lost"), "it went back to the queue: prefill-1 was lost."),
        (Entered(Phase.PREFILL, "p"), "p computed the prompt in 100 ms."),
        (Entered(Phase.HAND_OFF, "decode-1"), "The hand-off to decode-1 took 100 ms."),
        (Entered(Phase.MOVING, "decode-2"), "The move to decode-2 took 100 ms."),
        (Entered(Phase.DECODE, "decode-1"), "decode-1 decoded for 100 ms."),
    ],
)
def test_an_event_is_told_in_whole_sentences(event: Event, sentence: str) -> None:
    assert sentence in told(record(event))


def test_the_waits_are_told_with_their_times() -> None:
    events = (Entered(Phase.WAITING), PLACED, WAITED, Entered(Phase.PREFILL, "prefill-1"))
    text = told(record(*events))
    assert "It waited 100 ms in the gateway's queue." in text
    assert "It waited 200 ms at prefill-1 until it began." in text


def test_the_beginning_and_the_end_are_told() -> None:
    one = record(Entered(Phase.WAITING))
    one.num_queued, one.num_forgotten = 2, 7
    first, second, last = told(one).splitlines()
    assert first.endswith("with 50 prompt tokens for toy; 2 requests waited before it.")
    assert second == "Its first 7 events are forgotten."
    assert "after 100 ms, outcome length: 6 tokens generated; queue " in last
    failed = replace(one, outcome="no_worker", reason="all are gone")
    assert "outcome no_worker: all are gone: 6 tokens" in told(failed)
    assert "It has run for 100 ms: 6 tokens" in told(replace(one, outcome=""))


def test_a_refused_request_has_its_reason() -> None:
    refused = Record("r1", EVERYONE, outcome="queue_full", reason="1024 requests wait")
    assert told(refused).endswith("and was refused (queue_full): 1024 requests wait.")


@pytest.mark.parametrize(
    ("one", "others", "sentence"),
    [
        (computed(48), [], "The prefix cache had 48 of 50 tokens, all full blocks."),
        (
            computed(16),
            [computed(blocks="xyz", name="r0")],
            "had 16 of 50 tokens. The tokens up to block 2 were new: not in the 1 prompt that "
            "came before.",
        ),
        (
            computed(at_s=60.0),
            [computed(name="r0", root=Root(2, "", "fingerprint", "pool"))],
            "but with another cache salt, so their blocks are not shared.",
        ),
        (
            computed(at_s=60.0),
            [computed(name="r0", root=Root(1, "lora", "fingerprint", "other"))],
            "r0 had the same tokens up to block 1",
        ),
        (
            computed(at_s=60.0),
            [computed(name="r0", root=Root(1, "lora", "fingerprint", "other"))],
            "but with another adapter and pool, so",
        ),
        (
            computed(16, at_s=60.0),
            [
                computed(name="r0"),
                computed(48, name="r2", at_s=30.0, blocks="xyz"),
                computed(name="r3", at_s=31.0, blocks="uvw"),
            ],
            "when 2 requests took 5 blocks of the pool, most: r3 (4), r2 (1).",
        ),
        (computed(at_s=60.0), [computed(name="r0")], "that this gateway does not remember."),
        (
            computed(),
            [computed(name="r0", outcome="")],
            "r0 was computing block 1 at the same time.",
        ),
        (
            computed(),
            [computed(name="r0", at_s=9.0)],
            "This gateway remembers no prompt before it.",
        ),
    ],
    ids=[
        *("all cached", "never seen", "another salt", "named", "another adapter", "evicted"),
        *("evicted for unknown ones", "at the same time", "only later"),
    ],
)
def test_a_miss_has_its_cause(one: Record, others: list[Record], sentence: str) -> None:
    assert sentence in told(one, *others)


def test_a_prompt_shorter_than_a_block_is_told() -> None:
    assert "fewer tokens than one block (16)" in told(record(PLACED, Computed(9, 0)))


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "sentence"),
    [
        (48, 47, "The prefix cache had 47 of 48 tokens, all full blocks."),
        (48, 32, "had 32 of 48 tokens. This gateway remembers no prompt before it."),
        (48, None, "All of its tokens were computed, cached or not: it asked for their results."),
    ],
)
def test_full_blocks_end_before_the_last_token(
    num_tokens: int, num_cached: int | None, sentence: str
) -> None:
    assert sentence in told(record(PLACED, Computed(num_tokens, num_cached)))


def test_a_client_learns_nothing_of_others() -> None:
    """Neither who holds blocks, nor what was cached, nor which worker failed."""
    one = record(PLACED, WAITED, Computed(50, 16), PREEMPTED, SetBack("decode-1 was lost"))
    assert one.stats is not None
    one.stats.reports_cached = False
    text = told(one, tells_all=False)
    assert "r7" not in text
    assert "; other requests held the others." in text
    assert "cache" not in text
    assert "was lost" not in text
    one.stats.reports_cached = True
    assert "The prefix cache had 16 of 50 tokens." in told(one, tells_all=False)
