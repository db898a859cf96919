"""Logprobs as clients get them: with the tokens spelled out, and where they stand in the text."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.text.tokenizer import Tokenizer
from services.gateway.frontend.api import Candidate, Prompt, PromptReport, TokenLogprobs
from services.protocol.logprobs import Logprobs


class LogprobText:
    """Of one model's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def spell(self, token_id: int, logprobs: Logprobs, text_offset: int) -> TokenLogprobs:
        """Of the token that is there."""
        top = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        return TokenLogprobs(
            chosen=self._candidate(token_id, logprobs.logprob, logprobs.rank),
            top=tuple(self._candidate(*each, rank) for rank, each in enumerate(top, 1)),
            text_offset=text_offset,
        )

    def _candidate(self, token_id: int, logprob: float, rank: int) -> Candidate:
        return Candidate(token_id, logprob, rank, self._tokenizer.spell(token_id))


@dataclass(frozen=True, slots=True)
class PromptTeller:
    """Tells a client of its own prompt."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    tokenizer: Tokenizer

    def report(self, logprobs: Sequence[Logprobs]) -> PromptReport:
        """`logprobs`: of all tokens but the first, or of none."""
        text, tokenizer, logprob_text = self._text(), self.tokenizer, LogprobText(self.tokenizer)
        spelled = (
            logprob_text.spell(*each)
            for each in zip(self.token_ids[1:], logprobs, self._offsets(text)[1:], strict=True)
        )
        return PromptReport(
            text=text,
            token_ids=self.token_ids,
            first_token=tokenizer.spell(self.token_ids[0]),
            logprobs=tuple(spelled) if logprobs else (),
        )

    def _text(self) -> str:
        """As it was sent, where it was sent as text."""
        if isinstance(self.prompt, str):
            return self.prompt
        return self.tokenizer.decode(self.token_ids, skip_special_tokens=False)

    def _offsets(self, text: str) -> list[int]:
        """How much of the text is before each token. A special token may stand in it by its name,
        or be nothing of it."""
        detokenizer, offsets, offset = self.tokenizer.detokenizer(starts_text=True), [], 0
        for token_id in self.token_ids:
            offsets.append(offset)
            num_chars = len(detokenizer.push((token_id,)))
            offset += num_chars or self._num_chars_of_name(text, offset, token_id)
        return offsets

    def _num_chars_of_name(self, text: str, offset: int, token_id: int) -> int:
        try:
            name = self.tokenizer.spell(token_id).decode()
        except UnicodeDecodeError:  # part of a character
            return 0
        return len(name) if text.startswith(name, offset) else 0
