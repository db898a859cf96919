"""Groups of sequences, forked, written, pruned, preempted and moved in any order: the ledger's laws
hold after every step, every block is where it should be, and what several read nobody writes."""

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blockstore.errors import MustWait, OutOfBlocks
from blockstore.ledger import Ledger
from blockstore.recount import audit
from blockstore.store import Growth, PoolSpec
from services.common.ticket import Ticket, TicketSequence
from services.engine.batch import Draw
from services.engine.contents import Contents, num_blocks_for
from services.engine.engine import Engine
from services.engine.group import Group
from services.engine.messages import Admit, Advance, Command, End, Grow, Remove
from services.engine.scheduler import Scheduler
from services.engine.sequence import Rules
from tests.unit.workers.fakes import SAMPLED, Arena, FakeForward, make_stamps, next_token, ticket

NUM_BLOCKS = 40
LOOK_AHEAD = 2
MAX_MODEL_LEN = 30
DECODERS = ("d0", "d1")


@dataclass
class Live:
    """A group that runs at a decoder. `have`: blocks that it ever got."""

    ticket: Ticket
    group: Group
    worker: str
    have: int
    next_index: int


class Host:
    """One engine, and what it will be told before its next step."""

    def __init__(self, model: FakeForward, budget: int, *, one_token: bool) -> None:
        self.engine = Engine(
            model,
            Scheduler(budget, max_num_seqs=32),
            model.arena.stamps,
            one_token=one_token,
            look_ahead=LOOK_AHEAD,
        )
        self.commands: list[Command] = []


class Groups(RuleBasedStateMachine):
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
        self.prefill = Host(model, budget, one_token=True)
        self.hosts = {name: Host(model, budget, one_token=False) for name in DECODERS}
        self.live: dict[str, Live] = {}
        self.shared: dict[int, list[object]] = {}
        self.numbers = itertools.count(1)

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.stamps.close()
            self.directory.cleanup()

    # What happens

    @rule(n=st.integers(1, 5), length=st.integers(1, 9), max_tokens=st.integers(1, 12))
    def begin(self, n: int, length: int, max_tokens: int) -> None:
        asked = ticket(
            f"r{next(self.numbers)}",
            range(length),  # they all share what there is to share
            sampling=replace(SAMPLED, max_tokens=max_tokens),
            sequences=tuple(TicketSequence(index) for index in range(n)),
        )
        self._compute(asked, n)

    @rule(name=st.sampled_from(DECODERS))
    def step(self, name: str) -> None:
        host = self.hosts[name]
        commands, host.commands = host.commands, []
        for advance in host.engine.step(commands).advances:
            live = self.live[advance.key]
            self._write(advance, live.ticket)
            if advance.left is not None:
                assert advance.left == ()
                self.ledger.release(advance.key, live.ticket.holder_epoch)
                del self.live[advance.key]
            elif advance.wanted_blocks:
                self._grow(live, advance.wanted_blocks)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        live = self._some(data)
        if live.group.sequences:
            parent = data.draw(st.sampled_from(live.group.sequences), "parent")
            live.group.fork(parent, live.next_index)
            live.next_index += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        live = self._some(data)
        index = data.draw(st.sampled_from([one.index for one in live.group.sequences]), "index")
        if len(live.group.sequences) > 1:
            self.hosts[live.worker].commands.append(End(live.ticket.holder_id, index))
            self.step(live.worker)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), name=st.sampled_from(DECODERS))
    def move(self, data: st.DataObject, name: str) -> None:
        live = self._some(data)
        at_rest = self._remove(live)
        epoch = self.ledger.detach(at_rest.holder_id, at_rest.holder_epoch)
        self._claim(replace(at_rest, holder_epoch=epoch), name, live.next_index)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """It is computed again at once, if there is room."""
        live = self._some(data)
        at_rest = self._remove(live)
        self.ledger.release(at_rest.holder_id, at_rest.holder_epoch)
        self.what_several_read_nobody_writes()  # until here: the blocks may be others' from now on
        states = tuple(TicketSequence(s.index, s.token_ids) for s in at_rest.sequences)
        number = f"r{next(self.numbers)}"
        again = replace(at_rest, request_id=number, holder_id=f"h-{number}", sequences=states)
        self._compute(again, live.next_index)

    # How

    def _some(self, data: st.DataObject) -> Live:
        return self.live[data.draw(st.sampled_from(sorted(self.live)), "group")]

    def _compute(self, asked: Ticket, next_index: int) -> None:
        key, contents = asked.holder_id, Contents.of(asked, self.size)
        hashes, branches = contents.chains
        num_blocks = num_blocks_for(asked, self.size)
        if num_blocks > NUM_BLOCKS:
            return
        try:
            allocation = self.ledger.allocate(key, "p", asked.order, hashes, num_blocks, branches)
        except (OutOfBlocks, MustWait):
            self.ledger.withdraw(key)
            return
        begun = contents.begun(allocation.cached(hashes, branches))
        new = allocation.block_ids[allocation.num_cached_blocks :]
        group = Group.to_compute(asked, self._rules(asked), new, begun)
        commands: list[Command] = [Admit(group, new)]
        running = replace(asked, holder_epoch=1)
        left = None
        while left is None:
            (advance,) = self.prefill.engine.step(commands).advances
            commands = []
            self._write(advance, running)
            left = advance.left
        if not left:
            self.ledger.release(key, 1)
            return
        epoch = self.ledger.detach(key, 1)
        at_rest = replace(asked, holder_epoch=epoch, sequences=left)
        self._claim(at_rest, DECODERS[len(self.live) % 2], next_index)

    def _claim(self, at_rest: Ticket, name: str, next_index: int) -> None:
        key = at_rest.holder_id
        in_tables = {block for state in at_rest.sequences for block in state.block_ids}
        claim = self.ledger.claim(key, at_rest.holder_epoch, name, tuple(in_tables))
        beside = [block for block in claim.block_ids if block not in in_tables]
        spare = tuple(block for block in beside if not self.stamps.is_committed(block))
        self.ledger.give_back(key, claim.epoch, [block for block in beside if block not in spare])
        running = replace(at_rest, holder_epoch=claim.epoch)
        group = Group.to_continue(running, self._rules(running), spare, claim.num_acquired)
        assert group.is_stamped(self.stamps)
        live = self.live[key] = Live(running, group, name, claim.num_acquired, next_index)
        if total := group.total_wanted(LOOK_AHEAD):
            self._grow(live, total)
        self.hosts[name].commands.insert(0, Admit(group, spare))

    def _remove(self, live: Live) -> Ticket:
        host, key = self.hosts[live.worker], live.ticket.holder_id
        host.commands.append(Remove(key))
        commands, host.commands = host.commands, []
        del self.live[key]
        outcome = host.engine.step(commands)
        for advance in outcome.advances:
            other = self.live[advance.key]
            self._write(advance, other.ticket)
            if advance.left is not None:
                self.ledger.release(advance.key, other.ticket.holder_epoch)
                del self.live[advance.key]
            elif advance.wanted_blocks:
                self._grow(other, advance.wanted_blocks)
        (removed,) = outcome.removed
        return replace(live.ticket, sequences=removed.sequences)

    def _grow(self, live: Live, total: int) -> None:
        """Who is short asks again with its next step."""
        key = live.ticket.holder_id
        growth = Growth(key, live.ticket.holder_epoch, live.have, max(total, live.have))
        (grown,) = self.ledger.extend(live.worker, [growth]).grown
        if not grown.error and grown.block_ids:
            live.have += len(grown.block_ids)
            self.hosts[live.worker].commands.append(Grow(key, grown.block_ids))

    def _write(self, advance: Advance, running: Ticket) -> None:
        key, epoch = advance.key, running.holder_epoch
        self.ledger.commit(key, epoch, advance.completed)
        self.ledger.give_back(key, epoch, advance.freed)

    def _rules(self, asked: Ticket) -> Rules:
        return Rules.of(asked, self.size, frozenset(), MAX_MODEL_LEN)

    # What holds

    @invariant()
    def the_ledger_adds_up(self) -> None:
        if hasattr(self, "ledger"):
            assert audit(self.ledger).violations == ()

    @invariant()
    def every_block_of_a_holder_is_in_one_place(self) -> None:
        """In tables, spare, or on its way; counted as often as tables name it."""
        for key, live in getattr(self, "live", {}).items():
            group = live.group
            named = Counter(block for one in group.sequences for block in one.block_table)
            assert named == group._refs
            waiting = self.hosts[live.worker].commands
            coming = [c.block_ids for c in waiting if isinstance(c, Grow) and c.key == key]
            beside = [*group._spare, *group._freed, *itertools.chain(*coming)]
            assert len(set(beside)) == len(beside)
            assert named.keys().isdisjoint(beside)
            assert self.ledger.holders[key].held == named.keys() | set(beside)

    @invariant()
    def what_several_read_nobody_writes(self) -> None:
        shared = Counter(block for table, _ in self._tables() for block in table)
        now = {block: self._content(block) for block, times in shared.items() if times > 1}
        for block, before in self.shared.items() if hasattr(self, "shared") else ():
            assert now.get(block, before) == before
        self.shared = now

    @invariant()
    def each_reads_its_own_tokens(self) -> None:
        for table, tokens in self._tables():
            for position, token in enumerate(tokens):
                slot = table[position // self.size] * self.size + position % self.size
                assert self.arena.slots[slot] == (position, token)

    @invariant()
    def tokens_are_those_of_one_alone(self) -> None:
        """Each drawn by its own index, or by that of who it was forked from."""
        for live in getattr(self, "live", {}).values():
            num_prompt = len(live.ticket.prompt_token_ids)
            draws = [Draw(SAMPLED, index) for index in range(live.next_index)]
            for one in live.group.sequences:
                *before, last = one.tokens
                if len(before) >= num_prompt:
                    assert last in {next_token(before, draw) for draw in draws}

    def _tables(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """With the tokens that are computed in them."""
        for live in getattr(self, "live", {}).values():
            for one in live.group.sequences:
                num_blocks = -(-one.num_computed // self.size)
                yield one.block_table[:num_blocks], one.tokens[: one.num_computed]

    def _content(self, block: int) -> list[object]:
        slots = range(block * self.size, (block + 1) * self.size)
        return [self.arena.slots.get(slot) for slot in slots]


TestGroups = Groups.TestCase
TestGroups.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
