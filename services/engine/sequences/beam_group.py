"""The sequence group of a beam search: sequence i is the i-th best living beam. Each step computes
the likeliest next tokens of every beam; then the best continuations of all beams replace them:

    before   0 ─┬─▶ 0     a beam's best continuation reuses its sequence
             1  └─▶ 1     its other continuations are forks, which share its blocks until a write
             2 ───▶ 2
             3            a beam without continuation ends: its finished blocks are given back, its
                          unfinished ones become spare, for forks to write
"""

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import replace

from services.engine.sequences.beam import FIRST, BeamSearch, Continuation, LivingBeam
from services.engine.sequences.group import Group
from services.engine.sequences.sequence import Sequence
from services.protocol.logprobs import Logprobs
from services.protocol.messages import Generated
from services.protocol.ticket import BeamState, GroupState, Ticket


class BeamGroup(Group):
    """The group of a ticket with `sampling.beam`."""

    def __init__(
        self, ticket: Ticket, sequences: Seq[Sequence], spare: Seq[int], num_acquired: int
    ) -> None:
        super().__init__(ticket, sequences, spare, num_acquired)
        params, rules = ticket.sampling.beam, sequences[0].rules
        assert params is not None
        self._num_returned = ticket.sampling.n
        max_tokens = rules.max_len - rules.num_prompt_tokens
        self._search = BeamSearch(params, rules.stop_ids, max_tokens)
        self._num_prompt_tokens = rules.num_prompt_tokens
        self._beams = ticket.beams or BeamState((FIRST.score,))
        self._candidates: dict[int, Logprobs] = {}

    def runnable(self) -> list[Sequence]:
        """All beams that have tokens to compute, or none. So no beam's candidates wait for another
        beam longer than necessary, and no ticket is issued in mid-step."""
        runnable = super().runnable()
        num_waiting = sum(one.num_unlaunched > 0 for one in self.sequences)
        return runnable if len(runnable) == num_waiting else []

    def abort_sequence(self, index: int) -> bool:
        """False: only the search ends a beam."""
        return False

    def state(self) -> GroupState:
        state = super().state()
        return replace(state, beams=self._beams) if state.sequences else state

    def _apply_draw(self, sequence: Sequence, token: int, logprobs: Logprobs | None) -> None:
        assert logprobs is not None
        self._candidates[sequence.index] = logprobs
        if len(self._candidates) == len(self._beams.scores):
            self._step()
            if self.one_token:
                self.stopped, self.sequences = self.sequences, []

    def _step(self) -> None:
        generated = (one.tokens[self._num_prompt_tokens :] for one in self.sequences)
        step = self._search.step(
            [
                LivingBeam(tokens, score)
                for tokens, score in zip(generated, self._beams.scores, strict=True)
            ],
            self._beams.finished,
            [self._candidates[one.index] for one in self.sequences],
        )
        self._candidates.clear()
        self._beams = BeamState(tuple(one.score for one in step.living), step.finished)
        self._replace_beams(step.living)
        if not step.living:
            self._advance.outputs += [
                Generated(
                    *self._attempt,
                    index,
                    self._num_prompt_tokens,
                    one.token_ids,
                    one.finish_reason,
                    score=one.score,
                )
                for index, one in enumerate(step.finished[: self._num_returned])
            ]

    def _replace_beams(self, living: Seq[Continuation]) -> None:
        """Replace the beams by their continuations. Beams that end free blocks for the forks."""
        ranks = defaultdict(list)
        for rank, continuation in enumerate(living):
            ranks[continuation.parent].append(rank)
        beams = list(self.sequences)
        for place, beam in enumerate(beams):
            if place not in ranks:
                self.end(beam)
        for place, (first, *others) in ranks.items():
            for rank in others:
                self.fork(beams[place], rank).continue_as_beam(rank, living[rank].token_id)
            beams[place].continue_as_beam(first, living[first].token_id)
        self.sequences.sort(key=lambda one: one.index)


def group_class(ticket: Ticket) -> type[Group]:
    """`BeamGroup` for a beam search, else `Group`."""
    return Group if ticket.sampling.beam is None else BeamGroup
