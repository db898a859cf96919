"""The engine: runs sequence groups, one forward pass a step, and reports tokens and full blocks."""

import time
from collections.abc import Sequence as Seq
from typing import Protocol

from services.common.pool.stamps import Stamps
from services.engine.batch import Fault, Row, RowOutput, RowResult, Wait
from services.engine.messages import (
    AbortSequence,
    AddBlocks,
    Admit,
    Advance,
    Command,
    FailedGroup,
    Remove,
    Removed,
    Start,
    StepOutcome,
)
from services.engine.prefill_batching_delay import PrefillBatchingDelay
from services.engine.scheduler import ScheduledSequence, Scheduler
from services.engine.sequences.group import Group


class ForwardPass(Protocol):
    """The computation of a step: a runner, perhaps behind a fence guard or on shared CPUs."""

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copy blocks within the arena before the next `run`; a pair is (source, target)."""

    def run(self, rows: Seq[Row], num_waiting: int = 0) -> Seq[RowResult]:
        """Compute and store the KV of the rows; return one result per row.

        `num_waiting`: how many more sequences could run, but wait for a later step.
        """

    def yield_device(self, wait: Wait) -> None:
        """Leave the device to other workers after a step; call `wait` to wait meanwhile."""

    def on_idle(self) -> None:
        """Called when there is nothing to compute until the next `run`."""


class Engine:
    """Runs the groups of one worker; knows nothing of stores, streams and gateways.

    `one_token` (prefill workers): a sequence stops after its first drawn token, and its group
    leaves the engine when all its sequences have stopped. `look_ahead`: for how many tokens beyond
    the end of a sequence the engine asks for blocks; a prefill worker has acquired all before.
    """

    def __init__(
        self,
        forward: ForwardPass,
        scheduler: Scheduler,
        stamps: Stamps,
        *,
        one_token: bool,
        look_ahead: int,
    ) -> None:
        self._forward = forward
        self._scheduler = scheduler
        self._stamps = stamps
        self._one_token = one_token
        self._look_ahead = 1 if one_token else look_ahead
        self._aborted: dict[str, Group] = {}
        """Groups that lost a sequence by `AbortSequence`; the next step reports freed blocks."""
        self._batching_delay = PrefillBatchingDelay(scheduler.budget)

    def delay_s(self, waited_s: float) -> float:
        """How long the thread may wait for further commands before the next step, which has been
        delayed by `waited_s` already; 0: not at all. Decode steps never wait."""
        if not self._one_token:
            return 0.0
        return self._batching_delay.delay_s(self._scheduler.num_uncomputed, waited_s)

    def step(self, commands: Seq[Command] = ()) -> StepOutcome:
        """Apply the commands, run one batch, and report what it did to each group."""
        began = time.perf_counter()
        removed = self.apply(commands)
        self._copy()
        batch = self._scheduler.next_batch()
        rows = [one.sequence.row(one.num_tokens) for one in batch]
        results = self._compute(rows, self._scheduler.num_runnable - len(rows))
        advances, failed = self._apply_results(batch, results)
        num_tokens, duration_s = sum(one.num_tokens for one in batch), time.perf_counter() - began
        self._batching_delay.observe(num_tokens, duration_s)
        return StepOutcome(advances, failed, removed, num_tokens, duration_s)

    def yield_device(self, wait: Wait) -> None:
        """Leave the device to other workers between two steps. The thread calls this once the
        outcome of the last step is on its way to the event loop."""
        self._forward.yield_device(wait)

    def _copy(self) -> None:
        """Copy each block that several sequences share and one is about to write (law 4)."""
        if pairs := self._scheduler.place_spares(self._look_ahead):
            self._forward.copy_blocks(pairs)

    def _compute(self, rows: Seq[Row], num_waiting: int) -> Seq[RowResult]:
        if rows:
            return self._forward.run(rows, num_waiting)
        self._forward.on_idle()
        return ()

    def apply(self, commands: Seq[Command]) -> tuple[Removed, ...]:
        """Apply commands between two steps; no later step touches what they removed.

        Returns the removed groups. Commands for a group that the engine no longer has do nothing.
        """
        removed = []
        for command in commands:
            if isinstance(command, Admit):
                command.group.is_started = command.is_started
                self._scheduler.add(command.group)
                continue
            group = self._scheduler.get(command.key)
            if group is None:
                continue
            match command:
                case Start():
                    group.is_started = True
                case AddBlocks():
                    group.add_blocks(command.block_ids)
                case AbortSequence() if group.abort_sequence(command.index):
                    self._aborted[group.key] = group
                    if not group.sequences and not group.stopped:
                        removed.append(self._remove(group))
                case Remove():
                    removed.append(self._remove(group))
        return tuple(removed)

    def _remove(self, group: Group) -> Removed:
        self._scheduler.remove(group.key)
        self._aborted.pop(group.key, None)
        return Removed(group.key, group.ticket_sequences(), group.beams)

    def _apply_results(
        self, batch: Seq[ScheduledSequence], results: Seq[RowResult]
    ) -> tuple[tuple[Advance, ...], tuple[FailedGroup, ...]]:
        changed, self._aborted = self._aborted, {}
        faults: dict[str, Fault] = {}
        for one, result in zip(batch, results, strict=True):
            group = changed[one.group.key] = one.group
            if isinstance(result, Fault):
                faults[group.key] = result
            else:
                output = result if isinstance(result, RowOutput) else RowOutput(result)
                group.advance(one.sequence, one.num_tokens, output, one_token=self._one_token)
        failed = [self._fail_group(changed.pop(key), fault) for key, fault in faults.items()]
        return tuple(self._advance(group) for group in changed.values()), tuple(failed)

    def _fail_group(self, group: Group, fault: Fault) -> FailedGroup:
        """Drop a group whose row failed, and reset the stamps of its full blocks, so that no
        recovery takes them for finished."""
        self._scheduler.remove(group.key)
        blocks = group.full_blocks
        self._stamps.mark_owned([block_id for block_id, _ in blocks], group.key)
        return FailedGroup(group.key, fault, blocks)

    def _advance(self, group: Group) -> Advance:
        """Stamp the blocks that a group has completed, and report what it did."""
        remaining = None
        if not group.sequences:
            self._scheduler.remove(group.key)
            remaining = group.ticket_sequences()
        wanted_blocks = group.total_wanted(self._look_ahead)
        results = group.take_results()
        for block in results.completed:
            self._stamps.complete(*block)
        return Advance(
            key=group.key,
            tokens=tuple(results.tokens),
            num_uncomputed=group.num_uncomputed,
            completed=tuple(
                (block_id, prefix_hash) for block_id, prefix_hash, *_ in results.completed
            ),
            freed=tuple(results.freed),
            wanted_blocks=0 if self._one_token else wanted_blocks,
            remaining=remaining,
            prompt_logprobs=tuple(results.prompt_logprobs),
            beams=group.beams,
            hypotheses=results.hypotheses,
        )
