"""The calls between ranks that are part of a step: every step arrives as it was sent."""

from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.engine.device.graphs import GraphShape
from services.engine.device.steps import STEP_TENSORS, StepFacts
from services.engine.models.model import AdapterRun
from services.engine.ranks.calls import Call
from services.engine.ranks.step_call import called
from tests.examples import examples

numbers = st.integers(0, 2**31 - 1)
runs = st.builds(AdapterRun, numbers, numbers, numbers)
shapes = st.builds(GraphShape, *[st.integers(1, 512)] * 3, st.booleans())


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepFacts, dict[str, Tensor]]:
    """Facts and tensors as the runner makes them; `page_ids` are there on some backends only."""
    lens = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    begins = np.cumsum([0, *lens]).astype(np.int32)
    context = np.array(draw(st.lists(numbers, min_size=len(lens), max_size=len(lens))), np.int32)
    facts = StepFacts(
        begins,
        context,
        draw(numbers),
        graph=draw(st.none() | shapes),
        adapters=tuple(draw(st.lists(runs, max_size=3))),
    )
    width, num_wanted = draw(st.integers(0, 5)), draw(st.integers(0, 7))

    def random(*shape: int, dtype: type[np.integer[Any]] = np.int64) -> Tensor:
        return torch.from_numpy(np.random.default_rng(1).integers(-9, 9, shape).astype(dtype))

    placed = {name: random(int(begins[-1])) for name in ("token_ids", "positions", "slot_mapping")}
    placed |= {
        "block_tables": random(len(lens), width, dtype=np.int32),
        "cu_query_lens": torch.from_numpy(begins),
        "context_lens": torch.from_numpy(context),
        "wanted": random(num_wanted),
        "draft_sources": random(3),  # no tensor of a step: it stays at rank 0
    }
    if draw(st.booleans()):
        placed["page_ids"] = random(draw(st.integers(0, 20)), dtype=np.int32)
    return facts, placed


@settings(max_examples=examples(200))
@given(steps())
def test_a_step_arrives_as_it_was_called(step: tuple[StepFacts, dict[str, Tensor]]) -> None:
    facts, placed = step
    call, octets = called(placed, facts)
    sent = Call("compute", (call,), is_answered=False)
    there = ForkingPickler.loads(ForkingPickler.dumps(sent))
    assert (there.method, there.is_answered, there.num_descriptors) == ("compute", False, 0)
    (found,) = there.arguments
    assert sum(found.num_bytes) == len(octets)
    for name in ("num_tokens", "graph", "adapters"):
        assert getattr(found.facts, name) == getattr(facts, name)
    for name in ("query_begins", "context_lens"):
        arrived = getattr(found.facts, name)
        np.testing.assert_array_equal(arrived, getattr(facts, name))
        assert (arrived.dtype, arrived.flags.writeable) == (np.int32, True)
    tensors = found.unpacked(octets)
    assert tensors.keys() == placed.keys() & set(STEP_TENSORS)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, placed[name])
        assert tensor.dtype == placed[name].dtype
