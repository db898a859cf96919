"""The bodies of /v1/completions and /v1/chat/completions: OpenAI's fields and vLLM's extras.

This module checks types and combinations of fields. The gateway's admission checks the values, for
gRPC and HTTP alike.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from services.gateway.frontend.api import (
    GenerationRequest,
    Prompt,
    RequestedBeams,
    RequestedSampling,
)
from services.gateway.frontend.http.fields import (
    Body,
    Integers,
    Messages,
    ReceivedBody,
    StreamOptions,
    Strings,
    biases_of,
    optional_tuple,
    prompts,
    texts,
    unless_false,
)
from services.protocol.ticket import EarlyStopping

_BEAM_FIELDS: dict[str, object] = {
    "beam_width": 1,
    "early_stopping": False,
    "length_penalty": 1,
}
"""The parameters of a beam search, each with the value that is accepted without a beam search."""

_EARLY_STOPPING = {
    False: EarlyStopping.WHEN_UNLIKELY,
    True: EarlyStopping.WHEN_FULL,
    "never": EarlyStopping.WHEN_IMPOSSIBLE,
}

DEFAULT_MAX_TOKENS = 16
"""The default of max_tokens for a text completion, as in OpenAI's API."""


class GenerationBody(Body):
    """The fields that both bodies have. Like vLLM, Quire accepts `metadata` to `user`, which are
    notes to a provider, and does not use them."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(texts)] = ()
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(biases_of)] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None

    allowed_token_ids: Integers | None = None
    bad_words: Strings | None = None
    beam_width: int | None = None
    best_of: int | None = None
    cache_salt: str | None = None
    early_stopping: bool | Literal["never"] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    length_penalty: float | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    priority: int | None = None
    prompt_logprobs: int | None = None
    received: Annotated[list[ReceivedBody], Field(fail_fast=True)] | None = None
    repetition_penalty: float | None = None
    request_id: str | None = None
    resume_token: str | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: Integers | None = None
    top_k: int | None = None
    use_beam_search: bool | None = None

    @model_validator(mode="after")
    def _beams_need_a_search(self) -> Self:
        # In a beam search, `best_of` is the number of beams, like `beam_width`.
        both = self.beam_width, self.best_of
        if self.use_beam_search and None not in both and both[0] != both[1]:
            raise ValueError("beam_width and best_of differ; give one of them")
        for name, neutral in _BEAM_FIELDS.items():
            value = getattr(self, name)
            if not self.use_beam_search and value is not None and value != neutral:
                raise ValueError(f"{name} is for requests with use_beam_search=true")
        return self

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for requests with stream=true")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_come_at_once(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are not available with stream=true")
        return self

    @model_validator(mode="after")
    def _received_is_of_a_stream_with_a_name(self) -> Self:
        if self.received is None:
            return self
        if not self.stream or not self.request_id or not self.resume_token:
            raise ValueError(
                "received is for requests with stream=true, a request_id, and the resume_token "
                "that came with the first response"
            )
        if self.echoes:
            raise ValueError("what was echoed is not sent again: no echo with received")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def running_usage(self) -> bool:
        """Whether each part of a stream has the usage so far."""
        options = self.stream_options
        return self.include_usage and bool(options and options.continuous_usage_stats)

    @property
    def effective_max_tokens(self) -> int | None:
        """The limit of generated tokens that the client set."""
        return self.max_tokens

    @property
    def default_max_tokens(self) -> int | None:
        """The limit of generated tokens if the client set none; None: the limit of context and
        pool."""
        return None

    @property
    def num_choices(self) -> int:
        """The number of choices for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def selects_best(self) -> bool:
        """Whether the answer has fewer choices than are sampled."""
        is_search = bool(self.use_beam_search)
        return not is_search and self.best_of is not None and self.best_of > self.num_choices

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens whose logprobs to report, in addition to each token's own;
        None: report no logprobs."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        """Whether the text begins with the prompt's text."""
        return False

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Variables of the chat template."""
        return {}

    @property
    def only_prompt(self) -> bool:
        """Whether the answer has nothing of the generated tokens."""
        return False

    @property
    def asked_prompt_logprobs(self) -> int | None:
        """Like `num_logprobs`, for the prompt's tokens, as requested from the gateway."""
        return self.prompt_logprobs

    def request(self, prompt: Prompt, request_id: str) -> GenerationRequest:
        return GenerationRequest(
            prompt=prompt,
            request_id=request_id,
            model=self.model or "",
            sampling=RequestedSampling(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                seed=self.seed,
                max_tokens=self.effective_max_tokens,
                default_max_tokens=self.default_max_tokens,
                stop=self.stop,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=bool(self.ignore_eos),
                n=self.num_choices,
                best_of=None if self.use_beam_search else self.best_of,
                logprobs=self.num_logprobs,
                prompt_logprobs=self.asked_prompt_logprobs,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                logit_bias=self.logit_bias,
                allowed_token_ids=optional_tuple(self.allowed_token_ids),
                bad_words=tuple(self.bad_words or ()),
                min_tokens=self.min_tokens,
                include_stop_str_in_output=bool(self.include_stop_str_in_output),
                skip_special_tokens=self.skip_special_tokens is not False,
                beam=self._beams(),
            ),
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            received=None if self.received is None else tuple(r.told() for r in self.received),
            resume_token=self.resume_token or "",
            echo=self.echoes,
            template_arguments=self.template_arguments,
            running_usage=self.running_usage,
        )

    def _beams(self) -> RequestedBeams | None:
        if not self.use_beam_search:
            return None
        widths = (width for width in (self.beam_width, self.best_of, self.n) if width is not None)
        early_stopping = _EARLY_STOPPING[self.early_stopping or False]
        return RequestedBeams(next(widths, 1), self.length_penalty, early_stopping)


class CompletionBody(GenerationBody):
    prompt: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(prompts)]
    logprobs: Annotated[int | None, BeforeValidator(unless_false)] = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _the_best_come_at_the_end(self) -> Self:
        if self.selects_best and self.stream:
            raise ValueError("best_of above n is not available with stream=true")
        return self

    @model_validator(mode="after")
    def _received_is_of_one_prompt(self) -> Self:
        if self.received is not None and len(self.prompt) > 1:
            raise ValueError("received is for requests with one prompt")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def only_prompt(self) -> bool:
        """With an echo, max_tokens may be 0: the client wants the prompt's logprobs only."""
        return self.echoes and self.max_tokens == 0

    @property
    def effective_max_tokens(self) -> int | None:
        """1 if `only_prompt`: a prompt is not computed without generating a token."""
        return 1 if self.only_prompt else self.max_tokens

    @property
    def default_max_tokens(self) -> int | None:
        return DEFAULT_MAX_TOKENS

    @property
    def asked_prompt_logprobs(self) -> int | None:
        """The larger of what `prompt_logprobs` and an echo need: echoed tokens have logprobs like
        generated ones."""
        of_echo = self.logprobs if self.echoes else None
        asked = [number for number in (self.prompt_logprobs, of_echo) if number is not None]
        return max(asked, default=None)

    def requests(self, request_id: str) -> list[GenerationRequest]:
        """One request for each prompt, in order."""
        if len(self.prompt) == 1:
            return [self.request(self.prompt[0], request_id)]
        return [
            self.request(prompt, f"{request_id}-{index}")
            for index, prompt in enumerate(self.prompt)
        ]


class ChatBody(GenerationBody):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    @model_validator(mode="after")
    def _chats_are_not_chosen_from(self) -> Self:
        if self.selects_best:
            text = "best_of above n is for /v1/completions, or for use_beam_search=true"
            raise ValueError(text)
        return self

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is for requests with logprobs=true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_arguments(self) -> dict[str, Any]:
        effort = (
            {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        )
        return {**effort, **(self.chat_template_kwargs or {})}

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if None not in (both := (self.max_tokens, self.max_completion_tokens)) and (
            both[0] != both[1]
        ):
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self

    @property
    def effective_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def requests(self, request_id: str) -> list[GenerationRequest]:
        messages = tuple(message.message() for message in self.messages)
        return [self.request(messages, request_id)]
