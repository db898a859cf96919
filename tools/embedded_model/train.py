"""Trains the embedded model: bf16 autocast over fp32 masters, AdamW, cosine decay."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from tools.embedded_model.corpus import Corpus
from tools.embedded_model.render import END_OF_TEXT, END_OF_TURN, texts

IGNORED = -100
"""The label of a position that is not learned."""

Row = list[tuple[int, bool]]
"""A tokenized text: (token id, whether it is learned) per position."""

Model = Any
"""A Qwen3ForCausalLM; the annotations of transformers do not hold under `mypy --strict`."""


@dataclass(frozen=True)
class Cycle:
    """A run of steps with a fresh optimizer: warm-up, then a cosine that ends at zero."""

    num_steps: int
    learning_rate: float
    seed: int

    def learning_rate_at(self, step: int, warmup_steps: int) -> float:
        if step < warmup_steps:
            return self.learning_rate * (step + 1) / warmup_steps
        progress = (step - warmup_steps) / (self.num_steps - warmup_steps)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Recipe:
    """The sizes of the model and of its training."""

    vocab_size: int = 2560
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_length: int = 4096
    batch_tokens: int = 2048
    warmup_steps: int = 100
    weight_decay: float = 0.05
    cycles: tuple[Cycle, ...] = (Cycle(1800, 2e-3, seed=7), Cycle(1600, 1e-3, seed=8))


def build_model(recipe: Recipe, tokenizer: Tokenizer) -> Model:
    """A Qwen3 with random weights; embeddings and output head are tied."""
    end_of_turn, end_of_text = map(tokenizer.token_to_id, (END_OF_TURN, END_OF_TEXT))
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
    )
    model: Model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig.from_dict(
        {
            # What a server takes for clients that ask for nothing: all but greedy.
            "do_sample": True,
            "temperature": 0.1,
            "eos_token_id": [end_of_turn, end_of_text],
            "pad_token_id": end_of_text,
        }
    )
    return model


def train(corpus: Corpus, tokenizer: Tokenizer, recipe: Recipe, folder: Path) -> None:
    """Trains all cycles; each starts from the bf16 weights that the one before left in `folder`."""
    torch.manual_seed(recipe.cycles[0].seed)
    model = build_model(recipe, tokenizer)
    for cycle in recipe.cycles:
        train_cycle(model, corpus, tokenizer, recipe, cycle)
        model = save(model, folder).float()


def train_cycle(
    model: Model, corpus: Corpus, tokenizer: Tokenizer, recipe: Recipe, cycle: Cycle
) -> None:
    """Trains the fp32 model in place."""
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.98), weight_decay=recipe.weight_decay, fused=True
    )
    batches = islice(_batches(corpus, tokenizer, recipe, cycle.seed), cycle.num_steps)
    started, num_tokens = time.monotonic(), 0
    for step, (token_ids, labels) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = cycle.learning_rate_at(step, recipe.warmup_steps)
        loss = _loss(model, token_ids, labels)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        num_tokens += token_ids.numel()
        if step % 50 == 0:
            rate = num_tokens / (time.monotonic() - started)
            print(f"step {step}  loss {loss.item():.4f}  {rate:.0f} tokens/s", flush=True)


def save(model: Model, folder: Path) -> Model:
    """Writes the weights in bf16, and answers the model as it would be loaded again."""
    rounded = {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()}
    copy: Model = Qwen3ForCausalLM(model.config)
    copy.to(torch.bfloat16)
    copy.load_state_dict(rounded)
    copy.generation_config = model.generation_config
    copy.save_pretrained(folder)
    return copy


def _loss(model: Model, token_ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the learned positions; token_ids and labels are [rows, length]."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=token_ids).last_hidden_state[:, :-1]
        learned = labels[:, 1:] != IGNORED
        logits = model.lm_head(hidden[learned])
    loss: Tensor = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][learned])
    return loss


def _batches(
    corpus: Corpus, tokenizer: Tokenizer, recipe: Recipe, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Texts of similar length, padded on the right to at most `batch_tokens` positions.

    Causal attention never looks right, so that padding needs no mask, only ignored labels.
    """
    random = Random(seed)
    pad = tokenizer.token_to_id(END_OF_TEXT)
    encoded = (
        [
            (token, segment.learned)
            for segment in text
            for token in tokenizer.encode(segment.text).ids
        ]
        for text in texts(corpus, seed)
    )
    while True:
        pool = sorted(islice(encoded, 1024), key=len)
        groups = list(_groups(pool, recipe.batch_tokens))
        random.shuffle(groups)
        for group in groups:
            length = max(map(len, group))
            padded = [row + [(pad, False)] * (length - len(row)) for row in group]
            token_ids = torch.tensor([[token for token, _ in row] for row in padded])
            learned = torch.tensor([[flag for _, flag in row] for row in padded])
            yield token_ids, token_ids.masked_fill(~learned, IGNORED)


def _groups(rows: list[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Cuts rows, sorted by length, into runs that fit `batch_tokens` once padded."""
    group: list[Row] = []
    for row in rows:
        if group and (len(group) + 1) * len(row) > batch_tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group
