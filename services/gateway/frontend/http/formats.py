"""The two formats of an answer: OpenAI's text completion and chat completion, both with vLLM's
`stop_reason` and `token_ids`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from services.gateway.frontend.api import Delta, PromptReport, TokenLogprobs, Usage
from services.gateway.frontend.http.logprobs import JSON, chat_logprobs, text_logprobs


@dataclass(slots=True)
class Transcript:
    """Collects the deltas of one choice."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: PromptReport | None = None
    """The prompt of the choice, if it is reported with these deltas."""
    last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.last = delta

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of one endpoint's answers."""

    id_prefix: str
    kind: str
    """The field `object` of an answer that is not streamed."""
    chunk_kind: str
    """The field `object` of each part of a stream."""
    opening: JSON | None
    """The fields of the choice with which a stream begins, if it begins with one."""
    delta: Callable[[str], JSON]
    """The fields of a choice for the text of a delta."""
    whole: Callable[[str], JSON]
    """The fields of a choice for the whole text."""
    logprobs: Callable[[Sequence[TokenLogprobs], int], JSON]
    """The field `logprobs` for tokens that begin at an offset of the choice's text."""
    prompt_logprobs_in_choice: bool
    """Whether prompt logprobs are in the choice; otherwise they are at the answer's top level."""


COMPLETION_FORMAT = AnswerFormat(
    id_prefix="cmpl",
    kind="text_completion",
    chunk_kind="text_completion",
    opening=None,
    delta=lambda text: {"text": text},
    whole=lambda text: {"text": text},
    logprobs=text_logprobs,
    prompt_logprobs_in_choice=True,
)
CHAT_FORMAT = AnswerFormat(
    id_prefix="chatcmpl",
    kind="chat.completion",
    chunk_kind="chat.completion.chunk",
    opening={"delta": {"role": "assistant", "content": ""}},
    delta=lambda text: {"delta": {"content": text}},
    whole=lambda text: {"message": {"role": "assistant", "content": text}},
    logprobs=lambda tokens, _offset: chat_logprobs(tokens),
    prompt_logprobs_in_choice=False,
)


def choice_json(
    index: int,
    content: JSON,
    delta: Delta | None,
    token_ids: list[int] | None,
    logprobs: JSON | None,
) -> JSON:
    """One choice of an answer. `token_ids`, `logprobs`: None if the client did not ask for them."""
    reason = delta.finish_reason if delta else None
    fields = {
        "index": index,
        **content,
        "logprobs": logprobs,
        "finish_reason": reason.value if reason else None,
        "stop_reason": delta.stopped_by if delta else None,
    }
    return fields if token_ids is None else {**fields, "token_ids": token_ids}


def usage_json(usages: Iterable[Usage]) -> JSON:
    """The field `usage`: the sum over all prompts of an answer."""
    usages = tuple(usages)
    num_prompt = sum(usage.num_prompt_tokens for usage in usages)
    num_generated = sum(usage.num_generated_tokens for usage in usages)
    cached = [usage.num_cached_tokens for usage in usages if usage.num_cached_tokens is not None]
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(cached)} if cached else None,
    }
