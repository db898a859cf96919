"""Formats the logprobs of one token as a line for the terminal."""

from quire.types import Candidate, TokenLogprobs


def line(logprobs: TokenLogprobs) -> str:
    """The chosen token's logprob, rank and text, then the likeliest tokens."""
    chosen = logprobs.chosen
    top = "  ".join(map(_told, logprobs.top))
    return f"{chosen.logprob:9.4f}  #{chosen.rank:<6} {_name(chosen):<16}  {top}".rstrip()


def _told(candidate: Candidate) -> str:
    return f"{_name(candidate)} {candidate.logprob:.4f}"


def _name(candidate: Candidate) -> str:
    """The token in quotes, so that spaces and line breaks are visible."""
    return repr(candidate.token.decode(errors="backslashreplace"))
