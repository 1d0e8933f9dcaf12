"""Limits of clients' input: constants, and checks of JSON values.

The constants bound the work on a request before it is done; `docs/security.md` lists them. They lie far above the
needs of agents: a coding agent has some 30 tools of 20,000 tokens together and conversations of more than 1,000
messages.
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
MAX_IMAGES = 100  # of one request, if the model reads them
MAX_IMAGES_PIXELS = 400_000_000  # of all images of a request; one file has at most 40 million
MAX_IMAGES_SECONDS = 60  # to decode the images of a request
MAX_IMAGE_BYTES = 20 * 1024**2  # of a file
MAX_MARKS = 64  # `cache_control` of all messages: Anthropic's API takes 4
MAX_TOOL_CALLS = 1_024  # of one message
MAX_TOOLS = 1_024
MAX_TOOLS_CHARS = 4 * 1024**2  # of all tools together
MAX_TEMPLATE_CHARS = 64 * 1024  # of chat_template_kwargs
MAX_DOCUMENTS_CHARS = 4 * 1024**2
MAX_JSON_DEPTH = 128  # of a message, a tool, a template variable and of the arguments of a call
MAX_NAME_CHARS = 256  # of a tool, a role, a message's author
MAX_LABEL_CHARS = 1_024  # of `model`, `user`, `prompt_cache_key`
MAX_SCHEMA_CHARS = 256 * 1024  # of a JSON schema that answers must follow; coding agents' schemas have 10,000
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_VALUES = 16_384
MAX_SCHEMA_LEAST = 65_536  # minItems, minLength and minProperties of a schema together
MAX_SCHEMA_REQUIRED = 4_096  # names in all "required" of a schema
MAX_SCHEMA_OPTIONAL = 1_000  # properties of one object that are not required
MAX_SCHEMA_ALL_OF = 100  # members of one "allOf", which are combined with each other
MAX_PATTERN_PROPERTIES = 100  # of one object, which are compared with each other
MAX_REF_CHAIN = 64  # references that lead to each other at one value
MAX_REF_DEPTH = 512  # references within the targets of other references, at nested values
MAX_RULE_DEPTH = 1_000  # rules of a grammar that lead to each other
MAX_PATTERN_CHARS = 16 * 1024  # of a regular expression that answers must match
MAX_GRAMMAR_CHARS = 128 * 1024  # of a grammar, and of all choices together
MAX_GRAMMAR_CHOICES = 4_096
MAX_WRITTEN_OUT = 262_144  # parts of a grammar, or of a schema's patterns, after their repetitions
MAX_MARKER_CHARS = 256  # of a marker of reasoning
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
    """Refuses deep values: templates, and json.dumps within them, recurse into their arguments."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [inner for each in level for inner in _inside(each) if isinstance(inner, Mapping | list)]
        if not level:
            return
    raise InvalidParameter(path, value, f"JSON nested at most {MAX_JSON_DEPTH} deep")


def refuse_large(value: Any, path: str, most_chars: int) -> None:
    """Refuses large values. Counts the characters of keys and strings, and one for every other value."""
    chars, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        chars += len(each) if isinstance(each, str) else 1
        if isinstance(each, Mapping):
            chars += sum(map(len, each))
        if chars > most_chars:
            raise InvalidParameter(path, value, f"at most {most_chars:,} characters of JSON")
        waiting.extend(_inside(each))


def refuse_other_text(value: Any, path: str, most_chars: int | None) -> None:
    """Refuses a value that is neither absent nor a string of at most `most_chars`."""
    if value is None:
        return
    if not isinstance(value, str):
        raise InvalidParameter(path, value, "a string")
    if most_chars is not None and len(value) > most_chars:
        raise InvalidParameter(path, value, f"a string of at most {most_chars:,} characters")


def refuse_surrogates(text: str, param: str) -> None:
    """Refuses half of a surrogate pair: JSON can spell it, and tokenizers cannot take it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise InvalidParameter(param, half, "valid Unicode: this is half of a surrogate pair") from None


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()
