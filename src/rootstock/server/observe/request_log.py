"""Requests seen from outside: their ids, their log lines, their spans, and the count of responses.

The middleware here is the outermost. Code that answers a request notes facts in its `RequestInfo`.
"""

from __future__ import annotations

import logging
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rootstock.logs import ACCESS_LOGGER, REQUEST_FIELDS
from rootstock.server.access.guard import is_request_of_api, shown_tenant_of
from rootstock.server.http.connection import new_request_id
from rootstock.server.http.errors import REQUEST_ID_HEADER
from rootstock.server.observe.metrics import Metrics
from rootstock.server.observe.tracing import RequestSpan, Tracing
from rootstock.server.request_info import REQUEST_STATE, RequestInfo

_HEADER = REQUEST_ID_HEADER.lower().encode()
_SANE_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:/+=@~-]{0,127}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_access = logging.getLogger(ACCESS_LOGGER)


class RequestLog:
    """ASGI middleware that gives each request an id and reports its end."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: Tracing | None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in _METHODS else "other"
        info = RequestInfo(_id_of(scope) or new_request_id(), method, scope["path"])
        scope.setdefault("state", {})[REQUEST_STATE] = info
        fields = {"request_id": info.id}
        span: RequestSpan | None = None
        if self._tracing is not None and method == "POST" and is_request_of_api(info.path):
            span = self._tracing.begin(scope["headers"], info.began_ns)
            if span.trace_id:
                fields["trace_id"] = span.trace_id
        REQUEST_FIELDS.set(fields)  # in the context of this request's task
        header = (_HEADER, info.id.encode())

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                info.status = message["status"]
                for name, value in message["headers"]:
                    if name == b"request-id":
                        info.api_request_id = value.decode("latin-1")
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception:
            info.status = info.status or 500  # answered by the handler of errors outside of this middleware
            raise
        finally:
            info.route = getattr(scope.get("route"), "path", "none")
            if info.outcome is not None:
                info.tenant = shown_tenant_of(scope)
            self._metrics.observe(info)
            self._metrics.responded(info.route, method, info.status or 499)
            if span is not None:
                span.end(info)
            if _access.isEnabledFor(logging.INFO):
                _access.info("request", extra={"fields": info.fields()})
            if info.next_turn is not None:
                info.next_turn()


def _id_of(scope: Scope) -> str:
    """Returns the id that the client sends, or "" if it sends none, several, or one that is not sane."""
    found = [value for name, value in scope["headers"] if name == _HEADER]
    if len(found) != 1 or not _SANE_ID.fullmatch(found[0]):
        return ""
    return str(found[0], "ascii")
