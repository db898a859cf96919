"""The conditions of the matrix of exactness for workers that prefill and decode in one engine."""

from quire.messages import Request
from quire.types import Sampling
from tests.exactness import SEED, Answer

from .exactness_conditions import PAUSE_EVERY, companions, disturbed
from .exactness_disturbances import DisturbedDeployment
from .exactness_parts import DeployedWorker
from .models_oracle import random_prompt

MOST_DRAFTS = 2
"""Of a row that decodes."""


def mixes(worker: DeployedWorker) -> bool:
    """Whether the worker has computed a chunk of the compared request's prompt, and decoded it."""
    return {True, False} <= {row.num_tokens > 1 + MOST_DRAFTS for row in worker.forward.seen}


async def among_others(deployment: DisturbedDeployment, request: Request) -> Answer:
    """The request's prompt is computed in steps that decode others, and then others' prompts in
    steps that decode it."""
    (mixed,) = deployment.decoders
    others = companions(24)
    calls = [deployment.call(other) for other in others]
    await deployment.until(lambda: sum(bool(call.deltas) for call in calls) > len(others) // 3)
    deployment.pause([mixed], every=2 * PAUSE_EVERY)
    call = deployment.call(request)
    await deployment.until_paused([mixed])
    deployment.pause([mixed], every=0)
    long = Sampling(seed=SEED + 1, max_tokens=2, ignore_eos=True)
    prefill, _ = deployment.streams(mixed)
    num_begun = prefill.num_begun
    for seed in range(4):
        deployment.call(Request(random_prompt(150, seed=9 + seed), long))
    await deployment.until(lambda: prefill.num_begun > num_begun)
    deployment.go_on()
    answer = await call.answer()
    seen = mixed.forward.seen
    assert any(row.num_tokens > 1 and row.num_rows > 1 for row in seen)
    assert any(row.num_tokens == 1 and row.num_step_tokens > row.num_rows for row in seen)
    await deployment.cancel_all()
    return answer


async def preemption(deployment: DisturbedDeployment, request: Request) -> Answer:
    answer = await disturbed(deployment, request, DisturbedDeployment.preempt)
    assert answer.usage.num_preemptions == 1
    assert any(map(mixes, deployment.decoders))
    return answer


async def crash(deployment: DisturbedDeployment, request: Request) -> Answer:
    answer = await disturbed(deployment, request, DisturbedDeployment.kill)
    assert [worker.running.done() for worker in deployment.decoders].count(True) == 1
    assert any(map(mixes, deployment.decoders))
    assert all(worker.forward.seen for worker in deployment.decoders)
    return answer


async def all_disturbances(deployment: DisturbedDeployment, request: Request) -> Answer:
    disturbances = "preempt", "drain", "kill"
    ways = [getattr(DisturbedDeployment, name) for name in disturbances]
    answer = await disturbed(deployment, request, *ways)
    assert (answer.usage.num_preemptions, deployment.num_moves) == (1, 1)
    assert any(map(mixes, deployment.decoders))
    return answer
