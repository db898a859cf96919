"""The log of a run is a workload that `quire advise` understands."""

import random

from advisor.workload import RecordedRequest, WorkloadError, read_workload
from quire.async_client import AsyncClient
from quire.types import Sampling
from tests.waiting import until

from .deployment import Deployment

NUM_PROMPT, NUM_GENERATED = 43, 13  # of no other test


async def test_the_log_of_a_run_is_a_workload(client: AsyncClient, deployment: Deployment) -> None:
    """The log has the numbers of tokens in order of arrival; the second prompt found two blocks of
    the first."""
    draw = random.Random(43)
    tokens = [draw.randrange(259, 384) for _ in range(NUM_PROMPT)]
    sampling = Sampling(temperature=0.0, max_tokens=NUM_GENERATED, ignore_eos=True)
    for _ in range(2):
        await client.complete(tokens, sampling)
    lines = await until(lambda: logged(deployment), lambda lines: len(lines) == 2)
    first, second = lines  # they come through the supervisor
    assert (first.prefix, second.prefix) == ("", "32 tokens")
    assert second.num_shared_tokens == 32
    assert first.arrival_s < second.arrival_s


def logged(deployment: Deployment) -> list[RecordedRequest]:
    """The request lines of this test; none while a line is incomplete."""
    try:
        workload = read_workload(deployment.log)
    except WorkloadError:
        return []
    asked = (NUM_PROMPT, NUM_GENERATED)
    return [r for r in workload.requests if (r.num_prompt_tokens, r.num_generated_tokens) == asked]
