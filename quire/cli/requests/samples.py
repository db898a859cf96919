"""Prints the answers of a request as they arrive: text, or a line for each token."""

import sys
from collections.abc import Callable

from quire.types import Candidate, Delta, TokenLogprobs, Usage


def delta_text(delta: Delta) -> str:
    return delta.text + ("\n" if delta.finish_reason else "")


def logprob_lines(delta: Delta) -> str:
    """The logprobs of a delta, one line for each token."""
    return "".join(f"{_logprob_line(logprobs)}\n" for logprobs in delta.logprobs)


def _logprob_line(logprobs: TokenLogprobs) -> str:
    """Logprob, rank and text of the chosen token, then the likeliest tokens."""
    chosen = logprobs.chosen
    top = "  ".join(map(_token_logprob, logprobs.top))
    return f"{chosen.logprob:9.4f}  #{chosen.rank:<6} {_quoted(chosen):<16}  {top}".rstrip()


def _token_logprob(candidate: Candidate) -> str:
    return f"{_quoted(candidate)} {candidate.logprob:.4f}"


def _quoted(candidate: Candidate) -> str:
    """The token in quotes, so that spaces and line breaks are visible; as bytes if it is only a
    part of a character."""
    try:
        return repr(candidate.token.decode())
    except UnicodeDecodeError:
        return repr(candidate.token)


class Samples:
    """Prints the sequences of a request one after another, the current one as it arrives.

    Deltas of later sequences wait until the earlier ones are finished. If there are several
    sequences, each gets a heading. `format_delta` returns the text to print for a delta.
    """

    def __init__(self, num_samples: int, format_delta: Callable[[Delta], str]) -> None:
        self._num_samples = num_samples
        self._format_delta = format_delta
        self._kept: dict[int, list[Delta]] = {}
        self._reasons: list[str] = []
        self._num_headings = 0

    def show(self, delta: Delta) -> None:
        _print_prompt_logprobs(delta)
        self._kept.setdefault(delta.index, []).append(delta)
        while kept := self._kept.pop(len(self._reasons), []):
            self._print_heading()
            for each in kept:
                print(self._format_delta(each), end="", flush=True)
                if each.finish_reason:
                    self._reasons.append(each.finish_reason)

    def _print_heading(self) -> None:
        number = len(self._reasons) + 1
        if self._num_samples > 1 and self._num_headings < number:
            self._num_headings = number
            print(f"--- {number} of {self._num_samples} ---", flush=True)

    def show_usage(self, usage: Usage) -> None:
        """Print token counts, time to first token and finish reasons to stderr."""
        num_cached = usage.num_cached_tokens
        cached = "" if num_cached is None else f", {num_cached} of them cached"
        print(
            f"[{usage.num_prompt_tokens} prompt tokens{cached}; "
            f"{usage.num_generated_tokens} generated, the first after "
            f"{usage.time_to_first_token_ms:.0f} ms; {', '.join(self._reasons)}]",
            file=sys.stderr,
        )


def _print_prompt_logprobs(delta: Delta) -> None:
    """Print the prompt's logprobs, if any, with an empty line behind them."""
    for logprobs in delta.prompt_logprobs:
        print(_logprob_line(logprobs))
    if delta.prompt_logprobs:
        print(flush=True)
