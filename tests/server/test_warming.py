"""`/v1/cache/warm` and declared prompts: they are cached before a request sends them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rootstock.config import EngineConfig
from rootstock.errors import InvalidOption
from rootstock.server.routes.declared_prompts import DeclaredPrompt, read_warm_file
from rootstock.testing.fake_runtime import FULL, STATE
from server.conftest import GREEDY, Served, assert_error, served_by_oracle, user

TEXT = "Tell me about the library and about its books, at length. " * 4


@pytest.fixture(params=[(FULL,), (FULL, STATE)], ids=["full", "full+state"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with served_by_oracle(EngineConfig(idle_work=True), families=request.param) as made:
        yield made


def warm(served: Served, body: Any, route: str = "", wait: bool = True) -> Any:
    return served.client.post(f"/v1/cache/warm{route}", params={"wait": wait}, json=body)


def cached_tokens(served: Served, text: str = TEXT, **fields: Any) -> int:
    usage = served.chat(text, max_tokens=2, **GREEDY, **fields).json()["usage"]
    assert isinstance(usage["prompt_tokens_details"]["cached_tokens"], int)
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_a_chat_that_was_warmed_is_a_hit(served: Served) -> None:
    tokens = len(served.chat_prompt(TEXT)) - 1  # the last one is computed by each request
    told = warm(served, {"messages": user(TEXT)}).json()
    assert told == {"tokens": tokens, "cached_tokens": tokens, "state": "cached"}
    assert cached_tokens(served) == tokens
    again = warm(served, {"messages": user(TEXT)}, wait=False).json()
    assert again["cached_tokens"] == tokens


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/completions", {"prompt": TEXT}),
        ("/completions", {"prompt": [1, 2, 3, 4]}),
        ("/chat/completions", {"messages": user(TEXT)}),
        ("/messages", {"messages": user(TEXT), "max_tokens": 5}),
        ("/responses", {"input": TEXT}),
    ],
)
def test_each_wire_format_has_a_route(served: Served, route: str, body: Any) -> None:
    told = warm(served, {"model": served.assembly.description.name, **body}, route)
    assert told.status_code == 200, told.text
    assert told.json()["state"] == "cached"
    assert served.assembly.engine.stats().cache.idle_tokens == told.json()["tokens"]


def test_a_list_of_prompts_has_a_state_for_each(served: Served) -> None:
    told = warm(served, {"prompts": [{"messages": user("a" * n)} for n in (10, 40)]}).json()
    assert [one["state"] for one in told["prompts"]] == ["cached", "cached"]
    told = warm(served, {"prompts": [{"prompt": f"{n} {TEXT}"} for n in range(3)]}, wait=False).json()
    assert all(one["state"] in ("queued", "cached") for one in told["prompts"])


def test_a_warmed_prompt_belongs_to_its_salt(served: Served) -> None:
    warm(served, {"messages": user(TEXT), "cache_salt": "one"})
    assert cached_tokens(served, cache_salt="other") == 0
    assert cached_tokens(served, cache_salt="one") > 100


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"prompts": [{"prompt": "a"}], "prompt": "b"}, "prompts"),
        ({"prompts": [{"prompt": "a"}] * 33}, "prompts"),
        ({"prompts": [{"messages": 5}]}, "prompts[0].messages"),
    ],
)
def test_wrong_bodies_are_refused(served: Served, body: Any, param: str) -> None:
    response = warm(served, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_without_idle_work_the_route_tells_the_remedy() -> None:
    with served_by_oracle() as served:
        assert_error(warm(served, {"prompt": "a"}), 404, "idle_work_off", "--no-idle-work")


def test_declared_prompts_are_cached_and_wrong_ones_logged(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    warmer = served.app.state.warmer
    declared = [
        DeclaredPrompt("line 1", "/v1/chat/completions", {"messages": user(TEXT)}),
        DeclaredPrompt("line 2", "/v1/chat/completions", {"messages": user("x"), "model": "another"}),
        DeclaredPrompt("line 3", "/v1/completions", {"prompt": 5.0}),
        DeclaredPrompt("line 4", "/v1/responses", {"input": TEXT}, "tenant", 60.0),
        *(DeclaredPrompt(f"line {n}", "/v1/completions", {"prompt": f"{n}{TEXT}"}) for n in range(5, 30)),
    ]
    with caplog.at_level(logging.WARNING):
        warmer.warm_all(declared)
    assert "line 2 is not cached" in caplog.text
    assert "line 3 is not cached" in caplog.text
    assert "27 cached, 2 refused" in caplog.text
    assert cached_tokens(served) > 100


def test_a_file_is_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "warm.jsonl"
    entries = [
        {"messages": user("a")},
        {"custom_id": "1", "method": "POST", "url": "/v1/messages", "body": {"messages": user("b")}},
        {"url": "/v1/responses", "body": {"input": "c"}, "tenant": "t", "retain_s": 30},
    ]
    file.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    assert list(read_warm_file("--warm", file)) == [
        DeclaredPrompt(f"{file}, line 1", "/v1/chat/completions", {"messages": user("a")}),
        DeclaredPrompt(f"{file}, line 2", "/v1/messages", {"messages": user("b")}),
        DeclaredPrompt(f"{file}, line 3", "/v1/responses", {"input": "c"}, "t", 30),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"url": "/v1/else", "body": {}}',
        '{"body": 5}',
        '{"body": {}, "retain_s": -1}',
        "[" * 9999,
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "warm.jsonl"
    file.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(InvalidOption, match="line 2"):
        list(read_warm_file("--warm", file))
    with pytest.raises(InvalidOption):
        list(read_warm_file("--warm", tmp_path / "absent"))
