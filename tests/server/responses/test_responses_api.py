"""The Responses API over HTTP: a model that writes scripted answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rootstock.server.formats.responses import calls
from rootstock.server.formats.responses.answers import InputItems, ResponseBody
from rootstock.server.formats.responses.sealing import Sealer
from rootstock.server.formats.responses.store import TenantResponses
from rootstock.testing.byte_tokenizer import ByteTokenizer
from server.conftest import assert_error
from server.responses.events import checked, parsed
from server.responses.scripted import scripted_server
from waiting import HANG_S

Json = dict[str, Any]
PATH = "/v1/responses"
WEATHER: Json = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather of a town.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    "strict": True,
}
PATCH: Json = {
    "type": "custom",
    "name": "patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


def script(prompt: str) -> str:
    """Answers with the text after the last "say:" of the prompt, up to the end of its message."""
    said = prompt.rpartition("say:")[2].partition("<|end|>")[0]
    return said if "say:" in prompt else "hello"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with scripted_server(script) as url, httpx.Client(base_url=url, timeout=HANG_S) as client:
        yield client


def created(client: httpx.Client, **fields: Any) -> Json:
    answer = client.post(PATH, json=fields)
    assert answer.status_code == 200, answer.text
    body: Json = answer.json()
    ResponseBody.model_validate(body, strict=True)  # as the OpenAPI document says
    return body


def streamed(client: httpx.Client, **fields: Any) -> list[Json]:
    answer = client.post(PATH, json={"stream": True, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return parsed(answer.text)


def test_a_whole_response(client: httpx.Client) -> None:
    body = created(client, model="fake", input="say:Good day.", instructions="Be brief.", metadata={"a": "b"})
    assert body["object"] == "response"
    assert body["id"].startswith("resp_")
    assert body["status"] == "completed"
    assert body["instructions"] == "Be brief."
    assert body["metadata"] == {"a": "b"}
    [item] = body["output"]
    assert item["type"] == "message"
    assert item["status"] == "completed"
    assert item["content"] == [
        {"type": "output_text", "annotations": [], "text": "Good day.", "logprobs": []}
    ]
    tokens = ByteTokenizer().encode_chat(
        "<|begin|><|system|>Be brief.<|end|><|user|>say:Good day.<|end|><|assistant|>"
    )
    written = len("Good day.") + 1  # and the end token
    assert body["usage"] == {
        "input_tokens": len(tokens),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": len(tokens) - 1},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(tokens) + written,
    }


ANSWERS = [
    "plain text",
    "",
    "<think>let me see</think>It is so.",
    '<think>ask</think><call weather>{"town": "Oslo"}</call>',
    'Wait. <call weather>{"town":"Oslo"}</call><call weather>{"town":"Bergen"}</call> Done.',
    '<call patch>{"input": "line \\"one\\"\\nline \\u00e4 \\ud834\\udd1e two"}</call>',
    '<call crm__find>{"id": 7}</call>',
    '<call local_shell>{"command": ["ls", "-l"]}</call>',
    '<call tool_search>{"query": "post"}</call>then',
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_stream_has_the_output_of_the_whole_response(client: httpx.Client, answer: str) -> None:
    tools = [
        WEATHER,
        PATCH,
        {
            "type": "namespace",
            "name": "crm",
            "description": "Customers.",
            "tools": [{**WEATHER, "name": "find"}],
        },
        {"type": "local_shell"},
        {"type": "tool_search", "execution": "client"},
    ]
    fields: Json = {"input": f"say:{answer}", "tools": tools}
    whole = created(client, **fields)
    final = checked(streamed(client, **fields))
    assert _without_ids(final["output"]) == _without_ids(whole["output"])
    assert final["usage"]["output_tokens_details"] == whole["usage"]["output_tokens_details"]
    assert set(final) == set(whole)


def _without_ids(output: list[Json]) -> list[Json]:
    return [{**item, "id": None} for item in output]


def test_every_kind_of_call_has_the_clients_names(client: httpx.Client) -> None:
    tools = [
        PATCH,
        {"type": "namespace", "name": "mcp__post__", "description": "Letters.", "tools": [WEATHER]},
        {"type": "local_shell"},
        {"type": "tool_search", "execution": "client"},
    ]
    answer = (
        '<call patch>{"input": "a\\nb"}</call><call mcp__post__weather>{"town": "X"}</call>'
        '<call local_shell>{"command": ["ls"]}</call><call tool_search>{"query": "q"}</call>'
    )
    output = created(client, input=f"say:{answer}", tools=tools)["output"]
    custom, function, shell, search = output
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "a\nb")
    assert (function["type"], function["namespace"], function["name"]) == (
        "function_call",
        "mcp__post__",
        "weather",
    )
    assert function["arguments"] == '{"town": "X"}'
    assert shell["action"] == {"type": "exec", "env": {}, "command": ["ls"]}
    assert (search["execution"], search["arguments"]) == ("client", {"query": "q"})
    assert [item["call_id"] for item in output] == [f"call_{i}" for i in range(4)]


def test_reasoning_tokens_are_counted_and_sealed_reasoning_can_replace_its_text(client: httpx.Client) -> None:
    fields: Json = {"include": ["reasoning.encrypted_content"], "store": False}
    first = created(client, input="say:<think>twelve wise</think>ok", **fields)
    reasoning, message = first["output"]
    assert first["usage"]["output_tokens_details"]["reasoning_tokens"] == len("twelve wise")
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "twelve wise"}]
    assert reasoning["encrypted_content"].startswith("rs1.")
    sealed = {"type": "reasoning", "summary": [], "content": None, **_only(reasoning, "encrypted_content")}
    shown = {"type": "reasoning", "summary": [], "content": reasoning["content"], "id": "rs_other"}
    damaged = {**sealed, "encrypted_content": sealed["encrypted_content"][:-4] + "AAAA"}
    ask = {"role": "user", "content": "say:fine"}
    counts = [_input_tokens(client, [ask, item, message, ask]) for item in (sealed, shown, damaged)]
    assert counts[0] == counts[1]
    assert counts[2] == counts[0] - len("<think>twelve wise</think>")


def _only(item: Json, *names: str) -> Json:
    return {name: item[name] for name in names}


def _input_tokens(client: httpx.Client, items: Any, **fields: Any) -> int:
    answer = client.post(f"{PATH}/input_tokens", json={"input": items, **fields})
    assert answer.status_code == 200, answer.text
    count: int = answer.json()["input_tokens"]
    return count


def test_a_chain_has_the_same_prompt_as_the_full_history(client: httpx.Client) -> None:
    answers = [
        "<think>hm</think>one",
        '<call weather>{"town": "Oslo"}</call>',
        "two",
    ]
    chain: str | None = None
    history: list[Json] = []
    for i, answer in enumerate(answers):
        own: list[Json] = [{"role": "user", "content": f"{i} say:{answer}"}]
        if i == 2:
            own.insert(0, {"type": "function_call_output", "call_id": "call_0", "output": "rain"})
        history += own
        fields: Json = {"tools": [WEATHER], "instructions": f"Rule {i}."}
        chained = created(client, input=own, previous_response_id=chain, **fields)
        full = created(client, input=history, store=False, **fields)
        assert chained["usage"]["input_tokens"] == full["usage"]["input_tokens"]
        # All of it is found: the prompt is the same.
        assert full["usage"]["input_tokens_details"]["cached_tokens"] >= full["usage"]["input_tokens"] - 33
        assert _without_ids(chained["output"]) == _without_ids(full["output"])
        assert chained["previous_response_id"] == chain
        chain = chained["id"]
        history += chained["output"]


def test_a_stored_response_is_retrieved_listed_and_deleted(client: httpx.Client) -> None:
    body = created(
        client, input=[{"role": "user", "content": "say:kept"}, {"role": "developer", "content": "d"}]
    )
    path = f"{PATH}/{body['id']}"
    assert client.get(path).json() == body
    page = client.get(f"{path}/input_items", params={"order": "asc", "limit": 1}).json()
    InputItems.model_validate(page, strict=True)
    assert page["has_more"]
    [first] = page["data"]
    assert first["content"] == [{"type": "input_text", "text": "say:kept"}]
    rest = client.get(f"{path}/input_items", params={"order": "asc", "after": first["id"]}).json()
    assert [item["role"] for item in rest["data"]] == ["developer"]
    assert not rest["has_more"]
    assert_error(client.post(f"{path}/cancel"), 400, "unsupported_parameter")
    assert client.delete(path).json() == {"id": body["id"], "object": "response", "deleted": True}
    for answer in (client.get(path), client.delete(path), client.get(f"{path}/input_items")):
        assert_error(answer, 404, "response_not_found")
    again = client.post(PATH, json={"input": "more", "previous_response_id": body["id"]})
    assert_error(again, 400, "previous_response_not_found", param="previous_response_id")


@pytest.mark.parametrize(
    ("path", "param", "allowed"),
    [
        ("/input_items?limit=0", "limit", "greater than or equal to 1"),
        ("/input_items?limit=ten", "limit", "a valid integer"),
        ("/input_items?order=random", "order", "'asc' or 'desc'"),
        ("?stream=perhaps", "stream", "a valid boolean"),
        ("/input_items?after=unknown", "after", "the id of one of the items"),
    ],
)
def test_a_wrong_parameter_of_the_query_is_named(
    client: httpx.Client, path: str, param: str, allowed: str
) -> None:
    stored = created(client, input="say:kept")["id"]
    assert_error(client.get(f"{PATH}/{stored}{path}"), 400, "invalid_parameter", allowed, param=param)


def test_a_response_that_is_not_to_be_stored_is_not(client: httpx.Client) -> None:
    body = created(client, input="say:gone", store=False)
    assert_error(client.get(f"{PATH}/{body['id']}"), 404, "response_not_found")


def test_an_item_can_be_named_instead_of_sent(client: httpx.Client) -> None:
    body = created(client, input="say:<think>why</think>because")
    ask = {"role": "user", "content": "say:fine"}
    named = [{"type": "item_reference", "id": item["id"]} for item in body["output"]]
    assert _input_tokens(client, [ask, *named, ask]) == _input_tokens(client, [ask, *body["output"], ask])
    wrong = client.post(PATH, json={"input": [{"type": "item_reference", "id": "msg_1"}]})
    assert_error(wrong, 400, "invalid_parameter", param="input[0].id")


def test_references_to_one_response_read_it_once(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    [item] = created(client, input="say:yes")["output"]
    read: list[str] = []
    output = TenantResponses.output

    def counted(store: TenantResponses, id: str) -> bytes:
        read.append(id)
        return output(store, id)

    monkeypatch.setattr(TenantResponses, "output", counted)
    ask = {"role": "user", "content": "say:fine"}
    named = {"type": "item_reference", "id": item["id"]}
    assert _input_tokens(client, [ask, *[named] * 50]) == _input_tokens(client, [ask, *[item] * 50])
    assert len(read) == 1


def test_the_text_of_seals_is_bounded_while_they_are_opened(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: Json = {"include": ["reasoning.encrypted_content"]}
    reasoning, _ = created(client, input=f"say:<think>{'why ' * 300}</think>x", **fields)["output"]
    opened: list[str] = []
    unseal = Sealer.open

    def counted(sealer: Sealer, sealed: str) -> str | None:
        opened.append(sealed)
        return unseal(sealer, sealed)

    monkeypatch.setattr(Sealer, "open", counted)
    sealed = {"type": "reasoning", "summary": [], **_only(reasoning, "encrypted_content")}
    refused = client.post(PATH, json={"input": [{"role": "user", "content": "x"}, *[sealed] * 1_000]})
    assert_error(refused, 400, "context_length_exceeded")
    assert len(opened) < 200


def test_a_huge_or_forged_seal_is_left_out(client: httpx.Client) -> None:
    body = created(client, input="say:<think>why</think>because", include=["reasoning.encrypted_content"])
    sealed = body["output"][0]["encrypted_content"]
    ask = {"role": "user", "content": "say:fine"}

    def tokens(seal: str) -> int:
        item = {"type": "reasoning", "summary": [], "encrypted_content": seal}
        return _input_tokens(client, [ask, item, body["output"][1], ask])

    without = _input_tokens(client, [ask, body["output"][1], ask])
    assert tokens(sealed) == without + len("<think>why</think>")
    for forged in (
        f"{sealed[:-6]}AAAA==",
        f"rs1.{'A' * 8_000_000}",
        f"rs1.{'%' * 1_000_000}",
        "x" * 1_000_000,
    ):
        assert tokens(forged) == without


def test_tenants_do_not_see_each_others_responses(client: httpx.Client) -> None:
    mine = {"X-Cache-Salt": "mine"}
    body = client.post(
        PATH,
        json={"input": "say:<think>secret</think>x", "include": ["reasoning.encrypted_content"]},
        headers=mine,
    ).json()
    path = f"{PATH}/{body['id']}"
    assert client.get(path, headers=mine).json() == body
    ask = {"role": "user", "content": "say:fine"}
    item = {"type": "reasoning", "encrypted_content": body["output"][0]["encrypted_content"]}
    own, others = (
        client.post(
            f"{PATH}/input_tokens", json={"input": [ask, item, body["output"][1], ask]}, headers=headers
        ).json()["input_tokens"]
        for headers in (mine, {})
    )
    assert own == others + len("<think>secret</think>")
    for headers in ({}, {"X-Cache-Salt": "theirs"}):
        assert_error(client.get(path, headers=headers), 404, "response_not_found")
        assert_error(client.delete(path, headers=headers), 404, "response_not_found")
        named = {"type": "item_reference", "id": body["output"][0]["id"]}
        for fields in ({"input": "x", "previous_response_id": body["id"]}, {"input": [named]}):
            assert client.post(PATH, json=fields, headers=headers).status_code == 400
    assert client.get(path, headers=mine).status_code == 200


def test_an_answer_that_is_cut_is_incomplete(client: httpx.Client) -> None:
    fields: Json = {"input": "say:a long answer", "max_output_tokens": 6}
    whole = created(client, **fields)
    final = checked(streamed(client, **fields))
    for body in (whole, final):
        assert body["status"] == "incomplete"
        assert body["incomplete_details"] == {"reason": "max_output_tokens"}
        assert body["output"][0]["status"] == "incomplete"
        assert body["output"][0]["content"][0]["text"] == "a long"


def test_a_malformed_call_is_text_in_a_whole_answer_and_shown_as_it_came_in_a_stream(
    client: httpx.Client,
) -> None:
    fields: Json = {"input": 'say:<call weather>{"town": </call>after', "tools": [WEATHER]}
    [message] = created(client, **fields)["output"]
    assert message["content"][0]["text"] == '<call weather>{"town": </call>after'
    call, text = checked(streamed(client, **fields))["output"]
    assert (call["type"], call["status"], call["arguments"]) == ("function_call", "incomplete", '{"town": ')
    assert text["content"][0]["text"] == "after"
    shell = {"input": "say:<call local_shell>nonsense</call>", "tools": [{"type": "local_shell"}]}
    [message] = checked(streamed(client, **shell))["output"]
    assert message["content"][0]["text"] == "<call local_shell>nonsense</call>"


def test_only_one_call_is_shown_where_several_are_not_wanted(client: httpx.Client) -> None:
    calls = '<call weather>{"town": "A"}</call><call weather>{"town": "B"}</call>'
    fields: Json = {"input": f"say:{calls}", "tools": [WEATHER], "parallel_tool_calls": False}
    for body in (created(client, **fields), checked(streamed(client, **fields))):
        assert [item["arguments"] for item in body["output"]] == ['{"town": "A"}']


def test_logprobs_belong_to_the_text(client: httpx.Client) -> None:
    fields: Json = {
        "input": "say:<think>hm</think>yes",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "max_output_tokens": 50,
    }
    for body in (created(client, **fields), checked(streamed(client, **fields))):
        scored = body["output"][1]["content"][0]["logprobs"]
        assert "".join(entry["token"] for entry in scored)[-3:] == "yes"
        assert all(len(entry["top_logprobs"]) == 2 for entry in scored)
    many = client.post(PATH, json={**fields, "top_logprobs": 20, "max_output_tokens": 16_000})
    assert_error(many, 400, "too_many_logprobs", param="include")


def test_logprobs_without_a_limit_are_bounded_rather_than_refused(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context of most models has room for more log-probabilities than one response may have."""
    monkeypatch.setattr(calls, "MAX_RESPONSE_LOGPROBS", 30)
    fields: Json = {"input": "say:twelve words", "top_logprobs": 2}
    body = created(client, **fields)
    assert body["status"] == "incomplete"
    assert len(body["output"][0]["content"][0]["logprobs"]) == 30 // (1 + 2)
    assert created(client, input="say:few", top_logprobs=2)["status"] == "completed"
    refused = client.post(PATH, json=fields | {"max_output_tokens": 11})
    assert_error(refused, 400, "too_many_logprobs")


def test_a_response_repeats_its_tools_with_all_fields(client: httpx.Client) -> None:
    bare = {"type": "function", "name": "clock"}
    body = created(client, input="say:x", tools=[WEATHER, bare, PATCH])
    assert body["tools"] == [
        WEATHER,
        {**bare, "description": None, "parameters": None, "strict": False},
        PATCH,
    ]


def test_tools_that_the_server_would_have_to_run_are_left_out_and_told(client: httpx.Client) -> None:
    tools = [{"type": "web_search", "external_web_access": True}, {"type": "image_generation"}, WEATHER]
    body = created(client, input="say:x", tools=tools)
    assert body["ignored_tools"] == ["web_search", "image_generation"]
    assert body["usage"]["input_tokens"] == _input_tokens(client, "say:x", tools=[WEATHER])
    for tool in ({"type": "code_interpreter"}, {"type": "mcp"}, {"type": "shell"}, {"type": "teleport"}):
        refused = client.post(PATH, json={"input": "x", "tools": [tool]})
        assert_error(refused, 400, "unsupported_parameter", tool["type"], param="tools[0].type")
    forced = {"input": "x", "tools": tools, "tool_choice": {"type": "web_search"}}
    assert_error(client.post(PATH, json=forced), 400, "unsupported_parameter", param="tool_choice")


REFUSED: list[tuple[Json, str]] = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{}]}, "input[0].type"),
    ({"input": [{"type": 5}]}, "input[0].type"),
    ({"input": [{"type": "telepathy"}]}, "input[0].type"),
    ({"input": [{"type": "mcp_call", "name": "x"}]}, "input[0].type"),
    ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_smell", "image_url": "x"}]}]},
        "input[0].content[0].type",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": 5}]}, "input[0].arguments"),
    ({"input": [{"type": "custom_tool_call", "name": "f"}]}, "input[0].input"),
    ({"input": [{"type": "function_call_output", "call_id": 5, "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "output": 5}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
    ({"input": [{"type": "reasoning", "encrypted_content": 5}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "tool_search_output", "tools": 5}]}, "input[0].tools"),
    ({"input": "x", "model": "gpt-9"}, "model"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "conversation": "conv_1"}, "conversation"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "x", "max_tokens": 5}, "max_tokens"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "truncation": "middle"}, "truncation"),
    ({"input": "x", "temperature": -1}, "temperature"),
    ({"input": "x", "text": {"format": {"type": "poem"}}}, "text.format"),
    ({"input": "x", "metadata": {"a": 5}}, "metadata.a"),
    ({"input": "x", "metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ({"input": "x", "tools": [{"name": "f"}]}, "tools[0].type"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"input": "x", "tools": [WEATHER, WEATHER]}, "tools"),
    ({"input": "x", "tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools[0].format"),
    (
        {"input": "x", "tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}]},
        "tools[0].tools[0]",
    ),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"input": "x", "tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "x", "chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_wrong_request_is_refused_with_the_place(client: httpx.Client, fields: Json, param: str) -> None:
    for stream in (False, True):
        answer = client.post(PATH, json={**fields, "stream": stream})
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["param"] == param


def test_values_that_json_cannot_repeat_do_not_break_the_answer(client: httpx.Client) -> None:
    half = '{"input": "say:fine", "metadata": {"a": "\\ud834"}, "instructions": "\\udd1e"}'
    answer = client.post(PATH, content=half, headers={"Content-Type": "application/json"})
    if answer.status_code == 200:
        assert client.get(f"{PATH}/{answer.json()['id']}").status_code == 200
    else:
        assert answer.status_code == 400, answer.text
    body = '{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"a": NaN}}]}'
    answer = client.post(PATH, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    nan = '<call tool_search>{"query": NaN}</call><call patch>{"input": "\\ud834 x"}</call>'
    tools = [PATCH, {"type": "tool_search", "execution": "client"}]
    message, custom = checked(streamed(client, input=f"say:{nan}", tools=tools))["output"]
    assert message["content"][0]["text"] == '<call tool_search>{"query": NaN}</call>'
    assert custom["input"] == "? x"


def test_an_error_in_mid_stream_fails_the_response(client: httpx.Client) -> None:
    final = checked(streamed(client, input="say:so far\fso good"))
    assert final["status"] == "failed"
    assert final["error"]["code"] == "server_error"
    assert final["output"][0]["status"] == "incomplete"
    assert final["output"][0]["content"][0]["text"] == "so far"
    assert_error(client.post(PATH, json={"input": "say:so far\fso good"}), 500, "step_failed")
