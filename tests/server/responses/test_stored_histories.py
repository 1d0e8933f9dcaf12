"""Stored responses cost no more than they show: what is stored, how much a short request reads, and in which turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from hostile_bodies import RESPONSE_BODIES, nested
from rootstock.config import ServerConfig
from rootstock.errors import InvalidParameter, Unsupported
from rootstock.server.formats.responses.items import kept_items, messages_of
from rootstock.server.formats.responses.schema import ResponseRequest
from rootstock.server.formats.responses.sealing import Sealer
from rootstock.server.formats.responses.store import ResponseStore, TenantResponses
from rootstock.server.formats.responses.tools import Toolbox
from rootstock.server.http.request_bodies import PreparationQueue
from rootstock.text.limits import MAX_LABEL_CHARS, MAX_SCHEMA_CHARS, MAX_TEMPLATE_CHARS
from rootstock.text.prompts.tenant_salt import salt_of
from rootstock.units import KIB, MIB
from server.conftest import Served, assert_error, served_by_oracle

Json = dict[str, Any]
PATH = "/v1/responses"
OWNER = salt_of("", None)
MOST = 256 * KIB  # --max-body
# All routes that make a prompt of a stored history.
PROMPTS = (
    PATH,
    f"{PATH}/input_tokens",
    "/v1/cache/explain/responses",
    "/v1/cache/warm/responses",
    "/v1/cache/pin/responses",
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    config = ServerConfig(aliases=(), explain="all", max_body_bytes=MOST)
    with served_by_oracle(server=config, context_limit=600_000, blocks=80_000) as one:
        yield one
        one.app.state.responses.close()


@pytest.fixture
def store(served: Served) -> ResponseStore:
    found: ResponseStore = served.app.state.responses
    return found


def created(served: Served, **fields: Any) -> Json:
    answer = served.client.post(PATH, json={"max_output_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    body: Json = answer.json()
    return body


def said(text: str, **fields: Any) -> Json:
    return {"type": "message", "role": "user", "content": text, **fields}


@pytest.mark.parametrize("name", RESPONSE_BODIES)
def test_what_is_stored_follows_from_the_prompt(served: Served, store: ResponseStore, name: str) -> None:
    body = {**RESPONSE_BODIES[name](4_000), "store": True, "max_output_tokens": 1}
    content = json.dumps(body)
    answer = served.client.post(PATH, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400, 413), answer.text
    if answer.status_code == 200:
        usage, stored = answer.json()["usage"], store.of(OWNER).get(answer.json()["id"])
        shown = usage["input_tokens"]  # of a byte each
        items = stored.input.count(b'"type":')
        assert len(stored.input) <= 2 * shown + 256 * items


def test_fields_and_items_that_no_prompt_shows_are_not_stored(served: Served, store: ResponseStore) -> None:
    junk = "0" * 20_000
    items = [
        said("one", extra=junk, name=junk),
        said(
            "", content=[{"type": "input_text", "text": "two", "more": junk, "prompt_cache_breakpoint": None}]
        ),
        {"type": "ghost_snapshot", "ghost_commit": junk},
        {"type": "web_search_call", "action": {"query": junk}},
        {
            "type": "reasoning",
            "summary": [{"text": junk}],
            "content": [{"type": "reasoning_text", "text": "three"}, {"type": "refusal", "text": ", "}],
        },
        {
            "type": "function_call",
            "call_id": "c",
            "name": "f",
            "arguments": "{}",
            "status": "completed",
            "x": junk,
        },
        {"type": "function_call_output", "call_id": "c", "output": "four", "x": [junk]},
    ]
    body = created(served, input=items)
    stored = store.of(OWNER).get(body["id"])
    assert len(stored.input) < 1_000
    for text in ("one", "two", "three", "four", '"arguments"', '"completed"'):
        assert text.encode() in stored.input
    for route in PROMPTS[1:3]:  # the prompt of the stored items is the one of the items as they were sent
        ask = served.client.post(route, json={"input": [said("more")], "previous_response_id": body["id"]})
        whole = served.client.post(route, json={"input": [*items, *body["output"], said("more")]})
        tokens = "input_tokens" if route.endswith("tokens") else "prompt_tokens"
        assert ask.json()[tokens] == whole.json()[tokens]


FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
GRAMMAR = {"type": "grammar", "syntax": "regex", "definition": "a+"}
TOOLS = [
    {**FUNCTION, "strict": True, "defer_loading": True},
    {"type": "custom", "name": "c", "description": "d", "format": GRAMMAR},
    {"type": "custom", "name": "g", "format": {"type": "grammar", "grammar": GRAMMAR}},
    {"type": "custom", "name": "t", "format": {"type": "text"}},
    {"type": "namespace", "name": "n", "description": "d", "tools": [{**FUNCTION, "name": "inner"}]},
    {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}},
    {"type": "tool_search"},
    {"type": "local_shell"},
    {"type": "web_search"},
]
MARK = {"mode": "explicit", "ttl": "30m"}
PARTS = [
    {"type": "input_text", "text": "t", "prompt_cache_breakpoint": MARK},
    {"type": "refusal", "refusal": "t"},
    {"type": "input_image", "image_url": "u", "detail": "low"},
    {"type": "input_file", "filename": "a.txt", "file_data": "d"},
    {"type": "file", "file": {"filename": "b.txt", "file_data": "d"}},
]
CALL = {"call_id": "c", "name": "f", "namespace": "n"}
# An item of each type, with all fields that the prompt shows.
EVERY_ITEM: dict[str, Json] = {
    "message": {"role": "user", "content": PARTS},
    "message of a text": {"type": "message", "role": "user", "content": "t"},
    "message of a part": {"type": "message", "role": "user", "content": PARTS[0]},
    "agent_message": {"content": PARTS},
    "reasoning": {"content": [{"type": "reasoning_text", "text": "t"}], "summary": []},
    "sealed reasoning": {"type": "reasoning", "encrypted_content": "sealed"},
    "foreign reasoning": {"type": "reasoning", "encrypted_content": "foreign"},
    "function_call": {**CALL, "arguments": '{"a":1}'},
    "custom_tool_call": {**CALL, "input": "i"},
    "local_shell_call": {"call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
    "computer_call": {"call_id": "c", "action": {"type": "click"}, "actions": [{"type": "click"}]},
    "tool_search_call": {"call_id": "c", "arguments": "{}", "execution": "client"},
    "function_call_output": {**CALL, "output": "o"},
    "custom_tool_call_output": {**CALL, "output": PARTS},
    "local_shell_call_output": {"id": "c", "output": "o"},
    "computer_call_output": {"call_id": "c", "output": {"type": "computer_screenshot", "image_url": "u"}},
    "tool_search_output": {"call_id": "c", "tools": TOOLS, "execution": "client"},
    "additional_tools": {"role": "developer", "tools": TOOLS},
    "compaction": {"encrypted_content": "sealed"},
    "context_compaction": {"encrypted_content": "foreign"},
    "web_search_call": {"action": {"query": "q"}},
}


def unseal(sealed: str) -> str | None:
    return "text" if sealed == "sealed" else None


def prompt_of(items: list[Json]) -> object:
    tools = Toolbox()
    return messages_of([], items, tools, unseal), tools.shown


def with_more(item: Json, at: list[int], more: Json) -> Json:
    """Returns an item with more fields in one of its objects: at each call in the next one."""

    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(changed, value))
        if not isinstance(value, dict):
            return value
        at[0] -= 1
        return {**(more if at[0] == -1 else {}), **{name: changed(inner) for name, inner in value.items()}}

    changed_item: Json = changed(item)
    return changed_item


@pytest.mark.parametrize("name", EVERY_ITEM)
def test_what_the_prompt_shows_of_an_item_is_stored_and_no_more(name: str) -> None:
    item = {"type": name, **EVERY_ITEM[name]}
    assert prompt_of(kept_items([item], unseal)) == prompt_of([item])
    most = len(json.dumps(kept_items([item], unseal))) + 6 * MAX_LABEL_CHARS
    junk = "0" * 20_000
    wrong: Json = {"text": "t", "extra": junk, junk: 1, **{f"x{i}": "0" * 1_000 for i in range(20)}}
    known: Json = dict.fromkeys(
        ("id", "status", "role", "execution", "detail", "file_id", "filename", "strict", "summary"), junk
    )
    for more in (wrong, known, {"tools": [junk]}, {"encrypted_content": junk}, {"action": junk}):
        for place in range(40):
            at = [place]
            hostile = with_more(item, at, more)
            if at[0] >= 0:
                break  # the item has no more objects
            try:
                shown = prompt_of([hostile])
            except (InvalidParameter, Unsupported):
                continue
            kept = kept_items([hostile], unseal)
            assert prompt_of(kept) == shown
            assert len(json.dumps(kept)) < most + len(repr(shown)), (place, more.keys())


def test_what_is_only_written_longer_is_stored_short() -> None:
    spaces, twice = f"{' ' * 20_000}{{}}", f'{{"a":"{"0" * 20_000}","a":1}}'
    for arguments in (spaces, twice):
        item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        kept = kept_items([item], unseal)
        assert prompt_of(kept) == prompt_of([item])
        assert len(json.dumps(kept)) < 200
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{ "a": 1 }'}
    assert kept_items([call], unseal) == [call]


def test_items_that_a_compaction_replaces_are_not_stored() -> None:
    junk = "0" * 20_000
    items = [
        said("stays"),
        {"type": "function_call_output", "output": junk},
        {"type": "of no type", "extra": junk},
        {"type": "compaction", "encrypted_content": "sealed"},
        said("follows"),
    ]
    kept = kept_items(items, unseal)
    assert len(json.dumps(kept)) < 500
    assert prompt_of(kept) == prompt_of(items)


def test_log_probabilities_are_answered_and_not_stored(served: Served) -> None:
    for stream in (False, True):
        fields = {"input": "x", "max_output_tokens": 8, "top_logprobs": 5, "ignore_eos": True}
        answer = served.client.post(PATH, json={**fields, "stream": stream})
        if stream:
            answered = json.loads(answer.text.removesuffix("data: [DONE]\n\n").rpartition("data: ")[2])[
                "response"
            ]
        else:
            answered = answer.json()
        [item] = answered["output"]
        assert item["content"][0]["logprobs"]
        kept = served.client.get(f"{PATH}/{answered['id']}").json()
        [stored] = kept["output"]
        assert stored["content"][0].pop("logprobs") == []
        del item["content"][0]["logprobs"]
        assert stored == item


def put_aside(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Notes each preparation that ran to its end: whether it was among the long ones, and its bytes."""
    noted: list[tuple[bool, int]] = []
    run = PreparationQueue._run

    async def noting(self: PreparationQueue, request: Any, prepare: Any, preparation: Any) -> Any:
        is_long = preparation.is_long
        try:
            return await run(self, request, prepare, preparation)
        finally:
            noted.append((is_long, preparation.count_bytes))

    monkeypatch.setattr(PreparationQueue, "_run", noting)
    return noted


@pytest.mark.parametrize("route", PROMPTS)
def test_a_long_history_waits_among_long_bodies(
    served: Served, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = created(served, input="short")["id"]
    long = created(served, input="word " * 16_000)["id"]
    noted = put_aside(served, monkeypatch)
    for id, is_long in ((short, False), (long, True)):
        answer = served.client.post(route, json={"previous_response_id": id, "max_output_tokens": 1})
        assert answer.status_code in (200, 404, 409), answer.text  # nothing is warmed or pinned here
        assert noted[-1][0] == is_long
        assert len(noted) == 1 + is_long  # it is put aside once
        assert noted[-1][1] >= (80_000 if is_long else 0)
        noted.clear()


@pytest.mark.parametrize("path", ["", "/input_items"])
def test_a_long_stored_response_is_read_among_long_bodies(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = put_aside(served, monkeypatch)
    for words, is_long in ((1, False), (16_000, True)):
        text = "word " * words
        id = created(served, input=text, instructions=text)["id"]
        noted.clear()
        answer = served.client.get(f"{PATH}/{id}{path}")
        assert answer.status_code == 200
        assert text in answer.text
        assert [one for one, _ in noted] == [False, True][: 1 + is_long]


def test_seals_count_as_the_text_that_they_hold(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sealer, "open", lambda *_: "why " * 20_000)
    noted = put_aside(served, monkeypatch)
    items = [said("x"), {"type": "reasoning", "summary": [], "encrypted_content": "rs1.short"}]
    created(served, input=[*items, said("y")], store=False)
    assert [one for one, _ in noted] == [False, True]


def test_a_history_has_no_more_bytes_than_a_body(served: Served, store: ResponseStore) -> None:
    before = None
    for turn in range(6):
        before = created(served, input=f"{turn} " + "word " * 9_000, previous_response_id=before)["id"]
        if store.of(OWNER).history_bytes(before, MIB) > MOST:
            break
    else:
        pytest.fail("the history is not long enough")
    for route in PROMPTS[:3]:
        answer = served.client.post(route, json={"input": "x", "previous_response_id": before})
        assert_error(
            answer, 400, "history_too_long", f"more than {MOST:,} bytes", param="previous_response_id"
        )


def test_references_stand_for_no_more_bytes_than_a_body(
    served: Served, store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = created(served, input="x", max_output_tokens=400, ignore_eos=True)
    [item] = body["output"]
    named = {"type": "item_reference", "id": item["id"]}
    size = len(json.dumps(item))
    read: list[str] = []
    output = TenantResponses.output

    def counted(self: TenantResponses, id: str) -> bytes:
        read.append(id)
        return output(self, id)

    monkeypatch.setattr(TenantResponses, "output", counted)
    fits = MOST // size - 1
    for count, status in ((fits, 200), (fits + 2, 400), (3_500, 400)):
        answer = served.client.post(f"{PATH}/input_tokens", json={"input": [named] * count})
        assert answer.status_code == status, answer.text
        assert len(read) <= 2  # once, and again when it is its turn among the long ones
        read.clear()
    assert_error(answer, 400, "invalid_parameter", f"at most {MOST:,} bytes (--max-body)", param="input")
    # The bytes of all outputs are counted before one is read.
    monkeypatch.setattr(TenantResponses, "output_bytes", lambda *_: MOST + 1)
    answer = served.client.post(f"{PATH}/input_tokens", json={"input": [named]})
    assert_error(answer, 400, "invalid_parameter", f"{MOST:,} bytes", param="input")
    assert read == []


@pytest.mark.parametrize("id", ["\ud800", "\x00", "x" * 1_024, "../x", "resp_" + "0" * 32, "%", "é"])
def test_an_id_of_any_characters_is_not_found(served: Served, id: str) -> None:
    body = json.dumps({"input": "x", "previous_response_id": id})
    answer = served.client.post(PATH, content=body, headers={"Content-Type": "application/json"})
    code = "invalid_parameter" if id == "\ud800" else "previous_response_not_found"
    assert_error(answer, 400, code, param="previous_response_id")
    if id.isprintable() and "/" not in id and id.isascii() and "%" not in id:
        for path in ("", "/input_items"):
            assert served.client.get(f"{PATH}/{id}{path}").status_code == 404
        assert served.client.delete(f"{PATH}/{id}").status_code == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search", "extra": "0" * MAX_TEMPLATE_CHARS}]}, "tools[0]"),
        ({"tool_choice": {"type": "function", "extra": [0] * MAX_SCHEMA_CHARS}}, "tool_choice"),
        ({"text": {"format": {"type": "text", "extra": "0" * 2 * MAX_SCHEMA_CHARS}}}, "text.format"),
        ({"text": {"format": {"type": "text", "extra": nested(200)}}}, "text.format"),
    ],
    ids=["tool", "tool_choice", "format", "deep"],
)
def test_large_fields_that_only_the_response_repeats_are_refused(fields: Json, param: str) -> None:
    body = ResponseRequest.model_validate({"input": "x", **fields})

    def read() -> None:
        body.refuse_unsupported()
        Toolbox().add(body.tools or [], "tools")

    with pytest.raises(InvalidParameter) as refused:
        read()
    assert refused.value.param == param
