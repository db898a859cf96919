"""The engine: sequences in, tokens and finished blocks out, one forward pass a step."""

import time
from collections.abc import Sequence as Seq
from typing import Protocol

from services.common.ticket import FinishReason
from services.engine.batch import Drawn, Fault, Row, Told
from services.engine.messages import (
    Admit,
    Advance,
    Broken,
    Command,
    Grow,
    Remove,
    Removed,
    StepOutcome,
)
from services.engine.scheduler import Batch, Scheduler
from services.engine.sequence import Sequence, Stamps


class ForwardPass(Protocol):
    def run(self, rows: Seq[Row], num_behind: int = 0) -> Seq[Drawn]:
        """Compute and store the rows' KV; what each row with a draw drew. `num_behind`: sequences
        that could run too, and wait for another step."""

    def give_way(self) -> None:
        """After a step: return when others who compute on this device have had their part."""

    def rest(self) -> None:
        """There is nothing to compute until the next `run`."""


class BlockStamps(Stamps, Protocol):
    """The pool's record of what each block holds (law 6)."""

    def own(self, block_ids: Seq[int], owner: str) -> None: ...

    def complete(
        self, block_id: int, prefix_hash: bytes, parent: bytes, token_ids: Seq[int]
    ) -> None: ...


class Engine:
    """Knows nothing of stores and peers. `one_token`: sequences end with their first drawn token
    (prefill). `look_ahead`: tokens ahead of a sequence's end for which it asks for slots."""

    def __init__(
        self,
        forward: ForwardPass,
        scheduler: Scheduler,
        stamps: BlockStamps,
        *,
        one_token: bool,
        look_ahead: int,
    ) -> None:
        self._forward = forward
        self._scheduler = scheduler
        self._stamps = stamps
        self._one_token = one_token
        self._look_ahead = look_ahead

    def step(self, commands: Seq[Command]) -> StepOutcome:
        """Take commands, run one batch, say what came of it."""
        began = time.perf_counter()
        removed = self._apply(commands)
        batch = self._scheduler.next_batch()
        rows = [sequence.row(count) for sequence, count in batch]
        drawn = self._compute(rows, self._scheduler.num_runnable - len(rows))
        advances, broken = self._retire(batch, drawn)
        num_tokens = sum(count for _, count in batch)
        return StepOutcome(advances, broken, removed, num_tokens, time.perf_counter() - began)

    def give_way(self) -> None:
        """Between steps, when what came of one is on its way."""
        self._forward.give_way()

    def _compute(self, rows: Seq[Row], num_behind: int) -> Seq[Drawn]:
        if rows:
            return self._forward.run(rows, num_behind)
        self._forward.rest()
        return ()

    def _apply(self, commands: Seq[Command]) -> tuple[Removed, ...]:
        removed = []
        for command in commands:
            match command:
                case Admit(sequence, new_block_ids):
                    self._stamps.own(new_block_ids, sequence.key)
                    self._scheduler.add(sequence)
                case Grow(key, block_ids):
                    if found := self._scheduler.get(key):
                        self._stamps.own(block_ids, key)
                        found.block_table.extend(block_ids)
                case Remove(key):
                    if found := self._scheduler.remove(key):
                        removed.append(_removed(found))
        return tuple(removed)

    def _retire(
        self, batch: Batch, drawn: Seq[Drawn]
    ) -> tuple[tuple[Advance, ...], tuple[Broken, ...]]:
        advances, broken = [], []
        for (sequence, count), found in zip(batch, drawn, strict=True):
            if isinstance(found, Fault):
                broken.append(self._break(sequence, found))
            else:
                told = found if isinstance(found, Told) else Told(found)
                advances.append(self._advance(sequence, count, told))
        return tuple(advances), tuple(broken)

    def _break(self, sequence: Sequence, fault: Fault) -> Broken:
        """Drop it. Its blocks say nothing any more, so that no recovery believes them."""
        self._scheduler.remove(sequence.key)
        blocks = sequence.full_blocks
        self._stamps.own([block_id for block_id, _ in blocks], sequence.key)
        return Broken(sequence.key, fault, blocks)

    def _advance(self, sequence: Sequence, count: int, told: Told) -> Advance:
        token = told.token
        finish = sequence.advance(count, token)
        if finish or (self._one_token and token is not None):
            self._scheduler.remove(sequence.key)
        return Advance(
            key=sequence.key,
            token=token,
            finish=finish,
            num_computed=sequence.num_computed,
            completed=self._stamp(sequence),
            wanted_blocks=self._wanted_blocks(sequence, finish),
            logprobs=told.logprobs,
            prompt_logprobs=told.prompt,
        )

    def _stamp(self, sequence: Sequence) -> tuple[tuple[int, bytes], ...]:
        completed = sequence.take_completed()
        for block_id, prefix_hash, parent, token_ids in completed:
            self._stamps.complete(block_id, prefix_hash, parent, token_ids)
        return tuple((block_id, prefix_hash) for block_id, prefix_hash, _, _ in completed)

    def _wanted_blocks(self, sequence: Sequence, finish: FinishReason | None) -> int:
        return 0 if finish or self._one_token else sequence.wanted_blocks(self._look_ahead)


def _removed(sequence: Sequence) -> Removed:
    return Removed(
        key=sequence.key,
        token_ids=tuple(sequence.tokens),
        block_ids=tuple(sequence.block_table),
        num_computed=sequence.num_computed,
    )
