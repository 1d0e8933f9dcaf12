"""Errors in the form of Anthropic's API: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

import re
import uuid
from typing import Any, ClassVar

from pydantic import BaseModel

from rootstock.errors import CompletionTooLong, EngineStopped, Overloaded, RootstockError, Unsupported
from rootstock.logs import REQUEST_FIELDS

_MADE_ID = re.compile("[0-9a-f]{32}")

# The status tells the rest. 529, Anthropic's own status of an overloaded server, is unknown to proxies: ours is 503.
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class ThreadUnsupported(Unsupported):
    """A conversation that the server shall hold. By the error's details, Anthropic's clients send all messages."""

    details: ClassVar[dict[str, Any]] = {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }

    def __init__(self) -> None:
        super().__init__("thread", "The server keeps no conversations: send all messages. Leave it out.")


class MessagesErrorDetail(BaseModel):
    type: str
    message: str


class MessagesErrorBody(BaseModel):
    """An error, as the OpenAPI document describes it."""

    type: str
    error: MessagesErrorDetail
    request_id: str


def new_request_id() -> str:
    """Returns an id of this API's form. It is the request's own one, unless the client chose that."""
    own = REQUEST_FIELDS.get({}).get("request_id", "")
    return f"req_{own if _MADE_ID.fullmatch(own) else uuid.uuid4().hex}"


def error_body(error: RootstockError) -> dict[str, Any]:
    """Returns the body of an error. Its `request_id` is also the response's `request-id` header."""
    told: dict[str, Any] = {"type": _kind(error), "message": _message(error)}
    if isinstance(error, ThreadUnsupported):
        told["details"] = error.details
    return {
        "type": "error",
        "error": told,
        "request_id": new_request_id(),
    }


def _kind(error: RootstockError) -> str:
    if error.http_status >= 500:
        return "overloaded_error" if isinstance(error, Overloaded | EngineStopped) else "api_error"
    return _KINDS.get(error.http_status, "invalid_request_error")


def _message(error: RootstockError) -> str:
    # Claude Code compacts a conversation when it reads these words.
    too_long = error.code == "context_length_exceeded" and not isinstance(error, CompletionTooLong)
    message = f"prompt is too long. {error.message}" if too_long else error.message
    return message.encode(errors="backslashreplace").decode()  # it quotes the client's text
