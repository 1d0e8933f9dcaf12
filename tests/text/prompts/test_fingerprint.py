"""Requests are compared by their fingerprints, and the comparison has the shapes of two APIs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rootstock.engine.diagnosis import Diagnosis
from rootstock.server.wire.cache_diagnostics import anthropic_diagnostics, openai_diagnostics
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.text.conversation.template import template_input
from rootstock.text.conversation.types import (
    Conversation,
    Message,
    PrefixMark,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolReference,
    ToolResult,
)
from rootstock.text.prompts.fingerprint import (
    Comparison,
    EarlierNotFound,
    Fingerprint,
    Fingerprints,
    compared,
    fingerprint_of,
)
from rootstock.text.prompts.tenant_salt import PromptOwner

SYSTEM = Message("system", (Text("Be brief."),))
ASKED = Message("user", (Text("What is a tree?"),))
CALLED = Message("assistant", (ToolCall("call_1", "look_up", {"word": "tree"}),))
RESULT = Message("tool", (ToolResult("call_1", (Text("A plant."),)),))
TOOL = Tool("look_up", parameters={"type": "object"})
BASE = Conversation((SYSTEM, ASKED), (TOOL,), options={"reasoning_effort": "low"})

MISS = Diagnosis(100, 10, 10, "diverged", 10, 90, "…")
HIT = Diagnosis(100, 90, 90, "none", None, 0, "…")
ALL = Diagnosis(100, 99, 99, "none", None, 0, "…")
EVICTED = Diagnosis(100, 10, 10, "evicted", 10, 70, "…")
MARK = PrefixMark("cache_control", 300.0)


def taken(conversation: Conversation = BASE, model: str = "model") -> Fingerprint:
    return fingerprint_of(model, template_input(conversation, ByteTokenizer()), 80)


def changed(later: Conversation, model: str = "model") -> Comparison:
    return compared(taken(), taken(later, model))


def test_a_request_that_goes_on_has_not_changed() -> None:
    assert changed(replace(BASE, messages=(SYSTEM, ASKED, CALLED, RESULT))).change is None
    marked = Message("user", (Text("What is a tree?", mark=MARK),))
    assert changed(replace(BASE, messages=(SYSTEM, marked), tools=(replace(TOOL, mark=MARK),))).change is None


@pytest.mark.parametrize(
    ("later", "change"),
    [
        (replace(BASE, tools=()), "tools"),
        (replace(BASE, tools=(replace(TOOL, parameters={"type": "object", "x": 1}),)), "tools"),
        (replace(BASE, messages=(Message("system", (Text("Be long."),)), ASKED)), "system"),
        (replace(BASE, messages=(ASKED,)), "system"),
        (replace(BASE, options={}), "settings"),
        (replace(BASE, tool_choice=ToolChoice("none")), "tools"),
        (replace(BASE, messages=(SYSTEM, Message("user", (Text("What?"),)))), "messages"),
        (replace(BASE, messages=(SYSTEM,)), "messages"),
    ],
)
def test_the_first_part_that_has_changed_is_named(later: Conversation, change: str) -> None:
    assert changed(later).change == change
    assert changed(later, "other").change == "model"


DEFERRED = Tool("later", deferred=True)
LOADED = Message("tool", (ToolResult("call_1", (ToolReference("later"),)),))


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (BASE, replace(BASE, tool_choice=ToolChoice("required"))),  # forces the answer, not the prompt
        (BASE, replace(BASE, tools=(TOOL, DEFERRED))),  # is shown nowhere yet
        (BASE, replace(BASE, tools=(TOOL, DEFERRED), messages=(SYSTEM, ASKED, CALLED, LOADED))),
        (
            replace(BASE, options={"add_generation_prompt": True}),
            replace(BASE, options={"add_generation_prompt": False, "continue_final_message": True}),
        ),
    ],
)
def test_fields_that_leave_the_prompts_beginning_alone_change_nothing(
    earlier: Conversation, later: Conversation
) -> None:
    assert compared(taken(earlier), taken(later)).change is None


def test_the_definition_of_a_deferred_tool_is_part_of_the_message_that_shows_it() -> None:
    earlier = replace(BASE, tools=(TOOL, DEFERRED), messages=(SYSTEM, ASKED, CALLED, LOADED))
    later = replace(earlier, tools=(TOOL, replace(DEFERRED, description="It does more.")))
    found = compared(taken(earlier), taken(later))
    assert (found.change, found.message) == ("messages", 2)


def test_a_developer_is_the_system() -> None:
    developer = replace(BASE, messages=(Message("developer", SYSTEM.parts), ASKED))
    assert changed(developer).change is None


def test_the_changed_setting_and_message_are_named() -> None:
    assert changed(replace(BASE, options={"reasoning_effort": "high"})).setting == "reasoning_effort"
    earlier = taken(replace(BASE, messages=(SYSTEM, ASKED, CALLED, RESULT)))
    later = taken(replace(BASE, messages=(SYSTEM, ASKED, CALLED, ASKED)))
    assert compared(earlier, later).message == 2


def test_answers_of_other_tenants_and_salts_are_not_found() -> None:
    kept, owner = Fingerprints(20_000), PromptOwner("tenant", "salt")
    kept.add(owner, "msg_1", taken())
    assert isinstance(kept.compare(owner, "msg_1", taken()), Comparison)
    for other, answer in (
        (PromptOwner("tenant", "other"), "msg_1"),
        (PromptOwner("", "salt"), "msg_1"),
        (owner, "msg_2"),
        (owner, "msg_\ud800"),
    ):
        assert kept.compare(other, answer, taken()) == EarlierNotFound()
    for number in range(100):
        kept.add(owner, f"msg_{number}", taken())
    assert kept.compare(owner, "msg_1", taken()) == EarlierNotFound()
    assert kept.compare(owner, "msg_99", taken()).change is None  # type: ignore[union-attr]
    kept.forget("salt")
    assert kept.compare(owner, "msg_99", taken()) == EarlierNotFound()


@pytest.mark.parametrize(
    ("comparison", "reason"),
    [
        (
            Comparison("model", earlier_prompt_tokens=80),
            {"type": "model_changed", "cache_missed_input_tokens": 70},
        ),
        (
            Comparison("tools", earlier_prompt_tokens=80),
            {"type": "tools_changed", "cache_missed_input_tokens": 70},
        ),
        (
            Comparison("system", earlier_prompt_tokens=80),
            {"type": "system_changed", "cache_missed_input_tokens": 70},
        ),
        (Comparison("messages", message=0), {"type": "messages_changed", "cache_missed_input_tokens": 0}),
        (Comparison("settings", setting="x"), {"type": "unavailable"}),
        (EarlierNotFound(), {"type": "previous_message_not_found"}),
        (Comparison(None), None),
        (None, None),
    ],
)
def test_the_shape_for_anthropics_clients(comparison: Any, reason: Any) -> None:
    told = anthropic_diagnostics(MISS, comparison)
    assert told is not None
    assert told["cache_miss_reason"] == reason
    assert told["rootstock"] == {
        "cause": "diverged",
        "position": 10,
        "prompt_tokens": 100,
        "cached_tokens": 10,
        "missed_tokens": 90,
    }


def test_a_hit_has_no_diagnostics_for_anthropics_clients() -> None:
    assert anthropic_diagnostics(HIT, Comparison(None, earlier_prompt_tokens=80)) is None
    assert anthropic_diagnostics(HIT, None) is None


@pytest.mark.parametrize(
    ("diagnosis", "comparison", "expected"),
    [
        (HIT, Comparison(None, earlier_prompt_tokens=80), {"type": "cache_hit"}),
        (EVICTED, Comparison(None, earlier_prompt_tokens=80), {"type": "unavailable"}),
        (HIT, EarlierNotFound(), {"type": "comparison_response_not_found"}),
        (HIT, Comparison("messages", earlier_prompt_tokens=80), {"type": "cache_hit"}),
        (ALL, Comparison(None, earlier_prompt_tokens=100), {"type": "cache_hit"}),
        *(
            (
                MISS,
                Comparison(change, setting, earlier_prompt_tokens=80),
                {
                    "type": "cache_miss",
                    "reason": reason,
                    "cache_missed_tokens": 70,
                    "comparison_reusable_tokens": 80,
                },
            )
            for change, setting, reason in (
                ("model", None, "model_changed"),
                ("tools", None, "tools_changed"),
                ("system", None, "input_changed"),
                ("messages", None, "input_changed"),
                ("settings", "reasoning_effort", "reasoning_effort_changed"),
                ("settings", "enable_thinking", "reasoning_effort_changed"),
                ("settings", "documents", "input_changed"),
            )
        ),
    ],
)
def test_the_shape_for_openais_clients(diagnosis: Diagnosis, comparison: Any, expected: Any) -> None:
    told = openai_diagnostics(diagnosis, comparison)
    assert told.pop("rootstock")["cause"] == diagnosis.cause
    assert told == expected
