"""Times decode steps whose rows have LoRA adapters beside the same without, in turn."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.engine_pairs import Pairs, in_turn
from services.engine.batch import Draw, LoadedAdapter, Row
from services.engine.models import Model
from services.engine.runner import Runner
from services.model.checkpoint.adapter import CONFIG_FILE, WEIGHTS_FILE, AdapterFiles
from services.model.config.layout import weight_shapes
from services.protocol.ticket import SamplingParams

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=1)
NUM_ADAPTERS = 4


def random_adapter(model: Model, rank: int, seed: int) -> LoadedAdapter:
    """An adapter of all linears of attention and MLP."""
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in weight_shapes(model.config).items():
        linear = name.removesuffix(".weight")
        if linear.endswith("_proj") and ".experts." not in linear:
            sides = {"A": (rank, shape[1]), "B": (shape[0], rank)}
            for side, size in sides.items():
                values = 0.01 * torch.randn(size, generator=draw)
                tensors[f"base_model.model.{linear}.lora_{side}.weight"] = values
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / WEIGHTS_FILE)
        fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
        (Path(folder) / CONFIG_FILE).write_text(json.dumps(fields))
        files = AdapterFiles.read(Path(folder), model.config, rank)
        return LoadedAdapter(files.digest, model.load_adapter(files))


def adapters(
    model: Model,
    runner: Runner,
    table: Callable[[int], range],
    shape: tuple[int, int],
    rank: int,
    rounds: int,
) -> Iterator[Pairs]:
    """`shape`: streams, and positions of each."""
    streams, context = shape
    loaded = [random_adapter(model, rank, seed) for seed in range(min(NUM_ADAPTERS, streams))]
    several = [loaded[row * len(loaded) // streams] for row in range(streams)]
    kinds: dict[str, list[LoadedAdapter | None]] = {
        f"1 adapter of rank {rank}": [loaded[0]] * streams,
        f"{len(loaded)} adapters of rank {rank}": [*several],
        "1 row with an adapter": [*[None] * (streams - 1), loaded[0]],
    }
    for row in range(streams):
        runner.launch([Row([7 + row] * (context - 1), 0, table(row))]).result()

    def step(of_rows: list[LoadedAdapter | None], _: int, adapts: bool) -> float:
        rows = [
            Row([9], context - 1, table(row), draws=(Draw(GREEDY, 0),), adapter=adapter)
            for row, adapter in enumerate(of_rows if adapts else [None] * streams)
        ]
        began = time.perf_counter()
        with torch.inference_mode():
            runner.launch(rows).result()
        return time.perf_counter() - began

    for what, of_rows in kinds.items():
        yield in_turn(what, streams, rounds, partial(step, of_rows))
