"""Facts about an HTTP request, which the code that answers it notes for its log line and its span."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from rootstock.engine.request import Finished, Usage
from rootstock.errors import RootstockError
from rootstock.logs import new_request_id
from rootstock.server.wire import Call

DISCONNECTED = "disconnected"  # in the place of an error's code
REQUEST_STATE = "rootstock_request"  # the entry in a request's state


@dataclass(frozen=True, slots=True)
class EmbeddingInfo:
    """Facts about the answer of an embedding model."""

    dimensions: int
    encoding_format: str


@dataclass(slots=True, eq=False)
class RequestInfo:
    """Facts about an HTTP request for its log line and its span, noted as they become known."""

    id: str
    method: str
    path: str
    began_ns: int = field(default_factory=time.time_ns)
    began_s: float = field(default_factory=time.monotonic)
    submitted_ns: int = 0  # when its requests went to the engine
    status: int = 0
    route: str = "none"  # the route's path: "/v1/models/{name:path}"
    model: str = ""
    asked_model: str = ""
    tenant: str = ""  # as the operator sees it
    call: Call | None = None
    ends: Sequence[Finished] = ()
    usage: Usage | None = None
    embedding: EmbeddingInfo | None = None
    error: str = ""  # code
    refusal: RootstockError | None = None  # by the guard, before a route was found
    api_request_id: str = ""  # of an API that has ids of its own

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the access log line. Times are in seconds."""
        told: dict[str, Any] = {
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "seconds": round(time.monotonic() - self.began_s, 6),
        }
        if self.route == "none":
            told["path"] = self.path[:256]
        told |= {
            key: value
            for key, value in (
                ("model", self.model),
                ("tenant", self.tenant),
                ("error", self.error or (self.refusal.code if self.refusal else "")),
                ("api_request_id", self.api_request_id),
            )
            if value
        }
        if self.usage is not None and self.ends:
            first = self.ends[0].usage  # of several choices, the first
            told |= {
                "prompt_tokens": self.usage.prompt_tokens,
                "cached_tokens": self.usage.cached_tokens,
                "completion_tokens": self.usage.completion_tokens,
                "finish": ",".join(dict.fromkeys(end.reason for end in self.ends)),
                "queue_s": round(first.queued_s, 6),
                "loading_s": round(first.loading_s, 6),
                "ttft_s": round(first.ttft_s, 6),
                "total_s": round(first.total_s, 6),
            }
        elif self.usage is not None:  # of an embedding model
            told |= {
                "prompt_tokens": self.usage.prompt_tokens,
                "queue_s": round(self.usage.queued_s, 6),
                "total_s": round(self.usage.total_s, 6),
            }
        return told


def info_of(request: Request) -> RequestInfo:
    """Returns the facts about a request. Without the middleware, as in some tests, nobody reads them."""
    found = getattr(request.state, REQUEST_STATE, None)
    if isinstance(found, RequestInfo):
        return found
    return RequestInfo(new_request_id(), request.method, request.url.path)
