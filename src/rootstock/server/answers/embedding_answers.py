"""Embeddings of all wire formats: the inputs, checked and tokenized, the engine's rows, and the response."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from numpy.typing import NDArray
from starlette.types import Receive, Scope, Send

from rootstock.cache.types import Tokens
from rootstock.engine.embedding import Embedded, EmbeddingJob
from rootstock.engine.request import Usage
from rootstock.errors import EmptyPrompt, InputTooLong, InvalidParameter, RootstockError, Unsupported
from rootstock.runtime.base import EmbedderDescription
from rootstock.server.access.guard import meter_of
from rootstock.server.answers.event_stream import Answerer
from rootstock.server.http.errors import ClientGone
from rootstock.server.models.embedding_model import EmbeddingModel
from rootstock.server.models.registry import ModelRegistry, unless_gone
from rootstock.server.request_info import MAX_NAME_CHARS, EmbeddingInfo, Measured, RequestInfo, info_of
from rootstock.server.wire.api_call import Json
from rootstock.text.limits import MAX_PROMPTS, refuse_more_than, refuse_surrogates

MAX_INPUT_TOKENS = 300_000  # of one request, as OpenAI's
_LONG_ANSWER_NUMBERS = 2_048  # an answer with more of them is not encoded on the event loop


@dataclass(frozen=True, slots=True)
class EmbeddingQuery:
    """A request's fields about embeddings."""

    model: str | None
    input: Any  # a string, a list of token ids, or a list of strings or of such lists
    dimensions: int | None = None
    form: str = "float"  # or "base64"


async def answer_embeddings(
    models: ModelRegistry,
    answerer: Answerer,
    request: Request,
    read: Callable[[], EmbeddingQuery],
    body_of: Callable[[AskedEmbeddings, HeldEmbeddings], Json],
) -> Response:
    """Computes embeddings, and makes the response of their body, which may hold iterators.

    Raises the errors of `read`, RootstockError and ClientGone.
    """
    info = info_of(request)
    try:
        asked, found = await _embedded(models, read(), request, info)
    except RootstockError as error:
        info.failed(error)
        raise
    except (ClientGone, asyncio.CancelledError):
        info.disconnected()
        raise
    held = HeldEmbeddings(found.rows, asked)
    answer = await answerer.respond(
        lambda: body_of(asked, held), is_long=found.rows.size > _LONG_ANSWER_NUMBERS, headers={}
    )
    return _EmbeddingsResponse(answer, held)


async def _embedded(
    models: ModelRegistry, query: EmbeddingQuery, request: Request, info: RequestInfo
) -> tuple[AskedEmbeddings, Embedded]:
    """Tokenizes on another thread, and waits for the engine. Raises RootstockError, ClientGone and CancelledError."""
    use = await models.use_embedding(query.model, request)
    try:
        model, meter = use.model, meter_of(request)
        info.model, info.asked_model = model.name, (query.model or "")[:MAX_NAME_CHARS]
        info.measured = Measured()

        def submitted() -> tuple[AskedEmbeddings, EmbeddingJob]:
            asked = AskedEmbeddings.of(model, query)
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
    info.embedding = EmbeddingInfo(asked.dimensions, query.form)
    return asked, found


@dataclass(frozen=True, slots=True)
class AskedEmbeddings:
    """The inputs of a request, checked and tokenized."""

    model: str  # as the client names it
    inputs: Sequence[Tokens]
    dimensions: int
    form: str

    @property
    def tokens(self) -> int:
        return sum(map(len, self.inputs))

    @staticmethod
    def of(model: EmbeddingModel, query: EmbeddingQuery) -> AskedEmbeddings:
        """Checks and tokenizes the inputs of a query: not for an event loop. Raises RequestError."""
        dimensions = _dimensions(model.description, query.dimensions)
        return AskedEmbeddings(query.model or model.name, _inputs(model, query.input), dimensions, query.form)


class HeldEmbeddings:
    """The embeddings of an answer, until it has been sent or its client has left."""

    def __init__(self, rows: NDArray[np.float32], asked: AskedEmbeddings) -> None:
        # Without the inputs: the iterator lives until a slow client has read its answer.
        self._dimensions, self._form = asked.dimensions, asked.form
        self._rows: NDArray[np.float32] | None = rows

    def release(self) -> None:
        self._rows = None

    def encoded(self) -> Iterator[str | list[float]]:
        """Yields each embedding in the form of the answer, until they are released: the client has left then."""
        index = 0
        while (encoded := self._encoded_row(index)) is not None:
            yield encoded
            index += 1

    def _encoded_row(self, index: int) -> str | list[float] | None:
        rows = self._rows  # another thread may release them, and a waiting iterator must not hold them
        if rows is None or index == len(rows):
            return None
        row = rows[index]
        if self._dimensions < len(row):
            row = row[: self._dimensions]
            row = row / max(float(np.linalg.norm(row)), 1e-12)
        return _encoded(row, self._form)


class _EmbeddingsResponse(Response):
    """A response that releases its embeddings whether it is sent or cut off.

    The tasks and exceptions of a client that leaves may hold the iterator of the body until the garbage is collected.
    """

    def __init__(self, inner: Response, held: HeldEmbeddings) -> None:
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
