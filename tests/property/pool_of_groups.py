"""A pool with one prefill and two decode engines, driven by hand. After every step the ledger's
laws hold, every block is in one place, and no sequence writes a block that several read."""

import itertools
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from blockstore.errors import MustWait, OutOfBlocks
from blockstore.memory.ledger import Ledger
from blockstore.memory.recount import audit
from blockstore.records import Growth, PoolSpec
from services.engine.batch import Draw
from services.engine.engine import Engine
from services.engine.forward import ForwardPass
from services.engine.messages import AddBlocks, Admit, Command, Remove, StepOutcome
from services.engine.scheduler import Scheduler
from services.engine.sequences.beam import FIRST, LivingBeam
from services.engine.sequences.beam_group import group_class
from services.engine.sequences.group import Group
from services.engine.sequences.results import Advance
from services.engine.sequences.sequence import Rules, Sequence
from services.engine.speculation.speculation import Speculation
from services.pool.stamps import Stamps
from services.protocol.block_keys import BlockKeys, num_blocks_for
from services.protocol.ticket import GroupState, Ticket
from tests.drafting import oracle
from tests.late_device import Device, LateFlight, LateForward
from tests.unit.workers.fakes import SAMPLED, Arena, FakeForward, make_stamps, next_token
from tests.unit.workers.searches import right, steps_of

NUM_BLOCKS = 40
LOOK_AHEAD = 2
MAX_MODEL_LEN = 30
MAX_NUM_SEQS = 32
DECODERS = ("d0", "d1")
LIMIT = 200
"""Everything ends within so many steps."""


@dataclass
class Live:
    """A group that runs at a decode engine. `have`: how many blocks it has ever got."""

    ticket: Ticket
    group: Group
    worker: str
    have: int
    next_index: int

    @property
    def searches(self) -> bool:
        return self.ticket.sampling.beam is not None


class EngineHost:
    """One engine with its device, and the commands for its next step."""

    def __init__(
        self,
        device: ForwardPass,
        budget: int,
        stamps: Stamps,
        *,
        speculation: Speculation | None = None,
    ) -> None:
        self.device = device
        self.engine = Engine(
            device,
            Scheduler(budget, MAX_NUM_SEQS),
            stamps,
            look_ahead=LOOK_AHEAD,
            speculation=speculation,
        )
        self.commands: list[Command] = []

    def step(self) -> StepOutcome:
        commands, self.commands = self.commands, []
        return self.engine.step(commands)

    @property
    def flights(self) -> Iterable[LateFlight]:
        return self.device.flights if isinstance(self.device, LateForward) else ()


def _drawn_next(sequence: Sequence, tokens: list[int]) -> int:
    return next_token(tokens, Draw(SAMPLED, sequence.index))


class PoolOfGroups(RuleBasedStateMachine):
    """`speculates`: rows of the decode engines get drafts, of which one in three is wrong."""

    device: Device
    speculates = False

    @initialize(size=st.sampled_from([1, 2, 4]), budget=st.sampled_from([3, 64]))
    def start(self, size: int, budget: int) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.size = size
        spec = PoolSpec("pool", "model", "fingerprint", NUM_BLOCKS, size, block_bytes=1)
        self.ledger = Ledger(spec, clock=lambda: 0.0)
        for worker in ("p", *DECODERS):
            self.ledger.register_worker(spec, worker)
        self.stamps = make_stamps(Path(self.directory.name) / "stamps", spec)
        model = FakeForward(Arena(size, self.stamps))
        self.arena = model.arena
        device = type(self).device
        self.prefill = EngineHost(device(model), budget, self.stamps)
        # As in a worker: a step has room for a token of each sequence.
        at_decode = max(budget, MAX_NUM_SEQS)
        self.hosts = {
            name: EngineHost(
                device(model),
                at_decode,
                self.stamps,
                speculation=oracle(_drawn_next) if self.speculates else None,
            )
            for name in DECODERS
        }
        self.live: dict[str, Live] = {}
        self.shared: dict[int, tuple[set[Sequence], list[object]]] = {}
        self.numbers = itertools.count(1)

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.stamps.close()
            self.directory.cleanup()

    # How

    def _some(self, data: st.DataObject) -> Live:
        return self.live[data.draw(st.sampled_from(sorted(self.live)), "group")]

    def _compute(self, asked: Ticket, next_index: int) -> None:
        key, contents = asked.holder_id, BlockKeys.of(asked, self.size)
        hashes, branches = contents.chains
        num_blocks = num_blocks_for(asked, self.size)
        if num_blocks > NUM_BLOCKS:
            return
        try:
            allocation = self.ledger.allocate(key, "p", asked.order, hashes, num_blocks, branches)
        except (OutOfBlocks, MustWait):
            self.ledger.withdraw(key)
            return
        computed = contents.computed_blocks(allocation.cached(hashes, branches))
        new = allocation.block_ids[allocation.num_cached_blocks :]
        group = group_class(asked).to_compute(asked, self._rules(asked), new, computed)
        group.stop_after_draws()
        self.stamps.mark_owned(new, key)
        self.prefill.commands = [Admit(group)]
        running = replace(asked, holder_epoch=1)
        left = None
        for _ in range(LIMIT):
            for advance in self.prefill.step().advances:
                self._write(advance, running)
                left = advance.remaining
            self.flights_touch_held_blocks()
            if left is not None:
                break
        assert left is not None
        if not left.sequences:
            self._check_found(advance, asked)
            self.ledger.release(key, 1)
            return
        epoch = self.ledger.detach(key, 1)
        detached = replace(asked.with_group(left), holder_epoch=epoch)
        self._claim(detached, DECODERS[len(self.live) % 2], next_index)

    def _claim(self, detached: Ticket, name: str, next_index: int) -> None:
        key = detached.holder_id
        in_tables = {block for state in detached.sequences for block in state.block_ids}
        claim = self.ledger.claim(key, detached.holder_epoch, name, tuple(in_tables))
        beside = [block for block in claim.block_ids if block not in in_tables]
        spare = tuple(block for block in beside if not self.stamps.is_committed(block))
        self.ledger.give_back(key, claim.epoch, [block for block in beside if block not in spare])
        running = replace(detached, holder_epoch=claim.epoch)
        group = group_class(running).to_continue(
            running, self._rules(running), spare, claim.num_acquired
        )
        assert group.is_stamped(self.stamps)
        live = self.live[key] = Live(running, group, name, claim.num_acquired, next_index)
        if total := group.total_wanted(LOOK_AHEAD):
            self._grow(live, total)
        self.hosts[name].commands.insert(0, Admit(group))

    def _step(self, name: str) -> list[Ticket]:
        """The tickets of groups that left. A group whose last sequence was aborted is released."""
        outcome = self.hosts[name].step()
        left = []
        for advance in outcome.advances:
            if advance.remaining is not None and advance.remaining.sequences:
                ticket = self.live.pop(advance.key).ticket
                left.append(ticket.with_group(advance.remaining))
            else:
                self._advance(advance)
        return left

    def _remove(self, live: Live) -> Ticket | None:
        """The ticket of a group that left its engine; None if it ended before."""
        key = live.ticket.holder_id
        self.hosts[live.worker].commands.append(Remove(key))
        for _ in range(LIMIT):
            if key not in self.live:
                return None
            if left := self._step(live.worker):
                return left[0]
            self.flights_touch_held_blocks()
        raise AssertionError("it does not leave")

    def _at_rest(self, live: Live) -> bool:
        """Wait until no step of a group is in flight; returns whether the group still runs."""
        live.group.is_paused = True
        for _ in range(LIMIT):
            if not live.group.num_flights:
                break
            self._step(live.worker)
        assert not live.group.num_flights
        live.group.is_paused = False
        return live.ticket.holder_id in self.live

    def _grow(self, live: Live, total: int) -> None:
        """A group that is short of blocks asks again with its next step."""
        key = live.ticket.holder_id
        growth = Growth(key, live.ticket.holder_epoch, live.have, max(total, live.have))
        (grown,) = self.ledger.extend(live.worker, [growth]).grown
        if not grown.error and grown.block_ids:
            live.have += len(grown.block_ids)
            self.stamps.mark_owned(grown.block_ids, key)
            self.hosts[live.worker].commands.append(AddBlocks(key, grown.block_ids))

    def _write(self, advance: Advance, running: Ticket) -> None:
        key, epoch = advance.key, running.holder_epoch
        self.ledger.commit(key, epoch, advance.completed)
        self.ledger.give_back(key, epoch, advance.freed)

    def _rules(self, asked: Ticket) -> Rules:
        return Rules.of(asked, self.size, frozenset(), MAX_MODEL_LEN)

    def _advance(self, advance: Advance) -> None:
        """Apply the outcome of one step to a group at a decode engine."""
        live = self.live[advance.key]
        self._write(advance, live.ticket)
        if advance.remaining is not None:
            assert advance.remaining == GroupState(())
            self._check_found(advance, live.ticket)
            self.ledger.release(advance.key, live.ticket.holder_epoch)
            del self.live[advance.key]
        elif advance.wanted_blocks:
            self._grow(live, advance.wanted_blocks)

    def _check_found(self, advance: Advance, asked: Ticket) -> None:
        if asked.sampling.beam is not None:
            found = [(one.token_ids, one.finish_reason, one.score) for one in advance.outputs]
            assert found == [(one.token_ids, one.finish_reason, one.score) for one in right(asked)]

    # What holds

    @invariant()
    def the_ledger_adds_up(self) -> None:
        if hasattr(self, "ledger"):
            assert audit(self.ledger).violations == ()

    @invariant()
    def every_block_of_a_holder_is_in_one_place(self) -> None:
        """Each block is in a block table, spare, or on its way; it counts once for each table that
        names it."""
        for key, live in getattr(self, "live", {}).items():
            group = live.group
            members = (*group.sequences, *group._ended_in_flight)
            named = Counter(block for one in members for block in one.block_table)
            assert named == group._refs
            waiting = self.hosts[live.worker].commands
            coming = [c.block_ids for c in waiting if isinstance(c, AddBlocks) and c.key == key]
            beside = [*group._spare, *group._advance.freed, *itertools.chain(*coming)]
            assert len(set(beside)) == len(beside)
            assert named.keys().isdisjoint(beside)
            assert self.ledger.holders[key].held == named.keys() | set(beside)

    @invariant()
    def flights_touch_held_blocks(self) -> None:
        """No holder is given a block that a step in flight reads or writes."""
        hosts = {"p": self.prefill, **self.hosts} if hasattr(self, "hosts") else {}
        for name, host in hosts.items():
            holders = [h for h in self.ledger.holders.values() if h.worker_id == name]
            held = set(itertools.chain.from_iterable(holder.held for holder in holders))
            for flight in host.flights:
                assert flight.block_ids <= held

    @invariant()
    def what_several_read_nobody_writes(self) -> None:
        """A block that two sequences read stays unchanged as long as both do."""
        readers = defaultdict(set)
        for one in self._sequences():
            for block in self._begun_blocks(one):
                readers[block].add(one)
        for block, (before, content) in getattr(self, "shared", {}).items():
            if len(before & readers[block]) > 1:
                assert self._content(block) == content
        several = {block: each for block, each in readers.items() if len(each) > 1}
        self.shared = {block: (each, self._content(block)) for block, each in several.items()}

    @invariant()
    def each_reads_its_own_tokens(self) -> None:
        hosts = getattr(self, "hosts", {}).values()
        copies = itertools.chain(*(flight.copies for host in hosts for flight in host.flights))
        source_of = {target: source for source, target in copies}
        for one in self._sequences():
            for position, token in enumerate(one.tokens[: one.num_computed]):
                block = one.block_table[position // self.size]
                slot = source_of.get(block, block) * self.size + position % self.size
                assert self.arena.slots[slot] == (position, token)

    @invariant()
    def tokens_are_those_of_one_alone(self) -> None:
        """Each token is drawn with the sequence's own index, or with that of the sequence it was
        forked from."""
        for live in getattr(self, "live", {}).values():
            if live.searches:
                continue
            num_prompt = len(live.ticket.prompt_token_ids)
            draws = [Draw(SAMPLED, index) for index in range(live.next_index)]
            for one in live.group.sequences:
                *before, last = one.tokens
                if len(before) >= num_prompt:
                    assert last in {next_token(before, draw) for draw in draws}

    @invariant()
    def beams_are_those_of_a_search_alone(self) -> None:
        for live in getattr(self, "live", {}).values():
            if live.searches:
                num_prompt = len(live.ticket.prompt_token_ids)
                tokens = [tuple(one.tokens[num_prompt:]) for one in live.group.sequences]
                beams = [[FIRST], *(beams for beams, _ in steps_of(live.ticket))][len(tokens[0])]
                found = live.group.state().beams
                assert found is not None
                scored = zip(tokens, found.scores, strict=True)
                assert [LivingBeam(*one) for one in scored] == beams

    def _sequences(self) -> Iterator[Sequence]:
        for live in getattr(self, "live", {}).values():
            yield from live.group.sequences

    def _begun_blocks(self, one: Sequence) -> list[int]:
        """How many blocks of a sequence have computed tokens."""
        return one.block_table[: -(-one.num_computed // self.size)]

    def _content(self, block: int) -> list[object]:
        slots = range(block * self.size, (block + 1) * self.size)
        return [self.arena.slots.get(slot) for slot in slots]
