"""/v1/score and /v1/rerank, as vLLM defines them: cosine similarities of the texts' embeddings."""

import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from operator import mul
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from services.gateway.api import Embedding
from services.gateway.chat.prompts import PROMPT
from services.gateway.http.bodies.fields import MAX_INPUTS, Body, FieldError
from services.gateway.http.embeddings import PooledBody, usage_of

SCORE_PATHS = ("/v1/score", "/score")
RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
"""vLLM's names, Jina's and Cohere's."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _text_of(document: Any) -> Any:
    """A document may be an object with a text."""
    return document.get("text") if isinstance(document, dict) else document


_Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
Texts = Annotated[_Texts, BeforeValidator(_as_list, json_schema_input_type=str | _Texts)]


class _WithText(Body):
    text: str


_Document = Annotated[str, BeforeValidator(_text_of, json_schema_input_type=str | _WithText)]
Documents = Annotated[list[_Document], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]


class ScoreBody(PooledBody):
    """One text and several others, or as many of both, under one of two pairs of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        pairs = (self.text_1, self.text_2), (self.queries, self.documents)
        given = [pair for pair in pairs if pair != (None, None)]
        if len(given) != 1 or None in given[0]:
            raise ValueError("give text_1 and text_2, or queries and documents")
        if len(self.left) not in (1, len(self.right)):
            text = f"{len(self.left)} texts for {len(self.right)} others; give 1 text, or as many"
            raise FieldError("queries" if self.queries else "text_1", text)
        return self

    @property
    def left(self) -> list[str]:
        return self.text_1 or self.queries or []

    @property
    def right(self) -> list[str]:
        return self.text_2 or self.documents or []

    @property
    def names(self) -> dict[str, str]:
        return {PROMPT: "documents" if self.documents else "text_2"}

    def inputs(self) -> Sequence[str]:
        return [*self.left, *self.right]

    def answer(self, found: list[Embedding], answer_id: str, model: str) -> dict[str, Any]:
        return {
            "id": f"score-{answer_id}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(_scores(found, len(self.left)))
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

    @property
    def names(self) -> dict[str, str]:
        return {PROMPT: "documents"}

    def inputs(self) -> Sequence[str]:
        return [self.query, *self.documents]

    def answer(self, found: list[Embedding], answer_id: str, model: str) -> dict[str, Any]:
        """The best documents first; of several with one score, the earlier one."""
        scores = enumerate(_scores(found, 1))
        best = sorted(scores, key=lambda each: -each[1])[: self.top_n or None]
        shows = self.return_documents is not False
        return {
            "id": f"rerank-{answer_id}",
            "model": model,
            "results": [
                {
                    "index": index,
                    **({"document": {"text": self.documents[index]}} if shows else {}),
                    "relevance_score": score,
                }
                for index, score in best
            ],
            "usage": usage_of(found),
        }


def _scores(found: list[Embedding], num_left: int) -> Iterator[float]:
    """The cosine similarity of each pair; the embeddings have length 1."""
    for one, other in zip(cycle(found[:num_left]), found[num_left:], strict=False):
        yield sum(map(mul, one.values, other.values))
