"""Errors as responses, in the form of the API that the route belongs to.

Rootstock's own routes have the form of OpenAI's API: {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from rootstock.errors import (
    HttpRefused,
    InternalError,
    InvalidJson,
    InvalidParameter,
    MethodNotAllowed,
    MissingParameter,
    Overloaded,
    RateLimited,
    RootstockError,
    RouteNotFound,
    SessionsFull,
    Unauthorized,
    Unsupported,
    WebSocketRefused,
)
from rootstock.logs import REQUEST_FIELDS

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
ANTHROPIC_ID_HEADER = "request-id"  # of the answers to Anthropic's routes
RETRY_AFTER_S = 1
CLIENT_GONE_STATUS = 499  # nginx's; no client reads it


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """The body of an error, for the OpenAPI document."""

    error: ErrorDetail


_MEANINGS = {
    400: "The request is wrong: the message says how, and param names the field.",
    401: "The API key is missing or wrong.",
    403: "The host, the web page or the key may not do this.",
    404: "The model, or the object, is not here.",
    408: "The request came too slowly.",
    409: "The state of the model or of the cache does not allow it, or the name is taken: see the message.",
    413: "The body is too large.",
    414: "The URL is too long.",
    415: "The body is not JSON in UTF-8.",
    426: "The request asks for a WebSocket, which the server does not speak.",
    429: "The server is full, or the tenant has reached a limit. Try again after Retry-After.",
    431: "The head is too large.",
    500: "The server failed.",
    503: "The server stops, or has too many connections or bodies. Try again.",
}
_ANY_ROUTE = (400, 401, 403, 408, 413, 414, 426, 431, 500, 503)  # of the connection, the guard and the engine
MODEL_ROUTE = (404, 415, 429)  # further ones, of a route with a body that names a model and waits for a turn


def documented_errors(*more: int, body: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """Returns the error statuses of a route for the OpenAPI document: the common ones, and `more`."""
    return {
        status: {"model": body, "description": _MEANINGS[status]} for status in sorted({*_ANY_ROUTE, *more})
    }


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


class BodyRefused(HTTPException):
    """An error during the reading of a request's body. FastAPI replaces all other exceptions there."""

    def __init__(self, error: RootstockError) -> None:
        super().__init__(error.http_status, error.message)
        self.error = error


def error_body(error: RootstockError) -> dict[str, Any]:
    kind = "server_error" if error.http_status >= 500 else "invalid_request_error"
    if error.http_status == 429:
        kind = "rate_limit_error"
    param = error.param and _utf8(error.param)
    return {"error": {"message": _utf8(error.message), "type": kind, "param": param, "code": error.code}}


ErrorForm = Callable[[RootstockError], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ErrorForms:
    """The forms of errors by the path with which routes begin. Other routes have the form of OpenAI's API."""

    by_root: Mapping[str, ErrorForm] = field(default_factory=dict)

    def of(self, path: str) -> ErrorForm:
        """Returns the form of the errors of a route."""
        for root, form in self.by_root.items():
            if path == root or path.startswith(f"{root}/"):
                return form
        return error_body


def error_response(error: RootstockError, form: ErrorForm = error_body) -> JSONResponse:
    body, headers = form(error), {}
    if "request_id" in body:
        headers["request-id"] = body["request_id"]
    match error:
        case RateLimited(retry_after_s=wait_s) | SessionsFull(retry_after_s=wait_s):
            headers["Retry-After"] = str(max(RETRY_AFTER_S, math.ceil(wait_s)))
        case Overloaded():
            headers["Retry-After"] = str(RETRY_AFTER_S)
        case Unauthorized():
            headers["WWW-Authenticate"] = "Bearer"
            # Without this header, Claude Code repeats a request with a refused key for minutes.
            headers["X-Should-Retry"] = "false"
        case WebSocketRefused():
            headers |= {"Upgrade": "HTTP/1.1", "Connection": "Upgrade"}  # the protocol to use instead
    return JSONResponse(body, error.http_status, headers)


def install_error_handlers(app: FastAPI, forms: ErrorForms) -> None:
    def respond(error: RootstockError, request: Request) -> Response:
        return error_response(error, forms.of(request.url.path))

    @app.exception_handler(RootstockError)
    async def on_rootstock_error(request: Request, error: RootstockError) -> Response:
        return respond(error, request)

    @app.exception_handler(RequestValidationError)
    async def on_wrong_body(request: Request, error: RequestValidationError) -> Response:
        return respond(wrong_body(error.errors(), error.body), request)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error, BodyRefused):
            return respond(error.error, request)
        method, path = request.method, request.url.path
        form = forms.of(path)
        match error.status_code:
            case 404:
                meant = _path_meant(app, request)
                form = forms.of(meant or path)
                refusal: RootstockError = RouteNotFound(method, path, meant)
            case 405:
                refusal = MethodNotAllowed(f"{method} {path}")
            case _:
                refusal = HttpRefused(str(error.detail))
        response = error_response(refusal, form)
        response.status_code = error.status_code
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientGone)
    async def on_client_gone(_request: Request, _error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE_STATUS)

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        response = respond(InternalError(request.url.path, error), request)
        # This handler answers outside of all middleware.
        if request_id := REQUEST_FIELDS.get({}).get("request_id"):
            response.headers[REQUEST_ID_HEADER] = request_id
        return response


def _path_meant(app: FastAPI, request: Request) -> str | None:
    """Returns the path of a route that a client means whose base URL lacks /v1, or has too much before it."""
    path = request.url.path
    for candidate in (f"/v1{path}", path[max(0, path.rfind("/v1/")) :]):
        scope = {**request.scope, "path": candidate}
        if any(route.matches(scope)[0] is Match.FULL for route in app.routes):
            return candidate
    return None


def wrong_body(errors: Sequence[Mapping[str, Any]], body: Any) -> RootstockError:
    """Makes one error of the first wrong field. The errors of a union's alternatives are joined."""
    first = errors[0]
    if first["loc"][0] != "body":  # a parameter of the query, the path or the head
        return _wrong_parameter([error for error in errors if error["loc"][:2] == first["loc"][:2]])
    if first["type"] == "json_invalid":
        return InvalidJson(f"{first['ctx']['error']} at character {first['loc'][-1]}")
    if first["type"] == "missing" and len(first["loc"]) > 1:
        path, _ = _locate(first["loc"][1:-1], body)
        return MissingParameter(f"{path}.{first['loc'][-1]}" if path else str(first["loc"][-1]))
    if first["type"] == "missing":
        return InvalidJson("it is empty")
    if first["type"] == "extra_forbidden":
        return Unsupported(
            ".".join(map(str, first["loc"][1:])), "Check its spelling: GET /docs lists the fields."
        )
    # The deepest place is reported: the 5 of ["a", 5] rather than the list.
    located = [(*_locate(error["loc"][1:], body), error) for error in errors]
    path, value, _ = max(
        (each for each in located if each[0].startswith(located[0][0])), key=lambda at: len(at[0])
    )
    allowed = [_allowed(error) for other, _, error in located if other == path]
    return InvalidParameter(path or "body", value, " or ".join(dict.fromkeys(allowed)))


def _wrong_parameter(errors: Sequence[Mapping[str, Any]]) -> RootstockError:
    """Makes one error of the validation errors of a parameter outside the body."""
    first = errors[0]
    name = str(first["loc"][1])
    if first["type"] == "missing":
        return MissingParameter(name)
    return InvalidParameter(name, first["input"], " or ".join(dict.fromkeys(map(_allowed, errors))))


_WORDS = {
    "a valid dictionary or object to extract fields from": "an object",
    "a valid dictionary": "an object",
}


def _allowed(error: Mapping[str, Any]) -> str:
    match error["type"]:
        case "too_short":
            return f"a list of at least {error['ctx']['min_length']}"
        case "too_long":
            entries = "an object" if error["ctx"]["field_type"] == "Dictionary" else "a list"
            return f"{entries} of at most {error['ctx']['max_length']:,}"
        case "string_too_long":
            return f"a string of at most {error['ctx']['max_length']:,} characters"
        case "string_type":
            return "a string"
        case "list_type":
            return "a list"
    said = str(error["msg"]).removeprefix("Input should be ")
    return _WORDS.get(said, said)


def _locate(loc: Sequence[int | str], body: Any) -> tuple[str, Any]:
    """Returns the path of a value in usual notation, and the value.

    Parts of `loc` that are not parts of the body are names of a union's alternatives.
    """
    path = ""
    for part in loc:
        if isinstance(part, int) and isinstance(body, list) and part < len(body):
            path, body = f"{path}[{part}]", body[part]
        elif isinstance(body, dict) and part in body:
            path, body = f"{path}.{part}" if path else str(part), body[part]
    return path, body


def _utf8(text: str) -> str:
    """Replaces halves of surrogate pairs: messages quote the client's text."""
    return text.encode(errors="backslashreplace").decode()
