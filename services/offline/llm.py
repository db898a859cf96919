"""`LLM`: a model in the caller's process, with the interface that users of vLLM know."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from itertools import cycle
from operator import index
from typing import Any, Self, TypeVar, cast

import structlog
from pydantic import TypeAdapter, ValidationError
from tqdm import tqdm

from quire.errors import InvalidRequest, QuireError, ServerError
from quire.supervisor.model_source import find_model, with_draft_directory
from quire.types import (
    Candidate,
    ChatMessage,
    Choice,
    Completion,
    Embedding,
    LoRARequest,
    Prompt,
    Sampling,
    TokenLogprobs,
)
from services.gateway import api
from services.gateway.api import GenerationRequest, RequestedSampling
from services.gateway.http.answering.formats import CHAT_FORMAT
from services.gateway.http.answering.in_order import in_order
from services.gateway.http.bodies.reading import checked
from services.gateway.http.bodies.schema import ChatBody
from services.gateway.http.bodies.structured import StructuredOutputsBody
from services.gateway.http.scoring import scores_of
from services.gateway.output.delta import Delta, PromptReport, joined
from services.runtime.errors import InvalidRequest as InvalidDomainRequest
from services.runtime.errors import QuireError as DomainError
from services.runtime.logging import configure_logging
from services.runtime.process import set_up_openmp

T = TypeVar("T")
R = TypeVar("R")

_AT_ONCE = 4
"""The number of requests that wait or run at a time, for each sequence of a step. When a sequence
ends, a request waits already, and yet the queue never holds all of a long list of prompts."""

EmbeddedPrompt = str | Sequence[int]
PromptFields = Mapping[str, Any]
"""A prompt as in vLLM: `{"prompt": "a text"}` or `{"prompt_token_ids": [1, 2]}`."""
Conversation = Sequence[ChatMessage] | Sequence[dict[str, Any]]
_SAMPLING = TypeAdapter(RequestedSampling)


class LLM:
    """Loads a model and generates in this process: no server, no Redis, no sockets.

    `model` names a directory, a GGUF file, a Hugging Face id in the local cache, or "demo".
    `settings` are the settings of workers, in lower case, such as `dtype`, `quantize`, `kv_dtype`,
    `pool_memory`, `max_model_len`, `max_num_seqs`, `max_num_batched_tokens`, `threads`, `isa`,
    `max_loras`, `speculative_config`. With `enable_lora=False` it takes no adapters, as in vLLM.

    A service with the same settings gives the same results. Prompts that begin alike share KV, also
    between calls. Use an LLM as a context manager, or call `close`, to free its memory before the
    process ends. An LLM works only in the process that made it. Raises QuireError.
    """

    def __init__(self, model: str = "demo", *, enable_lora: bool = True, **settings: Any) -> None:
        set_up_openmp(None)  # before the next import, which imports PyTorch
        if not structlog.is_configured():
            configure_logging("offline", "warning", "auto")
        from services.offline.engine import OfflineEngine, offline_settings

        source = find_model(model)
        if isinstance(speculative := settings.get("speculative_config"), Mapping):
            settings["speculative_config"] = with_draft_directory(speculative)
        if not enable_lora:
            settings["max_loras"] = 0
        given = {name: value for name, value in settings.items() if value is not None}
        given |= {"model": source.directory, "model_name": source.name}
        with _domain_errors():
            known = offline_settings(**{**source.settings, **given})
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-offline")
        try:
            with _domain_errors():
                self.engine = self._thread.submit(OfflineEngine, known, self._loop).result()
        except BaseException:
            self._loop.close()
            raise
        self.num_at_once = _AT_ONCE * known.num_seqs
        self._loaded: set[LoRARequest] = set()

    def generate(
        self,
        prompts: Prompt | PromptFields | Sequence[Prompt | PromptFields],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Generate from one text or many, or from one list of token ids or many. Each may stand in
        a dict, as vLLM's `TextPrompt` or `TokensPrompt`.

        `sampling_params` and `lora_request` are for all prompts, or a list with one for each. The
        answers are in the order of the prompts. If a request fails, all others are cancelled, and
        the call raises its error."""
        asked = self._requests(_prompts(prompts), sampling_params, lora_request)
        return self._answer_all(asked, self._complete, "Generating", use_tqdm)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Generate the next message of one conversation or many. A message is a `ChatMessage`, or a
        dict as in OpenAI's chats; `tools`, `tool_choice` and `chat_template_kwargs` are as in
        `/v1/chat/completions`, and the others as in `generate`. The `message` of each choice has
        its content, reasoning and tool calls, and can be appended to its conversation."""
        is_one = not conversations or isinstance(conversations[0], (ChatMessage, dict))
        many = [conversations] if is_one else conversations
        options = {"tools": tools and list(tools), "tool_choice": tool_choice}
        options["chat_template_kwargs"] = chat_template_kwargs
        asked = self._requests([""] * len(many), sampling_params, lora_request)
        with _domain_errors():
            chats = [_chat(cast("Conversation", one), options) for one in many]
        asked = [
            replace(chat, sampling=one.sampling, model=one.model)
            for chat, one in zip(chats, asked, strict=True)
        ]
        return self._answer_all(asked, self._complete, "Generating", use_tqdm)

    def embed(
        self,
        prompts: EmbeddedPrompt | PromptFields | Sequence[EmbeddedPrompt | PromptFields],
        *,
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> list[Embedding]:
        """Return the embeddings of texts, or of lists of token ids, in order. The checkpoint says
        how states are pooled. `dimensions` is the number of first values to return, for models that
        are trained for it. Raises errors as `generate` does."""
        requests = [
            api.EmbeddingRequest(_api_prompt(prompt), dimensions=dimensions)
            for prompt in _prompts(prompts)
        ]
        return self._answer_all(requests, self._embedding, "Embedding", use_tqdm)

    async def _embedding(self, request: api.EmbeddingRequest) -> Embedding:
        found = await self.engine.embed(request)
        return Embedding(found.values, found.usage.num_prompt_tokens)

    def score(
        self, texts: str | Sequence[str], others: str | Sequence[str], *, use_tqdm: bool = True
    ) -> list[float]:
        """Return the scores of pairs of texts, or of one text with all `others`: a cross-encoder's,
        or the cosine similarities of their embeddings."""
        left = [texts] if isinstance(texts, str) else list(texts)
        right = [others] if isinstance(others, str) else list(others)
        if len(left) not in (1, len(right)):
            raise InvalidRequest(
                f"{len(left)} texts for {len(right)} others; give 1 text, or as many",
                "invalid_request",
            )
        if self.engine.is_cross_encoder:
            both = zip(cycle(left), right, strict=False)
            pairs = [api.EmbeddingRequest(other, query=one) for one, other in both]
            found = self._answer_all(pairs, self._embedding, "Scoring", use_tqdm)
        else:
            found = self.embed([*left, *right], use_tqdm=use_tqdm)
        return list(scores_of([each.values for each in found], left, right))

    def close(self) -> None:
        """Free the model and the pool. A second call does nothing."""
        if os.getpid() != self._pid or self._loop.is_closed():
            return  # a forked child has neither the thread nor the pool
        self._thread.submit(self._loop.run_until_complete, self.engine.close()).result()
        self._thread.shutdown()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that uses the engine, and return its result. Calls of several threads run
        one after another. Raises ServerError if the engine fails meanwhile or is closed, or in a
        forked child, which has no thread for the engine."""
        if os.getpid() != self._pid:
            work.close()
            raise ServerError(
                f"this LLM belongs to process {self._pid}, and this is its forked child: make the "
                "LLM in the child, or start the child with multiprocessing's method 'spawn'",
                "forked",
            )
        if self._loop.is_closed():
            work.close()
            raise ServerError("this LLM is closed", "closed")
        engine = self.engine
        call = self._thread.submit(lambda: self._loop.run_until_complete(engine.drive(work)))
        try:
            return call.result()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(engine.cancel)
            raise

    def _requests(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sampling | Sequence[Sampling] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[GenerationRequest]:
        """Load the adapters of `lora_request`, and return one request for each prompt."""
        number = len(prompts)
        samplings = _one_each("sampling parameters", Sampling, sampling_params, number)
        loras = _one_each("LoRA requests", LoRARequest, lora_request, number)
        with _domain_errors():
            for lora in {lora for lora in loras if lora is not None} - self._loaded:
                self.run(self.engine.add_adapter(lora.lora_name, lora.lora_path))
                self._loaded.add(lora)
            return [
                GenerationRequest(
                    _api_prompt(prompt),
                    model=lora.lora_name if lora else "",
                    sampling=_requested(sampling or Sampling()),
                )
                for prompt, sampling, lora in zip(prompts, samplings, loras, strict=True)
            ]

    async def _complete(self, request: GenerationRequest) -> Completion:
        async with self.engine.generate(replace(request, echo=True)) as stream:
            deltas = [delta async for delta in stream]
        prompt, usage = deltas[0].prompt, deltas[-1].usage
        assert prompt is not None
        assert usage is not None
        indices = sorted({delta.index for delta in deltas})
        wholes = (joined([each for each in deltas if each.index == index]) for index in indices)
        choices = (_choice(whole, request.wants_parts) for whole in wholes)
        return Completion(
            request_id=deltas[0].request_id,
            choices=tuple(choices),
            usage=usage,
            prompt_logprobs=tuple(_prompt_logprobs(prompt)),
            prompt=None if isinstance(next(iter(request.prompt), ""), int) else prompt.text,
            prompt_token_ids=prompt.token_ids,
        )

    def _answer_all(
        self, requests: Sequence[R], answer: Callable[[R], Awaitable[T]], doing: str, use_tqdm: bool
    ) -> list[T]:
        async def one(numbered: tuple[int, R]) -> T:
            number, request = numbered
            try:
                with _domain_errors():
                    return await answer(request)
            except QuireError as error:
                error.add_note(f"prompt {number} of {len(requests)}, counted from 0")
                raise
            finally:
                bar.update()

        with tqdm(total=len(requests), desc=doing, disable=not use_tqdm) as bar:
            return self.run(in_order(one, enumerate(requests), self.num_at_once))


@contextmanager
def _domain_errors() -> Iterator[None]:
    """Raises an error of the services as an error of the client library."""
    try:
        yield
    except DomainError as error:
        kind = InvalidRequest if isinstance(error, InvalidDomainRequest) else QuireError
        raise kind(str(error), error.code) from error


def _prompts(prompts: Prompt | PromptFields | Sequence[Prompt | PromptFields]) -> list[Prompt]:
    """The prompts of a call for one or many; an empty list has none. Raises InvalidRequest."""
    if isinstance(prompts, (str, Mapping)):
        return [_plain(prompts)]
    is_one = bool(prompts) and isinstance(prompts[0], (int, ChatMessage))
    many = [prompts] if is_one else prompts
    return [_plain(cast("Prompt | PromptFields", one)) for one in many]


def _plain(prompt: Prompt | PromptFields) -> Prompt:
    """The text or the token ids of a prompt. Raises InvalidRequest if a dict has something else."""
    if not isinstance(prompt, Mapping):
        return prompt
    given = {name: value for name, value in prompt.items() if value is not None}
    if not given or given.keys() - {"prompt", "prompt_token_ids"}:
        text = f"a prompt has prompt or prompt_token_ids, and no other fields, not {[*given]}"
        raise InvalidRequest(text, "invalid_request")
    # vLLM's TokensPrompt may have its text too.
    return cast("Prompt", given.get("prompt_token_ids", given.get("prompt")))


def _chat(conversation: Conversation, options: dict[str, Any]) -> GenerationRequest:
    said = [
        {name: value for name, value in asdict(one).items() if name != "name" or value}
        if isinstance(one, ChatMessage)
        else one
        for one in conversation
    ]
    (request,) = checked({"messages": said, **options}, ChatBody).requests("")
    return request


def _one_each(
    what: str, kind: type[T], given: T | Sequence[T | None] | None, number: int
) -> Sequence[T | None]:
    if given is None or isinstance(given, kind):
        return [given] * number
    found = cast("Sequence[T | None]", given)
    if len(found) != number:
        raise InvalidRequest(f"{len(found)} {what} for {number} prompts", "invalid_request")
    return found


def _api_prompt(prompt: Prompt) -> api.Prompt:
    """Raises InvalidRequest."""
    if isinstance(prompt, str):
        return prompt
    if prompt and all(isinstance(one, ChatMessage) for one in prompt):
        said = cast("Sequence[ChatMessage]", prompt)
        return tuple(api.ChatMessage(one.role, one.content, one.name) for one in said)
    try:
        return tuple(map(index, cast("Sequence[int]", prompt)))
    except TypeError as error:
        raise InvalidRequest(f"the prompt: {error}", "invalid_request") from error


def _requested(sampling: Sampling) -> RequestedSampling:
    """Raises InvalidRequest if a value has the wrong type; admission checks the values."""
    given = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    if (asked := given.pop("structured_outputs")) is not None:
        form = {**asdict(asked), "choice": asked.choice and list(asked.choice)}
        given["structure"] = checked(form, StructuredOutputsBody).to_structure()
    try:
        return _SAMPLING.validate_python(given)
    except ValidationError as error:
        first = error.errors()[0]
        text = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise InvalidRequest(text, "invalid_request") from error


def _choice(whole: Delta, has_message: bool) -> Choice:
    assert whole.finish_reason is not None
    return Choice(
        index=whole.index,
        text=whole.text,
        token_ids=whole.token_ids,
        finish_reason=whole.finish_reason.value,
        stopped_by=whole.stopped_by,
        logprobs=tuple(TokenLogprobs(one.chosen, one.top) for one in whole.logprobs),
        score=whole.score,
        message=CHAT_FORMAT.whole(whole.text, whole.parts)["message"] if has_message else None,
    )


def _prompt_logprobs(prompt: PromptReport) -> Iterator[TokenLogprobs]:
    for entries in prompt.entries():
        chosen, *top = (Candidate(*entry, prompt.tokens[entry[0]]) for entry in entries)
        yield TokenLogprobs(chosen, tuple(top))
