"""/metrics counts tools that the model does not see, and the responses that are stored."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from rootstock.config import ServerConfig
from rootstock.units import MIB
from server.conftest import user
from waiting import wait_until

SEARCH = {"type": "web_search"}
FUNCTION = {"type": "function", "name": "look_up"}


def test_ignored_tools_are_counted_by_their_type(serve: Any) -> None:
    with serve() as served:
        for _ in range(2):
            body = {"input": "x", "max_output_tokens": 1, "tools": [SEARCH, FUNCTION]}
            assert served.client.post("/v1/responses", json=body).status_code == 200
        assert served.metric("rootstock_ignored_tools_total", type="web_search") == 2
        assert served.client.get("/metrics").text.count("rootstock_ignored_tools_total{") == 1


@pytest.mark.parametrize(
    ("path", "tools", "code"),
    [
        ("/v1/responses", [{"type": "mcp"}], "unsupported_parameter"),
        ("/v1/responses", [{"type": "function"}], "missing_parameter"),
        ("/v1/messages", [{"type": "code_execution_20250522", "name": "x"}], "unsupported_parameter"),
        ("/v1/chat/completions", [{"type": "web_search"}], "invalid_parameter"),
    ],
)
def test_requests_refused_for_a_tool_are_counted_by_the_error(
    serve: Any, path: str, tools: Any, code: str
) -> None:
    with serve() as served:
        body = {"input": "x"} if path == "/v1/responses" else {"messages": user("x"), "max_tokens": 1}
        assert served.client.post(path, json={**body, "tools": tools}).status_code == 400
        assert served.metric("rootstock_refused_tools_total", code=code) == 1
        assert served.client.post(path, json={**body, "stop": [""]}).status_code == 400
        assert served.client.get("/metrics").text.count("rootstock_refused_tools_total{") == 1


def test_stored_responses_are_counted_with_their_bytes_and_events(serve: Any) -> None:
    random = Random(0)
    with serve(server=ServerConfig(responses_budget_bytes=MIB)) as served:

        def metric(name: str, **labels: str) -> float:
            found: float = served.metric(f"rootstock_stored_responses{name}", **labels)
            return found

        def create(**fields: Any) -> str:
            # Reasoning that another server has sealed is stored, and left out of the prompt.
            sealed = {"type": "reasoning", "summary": [], "encrypted_content": random.randbytes(80_000).hex()}
            asked = {"role": "user", "content": "x"}
            body = {"input": [sealed, asked], "max_output_tokens": 1, **fields}
            id: str = served.client.post("/v1/responses", json=body).json()["id"]
            return id

        assert metric("") == metric("_bytes", of="used") == 0
        create(store=False)
        first = create()
        wait_until(lambda: metric("_events_total", event="stored") == 1)
        assert metric("") == 1
        assert 0 < metric("_bytes", of="used") <= metric("_bytes", of="budget") == MIB
        served.client.delete(f"/v1/responses/{first}")
        assert metric("_events_total", event="deleted") == 1
        assert metric("") == 0
        for _ in range(20):
            create()
        wait_until(lambda: metric("_events_total", event="stored") == 21)
        assert metric("_events_total", event="evicted") == 20 - metric("") > 0
        assert metric("_bytes", of="used") <= MIB
        assert metric("_bytes", of="waiting_to_be_stored") == metric("_events_total", event="not_stored") == 0
