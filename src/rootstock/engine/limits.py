"""Limits of a request: constants, checks of JSON values, and the limits of an engine.

The constants bound the work on a request before it is done; `docs/security.md` lists them. They lie far above the
needs of agents: a coding agent has some 30 tools of 20,000 tokens together and conversations of more than 1,000
messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rootstock.engine.request import Request
from rootstock.engine.sampling import leaves_no_token
from rootstock.errors import CompletionTooLong, EmptyPrompt, InvalidParameter, PromptTooLong

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
MAX_SCHEMA_CHARS = 256 * 1024  # of a JSON schema that answers must follow; those of coding agents have 10,000
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_VALUES = 16_384
MAX_SCHEMA_LEAST = 65_536  # minItems, minLength and minProperties of a schema together
MAX_SCHEMA_REQUIRED = 4_096  # names in all "required" of a schema
MAX_SCHEMA_OPTIONAL = 1_000  # properties of one object that are not required
MAX_SCHEMA_ALL_OF = 100  # members of one "allOf", which are combined with each other
MAX_PATTERN_PROPERTIES = 100  # of one object, which are compared with each other
MAX_REF_CHAIN = 64  # references that lead to each other at one value
MAX_REF_DEPTH = 512  # references within what others lead to, at values below each other
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


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Properties of an engine that bound a request. A request that can never work is refused when it is submitted."""

    context_limit: int  # tokens of a prompt and its answer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    makes_text: bool  # False: there is no tokenizer, and no stop string can be found

    def end_tokens(self, request: Request) -> tuple[int, ...]:
        """Returns the tokens that end the answer."""
        return (*(() if request.stop.ignore_eos else self.eos_token_ids), *request.stop.stop_tokens)

    def max_tokens(self, request: Request) -> int:
        """Returns how many tokens the answer may have."""
        left = self.context_limit - len(request.tokens)
        return left if request.stop.max_tokens is None else request.stop.max_tokens

    def refuse_impossible(self, request: Request) -> None:
        """Raises EmptyPrompt, PromptTooLong, CompletionTooLong or InvalidParameter."""
        prompt, stop = len(request.tokens), request.stop
        if prompt == 0:
            raise EmptyPrompt()
        lowest, highest = int(request.tokens.min()), int(request.tokens.max())
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise InvalidParameter("prompt", wrong, f"token ids from 0 to {self.vocab_size - 1}")
        if prompt + (stop.max_tokens != 0) > self.context_limit:
            raise PromptTooLong(prompt, self.context_limit)
        if stop.max_tokens is not None:
            if stop.max_tokens < 0:
                raise InvalidParameter("max_tokens", stop.max_tokens, "0 or more")
            if prompt + stop.max_tokens > self.context_limit:
                raise CompletionTooLong(prompt, stop.max_tokens, self.context_limit)
        max_tokens = self.max_tokens(request)
        if stop.min_tokens > max_tokens:
            allowed = f"at most {max_tokens:,}, the most tokens that this answer can have"
            raise InvalidParameter("min_tokens", stop.min_tokens, allowed)
        if max_tokens > 0 and leaves_no_token(
            request.sampling, self.vocab_size, self.end_tokens(request), stop.min_tokens
        ):
            raise InvalidParameter(
                "logit_bias" if request.sampling.logit_bias else "min_tokens",
                dict(request.sampling.logit_bias) or stop.min_tokens,
                "such that some token may be chosen: bans, and end tokens before 'min_tokens', leave none",
            )
        if stop.stop_strings and not self.makes_text:
            raise InvalidParameter("stop", stop.stop_strings, "empty: this engine has no tokenizer")
