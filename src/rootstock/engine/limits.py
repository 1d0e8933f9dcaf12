"""Limits of a request: how many, how long, how deep. `docs/security.md` holds the table of them.

They bound the work on a request before it is done, and lie far above what agents send: a coding agent has some 30
tools of 20,000 tokens together and conversations of more than 1,000 messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rootstock.errors import InvalidParameter

MAX_BODY_DEPTH = 512  # lists and objects within each other: Python's parser fails at about 1,000
MAX_BODY_VALUES = 1_048_576  # list elements and fields: prompts of as many token ids
MAX_BODY_OBJECTS = 131_072  # lists, objects and fields of objects, which take ten times as long to parse
MAX_MESSAGES = 16_384
MAX_CONTENT_PARTS = 4_096  # of one message
MAX_MARKS = 64  # `cache_control` of all messages: Anthropic's API takes 4
MAX_TOOL_CALLS = 1_024  # of one message
MAX_TOOLS = 1_024
MAX_TOOLS_CHARS = 4 * 1024**2  # of all tools together
MAX_TEMPLATE_CHARS = 64 * 1024  # of chat_template_kwargs
MAX_DOCUMENTS_CHARS = 4 * 1024**2
MAX_JSON_DEPTH = 128  # of a message, a tool, a template variable and of the arguments of a call
MAX_NAME_CHARS = 256  # of a tool, a role, a message's author
MAX_LABEL_CHARS = 1_024  # of `model`, `user`, `prompt_cache_key`
MAX_PROMPTS = 2_048
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512  # of one stop string
MAX_STOP_TOKENS = 1_024
MAX_LOGIT_BIASES = 16_384
MAX_TOP_LOGPROBS = 20
MAX_LOGPROBS = 16 * 1024**2  # in the answer to one HTTP request
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MIN_REPETITION_PENALTY = 0.01


def refuse_more_than(most: int, values: list[Any], path: str) -> None:
    if len(values) > most:
        raise InvalidParameter(path, values, f"a list of at most {most:,}; it has {len(values):,}")


def refuse_deep(value: Any, path: str) -> None:
    """Templates, and json.dumps within them, recurse into what they are given."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [inner for each in level for inner in _inside(each) if isinstance(inner, Mapping | list)]
        if not level:
            return
    raise InvalidParameter(path, value, f"JSON nested at most {MAX_JSON_DEPTH} deep")


def refuse_large(value: Any, path: str, most_chars: int) -> None:
    """Counts characters of keys and strings, and one for every other value. Stops at the limit."""
    chars, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        chars += len(each) if isinstance(each, str) else 1
        if isinstance(each, Mapping):
            chars += sum(map(len, each))
        if chars > most_chars:
            raise InvalidParameter(path, value, f"at most {most_chars:,} characters of JSON")
        waiting.extend(_inside(each))


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()
