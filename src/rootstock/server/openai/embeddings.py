"""OpenAI's embeddings: the route, its body and its answer."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import Field
from starlette.types import Receive, Scope, Send

from rootstock.cache.types import Tokens
from rootstock.engine.embedding import Embedded, EmbeddingJob
from rootstock.engine.request import Usage
from rootstock.errors import EmptyPrompt, InputTooLong, InvalidParameter, RootstockError, Unsupported
from rootstock.runtime.base import EmbedderDescription
from rootstock.server.access import Tenant, meter_of
from rootstock.server.embedding_model import EmbeddingModel
from rootstock.server.errors import MODEL_ROUTE, ClientGone, documented_errors
from rootstock.server.event_stream import Answerer
from rootstock.server.fields import Count, Label, ModelName, Wire, default_if_null, is_empty
from rootstock.server.models import ModelRegistry, unless_gone
from rootstock.server.request_bodies import BoundedJsonRoute
from rootstock.server.request_info import MAX_NAME_CHARS, EmbeddingInfo, Measured, RequestInfo, info_of
from rootstock.server.wire import Json
from rootstock.text.limits import MAX_PROMPTS, refuse_more_than, refuse_surrogates

MAX_INPUT_TOKENS = 300_000  # of one request, as OpenAI's
_LONG_ANSWER_NUMBERS = 2_048  # an answer with more of them is not encoded on the event loop

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


def embedding_routes(models: ModelRegistry, answerer: Answerer) -> APIRouter:
    router = APIRouter(
        tags=["OpenAI"], route_class=BoundedJsonRoute, responses=documented_errors(*MODEL_ROUTE)
    )

    @router.post("/v1/embeddings", response_class=Response)
    async def embeddings(body: EmbeddingRequest, request: Request, _tenant: Tenant) -> Response:
        """Computes the embeddings of texts or token ids."""
        info = info_of(request)
        try:
            asked, found = await _embedded(models, body, request, info)
        except RootstockError as error:
            info.failed(error)
            raise
        except (ClientGone, asyncio.CancelledError):
            info.disconnected()
            raise
        held = _HeldEmbeddings(found.rows)
        answer = await answerer.respond(
            lambda: _answer(body, asked, held),
            is_long=found.rows.size > _LONG_ANSWER_NUMBERS,
            headers={},
        )
        return _Answer(answer, held)

    return router


async def _embedded(
    models: ModelRegistry, body: EmbeddingRequest, request: Request, info: RequestInfo
) -> tuple[AskedEmbeddings, Embedded]:
    """Tokenizes on another thread, and waits for the engine. Raises RootstockError, ClientGone and CancelledError."""
    body.refuse_unsupported()
    use = await models.use_embedding(body.model, request)
    try:
        model, meter = use.model, meter_of(request)
        info.model, info.asked_model = model.name, (body.model or "")[:MAX_NAME_CHARS]
        info.measured = Measured()

        def submitted() -> tuple[AskedEmbeddings, EmbeddingJob]:
            asked = AskedEmbeddings.of(model, body)
            if meter is not None:
                meter.prepared(asked.tokens)
            info.submitted_ns = time.time_ns()
            return asked, model.engine.submit(asked.inputs)

        asked, job = await models.queue.run(request, submitted)
        try:
            found = await unless_gone(job.done, request)
        except BaseException as error:
            job.done.cancel()  # inputs that are not computed yet are dropped
            info.measured.unanswered["error" if isinstance(error, RootstockError) else "abort"] += 1
            raise
    finally:
        use.end()
    usage = Usage(asked.tokens, 0, 0, queued_s=found.queued_s, ttft_s=found.total_s, total_s=found.total_s)
    info.outcome, info.usage = "ok", usage
    info.embedding = EmbeddingInfo(asked.dimensions, body.encoding_format)
    return asked, found


@dataclass(frozen=True, slots=True)
class AskedEmbeddings:
    """The inputs of a request, checked and tokenized."""

    model: str  # as the client names it
    inputs: Sequence[Tokens]
    dimensions: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.inputs))

    @staticmethod
    def of(model: EmbeddingModel, body: EmbeddingRequest) -> AskedEmbeddings:
        """Checks and tokenizes the inputs of a body: not for an event loop. Raises RequestError."""
        dimensions = _dimensions(model.description, body.dimensions)
        return AskedEmbeddings(body.model or model.name, _inputs(model, body.input), dimensions)


class _HeldEmbeddings:
    """The embeddings of an answer, until it has been sent or its client has left."""

    def __init__(self, rows: NDArray[np.float32]) -> None:
        self.count = len(rows)
        self._rows: NDArray[np.float32] | None = rows

    def release(self) -> None:
        self._rows = None

    def encoded(self, index: int, dimensions: int, form: str) -> str | list[float] | None:
        """Returns an embedding in the form of the answer. None: they are released."""
        rows = self._rows  # another thread may release them
        if rows is None:
            return None
        row = rows[index]
        if dimensions < len(row):
            row = row[:dimensions]
            row = row / max(float(np.linalg.norm(row)), 1e-12)
        return _encoded(row, form)


class _Answer(Response):
    """A response that releases its embeddings whether it is sent or cut off.

    The tasks and exceptions of a client that leaves may hold the iterator of the body until the garbage is collected.
    """

    def __init__(self, inner: Response, held: _HeldEmbeddings) -> None:
        self.status_code = inner.status_code
        self.raw_headers = inner.raw_headers
        self.background = None
        self._inner = inner
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._inner(scope, receive, send)
        finally:
            self._held.release()


def _answer(body: EmbeddingRequest, asked: AskedEmbeddings, held: _HeldEmbeddings) -> Json:
    """Returns the body of an answer. It holds an iterator, which `json_pieces` encodes."""

    # Without the inputs: the iterator lives until a slow client has read its answer.
    dimensions, form = asked.dimensions, body.encoding_format

    def data() -> Iterator[Json]:
        for index in range(held.count):
            encoded = held.encoded(index, dimensions, form)
            if encoded is None:
                return  # the client has left
            yield {"object": "embedding", "index": index, "embedding": encoded}

    return {
        "object": "list",
        "data": data(),
        "model": asked.model,
        "usage": {"prompt_tokens": asked.tokens, "total_tokens": asked.tokens},
    }


def _dimensions(described: EmbedderDescription, asked: int | None) -> int:
    if asked is None or asked == described.dimensions:
        return described.dimensions
    shorter = described.shorter_dimensions
    if shorter == ():
        remedy = (
            f"This model's embeddings have {described.dimensions} dimensions and cannot be cut. Leave it out."
        )
        raise Unsupported("dimensions", remedy)
    if not 1 <= asked <= described.dimensions or (shorter is not None and asked not in shorter):
        allowed = f"from 1 to {described.dimensions}" if shorter is None else ", ".join(map(str, shorter))
        raise InvalidParameter("dimensions", asked, allowed)
    return asked


def _encoded(row: NDArray[np.float32], form: str) -> str | list[float]:
    if form == "base64":
        return base64.b64encode(np.ascontiguousarray(row, "<f4").tobytes()).decode()
    numbers: list[float] = row.tolist()
    return numbers


def _inputs(model: EmbeddingModel, given: Any) -> list[Tokens]:
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
        tokens = _tokens(model, each, f"input[{index}]")
        total += len(tokens)
        most = model.engine.most_tokens
        if not 1 <= len(tokens) <= most:
            if not len(tokens):
                raise EmptyPrompt(f"input[{index}]")
            raise InputTooLong(len(tokens), "tokens", most, param=f"input[{index}]")
        if total > MAX_INPUT_TOKENS:
            allowed = f"inputs of at most {MAX_INPUT_TOKENS:,} tokens together. Send them in several requests"
            raise InvalidParameter("input", "…", allowed)
        inputs.append(tokens)
    return inputs


def _tokens(model: EmbeddingModel, each: Any, path: str) -> Tokens:
    if isinstance(each, str):
        refuse_surrogates(each, path)
        if not each.strip():
            raise EmptyPrompt(path)
        return model.embedder.tokens_of(each)
    if not _are_ids(each):
        raise InvalidParameter(path, each, "a string, or a list of token ids")
    least, largest = min(each), max(each)
    vocab_size = model.description.vocab_size
    if not 0 <= least <= largest < vocab_size:
        raise InvalidParameter(path, least if least < 0 else largest, f"token ids from 0 to {vocab_size - 1}")
    return np.array(each, np.int32)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}
