"""How a terminal shows the logprobs of one token."""

from quire.types import Candidate, TokenLogprobs


def line(logprobs: TokenLogprobs) -> str:
    """The token with its rank, then the likeliest."""
    chosen = logprobs.chosen
    top = "  ".join(map(_told, logprobs.top))
    return f"{chosen.logprob:9.4f}  #{chosen.rank:<6} {_name(chosen):<16}  {top}".rstrip()


def _told(candidate: Candidate) -> str:
    return f"{_name(candidate)} {candidate.logprob:.4f}"


def _name(candidate: Candidate) -> str:
    """Quoted, so that spaces and lines show."""
    return repr(candidate.token.decode(errors="backslashreplace"))
