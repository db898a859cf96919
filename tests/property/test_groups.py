"""Groups of samples and beam searches that are computed, forked, written, pruned, preempted and
moved in any order."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from services.engine.messages import AbortSequence
from services.protocol.ticket import BeamParams, EarlyStopping, TicketSequence
from tests.property.pool_of_groups import DECODERS, Live, PoolOfGroups
from tests.unit.workers.fakes import GREEDY, SAMPLED, ticket

LENGTHS = st.integers(1, 9)
MAX_TOKENS = st.integers(1, 12)


class Groups(PoolOfGroups):
    @rule(n=st.integers(1, 5), length=LENGTHS, max_tokens=MAX_TOKENS)
    def begin(self, n: int, length: int, max_tokens: int) -> None:
        asked = ticket(
            f"r{next(self.numbers)}",
            range(length),  # they all share what there is to share
            sampling=replace(SAMPLED, max_tokens=max_tokens),
            sequences=tuple(TicketSequence(index) for index in range(n)),
        )
        self._compute(asked, n)

    @rule(
        width=st.integers(1, 5),
        length=LENGTHS,
        max_tokens=MAX_TOKENS,
        stop_ids=st.sets(st.integers(0, 20), max_size=3),
        early_stopping=st.sampled_from(EarlyStopping),
    )
    def begin_search(
        self,
        width: int,
        length: int,
        max_tokens: int,
        stop_ids: set[int],
        early_stopping: EarlyStopping,
    ) -> None:
        """Which forks and prunes by itself."""
        beam = BeamParams(width, width, early_stopping=early_stopping)
        stops = tuple(sorted(stop_ids))
        sampling = replace(GREEDY, max_tokens=max_tokens, stop_token_ids=stops, beam=beam)
        self._compute(ticket(f"r{next(self.numbers)}", range(length), sampling=sampling), width)

    @rule(name=st.sampled_from(DECODERS))
    def step(self, name: str) -> None:
        host = self.hosts[name]
        commands, host.commands = host.commands, []
        for advance in host.engine.step(commands).advances:
            self._advance(advance)

    @precondition(lambda self: self._has_samples())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        live = self._some_samples(data)
        if live.group.sequences:
            parent = data.draw(st.sampled_from(live.group.sequences), "parent")
            live.group.fork(parent, live.next_index)
            live.next_index += 1

    @precondition(lambda self: self._has_samples())
    @rule(data=st.data())
    def abort_sequence(self, data: st.DataObject) -> None:
        live = self._some_samples(data)
        index = data.draw(st.sampled_from([one.index for one in live.group.sequences]), "index")
        if len(live.group.sequences) > 1:
            self.hosts[live.worker].commands.append(AbortSequence(live.ticket.holder_id, index))
            self.step(live.worker)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), name=st.sampled_from(DECODERS))
    def move(self, data: st.DataObject, name: str) -> None:
        live = self._some(data)
        detached = self._remove(live)
        epoch = self.ledger.detach(detached.holder_id, detached.holder_epoch)
        self._claim(replace(detached, holder_epoch=epoch), name, live.next_index)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """It is computed again at once, if there is room."""
        live = self._some(data)
        detached = self._remove(live)
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


TestGroups = Groups.TestCase
TestGroups.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
