"""Groups of samples and beam searches are computed, forked, written, pruned, preempted and moved in
any order."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from quire.sampling import Beam, EarlyStopping
from services.engine.batch import Draw
from services.engine.messages import AbortSequence
from services.protocol.ticket import TicketSequence
from tests.examples import examples
from tests.late_device import LateForward, computes_at_launch
from tests.property.pool_of_groups import DECODERS, Live, PoolOfGroups
from tests.unit.workers.fakes import GREEDY, SAMPLED, expected, ticket

LENGTHS = st.integers(1, 9)
MAX_TOKENS = st.integers(1, 12)
STOPS = st.sets(st.tuples(st.integers(0, 4), st.integers(1, 8)), max_size=2)


class Groups(PoolOfGroups):
    @rule(n=st.integers(1, 5), length=LENGTHS, max_tokens=MAX_TOKENS, stops=STOPS)
    def begin(self, n: int, length: int, max_tokens: int, stops: set[tuple[int, int]]) -> None:
        """`stops`: stop tokens, as (sequence index, number of the token)."""
        drawn = [expected(range(length), number, Draw(SAMPLED, i)) for i, number in sorted(stops)]
        stop_ids = tuple(tokens[-1] for tokens in drawn)
        asked = ticket(
            f"r{next(self.numbers)}",
            range(length),  # they all share what there is to share
            sampling=replace(SAMPLED, max_tokens=max_tokens, stop_token_ids=stop_ids),
            sequences=tuple(TicketSequence(index) for index in range(n)),
        )
        self._compute(asked, n)

    @rule(
        width=st.integers(1, 5),
        length=LENGTHS,
        max_tokens=MAX_TOKENS,
        stop_ids=st.sets(st.integers(0, 20), max_size=3),
        early_stopping=st.sampled_from((False, True, "never")),
    )
    def begin_search(
        self,
        width: int,
        length: int,
        max_tokens: int,
        stop_ids: set[int],
        early_stopping: EarlyStopping,
    ) -> None:
        """Begin a beam search, which forks and prunes by itself."""
        beam, stops = Beam(width, early_stopping=early_stopping), tuple(sorted(stop_ids))
        sampling = replace(GREEDY, max_tokens=max_tokens, stop_token_ids=stops, n=width, beam=beam)
        self._compute(ticket(f"r{next(self.numbers)}", range(length), sampling=sampling), width)

    @rule(name=st.sampled_from(DECODERS))
    def step(self, name: str) -> None:
        assert not self._step(name)

    @precondition(lambda self: self._has_samples())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        live = self._some_samples(data)
        if self._at_rest(live) and live.group.sequences:
            parent = data.draw(st.sampled_from(live.group.sequences), "parent")
            live.group.fork(parent, live.next_index)
            live.next_index += 1

    @precondition(lambda self: self._has_samples())
    @rule(data=st.data())
    def abort_sequence(self, data: st.DataObject) -> None:
        live = self._some_samples(data)
        indices = [one.index for one in live.group.sequences]
        if len(indices) > 1:
            index = data.draw(st.sampled_from(indices), "index")
            self.hosts[live.worker].commands.append(AbortSequence(live.ticket.holder_id, index))
            self.step(live.worker)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), name=st.sampled_from(DECODERS))
    def move(self, data: st.DataObject, name: str) -> None:
        live = self._some(data)
        detached = self._remove(live)
        if detached is None:
            return
        epoch = self.ledger.detach(detached.holder_id, detached.holder_epoch)
        self._claim(replace(detached, holder_epoch=epoch), name, live.next_index)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Preempt a group; it is computed again at once if there is room."""
        live = self._some(data)
        detached = self._remove(live)
        if detached is None:
            return
        self.ledger.release(detached.holder_id, detached.holder_epoch)
        states = tuple(TicketSequence(s.index, s.token_ids) for s in detached.sequences)
        number = f"r{next(self.numbers)}"
        again = replace(detached, request_id=number, holder_id=f"h-{number}", sequences=states)
        self._compute(again, live.next_index)

    def _has_samples(self) -> bool:
        return bool(self._samples())

    def _samples(self) -> list[str]:
        return sorted(key for key, live in self.live.items() if not live.searches)

    def _some_samples(self, data: st.DataObject) -> Live:
        return self.live[data.draw(st.sampled_from(self._samples()), "samples")]


class GroupsAtLaunch(Groups):
    device = staticmethod(computes_at_launch)


class GroupsLate(Groups):
    device = LateForward


class GroupsSpeculating(GroupsAtLaunch):
    speculates = True


class GroupsSpeculatingLate(GroupsLate):
    speculates = True


TestGroups, TestGroupsLate = GroupsAtLaunch.TestCase, GroupsLate.TestCase
TestGroupsSpeculating = GroupsSpeculating.TestCase
TestGroupsSpeculatingLate = GroupsSpeculatingLate.TestCase
for case in (TestGroups, TestGroupsLate, TestGroupsSpeculating, TestGroupsSpeculatingLate):
    case.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
del case  # pytest would run it a second time
