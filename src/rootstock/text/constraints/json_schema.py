"""JSON schemas of requests: bounds on hostile ones, and small changes by which more of them can be enforced."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from rootstock.errors import ConstraintRefused, InvalidParameter, MissingParameter
from rootstock.text.constraints.asked import JsonSchema
from rootstock.text.constraints.depths import Depths
from rootstock.text.constraints.host import supported_patterns
from rootstock.text.constraints.repetitions import written_out
from rootstock.text.constraints.text_formats import ENFORCED_BY_COMPILER, TEXT_FORMATS, TextFormat
from rootstock.text.limits import (
    MAX_GRAMMAR_CHARS,
    MAX_PATTERN_PROPERTIES,
    MAX_REF_CHAIN,
    MAX_REF_DEPTH,
    MAX_SCHEMA_ALL_OF,
    MAX_SCHEMA_CHARS,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMA_LEAST,
    MAX_SCHEMA_OPTIONAL,
    MAX_SCHEMA_REQUIRED,
    MAX_SCHEMA_VALUES,
    MAX_WRITTEN_OUT,
    refuse_large,
    refuse_surrogates,
)

# Formats of strings that are enforced. A format is an annotation by the specification: others are dropped.
FORMATS = ENFORCED_BY_COMPILER | TEXT_FORMATS.keys()

# Texts for readers. They can be most of a tool's schema, and would count towards the limits of a grammar.
_ANNOTATIONS = frozenset({"$comment", "default", "deprecated", "description", "example", "examples", "title"})
_LEAST = ("minItems", "minLength", "minProperties")
_MAPS_OF_SCHEMAS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_LISTS_OF_SCHEMAS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_SCHEMAS = frozenset(
    {
        "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames",
        "then", "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip

_JSON_IN_LARK = re.compile(r"%json\s*")

# Between two tokens of JSON. A model must not write white space for ever: this holds 31 levels of two spaces.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"


def json_schema_of(schema: Any, param: str, *, strict: bool = True) -> JsonSchema:
    """Checks a schema that a client sent: an object, a boolean, or either as JSON text.

    Raises InvalidParameter or ConstraintRefused. Whether the schema can be enforced shows when it is compiled.
    """
    if isinstance(schema, str):
        schema = _parsed(schema, param)
    if not isinstance(schema, Mapping | bool):
        raise InvalidParameter(param, schema, "a JSON schema, which is an object")
    refuse_large(schema, param, MAX_SCHEMA_CHARS)
    _refuse_complex(schema, param)
    _refuse_references(schema, param)
    try:
        text = json.dumps(_enforceable(schema), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    except ValueError as error:  # a number that JSON lacks
        raise InvalidParameter(param, schema, "JSON, without NaN and infinite numbers") from error
    refuse_surrogates(text, param)
    return JsonSchema(text, strict)


def named_schema(format: Mapping[str, Any], path: str) -> JsonSchema:
    """Reads `schema` and `strict`, which OpenAI's APIs write beside a name. Not strict unless it says so.

    Raises InvalidParameter, MissingParameter and ConstraintRefused.
    """
    strict = format.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidParameter(f"{path}.strict", strict, "true or false")
    if format.get("schema") is None:
        raise MissingParameter(f"{path}.schema")
    return json_schema_of(format["schema"], f"{path}.schema", strict=bool(strict))


def schemas_in(grammar: str, param: str) -> list[Any]:
    """Returns the schemas that a Lark grammar holds as `%json`. Raises ConstraintRefused."""
    found, decoder = [], json.JSONDecoder()
    begin = _JSON_IN_LARK.search(grammar)
    while begin is not None:
        at = begin.end()
        if grammar.startswith(("{", "["), at):
            try:
                schema, at = decoder.raw_decode(grammar, at)
            except (ValueError, RecursionError):
                raise ConstraintRefused(param, "a '%json' is not followed by JSON") from None
            found.append(schema)
        begin = _JSON_IN_LARK.search(grammar, at)
    return found


def embedded_schemas(asked: Sequence[tuple[Any, str, bool]]) -> list[dict[str, Any]]:
    """Returns schemas for `%json` in a Lark grammar, each given with its field and whether it is strict.

    For schemas that are not strict, drops patterns that cannot be enforced. Raises InvalidParameter and
    ConstraintRefused.
    """
    schemas = [json_schema_of(schema, param, strict=strict) for schema, param, strict in asked]
    chars = sum(len(schema.text) for schema in schemas)
    if chars > MAX_GRAMMAR_CHARS:
        reason = f"all schemas have {chars:,} characters together, more than {MAX_GRAMMAR_CHARS:,}"
        raise ConstraintRefused(asked[0][1], reason)
    for schema, (_, param, _) in zip(schemas, asked, strict=True):
        refuse_costly(json.loads(schema.text), param)
    return [json.loads(text) for text in _without_unsupported_patterns(schemas)]


def compiler_schema(schema: JsonSchema) -> dict[str, Any]:
    """Returns a schema as llguidance takes it: an object, with its options."""
    parsed: Any = json.loads(schema.text)
    if isinstance(parsed, bool):
        parsed = {} if parsed else {"anyOf": []}
    options = {"whitespace_flexible": True, "whitespace_pattern": _WHITE_SPACE, "lenient": not schema.strict}
    return {**parsed, "x-guidance": options}


def lark_of(schema: JsonSchema, param: str) -> str:
    """Returns a schema as a term of a Lark grammar. Raises ConstraintRefused."""
    refuse_costly(json.loads(schema.text), param)
    [text] = _without_unsupported_patterns([schema])
    return f"%json {json.dumps(compiler_schema(JsonSchema(text, schema.strict)))}"


def without_unsupported_patterns(schema: JsonSchema) -> JsonSchema:
    """Drops the patterns that llguidance cannot read, if the schema is not strict. Check their size before."""
    [text] = _without_unsupported_patterns([schema])
    return JsonSchema(text, schema.strict)


def _without_unsupported_patterns(schemas: Sequence[JsonSchema]) -> list[str]:
    """Returns the texts of schemas. Those that are not strict lose the patterns that llguidance cannot read."""
    found: dict[str, bool] = {}

    def note(schema: dict[str, Any]) -> None:
        if isinstance(pattern := schema.get("pattern"), str):
            found[pattern] = True

    def drop(schema: dict[str, Any]) -> None:
        if isinstance(pattern := schema.get("pattern"), str) and not found[pattern]:
            del schema["pattern"]

    parsed = [None if schema.strict else json.loads(schema.text) for schema in schemas]
    for each in parsed:
        _changed(each, note)
    found.update(zip(list(found), supported_patterns(list(found)), strict=True))
    if all(found.values()):
        return [schema.text for schema in schemas]
    return [
        schema.text
        if schema.strict
        else json.dumps(_changed(each, drop), separators=(",", ":"), ensure_ascii=False)
        for schema, each in zip(schemas, parsed, strict=True)
    ]


def refuse_costly(schema: Any, param: str) -> None:
    """Refuses schemas that take long to compile, or that no answer can follow. Raises ConstraintRefused.

    Looks at every value: a `$ref` may point to any.
    """
    parts, names = 0, 0
    least: float = 0
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting.extend(each)
        if not isinstance(each, Mapping):
            continue
        waiting.extend(each.values())
        if isinstance(pattern := each.get("pattern"), str):
            parts += written_out(pattern)
        if isinstance(by_pattern := each.get("patternProperties"), Mapping):
            parts += sum(map(written_out, by_pattern))
            _refuse_more(len(by_pattern), MAX_PATTERN_PROPERTIES, "names in one 'patternProperties'", param)
        if isinstance(all_of := each.get("allOf"), list):
            _refuse_more(len(all_of), MAX_SCHEMA_ALL_OF, "schemas in one 'allOf'", param)
        asked = [each.get(key) for key in _LEAST]
        least += sum(min(max(0, value), 10**18) for value in asked if isinstance(value, int | float))
        required = each.get("required")
        required = required if isinstance(required, list) else []
        names += len(required)
        if isinstance(properties := each.get("properties"), Mapping):
            optional = len(properties.keys() - {name for name in required if isinstance(name, str)})
            _refuse_more(
                optional, MAX_SCHEMA_OPTIONAL, "properties of one object that are not required", param
            )
    refuse_more_parts(parts, param)
    if least > MAX_SCHEMA_LEAST:
        keywords = ", ".join(f"'{name}'" for name in _LEAST)
        reason = f"the sum of its {keywords} is {least:,}, more than {MAX_SCHEMA_LEAST:,}"
        raise ConstraintRefused(param, reason)
    _refuse_more(names, MAX_SCHEMA_REQUIRED, "names in 'required'", param)


def _refuse_more(count: int, most: int, of: str, param: str) -> None:
    if count > most:
        raise ConstraintRefused(param, f"it has {count:,} {of}, more than {most:,}: make it smaller")


def refuse_more_parts(parts: int, param: str) -> None:
    if parts > MAX_WRITTEN_OUT:
        reason = f"its repetitions make some {parts:,} parts of it, more than {MAX_WRITTEN_OUT:,}"
        raise ConstraintRefused(param, reason)


def _parsed(text: str, param: str) -> Any:
    if len(text) > MAX_SCHEMA_CHARS:
        raise ConstraintRefused(
            param, f"its schema has {len(text):,} characters, more than {MAX_SCHEMA_CHARS:,}"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(param, text, "a JSON schema, or its JSON text") from error


def _refuse_complex(schema: Any, param: str) -> None:
    values, level = 0, [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        values += len(level)
        if values > MAX_SCHEMA_VALUES:
            raise ConstraintRefused(param, f"its schema has more than {MAX_SCHEMA_VALUES:,} values")
        level = [
            inner
            for each in level
            if isinstance(each, Mapping | list)
            for inner in (each.values() if isinstance(each, Mapping) else each)
        ]
        if not level:
            return
    raise ConstraintRefused(param, f"its schema is nested more than {MAX_SCHEMA_DEPTH} deep")


def _refuse_references(schema: Any, param: str) -> None:
    """Refuses references that lead back to themselves before any value, and long chains of references.

    A ring before a value ends each answer in the middle.
    """
    found = {reference: _resolved(reference, schema) for reference in _references(schema)}
    names = {id(target): reference for reference, target in found.items()}
    targets = {id(target): target for target in found.values()}

    def led_to(references: Callable[[Any], set[str]]) -> Callable[[int], set[int]]:
        # By the target, not by the reference: one has many spellings.
        return lambda target: {id(found[reference]) for reference in references(targets[target])}

    depths = Depths(led_to(_references_at))
    chain = max(map(depths.of, targets), default=0)
    if depths.ring is not None:
        raise ConstraintRefused(param, f"its '$ref' {names[depths.ring][:100]!r} leads back to itself")
    if chain > MAX_REF_CHAIN:
        reason = f"its '$ref's form a chain of {chain:,}, longer than {MAX_REF_CHAIN}: refer to the last one"
        raise ConstraintRefused(param, reason)
    depths = Depths(led_to(_references))
    depth = max(map(depths.of, targets), default=0)
    if depth > MAX_REF_DEPTH:
        reason = (
            f"its '$ref's lead {depth:,} deep into each other, more than {MAX_REF_DEPTH}: make it less deep"
        )
        raise ConstraintRefused(param, reason)


def _references(schema: Any) -> set[str]:
    found, waiting = set(), [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            found |= {each["$ref"]} if isinstance(each.get("$ref"), str) else set()
            waiting.extend(each.values())
        elif isinstance(each, list):
            waiting.extend(each)
    return found


def _references_at(schema: Any) -> set[str]:
    """Returns the references whose targets the value of this schema must follow itself."""
    found, waiting = set(), [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            found |= {each["$ref"]} if isinstance(each.get("$ref"), str) else set()
            waiting += each["allOf"] if isinstance(each.get("allOf"), list) else []
    return found


def _resolved(reference: str, root: Any) -> Any:
    """Returns the schema of a reference within `root`; None for any other."""
    if not reference.startswith("#"):
        return None
    found = root
    for name in unquote(reference[1:]).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _enforceable(schema: Any) -> Any:
    return _changed(schema, _rewrite)


def _rewrite(schema: dict[str, Any]) -> None:
    schema.pop("x-guidance", None)  # settings of the compiler
    for name in _ANNOTATIONS & schema.keys():
        del schema[name]
    format = schema.get("format")
    if isinstance(format, str) and format not in ENFORCED_BY_COMPILER:
        del schema["format"]
        if format in TEXT_FORMATS:
            _add_pattern(schema, TEXT_FORMATS[format])
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        # Booleans of JSON Schema's draft 4.
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and bound in schema:
            schema[exclusive] = schema.pop(bound)


def _add_pattern(schema: dict[str, Any], format: TextFormat) -> None:
    added: dict[str, Any] = {"pattern": f"^({format.pattern})$"}
    if format.most_chars is not None:
        added["maxLength"] = format.most_chars
    if added.keys().isdisjoint(schema):
        schema.update(added)
        return
    others = schema.get("allOf")
    schema["allOf"] = [*(others if isinstance(others, list) else ()), added]


def _changed(schema: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """Copies a schema and changes each schema within it."""
    if not isinstance(schema, Mapping):
        return schema
    copy = dict(schema)
    change(copy)
    for key, value in copy.items():
        if key in _MAPS_OF_SCHEMAS and isinstance(value, Mapping):
            copy[key] = {name: _changed(inner, change) for name, inner in value.items()}
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            copy[key] = [_changed(inner, change) for inner in value]
        elif key in _SCHEMAS:
            copy[key] = _changed(value, change)
    return copy
