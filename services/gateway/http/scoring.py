"""/v1/score and /v1/rerank, as vLLM defines them: the scores of a cross-encoder, or the cosine
similarities of the texts' embeddings."""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from operator import mul
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from services.gateway.api import Embedded
from services.gateway.http.bodies.fields import MAX_INPUTS, Body, FieldError, Texts
from services.gateway.http.embeddings import EmbeddingBody, PooledBody, usage_of


class DocumentBody(Body):
    text: str


Documents = Annotated[
    list[str | DocumentBody], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)
]


class ScoreBody(PooledBody):
    """One text and several others, or as many of both, under one of two pairs of names."""

    text_1: Texts = ()
    text_2: Texts = ()
    queries: Texts = ()
    documents: Texts = ()

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        pairs = (self.text_1, self.text_2), (self.queries, self.documents)
        given = [pair for pair in pairs if any(pair)]
        if len(given) != 1 or not all(given[0]):
            raise ValueError("give text_1 and text_2, or queries and documents")
        (left, right), name = given[0], "documents" if self.documents else "text_2"
        if len(left) not in (1, len(right)) or len(right) > MAX_INPUTS:
            text = f"{len(left)} texts for {len(right)} others; give 1 text, or as many"
            raise FieldError(name, f"{text}, and at most {MAX_INPUTS}")
        return self

    def inputs(self) -> tuple[Sequence[str], Sequence[str]]:
        return self.text_1 or self.queries, self.text_2 or self.documents

    def answer(self, found: list[Embedded], answer_id: str, model: str) -> dict[str, Any]:
        return {
            "id": f"score-{answer_id}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(
                    scores_of([one.values for one in found], *self.inputs())
                )
            ],
            "usage": usage_of(found),
        }


class RerankBody(PooledBody):
    refused = PooledBody.refused | {"max_chunks_per_doc": (), "max_tokens_per_doc": ()}

    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=0)] | None = None
    """The number of results; null and 0: all."""
    return_documents: bool | None = None

    def inputs(self) -> tuple[Sequence[str], Sequence[str]]:
        texts = [one if isinstance(one, str) else one.text for one in self.documents]
        return [self.query], texts

    def answer(self, found: list[Embedded], answer_id: str, model: str) -> dict[str, Any]:
        """The best documents first; of several with one score, the earlier one."""
        scores = enumerate(scores_of([one.values for one in found], *self.inputs()))
        best = sorted(scores, key=lambda each: -each[1])[: self.top_n or None]
        shows, texts = self.return_documents is not False, self.inputs()[1]
        return {
            "id": f"rerank-{answer_id}",
            "model": model,
            "results": [
                {
                    "index": index,
                    **({"document": {"text": texts[index]}} if shows else {}),
                    "relevance_score": score,
                }
                for index, score in best
            ],
            "usage": usage_of(found),
        }


def scores_of(
    found: Sequence[tuple[float, ...]], left: Sequence[str], right: Sequence[str]
) -> Iterator[float]:
    """The score of each pair: what was found for it, or the cosine similarity of the embeddings of
    the texts, which have length 1."""
    if len(found) == len(right):
        yield from (score for score, *_ in found)
        return
    for one, other in zip(cycle(found[: len(left)]), found[len(left) :], strict=False):
        yield sum(map(mul, one, other))


POOLED: Mapping[str, type[EmbeddingBody | ScoreBody | RerankBody]] = {
    "/v1/embeddings": EmbeddingBody,
    **dict.fromkeys(("/v1/score", "/score"), ScoreBody),
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), RerankBody),
}
"""The bodies of the paths that need embeddings: vLLM's paths, Jina's and Cohere's."""
