"""Shared parts of the models' tests: checkpoints of every kind, the answers of transformers, and a
runner that records its logits, driven as by a worker, with scattered blocks in an arena full of
NaN."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvops
from bench.make_checkpoint import CheckpointSpec
from kvops import fp8, int8_kv
from kvops.native import Lane
from services.engine.batch import Draw, Row, RowResult
from services.engine.models import load_model
from services.engine.runner import Runner
from services.model.config.quantization import Quantization
from services.protocol.ticket import SamplingParams

NUM_NEW_TOKENS = 6
GREEDY = Draw(
    SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=64), 0
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 2.5}

SPECS = {
    "qwen3-gqa-tied": CheckpointSpec(),
    "qwen3-mqa": CheckpointSpec(num_kv_heads=1, head_dim=32, vocab_size=401, tied=False),
    "qwen3-mha-bias": CheckpointSpec(
        num_kv_heads=4, head_dim=8, vocab_size=1009, attention_bias=True
    ),
    "qwen2-gqa-tied": CheckpointSpec("qwen2", num_heads=6, head_dim=64, vocab_size=331),
    "qwen2-mha": CheckpointSpec("qwen2", num_kv_heads=4, tied=False, shards=2),
    "qwen2-mqa-tied": CheckpointSpec("qwen2", num_kv_heads=1, head_dim=10, vocab_size=263),
    "llama-gqa": CheckpointSpec("llama", num_layers=3, tied=False, rope_theta=500_000.0),
    "llama-mha-tied": CheckpointSpec("llama", num_kv_heads=4, head_dim=24, vocab_size=777),
    "llama3-rope-mqa": CheckpointSpec(
        "llama", num_kv_heads=1, attention_bias=True, rope_scaling=LLAMA3_ROPE
    ),
    "mistral-window": CheckpointSpec(
        "mistral", num_layers=3, tied=False, sliding_window=40, vocab_size=521
    ),
    "mistral-no-window-mha": CheckpointSpec("mistral", num_kv_heads=4, head_dim=12),
    "qwen2-window-in-upper-half": CheckpointSpec(
        "qwen2", num_layers=4, num_heads=6, tied=False, sliding_window=11
    ),
    "qwen3-window-in-upper-half": CheckpointSpec(num_layers=3, sliding_window=100),
    "llama-linear-rope": CheckpointSpec(
        "llama", num_heads=3, num_kv_heads=3, hidden_size=48, rope_scaling=LINEAR_ROPE
    ),
}


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    """Token ids below every spec's vocabulary size."""
    return tuple(random.Random(seed * 10_007 + length).choices(range(260), k=length))


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """A small part of the product of all factors, in which every two values of two factors occur
    together."""
    rows = list(product(*(range(len(factor)) for factor in factors)))
    random.Random(0).shuffle(rows)
    missing = {pair for row in rows for pair in combinations(enumerate(row), 2)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & set(combinations(enumerate(row), 2))))
        missing -= set(combinations(enumerate(best), 2))
        chosen.append(tuple(factor[i] for factor, i in zip(factors, best, strict=True)))
    return chosen


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, and the logits that each was drawn from: [len(token_ids), vocab_size]."""

    token_ids: list[int]
    logits: Tensor


class Oracle:
    """The greedy decoding of transformers for one checkpoint in fp32, cached by prompt. `options`:
    of `from_pretrained`."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, **options
        )
        self._answers: dict[tuple[int, ...], Answer] = {}

    def answer(self, prompt: tuple[int, ...]) -> Answer:
        if prompt not in self._answers:
            self._answers[prompt] = self._decode(prompt)
        return self._answers[prompt]

    @torch.inference_mode()
    def _decode(self, prompt: tuple[int, ...]) -> Answer:
        tokens: list[int] = []
        logits = []
        step = self._model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        while True:
            logits.append(step.logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
            if len(tokens) == NUM_NEW_TOKENS:
                return Answer(tokens, torch.stack(logits))
            step = self._model(
                torch.tensor([tokens[-1:]]), past_key_values=step.past_key_values, use_cache=True
            )


@dataclass
class Trial:
    """One sequence of the recording. Its first `num_cached` positions are in adopted blocks."""

    prompt: tuple[int, ...]
    block_table: list[int]
    num_cached: int = 0
    num_computed: int = 0
    new_tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.new_tokens) == NUM_NEW_TOKENS

    def next_row(self, chunk: int) -> Row:
        tokens = [*self.prompt, *self.new_tokens][self.num_computed :][:chunk]
        end = self.num_computed + len(tokens)
        known = len(self.prompt) + len(self.new_tokens)
        return Row(
            token_ids=tokens,
            start=self.num_computed,
            block_table=self.block_table,
            store_from=self.num_cached,
            draws=(GREEDY,) if end == known else (),
        )


class RecordingRunner(Runner):
    """A runner that keeps its last logits, with its own arena."""

    def __init__(
        self,
        directory: Path,
        block_size: int,
        num_blocks: int,
        backend: str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        quantize: Quantization | None = None,
        dequantize: bool = False,
        cache: Path | None = None,
        num_threads: int = 1,
        kv_in_int8: bool = False,
        kv_in_fp8: bool = False,
        context: int | None = None,
        isa: str | None = None,
    ) -> None:
        self.ops = kvops.backend(backend, isa)
        if self.ops.native is not None:
            self.ops.native.assign([Lane()] * num_threads)
        self.model = model = load_model(
            directory,
            dtype,
            self.ops,
            quantize=quantize,
            dequantize=dequantize,
            cache=cache,
            context=context,
        )
        c = model.config
        shape = (num_blocks, c.num_layers, 2, block_size, c.num_kv_heads, c.head_dim)
        self.arena = torch.full(shape, float("nan"), dtype=dtype)
        if kv_in_int8:
            self.arena = int8_kv.quantize(self.arena)
        elif kv_in_fp8:
            self.arena = fp8.saturated(self.arena)
        self.block_size = block_size
        self.free = random.Random(num_blocks).sample(range(num_blocks), num_blocks)
        super().__init__(model, self.arena, block_size, self.ops)

    def run(self, rows: Sequence[Row]) -> Sequence[RowResult]:
        return self.launch(rows).result()

    def _forward(self, *args: Any) -> tuple[Tensor, dict[str, Tensor]]:
        hidden, placed = super()._forward(*args)
        self.last_logits = self.model.logits(hidden)
        return hidden, placed

    def place(self, prompt: tuple[int, ...], shared: Trial | None = None) -> Trial:
        """A new sequence that shares the full blocks that its prompt has in common with that of
        `shared`. As everywhere, at least the last token is computed again."""
        num_shared = 0
        if shared is not None:
            same = next(
                (i for i, (a, b) in enumerate(zip(prompt, shared.prompt, strict=False)) if a != b),
                min(len(prompt), len(shared.prompt)),
            )
            num_shared = same // self.block_size
        adopted = shared.block_table[:num_shared] if shared is not None else []
        total = -(-(len(prompt) + NUM_NEW_TOKENS) // self.block_size)
        own = [self.free.pop() for _ in range(total - num_shared)]
        num_cached = num_shared * self.block_size
        return Trial(
            prompt, [*adopted, *own], num_cached, num_computed=min(num_cached, len(prompt) - 1)
        )

    def decode_all(self, suspects: Iterable[Trial], chunk: int, late: int = 0) -> None:
        """Step until all have finished. Trial i joins at step i * `late`: with late > 0, rows of
        prompts and of single tokens are in one batch."""
        waiting, running = list(suspects), list[Trial]()
        for step in count():
            while waiting and step >= late * len(running):
                running.append(waiting.pop(0))
            unfinished = [trial for trial in running if not trial.finished]
            if unfinished:
                self.step(unfinished, chunk)
            elif not waiting:
                return

    def step(self, suspects: list[Trial], chunk: int) -> None:
        rows = [trial.next_row(chunk) for trial in suspects]
        drawn = self.run(rows)
        logits = iter(self.last_logits)
        for trial, row, tokens in zip(suspects, rows, drawn, strict=True):
            trial.num_computed += len(row.token_ids)
            if isinstance(tokens, tuple) and tokens:
                trial.new_tokens += tokens
                trial.logits.append(next(logits))
