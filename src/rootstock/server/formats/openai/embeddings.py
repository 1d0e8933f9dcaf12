"""OpenAI's embeddings: the route, its body and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from rootstock.errors import Unsupported
from rootstock.server.access.guard import SentBy
from rootstock.server.answers.embedding_answers import (
    AskedEmbeddings,
    EmbeddingQuery,
    HeldEmbeddings,
    answer_embeddings,
)
from rootstock.server.answers.event_stream import Answerer
from rootstock.server.http.errors import MODEL_ROUTE, documented_errors
from rootstock.server.http.request_bodies import BoundedJsonRoute
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.wire.api_call import Json
from rootstock.server.wire.fields import Count, Label, ModelName, Wire, default_if_null, is_empty

# Values of other servers' fields that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "priority": (0,),
    "truncate": (False, "NONE"),
}


class EmbeddingRequest(Wire):
    input: Annotated[
        Any, Field(description="a string, a list of token ids, or a list of strings or of such lists")
    ]
    model: ModelName = None
    encoding_format: Annotated[Literal["float", "base64"], default_if_null("float")] = "float"
    dimensions: Annotated[Count | None, Field(description="for models trained for shorter embeddings")] = None
    user: Label | None = None

    def refuse_unsupported(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if not is_empty(value) and value not in _NEUTRAL.get(name, ()):
                raise Unsupported(name, "Leave it out.")

    def query(self) -> EmbeddingQuery:
        """Raises Unsupported."""
        self.refuse_unsupported()
        return EmbeddingQuery(self.model, self.input, self.dimensions, self.encoding_format)


def embedding_routes(models: ModelRegistry, answerer: Answerer) -> APIRouter:
    router = APIRouter(
        tags=["OpenAI"], route_class=BoundedJsonRoute, responses=documented_errors(*MODEL_ROUTE)
    )

    @router.post("/v1/embeddings", response_class=Response)
    async def embeddings(body: EmbeddingRequest, request: Request, _sender: SentBy) -> Response:
        """Computes the embeddings of texts or token ids."""
        return await answer_embeddings(models, answerer, request, body.query, _answer)

    return router


def _answer(asked: AskedEmbeddings, held: HeldEmbeddings) -> Json:
    """Returns the body of an answer. It holds an iterator, which `json_pieces` encodes."""
    return {
        "object": "list",
        "data": (
            {"object": "embedding", "index": index, "embedding": encoded}
            for index, encoded in enumerate(held.encoded())
        ),
        "model": asked.model,
        "usage": {"prompt_tokens": asked.tokens, "total_tokens": asked.tokens},
    }
