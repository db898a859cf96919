"""Native scores equal those of `services.engine.sampling.logprobs`, and both equal torch's
log_softmax in double precision."""

import pytest
import torch
from torch import Tensor

from kvops import _native
from kvops.native import NativeCpu
from services.engine.batch import Fault
from services.engine.sampling.logprobs import score_tensors, scores_of
from services.protocol.logprobs import Logprobs

ISAS = pytest.mark.parametrize("isa", _native.usable_kernels())
VOCABS = pytest.mark.parametrize("vocab_size", [1, 7, 64, 1000, 8191, 8192, 8193, 40_011])


def native(isa: str, logits: Tensor, token_ids: list[int], num_top: int) -> list[Logprobs | Fault]:
    told = torch.full((len(token_ids), 1 + min(num_top, logits.shape[1])), -7)
    told[:, 0] = torch.tensor(token_ids)
    logprobs = torch.full(told.shape, float("nan"))
    ranks = torch.full((len(token_ids),), -7)
    NativeCpu(isa=isa).score(logits, told, logprobs, ranks)
    return scores_of(told, logprobs, ranks)


def score(logits: Tensor, token_ids: list[int], num_top: int) -> list[Logprobs | Fault]:
    return scores_of(*score_tensors(logits, torch.tensor(token_ids), num_top))


def some_logits(num_rows: int, vocab_size: int) -> Tensor:
    return 4 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(7))


def assert_close(found: list[Logprobs | Fault], wanted: list[Logprobs | Fault]) -> None:
    """Tokens and ranks are equal; logprobs are as near as powers in fp32 allow."""
    for one, other in zip(found, wanted, strict=True):
        assert isinstance(one, Logprobs)
        assert isinstance(other, Logprobs)
        assert (one.rank, one.top_token_ids) == (other.rank, other.top_token_ids)
        assert one.logprob == pytest.approx(other.logprob, abs=4e-6)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=4e-6)


@ISAS
@VOCABS
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_scores_are_those_of_the_definition(isa: str, vocab_size: int, num_top: int) -> None:
    logits = some_logits(9, vocab_size)
    token_ids = [row * 7919 % vocab_size for row in range(9)]
    assert_close(native(isa, logits, token_ids, num_top), score(logits, token_ids, num_top))


@VOCABS
def test_the_definition_is_log_softmax(vocab_size: int) -> None:
    logits = some_logits(5, vocab_size)
    token_ids = [row * 7919 % vocab_size for row in range(5)]
    exact = logits.double().log_softmax(dim=-1)
    for row, found in enumerate(score(logits, token_ids, 20)):
        assert isinstance(found, Logprobs)
        chosen = exact[row, token_ids[row]]
        assert found.logprob == pytest.approx(chosen.item(), abs=4e-6)
        assert found.rank == 1 + int((exact[row] > chosen).sum())
        values, order = exact[row].topk(min(20, vocab_size))
        assert found.top_token_ids == tuple(order.tolist())
        assert found.top_logprobs == pytest.approx(values.tolist(), abs=4e-6)


@ISAS
def test_of_equal_logits_the_lowest_token_comes_first(isa: str) -> None:
    """The logits have four values, so that many tie across chunks and parts."""
    logits = torch.randint(0, 4, (3, 20_000), generator=torch.Generator().manual_seed(1)).float()
    token_ids = [0, 5, 19_999]
    found = native(isa, logits, token_ids, 20)
    assert_close(found, score(logits, token_ids, 20))
    for row, logprobs in enumerate(found):
        assert isinstance(logprobs, Logprobs)
        threes = (logits[row] == 3).nonzero().squeeze(1)
        assert logprobs.top_token_ids == tuple(threes[:20].tolist())
        assert logprobs.rank == 1 + int((logits[row] > logits[row, token_ids[row]]).sum())


@ISAS
def test_scores_do_not_depend_on_other_rows(isa: str) -> None:
    logits = some_logits(70, 9000)
    token_ids = [row * 131 % 9000 for row in range(70)]
    together = native(isa, logits, token_ids, 5)
    for row in (0, 1, 42, 69):
        assert native(isa, logits[row : row + 1], token_ids[row : row + 1], 5) == [together[row]]


@ISAS
def test_a_number_above_the_vocabulary_returns_all_tokens(isa: str) -> None:
    (found,) = native(isa, torch.tensor([[1.0, 3.0, 2.0]]), [0], 20)
    assert isinstance(found, Logprobs)
    assert (found.rank, found.top_token_ids) == (3, (1, 2, 0))
    assert sum(torch.tensor(found.top_logprobs).exp()) == pytest.approx(1)


@ISAS
def test_non_finite_logits_are_a_fault_of_their_row(isa: str) -> None:
    logits = torch.zeros(5, 9000)
    logits[0, 8999] = float("nan")
    logits[1, 3] = float("nan")
    logits[2, 8500] = float("inf")
    logits[3] = float("-inf")
    logits[4, 5:] = float("-inf")  # not harmful: never likely
    faults = [Fault.NOT_FINITE] * 4
    for found in (native(isa, logits, [7] * 5, 3), score(logits, [7] * 5, 3)):
        assert found[:4] == faults
        assert found[4] == Logprobs(
            float("-inf"),
            6,
            (0, 1, 2),
            (pytest.approx(-1.609438),) * 3,  # type: ignore[arg-type]
        )


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        native("portable", torch.zeros(1, 5), [5], 0)
