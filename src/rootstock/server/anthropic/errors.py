"""Errors in the form of Anthropic's API: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

import uuid
from typing import Any

from rootstock.errors import CompletionTooLong, EngineStopped, Overloaded, RootstockError

# The status tells the rest. 529, Anthropic's own status of an overloaded server, is unknown to proxies: ours is 503.
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


def error_body(error: RootstockError) -> dict[str, Any]:
    """Returns the body of an error. Its `request_id` is also the response's `request-id` header."""
    return {
        "type": "error",
        "error": {"type": _kind(error), "message": _message(error)},
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
