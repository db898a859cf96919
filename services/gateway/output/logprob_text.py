"""Adds to logprobs what clients see: the text of the tokens, and their offsets in the text."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from quire.types import Candidate
from services.gateway.output.delta import PositionLogprobs, PromptReport
from services.model.text.tokenizer import Tokenizer
from services.protocol.logprobs import LogprobColumns, Logprobs


def with_text(
    tokenizer: Tokenizer, token_id: int, logprobs: Logprobs, text_offset: int
) -> PositionLogprobs:
    """The logprobs at one position, whose token is `token_id`, with the tokens' bytes."""

    def candidate(token_id: int, logprob: float, rank: int) -> Candidate:
        return Candidate(token_id, logprob, rank, tokenizer.token_bytes(token_id))

    top = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    return PositionLogprobs(
        chosen=candidate(token_id, logprobs.logprob, logprobs.rank),
        top=tuple(candidate(*each, rank) for rank, each in enumerate(top, 1)),
        text_offset=text_offset,
    )


@dataclass(frozen=True, slots=True)
class PromptReporter:
    """Builds the report of a prompt that its client asked for with `echo` or `prompt_logprobs`."""

    prompt: str | tuple[Any, ...]
    """As the client sent it: text, token ids or messages."""
    token_ids: tuple[int, ...]
    tokenizer: Tokenizer

    def report(self, logprobs: LogprobColumns | None) -> PromptReport:
        """The prompt's text and tokens. `logprobs` are of each token but the first; None if the
        client asked for none."""
        text = self._text()
        token_ids = np.array(self.token_ids, np.int64)
        if logprobs is not None:
            token_ids = np.concatenate([token_ids, logprobs.top_token_ids.ravel()])
        return PromptReport(
            text=text,
            token_ids=self.token_ids,
            tokens={i: self.tokenizer.token_bytes(i) for i in np.unique(token_ids).tolist()},
            offsets=partial(self._offsets, text),
            logprobs=logprobs,
        )

    def _text(self) -> str:
        """The prompt as the client sent it, if it sent text; otherwise decoded from the tokens."""
        if isinstance(self.prompt, str):
            return self.prompt
        return self.tokenizer.decode(self.token_ids, skip_special_tokens=False)

    def _offsets(self, text: str) -> list[int]:
        """The number of characters before each token. The text contains the name of a special
        token, or nothing of it."""
        detokenizer, offsets, offset = self.tokenizer.detokenizer(starts_text=True), [], 0
        for token_id in self.token_ids:
            offsets.append(offset)
            num_chars = len(detokenizer.push((token_id,)))
            offset += num_chars or self._num_chars_of_name(text, offset, token_id)
        return offsets

    def _num_chars_of_name(self, text: str, offset: int, token_id: int) -> int:
        try:
            name = self.tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:  # the token is a part of a character
            return 0
        return len(name) if text.startswith(name, offset) else 0
