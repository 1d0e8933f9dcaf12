"""The hints of each dialect, on each route: their translation for the cache, their precedence, and hostile values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.datastructures import Headers

from rootstock.cache.retention.hint_types import (
    MAX_TTL_S,
    ActKind,
    CacheHints,
    HintOutcome,
    PrefixAct,
    RetentionWish,
    Verdict,
)
from rootstock.engine.request import Finished, TokenEvent, Usage
from rootstock.errors import InvalidParameter, Unsupported
from rootstock.server.formats.anthropic.schema import MessagesRequest
from rootstock.server.formats.openai.schema import ChatCompletionRequest, CompletionRequest
from rootstock.server.formats.responses.schema import ResponseRequest
from rootstock.server.wire.hints.directives import MAX_DIRECTIVES
from rootstock.server.wire.hints.fields import MAX_ACTIONS, HintFields
from rootstock.server.wire.hints.headers import MAX_SESSION_CHARS, HeaderHints, header_hints
from rootstock.server.wire.hints.sent import NO_HINTS, SentHints, sent_hints
from rootstock.text.conversation.types import PrefixMark
from rootstock.text.prompts.prompt_tokenizer import PlacedMark
from rootstock.text.prompts.tenant_salt import PromptOwner

Json = dict[str, Any]
USER = [{"role": "user", "content": "Hello?"}]
ROUTES: dict[str, tuple[type[HintFields], Json]] = {
    "chat": (ChatCompletionRequest, {"messages": USER}),
    "completion": (CompletionRequest, {"prompt": "Hello?"}),
    "messages": (MessagesRequest, {"messages": USER}),
    "responses": (ResponseRequest, {"input": "Hello?"}),
}
each_route = pytest.mark.parametrize("route", ROUTES)


def head(**headers: str) -> HeaderHints:
    """Returns the hints of headers, whose names have "_" for "-"."""
    sent = [(name.replace("_", "-").lower().encode(), value.encode()) for name, value in headers.items()]
    return header_hints(Headers(raw=sent))


def read(
    fields: Json, route: str = "chat", *, marks: tuple[PlacedMark, ...] = (), **headers: str
) -> SentHints:
    schema, needed = ROUTES[route]
    return sent_hints(schema.model_validate(needed | fields), head(**headers), PromptOwner.of("ann"), marks)


def cache(fields: Json, route: str = "chat", **more: Any) -> CacheHints:
    found = read(fields, route, **more).cache
    assert found is not None
    return found


def told(sent: SentHints) -> dict[str, str]:
    return {outcome.field: outcome.verdict.value for outcome in sent.decided}


def retained(path: str, **fields: Any) -> CacheHints:
    return CacheHints("ann", retentions=(RetentionWish(path, **fields),))


def envelope(*directives: Any, **action: Any) -> Json:
    of_action = {"action_id": "1", "action_type": "kv.retain", "action_version": "1.0"}
    payload = {"scope": None, "directives": list(directives)}
    actions = [{**of_action, "payload": payload, **action}]
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": actions}}


DIRECTIVES = "kv_hints.actions[0].payload.directives"

DIALECTS: dict[str, tuple[Json, CacheHints]] = {
    "OpenAI's key": (
        {"prompt_cache_key": "thread"},
        CacheHints("ann", "thread", "prompt_cache_key"),
    ),
    "OpenAI's retention": (
        {"prompt_cache_retention": "24h"},
        retained("prompt_cache_retention", ttl_s=86_400.0),
    ),
    "OpenAI's options": (
        {"prompt_cache_options": {"ttl": "12h"}},
        retained("prompt_cache_options.ttl", ttl_s=43_200.0),
    ),
    "Dynamo's control": (
        {"nvext": {"cache_control": {"type": "ephemeral", "ttl": "1h"}}},
        retained("nvext.cache_control", ttl_s=3600.0),
    ),
    "Dynamo's control in seconds": (
        {"nvext": {"cache_control": {"type": "ephemeral", "ttl": "450"}}},
        retained("nvext.cache_control", ttl_s=450.0),
    ),
    "Dynamo's control without a time": (
        {"nvext": {"cache_control": {"type": "ephemeral"}}},
        retained("nvext.cache_control", ttl_s=300.0),
    ),
    "Dynamo's priority": (
        {"nvext": {"agent_hints": {"priority": 7}}},
        retained("nvext.agent_hints.priority", priority=7),
    ),
    "Dynamo's session": (
        {"nvext": {"session_control": {"session_id": "s", "action": "open", "timeout": 60}}},
        CacheHints(
            "ann",
            "s",
            "nvext.session_control.session_id",
            retentions=(RetentionWish("nvext.session_control.timeout", ttl_s=60.0),),
        ),
    ),
    "Dynamo's context": (
        {"nvext": {"agent_context": {"session_id": "s", "session_final": True}}},
        CacheHints("ann", "s", "nvext.agent_context.session_id", ends_session=True),
    ),
    "vLLM's hint": (
        {"agent_hint": {"session_id": "s", "cache_control": {"type": "ephemeral", "ttl": 30.5}}},
        CacheHints(
            "ann",
            "s",
            "agent_hint.session_id",
            retentions=(RetentionWish("agent_hint.cache_control", ttl_s=30.5),),
        ),
    ),
    "vLLM's eviction": (
        {"agent_hint": {"session_id": "s", "context_management": {"edits": [{"type": "evict"}]}}},
        CacheHints("ann", "s", "agent_hint.session_id", ends_session=True),
    ),
    "vLLM's priority": ({"priority": -3}, retained("priority", priority=3)),
    "vLLM's directives": (
        envelope(
            {"start": 0, "end": 100, "priority": 90, "duration": 60},
            {"start": 100, "priority": 50},
            {"covers_output": True, "priority": 0},
        ),
        CacheHints(
            "ann",
            retentions=(
                RetentionWish(f"{DIRECTIVES}[0]", 100, 60.0, 90),
                RetentionWish(f"{DIRECTIVES}[1]", None, None, 50),
            ),
            acts=(PrefixAct(f"{DIRECTIVES}[2]", ActKind.RELEASE, None),),
            may_pin=True,
        ),
    ),
}


@each_route
@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_route_reads_each_dialect(route: str, dialect: str) -> None:
    fields, expected = DIALECTS[dialect]
    found = read(fields, route)
    assert found.cache == expected
    assert set(told(found).values()) <= {"accepted"}


@each_route
def test_a_request_without_hints_has_none(route: str) -> None:
    assert read({}, route) == NO_HINTS
    neutral = {"priority": 0, "prompt_cache_key": "", "prompt_cache_retention": "in_memory", "nvext": {}}
    assert read(neutral, route) == NO_HINTS
    assert NO_HINTS.told([]) == {}


# ---- marks


def test_marks_are_kept_for_their_time_and_breakpoints_for_that_of_the_request() -> None:
    marks = (
        PlacedMark(PrefixMark("system[0].cache_control", 3600.0), 10),
        PlacedMark(PrefixMark("messages[0].content[0].prompt_cache_breakpoint"), 20),
        PlacedMark(PrefixMark("messages[1].content[0].cache_control", 300.0), None),
    )
    found = read({}, "messages", marks=marks)
    assert found.cache == CacheHints(
        "ann",
        retentions=(
            RetentionWish("system[0].cache_control", 10, 3600.0),
            RetentionWish("messages[0].content[0].prompt_cache_breakpoint", 20, 1800.0),
        ),
    )
    assert told(found) == {"messages[1].content[0].cache_control": "refused"}
    options = {"prompt_cache_options": {"ttl": "12h", "mode": "explicit"}}
    [mark, given] = cache(options, marks=marks[:2]).retentions
    assert (mark.ttl_s, given.ttl_s) == (3600.0, 43_200.0)  # the time is that of the breakpoints alone


def test_only_accepted_marks_of_an_hour_are_told_as_kept_for_it() -> None:
    marks = tuple(
        PlacedMark(PrefixMark(f"messages[{at}].cache_control", ttl_s), 10 * at)
        for at, ttl_s in ((1, 3600.0), (2, 3600.0), (3, 300.0))
    )
    found = read({}, "messages", marks=marks)
    verdicts = [Verdict.ACCEPTED, Verdict.CLIPPED, Verdict.ACCEPTED]
    outcomes = [HintOutcome(mark.asked.field, verdict) for mark, verdict in zip(marks, verdicts, strict=True)]
    assert found.kept_an_hour(outcomes) == 10
    assert found.kept_an_hour([]) == 0


# ---- headers


@pytest.mark.parametrize(
    ("headers", "session", "field"),
    [
        ({"x_claude_code_session_id": "c"}, "c", "X-Claude-Code-Session-ID"),
        ({"x_claude_code_session_id": "c", "x_claude_code_agent_id": "a"}, "a", "X-Claude-Code-Agent-ID"),
        ({"thread_id": "t", "session_id": "c"}, "t", "Thread-ID"),
        ({"session_id": "c"}, "c", "Session-ID"),
        ({"x_session_id": " o "}, "o", "X-Session-ID"),
        ({"x_dynamo_session_id": "d", "x_claude_code_session_id": "c"}, "d", "X-Dynamo-Session-ID"),
    ],
)
def test_the_headers_of_agents_name_sessions(headers: dict[str, str], session: str, field: str) -> None:
    assert cache({}, **headers) == CacheHints("ann", session, field)


def test_headers_of_dynamo_end_sessions_and_override_priorities() -> None:
    fields = {"nvext": {"agent_hints": {"priority": 7}}}
    headers = {
        "x_dynamo_session_id": "d", "x_dynamo_session_final": "true", "x_dynamo_request_priority": "-5",
        "x_dynamo_request_strict_priority": "2",
    }  # fmt: skip
    found = read(fields, **headers)
    assert found.cache == CacheHints(
        "ann", "d", "X-Dynamo-Session-ID", True, (RetentionWish("X-Dynamo-Request-Priority", priority=-5),)
    )
    assert told(found) == {
        "X-Dynamo-Session-Final": "accepted",
        "nvext.agent_hints.priority": "refused",
        "X-Dynamo-Request-Strict-Priority": "refused",
    }


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"x_dynamo_session_id": "d" * (MAX_SESSION_CHARS + 1)}, "X-Dynamo-Session-ID"),
        ({"x_dynamo_request_priority": "high"}, "X-Dynamo-Request-Priority"),
        ({"x_dynamo_request_priority": "9" * 40}, "X-Dynamo-Request-Priority"),
        ({"x_dynamo_request_priority": "²"}, "X-Dynamo-Request-Priority"),
        ({"x_dynamo_session_final": "true"}, "X-Dynamo-Session-Final"),  # of no session
    ],
)
def test_a_wrong_header_is_refused_without_an_error(headers: dict[str, str], field: str) -> None:
    found = read({}, **headers)
    assert found.cache is None
    assert told(found) == {field: "refused"}
    [hint] = found.told([])["rootstock"]["hints"]
    assert hint["reason"]


# ---- precedence


def test_of_several_names_of_the_session_the_first_counts() -> None:
    fields = {
        "nvext": {"session_control": {"session_id": "a"}, "agent_context": {"session_id": "b"}},
        "agent_hint": {"session_id": "c"},
        "prompt_cache_key": "a",
    }
    found = read(fields, x_dynamo_session_id="d")
    assert found.cache == CacheHints("ann", "a", "nvext.session_control.session_id")
    # An equal name is no other wish.
    assert told(found) == {
        "nvext.agent_context.session_id": "refused",
        "agent_hint.session_id": "refused",
        "X-Dynamo-Session-ID": "refused",
    }
    reasons = {outcome.reason for outcome in found.decided}
    assert reasons == {"nvext.session_control.session_id counts"}


def test_of_several_times_and_priorities_the_first_counts() -> None:
    fields = {
        "nvext": {"cache_control": {"ttl": "1h"}, "agent_hints": {"priority": 5}},
        "agent_hint": {"cache_control": {"ttl": 10}},
        "prompt_cache_options": {"ttl": "30m"},
        "prompt_cache_retention": "24h",
        "priority": 5,
    }
    found = read(fields)
    assert found.cache == CacheHints(
        "ann",
        retentions=(
            RetentionWish("nvext.cache_control", ttl_s=3600.0),
            RetentionWish("nvext.agent_hints.priority", priority=5),
        ),
    )
    assert told(found) == dict.fromkeys(
        ("agent_hint.cache_control", "prompt_cache_options.ttl", "prompt_cache_retention", "priority"),
        "refused",
    )


# ---- bounds


def test_values_beyond_the_caches_bounds_are_clipped() -> None:
    found = read({"nvext": {"cache_control": {"ttl": 10**8}, "agent_hints": {"priority": 2**31 - 1}}})
    assert found.cache is not None
    assert [(each.ttl_s, each.priority) for each in found.cache.retentions] == [(MAX_TTL_S, 0), (None, 100)]
    assert told(found) == {"nvext.cache_control": "clipped", "nvext.agent_hints.priority": "clipped"}
    assert cache({"priority": 2**31 - 1}).retentions[0].priority == -100


def test_hints_that_the_server_does_not_follow_are_refused_in_the_answer() -> None:
    fields = {
        "nvext": {
            "agent_hints": {
                "strict_priority": 1, "osl": 100, "speculative_prefill": True, "latency_sensitivity": 0.5,
                "prefix_id": "NAT's",
            },
            "annotations": ["formatted_prompt"],
            "new": 1,
        },
        "agent_hint": {
            "session_id": "s",
            "cache_control": {"block_offset": 3},
            "context_management": {
                "manage_request": True,
                "edits": [
                    {"type": "offload", "block_end": 3},
                    {"type": "prefetch"},
                    {"type": "evict", "block_start": 1},
                ],
            },
        },
        **envelope(action_type="kv.fetch"),
    }  # fmt: skip
    found = read(fields)
    assert found.cache is not None
    assert not found.cache.ends_session
    hints, managed = "nvext.agent_hints", "agent_hint.context_management"
    assert told(found) == {
        f"{hints}.strict_priority": "refused",
        f"{hints}.osl": "refused",
        f"{hints}.speculative_prefill": "refused",
        f"{hints}.latency_sensitivity": "refused",
        f"{hints}.prefix_id": "refused",
        "nvext.new": "refused",
        "agent_hint.cache_control.block_offset": "clipped",
        f"{managed}.manage_request": "refused",
        f"{managed}.edits[0]": "refused",
        f"{managed}.edits[1]": "refused",
        f"{managed}.edits[2]": "refused",
        "kv_hints.actions[0]": "refused",
    }


def test_few_unknown_fields_are_told_and_their_names_are_cut() -> None:
    found = read({"nvext": {"agent_hints": {f"{i}" * 1000: 1 for i in range(10)}}})
    assert len(found.decided) < 10
    assert all(len(outcome.field) < 400 for outcome in found.decided)


@each_route
@pytest.mark.parametrize(
    "fields",
    [
        {"nvext": []},
        {"nvext": {"agent_hints": {"priority": "high"}}},
        {"nvext": {"agent_hints": {"priority": 2**31}}},
        {"nvext": {"agent_hints": {"priority": True}}},
        {"nvext": {"agent_hints": {"osl": -1}}},
        {"nvext": {"cache_control": {"type": "persistent"}}},
        {"nvext": {"session_control": {}}},
        {"nvext": {"session_control": {"session_id": ""}}},
        {"nvext": {"session_control": {"session_id": "s" * (MAX_SESSION_CHARS + 1)}}},
        {"nvext": {"session_control": {"session_id": "s", "action": "steal"}}},
        {"agent_hint": {"cache_control": {"ttl": -1}}},
        {"agent_hint": {"context_management": {"edits": [{"type": "evict"}] * 17}}},
        {"kv_hints": {"actions": []}},
        {
            "kv_hints": envelope()["kv_hints"]
            | {"actions": envelope()["kv_hints"]["actions"] * (MAX_ACTIONS + 1)}
        },
        {"prompt_cache_retention": "48h"},
        {"prompt_cache_key": "k" * 2000},
        {"prompt_cache_key": "\ud800"},
        {"prompt_cache_options": {"mode": "none"}},
        {"priority": 1.5},
    ],
)
def test_values_of_wrong_types_are_refused(route: str, fields: Json) -> None:
    with pytest.raises(ValidationError):
        read(fields, route)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"nvext": {"cache_control": {"ttl": "soon"}}}, "nvext.cache_control.ttl"),
        ({"nvext": {"cache_control": {"ttl": "9" * 4000}}}, "nvext.cache_control.ttl"),
        ({"nvext": {"cache_control": {"ttl": "٣"}}}, "nvext.cache_control.ttl"),
        ({"prompt_cache_options": {"ttl": "1 h"}}, "prompt_cache_options.ttl"),
        (envelope(action_version="2.0"), "kv_hints.actions[0].action_version"),
        (envelope(payload={}), DIRECTIVES),
        (envelope(*[{"priority": 1}] * (MAX_DIRECTIVES + 1)), "kv_hints"),
        (envelope([]), f"{DIRECTIVES}[0]"),
        (envelope({"priority": 1, "begin": 3}), f"{DIRECTIVES}[0]"),
        (envelope({}), f"{DIRECTIVES}[0].priority"),
        (envelope({"priority": 101}), f"{DIRECTIVES}[0].priority"),
        (envelope({"priority": True}), f"{DIRECTIVES}[0].priority"),
        (envelope({"priority": 1, "start": -1}), f"{DIRECTIVES}[0].start"),
        (envelope({"priority": 1, "start": 5, "end": 5}), f"{DIRECTIVES}[0].end"),
        (envelope({"priority": 1, "duration": float("nan")}), f"{DIRECTIVES}[0].duration"),
        (envelope({"priority": 1, "duration": 10**30}), f"{DIRECTIVES}[0].duration"),
        (envelope({"priority": 1, "covers_output": 1}), f"{DIRECTIVES}[0].covers_output"),
        (envelope({"priority": 1, "covers_output": True, "start": 0}), f"{DIRECTIVES}[0].covers_output"),
        (envelope({"priority": 1, "end": 9}, {"priority": 2, "start": 9}), DIRECTIVES),
    ],
)
def test_wrong_values_are_refused_with_their_path(fields: Json, param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read(fields)
    assert caught.value.param == param
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "other"}, {"greed_sampling": True}, {"max_thinking_tokens": 5},
        {"metadata_upload": {"url": "x"}}, {"token_data": [1]}, {"use_raw_prompt": True},
    ],
)  # fmt: skip
def test_extensions_that_would_change_the_answer_are_refused(fields: Json) -> None:
    with pytest.raises(Unsupported, match="nvext"):
        read({"nvext": fields})


# ---- answers


def ended(*outcomes: HintOutcome) -> Finished:
    return Finished(None, "stop", Usage(1, 0, 1), hints=outcomes)  # type: ignore[arg-type]


def test_an_answer_tells_the_most_severe_decision_about_each_hint() -> None:
    found = read({"nvext": {"agent_hints": {"priority": 1000, "osl": 5}}})
    path = "nvext.agent_hints.priority"
    event = TokenEvent(None, 1, "x", hints=(HintOutcome(path, Verdict.ACCEPTED),))  # type: ignore[arg-type]
    [priority, osl] = found.told([event])["rootstock"]["hints"]
    assert priority == {"field": path, "verdict": "clipped", "reason": "to 100"}
    assert (osl["field"], osl["verdict"]) == ("nvext.agent_hints.osl", "refused")
    refused = ended(HintOutcome(path, Verdict.REFUSED, "no room"))
    [priority, _] = found.told([ended(HintOutcome(path, Verdict.ACCEPTED)), refused])["rootstock"]["hints"]
    assert priority == {"field": path, "verdict": "refused", "reason": "no room"}


# ---- tenants


def test_a_salts_sessions_are_no_other_salts() -> None:
    body = ChatCompletionRequest(messages=USER, prompt_cache_key="s")
    found = [sent_hints(body, HeaderHints(), PromptOwner.of("", salt)) for salt in (None, "a", "b", "a")]
    names = [each.cache.session for each in found if each.cache is not None]
    assert names[0] == "s"
    assert len(set(names)) == 3
    assert found[1] == found[3]
    assert found[0] == replace(found[1], cache=found[0].cache)
