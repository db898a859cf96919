"""What the gateway knows of one worker: where it is, how loaded, and what runs there for us."""

from collections.abc import Callable
from dataclasses import dataclass

from blockstore.records import PrefixHash
from blockstore.registry import Member
from services.gateway.workers.messages import Abort, Command, LoadReport


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """What a prefill worker computes for one request: `num_tokens` that are nowhere yet, among them
    the full blocks of `hashes`."""

    num_tokens: int
    hashes: tuple[PrefixHash, ...] = ()


class Worker:
    """One prefill or decode worker. `send` drops commands while the stream is down: whoever had
    something there is told that the worker is lost."""

    def __init__(self, member: Member, send: Callable[[Command], None]) -> None:
        self.member = member
        self.send = send
        self.connected = False
        self.draining = member.state == "draining"
        self.refused = 0
        """So many slots were refused to somebody, and nothing has got free since; 0: none were."""
        self.unresponsive = False
        """It did not answer a reservation in time, and has not since: it answers in order."""
        self.stalled = False
        """It waits for its block store, and begins nothing until that answers."""
        self.num_taken = 0
        """Decode slots that requests of this gateway have, or ask for, at this decode worker."""
        self.prefill_loads: dict[str, PrefillLoad] = {}
        """By request: what this prefill worker has still to compute for us."""
        self._load = member.load
        self._taken_at_report = 0

    def __repr__(self) -> str:
        return f"<{self.id}>"

    @property
    def id(self) -> str:
        return self.member.member_id

    @property
    def usable(self) -> bool:
        return self.connected and not self.draining

    @property
    def num_running(self) -> int:
        """Sequences of all gateways at this decode worker, as last reported."""
        return self._load.num_running

    @property
    def num_slots(self) -> int:
        """Most sequences that this decode worker runs."""
        return self.member.max_num_seqs

    @property
    def num_free_slots(self) -> int:
        """As last reported, less what we have taken since. An estimate for choosing: the worker
        itself grants or refuses."""
        return self._load.num_free_slots - (self.num_taken - self._taken_at_report)

    @property
    def num_pending_tokens(self) -> int:
        """Prompt tokens that this prefill worker has still to compute: as last reported, which
        counts other gateways' too, or as we know, which is newer."""
        ours = sum(prefill_load.num_tokens for prefill_load in self.prefill_loads.values())
        return max(self._load.num_pending_tokens, ours)

    def num_blocks_under_way(self, hashes: tuple[PrefixHash, ...]) -> int:
        """How many leading `hashes` this prefill worker is computing for somebody right now."""
        return max(
            (_common(prefill_load.hashes, hashes) for prefill_load in self.prefill_loads.values()),
            default=0,
        )

    def is_open(self, num_sequences: int = 1) -> bool:
        """Whether it makes sense to ask for so many slots."""
        refused = self.refused and num_sequences >= self.refused
        can = self.usable and not self.unresponsive and num_sequences <= self.num_slots
        return can and not refused

    def report(self, report: LoadReport) -> None:
        self._load = report.load
        self.stalled = report.stalled
        self._taken_at_report = self.num_taken
        self.draining = self.draining or report.draining
        if report.load.num_free_slots >= self.refused:
            self.forget_refusals()

    def refuse(self, num_sequences: int) -> None:
        """It has just said that it has not so many slots."""
        self.refused = min(self.refused or num_sequences, num_sequences)

    def forget_refusals(self) -> None:
        self.refused = 0

    def abort(self, request_id: str, attempt: int, index: int | None = None) -> None:
        """End a request there, or one sequence of it."""
        self.send(Abort(request_id, attempt, index))


def _common(a: tuple[PrefixHash, ...], b: tuple[PrefixHash, ...]) -> int:
    """Length of the common beginning. Hashes are chained: if two are equal, so is all before, and
    a binary search finds the last equal pair."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
