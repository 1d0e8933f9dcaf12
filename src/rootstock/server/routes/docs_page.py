"""The OpenAPI document, and the page of /docs: rendered from it on the server, with nothing from other sites."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

Json = Mapping[str, Any]

# The page has no script, and loads nothing.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
}
_NO_BOUND = 2**53  # the limits of integer types tell a reader nothing
_BOUNDS = {
    "minimum": "≥ {:g}", "exclusiveMinimum": "> {:g}", "maximum": "≤ {:g}", "exclusiveMaximum": "< {:g}",
    "minLength": "≥ {:,} characters", "maxLength": "≤ {:,} characters", "minItems": "≥ {:,} items",
    "maxItems": "≤ {:,} items", "maxProperties": "≤ {:,} entries",
}  # fmt: skip
_STYLE = """
:root { color-scheme: light dark; --line: light-dark(#d8dde3, #3a4048); --soft: light-dark(#f3f5f7, #23272d); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
pre { background: var(--soft); padding: .7rem 1rem; overflow-x: auto; border-radius: 6px; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
h3 { margin: 2rem 0 .3rem; font: 600 16px/1.5 ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem .25rem 0; text-align: left; }
td { vertical-align: top; }
th { font-weight: 600; }
summary { cursor: pointer; }
"""


def install_docs(app: FastAPI) -> None:
    """Serves /openapi.json without the status 422, which this server never answers, and /docs."""
    build = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _without_422(build())
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's way to change the document
    page = ""

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        nonlocal page
        page = page or page_of(document())
        return HTMLResponse(page, headers=_HEADERS)


def _without_422(document: dict[str, Any]) -> dict[str, Any]:
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document


def page_of(document: Json) -> str:
    title = f"{document['info']['title']} {document['info']['version']}"
    operations = [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    tags = dict.fromkeys(tag for _, _, operation in operations for tag in operation.get("tags", ["Other"]))
    sections = "".join(
        f"<h2>{escape(tag)}</h2>"
        + "".join(
            _operation(method, path, operation, document)
            for method, path, operation in operations
            if tag in operation.get("tags", ["Other"])
        )
        for tag in tags
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>"
        "<p>The routes of this server. A key, if the server has any, comes as <code>Authorization: Bearer KEY</code> "
        'or as <code>x-api-key: KEY</code>. For tools: <a href="openapi.json">openapi.json</a>.</p>'
        f"{sections}</html>"
    )


def _operation(method: str, path: str, operation: Json, document: Json) -> str:
    parts = [f"<h3>{method.upper()} {escape(path)}</h3>"]
    if described := operation.get("description"):
        parts.append(f"<p>{escape(described)}</p>")
    rows = [
        (f"{each['name']} ({each['in']})", _type_of(each["schema"]), each.get("description", ""))
        for each in operation.get("parameters", ())
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        rows += _fields_of(body, document)
    if rows:
        parts.append(_table(("field", "type", "meaning"), rows))
    statuses = [
        (status, ", ".join(answer.get("content", {})), answer["description"])
        for status, answer in sorted(operation["responses"].items())
    ]
    table = _table(("status", "type", "meaning"), statuses)
    parts.append(f"<details><summary>Answers</summary>{table}</details>")
    parts.append(f"<pre>{escape(_example(method, path, body, document))}</pre>")
    return "".join(parts)


def _table(head: tuple[str, ...], rows: list[tuple[str, str, str]]) -> str:
    cells = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(kind)}</td><td>{escape(meaning)}</td></tr>"
        for name, kind, meaning in rows
    )
    return f"<table><tr>{''.join(f'<th>{each}</th>' for each in head)}</tr>{cells}</table>"


def _fields_of(
    schema: Json, document: Json, prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, str, str]]:
    """Yields a row for each field of a body and of the objects in it."""
    found = _object_in(schema, document)
    required = found.get("required", ())
    for name, field in sorted(found.get("properties", {}).items(), key=lambda item: item[0] not in required):
        yield (
            f"{prefix}{name}",
            _type_of(field) + (" · required" if name in required else ""),
            _meaning_of(field),
        )
        if depth < 2:
            yield from _fields_of(field, document, f"{prefix}{name}.", depth + 1)


def _meaning_of(field: Json) -> str:
    return next(
        (each["description"] for each in (field, *field.get("anyOf", ())) if "description" in each), ""
    )


def _object_in(schema: Json, document: Json) -> Json:
    """Returns the schema of the first object that a reference in `schema` leads to, or else `schema`."""
    for each in (schema, *schema.get("anyOf", ())):
        if "$ref" in each:
            found: Json = document["components"]["schemas"][each["$ref"].rpartition("/")[2]]
            return found
    return schema


def _type_of(schema: Json) -> str:
    """Returns a type and its bounds in words."""
    if "$ref" in schema:
        return "object"
    if "anyOf" in schema:
        kinds = [_type_of(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        kind = f"list of {_type_of(schema.get('items', {}))}"
    bounds = [
        form.format(schema[name])
        for name, form in _BOUNDS.items()
        if abs(schema.get(name, _NO_BOUND)) < _NO_BOUND
    ]
    return ", ".join([kind, *bounds])


def _example(method: str, path: str, body: Json | None, document: Json) -> str:
    """Returns a curl command with the required fields of the body."""
    command = (
        f"curl http://HOST:PORT{path}"
        if method == "get"
        else f"curl -X {method.upper()} http://HOST:PORT{path}"
    )
    if body is None:
        return command
    found = _object_in(body, document)
    sent = {name: _example_of(name, found["properties"][name]) for name in found.get("required", ())}
    return f"{command} \\\n  -H 'Content-Type: application/json' \\\n  -d '{json.dumps(sent)}'"


def _example_of(name: str, schema: Json) -> Any:
    if name == "messages":
        return [{"role": "user", "content": "Hello"}]
    kind = schema.get("type", schema.get("anyOf", [{}])[0].get("type"))
    return {"integer": 16, "number": 1.0, "boolean": True, "array": [], "object": {}}.get(str(kind), "Hello")
