"""Prompt lookup: which drafts follow, and how likely they are."""

import pytest

from services.engine.sequences.sequence import Sequence
from services.engine.speculation.ngram import NgramDrafter

from .sequences import sequence


def drafts_of(drafter: NgramDrafter, one: Sequence, number: int) -> tuple[int, ...]:
    """As a step asks for them; none without a match."""
    if not drafter.chances(one, number):
        return ()
    found, _ = drafter.propose({one: number})
    return found[one]


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2], (3, 4, 5, 1)),
        ([1, 2, 9, 8, 1, 2, 7, 6, 1, 2], (7, 6, 1, 2)),  # the latest
        ([5, 1, 2, 9, 9, 6, 1, 2, 8, 8, 5, 1, 2], (9, 9, 6, 1)),  # the longest, though earlier
        ([1, 2, 3, 1, 2, 3], (1, 2, 3, 1)),  # a loop goes on
        ([4, 4, 4], (4, 4, 4, 4)),
        ([1, 2, 3, 4], ()),
        ([1, 2, 3, 2], ()),  # one token is no match
        ([1], ()),
        ([7, 7], ()),
    ],
)
def test_drafts_follow_the_last_tokens(tokens: list[int], drafts: tuple[int, ...]) -> None:
    assert drafts_of(NgramDrafter(2, 4), sequence(tokens), 4) == drafts


@pytest.mark.parametrize(
    ("sizes", "drafts"),
    [
        ((1, 1), (5, 9)),  # after the latest 3
        ((1, 2), (6, 7)),  # after 2, 3, which is longer
        ((1, 3), (8, 2)),  # after 1, 2, 3
        ((4, 9), ()),
    ],
)
def test_the_sizes_of_ngrams_decide_between_matches(
    sizes: tuple[int, int], drafts: tuple[int, ...]
) -> None:
    tokens = [1, 2, 3, 8, 2, 3, 6, 7, 3, 5, 9, 0, 1, 2, 3]
    assert drafts_of(NgramDrafter(*sizes), sequence(tokens), 2) == drafts


def test_no_more_than_the_longest_size_is_compared() -> None:
    """1, 2, 3 match at both places, and 9, 1, 2, 3 at the earlier one."""
    tokens = [9, 1, 2, 3, 5, 1, 2, 3, 6, 9, 1, 2, 3]
    assert drafts_of(NgramDrafter(1, 2), sequence(tokens), 1) == (6,)
    assert drafts_of(NgramDrafter(1, 3), sequence(tokens), 1) == (6,)
    assert drafts_of(NgramDrafter(1, 4), sequence(tokens), 1) == (5,)


def test_a_drafter_sees_the_tokens_that_were_appended() -> None:
    drafter, one = NgramDrafter(1, 3), sequence([1, 2, 3])
    assert drafts_of(drafter, one, 2) == ()
    for number in range(200):
        one.tokens.append(number % 3 + 1)
        drafts = ((number + 1) % 3 + 1, (number + 2) % 3 + 1)
        assert drafts_of(drafter, one, 2) == drafts


def test_a_match_goes_on_though_the_last_tokens_occur_elsewhere_too() -> None:
    """1, 2 are followed by 7 later than by 3, but the copy has come from before the 3."""
    drafter, one = NgramDrafter(2, 2), sequence([8, 9, 1, 2, 3, 4, 0, 1, 2, 7, 5, 8, 9])
    assert drafts_of(drafter, one, 4) == (1, 2, 3, 4)
    one.tokens += [1, 2]
    assert drafts_of(drafter, one, 2) == (3, 4)
    one.tokens += [7]
    assert drafts_of(drafter, one, 2) == (5, 8)  # the copy is another one


def test_chances_begin_alike_and_a_draft_needs_those_before_it() -> None:
    drafter, one = NgramDrafter(1, 5), sequence([1, 2, 3, 4, 1])
    assert drafter.chances(one, 3) == pytest.approx([0.7, 0.7**2, 0.7**3])


def test_chances_are_learned_without_drafts() -> None:
    """Of each length: here two tokens that match are always right, and one never is."""
    drafter, one = NgramDrafter(1, 5), sequence([1, 2, 3])
    for number in range(100, 140):
        one.tokens += [number, 1, 2, 3]  # after 1 and 2 comes what came before, after 3 does not
        for end in range(len(one.tokens) - 3, len(one.tokens) + 1):
            part = one.tokens[end:]
            del one.tokens[end:]
            drafter.chances(one, 1)
            one.tokens += part
    one.tokens += [140, 1, 2]
    (right,) = drafter.chances(one, 1)
    one.tokens += [3]
    (wrong,) = drafter.chances(one, 1)
    assert right > 0.9
    assert wrong < 0.1


def test_sequences_learn_from_each_other() -> None:
    drafter = NgramDrafter(1, 5)
    for number in range(20):
        one = sequence([1, 2, 1])
        drafter.chances(one, 1)
        one.tokens += [50 + number]
        drafter.chances(one, 1)
    (chance,) = drafter.chances(sequence([1, 2, 1]), 1)
    assert chance < 0.1


@pytest.mark.parametrize(("num_between", "draft"), [(255, 9), (256, 1255)])
def test_only_the_latest_256_places_of_a_common_pair_are_compared(
    num_between: int, draft: int
) -> None:
    """The longer match is before them."""
    between = [token for i in range(num_between) for token in (1, 2, 1000 + i)]
    one = sequence([7])
    one.tokens += [8, 1, 2, 9, *between, 7, 8, 1, 2]
    assert drafts_of(NgramDrafter(1, 4), one, 1) == (draft,)


def test_a_match_is_not_behind_the_first_token_of_the_sequence() -> None:
    """Nothing before the first token is compared."""
    assert drafts_of(NgramDrafter(1, 5), sequence([1, 2, 9, 8, 2, 1, 2]), 2) == (9, 8)
