"""A sequence group: the sequences of one request in an engine, with one holder of blocks. They
share blocks until they write them (copy-on-write).

    sequence 0   |  b0 |  b1 |  b2 :   |            full blocks are shared, and never written again
    sequence 1   |  b0 |  b1 |  b4 :   | b6  |      b4: a copy of b2, made before the first write
    sequence 2   |  b0 |  b1 |  b2 :   |            0 and 2 share a tail that both are about to
    spare        b7                                 write: 0 copies it to b7, 2 writes in place

All blocks belong to the group's holder. Each block is in one of these places:

    in block tables   in as many as `_refs` counts; a sequence that ends while a step in flight
                      computes a token of it keeps its table until that step is retired
    spare             new, or left unfinished by a sequence that ended: goes to the next sequence
                      that needs a block
    given back        finished and in no table any more, or spare and not needed

See ADR 76.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import chain

from blockstore.hashing import prefix_hashes
from blockstore.records import PrefixHash
from services.engine.batch import Fault, RowOutput, RowResult
from services.engine.sequences.results import Advance
from services.engine.sequences.sequence import (
    Branch,
    CompletedBlock,
    Rules,
    Sequence,
    split_common_prefix,
)
from services.pool.stamps import Stamps
from services.protocol.block_keys import ComputedBlocks
from services.protocol.logprobs import Logprobs
from services.protocol.messages import Generated
from services.protocol.ticket import GroupState, Ticket, TicketSequence


class Group:
    """The sequences of one request, scheduled, moved, preempted and failed as one."""

    def __init__(
        self, ticket: Ticket, sequences: Seq[Sequence], spare: Seq[int], num_acquired: int
    ) -> None:
        self.key = ticket.holder_id
        self._attempt = ticket.key
        """The request and the attempt that its outputs name."""
        self.order = ticket.order
        self.sequences = list(sequences)
        """The sequences that run, by index."""
        self.stopped: list[Sequence] = []
        """The sequences that drew their one token here and continue at another worker."""
        self.num_acquired = num_acquired
        """The number of blocks that the holder ever acquired."""
        self.is_started = True
        self.one_token = False
        """Whether each sequence stops after its first drawn token, as at a prefill worker. The
        group leaves the engine when all of its sequences have stopped. All of its blocks are
        acquired before."""
        self.num_flights = 0
        """The number of steps in flight that read or write its blocks."""
        self.is_paused = False
        """Whether the group launches nothing more."""
        self.fault: Fault | None = None
        """The reason why the group fails once its flights are retired."""
        self._ended_in_flight: list[Sequence] = []
        self._spare = deque(spare)
        self._refs = Counter(block for one in sequences for block in one.block_table)
        self._advance = Advance(self.key)
        self._completed: list[CompletedBlock] = []

    @classmethod
    def to_compute(
        cls,
        ticket: Ticket,
        rules: Rules,
        new_block_ids: Seq[int],
        computed: Seq[ComputedBlocks] = (),
        hashes: Seq[PrefixHash] = (),
    ) -> "Group":
        """A group that computes a prompt and the tokens generated so far (prefill, recompute).

        `computed` has the leading blocks of each sequence that have KV already. Sequences with
        equal leading blocks are one `Sequence` as long as they have tokens in common to compute.
        `hashes` are the known prefix hashes of leading blocks of all sequences.
        """
        same_blocks: dict[ComputedBlocks, list[TicketSequence]] = defaultdict(list)
        none = [ComputedBlocks()] * len(ticket.sequences)
        for state, blocks in zip(ticket.sequences, computed or none, strict=True):
            same_blocks[blocks].append(state)
        sequences = [
            one
            for blocks, states in same_blocks.items()
            for one in _begin(rules, ticket.prompt_token_ids, states, blocks, hashes)
        ]
        sequences.sort(key=lambda one: one.index)
        held = {*new_block_ids, *chain.from_iterable(blocks.block_ids for blocks in same_blocks)}
        return cls(ticket, sequences, new_block_ids, len(held))

    @classmethod
    def to_continue(
        cls, ticket: Ticket, rules: Rules, spare: Seq[int], num_acquired: int
    ) -> "Group":
        """A group that continues a ticket with blocks. `spare` are the holder's blocks in no
        table."""
        prompt = ticket.prompt_token_ids
        hashes = prefix_hashes(rules.root, prompt, rules.block_size)
        sequences = [
            Sequence(
                rules,
                (Branch(state.index),),
                prompt + state.token_ids,
                block_ids=state.block_ids,
                num_computed=state.num_computed_tokens,
                hashes=hashes,
            )
            for state in ticket.sequences
        ]
        return cls(ticket, sequences, spare, num_acquired)

    def stop_after_draws(self) -> None:
        """Let each sequence stop after the next token that it draws."""
        self.one_token = True
        self.stay_behind()

    def stay_behind(self) -> None:
        """Launch no step of a sequence while one of its tokens is being drawn."""
        for sequence in self.sequences:
            sequence.may_run_ahead = False

    def is_stamped(self, stamps: Stamps) -> bool:
        """Whether the stamps of all its blocks are right (law 6)."""
        first, *others = self.sequences
        return first.is_stamped(stamps, self.key) and all(
            other.is_stamped(stamps, self.key, beside=first) for other in others
        )

    # Blocks

    def add_blocks(self, block_ids: Seq[int]) -> None:
        self._spare += block_ids
        self.num_acquired += len(block_ids)

    def place_spares(self, look_ahead: int) -> list[tuple[int, int]]:
        """Give spare blocks to sequences by index: first to those that could not run without one,
        then to those that will need one for `look_ahead` more tokens. Returns the (source, target)
        pairs to copy before the next step writes."""
        copies = []
        for ahead in (0, self._ahead(look_ahead)) if self._spare else ():
            for sequence in self.sequences:
                if self._spare and self._must_copy(sequence):
                    copies.append(self._copy_on_write(sequence))
                while self._spare and sequence.num_missing(ahead):
                    sequence.block_table.append(self._spare.popleft())
                    self._refs[sequence.block_table[-1]] += 1
        return copies

    def _ahead(self, look_ahead: int) -> int:
        return 1 if self.one_token else look_ahead

    def _must_copy(self, sequence: Sequence) -> bool:
        """Whether other sequences refer to the block that this one writes next. The last one that
        refers to a block writes in place."""
        block_id = sequence.next_block
        return block_id is not None and self._refs[block_id] > 1

    def _copy_on_write(self, sequence: Sequence) -> tuple[int, int]:
        source, target = sequence.next_block, self._spare.popleft()
        assert source is not None
        sequence.replace_next_block(target)
        self._refs[source] -= 1
        self._refs[target] += 1
        return source, target

    def num_wanted(self, look_ahead: int) -> int:
        """How many more blocks its sequences will need soon, those for copies included."""
        running = [(one, self._ahead(look_ahead)) for one in self.sequences]
        members = running + [(one, 0) for one in self.stopped]
        num_blocks, shared = 0, set[int | None]()
        for one, ahead in members:
            num_blocks += one.num_missing_with_branches(ahead)
            if len(members) > 1 and self._must_copy(one):
                num_blocks += one.next_block in shared
                shared.add(one.next_block)
        return num_blocks

    def total_wanted(self, look_ahead: int) -> int:
        """How many blocks the holder should have acquired in total by now; 0 if it has enough.
        Gives back the spare blocks that it does not need."""
        num_missing = self.num_wanted(look_ahead) - len(self._spare)
        for _ in range(-num_missing):
            self._advance.freed.append(self._spare.pop())
        return self.num_acquired + num_missing if num_missing > 0 else 0

    @property
    def full_blocks(self) -> tuple[tuple[int, bytes], ...]:
        """(block id, prefix hash) of the finished blocks in all tables, each once."""
        members = (*self.sequences, *self.stopped)
        return tuple(dict.fromkeys(block for one in members for block in one.full_blocks))

    # Steps

    def runnable(self) -> list[Sequence]:
        """The sequences that can run now: each has a slot for its next token, in a block that only
        it writes. None before the group is started, or while it is paused."""
        if not self.is_started or self.is_paused:
            return []
        runnable = [one for one in self.sequences if one.num_runnable > 0]
        if len(self.sequences) + len(self.stopped) + len(self._ended_in_flight) == 1:
            return runnable
        return [one for one in runnable if not self._must_copy(one)]

    @property
    def num_uncomputed(self) -> int:
        own = sum(len(branch.own) for one in self.sequences for branch in one.branches)
        return own + sum(one.num_uncomputed for one in self.sequences)

    def retire(
        self, sequence: Sequence, num_tokens: int, result: RowResult, drafts: tuple[int, ...] = ()
    ) -> int:
        """Apply the result of a step: `num_tokens` of the sequence were computed, and `drafts`. The
        result of a sequence that has ended meanwhile is dropped; so are all results after a fault.
        Returns how many drafts were accepted."""
        sequence.num_computed += num_tokens
        sequence.num_launched -= len(drafts)
        if sequence in self._ended_in_flight:
            if not sequence.in_flight:
                self._ended_in_flight.remove(sequence)
                self._drop_blocks(sequence)
        elif isinstance(result, Fault):
            self.fault, self.is_paused = self.fault or result, True
        elif self.fault is None:
            output = result if isinstance(result, RowOutput) else RowOutput(result)
            if drafts:
                return self._verify(sequence, drafts, output)
            self._go_on(sequence, output)
        return 0

    def _verify(self, sequence: Sequence, drafts: tuple[int, ...], output: RowOutput) -> int:
        """Apply the tokens that were drawn after the last token and after each draft, one by one,
        as if each came from a step of its own. A draft counts as computed once it is the token that
        was drawn in its place. The first other token ends this: what was drawn after it followed
        another text."""
        outputs, num_accepted = self._advance.outputs, 0
        num_before = len(outputs)
        for number, token in enumerate(output.tokens):
            self._go_on(sequence, RowOutput((token,), output.logprobs[number : number + 1]))
            if number == len(drafts) or token != drafts[number]:
                break
            num_accepted += 1
            if sequence not in self.sequences or number + 1 == len(output.tokens):
                break
            sequence.num_computed += 1
            sequence.num_launched += 1
        run = outputs[num_before:]
        outputs[num_before:] = [
            replace(
                run[-1],
                position=run[0].position,
                token_ids=output.tokens[: len(run)],
                logprobs=output.logprobs[: len(run)],
                num_drafts=len(drafts),
                num_accepted=num_accepted,
            )
        ]
        return num_accepted

    def _go_on(self, sequence: Sequence, output: RowOutput) -> None:
        """Note the blocks that the sequence has completed, split it where its branches part, and
        apply the tokens that were drawn after its last one."""
        self._completed += sequence.take_completed()
        if output.prompt is not None:
            self._advance.prompt_logprobs.append(output.prompt)
        if sequence.pooler is not None and output.states is not None:
            sequence.pooler.add(output.states)
        if sequence.num_uncomputed:
            return
        if sequence.pooler is not None:
            self._advance.embedding = sequence.pooler.embedding()
            self.end(sequence)
            return
        parts = sequence.split()
        for part in parts[1:]:
            self._add(part)
        tokens, logprobs = iter(output.tokens), iter(output.logprobs)
        for part in parts:
            if not part.num_uncomputed:
                self._apply_draw(part, next(tokens), next(logprobs, None))

    def _apply_draw(self, sequence: Sequence, token: int, logprobs: Logprobs | None) -> None:
        """Append a drawn token to a sequence, and end the sequence if the token finishes it."""
        position = len(sequence.tokens)
        finish = sequence.append(token)
        given = () if logprobs is None else (logprobs,)
        output = Generated(*self._attempt, sequence.index, position, (token,), finish, given)
        self._advance.outputs.append(output)
        if finish:
            self.end(sequence)
        elif self.one_token:
            self.sequences.remove(sequence)
            self.stopped.append(sequence)

    def fork(self, sequence: Sequence, index: int) -> Sequence:
        """Add sequence `index`, which continues from this one's computed tokens and blocks."""
        fork = sequence.fork((Branch(index),))
        self._add(fork)
        return fork

    def end(self, sequence: Sequence) -> None:
        """End a sequence, and drop its blocks, now or when its last flight is retired."""
        self.sequences.remove(sequence)
        if sequence.in_flight:
            self._ended_in_flight.append(sequence)
        else:
            self._drop_blocks(sequence)

    def _drop_blocks(self, sequence: Sequence) -> None:
        """Drop an ended sequence's references to blocks. Blocks without references are given back
        if finished, since no sequence may write them again; others become spare."""
        for number, block_id in enumerate(sequence.block_table):
            self._refs[block_id] -= 1
            if not self._refs[block_id]:
                del self._refs[block_id]
                is_finished = number < len(sequence.hashes)
                (self._advance.freed if is_finished else self._spare).append(block_id)

    def abort_sequence(self, index: int) -> bool:
        """End the sequence, or the branch, `index` for an abort; returns whether it was there. The
        group is not in flight."""
        for sequence in self.sequences:
            if any(branch.index == index for branch in sequence.branches):
                sequence.drop_branch(index)
                if not sequence.branches:
                    self.end(sequence)
                return True
        return False

    def _add(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)
        self.sequences.sort(key=lambda one: one.index)
        self._refs.update(sequence.block_table)

    def take_advance(self) -> tuple[Advance, Seq[CompletedBlock]]:
        """The progress since the last call, and the blocks that it has completed, to be stamped."""
        advance, completed = self._advance, self._completed
        self._advance, self._completed = Advance(self.key), []
        advance.completed = [(block_id, prefix_hash) for block_id, prefix_hash, *_ in completed]
        advance.num_uncomputed = self.num_uncomputed
        return advance, completed

    def state(self) -> GroupState:
        """The part of a ticket that this group changes. No step of the group is in flight."""
        left = (
            state for one in (*self.sequences, *self.stopped) for state in one.ticket_sequences()
        )
        return GroupState(tuple(sorted(left, key=lambda state: state.index)))


def _begin(
    rules: Rules,
    prompt: Seq[int],
    states: Seq[TicketSequence],
    computed: ComputedBlocks,
    hashes: Seq[PrefixHash],
) -> list[Sequence]:
    """Begin the sequences `states`, which start with the same blocks: as one `Sequence`, or split
    by their next tokens if no common token is left to compute."""
    shared, branches = split_common_prefix(
        [Branch(state.index, state.token_ids) for state in states]
    )
    tokens = (*prompt, *shared)
    is_drawing = not all(branch.own for branch in branches)
    sequence = Sequence(
        rules,
        branches,
        tokens,
        block_ids=computed.block_ids,
        num_computed=min(computed.num_tokens, len(tokens) - is_drawing),
        num_adopted=computed.num_full * rules.block_size,
        hashes=hashes,
    )
    return [sequence] if sequence.num_uncomputed else sequence.split()
