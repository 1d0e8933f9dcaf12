"""Hostile schemas, regular expressions, grammars, choices and tools, of many shapes and sizes.

Each is small enough to be a request. Some are refused at once, some take long to compile, some exhaust the compiler's
stack or memory, some compile and are hostile in each mask, and some are harmless: a server must refuse or answer all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

Json = dict[str, Any]

# Bodies that ended or held up a server once.
REF_CHAIN, LARK_CHAIN, PATTERNS, PATTERN_PROPERTIES, NAMES = 2_500, 3_000, 120, 500, 5_000


def hostile_constraints(seed: int) -> Iterator[tuple[str, Json]]:
    """Yields names, and fields to merge into the body of a chat request. The same seed gives the same fields.

    Some texts hold half of a surrogate pair: write bodies with `json.dumps`, which escapes it.
    """
    rng = random.Random(seed)
    chain = ref_chain(REF_CHAIN)
    yield "a chain of references in response_format", as_response_format(chain)
    yield "a chain of references in a forced tool", as_tool(chain)
    yield "a chain of rules of Lark", {"guided_grammar": lark_chain(LARK_CHAIN)}
    yield "allOf of patterns", as_response_format(all_of_patterns(PATTERNS))
    yield "many patternProperties", as_response_format(pattern_properties(PATTERN_PROPERTIES))
    yield "many names and additionalProperties", as_response_format(many_names(NAMES))
    for name, schema in hostile_schemas(rng):
        where, place = rng.choice(list(PLACES.items()))
        yield f"{name}, in {where}", place(schema)
    for name, pattern in hostile_patterns(rng):
        where, place = rng.choice(list(PATTERN_PLACES.items()))
        yield f"{name}, in {where}", place(pattern)
    for name, grammar in hostile_grammars(rng):
        where, place = rng.choice(list(GRAMMAR_PLACES.items()))
        yield f"{name}, in {where}", place(grammar)
    yield from hostile_choices(rng)
    yield from hostile_tools(rng)


# ---- places of a schema, a pattern and a grammar in a request


def as_response_format(schema: Any, *, strict: bool = False) -> Json:
    inner = {"name": "n", "strict": strict, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


def as_tool(schema: Any, *, strict: bool = False) -> Json:
    function = {"name": "f", "strict": strict, "parameters": schema}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def as_argument(schema: Any) -> Json:
    return as_tool({"type": "object", "properties": {"a": schema}, "required": ["a"]})


def as_custom_tool(syntax: str, definition: str) -> Json:
    format = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    custom = {"type": "custom", "custom": {"name": "p", "format": format}}
    return {"tools": [custom], "tool_choice": {"type": "custom", "custom": {"name": "p"}}}


PLACES: dict[str, Callable[[Any], Json]] = {
    "response_format": as_response_format,
    "strict response_format": lambda schema: as_response_format(schema, strict=True),
    "guided_json": lambda schema: {"guided_json": schema},
    "structured_outputs": lambda schema: {"structured_outputs": {"json": schema}},
    "a tool": as_tool,
    "a strict tool": lambda schema: as_tool(schema, strict=True),
    "an argument of a tool": as_argument,
}
PATTERN_PLACES: dict[str, Callable[[str], Json]] = {
    "guided_regex": lambda pattern: {"guided_regex": pattern},
    "structured_outputs": lambda pattern: {"structured_outputs": {"regex": pattern}},
    "pattern": lambda pattern: as_response_format({"type": "string", "pattern": pattern}),
    "patternProperties": lambda pattern: as_response_format({"patternProperties": {pattern: {}}}),
    "a rule": lambda pattern: {"guided_grammar": f"start: R\nR: /{pattern.replace('/', '.')}/"},
    "a custom tool": lambda pattern: as_custom_tool("regex", pattern),
}
GRAMMAR_PLACES: dict[str, Callable[[str], Json]] = {
    "guided_grammar": lambda grammar: {"guided_grammar": grammar},
    "structured_outputs": lambda grammar: {"structured_outputs": {"grammar": grammar}},
    "a custom tool": lambda grammar: as_custom_tool("lark", grammar),
}


# ---- schemas


def ref_chain(length: int, link: Callable[[Json], Json] = lambda ref: ref) -> Json:
    definitions: Json = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$defs": definitions | {f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def all_of_patterns(count: int) -> Json:
    return {"type": "string", "allOf": [{"pattern": f"[a-z]*{i}[a-z]*{i % 7}.*"} for i in range(count)]}


def pattern_properties(count: int) -> Json:
    return {"type": "object", "patternProperties": {f"^a{i}.*b": {"type": "integer"} for i in range(count)}}


def many_names(count: int, *, length: int = 0) -> Json:
    properties = {f"p{i}{'x' * length}": {"type": "integer"} for i in range(count)}
    return {"type": "object", "properties": properties, "additionalProperties": {"type": "string"}}


def nested(depth: int, around: Callable[[Any], Json]) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = around(schema)
    return schema


def hostile_schemas(rng: random.Random) -> Iterator[tuple[str, Any]]:
    """Yields named schemas: chains, rings, products, nestings, names, numbers and texts."""
    yield from _chains(rng)
    yield from _products(rng)
    yield from _nestings()
    yield from _names(rng)
    yield from _numbers_and_texts(rng)
    for number in range(60):
        yield f"a random schema {number}", random_schema(rng, rng.randint(2, 6))


def _chains(rng: random.Random) -> Iterator[tuple[str, Any]]:
    links: dict[str, Callable[[Json], Json]] = {
        "allOf": lambda ref: {"allOf": [ref]},
        "anyOf": lambda ref: {"anyOf": [ref]},
        "anyOf with an end": lambda ref: {"anyOf": [ref, {"type": "null"}]},
        "oneOf": lambda ref: {"oneOf": [ref]},
        "items": lambda ref: {"type": "array", "items": ref},
        "prefixItems": lambda ref: {"type": "array", "prefixItems": [ref], "minItems": 1},
        "properties": lambda ref: {"type": "object", "properties": {"a": ref}, "required": ["a"]},
        "optional properties": lambda ref: {"type": "object", "properties": {"a": ref, "b": ref}},
        "additionalProperties": lambda ref: {"type": "object", "additionalProperties": ref},
        "patternProperties": lambda ref: {"type": "object", "patternProperties": {"^a": ref}},
        "allOf twice": lambda ref: {"allOf": [ref, ref]},
        "anyOf twice": lambda ref: {"anyOf": [ref, ref]},
        "a sibling": lambda ref: {**ref, "minLength": 1},
        "not": lambda ref: {"not": ref},
        "if": lambda ref: {"if": ref, "then": ref, "else": ref},
    }
    for name, link in links.items():
        for length in (20, 150, 900, 3_000):
            yield f"a chain of {length} by {name}", ref_chain(length, link)
    for length in (2, 100, 1_000):
        ring = {f"d{i}": {"$ref": f"#/definitions/d{(i + 1) % length}"} for i in range(length)}
        yield f"a ring of {length}", {"definitions": ring, "$ref": "#/definitions/d0"}
        values = {
            f"d{i}": {"type": "array", "items": {"$ref": f"#/definitions/d{(i + 1) % length}"}}
            for i in range(length)
        }
        yield f"a ring of {length} values", {"definitions": values, "$ref": "#/definitions/d0"}
    for fan in (2, 3, 8):
        levels = 10
        doubling = {
            f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"} for _ in range(fan)]} for i in range(levels)
        }
        yield (
            f"references that multiply {fan}-fold",
            {
                "$defs": doubling | {f"d{levels}": {"type": "integer"}},
                "$ref": "#/$defs/d0",
            },
        )
    chain = [{"$ref": f"#/x/{'/'.join(['a'] * i)}"} for i in range(1, 60)]
    yield "references into references", {"x": nested(60, lambda inner: {"a": inner}), "anyOf": chain}
    for target in (
        "#/$defs/ü~0~1%20",
        "#/allOf/0",
        "#/$defs",
        "#//",
        "#a",
        "",
        "other.json#/a",
        "#/" + "a/" * 9_000,
    ):
        yield (
            f"a reference to {target[:20]!r}",
            {"allOf": [{"$ref": target}], "$defs": {"ü~/ ": {"type": "null"}}},
        )
    shuffled = list(range(1, 800))
    rng.shuffle(shuffled)
    links_of = dict(zip([0, *shuffled], shuffled, strict=False))
    defs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{to}"}]} for i, to in links_of.items()}
    yield "a shuffled chain", {"$defs": defs | {f"d{shuffled[-1]}": {}}, "$ref": "#/$defs/d0"}


def _products(rng: random.Random) -> Iterator[tuple[str, Any]]:
    for keyword in ("allOf", "anyOf", "oneOf"):
        for count in (30, 120, 600):
            patterns = [{"type": "string", "pattern": f"^[a-f]*{i}[0-9]*x{i % 5}"} for i in range(count)]
            yield f"{keyword} of {count} patterns", {keyword: patterns}
            objects = [
                {"type": "object", "properties": {f"p{i}": {"const": i}}, "required": [f"p{i}"]}
                for i in range(count)
            ]
            yield f"{keyword} of {count} objects", {keyword: objects}
            ranges = [{"type": "integer", "minimum": -i, "maximum": 10**9 + i} for i in range(count)]
            yield f"{keyword} of {count} ranges", {keyword: ranges}
            yield (
                f"{keyword} of {count} divisors",
                {
                    "type": "integer",
                    keyword: [{"multipleOf": prime} for prime in range(3, 3 + count)],
                },
            )
    for inner in ("anyOf", "oneOf"):
        for count in (6, 10, 14, 40):
            pairs = [
                {inner: [{"properties": {f"a{i}": {"const": 0}}}, {"properties": {f"b{i}": {"const": 1}}}]}
                for i in range(count)
            ]
            yield f"allOf of {count} {inner} of pairs", {"type": "object", "allOf": pairs}
    yield (
        "anyOf within allOf within anyOf",
        nested(12, lambda inner: {"allOf": [{"anyOf": [inner, {"type": "object"}]}, {"anyOf": [inner, {}]}]}),
    )
    for lengths in ((1, 5_000), (3_000, 3_001), (60_000, 65_000)):
        least, most = lengths
        patterns = [{"pattern": "^(ab|c)*$"}, {"pattern": "a"}, {"minLength": least, "maxLength": most}]
        yield f"allOf of patterns and lengths {lengths}", {"type": "string", "allOf": patterns}
    for count in (2, 5, 9):
        ends = [{"pattern": f"^.*{rng.choice('abc')}.{{{10 + i}}}$"} for i in range(count)]
        yield f"{count} characters at positions from the end", {"type": "string", "allOf": ends}
    yield (
        "formats at once",
        {
            "allOf": [
                {"type": "string", "format": f} for f in ("date-time", "email", "uri", "hostname", "uuid")
            ]
        },
    )
    yield (
        "many formats",
        {
            "anyOf": [
                {"type": "string", "format": f} for f in ("date-time", "email", "uri", "ipv6", "duration")
            ]
            * 60
        },
    )


def _nestings() -> Iterator[tuple[str, Any]]:
    arounds: dict[str, Callable[[Any], Json]] = {
        "items": lambda inner: {"type": "array", "items": inner},
        "properties": lambda inner: {"type": "object", "properties": {"a": inner}},
        "allOf": lambda inner: {"allOf": [inner]},
        "anyOf": lambda inner: {"anyOf": [inner]},
        "not": lambda inner: {"not": inner},
        "if": lambda inner: {
            "if": inner,
            "then": {"const": 1},
            "else": inner if len(str(inner)) < 900 else {},
        },
        "prefixItems": lambda inner: {"prefixItems": [inner, {}]},
        "contains": lambda inner: {"contains": inner},
        "propertyNames": lambda inner: {"propertyNames": inner},
        "additionalProperties": lambda inner: {"additionalProperties": inner},
        "unknown keywords": lambda inner: {"x": [inner]},
    }
    for name, around in arounds.items():
        for depth in (12, 60, 120, 480):
            if name != "unknown keywords" or depth < 200:
                yield f"{depth} levels of {name}", nested(depth, around)
    yield (
        "arrays of arrays of exactly nine",
        nested(9, lambda inner: {"items": inner, "minItems": 9, "maxItems": 9}),
    )
    yield (
        "wide and deep",
        nested(7, lambda inner: {"properties": {"a": inner, "b": inner, "c": {"const": 1}}}),
    )


def _names(rng: random.Random) -> Iterator[tuple[str, Any]]:
    for count in (40, 300, 1_000, 3_000):
        yield f"{count} names and additionalProperties", many_names(count)
        yield f"{count} optional names", many_names(count) | {"additionalProperties": False}
        yield f"{count} required names", many_names(count) | {"required": [f"p{i}" for i in range(count)]}
        yield f"{count} patternProperties", pattern_properties(count)
        yield (
            f"{count} patternProperties and names",
            pattern_properties(count) | {"properties": {f"a{i}b": {} for i in range(count)}},
        )
        yield f"{count} names with minProperties", many_names(count) | {"minProperties": count // 2}
    yield "long names", many_names(20, length=10_000)
    yield "one long name", {"properties": {"x" * 200_000: {}}, "additionalProperties": True}
    yield (
        "names that differ at the end",
        many_names(400, length=0) | {"properties": {"x" * 300 + str(i): {} for i in range(400)}},
    )
    yield "names of any character", {"properties": {chr(i): {} for i in range(1, 1_500)}}
    yield (
        "names of emoji",
        {"properties": {chr(0x1F600 + i) * 9: {} for i in range(60)}, "required": ["\x00"]},
    )
    overlapping = {"".join(rng.choices("ab", k=12)) + ".*": {"const": i} for i in range(200)}
    yield "overlapping patternProperties", {"patternProperties": overlapping}
    yield "required names without properties", {"required": [f"p{i}" for i in range(3_000)]}
    yield "many dependentRequired", {"dependentRequired": {f"a{i}": [f"b{i}"] for i in range(900)}}


def _numbers_and_texts(rng: random.Random) -> Iterator[tuple[str, Any]]:
    for count in (1_000, 4_000, 9_000):
        yield f"an enum of {count} numbers", {"enum": list(range(count))}
        yield f"an enum of {count} texts", {"enum": [f"{rng.getrandbits(64):x}" for _ in range(count)]}
    yield "an enum of long texts", {"enum": ["".join(rng.choices("ab", k=4_000)) for _ in range(50)]}
    yield "an enum of objects", {"enum": [{"a": {"b": [i, {"c": i}]}} for i in range(2_000)]}
    yield "a long const", {"const": "é" * 100_000}
    yield "a deep const", {"const": nested(60, lambda inner: {"a": [inner]})}
    for least in (100, 5_000, 65_000, 10**6, 10**18):
        yield f"minItems {least}", {"type": "array", "items": {"type": "integer"}, "minItems": least}
        yield f"maxItems {least}", {"type": "array", "maxItems": least}
        yield f"minLength {least}", {"type": "string", "minLength": least}
        yield f"maxLength {least}", {"type": "string", "maxLength": least}
        yield f"minProperties {least}", {"type": "object", "minProperties": least}
        yield f"maxProperties {least}", {"type": "object", "maxProperties": least}
    for which, number in enumerate((10**20, 10**400, -(10**30), 1e308, 5e-324, 0, -1, 0.1)):
        yield f"minimum {number!r:.9} ({which})", {"type": "integer", "minimum": number}
        yield f"maximum {number!r:.9} ({which})", {"type": "number", "exclusiveMaximum": number}
        yield f"multipleOf {number!r:.9} ({which})", {"type": "number", "multipleOf": number}
    yield (
        "a range with a fine step",
        {"type": "number", "minimum": 1e-300, "maximum": 1e300, "multipleOf": 1e-9},
    )
    yield "divisors without a common one", {"type": "integer", "multipleOf": 999_983, "minimum": 0}
    for text in ("\x00", "\ud800", "\u202e", "\U0010ffff", "]]>", "*/", "%json {", '"', "\\"):
        yield f"a text with {text!r}", {"enum": [text * 20], "description": text, "title": text}
    yield "a schema that is false", False
    yield "a schema that is true", True
    yield "nothing is allowed", {"allOf": [{"type": "string"}, {"type": "null"}]}
    yield "not everything", {"not": {}}
    yield "conditions", {"allOf": [{"if": {"const": i}, "then": {"const": i}} for i in range(800)]}
    for name in ("date-time", "email", "uri", "hostname", "regex", "json-pointer", "x" * 9_000):
        text = {"type": "string", "format": name, "pattern": "^.*a.{12}$", "minLength": 3, "maxLength": 900}
        yield f"a format {name[:12]} beside a pattern", text


_KEYWORDS = (
    "type", "properties", "items", "required", "enum", "const", "pattern", "minLength", "maxLength", "minimum",
    "maximum", "multipleOf", "anyOf", "oneOf", "allOf", "not", "if", "then", "$ref", "$defs", "format", "minItems",
    "maxItems", "prefixItems", "additionalProperties", "patternProperties", "minProperties", "x-guidance",
    "exclusiveMinimum", "uniqueItems", "propertyNames", "definitions", "$id", "$schema", "$anchor", "contains",
)  # fmt: skip
_LEAVES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 1e308, 10**30, "", "string", "object", "array", "a{9}", "(", "#", "#/$defs/a",
    "date-time", "\x00", [], {}, ["a"], [1, "a", None], "^(a|b)*a(a|b){12}$", {"$ref": "#"},
)  # fmt: skip


def random_schema(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(_LEAVES)
    if rng.random() < 0.15:
        return [random_schema(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    schema: Json = {"type": rng.choice(("object", "array", "string", "number"))} if rng.random() < 0.6 else {}
    for keyword in rng.choices(_KEYWORDS, k=rng.randint(0, 5)):
        inner = random_schema(rng, depth - 1)
        by_name = (
            keyword in ("properties", "$defs", "patternProperties", "definitions") and rng.random() < 0.9
        )
        schema[keyword] = {"a": inner, "b": random_schema(rng, depth - 1)} if by_name else inner
    return schema


# ---- regular expressions


def hostile_patterns(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yields named regular expressions: repetitions, alternatives, depth, classes and states."""
    for count in (50, 1_000, 30_000, 10**9):
        yield f"{count} repetitions", f"a{{{count}}}"
        yield f"{count} repetitions of alternatives", f"(ab|c|[d-z]+){{{count}}}"
        yield f"up to {count} repetitions", f"([a-z]{{2}}x?){{0,{count}}}"
        yield f"at least {count} repetitions", f"(x|yz){{{count},}}"
    for depth in (5, 60, 300, 3_000):
        yield f"{depth} groups", "(" * depth + "a" + ")" * depth
        yield f"{depth} groups repeated", "(" * depth + "a" + "b)*" * depth
        yield f"{depth} groups with alternatives", "(a|" * depth + "b" + ")" * depth
        yield (
            f"{depth} groups doubled",
            "(" * depth + "a" + "){2}" * min(depth, 40) + ")" * max(0, depth - 40),
        )
    for distance in (8, 20, 200, 2_000):
        yield f"a character {distance} from the end", f"[ab]*a[ab]{{{distance}}}"
        yield f"a word {distance} from the end", f"(ab|ba)*abba(.|\\n){{{distance}}}"
    for count in (10, 200, 1_500):
        words = ["".join(rng.choices("abc", k=9)) for _ in range(count)]
        yield f"{count} alternatives", "|".join(words)
        yield f"{count} repeated alternatives", f"({'|'.join(words)})*x({'|'.join(words)})*"
        yield f"{count} stars", "".join(f"{word[0]}*" for word in words)
        yield f"{count} optional parts", "a?" * count + "a" * count
    for text in (
        "(",
        ")",
        "[",
        "[z-a]",
        "a{2,1}",
        "*",
        "(?=a)b",
        "(?<!a)b",
        r"\1",
        r"(a)\1",
        "(?P<n>a)",
        "",
        "\\",
    ):
        yield f"the pattern {text!r}", text
    for text in (
        r"\p{L}{300}",
        r"[^\x00]*",
        r"(?s:.)*a(?s:.){9}",
        r"[\u0000-\U0010ffff]{900}",
        "(?i)ſ{40}",
        "\x00",
    ):
        yield f"the characters {text!r}", text
    yield "a long text", "a" * 16_000
    yield "a long class", "[" + "".join(chr(i) for i in range(0x4E00, 0x6E00)) + "]*"
    yield "an exponential one", "(a+)+(a+)+(a+)+$"
    for number in range(30):
        yield f"a random pattern {number}", random_pattern(rng, rng.randint(2, 7))


def random_pattern(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(("a", "b", ".", "[a-z]", r"\d", "é", "[^a]", r"\s", ""))
    inner = random_pattern(rng, depth - 1)
    other = random_pattern(rng, depth - 1)
    count = rng.choice((2, 3, 9, 50))
    forms = (
        f"({inner}|{other})", f"({inner}){{{count}}}", f"({inner})*{other}", f"({inner}{other})+",
        f"({inner})?({other})?", f"({inner}){{{count},{2 * count}}}",
    )  # fmt: skip
    return rng.choice(forms)


# ---- grammars


def lark_chain(length: int) -> str:
    rules = [f"r{i}: r{i + 1}" for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])


def hostile_grammars(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yields named grammars: chains, recursion, ambiguity, products, nesting, and errors."""
    for length in (30, 400, 1_500, 6_000):
        yield f"a chain of {length} rules", lark_chain(length)
        yield f"a chain of {length} terminals", lark_chain(length).replace("r", "R").replace("staRt", "start")
        yield (
            f"a chain of {length} nullable rules",
            "start: r0\n"
            + "\n".join([*(f"r{i}: r{i + 1}? r{i + 1}?" for i in range(length)), f'r{length}: "a"?']),
        )
        yield (
            f"{length} rules of one",
            "start: "
            + " | ".join(f"r{i}" for i in range(length))
            + "\n"
            + "\n".join(f'r{i}: "{i}" start?' for i in range(length)),
        )
        yield f"{length} brackets", "start: " + "(" * length + '"a"' + ")" * length
        yield f"{length} optional brackets", "start: " + "[" * length + '"a"' + "]" * length
        yield f"{length} alternatives", "start: " + " | ".join(f'"a{i}"' for i in range(length))
        yield f"a sequence of {length}", "start: " + " ".join(f'"a{i}"' for i in range(length))
        yield f"{length} repetitions", f'start: x{{{length * 20}}}\nx: "a" | "aa"'
    recursions = {
        "left recursion": 'start: start "a" | "a"',
        "right recursion": 'start: "a" start | "a"',
        "itself": "start: start",
        "two rules in a ring": 'start: b "x"?\nb: start | "a"',
        "an ambiguous sum": 'start: start start | "a" | ""',
        "an ambiguous product": 'start: (start | "a") (start | "a"?) (start | "a")*',
        "palindromes": 'start: "a" start "a" | "b" start "b" | ""',
        "nullable for ever": 'start: x* "b"\nx: y*\ny: z?\nz: "a"?',
        "all lengths at once": "start: A A A A A A A A A A\nA: /a*/",
        "terminals that overlap": "start: (A | B | C | D)*\nA: /[a-z]+/\nB: /[a-m]+[0-9]/\nC: /.*x/\nD: /(ab|a)*/",
        "a terminal in itself": 'start: A\nA: "a" A | "b"',
        "lazy terminals": "start: (x | y)*\nx[lazy]: /.*a/\ny[lazy]: /.*b.{9}/",
        "a suffix": 'start: t\nt[suffix="ab"]: /(?s:.*)/',
        "terminals that are regular expressions of each other": "start: A\nA: B & ~C\nB: /a*/\nC: /b*/ | A",
        "a complement of a product": "start: A\nA: ~(/.*a.{14}/) & ~(/.*b.{14}/) & /[ab]*/",
        "not a grammar": "this is not a grammar",
        "a missing rule": "start: missing",
        "an unknown token": "start: <|no such token|> <[123456789]> <[0-999999999]>",
        "every token": "start: <[*]>*",
        "an unknown directive": '%import common.NUMBER\n%ignore " "\n%ignore /[ \\t]*/\nstart: NUMBER+',
        "options": '%llguidance {"no_forcing": true, "allow_invalid_utf8": true}\nstart: /(?s:.)*/',
        "wrong options": "%llguidance {]\nstart: x",
        "a grammar in a grammar": "start: %lark {\nstart: %lark {\nstart: /a*/\n}\n}",
        "a schema with a deep value": "start: %json " + '{"items": ' * 90 + "{}" + "}" * 90,
        "a schema with a chain": "start: %json "
        + '{"$ref": "#/$defs/d0", "$defs": {'
        + ", ".join(f'"d{i}": {{"$ref": "#/$defs/d{i + 1}"}}' for i in range(900))
        + ', "d900": {}}}',
        "many schemas": "start: " + " ".join('%json {"type": "object"}' for _ in range(300)),
        "unicode": 'start: "é\U0001f600" /[ñ-ö]{3}/ "\\u00e9" "\x00"',
        "a comment without end": "start: /* a",
        "a string without end": 'start: "a',
        "an empty grammar": "",
        "names": f'start: {"x" * 60_000}\n{"x" * 60_000}: "a"',
    }
    yield from recursions.items()
    for factor, depth in ((2, 30), (3, 12), (10, 6), (2, 12)):
        rules = [f"r{i}: {' '.join([f'r{i + 1}'] * factor)}" for i in range(depth)]
        yield f"{factor}^{depth} by rules", "\n".join(["start: r0", *rules, f'r{depth}: "a"?'])
        terminals = [f"R{i}: {' '.join([f'R{i + 1}'] * factor)}" for i in range(depth)]
        yield f"{factor}^{depth} by terminals", "\n".join(["start: R0", *terminals, f'R{depth}: "a"'])
    for number in range(30):
        yield f"a random grammar {number}", random_grammar(rng)


def random_grammar(rng: random.Random) -> str:
    count = rng.randint(1, 8)
    names = [f"r{i}" for i in range(count)]

    def term() -> str:
        return rng.choice(
            (rng.choice(names), '"a"', '"b"', "/[a-z]{1,9}/", "/.*c/", '""', "(" + rng.choice(names) + ")")
        )

    def rule() -> str:
        alternatives = []
        for _ in range(rng.randint(1, 4)):
            alternatives.append(
                " ".join(
                    term() + rng.choice(("", "", "?", "*", "+", "{3}")) for _ in range(rng.randint(1, 4))
                )
            )
        return " | ".join(alternatives)

    return "\n".join(["start: r0", *(f"{name}: {rule()}" for name in names)])


# ---- choices and tools


def hostile_choices(rng: random.Random) -> Iterator[tuple[str, Json]]:
    yield "no choice", {"guided_choice": []}
    yield "an empty choice", {"guided_choice": [""]}
    for count in (10, 1_000, 4_000, 50_000):
        texts = ["".join(rng.choices("abcé\n", k=20)) for _ in range(count)]
        yield f"{count} choices", {"guided_choice": texts}
        yield (
            f"{count} choices with a common beginning",
            {"guided_choice": ["x" * 20 + text for text in texts[:3_000]]},
        )
    yield "long choices", {"guided_choice": ["".join(rng.choices("ab", k=30_000)) for _ in range(4)]}
    yield "the same choice", {"guided_choice": ["a"] * 4_000}
    yield (
        "choices of regular expressions",
        {"guided_choice": [r".*", r"\x{110000}", "(", "[a", "a{9999999}", "|", ""]},
    )
    yield "choices of control characters", {"guided_choice": [chr(i) for i in range(600)]}


def hostile_tools(rng: random.Random) -> Iterator[tuple[str, Json]]:
    def tools(schemas: list[tuple[str, Any]], choice: Any = "required") -> Json:
        made = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in schemas]
        return {"tools": made, "tool_choice": choice}

    small = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
    for count in (25, 200, 1_000):
        yield f"{count} tools", tools([(f"t{i}", small) for i in range(count)])
        yield (
            f"{count} tools with patterns",
            tools(
                [(f"t{i}", {"properties": {"p": {"pattern": f"^[a-z]*{i}.{{9}}$"}}}) for i in range(count)]
            ),
        )
    for count in (20, 200):
        yield f"{count} tools with many names", tools([(f"t{i}", many_names(20)) for i in range(count)])
        yield f"{count} tools that are chains", tools([(f"t{i}", ref_chain(30)) for i in range(count)])
    yield "tools with hostile names", tools([("a" * 64, small), ("b-_", small)])
    yield (
        "tools beside a schema",
        tools([("f", pattern_properties(200))], "auto") | as_response_format(many_names(300)),
    )
    yield (
        "a tool with arguments that are references",
        tools([("f", ref_chain(500, lambda r: {"properties": {"a": r}}))]),
    )
    for number in range(20):
        schemas = [(f"t{i}", random_schema(rng, 5)) for i in range(rng.randint(1, 6))]
        objects = [(name, schema if isinstance(schema, dict) else {}) for name, schema in schemas]
        yield f"random tools {number}", tools(objects)
