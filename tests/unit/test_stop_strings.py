"""Stop strings: the first complete one ends the text, and none of its characters is sent."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.model.text.stop_strings import Scanned, StopMatcher
from services.runtime.errors import InvalidRequest

no_deadline = settings(deadline=None)  # how fast the machine is, is no property


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The plain definition: search every prefix of the text, shortest first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        scanned = matcher.push(piece)
        shown += scanned.text
        if scanned.stop is not None:
            return shown, scanned.stop
    return shown + matcher.flush(), None


words = st.text("ab", min_size=1, max_size=5)


@no_deadline
@given(st.lists(st.text("ab", max_size=6), max_size=8), st.lists(words, max_size=3))
@example(["xabc"], ["bc", "abc", "c"])
@example(["aaa", "ab"], ["aaab"])
def test_stop_strings_equal_the_reference(pieces: list[str], stops: list[str]) -> None:
    """In any pieces of the text."""
    assert run(pieces, stops) == reference("".join(pieces), stops)


@no_deadline
@given(st.text("ab", max_size=20), st.lists(words, min_size=1, max_size=3))
def test_shown_text_is_never_taken_back(text: str, stops: list[str]) -> None:
    """After every character, the sent text is a prefix of the final text, and no text is held back
    that cannot become a stop string."""
    final, _ = reference(text, stops)
    matcher, shown = StopMatcher(stops), ""
    for seen, char in enumerate(text, start=1):
        scanned = matcher.push(char)
        shown += scanned.text
        assert final.startswith(shown)
        if scanned.stop is not None:
            return
        held = text[len(shown) : seen]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@no_deadline
@given(st.text("ab", max_size=20), st.lists(words, min_size=1, max_size=3), st.integers(0, 20))
@example("ababa", ["aba"], 3)
def test_a_stop_string_that_may_not_end_the_text_is_passed_over(
    text: str, stops: list[str], num_free: int
) -> None:
    """No stop string is complete within the first `num_free` characters; one that is complete later
    may begin there."""
    ends = (
        (text[: end - len(stop)], stop)
        for end in range(num_free + 1, len(text) + 1)
        for stop in sorted(stops, key=len, reverse=True)
        if text[:end].endswith(stop)
    )
    expected = next(ends, (text, None))
    matcher, shown = StopMatcher(stops), ""
    for position, char in enumerate(text, start=1):
        scanned = matcher.push(char, may_end=position > num_free)
        shown += scanned.text
        if scanned.stop is not None:
            break
    else:
        shown += matcher.flush()
    assert (shown, scanned.stop if text else None) == expected


def test_an_included_stop_string_is_shown_and_nothing_is_held() -> None:
    matcher = StopMatcher(["END"], included=True)
    assert matcher.push("the E") == Scanned("the E")
    assert matcher.push("ND is") == Scanned("ND", "END")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="a stop string is empty"):
        StopMatcher(["a", ""])
