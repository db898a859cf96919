"""Steps as a worker runs them: CUDA graphs, and the next decode step launched while one is in
flight. Their tokens, their time, and how long the GPU has nothing to do."""

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import kvops
import kvops.cuda
from bench.gpu.check import Check, Failed, Figures, Machine, Passed, Skipped
from bench.gpu.model import (
    DRAWS,
    generate,
    last_logits,
    make_config,
    near,
    prompts,
    random_steps,
    same_texts,
)
from bench.steps import BLOCK_SIZE, GREEDY, Steps
from kvops import AttentionShape
from services.engine.batch import Row
from services.engine.device.gpu_memory import CudaMeter
from services.engine.forward import Flight
from services.runtime.errors import StartupError

QWEN3_8B = {"num_layers": 36, "hidden_size": 4096, "vocab_size": 151_936}
READ_BYTES = 15.1e9
"""The weights that a step of this shape reads: all but the embeddings, in bf16."""
MIN_COPY_SHARE = 0.9
"""Of a copy's bytes per second, at which a step of one row reads the weights."""
STEPS = ((1, 1000), (64, 1000))
"""Rows and context."""
MAX_MS_64_ROWS = 10.5
PREFILL_LIMIT_MS = 5.5
"""Milliseconds from the launch of 64 tokens behind 1,000 cached ones to the first token."""
MAX_IDLE = 0.02
NUM_DRAFTS = 4
MOST_WITH_DRAFTS, MOST_WAITING = 1.15, 1.4
"""A step of one row with drafts, as a multiple of one without that runs ahead: in a run of them,
and if the host waits for each, as the engine does."""
NUM_STEPS = 50


def checks(machine: Machine) -> Iterator[Check]:
    yield "graphs give the tokens of eager steps", lambda: _tokens(machine)
    yield "logits from graphs are near those of eager steps", lambda: _logits(machine)
    yield "tokens among drafts are those of steps without", lambda: _drafts(machine)
    yield "the step that is measured for the memory plan", lambda: _largest_step(machine)
    yield "graphs take the memory that is planned for them", lambda: _graph_memory(machine)
    for rows, context in STEPS:
        yield (
            f"a step of Qwen3-8B's shape, {rows} x {context}",
            partial(_step, machine, rows, context),
        )
    yield "a prefill of 64 tokens of Qwen3-8B's shape, 1,000 cached", lambda: _prefill(machine)
    yield f"{NUM_DRAFTS} drafts in a step of Qwen3-8B's shape", lambda: _time_of_drafts(machine)


def attention_of(shape: AttentionShape) -> str:
    """The backend that a worker would choose."""
    ops, _ = kvops.choose_attention("auto", shape)
    return ops.name


def _tokens(machine: Machine) -> Passed:
    """Prompts of several lengths together; greedy and drawn. Padding: 5 rows in a graph of 6. In
    fp32, because cuBLAS may compute 5 and 6 rows to other bits, which decide near-ties in bf16."""
    steps, texts = _small(machine, torch.float32, "triton"), prompts(machine)
    num_tokens = machine.pick(24, 3)
    eager, graphed = (generate(steps, texts, num_tokens, 1000, DRAWS, rows) for rows in (0, 6))
    same_texts(graphed, eager, "with graphs")
    return Passed(f"{len(texts)} sequences of {num_tokens} tokens")


def _small(machine: Machine, dtype: torch.dtype, backend: str) -> Steps:
    config = make_config(machine.pick(3, 1), machine.pick(256, 64), 384)
    config = replace(config, max_position_embeddings=machine.pick(4096, 64))
    return random_steps(config, dtype, backend, machine.device)


def _logits(machine: Machine) -> Passed:
    """All prompts in one graph of chunks, then their last tokens in one of a decode step, with the
    attention that a worker would choose."""
    hidden = machine.pick(256, 64)
    shape = AttentionShape(hidden // 32, hidden // 64, 64, BLOCK_SIZE, machine.half, machine.half)
    name = attention_of(shape)
    steps, texts = _small(machine, machine.half, name), prompts(machine)
    eager, graphed = (last_logits(steps, texts, rows) for rows in (0, 6))
    return near(graphed, eager, f"attention by {name}")


def _drafts(machine: Machine) -> Passed:
    """The rows of one step have drafts, the last of which is wrong. Each draws, up to there, the
    tokens that it draws one by one, greedy and at a temperature; and so does the step behind, which
    is launched before the host knows where that is. In fp32, as above."""
    steps, texts = _small(machine, torch.float32, "triton"), prompts(machine)
    num_drafts = machine.pick(6, 2)
    known = generate(steps, texts, num_drafts + 1, 1000, DRAWS)
    steps.begin(len(texts), max(map(len, texts)) + num_drafts + 2)
    steps.capture(len(texts) * (num_drafts + 1), 0)
    rows = []
    for number, text in enumerate(texts):
        steps.prefill(number, text, len(text))
        new = known[number][len(text) :]
        draws = (DRAWS[number % 2],) * (num_drafts + 1)
        row = steps.row(number, [*new[:-2], (new[-2] + 1) % 384, 0], len(text), draws)
        rows.append(replace(row, num_drafts=num_drafts))
    flight, behind = steps.runner.launch(rows), []
    for number, text in enumerate(texts):
        row = steps.row(number, [], len(text) + 1, (DRAWS[number % 2],))
        behind.append(replace(row, num_on_device=1, num_unknown=num_drafts))
    found = zip(flight.result(), steps.runner.launch(behind).result(), strict=True)
    wrong = 0
    for text, tokens, (result, last) in zip(texts, known, found, strict=True):
        assert isinstance(result, tuple)
        assert isinstance(last, tuple)
        wrong += [*result[: num_drafts - 1], *last] != tokens[len(text) + 1 :]
    if wrong:
        raise Failed(f"{wrong} of {len(texts)} sequences draw other tokens")
    return Passed(f"{len(texts)} sequences with {num_drafts} drafts")


def _largest_step(machine: Machine) -> Passed:
    """The step that is measured for the memory plan has filters, penalties, grammars and logprobs:
    it takes at least what a plain step of as many tokens takes."""
    vocab_size, num_rows = machine.pick(151_936, 384), machine.pick(64, 3)
    config = make_config(1, machine.pick(256, 64), vocab_size)
    steps = random_steps(config, machine.half, "triton", machine.device)
    steps.begin(1, BLOCK_SIZE)
    if machine.dry_run:
        steps.runner.run_largest_step(machine.pick(8192, 40), num_rows)
        return Passed(f"{num_rows} rows")
    peaks = []
    lens = [8192 // num_rows] * num_rows
    plain = [Row([0] * n, 0, [0] * -(-n // BLOCK_SIZE), n, (GREEDY,)) for n in lens]
    for launch in (
        lambda: steps.runner.launch(plain).result(),
        lambda: steps.runner.run_largest_step(8192, num_rows),
    ):
        launch()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        launch()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    text = f"plain {peaks[0] / 2**20:.0f} MiB, largest {peaks[1] / 2**20:.0f} MiB"
    if peaks[1] < peaks[0]:
        raise Failed(text)
    return Passed(text, {"plain": peaks[0], "largest": peaks[1]})


def _graph_memory(machine: Machine) -> Passed:
    """Planned on an arena of one block, then recorded on a real one: a tenth or 64 MiB more."""
    machine.needs_gpu("CUDA graphs")
    config = make_config(3, 1024, 32_000)
    steps = random_steps(config, machine.half, "triton", machine.device)
    meter = CudaMeter(torch.device("cuda:0"), kvops.cuda.driver("cuda:0").uuid)
    try:
        before = meter.used()
    except StartupError as error:
        raise Skipped(f"runs only where NVML tells a process's memory: {error}") from error
    steps.begin(1, 16)
    steps.capture(64, 512)
    planned, steps.runner = meter.used() - before, None  # type: ignore[assignment]
    gc.collect()
    torch.cuda.empty_cache()
    steps.begin(64, 1000)
    before = meter.used()
    steps.capture(64, 512)
    found = meter.used() - before
    text = f"planned {planned / 2**20:.0f} MiB, taken {found / 2**20:.0f} MiB"
    if found > max(1.1 * planned, planned + (64 << 20)):
        raise Failed(text)
    return Passed(text, {"planned": planned, "taken": found})


def _qwen3_8b(machine: Machine) -> tuple[Steps, str]:
    """Steps of Qwen3-8B's shape, and the backend that computes them."""
    config = replace(
        make_config(**QWEN3_8B),
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12_288,
        qkv_bias=False,
    )
    name = attention_of(AttentionShape(32, 8, 128, 16, machine.half, machine.half))
    return random_steps(config, machine.half, name, machine.device), name


def _step(machine: Machine, num_rows: int, context: int) -> Passed:
    """Wall time of a step in a run of them; idle: the share of it in which no kernel runs."""
    machine.needs_gpu("CUDA graphs")
    steps, name = _qwen3_8b(machine)
    steps.begin(num_rows, context + 2 * NUM_STEPS + 2, content=0.0)
    steps.capture(num_rows, 0)

    def row(number: int, step: int) -> Row:
        row = steps.row(number, [] if step else [0], context + step)
        return replace(row, num_on_device=step > 0)

    def run(first: int) -> None:
        flight: Flight | None = None
        for step in range(first, first + NUM_STEPS):
            launched = steps.runner.launch([row(number, step) for number in range(num_rows)])
            if flight is not None:
                flight.result()
            flight = launched
        machine.synchronize()

    run(0)
    began = time.perf_counter()
    run(NUM_STEPS)
    seconds = (time.perf_counter() - began) / NUM_STEPS
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(NUM_STEPS)
    idle, share = _idle(profile.events()), READ_BYTES / seconds / machine.copy_rate()
    text = (
        f"{seconds * 1e3:.2f} ms a step with attention by {name}, weights at {share:.0%} of a "
        f"copy's rate, idle {idle:.1%}"
    )
    figures: Figures = {"seconds": seconds, "idle": idle, "attention": name, "share": share}
    is_fast = share >= MIN_COPY_SHARE if num_rows == 1 else seconds * 1e3 <= MAX_MS_64_ROWS
    limit = f"{MIN_COPY_SHARE:.0%}" if num_rows == 1 else f"{MAX_MS_64_ROWS} ms"
    is_good = (is_fast and idle <= MAX_IDLE) or not machine.is_hopper
    return machine.judge(is_good, f"{limit}, and idle at most {MAX_IDLE:.0%}", text, figures)


def _prefill(machine: Machine) -> Passed:
    """Wall time from the launch of a step to its token, with nothing else in flight."""
    machine.needs_gpu("CUDA graphs")
    steps, name = _qwen3_8b(machine)
    steps.begin(1, 1064, content=0.0)
    steps.capture(1, 64)
    rows = [steps.row(0, [0] * 64, 1000)]

    def run() -> float:
        began = time.perf_counter()
        for _ in range(NUM_STEPS):
            steps.runner.launch(rows).result()
        return (time.perf_counter() - began) / NUM_STEPS

    run()
    seconds = run()
    text = f"{seconds * 1e3:.2f} ms with attention by {name}"
    is_fast = seconds * 1e3 <= PREFILL_LIMIT_MS or not machine.is_hopper
    figures: Figures = {"seconds": seconds, "attention": name}
    return machine.judge(is_fast, f"{PREFILL_LIMIT_MS} ms", text, figures)


def _time_of_drafts(machine: Machine) -> Passed:
    """One row at 1,000 positions: without drafts, with drafts in steps that run ahead, and with
    drafts where the host waits for each step before it launches the next one."""
    machine.needs_gpu("CUDA graphs")
    steps, _ = _qwen3_8b(machine)
    steps.begin(1, 1001 + 2 * NUM_DRAFTS, content=0.0)
    steps.capture(1 + NUM_DRAFTS, 0)
    plain, is_planned = steps.row(0, [0], 1000), steps.ops.needs_plan
    drafted = steps.row(0, [0] * (1 + NUM_DRAFTS), 1000, (GREEDY,) * (1 + NUM_DRAFTS))
    drafts = replace(drafted, num_drafts=NUM_DRAFTS)

    def behind(row: Row) -> Row:
        num_unknown = 0 if is_planned else row.num_drafts
        return replace(row, token_ids=(), num_on_device=row.num_tokens, num_unknown=num_unknown)

    def seconds(row: Row, *, waits: bool) -> float:
        for num_steps in (3, NUM_STEPS):
            flight, began = steps.runner.launch([row]), time.perf_counter()
            for _ in range(num_steps):
                if waits:
                    flight.result()
                launched = steps.runner.launch([row if waits else behind(row)])
                flight.result()
                flight = launched
            flight.result()
        return (time.perf_counter() - began) / NUM_STEPS

    base = seconds(plain, waits=False)
    ahead, waiting = (seconds(drafts, waits=waits) / base for waits in (False, True))
    text = (
        f"{base * 1e3:.2f} ms a step; with drafts x {ahead:.2f}, if the host waits x {waiting:.2f}"
    )
    is_fast = ahead <= MOST_WITH_DRAFTS and waiting <= MOST_WAITING
    figures = {"seconds": base, "drafts": ahead, "waiting": waiting}
    return machine.judge(is_fast, f"{MOST_WITH_DRAFTS} and {MOST_WAITING}", text, figures)


def _idle(events: Any) -> float:
    """The share of the time from the first kernel to the last one in which none runs."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA"
    )
    waited, (begin, end) = 0.0, spans[0]
    for start, stop in spans:
        waited += max(0.0, start - end)
        end = max(end, stop)
    return float(waited / (end - begin))
