"""Compiles constraints. Takes milliseconds to a second, on a thread that prepares requests.

A text is bounded before it is compiled, in a process of its own, by llguidance's limits and then by the system's.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from math import inf
from typing import Generic, TypeVar, assert_never

from rootstock.errors import ConstraintRefused, EngineStopped, InvalidParameter, Unsupported
from rootstock.text.constraints.asked import (
    Choice,
    Constraint,
    Grammar,
    JsonSchema,
    Lark,
    ReasoningBounds,
    Regex,
)
from rootstock.text.constraints.compiled import (
    CompiledConstraint,
    CompiledGrammar,
    CompiledReasoning,
    Marker,
    Matcher,
    mask_words,
)
from rootstock.text.constraints.host import HOST, GrammarLost, GrammarProcess, HostedVocabulary
from rootstock.text.constraints.json_schema import (
    compiler_schema,
    refuse_costly,
    refuse_more_parts,
    schemas_in,
    without_unsupported_patterns,
)
from rootstock.text.constraints.progress import Masked, first_line, mask_from
from rootstock.text.constraints.repetitions import largest_written_out, rule_depth, written_out
from rootstock.text.constraints.vocabulary import UnfitTokens, Vocabulary
from rootstock.text.limits import (
    MAX_GRAMMAR_CHARS,
    MAX_GRAMMAR_CHOICES,
    MAX_MARKER_CHARS,
    MAX_PATTERN_CHARS,
    MAX_RULE_DEPTH,
    MAX_SCHEMA_CHARS,
)
from rootstock.text.prompts.tenant_salt import ANYBODY, PromptOwner
from rootstock.text.tokenizer import ModelTokenizer

T = TypeVar("T")

_NO_ANSWER = "it allows no answer that this model's tokens can write"
_EXCERPT = re.compile(r"\n\s*\d+ \| ")
_KEPT_GRAMMARS = 24
_KEPT_MARKERS = 16
_MOST_REBUILD_S = 0.05  # all requests wait while a grammar is compiled for an answer that has begun


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
        self._hosted: HostedVocabulary | None = None
        self._closed = False
        self._compiling: set[GrammarProcess] = set()
        self._grammars: _LruCache[CompiledGrammar] = _LruCache(_KEPT_GRAMMARS)
        self._markers: _LruCache[Marker] = _LruCache(_KEPT_MARKERS)
        weakref.finalize(self, self._grammars.clear)  # a kept grammar refers to all of them

    def prepare(self) -> None:
        """Reads the vocabulary, so that the first constraint need not wait: 100,000 tokens take about a second."""
        try:
            self._host(self._read_vocabulary())
        except UnfitTokens:
            return  # each constraint is refused

    def close(self) -> None:
        """Ends the processes of its grammars. Answers that follow one fail."""
        self._closed = True
        for process in list(self._compiling):
            process.kill()
        with self._building:
            if self._hosted is not None:
                self._hosted.close()
        self._grammars.clear()

    def compile(self, constraint: Constraint, owner: PromptOwner = ANYBODY) -> CompiledConstraint:
        """Compiles a constraint, or returns the compiled one of an earlier request with the same salt.

        The time that it takes tells whether a grammar was compiled before: only to requests of one salt. Raises
        ConstraintRefused, InvalidParameter, Unsupported, CompilerBusy and EngineStopped. Do not call it on an event
        loop.
        """
        try:
            vocabulary = self._read_vocabulary()
        except UnfitTokens as error:
            remedy = f"Answers of this model's tokenizer cannot be constrained: {error}. Leave it out."
            raise Unsupported(constraint.param, remedy) from error
        grammar, param = constraint.grammar, constraint.param
        compiled = None
        if grammar is not None:
            key, kept = (
                (owner.salt, grammar),
                self._grammars,
            )  # not `self`: stored functions must not keep this compiler alive
            compiled = self._grammars.get(
                key,
                lambda: self._compiled(grammar, vocabulary, param, owner.tenant, lambda: kept.drop(key)),
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

    def _host(self, vocabulary: Vocabulary) -> HostedVocabulary:
        """Returns the vocabulary in the process that forks grammars."""
        with self._building:
            if self._closed:
                raise EngineStopped()
            if self._hosted is None:
                self._hosted = HOST.add(vocabulary, self._grammars.drop_oldest)
            return self._hosted

    def _compiled(
        self, grammar: Grammar, vocabulary: Vocabulary, param: str, tenant: str, drop: Callable[[], None]
    ) -> CompiledGrammar:
        """Compiles a grammar. `drop` takes it out of the kept ones, when its shared lexer is used up."""
        _refuse_large(grammar, param)
        hosted = self._host(vocabulary)
        process = HOST.fork(hosted)
        self._compiling.add(process)
        try:
            if self._closed:
                raise EngineStopped()
            kind, text, compiled_s, first = _compiled_in(process, grammar, vocabulary, param, tenant)
        except GrammarLost as error:
            if self._closed:
                raise EngineStopped() from error
            raise ConstraintRefused(param, str(error)) from error
        finally:
            self._compiling.discard(process)
        if first.forbidden.all():
            raise ConstraintRefused(
                param, "it allows the empty answer alone" if first.may_end else _NO_ANSWER
            )

        def rebuild() -> Matcher | None:
            drop()
            if compiled_s > _MOST_REBUILD_S:
                return None
            alone = HOST.fork(hosted)
            alone.answer(alone.ask({"do": "compile", "kind": kind}, text.encode()))
            return Matcher(alone)

        return CompiledGrammar(process, rebuild)

    def _reasoning(self, asked: ReasoningBounds, vocabulary: Vocabulary) -> CompiledReasoning:
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


class _LruCache(Generic[T]):
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

    def drop_oldest(self) -> bool:
        """Drops the value that was not used for the longest time. Returns False if there is none."""
        with self._lock:
            if not self._values:
                return False
            self._values.popitem(last=False)
            return True

    def clear(self) -> None:
        with self._lock:
            self._values.clear()


def _compiled_in(
    process: GrammarProcess, grammar: Grammar, vocabulary: Vocabulary, param: str, tenant: str
) -> tuple[str, str, float, Masked]:
    """Compiles a grammar in its process. Returns its kind and text as compiled, seconds, the first mask.

    Raises GrammarLost, ConstraintRefused and CompilerBusy.
    """
    kind, text = _kind_and_text(grammar)
    answer = process.compiled({"do": "compile", "kind": kind}, text.encode(), tenant)
    if "error" in answer.head and isinstance(grammar, JsonSchema) and not grammar.strict:
        kind, text = _kind_and_text(without_unsupported_patterns(grammar))
        answer = process.compiled({"do": "compile", "kind": kind}, text.encode(), tenant)
    if "unreadable" in answer.head:
        raise ConstraintRefused(param, first_line(str(answer.head["unreadable"])))
    if "error" in answer.head:
        raise ConstraintRefused(param, _reason(str(answer.head["error"])))
    compiled_s = answer.head.get("compiled_s")
    seconds = compiled_s if isinstance(compiled_s, float) else inf
    return kind, text, seconds, mask_from(mask_words(answer.body, vocabulary.mask_words), vocabulary)


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


def _kind_and_text(grammar: Grammar) -> tuple[str, str]:
    match grammar:
        case JsonSchema() as schema:
            return "json", json.dumps(compiler_schema(schema))
        case Regex(pattern):
            return "regex", pattern
        case Lark(text):
            return "lark", text
        case Choice(strings):
            return "regex", "|".join(map(_literal, strings))
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
            depth = rule_depth(text)
            if depth > MAX_RULE_DEPTH:
                reason = f"its rules lead {depth:,} deep into each other, more than {MAX_RULE_DEPTH:,}"
                raise ConstraintRefused(param, f"{reason}: make it less deep")
        case Choice():
            pass
        case other:
            assert_never(other)
