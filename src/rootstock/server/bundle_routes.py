"""Routes that export a cached prefix as a bundle, and import one. For operators only.

The route that exports the prompt of a body has the path of the route that answers it, below `/v1/cache/export`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from rootstock.config import ServerConfig
from rootstock.engine.transfer import Imported, PrefixExport
from rootstock.errors import BodyTooLarge, BundleRefused, ImportsOff, PrefixNotCached, TransferUnderWay
from rootstock.server.access import IMPORT_PATH, Tenant, is_operator, refuse_unless, tenant_in_head
from rootstock.server.anthropic.calls import explained_prompt as messages_prompt
from rootstock.server.anthropic.schema import CountTokensRequest
from rootstock.server.errors import MODEL_ROUTE, ClientGone, documented_errors
from rootstock.server.explainer import ExplainedPrompt
from rootstock.server.model_slots import ModelUse
from rootstock.server.models import ModelRegistry
from rootstock.server.openai.calls import explained_prompt
from rootstock.server.openai.schema import ExplainRequest
from rootstock.server.prompt_bodies import ClosedQueryRoute, StateRoute, refuse_misspelled
from rootstock.server.responses.calls import Responses
from rootstock.server.responses.schema import ResponseRequest
from rootstock.server.wire import Json, ServedModel
from rootstock.text.prompts.salt import salt_of
from rootstock.tiers.disk.archive import BUNDLE_TYPE
from rootstock.tiers.disk.files import Files
from rootstock.tiers.disk.signature import BundleKey, Signer, signed_bytes, why_not_trusted
from rootstock.units import MIB

EXPORT = "/v1/cache/export"
_EXPORTS_AT_ONCE, _IMPORTS_AT_ONCE = 4, 1
_SENT_BYTES = MIB  # of one part of an answer, at least
_WRITTEN_BYTES = MIB  # of a body, at once

_BUNDLE: dict[int | str, dict[str, Any]] = {
    200: {"content": {BUNDLE_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}
_BODY = {"requestBody": {"required": True, "content": _BUNDLE[200]["content"]}}


class _Slots:
    """Number of transfers of one kind that may run at once. For an event loop's thread."""

    def __init__(self, count: int) -> None:
        self._free = count

    def take(self) -> None:
        """Raises TransferUnderWay."""
        if not self._free:
            raise TransferUnderWay()
        self._free -= 1

    def give_back(self) -> None:
        self._free += 1

    @contextmanager
    def one(self) -> Iterator[None]:
        self.take()
        try:
            yield
        finally:
            self.give_back()


class _BundleResponse(StreamingResponse):
    """A bundle as it is read. Ends its use of the model, also if the client never reads it."""

    def __init__(self, parts: Iterator[bytes], ended: Callable[[], None]) -> None:
        super().__init__(parts, media_type=BUNDLE_TYPE)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


def bundle_routes(models: ModelRegistry, responses: Responses, config: ServerConfig) -> APIRouter:
    router = APIRouter(tags=["Cache"])
    router.include_router(_export_routes(models, responses, config))
    router.include_router(_import_route(models, config))
    return router


def _export_routes(models: ModelRegistry, responses: Responses, config: ServerConfig) -> APIRouter:
    router = APIRouter(
        prefix=EXPORT,
        route_class=StateRoute,
        responses=_BUNDLE | documented_errors(*MODEL_ROUTE),
    )
    key = None if config.bundle_key is None else BundleKey(config.bundle_key)
    slots = _Slots(_EXPORTS_AT_ONCE)

    async def export(
        body: ExplainRequest | CountTokensRequest | ResponseRequest,
        request: Request,
        make_prompt: Callable[[ServedModel], ExplainedPrompt],
    ) -> Response:
        refuse_unless(is_operator(request), config)
        refuse_misspelled(body)
        slots.take()
        use: ModelUse[ServedModel] | None = None

        def ended() -> None:
            slots.give_back()
            if use is not None:
                use.end()

        try:
            use = await models.use(body.model, request)
            model = use.model

            def begun() -> PrefixExport:
                prompt = make_prompt(model)
                export = model.engine.export_prefix(
                    prompt.tokens, prompt.salt, prompt.adapter, config.max_bundle_bytes
                )
                if not export.cached_tokens:
                    raise PrefixNotCached
                return export

            export = await models.queue.run(request, begun)
            return _BundleResponse(_signed(export.pieces(), key), ended)
        except BaseException:
            ended()
            raise

    @router.post("/chat/completions")
    @router.post("/completions")
    @router.post("")
    async def export_prompt(body: ExplainRequest, request: Request, tenant: Tenant) -> Response:
        """Exports the cached part of a prompt: its blocks and states, for another server of the same model."""
        return await export(body, request, lambda model: explained_prompt(model, body, tenant))

    @router.post("/messages")
    async def export_messages(body: CountTokensRequest, request: Request, tenant: Tenant) -> Response:
        """Exports the cached part of a conversation's prompt."""
        return await export(body, request, lambda model: messages_prompt(model, body, tenant))

    @router.post("/responses")
    async def export_response(body: ResponseRequest, request: Request, tenant: Tenant) -> Response:
        """Exports the cached part of the prompt of a request to the Responses API."""

        def prompt(model: ServedModel) -> ExplainedPrompt:
            return ExplainedPrompt.of_chat(responses.chat(model, body, tenant))

        return await export(body, request, prompt)

    return router


def _signed(pieces: Iterator[bytes | memoryview], key: BundleKey | None) -> Iterator[bytes]:
    """Joins small pieces, and adds the signature if there is a key."""
    signer = None if key is None else Signer(key)
    part = bytearray()
    for piece in pieces:
        if signer is not None:
            signer.update(piece)
        part += piece
        if len(part) >= _SENT_BYTES:
            yield bytes(part)
            part.clear()
    yield bytes(part) + (b"" if signer is None else signer.signature)


def _import_route(models: ModelRegistry, config: ServerConfig) -> APIRouter:
    router = APIRouter(route_class=ClosedQueryRoute)
    key = None if config.bundle_key is None else BundleKey(config.bundle_key)
    slots = _Slots(_IMPORTS_AT_ONCE)

    def refuse_untrusted(file: IO[bytes], file_bytes: int, key: BundleKey) -> None:
        """Raises BundleRefused."""
        files, fd = Files(), file.fileno()
        if config.unsigned_imports and not signed_bytes(files, fd, file_bytes):
            return
        reason = why_not_trusted(files, fd, file_bytes, key)
        if reason is not None:
            raise BundleRefused(f"{reason} (--bundle-key)")

    # Not a route of bounded JSON: a bundle goes to a file as it comes.
    @router.post(
        IMPORT_PATH, responses=documented_errors(*MODEL_ROUTE), openapi_extra=_BODY, response_model=None
    )
    async def import_bundle(
        request: Request, model: str | None = None, cache_salt: str | None = None
    ) -> Json:
        """Verifies a bundle of another server of the same model, and puts its prefix into the cache."""
        refuse_unless(is_operator(request), config)
        if key is None and not config.unsigned_imports:
            raise ImportsOff
        salt = salt_of(tenant_in_head(request), cache_salt)
        with slots.one(), tempfile.TemporaryFile(prefix="rootstock-bundle-") as file:
            file_bytes = await _received(request, file, config.max_bundle_bytes)
            if key is not None:
                await anyio.to_thread.run_sync(refuse_untrusted, file, file_bytes, key)
            use = await models.use(model, request)
            served = use.model
            try:
                imported = await anyio.to_thread.run_sync(
                    served.engine.import_bundle, file.fileno(), file_bytes, salt, served.adapter
                )
            finally:
                use.end()
        return _told(imported)

    return router


async def _received(request: Request, file: IO[bytes], most_bytes: int) -> int:
    """Writes the body to a file, and returns its bytes. Raises BodyTooLarge and ClientGone."""
    part, file_bytes = bytearray(), 0

    def write() -> None:
        file.write(part)
        part.clear()

    try:
        async for piece in request.stream():
            file_bytes += len(piece)
            if file_bytes > most_bytes:  # a chunked body has no Content-Length
                raise BodyTooLarge(most_bytes, "--max-bundle")
            part += piece
            if len(part) >= _WRITTEN_BYTES:
                await anyio.to_thread.run_sync(write)
    except ClientDisconnect:
        raise ClientGone from None
    write()
    await anyio.to_thread.run_sync(file.flush)
    return file_bytes


def _told(imported: Imported) -> Json:
    return {
        "state": "cached" if imported.is_complete else "no_memory",
        "tokens": imported.tokens,
        "cached_tokens": imported.cached_tokens,
        "records": imported.records,
        "bytes": imported.stored_bytes,
    }
