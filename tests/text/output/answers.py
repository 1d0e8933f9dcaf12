"""Generated answers: calls of made-up tools in every format, cut at random, and damaged."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from rootstock.text.conversation.types import Tool
from rootstock.text.output.deltas import (
    CallArguments,
    CallEnded,
    CallStarted,
    ContentDelta,
    Delta,
    Markup,
    ReasoningDelta,
)
from rootstock.text.output.formats import (
    OUTPUT_FORMATS,
    PLAIN,
    THINK,
    BareKeyCalls,
    Marked,
    OutputFormat,
    TaggedCalls,
)
from rootstock.text.output.parser import OutputParser

CALL_FORMATS = [format for format in OUTPUT_FORMATS.values() if format is not PLAIN]
PROMPTS = {"harmony": "<|start|>assistant"}

TOOLS = (
    Tool(
        "look_up",
        "Looks a word up",
        {
            "type": "object",
            "properties": {
                "word": {"type": "string"},
                "limit": {"type": "integer"},
                "share": {"type": "number"},
                "exact": {"type": "boolean"},
                "where": {"type": "object"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    ),
    Tool("list_birds", "Lists birds", {"type": "object", "properties": {}}),
    Tool("write-file", "Writes a file", {"type": "object", "properties": {"text": {"type": "string"}}}),
)
_PIECES = (
    *(
        "a",
        "hello",
        "zwei",
        " ",
        "  ",
        "\n",
        "\t",
        "é",
        "日本",
        "😀",
        '"',
        "'",
        "\\",
        "{",
        "}",
        "[",
        "]",
        "<",
        ">",
    ),
    *("null", "7", "=", ":", ",", "&amp;", "/", "```", "</", "<|", "|>", "\\n", "#", "(", ")", "\u2028", "%"),
)


def numbered() -> Callable[[int], str]:
    """Returns a source of "random" text that is the same each time."""
    numbers = count()
    return lambda chars: str(next(numbers)).zfill(chars)


def text(rng: random.Random, most: int = 12) -> str:
    return "".join(rng.choice(_PIECES) for _ in range(rng.randint(0, most)))


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 3 else 6)
    match kind:
        case 0:
            return rng.choice([True, False])
        case 1:
            return rng.randint(-(10**6), 10**6)
        case 2:
            return rng.choice([0.5, -1.25, 3.0, 1e20, 2.5e-7])
        case 3:
            return None
        case 6:
            return [value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
        case 7:
            return {f"k{i}": value(rng, depth + 1) for i in range(rng.randint(0, 3))}
        case _:
            return text(rng)


def arguments(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Returns a tool's name and arguments of the types of its schema."""
    made: dict[str, Callable[[], Any]] = {
        "word": lambda: text(rng),
        "limit": lambda: rng.randint(-99, 10**9),
        "share": lambda: rng.choice([0.5, -2.25, 1e-9, 12]),
        "exact": lambda: rng.choice([True, False]),
        "where": lambda: {f"k{i}": value(rng) for i in range(rng.randint(0, 3))},
        "tags": lambda: [text(rng) for _ in range(rng.randint(0, 3))],
        "note": lambda: rng.choice([None, "a note", "two\nlines"]),
    }
    name = rng.choice(TOOLS).name
    if name == "list_birds":
        return name, {}
    if name == "write-file":
        return name, {"text": text(rng, 60)}
    keys = rng.sample(sorted(made), rng.randint(0, len(made)))
    return name, {key: made[key]() for key in keys}


def suits(format: OutputFormat, args: Any) -> bool:
    """Returns whether the format can say a call: text in tags and between marks has no escapes."""
    match format.shape:
        case Marked(TaggedCalls() as calls):
            end = calls.value_closing
        case Marked(BareKeyCalls() as calls):
            end = calls.quote
        case _:
            return True
    return not any(end in text for text in _strings(args))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


def calls_for(format: OutputFormat, rng: random.Random, most: int = 3) -> list[tuple[str, dict[str, Any]]]:
    """Returns one or more calls that the format can say."""
    made: list[tuple[str, dict[str, Any]]] = []
    wanted = 1 if format.name in ("harmony", "gigachat3", "gigachat31") else rng.randint(1, most)
    while len(made) < wanted:
        name, args = arguments(rng)
        if suits(format, args):
            made.append((name, args))
    return made


def with_think(format: OutputFormat) -> OutputFormat:
    return format.with_reasoning(THINK)


def cut_at_random(rng: random.Random, text: str) -> list[str]:
    longest = rng.choice((1, 2, 4, 16, 64))
    pieces, at = [], 0
    while at < len(text):
        end = at + rng.randint(1, longest)
        pieces.append(text[at:end])
        at = end
    return pieces


def streamed(format: OutputFormat, pieces: Sequence[str], tools: Sequence[Tool] = TOOLS) -> list[Delta]:
    """Returns the deltas of an answer that comes in pieces, joined where they are of one kind."""
    parser = OutputParser(format, tools, PROMPTS.get(format.name, ""), numbered())
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return joined([*deltas, *parser.finish()])


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    result: list[Delta] = []
    for delta in deltas:
        before = result[-1] if result else None
        match before, delta:
            case (
                (ContentDelta(a), ContentDelta(b))
                | (ReasoningDelta(a), ReasoningDelta(b))
                | (Markup(a), Markup(b))
            ):
                result[-1] = type(delta)(a + b)
            case CallArguments(index, a), CallArguments(_, b):
                result[-1] = CallArguments(index, a + b)
            case _:
                result.append(delta)
    return result


def found_calls(deltas: Sequence[Delta]) -> list[tuple[str, Any]]:
    names = [delta.name for delta in deltas if isinstance(delta, CallStarted)]
    args = [delta.arguments for delta in deltas if isinstance(delta, CallEnded)]
    return list(zip(names, args, strict=True))


def damaged(format: OutputFormat, rng: random.Random, text: str) -> str:
    """Returns an answer with one to four faults: cuts, flips, lost and doubled markers, hostile nesting."""
    marks = sorted(mark for mark in format.marks if mark.strip()) or ["<tool_call>"]
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(text))
        mark = rng.choice(marks)
        match rng.randrange(9):
            case 0:
                text = text[:at]
            case 1:
                text = text[:at] + rng.choice('{}[]"\\<>|,:()\n x') + text[at + 1 :]
            case 2:
                text = text[:at] + mark + text[at:]
            case 3:
                text = text.replace(mark, "", 1)
            case 4:
                text = text.replace(mark, mark * rng.randint(2, 4), 1)
            case 5:
                text = text[:at] + mark[: rng.randint(1, len(mark))] + text[at:]
            case 6:
                end = rng.randint(at, len(text))
                text = text[:at] + text[end:]
            case 7:
                end = rng.randint(at, min(len(text), at + 60))
                text = text[:end] + text[at:end] * rng.randint(1, 3) + text[end:]
            case 8:
                text = text[:at] + rng.choice("[{(") * rng.choice((1, 50, 400)) + text[at:]
    return text


def calls_to_parse(parser: OutputParser, unit: str, times: int) -> int:
    """Counts the function calls in which a parser reads a text many times: a measure of work without a clock."""
    counted = 0

    def count(*_: object) -> None:
        nonlocal counted
        counted += 1

    sys.setprofile(count)
    try:
        for _ in range(times):
            parser.push(unit)
        parser.finish()
    finally:
        sys.setprofile(None)
    return counted
