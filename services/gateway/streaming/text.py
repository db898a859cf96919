"""What the tokens of one sequence say: whole characters, as far as its first stop string."""

from services.common.text.detokenizer import Detokenizer
from services.common.text.stop_strings import Scanned, StopMatcher


class Text:
    """`min_tokens`: no stop string ends the text with any of so many first tokens. `shows_end`: the
    token that ends the sequence is text too."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        *,
        min_tokens: int = 0,
        shows_end: bool = False,
    ) -> None:
        self.shows_end = shows_end
        self.num_chars = 0
        """Of all tokens pushed, shown or not."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, token_id: int) -> Scanned:
        """What is certain after one more token, and the stop string that it completes."""
        self._num_tokens += 1
        return self._scan(self._detokenizer.push((token_id,)))

    def flush(self) -> Scanned:
        """At the end: all that was held back, unless that is a stop string."""
        scanned = self._scan(self._detokenizer.flush())
        if scanned.stop is not None:
            return scanned
        return Scanned(scanned.text + self._stops.flush())

    def _scan(self, text: str) -> Scanned:
        self.num_chars += len(text)
        return self._stops.push(text, may_end=self._num_tokens > self._min_tokens)
