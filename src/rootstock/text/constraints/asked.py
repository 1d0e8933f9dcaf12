"""Constraints as requests ask for them, before they are compiled.

The texts may come from any client. `json_schema_of` and `ConstraintCompiler.compile` bound their size.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that a schema accepts. Properties come in the order in which the schema names them.

    With `strict`, a schema with a keyword that cannot be enforced is refused. Otherwise that keyword is ignored.
    """

    text: str  # the schema as JSON
    strict: bool = True


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that a regular expression of Rust's `regex` crate matches as a whole, without look-around."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Lark:
    """Text of a context-free grammar in llguidance's dialect of Lark, which has `%json` for schemas inside.

    `<|name|>` is a token that has no text. Tokens with text are literals between quotes.
    """

    grammar: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several texts."""

    strings: tuple[str, ...]


Grammar = JsonSchema | Regex | Lark | Choice

ANY_JSON_OBJECT = JsonSchema('{"type":"object"}')


@dataclass(frozen=True, slots=True)
class ReasoningBounds:
    """Reasoning before the answer, which a grammar leaves alone and which a budget can end.

    `end` and `start` are the markers around it, as text or as the names of control tokens.
    """

    end: str
    start: str | None = None  # the answer may begin with it
    starts_inside: bool = False  # the prompt ends inside reasoning
    budget_tokens: int | None = None  # without the markers; when they are used up, the end marker is forced


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, reasoning that precedes it, or both. `param` is the request's field that errors name."""

    grammar: Grammar | None = None
    reasoning: ReasoningBounds | None = None
    param: str = field(default="response_format", compare=False)
