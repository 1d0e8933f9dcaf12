"""The checks that every driver of a client makes, and the lines that it prints. It imports nothing of Rootstock.

A driver is run as `python DRIVER URL MODEL` by the interpreter that has the client. It prints a line of JSON for each
check: its name, whether it passed, and a detail. A check returns the detail, and raises where it fails.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable

# Clients ask home about updates and costs, and send telemetry. None of that can be reached, or should be.
os.environ |= {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "DO_NOT_TRACK": "1",
}

URL, MODEL = sys.argv[1].rstrip("/"), sys.argv[2]
KEY = "none"

CITY, DEGREES = "Paris", 21
ANSWER = "scripted model"  # a part of it
ASK = "Say who you are."
ASK_TOOL = "What is the weather in Paris? Use the tool."
ASK_JSON = "Where is it how warm? Reply in JSON."
TOOL = "get_weather"
TOOL_RESULT = "sunny, 21 degrees"
# A system prompt as long as an agent's, so that a second turn is a small part of the prompt.
LONG = " ".join(f"Rule {n}: answer in one sentence and name no more than {n} cities." for n in range(300))

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
REPORT = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


def said(text: str | None, part: str = ANSWER) -> str:
    assert part in (text or ""), f"the answer is {text!r}"
    return str(text)


def called(name: str, city: object) -> str:
    assert (name, city) == (TOOL, CITY), f"the call is {name!r} for {city!r}"
    return f"{name}({city})"


def streamed(parts: Iterable[str | None]) -> str:
    """Checks that an answer comes in more than one piece."""
    pieces = [part for part in parts if part]
    assert len(pieces) > 1, f"the stream has {len(pieces)} pieces"
    return said("".join(pieces))


def reported(city: object, degrees: object) -> str:
    assert (city, degrees) == (CITY, DEGREES), f"the object is {city!r}, {degrees!r}"
    return f"{city}, {degrees}"


def share(cached: int | None, prompt: int) -> str:
    return f"{cached or 0}/{prompt}"


def run(checks: Iterable[Callable[[], str]]) -> None:
    for check in checks:
        try:
            line = {"check": check.__name__, "ok": True, "detail": check()}
        except Exception as error:
            line = {"check": check.__name__, "ok": False, "detail": f"{type(error).__name__}: {error}"[:600]}
        print(json.dumps(line), flush=True)
