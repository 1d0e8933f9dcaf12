"""Tools of the Responses API as functions for the model, and the model's calls as items of the client.

Models know functions only. Every tool that the client runs is shown as a function: a custom tool takes one text, a
function of a namespace has the namespace in its name. Tools that OpenAI's own servers run are not shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from rootstock.errors import InvalidParameter, MissingParameter, Unsupported
from rootstock.text.conversation.openai import custom_tool
from rootstock.text.conversation.types import Tool, ToolChoice
from rootstock.text.limits import (
    MAX_NAME_CHARS,
    MAX_TEMPLATE_CHARS,
    MAX_TOOLS,
    MAX_TOOLS_CHARS,
    refuse_deep,
    refuse_large,
    refuse_more_than,
    refuse_other_text,
)

# Agents send these with every request to any server. The answer names the ones that it has ignored.
_IGNORED = frozenset(
    {
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "image_generation",
    }
)
_REMEDIES = {
    "apply_patch": "Send it as a function or a custom tool.",
    "computer": "Send it as a function.",
    "computer_use_preview": "Send it as a function.",
    "shell": "Send it as a function.",
    "mcp": "The server connects to no MCP server. Connect to it yourself, and send its tools as functions.",
}
_ON_OPENAIS_SERVERS = "This server runs no tools itself. Send a function."
_KEPT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "function": ("name", "description", "parameters"),
    "custom": ("name", "description"),
    "namespace": ("name", "description"),
    "tool_search": ("execution", "description", "parameters"),
}
_LOCAL_SHELL = Tool(
    "local_shell",
    "Runs a command on the user's machine.",
    {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
)
_SEARCH_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"query": {"type": "string"}},
    "required": ["query"],
}


class ToolKind(Enum):
    """The type of a tool, and thereby of the items of its calls."""

    FUNCTION = "function"
    CUSTOM = "custom"
    TOOL_SEARCH = "tool_search"
    LOCAL_SHELL = "local_shell"


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as the client names it."""

    kind: ToolKind
    name: str
    namespace: str | None = None


@dataclass
class Toolbox:
    """The tools of a request and of its input."""

    shown: list[Tool] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)  # types of tools that are not shown
    _by_name: dict[str, ClientTool] = field(default_factory=dict)  # by the name that the model sees
    # By type and each name, made for the first choice of a tool: requests choose after all tools were added.
    _shown: dict[tuple[str, str], str] | None = None

    def client_tool(self, name: str) -> ClientTool:
        """Returns the client's name of a tool that the model calls."""
        return self._by_name.get(name) or ClientTool(ToolKind.FUNCTION, name)

    def find(self, kind: str, name: str) -> str | None:
        """Returns the name that the model sees of a tool that the client names by its type and name."""
        if self._shown is None:
            self._shown = {}
            for shown, tool in self._by_name.items():
                for known in (tool.name, shown):
                    self._shown.setdefault((tool.kind.value, known), shown)
        return self._shown.get((kind, name))

    def add(self, tools: Sequence[Any], path: str) -> None:
        """Adds the tools of a request. Raises InvalidParameter, MissingParameter and Unsupported."""
        # Without a search of the client's, no request would ever show a deferred tool.
        searched = any(_is_search_by_client(tool) for tool in tools)
        for client_tool, shown in self._all(tools, path):
            if shown.name in self._by_name:
                raise InvalidParameter(path, shown.name, "tools with different names")
            self._by_name[shown.name] = client_tool
            self.shown.append(replace(shown, deferred=searched and shown.deferred))
        refuse_more_than(MAX_TOOLS, self.shown, path)

    def load(self, tools: Sequence[Any], path: str) -> list[Tool]:
        """Adds tools of the input, which appear where the input has them, and returns them.

        Another tool of the same name stays. Raises InvalidParameter, MissingParameter and Unsupported.
        """
        loaded = []
        for client_tool, shown in self._all(tools, path):
            if self._by_name.setdefault(shown.name, client_tool) is client_tool:
                self.shown.append(replace(shown, deferred=True))
            loaded.append(shown)
        refuse_more_than(MAX_TOOLS, self.shown, path)
        return loaded

    def _all(self, tools: Sequence[Any], path: str) -> Iterator[tuple[ClientTool, Tool]]:
        refuse_large(tools, path, MAX_TOOLS_CHARS)
        for i, tool in enumerate(tools):
            refuse_deep(tool, f"{path}[{i}]")
            yield from self._read(tool, f"{path}[{i}]")

    def _read(self, tool: Any, path: str) -> list[tuple[ClientTool, Tool]]:
        if not isinstance(tool, Mapping):
            raise InvalidParameter(path, tool, "an object with a 'type'")
        kind = tool.get("type")
        if kind in ("function", "custom"):
            return [_function_or_custom(tool, None, path)]
        if kind == "namespace":
            return _namespace(tool, path)
        if kind == "local_shell":
            return [(ClientTool(ToolKind.LOCAL_SHELL, _LOCAL_SHELL.name), _LOCAL_SHELL)]
        if _is_search_by_client(tool):
            return [(ClientTool(ToolKind.TOOL_SEARCH, "tool_search"), _search(tool, path))]
        if kind in _IGNORED or kind == "tool_search":
            refuse_large(tool, path, MAX_TEMPLATE_CHARS)  # no prompt has it, and the response repeats it
            self.ignored.append(str(kind))
            return []
        if not isinstance(kind, str):
            raise InvalidParameter(f"{path}.type", kind, "a string")
        raise Unsupported(
            f"{path}.type", f"{kind[:MAX_NAME_CHARS]!r}: {_REMEDIES.get(kind, _ON_OPENAIS_SERVERS)}"
        )

    def only(self, names: Sequence[str]) -> None:
        """Shows no tools but these."""
        self.shown = [tool for tool in self.shown if tool.name in names]


def echoed_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a client's tool as the response repeats it: a function has all of its fields."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": False, **tool}


def kept_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool of the input, which was read, as it is stored: with all that the prompt shows of it."""
    kept = {"type": tool["type"]}
    if tool["type"] != "tool_search" or _is_search_by_client(tool):
        names = _KEPT_FIELDS.get(tool["type"], ())
        kept |= {name: tool[name] for name in names if tool.get(name) is not None}
    if tool["type"] in ("function", "custom"):
        kept |= {name: True for name in ("strict", "defer_loading") if tool.get(name)}
    match tool:
        case {"type": "namespace", "tools": tools}:
            kept["tools"] = list(map(kept_tool, tools))
        case {"type": "custom", "format": {"type": "grammar"} as format}:
            grammar = format.get("grammar", format)
            kept["format"] = {"type": "grammar", **{name: grammar[name] for name in ("syntax", "definition")}}
    return kept


def shown_name(name: str, namespace: str | None) -> str:
    """Returns the name that the model sees of a function. Agents end some namespaces with the separator."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith(("__", ".")) else f"{namespace}__{name}"


def _is_search_by_client(tool: Any) -> bool:
    return (
        isinstance(tool, Mapping) and tool.get("type") == "tool_search" and tool.get("execution") == "client"
    )


def _namespace(tool: Mapping[str, Any], path: str) -> list[tuple[ClientTool, Tool]]:
    name, about = _name_of(tool, path), tool.get("description")
    refuse_other_text(about, f"{path}.description", None)
    tools = tool.get("tools")
    if not isinstance(tools, list):
        raise InvalidParameter(f"{path}.tools", tools, "a list of functions and custom tools")
    refuse_more_than(MAX_TOOLS, tools, f"{path}.tools")
    read = []
    for i, inner in enumerate(tools):
        inner_path = f"{path}.tools[{i}]"
        if not isinstance(inner, Mapping) or inner.get("type") not in ("function", "custom"):
            raise InvalidParameter(inner_path, inner, "a tool of type 'function' or 'custom'")
        client_tool, shown = _function_or_custom(inner, name, inner_path)
        if about and i == 0:  # once, before the functions: templates have no place for it
            prefix = shown.name.removesuffix(client_tool.name)
            shown = replace(shown, description=_joined(f"Tools named {prefix}…: {about}", shown.description))
        read.append((client_tool, shown))
    return read


def _function_or_custom(tool: Mapping[str, Any], namespace: str | None, path: str) -> tuple[ClientTool, Tool]:
    name, about = _name_of(tool, path), tool.get("description")
    refuse_other_text(about, f"{path}.description", None)
    seen = shown_name(name, namespace)
    deferred = bool(tool.get("defer_loading"))
    if tool["type"] == "custom":
        shown = custom_tool(seen, about, tool.get("format"), f"{path}.format")
        return ClientTool(ToolKind.CUSTOM, name, namespace), replace(shown, deferred=deferred)
    parameters = tool.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidParameter(f"{path}.parameters", parameters, "a JSON schema, which is an object")
    strict = bool(tool.get("strict"))
    shown = Tool(seen, about, parameters, strict=strict, deferred=deferred)
    return ClientTool(ToolKind.FUNCTION, name, namespace), shown


def _name_of(tool: Mapping[str, Any], path: str) -> str:
    name = tool.get("name")
    if name is None:
        raise MissingParameter(f"{path}.name")
    refuse_other_text(name, f"{path}.name", MAX_NAME_CHARS)
    if not name:
        raise InvalidParameter(f"{path}.name", name, "a name")
    return str(name)


def _search(tool: Mapping[str, Any], path: str) -> Tool:
    about, parameters = tool.get("description"), tool.get("parameters")
    refuse_other_text(about, f"{path}.description", None)
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidParameter(f"{path}.parameters", parameters, "a JSON schema, which is an object")
    return Tool(
        "tool_search", about or "Finds tools that can be called afterwards.", parameters or _SEARCH_PARAMETERS
    )


def _joined(*texts: str | None) -> str:
    return "\n\n".join(text for text in texts if text)


def tool_choice_of(choice: Any, tools: Toolbox, *, parallel: bool) -> ToolChoice:
    """Translates a choice. Hides the tools that it excludes. Raises InvalidParameter and Unsupported."""
    path = "tool_choice"
    match choice:
        case None | "auto":
            return ToolChoice(parallel=parallel)
        case "none":
            return ToolChoice("none", parallel=parallel)
        case "required":
            found = ToolChoice("required", parallel=parallel)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            refuse_more_than(MAX_TOOLS, allowed, f"{path}.tools")
            names = tuple(dict.fromkeys(_chosen(tool, tools, path) for tool in allowed))
            if mode == "required" and names:
                found = ToolChoice("required", names, parallel)
            else:
                # No constraint forbids single calls, so that the model must not see these tools.
                tools.only(names)
                return ToolChoice(parallel=parallel)
        case {"type": str()}:
            found = ToolChoice("required", (_chosen(choice, tools, path),), parallel)
        case _:
            allowed_values = "'auto', 'none', 'required', or an object that names a tool"
            raise InvalidParameter(path, choice, allowed_values)
    if not tools.shown:
        raise InvalidParameter(path, choice, "left out in a request without tools")
    return found


def _chosen(chosen: Any, tools: Toolbox, path: str) -> str:
    """Returns the name that the model sees of a tool that the client chooses."""
    if isinstance(chosen, Mapping):
        kind = chosen.get("type")
        if kind in tools.ignored:
            raise Unsupported(path, f"{kind!r}: {_ON_OPENAIS_SERVERS}")
        name = chosen.get("name")
        namespace = chosen.get("namespace")
        if kind in (ToolKind.LOCAL_SHELL.value, ToolKind.TOOL_SEARCH.value):
            name = kind
        if isinstance(kind, str) and isinstance(name, str):
            if isinstance(namespace, str):
                name = shown_name(name, namespace)
            found = tools.find(kind, name)
            if found is not None:
                return found
    raise InvalidParameter(path, chosen, "a tool of the request, named by 'type' and 'name'")
