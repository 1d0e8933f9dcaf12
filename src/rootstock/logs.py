"""Log lines: text or JSON, with the id of the HTTP request that they are about.

Lines hold no text of prompts and no keys. Text that may come from a client is bounded, and its control characters are
escaped: a client must not be able to write a line of its own.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

ACCESS_LOGGER = "rootstock.access"
MAX_MESSAGE_CHARS = 8_192
MAX_TRACEBACK_CHARS = 32_768

# Fields of every line that a request's code writes: its id, and its trace's if it has one.
REQUEST_FIELDS: ContextVar[Mapping[str, str]] = ContextVar("rootstock_request_fields")

# Controls, line and paragraph separators, marks that reverse text on a terminal, halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_PLAIN = re.compile(r"[!#-<>-~]+")  # a value that needs no quotes in a line of text: no space, ", =


def log_refusal(request_id: str, status: int, error: str) -> None:
    """Logs a request that the connection refuses before it has a method and a route."""
    fields = {"request_id": request_id, "status": status, "error": error}
    logging.getLogger(ACCESS_LOGGER).info("refused", extra={"fields": fields})


def log_warnings() -> None:
    """Writes warnings to standard error as text, unless something else has configured log lines."""
    logging.basicConfig(level=logging.WARNING, handlers=[_handler("text")])


def configure_logs(format: str, level: str, *, access: bool) -> None:
    """Writes log lines to standard error, in place of any earlier configuration.

    `level` is for Rootstock and uvicorn; other packages log warnings. `access` adds a line for each HTTP request.
    """
    logging.basicConfig(level=logging.WARNING, handlers=[_handler(format)], force=True)
    for name in ("rootstock", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())
    logging.getLogger(ACCESS_LOGGER).setLevel(logging.INFO if access else logging.CRITICAL)


def announce(text: str) -> None:
    """Writes a message of the command line to standard error: as a log line where these are JSON, else as it is."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.handle(logging.LogRecord("rootstock", logging.INFO, __file__, 0, text, None, None))
            return
    print(f"rootstock: {text}", file=sys.stderr, flush=True)


def _handler(format: str) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    return handler


class TextFormatter(logging.Formatter):
    """One line `LEVEL logger: message key=value …`, and a traceback in indented lines."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{record.levelname} {record.name}: {_message(record)}"
        for key, value in _fields(record).items():
            line += f" {key}={_quoted(value)}"
        for part in _traceback(record).splitlines():
            line += "\n    " + printable(part)
        return line


class JsonFormatter(logging.Formatter):
    """One line of JSON: time, level, logger, message, the fields of the line, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        told |= {key: value for key, value in _fields(record).items() if key not in told}
        if traceback := _traceback(record):
            told["exception"] = traceback
        return json.dumps(told)  # in ASCII: it escapes control characters


def printable(text: str) -> str:
    """Escapes characters that would change how a log line or a terminal shows the text around them."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    return printable(text[:MAX_MESSAGE_CHARS]) + ("…" if len(text) > MAX_MESSAGE_CHARS else "")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Returns the fields of the request's code, of `extra={"request_id": …}` and of `extra={"fields": …}`."""
    fields: dict[str, Any] = dict(REQUEST_FIELDS.get({}))
    if request_id := getattr(record, "request_id", ""):
        fields["request_id"] = request_id
    return fields | getattr(record, "fields", {})


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(printable(text), ensure_ascii=False)


def _traceback(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[0] is None:
        return ""
    text = logging.Formatter().formatException(record.exc_info)
    return text if len(text) <= MAX_TRACEBACK_CHARS else "…" + text[-MAX_TRACEBACK_CHARS:]
