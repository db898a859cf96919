"""Tells a request's record in whole sentences."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.worker_names import worker_name
from services.gateway.output.output import RequestStats
from services.gateway.request.events import (
    BlocksAwaited,
    Computed,
    Entered,
    Event,
    Holders,
    Moved,
    Phase,
    Placed,
    Preempted,
    SetBack,
    Slots,
    SlotsAwaited,
    WorkersAwaited,
)
from services.gateway.request.record import Record, Root

_WAITS = (Phase.WAITING, Phase.PREEMPTED, Phase.LOST)
_DOING = {
    Phase.HAND_OFF: "The hand-off to {worker} took {time}.",
    Phase.MOVING: "The move to {worker} took {time}.",
    Phase.DECODE: "{worker} decoded for {time}.",
}
_NOTABLE_S = 0.001


@dataclass(frozen=True, slots=True)
class Story:
    record: Record
    others: Sequence[Record]
    """The records that may be named beside it, the latest first."""
    tells_all: bool
    """Whether to name other requests and faults of workers, and to tell what was cached even if
    the client may not know."""

    def sentences(self) -> Iterator[str]:
        record, stats = self.record, self.record.stats
        came = f"Request {record.request_id} came at {clock(record.arrived_ms)}"
        if stats is None:
            yield f"{came} and was refused ({record.outcome}): {record.reason}."
            return
        sequences = f" and {record.num_sequences} sequences" if record.num_sequences > 1 else ""
        yield (
            f"{came}, with {count(stats.num_prompt_tokens, 'prompt token')}{sequences} for "
            f"{record.model}; {count(record.num_queued, 'request')} waited before it."
        )
        if record.num_forgotten:
            yield f"Its first {record.num_forgotten} events are forgotten."
        since_s, has_computed = 0.0, False
        for index, (at_s, event) in enumerate(record.events):
            later = (at for at, each in record.events[index + 1 :] if isinstance(each, Entered))
            lasted = duration(next(later, record.age_s) - at_s)
            if isinstance(event, Entered):
                worker = worker_name(event.worker_id)
                if event.phase is Phase.PREFILL:
                    if at_s - since_s >= _NOTABLE_S:
                        yield f"It waited {duration(at_s - since_s)} at {worker} until it began."
                    yield f"{worker} computed the prompt in {lasted}."
                elif event.phase not in _WAITS:
                    yield _DOING[event.phase].format(worker=worker or "another pool", time=lasted)
                since_s = at_s
            elif isinstance(event, Placed):
                yield f"It waited {duration(at_s - since_s)} in the gateway's queue."
                yield from placement(event)
                since_s = at_s
            elif isinstance(event, Computed):
                may_tell = self.tells_all or stats.reports_cached
                if may_tell and not has_computed:
                    yield self._prefix(event)
                has_computed = True
            else:
                yield self._sentence(event, record.time_ms(at_s))
        yield self._end(stats)

    def _sentence(self, event: Event, at_ms: int) -> str:
        match event:
            case SlotsAwaited(num_sequences, workers):
                slots = count(num_sequences, "decode slot")
                return f"It was the first in the queue, and waited for {slots}: {_slots(workers)}."
            case WorkersAwaited(reason):
                return f"No worker could take it: {reason}."
            case BlocksAwaited(worker_id, num_needed, num_available, holders):
                why = "an earlier request already waited for blocks"
                if num_needed:
                    needed = count(num_needed, "new block")
                    why = f"it needed {needed} and the pool had {num_available:,}"
                return (
                    f"At {clock(at_ms)} it had to wait for blocks at {worker_name(worker_id)}: "
                    f"{why}{self._held_by(holders)}."
                )
            case Preempted(worker_id, is_swapped, holders):
                kv = "was kept in the swap pool" if is_swapped else "is computed again"
                return (
                    f"At {clock(at_ms)} it was preempted at {worker_name(worker_id)}, because the "
                    "pool had no block left for an earlier request and this one was the last in "
                    f"order{self._held_by(holders)}. Its KV {kv}."
                )
            case Moved(source, target, cause):
                places = f"{worker_name(source)} to {worker_name(target)}"
                return f"At {clock(at_ms)} it moved from {places}, {cause}."
            case SetBack(reason):
                why = reason if self.tells_all else "it could not go on where it was"
                return f"At {clock(at_ms)} it went back to the queue: {why}."
        raise AssertionError(event)

    def _held_by(self, holders: Holders) -> str:
        if not holders:
            return ""
        if not self.tells_all:
            return "; other requests held the others"
        held = ", ".join(f"{name} ({count(number, 'block')})" for name, number in holders)
        return f"; most of the others were held by {held}"

    def _prefix(self, computed: Computed) -> str:
        placed = self.record.placed
        size = placed.block_size if placed else 0
        num_tokens, num_cached = computed.num_tokens, computed.num_cached
        if num_cached is None:
            return "All of its tokens were computed, cached or not: it asked for their results."
        if not size or num_tokens < size:
            return f"Nothing was cached: the prompt has fewer tokens than one block ({size})."
        text = f"The prefix cache had {num_cached} of {count(num_tokens, 'token')}"
        if num_cached >= min(num_tokens // size * size, num_tokens - 1):
            return f"{text}, all full blocks."
        return f"{text}. {self._miss(num_cached // size)}"

    def _miss(self, index: int) -> str:
        """Why the block of this index was not cached."""
        mine, key, block = self.record, self.record.block(index), f"block {index + 1}"
        earlier = [one for one in self.others if one.arrived_ms <= mine.computed_ms]
        alike = [one for one in earlier if key and one.block(index) == key and one.root]
        if same := [one for one in alike if one.root == mine.root]:
            return self._evicted(block, max(same, key=lambda one: one.ended_ms))
        if not earlier:
            return "This gateway remembers no prompt before it."
        if not alike:
            prompts = count(len(earlier), "prompt")
            return f"The tokens up to {block} were new: not in the {prompts} that came before."
        parts = zip(Root._fields, alike[0].root or (), mine.root or (), strict=True)
        differing = " and ".join(name.replace("_", " ") for name, a, b in parts if a != b)
        return (
            f"{alike[0].request_id} had the same tokens up to {block} at "
            f"{clock(alike[0].arrived_ms)}, but with another {differing}, so their blocks "
            "are not shared."
        )

    def _evicted(self, block: str, last: Record) -> str:
        """`last` is the last request that used the block."""
        used_ms, mine_ms = last.ended_ms, self.record.computed_ms
        if not last.outcome or max(used_ms, last.computed_ms) >= mine_ms:
            return f"{last.request_id} was computing {block} at the same time."
        between = [
            (one, self._num_new_blocks(one))
            for one in self.others
            if one.root and last.root and one.root.pool == last.root.pool
            if used_ms <= one.computed_ms <= mine_ms
        ]
        text = (
            f"{last.request_id} used {block} last, until {clock(used_ms)}; it was evicted between "
            f"then and {clock(mine_ms)}"
        )
        if not between:
            return f"{text}, for requests that this gateway does not remember."
        total = sum(number for _, number in between)
        most = sorted(between, key=lambda each: -each[1])[:2]
        names = ", ".join(f"{one.request_id} ({number})" for one, number in most)
        requests = count(len(between), "request")
        return f"{text}, when {requests} took {count(total, 'block')} of the pool, most: {names}."

    def _num_new_blocks(self, other: Record) -> int:
        stats, placed = other.stats, other.placed
        assert stats is not None
        assert placed is not None
        num_tokens = stats.num_prompt_tokens - stats.num_cached_tokens + stats.num_generated_tokens
        return -(-num_tokens // placed.block_size)

    def _end(self, stats: RequestStats) -> str:
        record = self.record
        metrics = record.metrics()
        end_ms, whole = record.ended_ms, duration(record.age_s)
        reason = f": {record.reason}" if record.reason else ""
        ended = f"It ended at {clock(end_ms)}, after {whole}, outcome {record.outcome}{reason}"
        state = ended if record.outcome else f"It has run for {whole}"
        times = {
            "queue": metrics.queue_ms,
            "prefill": metrics.prefill_ms,
            "hand-off": metrics.handoff_ms,
            "decode": metrics.decode_ms,
        }
        parts = ", ".join(f"{name} {duration(ms / 1000)}" for name, ms in times.items())
        return f"{state}: {count(stats.num_generated_tokens, 'token')} generated; {parts}."


def placement(placed: Placed, goes: str = "went", gets: str = "got") -> Iterator[str]:
    """Where a request goes, and what the alternatives cost."""
    chosen, *rest = (
        f"{worker_name(one.worker_id)} ({one.num_pending:,} tokens before it and "
        f"{one.num_to_compute:,} of its own, about {duration(one.duration_s)})"
        for one in placed.prefill
    )
    others = f", not to {' or '.join(rest)}" if rest else ""
    yield f"For the prefill it {goes} to {chosen}{others}."
    if placed.source_pool_id:
        yield f"A cached prefix was copied from {placed.source_pool_id} first."
    if placed.decode_id:
        slots = _slots(placed.decode)
        yield f"For the decode it {gets} slots at {worker_name(placed.decode_id)}: {slots}."


def _slots(workers: Slots) -> str:
    return ", ".join(
        f"{worker_name(worker_id)} had {free} of {slots} free" for worker_id, free, slots in workers
    )


def clock(unix_ms: int) -> str:
    """The local time of the gateway."""
    return f"{time.strftime('%H:%M:%S', time.localtime(unix_ms / 1000))}.{unix_ms % 1000:03d}"


def duration(seconds: float) -> str:
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def count(number: int, noun: str) -> str:
    amount = f"{number:,}" if number else "no"
    return f"{amount} {noun}{'' if number == 1 else 's'}"
