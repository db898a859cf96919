"""Beam search finds the hypotheses of transformers, over random models with the same logits."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from quire.sampling import Beam, EarlyStopping
from services.engine.sequences.beam import FIRST, BeamSearch, LivingBeam, num_candidates
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import FinishReason, Hypothesis

Advance = Callable[[Sequence[LivingBeam], Sequence[int]], list[Logprobs]]
"""(living beams, the parent of each): the likeliest next tokens of the beams."""


def run(search: BeamSearch, advance: Advance) -> tuple[Hypothesis, ...]:
    beams, parents, finished = [FIRST], [0], tuple[Hypothesis, ...]()
    while beams:
        step = search.step(beams, finished, advance(beams, parents))
        finished = step.finished
        parents = [branch.parent for branch in step.living]
        beams = [
            LivingBeam((*beams[branch.parent].token_ids, branch.token_id), branch.score)
            for branch in step.living
        ]
    return finished


def by_transformers(
    model: Any, prompt: Sequence[int], beam: Beam, n: int, stop_ids: Sequence[int], max_tokens: int
) -> list[tuple[float, tuple[int, ...]]]:
    """(score, tokens), best first."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=beam.width,
        num_return_sequences=n,
        length_penalty=beam.length_penalty,
        early_stopping=beam.early_stopping,
        max_new_tokens=max_tokens,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    lengths = (found.beam_indices >= 0).sum(dim=1).tolist()
    rows = zip(found.sequences_scores.tolist(), found.sequences.tolist(), lengths, strict=True)
    return [(score, tuple(row[len(prompt) :][:length])) for score, row, length in rows]


def check(
    found: Sequence[Hypothesis],
    expected: Sequence[tuple[float, tuple[int, ...]]],
    stop_ids: Sequence[int],
    tolerance: float,
) -> None:
    assert [one.token_ids for one in found] == [tokens for _, tokens in expected]
    for one, (score, tokens) in zip(found, expected, strict=True):
        assert one.score == pytest.approx(score, abs=tolerance)
        assert one.finish_reason is (
            FinishReason.STOP if tokens[-1] in stop_ids else FinishReason.LENGTH
        )


class Table(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """Logits by the last token and the length, the same for both searches."""

    config_class = PreTrainedConfig
    VOCAB = 40

    def __init__(self, seed: int) -> None:
        super().__init__(
            PreTrainedConfig.from_dict({"vocab_size": self.VOCAB, "num_hidden_layers": 1})
        )
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(16, self.VOCAB, self.VOCAB, generator=generator) * 2
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.generation_config.use_cache = False

    def logits(self, length: int, last: Tensor) -> Tensor:
        return self.table[length % 16, last]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> CausalLMOutput:
        logits = self.logits(input_ids.shape[1], input_ids[:, -1])
        return CausalLMOutput(logits=logits[:, None, :])

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, **kwargs: Any
    ) -> dict[str, Tensor]:
        return {"input_ids": input_ids}


def of_table(model: Table, prompt: Sequence[int], num_candidates: int) -> Advance:
    def advance(beams: Sequence[LivingBeam], _: Sequence[int]) -> list[Logprobs]:
        length = len(prompt) + len(beams[0].token_ids)
        last = torch.tensor([(*prompt, *beam.token_ids)[-1] for beam in beams])
        logprobs = model.logits(length, last).log_softmax(dim=-1)
        values, ids = logprobs.topk(min(num_candidates, Table.VOCAB))
        return [
            Logprobs(0.0, 1, tuple(of_row), tuple(likeliest))
            for of_row, likeliest in zip(ids.tolist(), values.tolist(), strict=True)
        ]

    return advance


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 0.7, 1.0, 2.5])
@pytest.mark.parametrize("width", [2, 3, 8])
def test_beam_search_equals_transformers(
    width: int, length_penalty: float, early_stopping: EarlyStopping
) -> None:
    for seed in range(8):
        chance = random.Random(f"{seed} {width} {length_penalty} {early_stopping}")
        model = Table(seed)
        prompt = chance.choices(range(Table.VOCAB), k=3)
        stop_ids = chance.sample(range(Table.VOCAB), k=seed % 4)
        max_tokens = chance.choice([1, 2, 7, 24])
        beam, n = Beam(width, length_penalty, early_stopping), chance.randint(1, width)
        search = BeamSearch(beam, frozenset(stop_ids), max_tokens)
        found = run(search, of_table(model, prompt, num_candidates(beam, frozenset(stop_ids))))
        assert len(found) == width
        expected = by_transformers(model, prompt, beam, n, stop_ids, max_tokens)
        check(found[:n], expected, stop_ids, tolerance=1e-5)


def test_of_equal_scores_the_better_beam_goes_first_and_then_the_lower_token() -> None:
    """transformers leaves that order open."""
    beams = [LivingBeam((1,), -1.0), LivingBeam((2,), -1.5)]
    candidates = [
        Logprobs(0.0, 1, (9, 7, 4), (-0.5, -1.0, -1.0)),
        Logprobs(0.0, 1, (6, 3, 5), (-0.5, -0.5, -3.0)),
    ]
    step = BeamSearch(Beam(4), frozenset(), max_tokens=9).step(beams, (), candidates)
    assert [(one.parent, one.token_id) for one in step.living] == [(0, 9), (0, 4), (0, 7), (1, 3)]
