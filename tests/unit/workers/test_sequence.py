"""The end of a sequence, and the hashes of its blocks, without an engine."""

import math
from typing import Any

import pytest
import torch

from services.engine.sequences.sequence import Branch, Rules, Sequence
from services.protocol.ticket import FinishReason, SamplingParams, TicketSequence

from .fakes import ticket

EOS, STOP_ID, OTHER = 7, 8, 9


def sequence(generated: tuple[int, ...] = (), max_model_len: int = 100, **changes: Any) -> Sequence:
    """A prompt of 4 tokens with at most 3 more, some of which are given; blocks of 4."""
    sampling: dict[str, Any] = {"max_tokens": 3, "stop_token_ids": (STOP_ID,), **changes}
    asked = ticket(
        "r1",
        (1, 2, 3, 4),
        sampling=SamplingParams(0.0, 0, 1.0, 0.0, seed=1, **sampling),
        sequences=(TicketSequence(0, generated),),
    )
    rules = Rules.of(asked, 4, frozenset({EOS}), max_model_len)
    tokens = asked.prompt_token_ids + generated
    return Sequence(rules, [Branch(0)], tokens, block_ids=(5, 6), num_computed=0)


@pytest.mark.parametrize(
    ("changes", "token", "finish"),
    [
        ({}, OTHER, None),
        ({}, EOS, FinishReason.STOP),
        ({"ignore_eos": True}, EOS, None),
        ({"ignore_eos": True}, STOP_ID, FinishReason.STOP),
        ({"max_tokens": 1}, OTHER, FinishReason.LENGTH),
        ({"max_tokens": 1}, EOS, FinishReason.STOP),
        ({"max_model_len": 5}, OTHER, FinishReason.LENGTH),
        ({"generated": (OTHER, OTHER)}, OTHER, FinishReason.LENGTH),
    ],
)
def test_finish_reasons_of_sequences(
    changes: dict[str, Any], token: int, finish: FinishReason | None
) -> None:
    """Tokens of an earlier attempt count."""
    running = sequence(**changes)
    assert running.append(token) is finish


def test_a_sequence_that_goes_on_elsewhere_draws_as_it_would_have() -> None:
    """Penalties and bans of a sequence that has run for two tokens, and of one that comes with a
    ticket."""
    asked: dict[str, Any] = {
        "max_tokens": 9,
        "repetition_penalty": 1.5,
        "frequency_penalty": 1.0,
        "bad_words": ((OTHER, OTHER, 3), (2,)),
        "min_tokens": 3,
    }
    running = sequence(**asked)
    for _ in range(2):
        running.launch(running.num_uncomputed)
        running.num_computed = len(running.tokens)
        running.append(OTHER)
    moved = sequence((OTHER, OTHER), **asked)
    logits = torch.linspace(-2, 2, 12)
    applied = []
    for one in (running, moved):
        (draw,) = one.launch(one.num_uncomputed).draws
        assert draw.adjustment is not None
        applied.append(draw.adjustment.applied(logits).tolist())
    assert applied[0] == applied[1]
    banned = [token for token, logit in enumerate(applied[0]) if logit == -math.inf]
    assert banned == [2, 3, EOS, STOP_ID]


def test_a_row_that_draws_nothing_looks_at_no_history() -> None:
    running = sequence(repetition_penalty=1.5)
    assert running.launch(2).draws == ()
    (plain,) = sequence().launch(4).draws
    assert plain.adjustment is None


def test_no_more_blocks_are_wanted_than_the_whole_needs() -> None:
    """4 + 3 tokens are in two blocks, however far the sequence looks ahead."""
    assert sequence().num_missing(look_ahead=50) == 0
    assert sequence(max_tokens=30).num_missing(look_ahead=8) == 1
