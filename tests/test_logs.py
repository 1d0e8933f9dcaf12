"""Log lines: their two formats, and text from outside that must not forge them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pytest

from rootstock.logs import (
    ACCESS_LOGGER,
    MAX_MESSAGE_CHARS,
    REQUEST_FIELDS,
    JsonFormatter,
    TextFormatter,
    configure_logs,
    printable,
)

FORGED = 'x\nERROR rootstock: forged\r\x1b[31m\u2028\u202e"\ud800'


def record(message: str, *args: object, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("rootstock.test", logging.WARNING, "file", 1, message, args, None)
    vars(made).update(extra)
    return made


def failed() -> logging.LogRecord:
    made = record("it failed")
    try:
        raise ValueError(FORGED)
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


def test_a_line_of_text_has_its_fields_at_the_end() -> None:
    line = TextFormatter().format(
        record("done %d", 3, fields={"status": 200, "seconds": 0.25, "path": "/a b"})
    )
    assert line == 'WARNING rootstock.test: done 3 status=200 seconds=0.25 path="/a b"'


def test_a_line_of_json_has_time_level_logger_message_and_fields() -> None:
    told = json.loads(
        JsonFormatter().format(record("done %d", 3, fields={"status": 200, "message": "other"}))
    )
    assert datetime.fromisoformat(told.pop("time")).tzinfo is not None
    assert told == {"level": "warning", "logger": "rootstock.test", "message": "done 3", "status": 200}


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_text_of_clients_cannot_write_a_line_of_its_own(formatter: logging.Formatter) -> None:
    line = formatter.format(record("about %s", FORGED, fields={"path": FORGED}))
    assert line.isprintable()
    line.encode()
    forged = formatter.format(failed())
    assert not any(part.startswith("ERROR") for part in forged.splitlines())
    assert all(part.isprintable() for part in forged.split("\n"))


def test_a_traceback_is_indented_in_text_and_one_field_in_json() -> None:
    first, *others = TextFormatter().format(failed()).split("\n")
    assert first == "WARNING rootstock.test: it failed"
    assert others
    assert all(line.startswith("    ") for line in others)
    assert "ValueError" in json.loads(JsonFormatter().format(failed()))["exception"]


def test_long_messages_are_cut() -> None:
    assert len(TextFormatter().format(record("x" * 100_000))) < MAX_MESSAGE_CHARS + 100


def test_lines_have_the_request_of_their_code_or_the_one_that_they_name() -> None:
    assert json.loads(JsonFormatter().format(record("x"))).keys() == {"time", "level", "logger", "message"}
    token = REQUEST_FIELDS.set({"request_id": "mine", "trace_id": "t"})
    try:
        assert TextFormatter().format(record("x")).endswith(": x request_id=mine trace_id=t")
        named = json.loads(JsonFormatter().format(record("x", request_id="other")))
        assert (named["request_id"], named["trace_id"]) == ("other", "t")
    finally:
        REQUEST_FIELDS.reset(token)


def test_printable_text_is_unchanged() -> None:
    assert printable("größer, 日本 🙂") == "größer, 日本 🙂"


@contextmanager
def restored() -> Iterator[None]:
    names = ("", "rootstock", "uvicorn", ACCESS_LOGGER)
    levels = [logging.getLogger(name).level for name in names]
    handlers = list(logging.getLogger().handlers)
    try:
        yield
    finally:
        logging.getLogger().handlers[:] = handlers
        for name, level in zip(names, levels, strict=True):
            logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize("access", [False, True])
def test_the_level_is_for_our_lines_and_access_lines_have_their_own(
    capsys: pytest.CaptureFixture[str], access: bool
) -> None:
    with restored():
        configure_logs("json", "info", access=access)
        for name in ("rootstock.engine", "uvicorn.error", "other", ACCESS_LOGGER):
            logging.getLogger(name).info("told")
            logging.getLogger(name).debug("not told")
        told = [json.loads(line)["logger"] for line in capsys.readouterr().err.splitlines()]
        assert told == ["rootstock.engine", "uvicorn.error"] + [ACCESS_LOGGER] * access
        configure_logs("text", "error", access=access)
        logging.getLogger("rootstock.engine").warning("not told")
        logging.getLogger("other").warning("told")
        assert capsys.readouterr().err == "WARNING other: told\n"
