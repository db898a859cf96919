"""The flights of a device: what a step has drawn stays there, and the host fetches it in one copy.

Rows of the next step may take the drawn tokens on the device, before the host has them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.engine.batch import Answer, Fault, Query, Row, RowResult
from services.engine.device.event import DeviceEvent, record_event
from services.engine.sampling.logit_queries import row_results
from services.engine.sampling.logprobs import ScoreTensors, scores_of
from services.engine.sampling.sampling_head import join_answers
from services.protocol.logprobs import Logprobs

NOT_FINITE = -1

Answers = Sequence[Answer | Fault]


class DrawnFlight:
    """`drawn`: the token of each draw, [draws] int64, on the device; -1: its logits are not finite.
    `scores`: the logprobs of queries, with the indices of these queries. `checked`: corrects the
    answers of draws whose grammars have failed."""

    def __init__(
        self,
        rows: Sequence[Row],
        asked: Sequence[Query],
        drawn: Tensor,
        scores: Sequence[tuple[Sequence[int], ScoreTensors]] = (),
        checked: Callable[[Answers], Answers] = lambda answers: answers,
    ) -> None:
        self.drawn = drawn
        self._rows = tuple(rows)
        self._asked = asked
        self._scores = scores
        self._checked = checked
        self._results: Sequence[RowResult] | None = None
        parts = [drawn]
        for _, (token_ids, logprobs, ranks) in scores:
            parts += [token_ids, logprobs.double().view(torch.int64), ranks]
        packed = torch.cat([part.flatten() for part in parts]) if scores else drawn
        self._host = torch.empty(
            packed.shape, dtype=torch.int64, pin_memory=drawn.device.type == "cuda"
        )
        self._host.copy_(packed, non_blocking=True)
        self._event: DeviceEvent = record_event(drawn.device)

    @property
    def is_complete(self) -> bool:
        return self._event.query()

    def result(self) -> Sequence[RowResult]:
        if self._results is None:
            self._event.synchronize()
            self._results = self._read()
        return self._results

    def _read(self) -> Sequence[RowResult]:
        drawn = iter(self._host[: len(self.drawn)].tolist())
        tokens: list[int | Fault] = []
        for query in self._asked:
            token = query.token if isinstance(query.token, int) else next(drawn)
            tokens.append(Fault.NOT_FINITE if token == NOT_FINITE else token)
        answers = join_answers(self._asked, tokens, self._logprobs())
        return row_results(self._rows, self._checked(answers))

    def inputs(self, rows: Sequence[int]) -> list[int]:
        """The draws of these rows, by index, of one draw each: places in `drawn`."""
        first_draws, number = [], 0
        for row in self._rows:
            first_draws.append(number)
            number += len(row.draws)
        return [first_draws[row] for row in rows]

    def _logprobs(self) -> list[Logprobs | Fault]:
        """Those of the queries that ask for them, in order."""
        found: dict[int, Logprobs | Fault] = {}
        begin = len(self.drawn)
        for indices, (token_ids, _, ranks) in self._scores:
            ends = [begin + token_ids.numel(), begin + 2 * token_ids.numel()]
            ids = self._host[begin : ends[0]].view(token_ids.shape)
            logprobs = self._host[ends[0] : ends[1]].view(torch.float64).view(token_ids.shape)
            begin = ends[1] + len(ranks)
            scores = scores_of(ids, logprobs.float(), self._host[ends[1] : begin])
            found |= zip(indices, scores, strict=True)
        return [found[index] for index in sorted(found)]
