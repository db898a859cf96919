"""A worker that cannot go on ends, so that no request waits for it."""

import asyncio
from collections.abc import Callable

import pytest

from services.protocol.messages import Step, WorkerEvent
from services.runtime.errors import InvalidRequest
from services.worker.roles.decode import Decode
from services.worker.roles.prefill import Prefill

from .conftest import WorkerPair
from .fakes import PROMPT, FakeSession, ticket
from .runs import prefill


class UnresponsiveSession(FakeSession):
    def send(self, event: WorkerEvent, then: Callable[[], None] | None = None) -> None:
        if isinstance(event, Step):
            raise ValueError("cannot be sent")
        super().send(event, then)


async def test_an_error_after_a_step_ends_the_worker(pair: WorkerPair) -> None:
    """The outcomes of the rest of the step are lost: the worker must not seem to go on."""
    worker = await pair.another("w", Decode)
    issued = await prefill(pair, ticket("r1", PROMPT))
    working = asyncio.create_task(worker.run())
    session = UnresponsiveSession()
    worker.role.reserve(session, *issued.key, 1)
    worker.role.admit(session, issued)
    with pytest.raises(ValueError, match="cannot be sent"):
        await asyncio.wait_for(working, 10)


async def test_a_worker_without_the_draft_model_of_decode_stays_a_prefill_worker(
    pair: WorkerPair,
) -> None:
    """It would decode without drafts, while its deployment counts on them."""
    worker = await pair.another("prefill-2-0000000a", Prefill, lacks_draft=True)
    with pytest.raises(InvalidRequest, match=r"prefill-2 was started .* without the draft model"):
        worker.drain("decode")
    assert not worker.draining
