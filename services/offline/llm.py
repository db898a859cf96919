"""`LLM`: a model in the caller's process, with the interface that users of vLLM know."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import cycle
from operator import mul
from typing import Any, Self, TypeVar, cast

import structlog
from tqdm import tqdm

from quire import messages
from quire.errors import InvalidRequest, QuireError, ServerError
from quire.messages import Request
from quire.supervisor.model_source import find_model, with_draft_directory
from quire.types import ChatMessage, Completion, Embedding, LoRARequest, Prompt, Sampling
from quire.v1.inference_pb2 import EmbedRequest
from services.gateway.api import GenerationRequest
from services.gateway.frontend.http.answering.formats import CHAT_FORMAT, Transcript
from services.gateway.frontend.http.bodies.reading import checked
from services.gateway.frontend.http.bodies.schema import ChatBody
from services.gateway.frontend.service import InferenceService, request_from_wire, response_to_wire
from services.gateway.wiring import Wiring
from services.runtime.errors import Draining
from services.runtime.errors import InvalidRequest as InvalidDomainRequest
from services.runtime.errors import QuireError as DomainError
from services.runtime.logging import configure_logging
from services.runtime.process import set_up_openmp

T = TypeVar("T")
R = TypeVar("R")

_AT_ONCE = 4
"""Requests that wait or run at a time, for each sequence of a step: the next ones are always there
when a sequence ends, and a long list of prompts does not lie in the queue as a whole."""

EmbeddedPrompt = str | Sequence[int]
Conversation = Sequence[ChatMessage] | Sequence[dict[str, Any]]


class _Context:
    """The part of a gRPC call's context that `InferenceService` reads."""

    def time_remaining(self) -> None:
        """None: there is no deadline."""


class LLM:
    """Loads a model and generates in this process: no server, no Redis, no sockets.

    `model`: a directory, a GGUF file, a Hugging Face id in the local cache, or "demo".
    `settings`: those of workers, in lower case, such as `dtype`, `quantize`, `kv_dtype`,
    `pool_memory`, `max_model_len`, `max_num_seqs`, `max_num_batched_tokens`, `threads`, `isa`,
    `max_loras`, `speculative_config`. `enable_lora`: as in vLLM; False takes no adapters.

    Results are those of a service with the same settings. Prompts that begin alike share KV, also
    between calls. To free the memory before the process ends, use it as a context manager or call
    `close`. It works only in the process that made it. Raises QuireError.
    """

    def __init__(self, model: str = "demo", *, enable_lora: bool = True, **settings: Any) -> None:
        set_up_openmp(None)  # before the next import, which imports PyTorch
        if not structlog.is_configured():
            configure_logging("offline", "warning", "auto")
        from services.offline.deployment import offline_settings

        source = find_model(model)
        if isinstance(speculative := settings.get("speculative_config"), Mapping):
            settings["speculative_config"] = with_draft_directory(speculative)
        if not enable_lora:
            settings["max_loras"] = 0
        given = {name: value for name, value in settings.items() if value is not None}
        with _domain_errors():
            known = offline_settings(
                **{**source.settings, **given}, model=source.directory, model_name=source.name
            )
        self.num_at_once = _AT_ONCE * known.max_num_seqs
        self._loaded: set[LoRARequest] = set()
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._submitting = threading.Lock()
        self._has_ended = False
        started: Future[Wiring] = Future()
        self._serving = self._loop.create_task(self._serve(known, started))
        self._thread = threading.Thread(target=self._run_loop, name="quire-offline", daemon=True)
        self._thread.start()
        with _domain_errors():
            try:
                self._wiring = started.result()
            except BaseException:
                self.close()
                raise
        self._service = InferenceService(self._wiring.gateway)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Generate from texts, or from lists of token ids: one or many.

        `sampling_params`, `lora_request`: for all prompts, or one for each. The answers are in the
        order of the prompts. Raises the error of the first request that fails; the others are
        cancelled.
        """
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
        """`generate` for one conversation or many. A message is a `ChatMessage`, or a dict as in
        OpenAI's chats; `tools`, `tool_choice` and `chat_template_kwargs` are as in
        `/v1/chat/completions`. Each choice has a `message`, which can be the next one of its
        conversation: its content, reasoning and tool calls."""
        many = conversations if _is_many(conversations) else [conversations]
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
        prompts: EmbeddedPrompt | Sequence[EmbeddedPrompt],
        *,
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> list[Embedding]:
        """The embeddings of texts, or of lists of token ids, in order. The checkpoint says how its
        states are pooled. `dimensions`: the first so many values, for models that are trained for
        it. Raises as `generate`."""
        requests = [
            messages.embed_request(cast("EmbeddedPrompt", prompt), dimensions)
            for prompt in _prompts(prompts)
        ]

        async def embed(request: EmbedRequest) -> Embedding:
            response = await self._service.Embed(request, cast("Any", _Context()))
            return messages.embedding(response)

        return self._answer_all(requests, embed, "Embedding", use_tqdm)

    def score(
        self, texts: str | Sequence[str], others: str | Sequence[str], *, use_tqdm: bool = True
    ) -> list[float]:
        """The cosine similarities of pairs of texts. One text is compared with all `others`."""
        left = [texts] if isinstance(texts, str) else list(texts)
        right = [others] if isinstance(others, str) else list(others)
        if len(left) not in (1, len(right)):
            raise InvalidRequest(
                f"{len(left)} texts for {len(right)} others; give 1 text, or as many",
                "invalid_request",
            )
        found = [each.values for each in self.embed([*left, *right], use_tqdm=use_tqdm)]
        pairs = zip(cycle(found[: len(left)]), found[len(left) :], strict=False)
        return [sum(map(mul, one, other)) for one, other in pairs]

    def close(self) -> None:
        """Free the model and the pool. May be called again."""
        if os.getpid() != self._pid:
            return  # a forked child has neither the thread nor the pool
        with self._submitting:
            if not self._has_ended:
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self, work: Callable[[Wiring], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine beside the deployment and return its result. Raises ServerError if the
        deployment fails meanwhile, or is closed, and in a forked child, where no thread runs it."""
        if os.getpid() != self._pid:
            raise ServerError(
                f"this LLM belongs to process {self._pid}, and this is its forked child: make the "
                "LLM in the child, or start the child with multiprocessing's method 'spawn'",
                "forked",
            )
        with self._submitting:
            if self._has_ended:
                raise ServerError("this LLM is closed", "closed")
            call = asyncio.run_coroutine_threadsafe(self._guarded(work), self._loop)
        return call.result()

    # In the loop's thread.

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.wait([self._serving]))
        with self._submitting:
            self._has_ended = True
        self._loop.run_until_complete(asyncio.sleep(0))  # calls that were submitted become tasks
        if calls := asyncio.all_tasks(self._loop):  # each learns that the deployment has ended
            self._loop.run_until_complete(asyncio.wait(calls))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _serve(self, settings: Any, started: "Future[Wiring]") -> None:
        from services.offline.deployment import offline_deployment

        try:
            async with offline_deployment(settings) as wiring:
                started.set_result(wiring)
                await self._stop.wait()
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(_cause(error))

    async def _guarded(self, work: Callable[[Wiring], Coroutine[Any, Any, T]]) -> T:
        """Run `work` until it ends, or until the deployment does."""
        task = asyncio.create_task(work(self._wiring))
        await asyncio.wait([task, self._serving], return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not _is_draining(task.exception()):
            return task.result()
        task.cancel()
        await asyncio.wait([task, self._serving])
        error = None if self._serving.cancelled() else self._serving.exception()
        reason = "it was closed" if error is None else _cause(error)
        raise ServerError(f"the deployment has ended: {reason}", "closed")

    def _requests(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sampling | Sequence[Sampling] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[GenerationRequest]:
        """One request for each prompt. The adapters that they name are loaded."""
        number = len(prompts)
        samplings = _one_each("sampling parameters", Sampling, sampling_params, number)
        loras = _one_each("LoRA requests", LoRARequest, lora_request, number)
        for lora in {lora for lora in loras if lora is not None} - self._loaded:
            with _domain_errors():
                self.run(partial(_load, lora=lora))
            self._loaded.add(lora)
        with _domain_errors():
            return [
                request_from_wire(
                    messages.generate_request(
                        Request(prompt, sampling or Sampling(), lora.lora_name if lora else "")
                    ),
                    timeout_s=None,
                )
                for prompt, sampling, lora in zip(prompts, samplings, loras, strict=True)
            ]

    async def _complete(self, request: GenerationRequest) -> Completion:
        async with aclosing(self._wiring.gateway.generate(replace(request, echo=True))) as stream:
            found = [delta async for delta in stream]
        whole = messages.completion(
            [one for delta in found for one in messages.deltas(response_to_wire(delta, ""))]
        )
        prompt = next((delta.prompt for delta in found if delta.prompt is not None), None)
        if prompt is not None:
            is_ids = isinstance(next(iter(request.prompt), ""), int)
            text = None if is_ids else prompt.text
            whole = replace(whole, prompt=text, prompt_token_ids=prompt.token_ids)
        if not request.wants_parts:
            return whole
        transcripts = {choice.index: Transcript() for choice in whole.choices}
        for delta in found:
            transcripts[delta.index].add(delta)
        said = {
            index: CHAT_FORMAT.whole(one.text, one.parts)["message"]
            for index, one in transcripts.items()
        }
        choices = (replace(choice, message=said[choice.index]) for choice in whole.choices)
        return replace(whole, choices=tuple(choices))

    def _answer_all(
        self, requests: Sequence[R], answer: Callable[[R], Awaitable[T]], doing: str, use_tqdm: bool
    ) -> list[T]:
        with tqdm(total=len(requests), desc=doing, disable=not use_tqdm) as bar:
            return self.run(lambda wiring: self._answers(requests, answer, bar.update))

    async def _answers(
        self,
        requests: Sequence[R],
        answer: Callable[[R], Awaitable[T]],
        on_answer: Callable[[], object],
    ) -> list[T]:
        places = asyncio.Semaphore(self.num_at_once)

        async def one(number: int, request: R) -> T:
            async with places:
                try:
                    with _domain_errors():
                        found = await answer(request)
                except QuireError as error:
                    error.add_note(f"prompt {number} of {len(requests)}, counted from 0")
                    raise
            on_answer()
            return found

        tasks = [asyncio.create_task(one(*each)) for each in enumerate(requests)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _load(wiring: Wiring, lora: LoRARequest) -> None:
    if wiring.adapters is None:
        raise InvalidDomainRequest("this LLM takes no adapters: max_loras is 0")
    await wiring.adapters.load(lora.lora_name, lora.lora_path)


def _is_draining(error: BaseException | None) -> bool:
    """Whether a request failed because its gateway ends, which it does with the deployment."""
    return isinstance(error, QuireError) and error.code == Draining.code


def _cause(error: BaseException) -> BaseException:
    """The first error of a task group's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def _domain_errors() -> Iterator[None]:
    """Raises errors of the services as those of the client library."""
    try:
        yield
    except DomainError as error:
        kind = InvalidRequest if isinstance(error, InvalidDomainRequest) else QuireError
        raise kind(str(error), error.code) from error


def _prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    is_one = isinstance(prompts, str) or not prompts or isinstance(prompts[0], (int, ChatMessage))
    return cast("Sequence[Prompt]", [prompts] if is_one else prompts)


def _is_many(conversations: Conversation | Sequence[Conversation]) -> bool:
    return bool(conversations) and not isinstance(conversations[0], (ChatMessage, dict))


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
