"""The progress of a beam search, as the gateway knows it."""

from collections.abc import Sequence

from services.protocol.messages import Generated
from services.protocol.ticket import GroupState, TicketSequence, TicketState


class Search:
    """The beam search of one request, over all its attempts.

    Its client gets no token before the end, so an attempt starts from the beams that a worker
    returned last. The steps that a lost worker has made since then are repeated, with the same
    result.
    """

    def __init__(self) -> None:
        self.state = GroupState((TicketSequence(0),))
        """The state that a worker returned last, without blocks."""
        self._num_steps = self._most_steps = 0
        """The number of steps in `state` and since then, and the largest number so far."""

    @property
    def is_repeating(self) -> bool:
        """Whether the next steps repeat steps of a lost worker."""
        return self._num_steps < self._most_steps

    def save(self, state: TicketState) -> None:
        """Keep the beams, if a worker returned some."""
        if state.beams is not None and state.sequences:
            bare = tuple(TicketSequence(one.index, one.token_ids) for one in state.sequences)
            self.state = GroupState(bare, state.beams)
            self._num_steps = len(bare[0].token_ids)

    def is_progress(self, outputs: Sequence[Generated]) -> bool:
        """Whether these outputs, one without a token for each step, are of new steps, or the
        result."""
        if any(one.token_ids for one in outputs):
            return True
        self._num_steps += len(outputs)
        is_longer = self._num_steps > self._most_steps
        self._most_steps = max(self._most_steps, self._num_steps)
        return is_longer
