"""Compiles constraints. Takes milliseconds to a second, on a thread that prepares requests.

The work is bounded by the size of the text and by llguidance's own limits, which count operations and no time.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar, assert_never

from llguidance import LLMatcher

from rootstock.engine.constraints.asked import Choice, Constraint, Grammar, JsonSchema, Lark, Reasoning, Regex
from rootstock.engine.constraints.compiled import (
    CompiledConstraint,
    CompiledGrammar,
    CompiledReasoning,
    Marker,
    parser_limits,
)
from rootstock.engine.constraints.json_schema import (
    compiler_schema,
    refuse_costly,
    refuse_more_parts,
    schemas_in,
    without_unsupported_patterns,
)
from rootstock.engine.constraints.progress import first_line, mask_of
from rootstock.engine.constraints.repetitions import largest_written_out, written_out
from rootstock.engine.constraints.vocabulary import UnfitTokens, Vocabulary
from rootstock.engine.limits import (
    MAX_GRAMMAR_CHARS,
    MAX_GRAMMAR_CHOICES,
    MAX_MARKER_CHARS,
    MAX_PATTERN_CHARS,
    MAX_SCHEMA_CHARS,
)
from rootstock.engine.tokenizer import ModelTokenizer
from rootstock.errors import ConstraintRefused, InvalidParameter, Unsupported

T = TypeVar("T")

_NO_ANSWER = "it allows no answer that this model's tokens can write"
_EXCERPT = re.compile(r"\n\s*\d+ \| ")
_KEPT_GRAMMARS = 64
_KEPT_MARKERS = 16


class ConstraintCompiler:
    """Compiler of constraints for one model, which keeps the last compiled ones. Any thread may use it."""

    def __init__(
        self, tokenizer: ModelTokenizer, vocab_size: int, eos_token_ids: tuple[int, ...] = ()
    ) -> None:
        """`vocab_size` is the number of logits; the tokenizer may know fewer tokens, or more."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._building = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._grammars: _Kept[CompiledGrammar] = _Kept(_KEPT_GRAMMARS)
        self._markers: _Kept[Marker] = _Kept(_KEPT_MARKERS)

    def prepare(self) -> None:
        """Reads the vocabulary, which the first constraint would wait for: about a second for 100,000 tokens."""
        try:
            self._read_vocabulary()
        except UnfitTokens:
            return  # each constraint is refused

    def compile(self, constraint: Constraint, salt: str = "") -> CompiledConstraint:
        """Compiles a constraint, or returns the compiled one of an earlier request with the same salt.

        The time that it takes tells whether a grammar was compiled before: only to requests of one salt. Raises
        ConstraintRefused, InvalidParameter and Unsupported. Not for an event loop.
        """
        try:
            vocabulary = self._read_vocabulary()
        except UnfitTokens as error:
            remedy = f"Answers of this model's tokenizer cannot be constrained: {error}. Leave it out."
            raise Unsupported(constraint.param, remedy) from error
        grammar, param = constraint.grammar, constraint.param
        compiled = None
        if grammar is not None:
            key = (salt, grammar)
            compiled = self._grammars.get(
                key, lambda: _compiled(grammar, vocabulary, param, lambda: self._grammars.drop(key))
            )
        reasoning = constraint.reasoning
        return CompiledConstraint(
            vocabulary, compiled, None if reasoning is None else self._reasoning(reasoning, vocabulary)
        )

    def _read_vocabulary(self) -> Vocabulary:
        with self._building:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
            return self._vocabulary

    def _reasoning(self, asked: Reasoning, vocabulary: Vocabulary) -> CompiledReasoning:
        def marker(text: str) -> Marker:
            if not 1 <= len(text) <= MAX_MARKER_CHARS:
                raise InvalidParameter("reasoning", text, f"markers of 1 to {MAX_MARKER_CHARS} characters")
            found = self._markers.get(text, lambda: Marker.of(text, vocabulary))
            if not found.ids:
                raise Unsupported(
                    "reasoning", f"The vocabulary cannot write the marker {text!r}. Leave it out."
                )
            return found

        budget = asked.budget_tokens
        if budget is not None and budget < 0:
            raise InvalidParameter("reasoning", budget, "a budget of 0 tokens or more")
        start = None if asked.start is None else marker(asked.start)
        return CompiledReasoning(marker(asked.end), start, asked.starts_inside, budget)


class _Kept(Generic[T]):
    """The values that were used last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()  # without the lock: others need not wait for it
        with self._lock:
            self._values[key] = value
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value

    def drop(self, key: Hashable) -> None:
        with self._lock:
            self._values.pop(key, None)


def _compiled(
    grammar: Grammar, vocabulary: Vocabulary, param: str, drop: Callable[[], None]
) -> CompiledGrammar:
    """Compiles a grammar. `drop` takes it out of the kept ones, when its shared lexer is used up."""
    _refuse_large(grammar, param)
    try:
        text = _grammar_text(grammar)
    except ValueError as error:  # a number that llguidance cannot read
        raise ConstraintRefused(param, first_line(str(error))) from error
    matcher = _matcher(text, vocabulary)
    if matcher.is_error() and isinstance(grammar, JsonSchema) and not grammar.strict:
        text = _grammar_text(JsonSchema(without_unsupported_patterns(grammar.text), strict=False))
        matcher = _matcher(text, vocabulary)
    _refuse_error(matcher, param)
    first = mask_of(matcher, vocabulary)
    _refuse_error(matcher, param)
    if first.forbidden.all():
        raise ConstraintRefused(param, "it allows the empty answer alone" if first.may_end else _NO_ANSWER)

    def rebuild() -> LLMatcher:
        drop()
        return _matcher(text, vocabulary)

    return CompiledGrammar(matcher, rebuild)


def _matcher(text: str, vocabulary: Vocabulary) -> LLMatcher:
    return LLMatcher(vocabulary.matcher_tokenizer, text, log_level=0, limits=parser_limits())


def _refuse_error(matcher: LLMatcher, param: str) -> None:
    if matcher.is_error():
        raise ConstraintRefused(param, _reason(matcher.get_error()))


def _reason(error: str) -> str:
    # Where the schema is part of a grammar, an excerpt of the grammar follows the reason.
    of_schema = error.partition("failed to compile JSON schema: ")[2]
    reason = first_line(_EXCERPT.split(of_schema)[0] if of_schema else error)
    if "not present in a registry" in reason:
        return "a '$ref' leads out of the schema, and nothing is fetched: put the schema under '$defs'"
    if "oneOf constraints are not supported" in reason:
        return "its 'oneOf' has alternatives that may hold at once: use 'anyOf', or send \"strict\": false"
    if reason.startswith("NoExtension"):
        return _NO_ANSWER
    if reason.startswith("Unimplemented keys"):
        return f'{reason}. Leave them out, or send "strict": false to have them ignored'
    return reason


def _grammar_text(grammar: Grammar) -> str:
    match grammar:
        case JsonSchema() as schema:
            return LLMatcher.grammar_from_json_schema(json.dumps(compiler_schema(schema)))
        case Regex(pattern):
            return LLMatcher.grammar_from_regex(pattern)
        case Lark(text):
            return LLMatcher.grammar_from_lark(text)
        case Choice(strings):
            return LLMatcher.grammar_from_regex("|".join(map(_literal, strings)))
        case other:
            assert_never(other)


def _literal(text: str) -> str:
    """Returns a regular expression of exactly this text."""
    return "(" + "".join(char if char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text) + ")"


def _refuse_large(grammar: Grammar, param: str) -> None:
    match grammar:
        case JsonSchema(text):
            chars, most = len(text), 2 * MAX_SCHEMA_CHARS  # escapes and brackets count here, too
        case Regex(text):
            chars, most = len(text), MAX_PATTERN_CHARS
        case Lark(text):
            chars, most = len(text), MAX_GRAMMAR_CHARS
        case Choice(strings):
            chars, most = sum(map(len, strings)), MAX_GRAMMAR_CHARS
            if not 1 <= len(strings) <= MAX_GRAMMAR_CHOICES:
                raise ConstraintRefused(
                    param, f"it has {len(strings):,} choices, and must have 1 to {MAX_GRAMMAR_CHOICES:,}"
                )
        case other:
            assert_never(other)
    if chars > most:
        raise ConstraintRefused(param, f"it has {chars:,} characters, more than {most:,}")
    match grammar:
        case JsonSchema(text):
            refuse_costly(json.loads(text), param)
        case Regex(pattern):
            refuse_more_parts(written_out(pattern), param)
        case Lark(text):
            refuse_costly(schemas_in(text, param), param)
            refuse_more_parts(largest_written_out(text), param)
        case Choice():
            pass
        case other:
            assert_never(other)
