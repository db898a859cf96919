"""The conditions under which the matrix of exactness runs each strategy of choosing tokens. Each
one asserts that it occurred."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count

from quire.messages import Request
from quire.types import Beam, Sampling
from services.gateway.api import RetainDirective
from tests.exactness import SEED, Answer, is_streamed, strategies, width

from .exactness_disturbances import DisturbedDeployment
from .exactness_parts import DeployedWorker
from .models_oracle import random_prompt

NUM_TOKENS = 24
STRATEGIES = strategies(NUM_TOKENS)
STRATEGIES["4 beams that end"] = replace(  # one ends after 2 tokens and stays the best
    STRATEGIES["4 beams"], beam=Beam(4, early_stopping="never"), stop_token_ids=(61, 201)
)
SPECULATING = [name for name in STRATEGIES if "beams" not in name]
"""The strategies whose drafts can be verified."""
PROMPT = random_prompt(37, seed=1)
PAUSE_EVERY = 4
BATCH = 64

Disturbance = Callable[[DisturbedDeployment, DeployedWorker], Awaitable[None]]


# ── the conditions ───────────────────────────────────────────────────────────────────────────────


async def undisturbed(deployment: DisturbedDeployment, request: Request) -> Answer:
    return await deployment.ask(request)


async def in_a_batch(deployment: DisturbedDeployment, request: Request) -> Answer:
    """The request runs in the middle of a batch, with requests of all strategies that outlast
    it."""
    (prefill,), (decode,) = deployment.prefills, deployment.decoders
    first, second, *others = companions(BATCH - 1)
    others[::3] = [replace(other, model=request.model) for other in others[::3]]
    before, after = others[::2], others[1::2]

    async def until_begun(num_requests: int, worker: DeployedWorker = decode) -> None:
        await deployment.until(lambda: deployment.stream(worker).num_begun >= num_requests)

    decode.forward.gate.clear()
    deployment.call(first)  # its step stops the decode engine until all requests are there
    await deployment.until_paused([decode])
    for other in before:
        deployment.call(other)
    await until_begun(1 + len(before))
    prefill.forward.gate.clear()
    deployment.call(second)  # its step stops the prefill engine until the next requests are there
    await deployment.until_paused([prefill])
    num_begun = deployment.stream(prefill).num_begun
    call = deployment.call(request)
    await until_begun(num_begun + 1, prefill)  # a grammar takes a while
    for other in after:
        deployment.call(other)
    await until_begun(num_begun + 2, prefill)
    prefill.forward.go_on()
    await until_begun(3 + len(others))
    decode.forward.go_on()
    answer = await call.answer()
    # On a late device, beams are in every second step.
    least = BATCH // 2 if deployment.late_decoders else BATCH
    assert min(row.num_rows for row in decode.forward.seen) >= least
    assert prefill.forward.seen[0].num_rows > 1
    await deployment.cancel_all()
    return answer


def companions(num_sequences: int) -> list[Request]:
    requests: list[Request] = []
    for seed in count(SEED + 1):
        for sampling in strategies(4 * NUM_TOKENS, seed).values():
            prompt = random_prompt(1 + len(requests) * 7 % 50, seed=seed + len(requests))
            requests.append(Request(prompt, sampling))
            num_sequences -= width(sampling)
            if num_sequences <= 0:
                return requests
    raise AssertionError


async def disturbed(
    deployment: DisturbedDeployment, request: Request, *disturbances: Disturbance
) -> Answer:
    """The answer to a request that is disturbed every few tokens, and has not ended by then."""
    every = PAUSE_EVERY // 2 if deployment.setting.speculates else PAUSE_EVERY
    deployment.pause(deployment.decoders, every)
    call = deployment.call(request)
    for disturbance in disturbances:
        paused = await deployment.until_paused(deployment.decoders)
        await deployment.until(lambda: bool(call.deltas) == is_streamed(request.sampling))
        assert not call.reading.done()
        if disturbance is disturbances[-1]:
            deployment.pause(deployment.decoders, every=0)
        await disturbance(deployment, paused)
    return await call.answer()


async def preemption(deployment: DisturbedDeployment, request: Request) -> Answer:
    """The prefix cache still has the blocks of the preempted request."""
    answer = await disturbed(deployment, request, DisturbedDeployment.preempt)
    assert answer.usage.num_preemptions == 1
    assert len(PROMPT) < deployment.prefills[0].num_seen < 2 * len(PROMPT)
    return answer


async def preemption_without_cache(deployment: DisturbedDeployment, request: Request) -> Answer:
    deployment.store.finds_nothing = True
    answer = await disturbed(deployment, request, DisturbedDeployment.preempt)
    assert answer.usage.num_preemptions == 1
    assert deployment.prefills[0].num_seen > 2 * len(PROMPT)
    return answer


async def swapping(deployment: DisturbedDeployment, request: Request) -> Answer:
    """Every block is copied to the swap pool and back: one token of each sequence is computed."""
    deployment.store.finds_nothing = True
    answer = await disturbed(deployment, request, DisturbedDeployment.preempt)
    assert answer.usage.num_preemptions == 1
    num_out = sum(decode.figure("swapped_out_blocks") for decode in deployment.decoders)
    assert deployment.prefills[0].figure("swapped_in_blocks") == num_out > 4
    assert deployment.prefills[0].num_seen == len(PROMPT) + width(request.sampling)
    return answer


async def drain(deployment: DisturbedDeployment, request: Request) -> Answer:
    """The request moves with its blocks, and nothing is computed again."""
    answer = await disturbed(deployment, request, DisturbedDeployment.drain)
    assert deployment.num_moves == 1
    assert all(decode.forward.seen for decode in deployment.decoders)
    assert deployment.prefills[0].num_seen == len(PROMPT)
    return answer


async def crash(deployment: DisturbedDeployment, request: Request) -> Answer:
    """The prefix cache still has the blocks that the dead worker had finished."""
    answer = await disturbed(deployment, request, DisturbedDeployment.kill)
    assert [decode.running.done() for decode in deployment.decoders].count(True) == 1
    assert all(decode.forward.seen for decode in deployment.decoders)
    assert len(PROMPT) < deployment.prefills[0].num_seen < 2 * len(PROMPT)
    return answer


async def crash_without_cache(deployment: DisturbedDeployment, request: Request) -> Answer:
    deployment.store.finds_nothing = True
    answer = await disturbed(deployment, request, DisturbedDeployment.kill)
    assert all(decode.forward.seen for decode in deployment.decoders)
    assert deployment.prefills[0].num_seen >= 2 * len(PROMPT)
    return answer


async def crash_in_its_prompt(deployment: DisturbedDeployment, request: Request) -> Answer:
    deployment.pause(deployment.prefills, every=1)
    call = deployment.call(request)
    paused = await deployment.until_paused(deployment.prefills)
    deployment.pause(deployment.prefills, every=0)
    await deployment.kill(paused)
    answer = await call.answer()
    assert 0 < paused.num_seen < len(PROMPT)
    assert all(prefill.forward.seen for prefill in deployment.prefills)
    return answer


async def all_disturbances(deployment: DisturbedDeployment, request: Request) -> Answer:
    answer = await disturbed(
        deployment,
        request,
        DisturbedDeployment.preempt,
        DisturbedDeployment.drain,
        DisturbedDeployment.kill,
    )
    assert (answer.usage.num_preemptions, deployment.num_moves) == (1, 1)
    assert all(decode.forward.seen for decode in deployment.decoders)
    return answer


async def prefix_of_another(deployment: DisturbedDeployment, request: Request) -> Answer:
    """Another request has the same first two and a half blocks."""
    sampling = Sampling(seed=SEED + 1, max_tokens=20, ignore_eos=True)
    await deployment.ask(Request((*PROMPT[:20], *random_prompt(9, seed=4)), sampling))
    answer = await deployment.ask(request)
    assert {row.num_adopted for row in deployment.prefills[0].forward.seen} == {16}
    return answer


async def prefix_of_its_own(deployment: DisturbedDeployment, request: Request) -> Answer:
    cold, answer = await deployment.ask(request), await deployment.ask(request)
    assert cold == answer
    assert {row.num_adopted for row in deployment.prefills[0].forward.seen} == {0, 32}
    return answer


async def explained(deployment: DisturbedDeployment, request: Request) -> Answer:
    """The answer carries its figures, and the story is read while the request runs."""
    stories = list[str]()

    async def explain(_: DisturbedDeployment, paused: DeployedWorker) -> None:
        stories.append(deployment.explain("told"))
        deployment.go_on()

    asked = replace(request, request_id="told", include_metrics=True)
    answer = await disturbed(deployment, asked, DisturbedDeployment.preempt, explain)
    assert "preempted" in stories[0]
    assert answer.usage.metrics is not None
    assert answer.usage.metrics.decode_ms > 0
    return answer


async def retained(deployment: DisturbedDeployment, request: Request) -> Answer:
    """The request asks for what `cache_control` does, and its prefix outlives all other blocks."""
    deployment.retain = (RetainDirective(300),)
    cold = await deployment.ask(request)
    deployment.retain = ()
    await deployment.evict()
    answer = await deployment.ask(request)
    assert cold == answer
    assert deployment.prefills[-1].forward.seen[-1].num_adopted == 32
    return answer


async def retained_by_a_dead_worker(deployment: DisturbedDeployment, request: Request) -> Answer:
    """The worker that computed the retained prefix dies before the other blocks are evicted."""
    deployment.retain = (RetainDirective(300),)
    await deployment.ask(request)
    (dying,) = (prefill for prefill in deployment.prefills if prefill.forward.seen)
    deployment.prefills.remove(dying)
    await deployment.kill(dying)
    await deployment.evict()
    answer = await deployment.ask(request)
    assert {row.num_adopted for row in deployment.prefills[0].forward.seen} == {32}
    return answer


async def blocks_from_files(deployment: DisturbedDeployment, request: Request) -> Answer:
    """The third request reads the blocks that were written for the second one, unless it has to
    compute them for the logprobs of its prompt."""
    (prefill,) = deployment.prefills
    num_blocks = 4 if request.sampling.prompt_logprobs is None else 0
    for _ in range(2):
        await deployment.ask(request)
    await deployment.until(lambda: prefill.figure("file_cache_written_blocks") == 4)
    await deployment.evict()
    num_seen = prefill.num_seen
    answer = await deployment.ask(request)
    assert prefill.figure("file_cache_hits") == num_blocks
    assert prefill.num_seen - num_seen == len(PROMPT) - 8 * num_blocks
    return answer


async def role_change(deployment: DisturbedDeployment, request: Request) -> Answer:
    """The request moves away from a decode worker, which then computes it again as prefill."""
    changes = DisturbedDeployment.change_role, DisturbedDeployment.preempt
    answer = await disturbed(deployment, request, *changes)
    first, changed = deployment.prefills
    assert (answer.usage.num_preemptions, deployment.num_moves) == (1, 1)
    assert first.num_seen == len(PROMPT)
    assert any(row.num_tokens > 1 for row in changed.forward.seen)
    return answer


async def upgrade(deployment: DisturbedDeployment, request: Request) -> Answer:
    """The request moves to a worker of the next version, on the same pool."""
    answer = await disturbed(deployment, request, DisturbedDeployment.upgrade)
    assert deployment.num_moves == 1
    assert deployment.decoders[-1].forward.seen
    assert not deployment.prefills[-1].forward.seen
    return answer


async def upgrade_to_other_weights(deployment: DisturbedDeployment, request: Request) -> Answer:
    """Workers of another fingerprint compute the request again from its tokens."""
    answer = await disturbed(deployment, request, DisturbedDeployment.upgrade_to_other_weights)
    assert deployment.num_moves == 0
    assert deployment.prefills[-1].num_seen > len(PROMPT)
    assert deployment.decoders[-1].forward.seen
    return answer


async def chunks(deployment: DisturbedDeployment, request: Request) -> Answer:
    answer = await deployment.ask(request)
    num_chunks = math.ceil(len(PROMPT) / deployment.setting.chunk)
    assert len(deployment.prefills[0].forward.seen) == num_chunks > 1
    return answer


async def threads(deployment: DisturbedDeployment, request: Request) -> Answer:
    answer = await deployment.ask(request)
    lanes = {worker.forward.num_lanes for worker in (*deployment.prefills, *deployment.decoders)}
    assert lanes == {deployment.setting.num_threads}
    return answer


async def lateness(deployment: DisturbedDeployment, request: Request) -> Answer:
    """A step is launched before the tokens of the last one are known, except for beams: the host
    chooses which of them go on."""
    answer = await deployment.ask(request)
    num_ahead = sum(device.num_ahead for device in deployment.late_decoders)
    assert bool(num_ahead) is (request.sampling.beam is None)
    return answer


async def blocks(deployment: DisturbedDeployment, request: Request) -> Answer:
    answer = await deployment.ask(request)
    num_blocks = math.ceil((len(PROMPT) + 1) / deployment.setting.block_size)
    assert {row.num_blocks for row in deployment.prefills[0].forward.seen} == {num_blocks}
    return answer
