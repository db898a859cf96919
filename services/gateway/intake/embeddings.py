"""Checks a request for an embedding, and resolves how the model pools."""

from services.gateway.api import RequestedEmbedding
from services.gateway.checks import require
from services.gateway.models.catalog import Model
from services.protocol.ticket import Pooling, PoolingMode, SamplingParams


def embedding_params(asked: RequestedEmbedding, model: Model) -> SamplingParams:
    """The parameters of a request that draws no token. InvalidRequest: the model has no such
    embeddings."""
    config, size = model.embedding, model.config.hidden_size
    require(
        not config.problem, f"this model's embeddings cannot be computed: {config.problem}", "model"
    )
    dimensions = size if asked.dimensions is None else asked.dimensions
    require(0 < dimensions <= size, f"dimensions is {dimensions}, not in [1, {size}]", "dimensions")
    if dimensions != size and config.dimensions is not None:
        some = ", ".join(map(str, config.dimensions))
        require(
            dimensions in config.dimensions,
            f"dimensions is {dimensions}; this model is trained for {some or 'no fewer than'} "
            f"{'or ' * bool(some)}{size}",
            "dimensions",
        )
    return SamplingParams(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        max_tokens=1,
        pooling=Pooling(PoolingMode(config.mode), dimensions),
    )
