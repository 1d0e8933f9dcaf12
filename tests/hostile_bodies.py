"""Bodies of requests that could cost a server much: many small values, deep ones, long ones, and texts that grow.

`FAMILIES` are functions of a size: the work on a body has to grow with its bytes, and not faster. `hostile_bodies`
draws bodies of all families and sizes from a seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Family = Callable[[int], Json]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
# Other routes that make the same prompt of a body, by the route that answers it.
SAME_PROMPT = {
    CHAT: ("/v1/cache/explain", "/v1/cache/warm", "/v1/cache/pin"),
    COMPLETIONS: ("/v1/cache/explain/completions", "/v1/cache/warm/completions"),
    MESSAGES: ("/v1/messages/count_tokens", "/v1/cache/explain/messages", "/v1/cache/warm/messages"),
    RESPONSES: ("/v1/responses/input_tokens", "/v1/cache/explain/responses", "/v1/cache/warm/responses"),
}
MOST_MESSAGES = 16_384
MOST_PARTS = 4_096
SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</tool_call>", "<|eot_id|>", "⁛", "⁛0⁛", "\ue000")
# Texts that are short in a body, or that tokenizers and escapes treat in a way of their own.
ODD_TEXTS = (
    "x",
    " ",
    "\n",
    "\u0000",
    "\ud800",
    "é",
    "e\u0301",
    "👩\u200d👩\u200d👧",
    "\u202e",
    "9",
    *SPECIAL,
)


@dataclass(frozen=True, slots=True)
class HostileBody:
    name: str
    path: str
    content: bytes


def _said(role: str, content: Any, **fields: Any) -> Json:
    return {"role": role, "content": content, **fields}


def _user(*messages: Json) -> list[Json]:
    return [*messages, _said("user", "Go on.")]


def _function(name: str, parameters: Any) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _call(id: str, name: str = "f") -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}}


def nested(depth: int, inner: Any = 1) -> Any:
    for level in range(depth):
        inner = {"a": inner} if level % 2 else [inner]
    return inner


def _turns(size: int, roles: tuple[str, ...], text: str = "word ") -> list[Json]:
    return [_said(roles[i % len(roles)], text) for i in range(min(size, MOST_MESSAGES - 1))]


def _calls_and_results(size: int) -> list[Json]:
    """Many calls in one answer, with their results in the opposite order."""
    calls = min(size, 1_024)
    ids = [f"c{i}" for i in range(calls)]
    results = [_said("tool", "ok", tool_call_id=id) for id in reversed(ids)]
    return [_said("user", "x"), _said("assistant", "", tool_calls=[_call(id) for id in ids]), *results]


def _steps(size: int) -> list[Json]:
    """One call after another."""
    found = [_said("user", "x")]
    for i in range(min(size, MOST_MESSAGES - 2) // 2):
        found += [
            _said("assistant", None, tool_calls=[_call(f"c{i % 7}")]),
            _said("tool", "ok", tool_call_id=f"c{i % 7}"),
        ]
    return found


def _marked(size: int) -> list[Json]:
    """The most marks, in a text of a size."""
    parts = [
        {"type": "text", "text": "word " * (1 + size // 64), "cache_control": {"type": "ephemeral"}}
        for _ in range(64)
    ]
    return [_said("user", parts)]


CHATS: Mapping[str, Family] = {
    "system messages in a row": lambda n: {"messages": _user(*_turns(n, ("system",)))},
    "developer messages in a row": lambda n: {"messages": _user(*_turns(n, ("developer",)))},
    "system messages, every second one empty": lambda n: {
        "messages": _user(
            *(_said("system", "" if i % 2 else "word") for i in range(min(n, MOST_MESSAGES - 1)))
        )
    },
    "users in a row": lambda n: {"messages": _turns(n, ("user",))},
    "answers in a row": lambda n: {"messages": _user(*_turns(n, ("assistant",)))},
    "late system messages": lambda n: {"messages": _user(*_turns(n, ("user", "system")))},
    "system messages behind one of the user": lambda n: {
        "messages": [_said("user", "x"), *_turns(n, ("system",))]
    },
    "turns": lambda n: {"messages": _user(*_turns(n, ("user", "assistant")))},
    "results without calls": lambda n: {"messages": _user(*_turns(n, ("tool",)))},
    "function messages": lambda n: {"messages": _user(*_turns(n, ("function",)))},
    "parts of a message": lambda n: {
        "messages": [_said("user", [{"type": "text", "text": "word "}] * min(n, MOST_PARTS))]
    },
    "parts of many messages": lambda n: {
        "messages": [_said("user", [{"type": "text", "text": "w"}] * 256)] * max(1, n // 256)
    },
    "parts of the system": lambda n: {
        "messages": _user(_said("system", [{"type": "text", "text": "word "}] * min(n, MOST_PARTS)))
    },
    "calls of an answer": lambda n: {"messages": _calls_and_results(n)},
    "steps": lambda n: {"messages": _steps(n)},
    "reasoning": lambda n: {
        "messages": _user(*(_said("assistant", "x", reasoning_content="word") for _ in range(min(n, 8_000))))
    },
    "tools": lambda n: {
        "messages": _user(),
        "tools": [_function(f"f{i}", {"type": "object", "properties": {}}) for i in range(min(n, 1_024))],
    },
    "properties of a tool": lambda n: {
        "messages": _user(),
        "tools": [
            _function("f", {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(n)}})
        ],
    },
    "values of a tool": lambda n: {
        "messages": _user(),
        "tools": [_function("f", {"type": "string", "enum": [str(i) for i in range(n)]})],
    },
    "tools that are allowed": lambda n: {
        "messages": _user(),
        "tools": [_function(f"f{i}", {}) for i in range(min(n, 1_024))],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "auto",
                "tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(min(n, 1_024))],
            },
        },
    },
    "a deep schema": lambda n: {"messages": _user(), "tools": [_function("f", nested(min(n, 120)))] * 8},
    "a deep field": lambda n: {"messages": _user(), "anything": nested(min(n, 500))},
    "a deep argument": lambda n: {
        "messages": _user(
            _said(
                "assistant",
                "",
                tool_calls=[
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "f", "arguments": "[" * n + "]" * n},
                    }
                ],
            )
        )
    },
    "marks": lambda n: {"messages": _marked(n)},
    "unknown fields": lambda n: {"messages": _user(), **{f"field{i}": 1 for i in range(n)}},
    "unknown fields of a message": lambda n: {
        "messages": _user(_said("user", "x", **{f"field{i}": "y" for i in range(n)}))
    },
    "an unknown role of a length": lambda n: {"messages": _user(_said("r" * n, "x"))},
    "names": lambda n: {
        "messages": [_said("user", "x", name="n" * 256)] * max(1, min(n, MOST_MESSAGES) // 16)
    },
    "ids of calls of a length": lambda n: {
        "messages": [
            _said("user", "x"),
            _said("assistant", "", tool_calls=[_call("i" * n)]),
            _said("tool", "ok", tool_call_id="i" * n),
        ]
    },
    "variables of the template": lambda n: {
        "messages": _user(),
        "chat_template_kwargs": {f"v{i}": i for i in range(n)},
    },
    "documents": lambda n: {"messages": _user(), "documents": [{"title": "t", "text": "x"}] * n},
    "stop strings": lambda n: {"messages": _user(), "stop": ["s" * (1 + n % 512)] * min(n, 16)},
    "too many stop strings": lambda n: {"messages": _user(), "stop": ["s"] * n},
    "stop tokens": lambda n: {"messages": _user(), "stop_token_ids": [i % 200 for i in range(n)]},
    "biases": lambda n: {"messages": _user(), "logit_bias": {str(i): 1 for i in range(n)}},
    "modalities": lambda n: {"messages": _user(), "modalities": ["text"] * n},
    "a salt of a length": lambda n: {"messages": _user(), "cache_salt": "s" * n},
    "directives": lambda n: {
        "messages": _user(),
        "kv_hints": {
            "actions": [
                {"action_type": "kv.retain", "action_version": "1.0", "payload": {"directives": [{}] * n}}
            ]
        },
    },
    "actions": lambda n: {
        "messages": _user(),
        "kv_hints": {"actions": [{"action_type": "x", "action_version": "1.0", "payload": {}}] * n},
    },
    "edits of a hint": lambda n: {
        "messages": _user(),
        "agent_hint": {"context_management": {"edits": [{"type": "evict"}] * n}},
    },
}

_TOOL_USE = {"type": "tool_use", "name": "f", "input": {}}


def _uses(size: int) -> list[Json]:
    """Calls and results in turn, ten of them in a message."""
    found = [_said("user", "x")]
    for i in range(max(1, min(size, MOST_MESSAGES) // 20)):
        ids = [f"c{i}x{j}" for j in range(10)]
        found += [
            _said("assistant", [{**_TOOL_USE, "id": id} for id in ids]),
            _said(
                "user", [{"type": "tool_result", "tool_use_id": id, "content": "ok"} for id in reversed(ids)]
            ),
        ]
    return found


CONVERSATIONS: Mapping[str, Family] = {
    "system blocks": lambda n: {
        "messages": _user(),
        "system": [{"type": "text", "text": "word "}] * min(n, MOST_PARTS),
    },
    "system messages": lambda n: {"messages": _user(*_turns(n, ("system",)))},
    "system messages between turns": lambda n: {"messages": _user(*_turns(n, ("user", "system")))},
    "users in a row": lambda n: {"messages": _turns(n, ("user",))},
    "answers in a row": lambda n: {"messages": _user(*_turns(n, ("assistant",)))},
    "blocks": lambda n: {
        "messages": [_said("user", [{"type": "text", "text": "word "}] * min(n, MOST_PARTS))]
    },
    "uses of tools": lambda n: {"messages": _uses(n)},
    "uses of tools that are cleared": lambda n: {
        "messages": _uses(n),
        "context_management": {
            "edits": [
                {"type": "clear_thinking_20251015"},
                {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 1}},
            ]
        },
    },
    "results and texts in turn": lambda n: {
        "messages": _user(
            _said(
                "user",
                [
                    {"type": "text", "text": "x"}
                    if i % 2
                    else {"type": "tool_result", "tool_use_id": f"c{i}", "content": "ok"}
                    for i in range(min(n, MOST_PARTS))
                ],
            )
        )
    },
    "blocks of a result": lambda n: {
        "messages": [
            _said("user", "x"),
            _said("assistant", [{**_TOOL_USE, "id": "c"}]),
            _said(
                "user",
                [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [{"type": "text", "text": "w"}] * min(n, MOST_PARTS),
                    }
                ],
            ),
        ]
    },
    "references to a tool": lambda n: {
        "messages": [
            _said("user", "x"),
            _said("assistant", [{**_TOOL_USE, "id": "c"}]),
            _said(
                "user",
                [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [{"type": "tool_reference", "tool_name": "f"}] * min(n, MOST_PARTS),
                    }
                ],
            ),
        ],
        "tools": [
            {
                "name": "f",
                "description": "word " * n,
                "input_schema": {"type": "object"},
                "defer_loading": True,
            }
        ],
    },
    "thinking": lambda n: {
        "messages": _user(
            *(
                _said("assistant", [{"type": "thinking", "thinking": "word", "signature": "x"}])
                for _ in range(min(n, MOST_MESSAGES - 1))
            )
        )
    },
    "a deep result of a server": lambda n: {
        "messages": _user(
            _said(
                "assistant",
                [{"type": "web_search_tool_result", "tool_use_id": "c", "content": nested(min(n, 120))}],
            )
        )
    },
    "tools": lambda n: {
        "messages": _user(),
        "tools": [{"name": f"f{i}", "input_schema": {"type": "object"}} for i in range(min(n, 1_024))],
    },
    "stop sequences": lambda n: {"messages": _user(), "stop_sequences": ["s"] * n},
    "edits": lambda n: {
        "messages": _user(),
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}] * n},
    },
}


def _item_message(role: str, text: str = "w") -> Json:
    return {"type": "message", "role": role, "content": text}


def _item_call(id: str) -> Json:
    return {"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"}


def _item_result(id: str) -> Json:
    return {"type": "function_call_output", "call_id": id, "output": "ok"}


def _items(size: int, *items: Json) -> Json:
    return {"input": [items[i % len(items)] for i in range(min(size, MOST_MESSAGES))], "store": False}


RESPONSE_BODIES: Mapping[str, Family] = {
    "messages": lambda n: _items(n, _item_message("user"), _item_message("assistant")),
    "system messages": lambda n: _items(n, _item_message("system", "word ")),
    "developer messages": lambda n: _items(n, _item_message("developer", "word ")),
    "users in a row": lambda n: _items(n, _item_message("user", "word ")),
    "reasoning": lambda n: _items(
        n, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "w"}], "summary": []}
    ),
    "calls of one turn": lambda n: _items(n, _item_call("c")),
    "texts behind a call": lambda n: {
        "input": [_item_call("c"), *([_item_message("assistant")] * min(n, MOST_MESSAGES - 1))],
        "store": False,
    },
    "reasoning behind a call": lambda n: {
        "input": [
            _item_call("c"),
            *([{"type": "reasoning", "content": [], "summary": []}] * min(n, MOST_MESSAGES - 1)),
        ],
        "store": False,
    },
    "parts behind a call": lambda n: {
        "input": [
            _item_call("c"),
            *(
                [{**_item_message("assistant"), "content": [{"type": "output_text", "text": "w"}] * 64}]
                * min(max(1, n // 64), MOST_MESSAGES - 1)
            ),
        ],
        "store": False,
    },
    "calls and results": lambda n: _items(n, _item_call("c"), _item_result("c")),
    "results": lambda n: _items(n, _item_result("c")),
    "parts": lambda n: _items(
        1,
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "word "}] * min(n, MOST_PARTS),
        },
    ),
    "items that nothing shows": lambda n: {
        "input": [
            _item_message("user"),
            *([{"type": "web_search_call", "action": {}}] * min(n, MOST_MESSAGES - 1)),
        ]
    },
    "a large item that nothing shows": lambda n: {
        "input": [_item_message("user"), {"type": "ghost_snapshot", "ghost_commit": "0" * n}]
    },
    "fields that nothing shows": lambda n: {
        "input": [{**_item_message("user"), "extra": [{}] * n, "more": "0" * n}]
    },
    "a large ignored tool": lambda n: {"input": "x", "tools": [{"type": "web_search", "extra": "0" * n}]},
    "fields of a format that nothing reads": lambda n: {
        "input": "x",
        "text": {"format": {"type": "text", "extra": [0] * n}},
    },
    "tools that items load": lambda n: {
        "input": [
            _item_message("user"),
            *(
                {"type": "additional_tools", "tools": [{"type": "function", "name": f"f{i}"}]}
                for i in range(min(n, 1_024))
            ),
        ],
        "store": False,
    },
    "a tool that items load": lambda n: {
        "input": [
            _item_message("user"),
            *([{"type": "additional_tools", "tools": [{"type": "function", "name": "f"}]}] * min(n, 16_000)),
        ],
        "store": False,
    },
    "tools that are allowed": lambda n: {
        "input": "x",
        "store": False,
        "tools": [{"type": "function", "name": f"f{i}"} for i in range(min(n, 1_024))],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": f"f{i}"} for i in range(min(n, 1_024))],
        },
    },
    "namespaces": lambda n: {
        "input": "x",
        "store": False,
        "tools": [
            {"type": "namespace", "name": f"n{i}", "tools": [{"type": "function", "name": "f"}]}
            for i in range(min(n, 1_024))
        ],
    },
    "references to nothing": lambda n: _items(
        n, {"type": "item_reference", "id": "msg_" + "0" * 32 + "0000"}
    ),
    "seals of nobody": lambda n: _items(
        n, {"type": "reasoning", "summary": [], "encrypted_content": "rs1." + "A" * 64}
    ),
    "instructions": lambda n: {"input": "x", "instructions": "word " * n, "store": False},
    "metadata": lambda n: {"input": "x", "metadata": {f"m{i}": "v" for i in range(n)}},
    "includes": lambda n: {"input": "x", "include": ["x"] * n},
}

COMPLETION_BODIES: Mapping[str, Family] = {
    "prompts": lambda n: {"prompt": ["word"] * n},
    "prompts, the last of which is none": lambda n: {"prompt": [*["word " * 64] * max(1, n // 64), 1.5]},
    "lists of ids": lambda n: {"prompt": [[1, 2, 3]] * n},
    "ids": lambda n: {"prompt": [7] * n},
    "ids, the last of which is none": lambda n: {"prompt": [*[7] * n, "x"]},
    "numbers of many digits": lambda n: {"prompt": [10**4_200] * max(1, n // 4_200)},
    "choices": lambda n: {"prompt": "word " * n, "n": 128},
    "lists in lists": lambda n: {"prompt": [[]] * n},
}
_LONG: Mapping[str, Family] = {
    **{
        f"one text of {text.encode('unicode_escape').decode()}": lambda n, text=text: {"prompt": text * n}
        for text in ODD_TEXTS
    },
    "one text of escapes": lambda n: {"prompt": "\u0001" * n},
    "one word": lambda n: {"prompt": "a" * n},
    "one line": lambda n: {"prompt": "word " * n},
}
FAMILIES: Mapping[tuple[str, str], Family] = {
    **{(CHAT, name): make for name, make in CHATS.items()},
    **{
        (CHAT, name): lambda n, make=make: {"messages": [_said("user", make(n)["prompt"])]}
        for name, make in _LONG.items()
    },
    **{(MESSAGES, name): make for name, make in CONVERSATIONS.items()},
    **{
        (MESSAGES, name): lambda n, make=make: {"messages": [_said("user", make(n)["prompt"])]}
        for name, make in _LONG.items()
    },
    **{(RESPONSES, name): make for name, make in RESPONSE_BODIES.items()},
    **{
        (RESPONSES, name): lambda n, make=make: {"input": make(n)["prompt"], "store": False}
        for name, make in _LONG.items()
    },
    **{(COMPLETIONS, name): make for name, make in {**COMPLETION_BODIES, **_LONG}.items()},
}


def encoded(value: Any) -> bytes:
    """Encodes a body as a client would: ASCII, so that halves of surrogate pairs can be sent."""
    return json.dumps(value, separators=(",", ":")).encode()


_SIZES = (1, 30, 1_000, 16_000, 100_000, 1_000_000)


def hostile_bodies(seed: int) -> Iterator[HostileBody]:
    """Yields bodies without end: each family once in every round, in a random order, with a random size and route."""
    rng = random.Random(seed)
    families = list(FAMILIES.items())
    while True:
        rng.shuffle(families)
        for (route, name), make in families:
            size = rng.choice(_SIZES)
            path = rng.choice((route, route, *SAME_PROMPT[route]))
            body = make(size)
            if path in (CHAT, COMPLETIONS, MESSAGES):
                body = {"max_tokens": 1, **body}
            elif path == RESPONSES:
                body = {"max_output_tokens": 1, **body}
            yield HostileBody(f"{name}, {size:,}, to {path}", path, encoded(body))
