"""OpenAI's embeddings: the route, its body and its answer."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from pydantic import Field

from rootstock.cache.types import Tokens
from rootstock.engine.limits import MAX_PROMPTS, refuse_more_than, refuse_surrogates
from rootstock.errors import EmptyPrompt, InputTooLong, InvalidParameter, Unsupported
from rootstock.runtime.base import Embedder
from rootstock.server.access import Tenant, meter_of, refuse_model_of_others
from rootstock.server.errors import MODEL_ROUTE, documented_errors
from rootstock.server.fields import Count, Label, Wire
from rootstock.server.rate_limits import Meter
from rootstock.server.request_bodies import BoundedJsonRoute, PreparationQueue
from rootstock.server.wire import Json

MAX_INPUT_TOKENS = 300_000  # of one request, as OpenAI's


class EmbeddingRequest(Wire):
    input: Annotated[
        Any, Field(description="a string, a list of token ids, or a list of strings or of such lists")
    ]
    model: Label | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Count | None, Field(description="for models trained for shorter embeddings")] = None
    user: Label | None = None

    def refuse_unsupported(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                raise Unsupported(name, "Leave it out.")


def embedding_routes(find: Callable[[str | None], Embedder], queue: PreparationQueue) -> APIRouter:
    """`find` returns the embedder of a model's name, or raises RequestError."""
    router = APIRouter(
        tags=["OpenAI"], route_class=BoundedJsonRoute, responses=documented_errors(*MODEL_ROUTE)
    )

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request, _tenant: Tenant) -> Json:
        """Computes the embeddings of texts or token ids."""
        body.refuse_unsupported()
        if body.model is not None:
            refuse_model_of_others(request, body.model)
        embedder = find(body.model)
        if body.model is None:
            refuse_model_of_others(request, embedder.name)
        meter = meter_of(request)
        return await queue.run(request, lambda: embedded(embedder, body, meter))

    return router


def embedded(embedder: Embedder, body: EmbeddingRequest, meter: Meter) -> Json:
    """Tokenizes and computes: not for an event loop. Raises RequestError and RateLimited."""
    dimensions = _dimensions(embedder, body.dimensions)
    inputs = _inputs(embedder, body.input)
    meter.prepared(sum(map(len, inputs)))
    rows = embedder.embed(inputs)
    if dimensions < embedder.dimensions:
        rows = rows[:, :dimensions]
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    tokens = sum(map(len, inputs))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(row, body.encoding_format)}
            for index, row in enumerate(rows)
        ],
        "model": body.model or embedder.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _dimensions(embedder: Embedder, asked: int | None) -> int:
    if asked is None or asked == embedder.dimensions:
        return embedder.dimensions
    shorter = embedder.shorter_dimensions
    if shorter == ():
        remedy = (
            f"This model's embeddings have {embedder.dimensions} dimensions and cannot be cut. Leave it out."
        )
        raise Unsupported("dimensions", remedy)
    if not 1 <= asked <= embedder.dimensions or (shorter is not None and asked not in shorter):
        allowed = f"from 1 to {embedder.dimensions}" if shorter is None else ", ".join(map(str, shorter))
        raise InvalidParameter("dimensions", asked, allowed)
    return asked


def _encoded(row: NDArray[np.float32], form: str) -> str | list[float]:
    if form == "base64":
        return base64.b64encode(np.ascontiguousarray(row, "<f4").tobytes()).decode()
    numbers: list[float] = row.tolist()
    return numbers


def _inputs(embedder: Embedder, given: Any) -> list[Tokens]:
    """Returns the tokens of each input. Raises RequestError."""
    if isinstance(given, str) or _are_ids(given):
        given = [given]
    if not isinstance(given, list):
        allowed = "a string, a list of token ids, or a list of strings or of such lists"
        raise InvalidParameter("input", given, allowed)
    if not given:
        raise EmptyPrompt("input")
    refuse_more_than(MAX_PROMPTS, given, "input")
    inputs: list[Tokens] = []
    total = 0
    for index, each in enumerate(given):
        tokens = _tokens(embedder, each, f"input[{index}]")
        total += len(tokens)
        if len(tokens) > embedder.most_tokens:
            raise InputTooLong(len(tokens), "tokens", embedder.most_tokens, param=f"input[{index}]")
        if total > MAX_INPUT_TOKENS:
            allowed = f"inputs of at most {MAX_INPUT_TOKENS:,} tokens together. Send them in several requests"
            raise InvalidParameter("input", "…", allowed)
        inputs.append(tokens)
    return inputs


def _tokens(embedder: Embedder, each: Any, path: str) -> Tokens:
    if isinstance(each, str):
        refuse_surrogates(each, path)
        if not each.strip():
            raise EmptyPrompt(path)
        return embedder.tokens_of(each)
    if not _are_ids(each):
        raise InvalidParameter(path, each, "a string, or a list of token ids")
    least, largest = min(each), max(each)
    if not 0 <= least <= largest < embedder.vocab_size:
        raise InvalidParameter(
            path, least if least < 0 else largest, f"token ids from 0 to {embedder.vocab_size - 1}"
        )
    return np.array(each, np.int32)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def not_embedded(name: str) -> Unsupported:
    """Returns the refusal of a generation model."""
    return Unsupported(
        "model",
        f"{name!r} generates text: its files declare no pooling (modules.json). Serve an embedding model.",
    )
