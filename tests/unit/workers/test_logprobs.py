"""Logprobs at the workers: chunk by chunk, in adopted blocks, and after interruptions of a
prompt."""

from dataclasses import replace
from typing import Any

from services.protocol.logprobs import LogprobColumns
from services.protocol.messages import Generated, Prefilled, Requeued, RequeueReason, Step
from services.protocol.ticket import SamplingParams

from .conftest import MakePair, WorkerPair
from .fakes import PROMPT, expected, logprobs_of, ticket
from .runs import prefilled

LONG = tuple(range(200, 250))
ASKS = SamplingParams(0.0, 0, 1.0, 0.0, seed=1, max_tokens=4, logprobs=2)


def of_prompt(prompt: tuple[int, ...], num_top: int) -> LogprobColumns:
    ends = range(2, len(prompt) + 1)
    return LogprobColumns.of([logprobs_of(prompt[:end], num_top) for end in ends])


async def submit(pair: WorkerPair, name: str, prompt: tuple[int, ...], **fields: Any) -> Any:
    num_top = fields.pop("prompt_logprobs", None)
    pair.prefill.role.submit(pair.session, ticket(name, prompt, **fields), num_top)
    return await issued(pair, name)


async def issued(pair: WorkerPair, name: str) -> Prefilled:
    await pair.until(lambda: name in prefilled(pair.session))
    return prefilled(pair.session)[name]


async def test_logprobs_of_every_token_of_prompt_and_answer(pair: WorkerPair) -> None:
    """The first token's from the prefill worker, the others from the decode worker, one a step."""
    event = await submit(pair, "r1", PROMPT, sampling=ASKS, prompt_logprobs=3)
    assert event.prompt_logprobs == of_prompt(PROMPT, 3)
    tokens = expected(PROMPT, 4)
    wanted = [logprobs_of([*PROMPT, *tokens[:end]], 2) for end in range(1, 5)]
    (first,) = event.outputs
    assert isinstance(first, Generated)
    assert first.logprobs == (wanted[0],)
    pair.decode.role.reserve(pair.session, "r1", 1, 1)
    pair.decode.role.admit(pair.session, event.ticket)
    outputs = []
    await pair.until(lambda: len(pair.session.of(Step)) == 3)
    for step in pair.session.of(Step):
        outputs += [(*output.token_ids, *output.logprobs) for output in step.outputs]
    assert outputs == list(zip(tokens[1:], wanted[1:], strict=True))


async def test_a_prompt_in_chunks_beside_others(make_pair: MakePair) -> None:
    """50 tokens at 16 a step, beside requests that ask for none, or for those of their tokens."""
    pair: WorkerPair = await make_pair(num_blocks=64)
    pair.prefill_model.gate.clear()
    plain = replace(ASKS, logprobs=None)
    for number, sampling in enumerate((plain, ASKS, plain), 2):
        asked = ticket(f"r{number}", PROMPT[:number], sampling=sampling)
        pair.prefill.role.submit(pair.session, asked)
    pair.prefill.role.submit(pair.session, ticket("r1", LONG), 1)
    pair.prefill_model.gate.set()
    assert (await issued(pair, "r1")).prompt_logprobs == of_prompt(LONG, 1)
    assert (await issued(pair, "r2")).prompt_logprobs is None
    (output,) = (await issued(pair, "r3")).outputs
    assert isinstance(output, Generated)
    assert output.logprobs == (logprobs_of([*PROMPT[:3], *output.token_ids], 2),)


async def test_a_cached_prompt_is_computed_again_and_not_stored(pair: WorkerPair) -> None:
    """It adopts cached blocks, reads them, and writes none of them (the fake would fail); so does a
    prompt that ends with its cached blocks."""
    await submit(pair, "r1", LONG, max_tokens=1)
    before = pair.arena.num_computed
    again = await submit(pair, "r2", LONG, max_tokens=1, prompt_logprobs=0)
    assert again.prompt_logprobs == of_prompt(LONG, 0)
    assert again.ticket.num_cached_tokens == 0
    assert pair.arena.num_computed - before == len(LONG)
    whole = await submit(pair, "r3", LONG[:48], max_tokens=1, prompt_logprobs=0)
    assert whole.prompt_logprobs == of_prompt(LONG[:48], 0)
    assert (await pair.store.stats("pool")).num_cached == len(LONG) // 4
    await pair.until_empty()


async def test_logprobs_of_a_preempted_request_come_once(make_pair: MakePair) -> None:
    """Half of the prompt is computed when its blocks are demanded; the worker that computes it
    again reports all of it."""
    pair: WorkerPair = await make_pair(max_num_batched_tokens=8)
    pair.prefill_model.pause_after = 3
    pair.prefill.role.submit(pair.session, ticket("r1", LONG), 2)
    await pair.until(lambda: pair.prefill_model.num_begun == 4)
    pair.prefill.role.preempt(["h-r1"])
    pair.prefill_model.pause_after = 0
    pair.prefill_model.gate.set()
    await pair.until(lambda: bool(pair.session.of(Requeued)))
    (back,) = pair.session.of(Requeued)
    assert back.reason is RequeueReason.PREEMPTED
    assert not pair.session.of(Prefilled)
    anew = replace(back.ticket, attempt=2, holder_id="h-again")
    pair.prefill.role.submit(pair.session, anew, 2)
    assert (await issued(pair, "r1")).prompt_logprobs == of_prompt(LONG, 2)


async def test_a_prompt_of_one_token_has_none(pair: WorkerPair) -> None:
    event = await submit(pair, "r1", PROMPT[:1], prompt_logprobs=5)
    assert event.prompt_logprobs is None
