"""Measures an engine without a server; run by the peer's own interpreter.

    python engine.py vllm|openvino --model DIR [--decode 1 8] [--prefill 512] [--prompt 128]
        [--tokens 128] [--threads 2] [--repeats 1] [--activation-group 32]

Prints one JSON object a figure: {"kind", "size", "tokens_per_s"}; `bench/peers/peer.py` says what
they mean. It imports nothing of ours: the interpreter has the peer's packages only.
"""

import argparse
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Options = argparse.Namespace
_KV_GIB = 4
_FIRST_ORDINARY_TOKEN = 300  # bytes and special tokens come before


class Engine(Protocol):
    def add(self, request: int, prompt: list[int], num_tokens: int) -> None:
        """Greedy, not ended by an end of sequence."""

    def step(self) -> dict[int, list[int]]:
        """One step; the tokens that each request got."""


class Vllm:
    def __init__(self, options: Options) -> None:
        # In this process: nobody else competes for the cores.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

        longest = _context(options)
        self._sampling = SamplingParams
        self._delta = RequestOutputKind.DELTA
        self._engine = LLM(
            options.model,
            dtype="bfloat16",
            max_model_len=longest,
            max_num_seqs=max(options.decode, default=1),
            max_num_batched_tokens=max(longest, 4096),
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine

    def add(self, request: int, prompt: list[int], num_tokens: int) -> None:
        sampling = self._sampling(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._delta,
        )
        self._engine.add_request(str(request), {"prompt_token_ids": prompt}, sampling)

    def step(self) -> dict[int, list[int]]:
        return {
            int(output.request_id): list(output.outputs[0].token_ids)
            for output in self._engine.step()
        }


class OpenVino:
    def __init__(self, options: Options, serves: bool = False) -> None:
        """For a server, `max_num_batched_tokens` is the pipeline's own and prefixes are cached."""
        import openvino_genai as genai  # type: ignore[import-not-found]

        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = _KV_GIB
        if serves:
            scheduler.max_num_seqs = options.max_num_seqs
        else:
            scheduler.max_num_seqs = max(options.decode, default=1)
            scheduler.max_num_batched_tokens = max(_context(options), 4096)
        scheduler.enable_prefix_caching = serves
        properties = openvino_properties(options.threads, options.activation_group)
        self._genai = genai
        self._pipeline = genai.ContinuousBatchingPipeline(
            options.model, scheduler, "CPU", properties
        )
        self.running: dict[int, Any] = {}
        """The generation of each request."""

    def add(self, request: int, prompt: list[int], num_tokens: int) -> None:
        import numpy
        import openvino  # type: ignore[import-not-found]

        config = self._genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        self.running[request] = self._pipeline.add_request(request, ids, config)

    def step(self) -> dict[int, list[int]]:
        self._pipeline.step()
        gained: dict[int, list[int]] = {}
        for request, generation in list(self.running.items()):
            while generation.can_read():
                (output,) = generation.read().values()
                gained.setdefault(request, []).extend(output.generated_ids)
            if generation.get_status() != self._genai.GenerationStatus.RUNNING:
                del self.running[request]
        return gained


def openvino_properties(threads: int, activation_group: int) -> dict[str, Any]:
    """bfloat16 arithmetic. Beside quantized weights, activations become int8 as they come, with a
    scale for each group of so many; 0: they stay as they are."""
    return {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "bf16",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": activation_group,
        "PERFORMANCE_HINT": "LATENCY",
    }


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one batch that was added at once."""

    began: float
    all_started: float
    first_ended: float
    num_decoded: int
    """Tokens of all requests after `all_started`, up to `first_ended`."""


def run_batch(engine: Engine, prompts: list[list[int]], num_tokens: int) -> Times:
    began = time.perf_counter()
    for request, prompt in enumerate(prompts):
        engine.add(request, prompt, num_tokens)
    counts: Counter[int] = Counter()
    all_started = first_ended = 0.0
    at_start = at_end = 0
    while sum(counts.values()) < len(prompts) * num_tokens:
        counts.update({request: len(ids) for request, ids in engine.step().items()})
        now = time.perf_counter()
        if not all_started and len(counts) == len(prompts):
            all_started, at_start = now, sum(counts.values())
        if not first_ended and max(counts.values(), default=0) == num_tokens:
            first_ended, at_end = now, sum(counts.values())
    return Times(began, all_started, first_ended, at_end - at_start)


def figures(engine: Engine, options: Options) -> Iterator[dict[str, Any]]:
    draw = random.Random(0)
    vocab_size = json.loads((Path(options.model) / "config.json").read_text())["vocab_size"]

    def prompts(count: int, length: int) -> list[list[int]]:
        return [
            [draw.randrange(_FIRST_ORDINARY_TOKEN, vocab_size) for _ in range(length)]
            for _ in range(count)
        ]

    run_batch(engine, prompts(1, 64), 4)  # what is made at first use is made here
    for streams in options.decode:
        for _ in range(options.repeats):
            times = run_batch(engine, prompts(streams, options.prompt), options.tokens)
            rate = times.num_decoded / (times.first_ended - times.all_started)
            yield {"kind": "decode", "size": streams, "tokens_per_s": rate}
    for length in options.prefill:
        for _ in range(options.repeats):
            times = run_batch(engine, prompts(1, length), 1)
            rate = length / (times.all_started - times.began)
            yield {"kind": "prefill", "size": length, "tokens_per_s": rate}


def _context(options: Options) -> int:
    lengths = [options.prompt + options.tokens, *(length + 1 for length in options.prefill)]
    return int(max(lengths))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=("vllm", "openvino"))
    parser.add_argument("--model", required=True)
    for name in ("--decode", "--prefill"):
        parser.add_argument(name, type=int, nargs="+", default=[])
    for name, default in (("--prompt", 128), ("--tokens", 128), ("--threads", 2), ("--repeats", 1)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--activation-group", type=int, default=0, help="of openvino")
    options = parser.parse_args()
    engine: Engine = Vllm(options) if options.engine == "vllm" else OpenVino(options)
    for figure in figures(engine, options):
        print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
