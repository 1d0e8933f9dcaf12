"""Reports of a request to a model: to the metrics, and to the facts that its log line and its span show."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from fastapi import Request as HttpRequest

from rootstock.engine.request import Finished, Request, Usage
from rootstock.errors import RootstockError
from rootstock.server.access import SALT_HEADER, caller_of
from rootstock.server.metrics import Metrics
from rootstock.server.request_info import DISCONNECTED, EmbeddingInfo, info_of
from rootstock.server.request_metrics import Series, Timing
from rootstock.server.tenant_labels import shown_tenant
from rootstock.server.wire import Call

_MAX_NAME_CHARS = 256


class RequestReport:
    """Reporter of one HTTP request to a model. It reports one end."""

    def __init__(self, request: HttpRequest, metrics: Metrics) -> None:
        self._request = request
        self._metrics = metrics
        self._route = request.url.path
        self._info = info_of(request)
        self._timing = Timing(Series())

    def timing(self, model: str, asked: str | None) -> Timing:
        """Returns the metrics of the request, whose model was found by the name `asked`."""
        self._info.model, self._info.asked_model = model, (asked or "")[:_MAX_NAME_CHARS]
        named = self._request.headers.get(SALT_HEADER, "")
        self._info.tenant = shown_tenant(caller_of(self._request).tenant, named)
        self._timing = self._metrics.timing(model, self._info.tenant)
        return self._timing

    def submitted(self, call: Call) -> tuple[Request, ...]:
        """Notes the call, and returns its requests with the id of the HTTP request."""
        self._info.call, self._info.submitted_ns = call, time.time_ns()
        return tuple(replace(one, http_id=self._info.id) for one in call.requests)

    def answered(self, call: Call, ends: Sequence[Finished], usage: Usage) -> None:
        self._metrics.answered(self._route, "ok")
        self._timing.answered(usage, call.choices_per_prompt)
        self._info.ends, self._info.usage = tuple(ends), usage

    def begun(self) -> None:
        """Notes the submission of inputs to an embedding model."""
        self._info.submitted_ns = time.time_ns()

    def embedded(self, usage: Usage, dimensions: int, encoding_format: str) -> None:
        """Reports an answer of an embedding model."""
        self._metrics.answered(self._route, "ok")
        self._timing.embedded(usage)
        self._info.usage = usage
        self._info.embedding = EmbeddingInfo(dimensions, encoding_format)

    def failed(self, error: RootstockError) -> None:
        self._metrics.answered(self._route, "error")
        self._metrics.failed(self._route, error)
        self._info.error = error.code

    def disconnected(self) -> None:
        self._metrics.answered(self._route, "disconnected")
        self._info.error = DISCONNECTED
