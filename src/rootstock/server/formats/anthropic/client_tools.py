"""Tools that Anthropic defines and the client executes, with their schemas: a request names their type only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rootstock.text.conversation.types import Tool

Json = dict[str, Any]


def _object(properties: Json, *required: str) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text(description: str) -> Json:
    return {"type": "string", "description": description}


_VIEW_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "The first and the last line to view, counted from 1; -1 as the last one is the end of the file.",
}

_BASH = Tool(
    "bash",
    "Runs commands in a bash shell that keeps its state between calls.",
    _object(
        {
            "command": _text("The command to run. Leave it out only to restart the shell."),
            "restart": {"type": "boolean", "description": "Restarts the shell."},
        }
    ),
)


def _text_editor(name: str, *more: str) -> Tool:
    return Tool(
        name,
        "Views, creates and edits text files.",
        _object(
            {
                "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", *more]},
                "path": _text("The path of the file or directory."),
                "file_text": _text("For create: the content of the file."),
                "old_str": _text(
                    "For str_replace: the text to replace, which occurs exactly once in the file."
                ),
                "new_str": _text(
                    "For str_replace: the new text. For insert, in older versions: the text to insert."
                ),
                "insert_line": {
                    "type": "integer",
                    "description": "For insert: the line after which to insert.",
                },
                "insert_text": _text("For insert: the text to insert."),
                "view_range": _VIEW_RANGE,
            },
            "command",
            "path",
        ),
    )


_MEMORY = Tool(
    "memory",
    "Views and changes files under /memories, which stay from one conversation to the next.",
    _object(
        {
            "command": {
                "type": "string",
                "enum": ["view", "create", "str_replace", "insert", "delete", "rename"],
            },
            "path": _text("The path of the file or directory. Not for rename."),
            "file_text": _text("For create: the content of the file."),
            "old_str": _text("For str_replace: the text to replace."),
            "new_str": _text("For str_replace: the new text."),
            "insert_line": {"type": "integer", "description": "For insert: the line after which to insert."},
            "insert_text": _text("For insert: the text to insert."),
            "old_path": _text("For rename: the present path."),
            "new_path": _text("For rename: the new path."),
            "view_range": _VIEW_RANGE,
        },
        "command",
    ),
)

CLIENT_TOOLS: Mapping[str, Tool] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _text_editor("str_replace_editor", "undo_edit"),
    "text_editor_20250124": _text_editor("str_replace_editor", "undo_edit"),
    "text_editor_20250429": _text_editor("str_replace_based_edit_tool"),
    "text_editor_20250728": _text_editor("str_replace_based_edit_tool"),
    "memory_20250818": _MEMORY,
}

# By the beginning of their type: reasons why other tools of Anthropic are refused. Without the tool, the model would
# make up the results that the client expects of it.
REFUSED_TOOLS: Mapping[str, str] = {
    "computer_": "The model reads only text, not pictures of a screen.",
    "browser_": "The model reads only text, not pictures of a page.",
    "web_search_": "The server searches nothing: give the client's own search as a tool with an 'input_schema'.",
    "web_fetch_": "The server fetches nothing: give the client's own tool with an 'input_schema'.",
    "code_execution_": "The server runs no code: give the client's own tool with an 'input_schema'.",
    "tool_search_tool_": "The server searches no tools: the client returns a 'tool_reference' in a tool's result.",
    "advisor_": "The server asks no other model.",
    "mcp_toolset": "The server calls no MCP servers: give their tools with an 'input_schema'.",
}
