"""Admits requests for embeddings: checks them, tokenizes the prompt, and says how it is pooled."""

from services.gateway.api import EmbeddingRequest
from services.gateway.chat.admission import MAX_SALT_CHARS
from services.gateway.chat.prompts import PROMPT, context_length, tokenize_prompt
from services.gateway.checks import check_text, require
from services.gateway.request.capacity import capacity_problem
from services.gateway.request.request import Request
from services.gateway.workers.directory import ModelPools
from services.gateway.workers.models.catalog import Model
from services.protocol.messages import Pooling, PoolingMode
from services.protocol.ticket import Adapter, SamplingParams
from services.runtime.errors import PromptTooLong

_NOTHING_DRAWN = SamplingParams(temperature=0.0, n=0)


async def admit_embedding(
    asked: EmbeddingRequest,
    request_id: str,
    name: str,
    served: ModelPools,
    adapter: Adapter | None = None,
) -> Request:
    """The request for an embedding by the model `name`, without an output: it has no sequences.

    Raises InvalidRequest or PromptTooLong.
    """
    check_text("cache_salt", asked.cache_salt, MAX_SALT_CHARS)
    pooling = _pooling(asked.dimensions, served.model)
    text = "only a cross-encoder scores pairs of texts, and it does nothing else: use /v1/score or"
    is_served = served.model.config.is_cross_encoder is (asked.query is not None)
    require(is_served, f"{text} /v1/rerank", "model")
    prompt = await tokenize_prompt(
        asked, served.model, served.max_model_len, served.longest_request, asked.query
    )
    require(bool(prompt), "the prompt is empty", PROMPT)
    pool = max(served.specs, key=lambda spec: spec.num_blocks * spec.block_size)
    if problem := capacity_problem(len(prompt), 1, pool, 1):
        text = f"{context_length(served.max_model_len)} However, {problem}"
        raise PromptTooLong(text, PROMPT)
    return Request(
        asked, request_id, name, prompt, _NOTHING_DRAWN, pooling=pooling, adapter=adapter
    )


def _pooling(asked: int | None, model: Model) -> Pooling:
    """The model's pooling for `asked` dimensions. Raises InvalidRequest if the model has none."""
    config, size = model.embedding, model.config.hidden_size
    require(
        not config.problem, f"this model's embeddings cannot be computed: {config.problem}", "model"
    )
    dimensions = size if asked is None else asked
    require(0 < dimensions <= size, f"dimensions is {dimensions}, not in [1, {size}]", "dimensions")
    if dimensions != size and config.dimensions is not None:
        some = ", ".join(map(str, config.dimensions))
        require(
            dimensions in config.dimensions,
            f"dimensions is {dimensions}; this model is trained for {some or 'no fewer than'} "
            f"{'or ' * bool(some)}{size}",
            "dimensions",
        )
    return Pooling(PoolingMode(config.mode), dimensions)
