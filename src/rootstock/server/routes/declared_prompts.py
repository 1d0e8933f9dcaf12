"""Prompts that the operator declares, to be cached before requests send them.

A file of them has JSON lines. Each is the body of a chat or a completion, or an entry of OpenAI's batch files with
`url` and `body`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rootstock.cache.retention.hint_types import MAX_TTL_S
from rootstock.errors import InvalidOption
from rootstock.units import MIB

MAX_LINE_BYTES = 16 * MIB
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


@dataclass(frozen=True, slots=True)
class DeclaredPrompt:
    """A prompt to cache: the body of a request, as its route takes it."""

    place: str  # for messages: the file and the line
    route: str
    body: dict[str, Any]
    tenant: str = ""
    retain_s: float | None = None  # keep it so long after its last use


def read_warm_file(option: str, path: Path) -> Iterator[DeclaredPrompt]:
    """Yields the prompts of a file. Raises InvalidOption, at the first line that is wrong."""
    try:
        with path.open("rb") as file:
            for number in range(1, 1 << 31):
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                place = f"{path}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise InvalidOption(option, place, f"at most {MAX_LINE_BYTES // MIB} MiB long")
                if line.strip():
                    yield _parsed(option, place, line)
    except OSError as error:
        raise InvalidOption(option, str(path), f"a file that can be read ({error})") from error


def check_warm_file(option: str, path: Path) -> None:
    """Reads a whole file. Raises InvalidOption at the first line that is wrong."""
    for _ in read_warm_file(option, path):
        pass


def _parsed(option: str, place: str, line: bytes) -> DeclaredPrompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidOption(option, place, f"JSON ({error})") from error
    if not isinstance(entry, dict):
        raise InvalidOption(option, place, "an object: a request's body, or one with 'url' and 'body'")
    route, body, tenant, retain_s = ROUTES[0], entry, "", None
    if "body" in entry:
        route, body = entry.get("url", ROUTES[0]), entry["body"]
        tenant, retain_s = entry.get("tenant", ""), entry.get("retain_s")
        if route not in ROUTES:
            raise InvalidOption(option, place, f"an entry whose 'url' is one of {', '.join(ROUTES)}")
        if not isinstance(body, dict) or not isinstance(tenant, str):
            raise InvalidOption(
                option, place, "an entry whose 'body' is an object and whose 'tenant' is text"
            )
        if retain_s is not None and (
            isinstance(retain_s, bool)
            or not isinstance(retain_s, int | float)
            or not 0 < retain_s <= MAX_TTL_S
        ):
            raise InvalidOption(
                option, place, f"an entry whose 'retain_s' is a number of at most {MAX_TTL_S:g}"
            )
    return DeclaredPrompt(place, route, body, tenant, retain_s)
