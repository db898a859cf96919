"""Steps of a model over an arena of its own, without pool, store and worker."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvops import Backend, int8_kv
from services.engine.batch import Draw, Owner, Row, RowResult
from services.engine.models.model import Model
from services.engine.runner import Runner
from services.protocol.ticket import SamplingParams

BLOCK_SIZE = 16
GREEDY = Draw(SamplingParams(temperature=0.0), 0)


class Relaunched:
    """The graph of a device without graphs: it launches again."""

    def capture(self, launch: Callable[[], Tensor]) -> Tensor:
        self._launch, self._result = launch, launch()
        return self._result

    def replay(self) -> None:
        self._result.copy_(self._launch())


class Steps:
    """A model and an arena, in which each sequence has the same number of blocks."""

    def __init__(self, model: Model, ops: Backend) -> None:
        self.model, self.ops = model, ops

    def begin(
        self, num_sequences: int, longest: int, content: float = float("nan"), in_int8: bool = False
    ) -> None:
        """Makes the arena. Each sequence gets blocks for `longest` positions, which hold
        `content`, or zeros if keys and values are int8."""
        config = self.model.config
        self._blocks_each = -(-longest // BLOCK_SIZE)
        num_blocks = num_sequences * self._blocks_each
        shape = (num_blocks, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads)
        if in_int8:
            arena = torch.zeros(*shape, config.head_dim + int8_kv.SCALE_BYTES, dtype=torch.int8)
        else:
            arena = torch.full(
                (*shape, config.head_dim),
                content,
                dtype=self.model.dtype,
                device=self.model.device,
            )
        self.position_bytes = arena[0].nbytes // BLOCK_SIZE
        self.runner = Runner(self.model, arena, BLOCK_SIZE, self.ops)
        self._owners = [Owner() for _ in range(num_sequences)]

    def capture(self, max_rows: int, max_tokens: int) -> None:
        """Records the graphs of a worker, on a CPU stand-ins for them."""
        new_graph = Relaunched if self.model.device.type == "cpu" else None
        self.runner.capture_graphs(max_rows, max_tokens, new_graph)

    def row(
        self, number: int, token_ids: Sequence[int], start: int, draws: tuple[Draw, ...] = (GREEDY,)
    ) -> Row:
        """A row of the sequence with this number."""
        first = number * self._blocks_each
        blocks = range(first, first + self._blocks_each)
        return Row(token_ids, start, blocks, draws=draws, owner=self._owners[number])

    def prefill(
        self, number: int, prompt: Sequence[int], chunk: int, draws: tuple[Draw, ...] = (GREEDY,)
    ) -> RowResult:
        """Computes a prompt in chunks. Returns what is drawn behind it."""
        result: RowResult = ()
        for start in range(0, len(prompt), chunk):
            piece = prompt[start : start + chunk]
            is_last = start + chunk >= len(prompt)
            rows = [self.row(number, piece, start, draws if is_last else ())]
            (result,) = self.runner.launch(rows).result()
        return result

    def timed(self, rows: Sequence[Row]) -> tuple[float, list[RowResult]]:
        """The seconds of a step, and what it draws."""
        began = time.perf_counter()
        with torch.inference_mode():
            results = self.runner.launch(rows).result()
        return time.perf_counter() - began, list(results)
