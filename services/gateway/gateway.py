"""The gateway: implements `Generator` with the workers of the worker directory."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from quire.types import RetainAnswer, Sampling
from services.gateway.access.caller import EVERYONE, ONE, Caller, current_caller
from services.gateway.api import (
    Embedded,
    EmbeddingRequest,
    GenerationRequest,
    RetainedPrefix,
    ServedModel,
    Tokenized,
)
from services.gateway.chat.admission import admit, check_priority
from services.gateway.chat.embeddings import admit_embedding
from services.gateway.chat.outputs import open_output
from services.gateway.chat.prompts import check_token_ids, tokenize_prompt
from services.gateway.config import PartOptions
from services.gateway.identity import MAX_ID_CHARS, check_identity, client_id, scoped_id
from services.gateway.output.output import Output
from services.gateway.output.rests import WriteRests
from services.gateway.request.metrics import RequestMeters
from services.gateway.request.record import MAX_REASON_CHARS, Record
from services.gateway.request.request import Request
from services.gateway.request.status import CANCELLED
from services.gateway.request.trace import RequestTrace
from services.gateway.scheduling.dispatcher import Dispatcher
from services.gateway.scheduling.explainer import Explainer
from services.gateway.workers.adapters import GatewayAdapters, ServedAdapter
from services.gateway.workers.change_notifier import ChangeNotifier
from services.gateway.workers.directory import ModelPools, WorkerDirectory
from services.gateway.workers.models.model_names import choose_model, parse_aliases, with_aliases
from services.protocol.ticket import Adapter
from services.runtime.errors import DeadlineExceeded, NoWorker, Overloaded
from services.runtime.logging import bind_request_id
from services.runtime.rpc.error_table import code_of

if TYPE_CHECKING:
    from services.runtime.tracing.tracer import Tracer

_MAX_TOKENIZING = 16
"""Calls of `tokenize` and `detokenize` that may wait at a time."""


class Gateway:
    """Generates text for the requests of one gateway process.

    `changes` notifies when workers come or go. `tracer` is None if requests are not traced.
    """

    def __init__(
        self,
        directory: WorkerDirectory,
        dispatcher: Dispatcher,
        changes: ChangeNotifier,
        request_metrics: RequestMeters,
        options: PartOptions,
        explainer: Explainer,
        tracer: "Tracer | None" = None,
        adapters: GatewayAdapters | None = None,
    ) -> None:
        self._adapters = adapters
        self._directory = directory
        self._dispatcher = dispatcher
        self._changes = changes
        self._request_metrics = request_metrics
        self._options = options
        self._explainer = explainer
        self._tracer = tracer
        self._rests = WriteRests()
        self._clock = asyncio.get_running_loop().time
        self._num_tokenizing = 0
        self._aliases = parse_aliases(options.model_aliases)

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
        """See `Generator.generate`. Also raises Unavailable if the request lost its workers too
        often, Overloaded if the client reads too slowly, BlockStoreError if the block store does
        not answer."""
        async with self._accepted(request, request.sampling) as (_, output):
            yield output

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        """See `Generator.embed`. Also raises as `generate`."""
        async with self._accepted(request) as (accepted, output):
            async for _ in output:
                pass  # it has no sequences, and so no delta before its end
            name, usage = client_id(accepted.id), output.stats.usage()
            return Embedded(name, accepted.embedding, usage)

    async def scores_pairs(self, model: str, request_id: str) -> bool:
        """See `Generator.scores_pairs`."""
        try:
            _, served, _ = await self._served(model, current_caller(EVERYONE))
        except Exception as error:
            self.record_refusal(request_id, model, code_of(error), str(error))
            raise
        return served.model.config.is_cross_encoder

    @asynccontextmanager
    async def _accepted(
        self, request: GenerationRequest | EmbeddingRequest, cost: Sampling = ONE
    ) -> AsyncIterator[tuple[Request, Output]]:
        """Admits a request, which runs until the block is left, and opens its output. Its `cost` is
        as many sequences as the parameters ask for."""
        name = request.request_id or f"gen-{secrets.token_hex(12)}"
        trace = None if self._tracer is None else RequestTrace(self._tracer, request, name)
        with ExitStack() as place:
            try:
                check_identity(request)
                bind_request_id(name)
                admitted = request.caller.account.admitted
                place.enter_context(admitted(cost, is_further=request.is_further))
                running, output = await self._enqueue(request, name, trace)
            except asyncio.CancelledError:
                reason = "the client left before the request was in its queue"
                self.record_refusal(name, request.model, CANCELLED, reason)
                if trace is not None:
                    trace.cancel()
                raise
            except Exception as error:
                self.record_refusal(name, request.model, code_of(error), str(error))
                if trace is not None:
                    trace.refuse(error, code_of(error))
                raise
            try:
                yield running, output
            finally:
                running.end_call(output)

    async def _enqueue(
        self, asked: GenerationRequest | EmbeddingRequest, name: str, trace: RequestTrace | None
    ) -> tuple[Request, Output]:
        """Admit a request and put it into its model queue. Raises the error of the check that
        refuses it."""
        options, caller, arrived_at = self._options, asked.caller, self._clock()
        check_priority(
            asked.priority, client_priority=options.client_priority, ceiling=caller.priority_ceiling
        )
        request_id = scoped_id(name, asked.resume_token, caller.key)
        generation = asked if isinstance(asked, GenerationRequest) else None
        resumes = generation is not None and generation.received is not None
        with self._dispatcher.admitting(request_id, caller.client, resumes=resumes):
            try:
                async with asyncio.timeout(asked.timeout_s):
                    model, served, adapter = await self._served(asked.model, caller)
                    if isinstance(asked, EmbeddingRequest):
                        request = await admit_embedding(asked, request_id, model, served, adapter)
                    else:
                        request = await admit(asked, request_id, model, served, adapter)
                    caller.account.charge(len(request.prompt_token_ids))
                    open_output(
                        request,
                        served.model,
                        arrived_at,
                        meter=self._request_metrics.meter(model, caller),
                        rests=self._rests,
                        reports_cached=options.report_cached_tokens,
                    )
                    if trace is not None:
                        trace.admit(request)
                        request.trace = trace
                    running = await self._dispatcher.enqueue(request, resumes=resumes)
                    if options.per_request_metrics or (generation and generation.include_metrics):
                        request.output.metrics = running.record.metrics
                    return running, request.output
            except TimeoutError as error:
                raise DeadlineExceeded("the request's deadline has passed") from error

    async def retain(self, request: GenerationRequest) -> RetainAnswer:
        """See `Generator.retain`."""
        with self._tokenizing(request.caller):
            name, served, adapter = await self._served(request.model, request.caller)
            admitted = await admit(request, request.request_id, name, served, adapter)
        return await self._dispatcher.retention.mark(admitted, served.pools)

    async def retained(self, caller: Caller) -> tuple[RetainedPrefix, ...]:
        """See `Generator.retained`."""
        return await self._dispatcher.retention.prefixes(caller)

    async def drop_retained(self, name: str, caller: Caller, tenant: str | None = None) -> bool:
        """See `Generator.drop_retained`."""
        return await self._dispatcher.retention.drop(name, caller, tenant)

    async def tokenize(self, request: GenerationRequest, *, with_tokens: bool = False) -> Tokenized:
        """See `Generator.tokenize`."""
        with self._tokenizing(request.caller):
            _, served, _ = await self._served(request.model, request.caller)
            token_ids = await tokenize_prompt(request, served.model, served.max_model_len)
        names = map(served.model.tokenizer.token, token_ids)
        tokens = tuple(names) if with_tokens else None
        return Tokenized(token_ids, tokens, served.longest_request)

    async def detokenize(self, token_ids: tuple[int, ...], model: str) -> str:
        """See `Generator.detokenize`."""
        caller = current_caller(EVERYONE)
        with self._tokenizing(caller):
            _, served, _ = await self._served(model, caller)
            check_token_ids("tokens", token_ids, served.model.config.vocab_size)
            decode = partial(served.model.tokenizer.decode, token_ids, skip_special_tokens=False)
            return await asyncio.to_thread(decode)

    @contextmanager
    def _tokenizing(self, caller: Caller) -> Iterator[None]:
        """Bounds the calls that wait for a thread, in which prompts are tokenized too. Each counts
        as a request of its caller."""
        if self._num_tokenizing >= _MAX_TOKENIZING:
            raise Overloaded(f"{_MAX_TOKENIZING} requests to tokenize wait; try again", 1.0)
        with caller.account.admitted():
            self._num_tokenizing += 1
            try:
                yield
            finally:
                self._num_tokenizing -= 1

    def record_refusal(self, request_id: str, model: str, code: str, reason: str) -> None:
        """See `Generator.record_refusal`. Only the name of a served model becomes a metric label:
        clients can send any name, and each one would add a time series."""
        names = self._directory.model_names()
        model = with_aliases(names, self._aliases).get(model, model)
        if model not in names:
            model = names[0] if len(names) == 1 and not model else ""
        self._request_metrics.record_refusal(request_id, model, code, reason)
        name, why = request_id[:MAX_ID_CHARS], reason[:MAX_REASON_CHARS]
        record = Record(name, current_caller(EVERYONE), outcome=code, reason=why)
        self._explainer.records.add(record)

    def explain(self, request_id: str, caller: Caller) -> list[str]:
        """See `Generator.explain`."""
        return self._explainer.explain(request_id, caller)

    async def forecast(self, request: GenerationRequest) -> list[str]:
        """See `Generator.forecast`."""
        with self._tokenizing(request.caller):
            model, served, adapter = await self._served(request.model, request.caller)
            admitted = await admit(request, "", model, served, adapter)
        caller, tells_all = request.caller, self._options.report_cached_tokens
        tells_cached = tells_all or caller.is_operator or bool(admitted.cache_salt)
        return await self._explainer.forecast(admitted, tells_cached=tells_cached)

    def models(self) -> tuple[ServedModel, ...]:
        """The models that can be served now, and aliases, sorted by name, then adapters."""
        roots = with_aliases(self._directory.model_names(), self._aliases)
        is_complete = self._directory.complete_pools
        models = {
            name: self._describe(name, roots[name])
            for name in sorted(roots)
            if is_complete(roots[name])
        }
        adapters = [
            replace(models[one.model], id=one.adapter.name, root="", parent=one.model)
            for one in (() if self._adapters is None else self._adapters.served())
            if one.model in models
        ]
        sees = current_caller(EVERYONE).sees
        every = (*models.values(), *adapters)
        return tuple(each for each in every if sees(each.id) or sees(each.root))

    def ready(self) -> bool:
        has_adapters = self._adapters is None or self._adapters.ready
        return self._directory.ready() and has_adapters and not self._dispatcher.is_draining

    def _describe(self, name: str, model: str) -> ServedModel:
        served = self._pools(model)
        member = next(pool for pool in served.pools if pool.decode).decode[0].member
        return ServedModel(
            id=name,
            root=model,
            max_model_len=served.longest_request,
            context=served.max_model_len,
            block_size=served.specs[0].block_size,
            dtype=_dtype(member.engine) or served.model.config.dtype,
        )

    async def _served(self, name: str, caller: Caller) -> tuple[str, ModelPools, Adapter | None]:
        """Find the model that a request names, among those that its caller sees. Wait up to
        `patience_s` while no worker of any model is there, or none of a model of the deployment,
        since one may be about to start, and up to `start_patience_s` while a worker is starting;
        then raise NoWorker."""
        clock, options = self._clock, self._options
        until, limit = clock() + options.patience_s, clock() + options.start_patience_s
        while True:
            seen = self._changes.num_changes
            names = self._directory.model_names()
            is_starting = self._is_starting(name, names, caller)
            until = limit if is_starting else min(until, clock() + options.patience_s)
            absent = self._absent_model(name, names, caller)
            if names and not absent and not (is_starting and clock() < limit):
                adapter = await self._adapter(name) if caller.sees(name) else None
                if adapter is not None and adapter.model in names:
                    return adapter.model, self._pools(adapter.model), adapter.adapter
                seen_models = {
                    name: model
                    for name, model in with_aliases(names, self._aliases).items()
                    if caller.sees(name) or caller.sees(model)
                }
                model = choose_model(name, seen_models, adapters=self._seen_adapters(caller))
                return model, self._pools(model), None
            if await self._changes.wait(seen, max(0.0, until - clock())):
                continue
            if absent:
                raise NoWorker(self._directory.missing(absent))
            if not names:
                raise NoWorker("no worker is there to serve any model now")

    def _absent_model(self, name: str, names: tuple[str, ...], caller: Caller) -> str:
        """The model of the deployment that `name` means, if the caller sees it and it has no
        worker; else empty. `names` are the models that have workers."""
        model = self._aliases.get(name, name)
        is_absent = model in self._options.models and model not in names
        return model if is_absent and (caller.sees(name) or caller.sees(model)) else ""

    def _is_starting(self, name: str, names: tuple[str, ...], caller: Caller) -> bool:
        """Whether a worker of the named model is starting that is not one of `names`. Without any
        of those: a worker of any model, since `name` may be an adapter's."""
        starting = {member.model for member in self._directory.starting} - set(names)
        model = self._aliases.get(name, name)
        sees = caller.sees(name) or caller.sees(model)
        return bool(starting) and (not names or (model in starting and sees))

    def _pools(self, model: str) -> ModelPools:
        served = self._directory.served(model)
        assert served is not None
        return served

    def _seen_adapters(self, caller: Caller) -> list[str]:
        served = () if self._adapters is None else self._adapters.served()
        return [one.adapter.name for one in served if caller.sees(one.adapter.name)]

    async def _adapter(self, name: str) -> ServedAdapter | None:
        return None if self._adapters is None else await self._adapters.find(name)


def _dtype(engine: Mapping[str, str]) -> str:
    """The kind of a worker's weights; empty if it does not tell."""
    quantize = engine.get("quantize", "none")
    return engine.get("dtype", "") if quantize == "none" else quantize
