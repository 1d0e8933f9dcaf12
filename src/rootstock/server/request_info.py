"""Facts about an HTTP request, which the code that answers it notes. They become its log line, its span and its part
in the metrics when the response has ended, so that no client waits for that."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import Request

from rootstock.engine.request import Finished, Usage
from rootstock.errors import RootstockError
from rootstock.server.http.connection import new_request_id
from rootstock.server.wire.api_call import ApiCall

DISCONNECTED = "disconnected"  # in the place of an error's code
REQUEST_STATE = "rootstock_request"  # the entry in a request's state
MAX_NAME_CHARS = 256  # of the name by which a model was asked for

Outcome = Literal["ok", "error", "disconnected"]


@dataclass(frozen=True, slots=True)
class EmbeddingInfo:
    """Facts about the answer of an embedding model."""

    dimensions: int
    encoding_format: str


@dataclass(slots=True, eq=False)
class Measured:
    """Times and ends of the engine's requests of one HTTP request."""

    requests: int = 0
    submitted_at: float = 0.0
    token_times: array[float] = field(default_factory=lambda: array("d"))  # of the arrivals of tokens
    token_requests: array[int] = field(default_factory=lambda: array("i"))  # the index of each one's request
    # The requests that ended with an answer, each with its `max_tokens`.
    finished: list[tuple[Finished, int | None]] = field(default_factory=list)
    unanswered: Counter[str] = field(default_factory=Counter)  # requests by the reason of their end


@dataclass(slots=True, eq=False)
class RequestInfo:
    """Facts about an HTTP request, noted as they become known."""

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
    call: ApiCall | None = None
    ends: Sequence[Finished] = ()
    usage: Usage | None = None
    embedding: EmbeddingInfo | None = None
    outcome: Outcome | None = None  # None: it was no request to a model, or has not ended
    error: str = ""  # code
    measured: Measured | None = None
    next_turn: Callable[[], None] | None = None  # to be called at the end of the response
    refusal: RootstockError | None = None  # by the guard, before a route was found
    api_request_id: str = ""  # of an API that has ids of its own

    def failed(self, error: RootstockError) -> None:
        """Notes the error that ended a request to a model."""
        self.outcome, self.error = "error", error.code

    def disconnected(self) -> None:
        """Notes that the client of a request to a model has left."""
        self.outcome, self.error = "disconnected", DISCONNECTED

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
                **({"held_s": round(first.held_s, 6)} if first.held_s else {}),
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
    """Returns the facts about a request. Without the middleware, as in some tests, they are not read."""
    found = getattr(request.state, REQUEST_STATE, None)
    if isinstance(found, RequestInfo):
        return found
    return RequestInfo(new_request_id(), request.method, request.url.path)
