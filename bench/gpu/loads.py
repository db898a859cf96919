"""The load that `quire serve` carries on a GPU, beside transformers' continuous batching and beside
what a copy within the GPU's memory moves."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu.check import Check, Failed, Machine, Passed
from bench.gpu.deployment import needed_packages, served

MAX_MS_ALONE = 2.4
"""Milliseconds a token of one stream of Qwen3-0.6B's shape."""
MIN_REQUESTS_PER_S = 95.0
"""Of that shape, 500 requests at once of 512 tokens in and 128 out. vLLM serves 94.9 on an H100."""
MIN_TOKENS_PER_S = 13_300.0
"""Of Qwen3-8B's shape with 400 streams of 128 tokens in and 1,024 out, as vLLM on an H100."""

Loads = Callable[[Any, Any], Awaitable[dict[str, dict[str, float]]]]
"""Sends loads to a target, with prompts; returns the figures of each."""


def checks(machine: Machine) -> Iterator[Check]:
    yield "Qwen3-0.6B's shape: alone, 500 at once, 16 a second", partial(_small, machine)
    yield "Qwen3-0.6B's shape: 500 at once by transformers", partial(_transformers, machine)
    yield "Qwen3-8B's shape: 400 streams", partial(_large, machine)


def _small(machine: Machine) -> Passed:
    count, num_tokens = machine.pick(500, 2), machine.pick(128, 4)

    async def loads(target: Any, prompts: Any) -> dict[str, dict[str, float]]:
        from bench.serving.scenarios import at_random, closed

        await closed(target, prompts, 2, 512, num_tokens)  # makes what is made at first use
        return {
            "alone": (await closed(target, prompts, 1, 16, machine.pick(512, 8))).values,
            "at once": (await closed(target, prompts, count, 512, num_tokens)).values,
            "16/s": (await at_random(target, prompts, 16.0, machine.pick(400, 2), 0)).values,
        }

    found, weights = _serve(machine, "0.6b", loads)
    ms, copied = found["alone"]["gap p50 ms"], machine.copy_rate()
    rate = count / found["at once"]["seconds"]
    text = (
        f"alone {ms:.2f} ms a token, {weights / ms / 1e6:,.0f} GB/s of weights where a copy moves "
        f"{copied / 1e9:,.0f}; at once {rate:.1f} requests/s"
    )
    return _judged(machine, found, text, ms <= MAX_MS_ALONE and rate >= MIN_REQUESTS_PER_S)


def _large(machine: Machine) -> Passed:
    streams, num_tokens = machine.pick(400, 2), machine.pick(1024, 4)

    async def loads(target: Any, prompts: Any) -> dict[str, dict[str, float]]:
        from bench.serving.scenarios import closed

        await closed(target, prompts, 2, 128, 8)
        return {"": (await closed(target, prompts, streams, 128, num_tokens)).values}

    found, _ = _serve(machine, "8b", loads)
    rate = found[""]["tok/s"]
    return _judged(machine, found, f"{rate:,.0f} tok/s", rate >= MIN_TOKENS_PER_S)


def _serve(machine: Machine, shape: str, loads: Loads) -> tuple[dict[str, dict[str, float]], int]:
    """Serve a model of this shape with one prefill and one decode worker. Returns the figures of
    the loads, and the bytes of the weights."""

    async def send(url: str, model: Path) -> dict[str, dict[str, float]]:
        from bench.load import HttpTarget
        from bench.serving.scenarios import prompts_of

        fields = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        target = HttpTarget(url, "model", fields=fields)
        try:
            return await loads(target, prompts_of(model, 0))
        finally:
            await target.close()

    with served(machine, shape, *machine.pick((), ("--pool-memory", "64MiB"))) as (running, model):
        weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        return asyncio.run(send(running.http, model)), weights


def _transformers(machine: Machine) -> Passed:
    """The same prompts and lengths, in one process without a server."""
    needed_packages()
    from transformers import AutoModelForCausalLM

    from bench.make_checkpoint import SHAPES, make_checkpoint
    from bench.serving.scenarios import prompts_of

    count, num_tokens = machine.pick(500, 2), machine.pick(128, 4)
    with tempfile.TemporaryDirectory() as name:
        path = make_checkpoint(Path(name) / "model", SHAPES[machine.pick("0.6b", "tiny")])
        prompts = prompts_of(path, 0)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=machine.half)
    model.to(machine.device).eval()
    model.generation_config.update(do_sample=False, max_new_tokens=num_tokens, eos_token_id=-1)

    def generate(number: int) -> float:
        drawn = [prompts.draw(512) for _ in range(number)]
        began = time.perf_counter()
        answers = model.generate_batch(drawn)
        seconds = time.perf_counter() - began
        num_whole = sum(len(each.generated_tokens) == num_tokens for each in answers.values())
        if num_whole < number:
            raise Failed(f"{num_whole} of {number} answers have {num_tokens} tokens")
        return seconds

    generate(2)
    rate = count / generate(count)
    return Passed(f"{rate:.1f} requests/s", {"requests/s": rate})


def _judged(
    machine: Machine, found: dict[str, dict[str, float]], text: str, is_fast: bool
) -> Passed:
    """Raises Failed if a request failed, or a load was too slow for a GPU of capability 9.0."""
    num_failed = sum(values["failed"] for values in found.values())
    if num_failed:
        raise Failed(f"{num_failed:.0f} requests failed; {text}")
    figures = {f"{n} {key}".strip(): v for n, values in found.items() for key, v in values.items()}
    return machine.judge(is_fast or not machine.is_hopper, "more", text, figures)
