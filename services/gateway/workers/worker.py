"""The gateway's view of one worker: its load, its state, and what this gateway runs there."""

from collections.abc import Callable
from dataclasses import dataclass

from blockstore.records import PrefixHash
from blockstore.registry import Member
from services.protocol.messages import Abort, Command, LoadReport


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """The tokens that a prefill worker computes for one request: `num_tokens` that no cache has,
    among them the full blocks whose prefix hashes are `hashes`."""

    num_tokens: int
    hashes: tuple[PrefixHash, ...] = ()


class Worker:
    """One prefill or decode worker. `send` drops commands while the stream is down: every request
    with something at the worker learns that the worker was lost."""

    def __init__(self, member: Member, send: Callable[[Command], None]) -> None:
        self.member = member
        self.send = send
        self.connected = False
        self.draining = member.state == "draining"
        self.refused = 0
        """The smallest number of decode slots that the worker has refused since slots last became
        free; 0: it refused none."""
        self.unresponsive = False
        """Whether the worker missed the time limit for a reservation and has answered none since.
        It answers reservations in order, so a new one would wait, too."""
        self.num_taken_slots = 0
        """Decode slots that requests of this gateway have or ask for here."""
        self.prefill_loads: dict[str, PrefillLoad] = {}
        """The work of this prefill worker for this gateway that is not done, by request id."""
        self.prefill_ns_per_token = 0
        """The time of a prompt's token here, as its last ticket says; 0: not known."""
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
        """Sequences that run at this decode worker for all gateways, as last reported."""
        return self._load.num_running

    @property
    def num_slots(self) -> int:
        """The most sequences that this decode worker runs at a time."""
        return self.member.max_num_seqs

    @property
    def num_free_slots(self) -> int:
        """Free decode slots as last reported, less those that this gateway has taken since. An
        estimate for the router; the worker itself grants or refuses a reservation."""
        return self._load.num_free_slots - (self.num_taken_slots - self._taken_at_report)

    @property
    def num_pending_tokens(self) -> int:
        """Prompt tokens that this prefill worker has still to compute: the larger of its last
        report, which covers all gateways, and this gateway's own count, which is newer."""
        ours = sum(prefill_load.num_tokens for prefill_load in self.prefill_loads.values())
        return max(self._load.num_pending_tokens, ours)

    def num_blocks_in_progress(self, hashes: tuple[PrefixHash, ...]) -> int:
        """How many of the first `hashes` this prefill worker is computing for another request of
        this gateway."""
        return max(
            (_common(prefill_load.hashes, hashes) for prefill_load in self.prefill_loads.values()),
            default=0,
        )

    def is_open(self, num_sequences: int = 1) -> bool:
        """Whether the worker may grant `num_sequences` decode slots, as far as this gateway
        knows."""
        refused = self.refused and num_sequences >= self.refused
        can = self.usable and not self.unresponsive and num_sequences <= self.num_slots
        return can and not refused

    def report(self, report: LoadReport) -> None:
        self._load = report.load
        self._taken_at_report = self.num_taken_slots
        self.draining = self.draining or report.draining
        if report.load.num_free_slots >= self.refused:
            self.forget_refusals()

    def refuse(self, num_sequences: int) -> None:
        """Note that the worker has just refused `num_sequences` decode slots."""
        self.refused = min(self.refused or num_sequences, num_sequences)

    def forget_refusals(self) -> None:
        self.refused = 0

    def abort(self, request_id: str, attempt: int, index: int | None = None) -> None:
        """Abort a request at this worker, or one sequence of it."""
        self.send(Abort(request_id, attempt, index))


def _common(a: tuple[PrefixHash, ...], b: tuple[PrefixHash, ...]) -> int:
    """The length of the common prefix of two lists of hashes. Hashes are chained, so two equal ones
    mean that all before them are equal, and a binary search finds the last equal pair."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
