"""`LLM`: a model in the caller's process, with the interface that users of vLLM know."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import cycle
from operator import mul
from typing import Any, Self, TypeVar, cast

import structlog
from tqdm import tqdm

from quire import messages
from quire.errors import InvalidRequest, QuireError, ServerError
from quire.messages import Request
from quire.supervisor.model_source import find_model
from quire.types import ChatMessage, Completion, Delta, Embedding, Prompt, Sampling
from quire.v1.inference_pb2 import EmbedRequest
from services.common.errors import Draining
from services.common.errors import InvalidRequest as InvalidDomainRequest
from services.common.errors import QuireError as DomainError
from services.common.runtime.logging import configure_logging
from services.common.runtime.process import set_up_openmp
from services.gateway.frontend.service import InferenceService
from services.gateway.wiring import Wiring

T = TypeVar("T")
R = TypeVar("R")

_AT_ONCE = 4
"""Requests that wait or run at a time, for each sequence of a step: the next ones are always there
when a sequence ends, and a long list of prompts does not lie in the queue as a whole."""

EmbeddedPrompt = str | Sequence[int]
Conversation = Sequence[ChatMessage] | Sequence[dict[str, str]]


class _Context:
    """The part of a gRPC call's context that `InferenceService` reads."""

    def time_remaining(self) -> None:
        """None: there is no deadline."""


class LLM:
    """Loads a model and generates in this process: no server, no Redis, no sockets.

    `model`: a directory, a GGUF file, a Hugging Face id in the local cache, or "embedded".
    `settings`: those of workers, in lower case, such as `dtype`, `quantize`, `kv_dtype`,
    `pool_memory`, `max_model_len`, `max_num_seqs`, `max_num_batched_tokens`, `threads`, `isa`.

    Results are those of a service with the same settings. Prompts that begin alike share KV, also
    between calls. Use it as a context manager, or call `close`. Raises QuireError.
    """

    def __init__(self, model: str = "embedded", **settings: Any) -> None:
        set_up_openmp(None)  # before the next import, which imports PyTorch
        if not structlog.is_configured():
            configure_logging("offline", "warning", "auto")
        from services.offline.deployment import offline_settings

        source = find_model(model)
        with _domain_errors():
            checked = offline_settings(model=source.directory, model_name=source.name, **settings)
        self.num_at_once = _AT_ONCE * checked.max_num_seqs
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._submitting = threading.Lock()
        self._has_ended = False
        started: Future[Wiring] = Future()
        self._serving = self._loop.create_task(self._serve(checked, started))
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
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Generate from texts, or from lists of token ids: one or many.

        `sampling_params`: for all prompts, or one for each. The answers are in the order of the
        prompts. Raises the error of the first request that fails; the others are cancelled.
        """
        return self._complete(_prompts(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """`generate` for one conversation or many. A message is a `ChatMessage`, or a dict with
        `role` and `content`."""
        many = conversations if _is_many(conversations) else [conversations]
        chats = [tuple(map(_message, cast("Conversation", one))) for one in many]
        return self._complete(chats, sampling_params, use_tqdm)

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
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self, work: Callable[[Wiring], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine beside the deployment and return its result. Raises ServerError if the
        deployment fails meanwhile, or is closed."""
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
            started.set_exception(error)

    async def _guarded(self, work: Callable[[Wiring], Coroutine[Any, Any, T]]) -> T:
        """Run `work` until it ends, or until the deployment does."""
        task = asyncio.create_task(work(self._wiring))
        await asyncio.wait([task, self._serving], return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not _is_draining(task.exception()):
            return task.result()
        task.cancel()
        await asyncio.wait([task, self._serving])
        reason = None if self._serving.cancelled() else self._serving.exception()
        raise ServerError(f"the deployment has ended: {reason or 'it was closed'}", "closed")

    def _complete(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sampling | Sequence[Sampling] | None,
        use_tqdm: bool,
    ) -> list[Completion]:
        samplings = _one_each(sampling_params, len(prompts))
        requests = [Request(*each) for each in zip(prompts, samplings, strict=True)]

        async def complete(request: Request) -> Completion:
            return messages.completion(await self._deltas(request))

        return self._answer_all(requests, complete, "Generating", use_tqdm)

    def _answer_all(
        self,
        requests: Sequence[R],
        answer: Callable[[R], Awaitable[T]],
        doing: str,
        use_tqdm: bool,
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

    async def _deltas(self, request: Request) -> list[Delta]:
        context = cast("Any", _Context())
        responses = self._service.Generate(messages.generate_request(request), context)
        return [delta async for one in responses for delta in messages.deltas(one)]


def _is_draining(error: BaseException | None) -> bool:
    """Whether a request failed because its gateway ends, which it does with the deployment."""
    return isinstance(error, QuireError) and error.code == Draining.code


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


def _message(message: ChatMessage | dict[str, str]) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    try:
        return ChatMessage(**message)
    except TypeError as error:
        raise InvalidRequest(
            f"a message has role and content: {error}", "invalid_request"
        ) from None


def _one_each(given: Sampling | Sequence[Sampling] | None, number: int) -> Sequence[Sampling]:
    if given is None or isinstance(given, Sampling):
        return [given or Sampling()] * number
    if len(given) != number:
        raise InvalidRequest(
            f"{len(given)} sampling parameters for {number} prompts", "invalid_request"
        )
    return given
