"""Access control: lets the requests of API keys through to the gateway, within the limits of each
key."""

from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import replace

from quire.api_keys import ApiKey
from quire.sampling import NUMBERS
from services.gateway.access.account import Account
from services.gateway.access.caller import LOCAL_OPERATOR, Caller, current_caller
from services.gateway.access.keyring import Keyring
from services.gateway.api import (
    Embedding,
    EmbeddingRequest,
    GenerationRequest,
    Generator,
    ServedModel,
    Tokenized,
    TokenizeRequest,
)
from services.gateway.output.delta import Delta
from services.gateway.output.usage import RetainAnswer, RetainedPrefix
from services.gateway.workers.models.model_names import choose_model
from services.runtime.errors import InvalidApiKey, InvalidRequest, QuireError


class AccessControl:
    """A `Generator` that checks the current caller's limits, and then asks `generator`."""

    def __init__(self, generator: Generator, keyring: Keyring) -> None:
        self._generator = generator
        self._keyring = keyring

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[Delta]]:
        """See `Generator.generate`. Also raises RateLimited."""
        with self._admitted(request):
            async with self._generator.generate(request) as deltas:
                yield deltas

    async def embed(self, request: EmbeddingRequest) -> Embedding:
        """See `Generator.embed`. Also raises RateLimited."""
        with self._admitted(request):
            return await self._generator.embed(request)

    async def retain(self, request: GenerationRequest) -> RetainAnswer:
        """See `Generator.retain`. Also raises RateLimited."""
        with self._place():
            return await self._generator.retain(request)

    async def retained(self, caller: Caller) -> tuple[RetainedPrefix, ...]:
        return await self._generator.retained(caller)

    async def drop_retained(self, name: str, caller: Caller, tenant: str | None = None) -> bool:
        return await self._generator.drop_retained(name, caller, tenant)

    async def scores_pairs(self, model: str, request_id: str) -> bool:
        return await self._generator.scores_pairs(model, request_id)

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        """See `Generator.tokenize`. Also raises RateLimited."""
        mine = replace(request, model=self._visible(request.model))
        with self._place():
            return await self._generator.tokenize(mine)

    async def detokenize(self, token_ids: tuple[int, ...], model: str) -> str:
        """See `Generator.detokenize`."""
        name = self._visible(model)
        with self._place():
            return await self._generator.detokenize(token_ids, name)

    def explain(self, request_id: str, caller: Caller) -> list[str]:
        return self._generator.explain(request_id, caller)

    async def forecast(self, request: GenerationRequest) -> list[str]:
        """See `Generator.forecast`. Also raises RateLimited."""
        with self._place():
            return await self._generator.forecast(request)

    def _visible(self, name: str) -> str:
        """The model that a caller means. Raises as `choose_model`, among those that the caller may
        use."""
        return choose_model(name, {each.model: each.root or each.model for each in self.models()})

    def record_refusal(self, request_id: str, model: str, code: str, reason: str) -> None:
        self._generator.record_refusal(request_id, model, code, reason)

    def models(self) -> tuple[ServedModel, ...]:
        """The models that the current caller sees."""
        caller = current_caller()
        return tuple(
            model
            for model in self._generator.models()
            if caller.sees(model.model) or caller.sees(model.root)
        )

    def ready(self) -> bool:
        return self._generator.ready()

    @contextmanager
    def _admitted(self, request: GenerationRequest | EmbeddingRequest) -> Iterator[None]:
        """Wraps a request within the limits of its caller, in whose account it has its place."""
        with ExitStack() as place:
            try:
                account = self._account()
                if account is not None:
                    width = 1
                    if isinstance(request, GenerationRequest):
                        check_cost(account.key, request)
                        # The gateway refuses a width below 1, but after the request has waited.
                        width = max(1, request.sampling.width)
                    place.enter_context(account.admitted(width, is_further=request.is_further))
            except QuireError as error:
                self.record_refusal(request.request_id, request.model, error.code, str(error))
                raise
            yield

    def _place(self) -> AbstractContextManager[None]:
        """The place of a call for tokens, a request like any other, in its caller's account."""
        account = self._account()
        return nullcontext() if account is None else account.admitted(1)

    def _account(self) -> Account | None:
        """The account of the current caller; None: it is the run's user."""
        caller = current_caller()
        if caller is LOCAL_OPERATOR:
            return None
        account = self._keyring.account_named(caller.key)
        if account is None:  # revoked since the call began
            raise InvalidApiKey(f"key {caller.key} was revoked")
        return account


def check_cost(key: ApiKey, request: GenerationRequest) -> None:
    """Raises InvalidRequest if one of the request's parameters costs more than the key may ask
    for."""
    asked = request.sampling
    bounds: tuple[tuple[str, int | None, int], ...] = (
        ("n", asked.n, key.max_sequences),
        ("beam_width", asked.beam.width if asked.beam else None, key.max_sequences),
        ("logprobs", asked.logprobs, key.max_logprobs),
        ("prompt_logprobs", asked.prompt_logprobs, key.max_prompt_logprobs),
    )
    for name, value, limit in bounds:
        if value is not None and value > limit:
            raise InvalidRequest(
                f"{name} is {value}; key {key.name} may ask for at most {limit}", name
            )
    for name, number in NUMBERS.items():
        penalty = getattr(asked, name) if name.endswith("_penalty") else None
        if not key.penalties and penalty not in (None, number.neutral):
            raise InvalidRequest(f"{name} is {penalty}; key {key.name} may not use penalties", name)
