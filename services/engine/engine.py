"""The engine: runs sequence groups, one forward pass a step, and reports tokens and full blocks.

A step is launched, and retired when the device has computed it. Tokens, stamps and freed blocks
appear when the step is retired. Until then its groups keep their blocks: a command that takes a
group or a sequence out of the engine waits.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

from services.engine.batch import Fault, Wait
from services.engine.forward import Flight, ForwardPass, known
from services.engine.messages import (
    AbortSequence,
    AddBlocks,
    Admit,
    Command,
    Remove,
    RetiredStep,
    Start,
    StepOutcome,
)
from services.engine.prefill_batching_delay import PrefillBatchingDelay
from services.engine.scheduler import ScheduledSequence, Scheduler
from services.engine.sequences.group import Group
from services.engine.sequences.results import Advance
from services.engine.speculation.speculation import Speculation
from services.pool.stamps import Stamps


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device computes."""

    flight: Flight
    batch: Seq[ScheduledSequence]
    groups: Mapping[str, Group]
    """All groups with blocks that the step reads or writes."""
    began: float
    catch_up_s: float | None
    """The time since `began` in which the drafter computed tokens that it lacked; None if the
    device computes them."""
    idle_s: float
    """How long the device waited for the launch; 0 if it computed the step before until then."""


class Engine:
    """Runs the groups of one worker. It knows nothing of stores, streams and gateways."""

    def __init__(
        self,
        forward: ForwardPass,
        scheduler: Scheduler,
        stamps: Stamps,
        *,
        look_ahead: int,
        speculation: Speculation | None = None,
        check_fence: Callable[[], None] = lambda: None,
    ) -> None:
        self._forward = forward
        self._scheduler = scheduler
        self._stamps = stamps
        self._check_fence = check_fence
        """Called before a step is launched and after its end on the device. It raises if the worker
        may no longer write, or no longer use what it has read."""
        self._look_ahead = look_ahead
        """The number of tokens beyond the end of a sequence for which the engine asks for
        blocks."""
        self._speculation = speculation
        """The source of drafts; None if no row gets drafts."""
        self._launched: deque[LaunchedStep] = deque()
        self._retired_at = 0.0
        self._changed: dict[str, Group] = {}
        """Groups of retired rows, and those that lost a sequence: to be reported."""
        self._deferred: list[Command] = []
        """Commands that wait until their groups are not in flight."""
        self._batching_delay = PrefillBatchingDelay(scheduler.budget)

    def delay_s(self, waited_s: float) -> float:
        """Return the seconds that the thread may wait for further commands before the next step,
        which has been delayed by `waited_s` already. Steps that decode never wait, and no step
        waits while another is in flight: then it is 0."""
        if self._launched or self._scheduler.decodes:
            return 0.0
        return self._batching_delay.delay_s(self._scheduler.num_uncomputed, waited_s)

    def step(self, commands: Seq[Command] = ()) -> StepOutcome:
        """Apply the commands, launch a step, retire what is due, and report what happened to each
        group."""
        removed = self.apply(commands)
        retired = [self._retire(step) for step in self._take_needed()]
        launched = self._launch()
        retired += [self._retire(step) for step in self._take_due(launched)]
        return self._report(removed, retired, is_busy=launched or bool(retired))

    def settle(self) -> None:
        """Wait until the device computes nothing any more, and drop the results. No step may be
        launched after this."""
        if self._launched:
            self._launched[-1].flight.result()

    def yield_device(self, wait: Wait) -> None:
        """Leave the device to other workers between two steps. The thread calls this once the
        outcome of the last step is on its way to the event loop."""
        self._forward.yield_device(wait)

    def _launch(self) -> bool:
        """Launch the next step, if there is anything to copy or to compute: first the copies of
        each block that several sequences share and one is about to write (law 4)."""
        began = time.perf_counter()
        copied = self._scheduler.place_spares(self._look_ahead)
        batch = self._scheduler.next_batch()
        if not batch and not copied:
            if not self._launched:
                self._forward.on_idle()
            return False
        catch_up_s: float | None = 0.0
        if self._speculation is not None:
            batch, catch_up_s = self._speculation.with_drafts(
                batch, self._scheduler.budget, runs_ahead=bool(self._launched)
            )
        rows = [one.sequence.launch(one.num_tokens, one.drafts) for one in batch]
        pairs = list(chain.from_iterable(pairs for _, pairs in copied))
        self._check_fence()
        flight = self._forward.launch(rows, pairs)
        is_idle = not self._launched and not flight.is_complete
        idle_s = time.perf_counter() - began if is_idle else 0.0
        groups = {group.key: group for group, _ in copied}
        groups |= {one.group.key: one.group for one in batch}
        for group in groups.values():
            group.num_flights += 1
        self._launched.append(LaunchedStep(flight, batch, groups, began, catch_up_s, idle_s))
        return True

    def _take_needed(self) -> list[LaunchedStep]:
        """The steps to retire before the next one is launched: all in flight, if drafts of the next
        step, or behind drafts in flight, depend on tokens that the host has to know."""
        if self._speculation is None or not self._launched:
            return []
        is_needed = self._speculation.needs_tokens(self._launched[-1].batch)
        return self._take_due(launched=False) if is_needed else []

    def _take_due(self, launched: bool) -> list[LaunchedStep]:
        """The steps to retire now: all, but for the one that was just launched and goes on."""
        steps = self._launched
        num_kept = launched and not steps[-1].flight.is_complete
        return [steps.popleft() for _ in range(len(steps) - num_kept)]

    def apply(self, commands: Seq[Command]) -> tuple[Advance, ...]:
        """Apply commands between two steps; no later step touches what they removed.

        Returns the last advances of removed groups. Commands for a group that the engine no longer
        has do nothing. A command that ends a group in flight, or a sequence of it, pauses the group
        and is applied once its flights are retired.
        """
        removed = []
        commands, self._deferred = [*self._deferred, *commands], []
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
                case AbortSequence() | Remove() if group.num_flights:
                    group.is_paused = True
                    self._deferred.append(command)
                case AbortSequence():
                    group.is_paused = False
                    if not group.abort_sequence(command.index):
                        continue
                    self._changed[group.key] = group
                    if not group.sequences and not group.stopped:
                        removed.append(self._remove(group))
                case Remove():
                    removed.append(self._remove(group))
        return tuple(removed)

    def _remove(self, group: Group) -> Advance:
        self._scheduler.remove(group.key)
        self._changed.pop(group.key, None)
        return Advance(group.key, remaining=group.state())

    def _retire(self, step: LaunchedStep) -> RetiredStep:
        """Wait for a step and apply its results."""
        results = step.flight.result()
        self._check_fence()
        for group in step.groups.values():
            group.num_flights -= 1
        num_accepted = []
        for one, result in zip(step.batch, results, strict=True):
            accepted = one.group.retire(one.sequence, one.num_tokens, result, known(one.drafts))
            num_accepted.append(accepted)
            self._changed[one.group.key] = one.group
        began, self._retired_at = max(step.began, self._retired_at), time.perf_counter()
        num_tokens = sum(one.num_tokens + len(one.drafts) for one in step.batch)
        duration_s = self._retired_at - began
        self._batching_delay.observe(num_tokens, duration_s)
        if self._speculation is not None:
            self._speculation.retired(
                step.batch, num_accepted, duration_s, step.idle_s, step.catch_up_s
            )
        has_prompts = any(one.num_tokens > 1 or one.group.one_token for one in step.batch)
        return RetiredStep(num_tokens, duration_s, has_prompts)

    def _report(
        self, removed: tuple[Advance, ...], retired: Seq[RetiredStep], *, is_busy: bool
    ) -> StepOutcome:
        """Report the changed groups. The end of a group in flight, by itself or by a fault, is
        reported later: once no flight touches its blocks."""
        changed, self._changed = self._changed, {}
        advances = [*removed]
        for group in changed.values():
            if group.num_flights and (group.fault or not group.sequences):
                self._changed[group.key] = group
            if group.fault is None:
                advances.append(self._advance(group))
            elif not group.num_flights:
                advances.append(self._fail_group(group, group.fault))
        steps = tuple(step for step in retired if step.num_tokens)
        return StepOutcome(tuple(advances), steps, is_busy)

    def _fail_group(self, group: Group, fault: Fault) -> Advance:
        """Drop a group whose row failed. If its KV may be the cause, reset the stamps of its full
        blocks, so that no recovery takes them for finished."""
        self._scheduler.remove(group.key)
        if fault is not Fault.NOT_FINITE:
            return Advance(group.key, fault=fault)
        blocks = group.full_blocks
        self._stamps.mark_owned([block_id for block_id, _ in blocks], group.key)
        return Advance(group.key, fault=fault, broken=blocks)

    def _advance(self, group: Group) -> Advance:
        """Stamp the blocks that a group has completed, and report what it did. A group without
        sequences leaves the engine, unless it is in flight."""
        remaining = None
        if not group.sequences and not group.num_flights:
            self._scheduler.remove(group.key)
            remaining = group.state()
        wanted_blocks = group.total_wanted(self._look_ahead)
        advance, completed = group.take_advance()
        for block in completed:
            self._stamps.complete(*block)
        advance.remaining = remaining
        advance.wanted_blocks = 0 if group.one_token else wanted_blocks
        return advance
