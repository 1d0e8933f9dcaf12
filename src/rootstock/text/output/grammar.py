"""Grammars of calls, for answers that must call a tool. They are in the Lark syntax of llguidance.

A grammar has the text that the model's own chat template writes, so that the answer is as likely as can be and the
parser reads it back. Marks that are one token of the tokenizer are that token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rootstock.errors import ConstraintRefused
from rootstock.text.constraints.asked import JsonSchema, Lark, Regex
from rootstock.text.constraints.json_schema import embedded_schemas, lark_of
from rootstock.text.conversation.types import Tool, ToolChoice
from rootstock.text.output.formats import (
    BareKeyCalls,
    Harmony,
    HeaderCalls,
    JsonCalls,
    OutputFormat,
    PythonicCalls,
    TaggedCalls,
    ValueType,
)
from rootstock.text.output.json_quoting import NotQuotable, quoted_lark
from rootstock.text.output.values import types_of

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_BARE_SCHEMA_KEYS = frozenset({"type", "title", "description", "default"})
_PYTHON_WORDS = {"string": "PYTHON_STRING", "boolean": '"True" | "False"', "null": '"None"'}
_BARE_RULES = {
    "array": "bare_list",
    "boolean": "BARE_BOOLEAN",
    "integer": "BARE_INTEGER",
    "null": "BARE_NULL",
    "number": "BARE_NUMBER",
    "object": "bare_object",
    "string": "bare_string",
}
_HEAD = "%llguidance {}"
_SPACE = r"SPACE: /[ \n]{0,2}/"
_INDEX = "\x00"  # stands for a number in a text
_ID = "\x01"  # stands for ten letters and digits
_OF_REGEX = re.compile(r"\\.|[/\n\r\t]|\\$", re.DOTALL)
# Characters that end a regular expression of Lark, with or without a backslash before them, and a last backslash.
_IN_SLASHES = {
    f"{slash}{char}": written
    for slash in ("", "\\")
    for char, written in {"/": r"\/", "\n": r"\n", "\r": r"\r", "\t": r"\t"}.items()
} | {"\\": ""}
_PATTERNS = {_INDEX: "/[0-9]{1,4}/", _ID: "/[a-z0-9]{10}/"}


def call_grammar(format: OutputFormat, tools: Sequence[Tool], choice: ToolChoice) -> str | None:
    """Returns a grammar of one or more calls of the tools that `choice` allows. None: the format has no calls.

    The grammar is of the text after the reasoning, up to the token that ends the answer. Raises InvalidParameter and
    ConstraintRefused for parameters that cannot be enforced.
    """
    allowed = _enforceable([tool for tool in tools if not choice.names or tool.name in choice.names])
    if not format.has_calls or not allowed:
        return None
    return _GrammarWriter(format).of(allowed, parallel=choice.parallel)


def call_or_answer_grammar(
    format: OutputFormat, tools: Sequence[Tool], choice: ToolChoice, answer: JsonSchema, param: str
) -> str | None:
    """Returns a grammar of an answer that follows a schema, or of calls. None: the format has no calls.

    All is allowed behind the mark that opens a call. In a format without such a mark, calls follow their grammar.
    Raises InvalidParameter and ConstraintRefused.
    """
    openings = _openings(format)
    if openings is None or not tools:
        return None
    grammar = _GrammarWriter(format)
    if all(openings):
        return grammar.of_openings(openings, lark_of(answer, param))
    return grammar.of(_enforceable(tools), parallel=choice.parallel, answer=lark_of(answer, param))


def _openings(format: OutputFormat) -> tuple[str, ...] | None:
    """Returns the texts with which calls begin, "" if a call begins without one. None: there are no such calls."""
    if isinstance(format.shape, Harmony):
        return None  # calls have a channel of their own
    match format.shape.calls:
        case None:
            return None
        case HeaderCalls() | TaggedCalls() as calls:
            return tuple(dict.fromkeys((calls.section[0] or calls.opening, calls.opening)))
        case calls:
            return (calls.opening,)


def _enforceable(tools: Sequence[Tool]) -> list[Tool]:
    """Returns tools whose parameters can be part of a grammar."""
    with_schema = [tool for tool in tools if tool.parameters is not None]
    asked = [(tool.parameters, f"tools.{tool.name}", tool.strict) for tool in with_schema]
    parameters = iter(embedded_schemas(asked))
    return [tool if tool.parameters is None else replace(tool, parameters=next(parameters)) for tool in tools]


class _GrammarWriter:
    def __init__(self, format: OutputFormat) -> None:
        self._format = format
        self._rules: list[str] = []
        names = sorted(format.tokens, key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, names))) if names else None

    def of_openings(self, openings: Sequence[str], answer: str) -> str:
        """Returns a grammar of an answer, or of any text behind one of the openings of calls."""
        calls = [f"{self._text(opening)} rest" for opening in openings]
        start = f"start: SPACE ({' | '.join([*calls, 'answer'])})"
        rules = [f"answer: {answer}", "rest: (REST | <[*]>)*", "REST: /(?s:.+)/", _SPACE]
        return "\n".join([_HEAD, start, *rules, ""])

    def of(self, tools: Sequence[Tool], *, parallel: bool, answer: str | None = None) -> str:
        """Returns a grammar of calls, or of calls and an answer."""
        calls = [self._rule(f"call_{i}", self._call(tool, f"call_{i}")) for i, tool in enumerate(tools)]
        call = self._rule("call", " | ".join(calls))
        before, between, after = self._around()
        many = f"{call} ({self._text(between)} {call})*" if parallel and between is not None else call
        # In a header of gpt-oss, which the prompt begins, every character counts.
        space = "" if isinstance(self._format.shape, Harmony) else "SPACE"
        start = f"start: {space} {self._text(before)} {many} {self._text(after)}"
        if answer is not None:
            start += f" | {space} {self._rule('answer', answer)}"
        return "\n".join([_HEAD, start, _SPACE, *self._rules, ""])

    def _rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name

    def _text(self, text: str) -> str:
        """Returns a text as a sequence of strings and tokens."""
        pieces: list[str] = []
        at = 0
        for match in self._token.finditer(text) if self._token else ():
            pieces += [text[at : match.start()], f"<[{self._format.tokens[match[0]]}]>"]
            at = match.end()
        pieces.append(text[at:])
        written = [piece if i % 2 else " ".join(_strings(piece)) for i, piece in enumerate(pieces) if piece]
        return " ".join(written) or '""'

    def _around(self) -> tuple[str, str | None, str]:
        """Returns the texts before the calls, between two (None: there is one only) and after them."""
        if isinstance(self._format.shape, Harmony):
            return "", None, ""
        match self._format.shape.calls:
            case JsonCalls(array=True) as calls:
                return f"{calls.opening}{calls.padding}[", ", ", f"]{calls.padding}{calls.closing}"
            case JsonCalls() as calls:
                before, after = f"{calls.opening}{calls.padding}", f"{calls.padding}{calls.closing}"
                return before, (f"{after}\n{before}" if calls.closing else "; "), after
            case HeaderCalls() as calls:
                return calls.section[0], calls.separator, calls.section[1]
            case TaggedCalls() as calls:
                begin, end = calls.section
                if calls.section_holds == "one call":
                    return (
                        begin + calls.newline,
                        f"{calls.newline}{end}\n{begin}{calls.newline}",
                        calls.newline + end,
                    )
                # No text after a call begins another one: the lexer takes the longest that still fits.
                return (begin + calls.newline, "", end) if begin else ("", calls.newline, "")
            case PythonicCalls() as calls:
                return f"{calls.opening}[", ", ", f"]{calls.closing}"
            case BareKeyCalls() | None:
                return "", "", ""

    def _call(self, tool: Tool, rule: str) -> str:
        if isinstance(self._format.shape, Harmony):
            start = self._rule(f"{rule}_start", f"{self._text('<|start|>assistant')} | {self._text('')}")
            header = self._text(f" to=functions.{tool.name}<|channel|>commentary json<|message|>")
            return f"{start} {header} {self._arguments(rule, tool)}"
        match self._format.shape.calls:
            case JsonCalls() as calls:
                head = f'{{"{calls.name_key}": {json.dumps(tool.name)}, "{calls.arguments_key}": '
                if not calls.name_key:
                    head = f"{{{json.dumps(tool.name)}: "
                return f"{self._text(head)} {self._arguments(rule, tool)} {self._text('}')}"
            case HeaderCalls() as calls:
                header = calls.written_header.format(name=tool.name, index=_INDEX, id=_ID)
                arguments = self._arguments(rule, tool)
                head = f"{calls.opening}{header}{calls.header_end}"
                return f"{self._text(head)} {arguments} {self._text(calls.tail + calls.closing)}"
            case TaggedCalls() as calls:
                return self._tagged(calls, tool, rule)
            case PythonicCalls() if tool.grammar is not None:
                return f"{self._text(f'{tool.name}(input=')} {self._json_input(rule, tool)} {self._text(')')}"
            case PythonicCalls():
                self._python_values()
                items = self._items(
                    tool,
                    rule,
                    lambda key, each: f"{self._text(f'{key}=')} ({self._python(tool, key, each)})",
                    ", ",
                )
                return f"{self._text(f'{tool.name}(')} {items} {self._text(')')}"
            case BareKeyCalls() as calls if tool.grammar is not None:
                head, quote = f"{calls.opening}call:{tool.name}{{input:", self._text(calls.quote)
                value = f"{quote} {self._input(rule, tool.grammar)} {quote}"
                return f"{self._text(head)} {value} {self._text('}' + calls.closing)}"
            case BareKeyCalls() as calls:
                self._bare_values(calls)
                items = self._items(
                    tool,
                    rule,
                    lambda key, _: f"{self._text(f'{key}:')} ({self._bare(calls, tool, key)})",
                    ",",
                )
                head = f"{calls.opening}call:{tool.name}{{"
                return f"{self._text(head)} {items} {self._text('}' + calls.closing)}"
            case None:
                raise AssertionError("the format has calls")

    def _arguments(self, rule: str, tool: Tool) -> str:
        """Returns all arguments of a call as JSON."""
        if tool.grammar is None:
            return self._json(rule, tool, _schema(tool))
        head = self._text('{"input": ')
        return f"{head} {self._json_input(rule, tool)} {self._text('}')}"

    def _json(self, rule: str, tool: Tool, schema: Mapping[str, Any]) -> str:
        settings = {**_SPACING, "lenient": not tool.strict}
        return self._rule(f"{rule}_json", f"%json {json.dumps({**schema, 'x-guidance': settings})}")

    def _json_input(self, rule: str, tool: Tool) -> str:
        """Returns the input of a custom tool as a string of JSON."""
        assert tool.grammar is not None
        try:
            quoted = Lark(quoted_lark(_lark(tool.grammar)))
        except NotQuotable as error:
            reason = f"the model writes its input as a string of JSON, in which {error} cannot be enforced"
            raise ConstraintRefused(f"tools.{tool.name}", reason) from error
        quote = self._text('"')
        return f"{quote} {self._input(rule, quoted)} {quote}"

    def _input(self, rule: str, grammar: Lark | Regex) -> str:
        return self._rule(f"{rule}_input", f"%lark {{\n{_lark(grammar)}\n}}")

    def _tagged(self, calls: TaggedCalls, tool: Tool, rule: str) -> str:
        tag = calls.name_ends[0] + calls.tag_end if calls.name_ends[0].strip() else ""
        if calls.tag_end == "<|sep|>":
            tag = f'" index="{_INDEX}"<|sep|>'
        parts = [self._text(f"{calls.opening}{tool.name}{tag}{calls.newline}")]
        schema = _schema(tool)
        required = _required(schema)
        for i, (key, of_key) in enumerate(_properties(schema).items()):
            item = self._rule(f"{rule}_{i}", self._tagged_item(calls, tool, key, of_key, f"{rule}_{i}"))
            parts.append(item if key in required else f"{item}?")
        last = calls.newline if calls.section[0] and calls.section_holds == "all calls" else ""
        return " ".join([*parts, self._text(calls.closing + last)])

    def _tagged_item(self, calls: TaggedCalls, tool: Tool, key: str, of_key: Any, rule: str) -> str:
        schema = _schema(tool)
        types = types_of(schema, key)
        is_string = "string" in types
        kind = ValueType.STRING if is_string else ValueType.JSON
        ends = [end for end, of in calls.key_ends.items() if of in (kind, ValueType.OF_SCHEMA)]
        named = {"number" if type == "integer" else type for type in types}  # Kimi K3 names every number so
        end = next((end for end in ends if any(f'"{type}"' in end for type in named)), ends[0])
        between = calls.newline if calls.value_opening else ""
        head = self._text(f"{calls.key_opening}{key}{end}{between}{calls.value_opening}{calls.padding}")
        closing = calls.padding + calls.value_closing
        strings = _strings_of(of_key)
        if tool.grammar is not None:
            value = f"{self._input(rule, tool.grammar)} {self._text(closing)}"
        elif strings:
            value = f"({' | '.join(map(self._text, strings))}) {self._text(closing)}"
        elif is_string:
            value = self._free_text(rule, closing)
        else:
            value = f"{self._json(rule, tool, _with_definitions(of_key, schema))} {self._text(closing)}"
        return f"{head} {value} {self._text(calls.newline)}"

    def _free_text(self, rule: str, closing: str) -> str:
        """Returns any text and the closing after it. Text holds no token, and not the closing."""
        token = self._token.search(closing) if self._token else None
        if token is not None:
            padding = re.escape(closing[: token.start()])
            text = self._rule(f"{rule}_text".upper(), f"/(?s:.*){padding}/".replace("\n", "n"))
            return f"{text} {self._text(closing[token.start() :])}"
        return self._rule(f"{rule}_text[suffix={json.dumps(closing)}]", "/(?s:.*)/").partition("[")[0]

    def _items(self, tool: Tool, rule: str, item: Callable[[str, str], str], separator: str) -> str:
        """Returns the arguments, the required ones first, with separators between the ones that are present."""
        schema = _schema(tool)
        required = _required(schema)
        properties = _properties(schema)
        keys = sorted(properties, key=lambda key: key not in required)
        between = self._text(separator)
        made = [
            self._rule(
                f"{rule}_{i}",
                item(key, self._json(f"{rule}_{i}", tool, _with_definitions(properties[key], schema)))
                if separator != ","
                else item(key, ""),
            )
            for i, key in enumerate(keys)
        ]
        first = head = self._rule(f"{rule}_none", '""')
        tail = head
        for i in range(len(keys) - 1, -1, -1):
            is_required = keys[i] in required
            first = f"{made[i]} {tail}" + ("" if is_required else f" | {head}")
            head = self._rule(f"{rule}_first_{i}", first)
            after = f"{between} {made[i]} {tail}" + ("" if is_required else f" | {tail}")
            tail = self._rule(f"{rule}_next_{i}", after)
        return head

    def _python_values(self) -> None:
        if not any(rule.startswith("PYTHON_STRING:") for rule in self._rules):
            self._rule("PYTHON_STRING", r"""/'([^'\\\n]|\\([\\'nrt]|u[0-9a-f]{4}|x[0-9a-f]{2}))*'/""")

    def _python(self, tool: Tool, key: str, as_json: str) -> str:
        """Returns a value in JSON, or as Python writes it where the schema says no more than the type."""
        schema = _schema(tool)
        of_key = _properties(schema).get(key)
        choices = [as_json]
        if isinstance(of_key, Mapping) and of_key.keys() <= _BARE_SCHEMA_KEYS:
            types = types_of(schema, key)
            choices += [words for type, words in _PYTHON_WORDS.items() if type in types]
        return " | ".join(choices)

    def _bare(self, calls: BareKeyCalls, tool: Tool, key: str) -> str:
        """Returns a value of the types that the schema of a parameter names. Its inside is free."""
        schema = _schema(tool)
        if strings := _strings_of(_properties(schema).get(key)):
            quote = self._text(calls.quote)
            return f"{quote} ({' | '.join(map(self._text, strings))}) {quote}"
        return " | ".join(sorted({_BARE_RULES[type] for type in types_of(schema, key)}))

    def _bare_values(self, calls: BareKeyCalls) -> None:
        if any(rule.startswith("bare:") for rule in self._rules):
            return
        quote = self._text(calls.quote)
        self._rule("bare_string", f"{quote} {self._free_text('bare', calls.quote)}")
        self._rule("bare", " | ".join(sorted(set(_BARE_RULES.values()))))
        self._rule("BARE_INTEGER", "/-?(0|[1-9][0-9]*)/")
        self._rule("BARE_NUMBER", r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/")
        self._rule("BARE_BOOLEAN", "/true|false/")
        self._rule("BARE_NULL", "/null/")
        self._rule("bare_list", '"[" (bare ("," bare)*)? "]"')
        self._rule("bare_object", '"{" (bare_member ("," bare_member)*)? "}"')
        self._rule("bare_member", 'BARE_KEY ":" bare')
        self._rule("BARE_KEY", "/[A-Za-z_][A-Za-z0-9_]*/")


def _strings(text: str) -> list[str]:
    pieces = re.split(f"([{_INDEX}{_ID}])", text)
    return [_PATTERNS.get(piece) or json.dumps(piece, ensure_ascii=False) for piece in pieces if piece]


def _schema(tool: Tool) -> dict[str, Any]:
    return {"type": "object", **(tool.parameters or {})}


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _required(schema: Mapping[str, Any]) -> frozenset[str]:
    required = schema.get("required")
    return (
        frozenset(key for key in required if isinstance(key, str))
        if isinstance(required, list)
        else frozenset()
    )


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema with the definitions of the schema around it, if it refers to any."""
    found = dict(schema) if isinstance(schema, Mapping) else {}
    if '"$ref"' not in json.dumps(found):
        return found
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **found}


def _strings_of(schema: Any) -> list[str]:
    """Returns the texts to which a schema limits a value; none if it may be anything else."""
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return []
    return values


def _lark(grammar: Lark | Regex) -> str:
    if isinstance(grammar, Lark):
        return grammar.grammar
    return f"start: /{_OF_REGEX.sub(_in_slashes, grammar.pattern)}/"


def _in_slashes(match: re.Match[str]) -> str:
    return _IN_SLASHES.get(match[0], match[0])
