"""Explanations of requests that real workers kept waiting and preempted."""

import asyncio
import re

import pytest

from quire.async_client import AsyncClient
from quire.messages import Request
from quire.types import Usage

from .quiet import quiet
from .test_serving import greedy, prompt


async def test_waits_and_preemptions_are_explained_and_the_figures_add_up(
    client: AsyncClient,
) -> None:
    """24 requests of 25 blocks on 128 blocks."""
    loop = asyncio.get_running_loop()

    async def run(number: int) -> tuple[str, Usage, float]:
        name, begun = f"explained-{number}", loop.time()
        request = Request(prompt(number, 300), greedy(100), request_id=name, include_metrics=True)
        async for delta in client.send(request):
            last = delta
        assert last.usage is not None
        return name, last.usage, (loop.time() - begun) * 1000

    results = await asyncio.gather(*map(run, range(24)))
    for name, usage, whole_ms in results:
        figures = usage.metrics
        assert figures is not None, name
        parts = figures.queue_ms + figures.prefill_ms + figures.handoff_ms + figures.decode_ms
        assert parts == pytest.approx(whole_ms, rel=0.1, abs=250)
    told = {name: "\n".join(await client.explain(name)) for name, _, _ in results}
    preempted = [told[name] for name, usage, _ in results if usage.num_preemptions]
    assert preempted
    for text in preempted:
        # The last in order is preempted wherever it is: its ticket may rest at the prefill worker.
        assert re.search("it was preempted at (decode|prefill)-", text), text
        assert "; other requests held the others" in text  # this client is no operator
    assert any("had to wait for blocks at prefill-" in text for text in told.values())
    await quiet(client)
