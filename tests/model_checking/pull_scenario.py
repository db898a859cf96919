"""The explorer's scenario of a pull between two pools of two blocks each: the mover's steps as in
`services.mover.pull`, with two real ledgers, and the memory of both pools.

    mover    claim -> allocate -> stamps -> blocks land, in any order -> stamps -> complete, commit
             -> detach -> release
    source   a lease may end: then its block manager reaps the pin, and a worker of the source
             gets the blocks, stamps them, and writes them, block by block
    target   a mover that died is reaped once it is quiet; a worker of the target gets the blocks
    faults   the pull is given up at any step, the lease ends, the mover is killed

A stamp is (owner, content); a block's KV is the name of its last written content. No worker ever
reads other KV than the stamp says, and nothing lands in a block of another owner.

See ADR 162.
"""

from collections.abc import Iterator
from typing import NamedTuple

from blockstore.memory.ledger import Ledger
from blockstore.records import PoolSpec
from tests.model_checking.ledgers import Ledgers, Violation
from tests.model_checking.scenario import Label

FULL = b"f" * 16
CONTENTS = ("full", "tail")
"""The contents of the request's two blocks; the first one is full, and goes into the prefix
index."""

Stamp = tuple[str, str]
"""A stamp: its owner, and the content of a finished block; "" while it is not finished."""


class PullFaults(NamedTuple):
    """How often each fault may happen."""

    give_ups: int = 1
    lease_ends: int = 1
    kills: int = 1


class Memory(NamedTuple):
    stamps: tuple[Stamp, Stamp]
    kv: tuple[str, str]

    def stamped(self, block: int, stamp: Stamp) -> "Memory":
        return self._replace(stamps=_with(self.stamps, block, stamp))

    def written(self, block: int, content: str) -> "Memory":
        return self._replace(kv=_with(self.kv, block, content))


class PullState(NamedTuple):
    """`before`, `after`: the stamps read so far. `landed`: blocks of the running read.
    `source_step`, `target_step`: the progress of the other worker of each pool."""

    a: int
    b: int
    source: Memory
    target: Memory
    phase: str = "claim"
    pinned: bool = False
    given_up: bool = False
    before: tuple[Stamp, ...] = ()
    after: tuple[Stamp, ...] = ()
    landed: frozenset[int] = frozenset()
    source_step: int = 0
    target_step: int = 0
    left: PullFaults = PullFaults()


class PullStep(NamedTuple):
    label: Label
    state: PullState
    fault: bool = False


OVER = ("pulled", "failed", "reaped")
LANDING = ("blocks", "killed while blocks land")


class PullScenario:
    """`left_out`: the step that a wrong mover leaves out ("compares": the second stamps; "waits":
    the end of a read) or a wrong block manager ("quiet")."""

    def __init__(self, faults: PullFaults, left_out: str = "") -> None:
        spec = PoolSpec("pool", "m", "f", num_blocks=2, block_size=4, block_bytes=1)
        ledger = Ledger(spec, lambda: 0.0)
        for worker in ("worker", "mover"):
            ledger.register_worker(spec, worker)
        self.ledgers = Ledgers(ledger)
        self._faults = faults
        self._compares, self._waits, self._quiet = (
            left_out != name for name in ("compares", "waits", "quiet")
        )

    def start(self) -> PullState:
        a = self.ledgers.first
        for name, *arguments in (
            ("allocate", "h", "worker", 0, (FULL,), 2),
            ("commit", "h", 1, ((0, FULL),)),
            ("detach", "h", 1),
        ):
            a, _ = self.ledgers.after(a, (str(name), tuple(arguments)))
        source = Memory((("h", "full"), ("h", "")), CONTENTS)
        empty = Memory((("", ""), ("", "")), ("", ""))
        return PullState(a, self.ledgers.first, source, empty, left=self._faults)

    def finished(self, state: PullState) -> bool:
        return state.phase in OVER and not state.pinned

    def served(self, state: PullState) -> bool:
        return state.phase == "pulled"

    def check(self, state: PullState) -> None:
        """Laws 2 and 6: a block that the index or a ticket names has the content that they say. Law
        5: nothing lands in a block of another owner."""
        index = self.ledgers[state.b].blocks.index
        for block in index.values():
            if state.target.stamps[block] == ("h", "full") and state.target.kv[block] != "full":
                raise Violation(f"block {block} is in the index with {state.target.kv[block]}")
        if state.phase == "pulled" and state.target_step == 0 and state.target.kv != CONTENTS:
            raise Violation(f"the ticket has {state.target.kv}")
        for block in range(max(0, state.target_step - 2)):
            if state.target.kv[block] != "theirs":
                raise Violation(f"{state.target.kv[block]} landed in a block of another holder")

    def steps(self, state: PullState) -> Iterator[PullStep]:
        if state.phase not in OVER and not state.phase.startswith("killed"):
            yield from self._mover(state)
            yield from self._faulty(state)
        yield from self._lands(state)
        yield from self._reaps(state)
        yield from self._others(state)

    # The mover

    def _mover(self, state: PullState) -> Iterator[PullStep]:
        if state.given_up and state.phase not in ("blocks", "release"):
            yield PullStep("the mover fails", self._fail(state))
            return
        if state.given_up and state.phase == "blocks":
            if state.pinned:
                yield PullStep("the mover unpins", self._unpin(state))
            elif len(state.landed) == 2 or not self._waits:
                yield PullStep("the mover fails", self._fail(state))
            return
        if (step := getattr(self, f"_{state.phase}", None)) is not None:
            yield step(state)

    def _claim(self, state: PullState) -> PullStep:
        a, answer = self.ledgers.after(state.a, ("claim", ("h", 2, "mover", (0, 1))))
        if answer.error:
            return PullStep("the claim is refused", state._replace(phase="failed"))
        return PullStep("the mover claims", state._replace(a=a, phase="allocate", pinned=True))

    def _allocate(self, state: PullState) -> PullStep:
        b, answer = self.ledgers.after(state.b, ("allocate", ("h", "mover", 0, (FULL,), 2)))
        if answer.error:
            b, _ = self.ledgers.after(b, ("withdraw", ("h",)))
            failed = self._unpin(state._replace(b=b, phase="failed"))
            return PullStep("the mover finds no room", failed)
        target = state.target.stamped(0, ("h", "")).stamped(1, ("h", ""))
        return PullStep("the mover allocates", state._replace(b=b, target=target, phase="first"))

    def _first(self, state: PullState) -> PullStep:
        """The first stamps are read before the blocks, one after the other."""
        before = (*state.before, state.source.stamps[len(state.before)])
        state = state._replace(before=before)
        if len(before) < 2:
            return PullStep("the mover reads a stamp", state)
        if before != (("h", "full"), ("h", "")):
            return PullStep("the stamps are wrong", self._fail(state))
        return PullStep("the mover reads blocks", state._replace(phase="blocks"))

    def _blocks(self, state: PullState) -> PullStep:
        if len(state.landed) < 2:
            return PullStep("the mover waits", state)
        return PullStep("the read is over", state._replace(phase="second"))

    def _second(self, state: PullState) -> PullStep:
        after = (*state.after, state.source.stamps[len(state.after)])
        state = state._replace(after=after)
        if len(after) < 2:
            return PullStep("the mover reads a stamp again", state)
        if self._compares and after != state.before:
            return PullStep("the stamps have changed", self._fail(state))
        target = state.target.stamped(0, ("h", "full"))
        return PullStep("the mover completes", state._replace(target=target, phase="commit"))

    def _commit(self, state: PullState) -> PullStep:
        b, _ = self.ledgers.after(state.b, ("commit", ("h", 1, ((0, FULL),))))
        return PullStep("the mover commits", state._replace(b=b, phase="detach"))

    def _detach(self, state: PullState) -> PullStep:
        b, _ = self.ledgers.after(state.b, ("detach", ("h", 1)))
        return PullStep("the mover detaches", state._replace(b=b, phase="release"))

    def _release(self, state: PullState) -> PullStep:
        return PullStep("the mover releases", self._unpin(state)._replace(phase="pulled"))

    def _unpin(self, state: PullState) -> PullState:
        """A pin that was reaped is stale, which is no error."""
        a, _ = self.ledgers.after(state.a, ("release", ("h", 3)))
        return state._replace(a=a, pinned=False)

    def _fail(self, state: PullState) -> PullState:
        b = state.b
        if state.phase not in ("claim", "allocate"):
            b, _ = self.ledgers.after(b, ("release", ("h", 1)))
        state = self._unpin(state) if state.pinned else state
        return state._replace(b=b, phase="failed")

    # Faults

    def _faulty(self, state: PullState) -> Iterator[PullStep]:
        left = state.left
        if left.give_ups and not state.given_up:
            given_up = state._replace(given_up=True, left=left._replace(give_ups=0))
            yield PullStep("the gateway gives up", given_up, True)
        if left.lease_ends and state.pinned:
            a, _ = self.ledgers.after(state.a, ("reap", ("mover",)))
            yield PullStep(
                "its lease ends", state._replace(a=a, left=left._replace(lease_ends=0)), True
            )
        if left.kills:
            phase = "killed while blocks land" if state.phase == "blocks" else "killed"
            killed = state._replace(phase=phase, left=left._replace(kills=0))
            yield PullStep("the mover is killed", killed, True)

    def _lands(self, state: PullState) -> Iterator[PullStep]:
        """A block of the running read lands: also of a read that was given up, and until a killed
        mover has exited."""
        is_wrong = state.phase == "failed" and not self._waits
        is_wrong = is_wrong or (state.phase == "reaped" and not self._quiet)
        if state.phase not in LANDING and not (is_wrong and len(state.before) == 2):
            return
        for block in {0, 1} - state.landed:
            target = state.target.written(block, state.source.kv[block])
            landed = state.landed | {block}
            yield PullStep(("a block lands", block), state._replace(target=target, landed=landed))

    def _reaps(self, state: PullState) -> Iterator[PullStep]:
        """Both block managers: the target's waits until the process has exited."""
        if state.phase == "killed while blocks land":
            yield PullStep("its process exits", state._replace(phase="killed"))
        if state.phase == "killed" or (
            not self._quiet and state.phase == "killed while blocks land"
        ):
            b, _ = self.ledgers.after(state.b, ("reap", ("mover",)))
            a, _ = self.ledgers.after(state.a, ("reap", ("mover",)))
            yield PullStep(
                "the mover is reaped", state._replace(a=a, b=b, phase="reaped", pinned=False)
            )

    # Other workers of both pools, which get blocks, stamp them and write them.

    def _others(self, state: PullState) -> Iterator[PullStep]:
        a, source, step = self._other(state.a, state.source, state.source_step)
        if step != state.source_step:
            yield PullStep(
                ("another of the source", step),
                state._replace(a=a, source=source, source_step=step),
            )
        b, target, step = self._other(state.b, state.target, state.target_step)
        if step != state.target_step:
            yield PullStep(
                ("another of the target", step),
                state._replace(b=b, target=target, target_step=step),
            )

    def _other(self, ledger: int, memory: Memory, step: int) -> tuple[int, Memory, int]:
        if step == 0:
            after, answer = self.ledgers.after(ledger, ("allocate", ("other", "worker", 9, (), 2)))
            return (ledger, memory, 0) if answer.error else (after, memory, 1)
        if step == 1:
            return ledger, memory.stamped(0, ("other", "")).stamped(1, ("other", "")), 2
        if step < 4:
            return ledger, memory.written(step - 2, "theirs"), step + 1
        return ledger, memory, step


def _with(values: tuple, number: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:number], value, *values[number + 1 :])
