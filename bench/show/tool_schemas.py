"""Schemas of the parameters of 50 tools such as coding agents and MCP servers have, each as four generators write it.

The tools are of the kinds and sizes that clients send: files, shells, search, plans, browsers, issues, databases and
mail. Names and texts are this project's own. The generators differ as zod, pydantic, OpenAI's strict mode and plain
hand writing do: in optional values, definitions, and closed objects.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}


def few(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def short(most: int) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": most}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def listed(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    bounds = ({"minItems": least} if least else {}) | ({} if most is None else {"maxItems": most})
    return {"type": "array", "items": items, **bounds}


def thing(required: str = "", /, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required.split()}


def shaped(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def of_format(name: str) -> Schema:
    return {"type": "string", "format": name}


_PLACE = thing("line", line=few(1, 1_000_000), column=few(1, 10_000))
_EDIT = thing("old new", old=TEXT, new=TEXT, everywhere=FLAG)
_TASK = thing(
    "title state", title=short(200), state=one_of("open", "active", "done"), urgency=one_of("low", "high")
)
_CELL = thing("kind source", kind=one_of("code", "markdown"), source=TEXT)
_PERSON = thing("email", name=TEXT, email=of_format("email"))

TOOLS: dict[str, Schema] = {
    "read_file": thing("path", path=TEXT, offset=few(0, 10**6), limit=few(1, 5000)),
    "write_file": thing("path content", path=TEXT, content=TEXT, mode=shaped("^[0-7]{3,4}$")),
    "edit_file": thing("path old new", path=TEXT, old=TEXT, new=TEXT, everywhere=FLAG),
    "edit_many": thing("path edits", path=TEXT, edits=listed(_EDIT, 1, 50)),
    "apply_patch": thing("patch", patch=shaped(r"^\*\*\* Begin[^\x00]*$")),
    "list_folder": thing("path", path=TEXT, ignore=listed(TEXT), depth=few(1, 10)),
    "find_files": thing("pattern", pattern=TEXT, folder=TEXT, sort=one_of("name", "time", "size")),
    "search_text": thing(
        "pattern",
        pattern=TEXT,
        folder=TEXT,
        glob=TEXT,
        before=few(0, 50),
        after=few(0, 50),
        case=FLAG,
        show=one_of("lines", "files", "counts"),
        limit=few(1, 10000),
    ),
    "run_command": thing(
        "command", command=TEXT, timeout_ms=few(1, 600000), about=short(120), background=FLAG
    ),
    "run_program": thing(
        "argv", argv=listed(TEXT, 1), cwd=TEXT, env={"type": "object", "additionalProperties": TEXT}
    ),
    "read_output": thing("shell", shell=shaped("^sh-[0-9a-f]{4,8}$"), filter=TEXT),
    "stop_shell": thing("shell", shell=shaped("^sh-[0-9a-f]{4,8}$")),
    "write_tasks": thing("tasks", tasks=listed(_TASK, 1, 40)),
    "update_plan": thing(
        "steps",
        note=TEXT,
        steps=listed(thing("step state", step=TEXT, state=one_of("todo", "now", "done")), 1),
    ),
    "start_agent": thing(
        "about prompt kind", about=short(60), prompt=TEXT, kind=one_of("search", "review", "general")
    ),
    "fetch_page": thing("url", url=of_format("uri"), question=TEXT, raw=FLAG),
    "search_web": thing("query", query=short(400), only=listed(TEXT, 0, 20), never=listed(TEXT, 0, 20)),
    "edit_notebook": thing(
        "path cell", path=TEXT, index=few(0, 9999), cell=_CELL, how=one_of("replace", "insert")
    ),
    "ask_user": thing(
        "question", question=TEXT, choices=listed(thing("label", label=TEXT, about=TEXT), 2, 4)
    ),
    "find_symbol": thing("name", name=TEXT, kind=one_of("class", "function", "any"), at=_PLACE),
    "rename_symbol": thing("path at name", path=TEXT, at=_PLACE, name=shaped("^[A-Za-z_][A-Za-z0-9_]*$")),
    "show_problems": thing("", path=TEXT, severity=one_of("error", "warning", "hint")),
    "load_tool": thing("names", names=listed(shaped("^[a-z][a-z0-9_]{0,40}$"), 1, 10)),
    "remember": thing(
        "text", text=short(2000), tags=listed(short(30), 0, 8), scope=one_of("project", "person")
    ),
    "wait": thing("seconds", seconds={"type": "number", "minimum": 0, "maximum": 3600}),
    "git_log": thing("", repo=TEXT, most=few(1, 500), since=of_format("date"), author=TEXT),
    "git_commit": thing("message", message=short(5000), paths=listed(TEXT), amend=FLAG),
    "git_diff": thing("", base=shaped("^[0-9a-f]{7,40}$"), target=TEXT, context=few(0, 100)),
    "open_issue": thing(
        "repo title", repo=TEXT, title=short(256), body=TEXT, labels=listed(TEXT), people=listed(TEXT)
    ),
    "list_issues": thing("repo", repo=TEXT, state=one_of("open", "closed", "all"), page=few(1, 1000)),
    "review_pull": thing(
        "number verdict",
        number=few(1, 10**7),
        verdict=one_of("approve", "comment", "reject"),
        notes=listed(thing("path line text", path=TEXT, line=few(1, 10**6), text=TEXT)),
    ),
    "browse": thing("url", url=of_format("uri"), wait_for=one_of("load", "idle"), width=few(200, 4000)),
    "click": thing("selector", selector=TEXT, button=one_of("left", "right"), times=few(1, 3)),
    "fill_form": thing(
        "fields", fields=listed(thing("name value", name=TEXT, value={"type": ["string", "boolean"]}), 1)
    ),
    "press_key": thing(
        "key", key=one_of("Enter", "Tab", "Escape"), hold=listed(one_of("Shift", "Control"), 0, 2)
    ),
    "take_picture": thing("", whole=FLAG, quality=few(1, 100), kind=one_of("png", "jpeg")),
    "query_database": thing(
        "sql", sql=TEXT, values=listed({"type": ["string", "number", "boolean", "null"]}), limit=few(1, 10000)
    ),
    "describe_table": thing("table", schema=TEXT, table=shaped("^[a-z_][a-z0-9_]*$")),
    "send_message": thing(
        "channel text", channel=shaped("^#[a-z0-9-]{1,80}$"), text=short(4000), thread=TEXT
    ),
    "list_channels": thing("", cursor=TEXT, limit=few(1, 1000), archived=FLAG),
    "send_mail": thing(
        "to subject body", to=listed(_PERSON, 1, 50), cc=listed(_PERSON), subject=short(300), body=TEXT
    ),
    "book_meeting": thing(
        "title start end",
        title=short(200),
        start=of_format("date-time"),
        end=of_format("date-time"),
        people=listed(_PERSON),
        repeat=thing("every", every=one_of("day", "week"), times=few(1, 100)),
    ),
    "weather": thing("city", city=TEXT, unit=one_of("celsius", "fahrenheit"), days=few(1, 14)),
    "route": thing("from to", **{"from": TEXT, "to": TEXT, "by": one_of("car", "foot", "train")}),
    "locate": thing(
        "lat lon",
        lat={"type": "number", "minimum": -90, "maximum": 90},
        lon={"type": "number", "minimum": -180, "maximum": 180},
    ),
    "convert_money": thing(
        "amount from to", **{"amount": NUMBER, "from": shaped("^[A-Z]{3}$"), "to": shaped("^[A-Z]{3}$")}
    ),
    "make_chart": thing(
        "kind series",
        kind=one_of("bar", "line"),
        title=TEXT,
        series=listed(thing("name points", name=TEXT, points=listed(listed(NUMBER, 2, 2), 1, 200)), 1, 8),
    ),
    "add_entities": thing(
        "entities", entities=listed(thing("name kind facts", name=TEXT, kind=TEXT, facts=listed(TEXT)), 1)
    ),
    "think_on": thing(
        "thought number more", thought=TEXT, number=few(1, 100), more=FLAG, revises=few(1, 100)
    ),
    "set_config": thing(
        "values",
        values={"type": "object", "additionalProperties": {"type": ["string", "integer", "boolean"]}},
    ),
}


def plain(schema: Schema) -> Schema:
    return copy.deepcopy(schema)


def as_zod(schema: Schema) -> Schema:
    """Closed objects of draft 7, each with a description and defaults."""
    made = _each(copy.deepcopy(schema), lambda one: one.update(additionalProperties=False))
    made["$schema"] = "http://json-schema.org/draft-07/schema#"
    for name, inner in made["properties"].items():
        inner["description"] = f"The {name} of the call."
    return made


def as_pydantic(schema: Schema) -> Schema:
    """Titles, optional values as a union with null, and the objects within lists as definitions."""
    made, definitions = copy.deepcopy(schema), {}
    for name, inner in made["properties"].items():
        if inner.get("items", {}).get("type") == "object":
            definitions[f"{name.title()}Item"] = inner["items"]
            inner["items"] = {"$ref": f"#/$defs/{name.title()}Item"}
        if name not in made["required"]:
            made["properties"][name] = {"anyOf": [inner, {"type": "null"}], "default": None}
        made["properties"][name]["title"] = name.title()
    if definitions:
        made["$defs"] = definitions
    return made


def as_strict(schema: Schema) -> Schema:
    """OpenAI's strict mode: closed objects, every property required, optional ones nullable."""

    def close(one: Schema) -> None:
        for name, inner in one["properties"].items():
            if name not in one["required"]:
                one["properties"][name] = {"anyOf": [inner, {"type": "null"}]}
        one.update(additionalProperties=False, required=list(one["properties"]))

    return _each(copy.deepcopy(schema), close)


def _each(schema: Schema, change: Callable[[Schema], None]) -> Schema:
    """Changes each object that names its properties, the innermost first."""
    for inner in schema.get("properties", {}).values():
        _each(inner, change)
    if isinstance(schema.get("items"), dict):
        _each(schema["items"], change)
    if "properties" in schema:
        change(schema)
    return schema


def tool_schemas() -> dict[str, Schema]:
    return {
        f"{name}, {write.__name__}": write(schema)
        for name, schema in TOOLS.items()
        for write in (plain, as_zod, as_pydantic, as_strict)
    }
