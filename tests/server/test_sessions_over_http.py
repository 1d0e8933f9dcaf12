"""`GET /v1/cache/sessions`, and what an operator and a client see of requests that are held."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rootstock.config import EngineConfig, ServerConfig
from server.conftest import Served, user
from server.held import Held
from text.prompts.chat_tokenizers import chat_tokenizer
from waiting import wait_until

SESSIONS = "/v1/cache/sessions"


def key(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


def turn(
    served: Served, session: str, text: str, headers: dict[str, str] | None = None, tokens: int = 2
) -> Any:
    body = {"prompt": text, "max_tokens": tokens, "temperature": 0}
    answer = served.client.post(
        "/v1/completions", json=body, headers={"X-Session-ID": session, **(headers or {})}
    )
    assert answer.status_code == 200, answer.text
    return answer


def test_a_session_is_listed_with_its_requests_and_hits(serve: Any) -> None:
    with serve() as served:
        assert served.client.get(SESSIONS).json() == {"sessions": []}
        turn(served, "one", "a prompt of some length")
        turn(served, "one", "a prompt of some length, and more")
        turn(served, "two", "another prompt")
        listed = served.client.get(SESSIONS).json()
        assert [each["session"] for each in listed["sessions"]] == ["two", "one"]
        one = listed["sessions"][1]
        assert (one["requests"], one["running"], one["held"]) == (2, 0, 0)
        assert one["state"] == "expected"
        assert one["prompt_tokens"] == 56
        assert one["cached_tokens"] == 23
        assert one["hit_rate"] == pytest.approx(23 / 56, abs=1e-4)
        assert one["bytes"] > 0
        assert one["held_s"] == 0
        limited = served.client.get(SESSIONS, params={"limit": 1}).json()["sessions"]
        assert [each["session"] for each in limited] == ["two"]
        for limit in ("0", "1001", "-1", "many", "9" * 400):
            assert served.client.get(SESSIONS, params={"limit": limit}).status_code == 400
        assert served.metric("rootstock_sessions", state="known") == 2


@pytest.mark.parametrize("drafts", [0, 4])
def test_what_a_session_lost_and_what_its_drafts_gave_are_listed(serve: Any, drafts: int) -> None:
    prompts = {name: f"{name} " * 60 for name in ("aa", "bb", "cc")}
    config = EngineConfig(idle_work=False, max_session_wait_s=0.0, draft_tokens=drafts)
    with serve(config, blocks=80) as served:
        turn(served, "aa", prompts["aa"])
        for other in ("bb", "cc"):
            turn(served, other, prompts[other])
        turn(served, "aa", prompts["aa"] + "and more", tokens=60)
        listed = {each["session"]: each for each in served.client.get(SESSIONS).json()["sessions"]}
        aa = listed["aa"]
        assert aa["lost_tokens"] == 180 + 1 - aa["cached_tokens"] > 0
        assert aa["lost_s"] >= 0
        assert listed["bb"]["lost_tokens"] == listed["bb"]["lost_s"] == 0
        assert aa["queued_s"] >= 0
        assert 0 <= aa["accepted_draft_tokens"] <= aa["draft_tokens"]
        assert drafts or not aa["draft_tokens"]


@pytest.mark.behaviour(9)
def test_a_tenant_sees_its_own_sessions_only(serve: Any) -> None:
    config = ServerConfig(tenant_keys={"key-of-a": "a", "key-of-b": "b"}, admin_key="admin")
    with serve(server=config) as served:
        turn(served, "of a", "a prompt", key("key-of-a"))
        turn(served, "of b", "a prompt", key("key-of-b"))

        def names(value: str) -> set[str]:
            listed = served.client.get(SESSIONS, headers=key(value)).json()["sessions"]
            return {each["session"] for each in listed}

        assert names("key-of-a") == {"of a"}
        assert names("key-of-b") == {"of b"}
        assert names("admin") == {"of a", "of b"}


@pytest.mark.behaviour(51)
def test_a_held_request_is_seen_in_the_list_the_metrics_and_a_header(serve: Any) -> None:
    prompts = {name: f"{name} " * 80 for name in ("aa", "bb", "cc", "dd")}
    forwards = Held()
    with serve(EngineConfig(idle_work=False), blocks=80, fault=forwards) as served:
        forwards.let_go()
        for name in ("aa", "bb"):
            turn(served, name, prompts[name])
        forwards.hold()
        answers: dict[str, Any] = {}

        def ask(name: str, tokens: int) -> threading.Thread:
            def run() -> None:
                answers[name] = turn(served, name, prompts[name], tokens=tokens)

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        threads = [ask("aa", 300)]
        wait_until(lambda: served.assembly.engine.scheduler.running == 1)
        for number, name in enumerate(("cc", "dd"), start=1):
            threads.append(ask(name, 2))
            wait_until(lambda number=number: served.metric("rootstock_engine_phases", phase="held") == number)
        states = {each["session"]: each["state"] for each in served.client.get(SESSIONS).json()["sessions"]}
        assert states == {"aa": "running", "bb": "expected", "cc": "held", "dd": "held"}
        forwards.let_go()
        for thread in threads:
            thread.join(60)
        assert "X-Rootstock-Held-Requests" not in answers["aa"].headers
        assert answers["dd"].headers["X-Rootstock-Held-Requests"] in ("1", "2")
        assert served.metric("rootstock_held_requests_total") == 2
        assert served.metric("rootstock_held_seconds_total") > 0
        waits = {each["session"]: each["held_s"] for each in served.client.get(SESSIONS).json()["sessions"]}
        assert waits["cc"] > 0 < waits["dd"]
        assert waits["aa"] == waits["bb"] == 0
        served.settled()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_without_a_call_ends_its_turn(serve: Any, stream: bool) -> None:
    """Its session is not expected back soon, unlike one that waits for a tool."""
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "look", "parameters": nothing}}
    with serve(tokenizer=chat_tokenizer("qwen3"), vocab_size=800) as served:
        for session, fields in {
            "calls": {"tools": [tool], "tool_choice": "required", "max_tokens": 200},
            "answers": {"tools": [tool], "max_tokens": 5},
            "has no tools": {"max_tokens": 5},
        }.items():
            body = {"messages": user(f"Which word {session}?"), "stream": stream, **fields}
            headers = {"X-Session-ID": session}
            assert served.client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
        listed = served.client.get(SESSIONS).json()["sessions"]
        states = {each["session"]: each["state"] for each in listed}
        assert states == {"calls": "expected", "answers": "active", "has no tools": "expected"}
