"""Turns the tokens of one sequence into text: whole characters, up to the first stop string."""

from services.model.text.detokenizer import Detokenizer
from services.model.text.stop_strings import Scanned, StopMatcher


class Text:
    """The text of one sequence. No stop string ends it within the first `min_tokens` tokens. If
    `includes_end`, the text includes the token that ends the sequence."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        *,
        min_tokens: int = 0,
        includes_end: bool = False,
    ) -> None:
        self.includes_end = includes_end
        self.num_chars = 0
        """Characters of all tokens pushed, shown or not."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, token_id: int) -> Scanned:
        """Add a token. Returns the text that is certain now, and the stop string that the token
        completes, if any."""
        self._num_tokens += 1
        return self._scan(self._detokenizer.push((token_id,)))

    def flush(self) -> Scanned:
        """At the end, return the text that was held back, or the stop string that it completes."""
        scanned = self._scan(self._detokenizer.flush())
        if scanned.stop is not None:
            return scanned
        return Scanned(scanned.text + self._stops.flush())

    def _scan(self, text: str) -> Scanned:
        self.num_chars += len(text)
        return self._stops.push(text, may_end=self._num_tokens > self._min_tokens)
