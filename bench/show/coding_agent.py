"""Requests of a coding agent in Anthropic's format: the shape of Claude Code's, with words of our own.

A `Session` has the parts that differ between real requests: the version's digits in the billing block, the directory,
the state of git, the date. `claude_code` makes the body of a request from a session and its turns. The sizes of the
parts follow docs/clients.md.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

_TEXT = """the tool reads a file and returns its lines with numbers use an absolute path never guess one when several
calls do not depend on each other make them in one answer a result may be cut after two thousand lines run tests first
then say that a change works do not commit unless the user asks for it prefer small edits over new files keep names of
the code around you explain a command that changes the system quote paths with spaces search by pattern first
then by content read only what you need answer in few words"""
_TOOLS = """Agent AskUser Bash BashOutput Edit ExitPlan Fetch Glob Grep Kill List Memory MultiEdit Notebook Plan Read
Rename Schedule Search Skill Snapshot Sleep Task Todo Undo Watch Write"""
_WORDS, _NAMES = _TEXT.split(), _TOOLS.split()
DEFERRED = ("Calendar", "Issues", "Mail", "Metrics", "Translate")


def prose(words: int, seed: int) -> str:
    """Returns as many words, always the same ones for a seed."""
    rng = random.Random(seed)
    return " ".join(rng.choice(_WORDS) for _ in range(words))


def tool(name: str, words: int, *, deferred: bool = False) -> Json:
    """Returns a tool with a description and four described parameters."""
    seed = sum(map(ord, name))
    properties = {
        f"{word}_{index}": {"type": "string", "description": prose(words // 12, seed + index)}
        for index, word in enumerate(("path", "pattern", "command", "note"))
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["path_0"],
        "additionalProperties": False,
    }
    made: Json = {"name": name, "description": prose(words, seed), "input_schema": schema}
    return made | ({"defer_loading": True} if deferred else {})


TOOLS = [tool(name, 420) for name in _NAMES]
SUBAGENT_TOOLS = [tool(name, 420) for name in _NAMES[5:]]


@dataclass(frozen=True, slots=True)
class Session:
    digits: str = "3a3"  # of the version in the billing block: they follow the first message
    directory: str = "/home/ann/garden"
    git: str = "main, clean, last commit: plant the oak"
    date: str = "2026-11-20"
    tools: tuple[Json, ...] = tuple(TOOLS)
    system: str = field(default_factory=lambda: prose(1500, 1))

    def blocks(self) -> list[Json]:
        marked = {"cache_control": {"type": "ephemeral"}}
        rules = f"{self.system}\n\nDirectory: {self.directory}\n\n{prose(60, 2)}\n\nGit: {self.git}\n{prose(20, 3)}"
        return [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1.197.{self.digits}; cc_entrypoint=cli;",
            },
            {"type": "text", "text": "You are a coding agent that works in a terminal.", **marked},
            {"type": "text", "text": rules, **marked},
        ]


def claude_code(session: Session, turns: list[Json], **fields: Any) -> Json:
    """Returns the body of a request. `turns` are the messages after the session's own first ones."""
    reminder = f"<system-reminder>\n{prose(900, 4)}\n\nToday's date is {session.date}.\n</system-reminder>"
    messages: list[Json] = [
        {"role": "user", "content": [{"type": "text", "text": reminder}]},
        {"role": "system", "content": prose(80, 5)},
        *turns,
    ]
    last = messages[-1]
    if isinstance(last["content"], list) and last["content"]:  # the mark moves with each request
        marked = {**last["content"][-1], "cache_control": {"type": "ephemeral"}}
        messages[-1] = {**last, "content": [*last["content"][:-1], marked]}
    return {
        "model": "default",
        "max_tokens": 32_000,
        "stream": False,
        "system": session.blocks(),
        "tools": list(session.tools),
        "messages": messages,
        "metadata": {"user_id": "user_1"},
        **fields,
    }


def says(text: str) -> Json:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def calls(id: str, name: str, **arguments: Any) -> Json:
    return {
        "role": "assistant",
        "content": [
            {"type": "text", "text": f"I will use {name}."},
            {"type": "tool_use", "id": id, "name": name, "input": arguments},
        ],
    }


def returns(id: str, text: str) -> Json:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": text}]}


def loads(id: str, *names: str) -> Json:
    """Returns the result of a search for tools, which names the deferred ones that it found."""
    references = [{"type": "tool_reference", "tool_name": name} for name in names]
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": references}]}


@dataclass(frozen=True, slots=True)
class Event:
    """A request that follows another one, and the least share of its prompt that must be cached."""

    name: str
    before: Json
    after: Json
    least: float


def events() -> list[Event]:
    """Returns the events of a coding agent. Bars are the shares that a real one leaves in common by its requests.

    The bar of the round trip is lower: the tiny model's tokenizer has more tokens for the marks of a turn.
    """
    session, asked = Session(), [says("Why does the gate not close?")]
    worked = [*asked, calls("toolu_01", "Read", path_0="gate.py"), returns("toolu_01", prose(6, 7))]
    plan = [*worked, calls("toolu_02", "Plan", path_0="plan.md"), returns("toolu_02", prose(20, 8))]
    compacted = [says(f"The conversation so far: {prose(600, 9)}"), says("Go on.")]
    other = Session(digits="91f")
    # An agent that searches for tools has fewer and shorter ones: 18 of about 660 tokens, a prompt of 16,000.
    head = [tool(name, 340) for name in _NAMES[:18]]
    deferred = [tool(name, 340, deferred=True) for name in DEFERRED]
    searching, found = (
        Session(tools=tuple(head)),
        Session(tools=tuple(sorted([*head, *deferred], key=_by_name))),
    )
    searched = [*asked, calls("toolu_03", "Search", path_0="mail")]
    subagent = Session(digits="0c4", tools=tuple(SUBAGENT_TOOLS), system=prose(700, 11))

    def event(
        name: str, least: float, a: Session, before: list[Json], b: Session, after: list[Json]
    ) -> Event:
        return Event(name, claude_code(a, before), claude_code(b, after), least)

    return [
        event("tool round trip", 0.99, session, asked, session, worked),
        event(
            "new session, same directory", 0.93, session, asked, other, [says("Add a test for the hinge.")]
        ),
        event("first turn after compact", 0.96, session, worked, other, compacted),
        event(
            "resume after a commit",
            0.0679,
            session,
            worked,
            Session(git="main, clean, mend the gate"),
            worked,
        ),
        event("resume on another date", 0.9229, session, worked, Session(date="2026-11-21"), worked),
        event(
            "new session, other directory", 0.0247, session, asked, Session("5d2", "/home/ann/house"), asked
        ),
        event(
            "tool search loads tools", 0.95, searching, asked, found, [*searched, loads("toolu_03", "Mail")]
        ),
        event("subagent", 0.0, session, worked, subagent, [says("Find the hinge.")]),
        event("plan mode", 0.912, session, worked, session, plan),
        event(
            "request to compact", 0.953, session, plan, session, [*plan, says("Summarise the conversation.")]
        ),
    ]


def _by_name(tool: Json) -> str:
    return str(tool["name"])
