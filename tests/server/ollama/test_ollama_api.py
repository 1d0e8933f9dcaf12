"""Ollama's routes: answers, fields, errors, the list of models, tenants, limits, logs, metrics and traces."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from embedding_models import save_embedding_model
from rootstock.config import ServerConfig
from rootstock.logs import ACCESS_LOGGER
from rootstock.server.formats.ollama.schema import OllamaChatRequest
from rootstock.testing.byte_tokenizer import ByteTokenizer
from server.conftest import user
from server.responses.scripted import scripted_server
from server.test_embeddings import serving
from server.test_tracing import spans, traced
from waiting import HANG_S, wait_until

Json = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
CALL = {"id": "call_0", "function": {"index": 0, "name": "look_up", "arguments": {"tree": "fir"}}}
GREEDY_OPTIONS = {"options": {"temperature": 0, "num_predict": 8}}
NANOSECONDS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def script(prompt: str) -> str:
    asked = prompt.rpartition("<|user|>")[2]
    if "Look it up" in asked:
        return '<think>I look.</think>One moment.<call look_up>{"tree": "fir"}</call>'
    if "Break" in asked:
        return "<call look_up>{"
    if "Fail" in asked:
        return "Oh\f"
    return "<think>Trees…</think>The fir."


@pytest.fixture(scope="module")
def scripted() -> Iterator[httpx.Client]:
    with scripted_server(script) as url, httpx.Client(base_url=url, timeout=HANG_S) as client:
        yield client


def lines_of(response: httpx.Response) -> list[Json]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def joined(lines: list[Json]) -> Json:
    """Returns the message that a chat's lines make together."""
    messages = [line["message"] for line in lines]
    told: Json = {"role": "assistant", "content": "".join(each["content"] for each in messages)}
    if thinking := "".join(each.get("thinking", "") for each in messages):
        told["thinking"] = thinking
    if calls := [call for each in messages for call in each.get("tool_calls", ())]:
        told["tool_calls"] = calls
    return told


def assert_refused(response: httpx.Response, status: int, part: str) -> None:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    assert part in response.json()["error"], response.text
    assert len(response.json()["error"]) < 400


# ---- answers


@pytest.mark.parametrize("text", ["Hello", "Look it up", "Break"])
def test_the_lines_of_a_chat_make_the_whole_answer(scripted: httpx.Client, text: str) -> None:
    body = {"model": "fake", "messages": user(text), "tools": TOOLS}
    whole = scripted.post("/api/chat", json=body | {"stream": False})
    assert whole.headers["content-type"] == "application/json"
    *parts, last = lines_of(scripted.post("/api/chat", json=body))
    assert joined([*parts, last]) == whole.json()["message"]
    assert not any(part["done"] for part in parts)
    for end in (last, whole.json()):
        assert (end["model"], end["done"], end["done_reason"]) == ("fake", True, "stop")
        assert end["created_at"].endswith("Z")
        assert all(type(end[name]) is int and end[name] >= 0 for name in NANOSECONDS)
        assert end["total_duration"] >= end["load_duration"] + end["eval_duration"]
    assert last["prompt_eval_count"] == whole.json()["prompt_eval_count"]
    assert last["prompt_eval_cached_count"] == last["prompt_eval_count"] - 1
    assert last["eval_count"] > 1


def test_messages_have_thinking_and_calls_with_objects(scripted: httpx.Client) -> None:
    body = {"messages": user("Look it up"), "tools": TOOLS, "stream": False}
    message = scripted.post("/api/chat", json=body).json()["message"]
    assert message == {
        "role": "assistant", "content": "One moment.", "thinking": "I look.", "tool_calls": [CALL],
    }  # fmt: skip
    # The clients send it back, some without the id, with the result by the tool's name.
    call = {"function": {"name": "look_up", "arguments": {"tree": "fir"}}}
    turn = [
        *user("Look it up"),
        message | {"tool_calls": [call]},
        {"role": "tool", "tool_name": "look_up", "content": "Tall."},
        {"role": "User", "content": "Thanks", "images": ["aGk="]},
    ]
    told = scripted.post("/api/chat", json=body | {"messages": turn}).json()
    assert told["message"]["content"] == "The fir."
    assert told["rootstock"]["warnings"][0]["field"] == "messages[3].images[0]"


@pytest.mark.parametrize("raw", [False, True])
def test_a_generation_is_whole_or_lines(served: Any, raw: bool) -> None:
    body = {"prompt": "Which tree?", "raw": raw, **GREEDY_OPTIONS}
    whole = served.client.post("/api/generate", json=body | {"stream": False}).json()
    lines = lines_of(served.client.post("/api/generate", json=body))
    assert "".join(line["response"] for line in lines) == whole["response"]
    prompt = list(b"Which tree?") if raw else served.chat_prompt("Which tree?")
    assert whole["response"] == ByteTokenizer().decode(served.greedy(prompt, 8))
    assert whole["prompt_eval_count"] == len(prompt)
    assert "message" not in whole


def test_generations_have_a_system_message_and_images(served: Any) -> None:
    body = {"prompt": "A", "system": "S", "images": ["aGk="], "stream": False, **GREEDY_OPTIONS}
    told = served.client.post("/api/generate", json=body).json()
    image = "A\n[An image, which this model cannot see]"
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": image}]
    same = served.client.post("/api/chat", json={"messages": chat, "stream": False, **GREEDY_OPTIONS}).json()
    assert told["prompt_eval_count"] == same["prompt_eval_count"]
    assert told["rootstock"]["warnings"][0]["field"] == "images[0]"


def test_tokens_have_log_probabilities(served: Any) -> None:
    body = {"messages": user("Hi"), "logprobs": True, "top_logprobs": 2, **GREEDY_OPTIONS}
    whole = served.client.post("/api/chat", json=body | {"stream": False}).json()
    lines = lines_of(served.client.post("/api/chat", json=body))
    assert [one for line in lines for one in line.get("logprobs", ())] == whole["logprobs"]
    assert len(whole["logprobs"]) == whole["eval_count"]
    assert {len(one["top_logprobs"]) for one in whole["logprobs"]} == {2}


def test_options_are_those_of_openais_chats(served: Any) -> None:
    options = {"temperature": 1.0, "seed": 5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "stop": ["\0"]}
    options |= {"presence_penalty": 0.5, "frequency_penalty": 0.5}
    ours = options | {"num_predict": 12, "repeat_penalty": 1.3}
    told = served.client.post("/api/chat", json={"messages": user("Hi"), "stream": False, "options": ours})
    openais = served.chat("Hi", **options, max_tokens=12, repetition_penalty=1.3).json()
    assert told.json()["message"]["content"] == openais["choices"][0]["message"]["content"]
    assert told.json()["done_reason"] == openais["choices"][0]["finish_reason"]


def test_an_answer_follows_a_schema(served: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    body = {"messages": user("Hi"), "stream": False, "format": schema, "options": {"temperature": 0}}
    response = served.client.post("/api/chat", json=body)
    assert json.loads(response.json()["message"]["content"]) == {"a": 1}


def test_what_has_no_effect_is_named(served: Any) -> None:
    options = {
        "num_ctx": 2048,
        "num_gpu": 1,
        "typical_p": 1,
        "mirostat": 2,
        "temperature": 0,
        "num_predict": 1,
    }
    body = {"messages": user("Hi"), "options": options, "think": True, "truncate": True, "anything": [1]}
    last = lines_of(served.client.post("/api/chat", json=body))[-1]
    named = {one["field"] for one in last["rootstock"]["warnings"]}
    assert named == {"think", "truncate", "options.num_ctx", "options.num_gpu", "options.mirostat"}


@pytest.mark.parametrize(
    ("asked", "verdict"),
    [(None, None), (0, None), ("0", None), (30, "accepted"), ("5m", "accepted"), ("1h30m", "accepted"),
     (-1, "clipped"), ("-1m", "clipped"), ("48h", "clipped"), (1e300, "clipped")],
)  # fmt: skip
def test_keep_alive_is_a_hint_to_the_cache(served: Any, asked: Any, verdict: str | None) -> None:
    body = {"messages": user("Hi"), "stream": False, "keep_alive": asked, **GREEDY_OPTIONS}
    told = served.client.post("/api/chat", json=body).json().get("rootstock", {})
    assert [one["verdict"] for one in told.get("hints", ())] == ([] if verdict is None else [verdict])


def test_durations_are_gos() -> None:
    for text, seconds in {"1h30m": 5400, "1.5s": 1.5, "250ms": 0.25, "-2m": -120, "": None}.items():
        assert OllamaChatRequest(keep_alive=text).keep_alive_s() == seconds


# ---- errors


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"messages": [5]}, "messages[0]"), ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": user("\ud800")}, "UTF-8"), ({"options": {"temperature": -1}}, "temperature"),
        ({"options": {"stop": ["x"] * 17}}, "stop"), ({"options": []}, "options"), ({"options": 5}, "options"),
        ({"options": {"num_predict": 2**70}}, "num_predict"), ({"options": {"top_k": 1.5}}, "top_k"),
        ({"think": "deeply"}, "think"), ({"think": 5}, "think"), ({"format": "yaml"}, "format"),
        ({"format": {"type": 5}}, "format"), ({"keep_alive": "soon"}, "keep_alive"),
        ({"keep_alive": "9" * 2000}, "keep_alive"), ({"keep_alive": True}, "keep_alive"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"), ({"tools": [{}] * 1025}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"), ({"model": "a" * 1025}, "model"),
        ({"_debug_render_only": True}, "_debug_render_only"), ({"stream": "yes"}, "stream"),
    ],
)  # fmt: skip
def test_wrong_fields_of_chats_are_refused(served: Any, fields: Json, part: str) -> None:
    content = json.dumps({"messages": user("Hi"), **GREEDY_OPTIONS, **fields})
    headers = {"content-type": "application/json"}
    response = served.client.post("/api/chat", content=content, headers=headers)
    assert response.status_code == 400, response.text
    assert set(response.json()) == {"error"}
    assert part == "UTF-8" or part in response.json()["error"], response.text


@pytest.mark.parametrize(
    "fields",
    [{"suffix": "b"}, {"template": "{{ .Prompt }}"}, {"context": [1]}, {"raw": True, "system": "S"},
     {"raw": True, "images": ["aGk="]}],
)  # fmt: skip
def test_what_cannot_be_generated_is_refused(served: Any, fields: Json) -> None:
    response = served.client.post("/api/generate", json={"prompt": "a", **fields})
    assert_refused(response, 400, f"'{list(fields)[-1]}' is not supported here")


def test_errors_have_ollamas_form(served: Any, scripted: httpx.Client) -> None:
    post = served.client.post
    assert_refused(post("/api/chat", json={"model": "nope", "messages": user("a")}), 404, "'nope'")
    assert_refused(post("/api/show", json={"model": "nope"}), 404, "'nope'")
    assert_refused(
        post("/api/chat", content="{}", headers={"content-type": "text/plain"}), 415, "Content-Type"
    )
    assert_refused(post("/api/nothing", json={}), 404, "/api/nothing")
    assert_refused(served.client.get("/api/chat"), 405, "GET /api/chat")
    assert_refused(post("/api/embed", json={"input": "a"}), 400, "embedding model")
    for name in ("pull", "push", "create", "copy"):
        assert_refused(post(f"/api/{name}", json={"model": "a"}), 400, "rootstock serve")
    assert_refused(
        served.client.request("DELETE", "/api/delete", json={"model": "a"}), 400, "rootstock serve"
    )
    *_, last = lines_of(scripted.post("/api/chat", json={"messages": user("Fail")}))
    assert set(last) == {"error"}


# ---- models


def test_models_are_listed_shown_and_loaded(served: Any) -> None:
    get, post = served.client.get, served.client.post
    [listed] = get("/api/tags").json()["models"]
    [running] = get("/api/ps").json()["models"]
    assert listed["name"] == listed["model"] == running["model"] == "fake:latest"
    assert running["context_length"] == 4096
    for name in ("fake", "fake:latest", None):
        for field in ("model", "name"):
            shown = post("/api/show", json={field: name}).json()
            family = shown["model_info"]["general.architecture"]
            assert shown["model_info"][f"{family}.context_length"] == 4096
            assert shown["capabilities"][0] == "completion"
    told = post("/api/chat", json={"model": "fake:latest", "messages": user("a"), **GREEDY_OPTIONS})
    assert lines_of(told)[-1]["model"] == "fake:latest"
    for path in ("/api/chat", "/api/generate"):
        assert post(path, json={"model": "fake"}).json()["done_reason"] == "load"
        assert_refused(post(path, json={"model": "fake", "keep_alive": 0}), 409, "cannot be unloaded")
    assert get("/api/version").json()["version"].count(".") == 2
    for path in ("/", "/api/version", "/api/tags"):
        head = served.client.head(path)
        assert (head.status_code, head.content) == (200, b"")


# ---- tenants, limits, logs and metrics

KEYS = """
keys: [{key: key-of-a, tenant: a}, {key: key-of-b, tenant: b}]
tenants: {a: {requests_per_minute: 2}, b: {models: [other]}}
"""


def test_keys_tenants_and_limits_hold_on_these_paths(serve: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    body = {
        "model": "fake:latest",
        "messages": user("Which tree is tall?"),
        "stream": False,
        **GREEDY_OPTIONS,
    }
    with serve(server=ServerConfig(api_keys=keys, aliases=())) as served:

        def ask(key: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            response: httpx.Response = served.client.post("/api/chat", json=body, headers=headers)
            return response

        assert_refused(served.client.post("/api/chat", json=body), 401, "API key")
        assert_refused(ask("key-of-b"), 403, "fake")
        tags = served.client.get("/api/tags", headers={"Authorization": "Bearer key-of-b"}).json()
        assert tags == {"models": []}
        cached = [ask("key-of-a").json()["prompt_eval_cached_count"] for _ in range(2)]
        assert cached[0] == 0
        assert cached[1] > 0
        limited = ask("key-of-a")
        assert_refused(limited, 429, "limit")
        assert "retry-after" in limited.headers


def test_tenants_and_salts_share_no_prefix(served: Any) -> None:
    body = {"messages": user("A prompt of tenants alone"), "stream": False, **GREEDY_OPTIONS}
    for salt in ("x", "y"):
        for fields in ({"cache_salt": salt}, {"options": body["options"] | {"cache_salt": salt}}):
            told = served.client.post("/api/chat", json=body | fields).json()
            is_first = "cache_salt" in fields
            assert (told["prompt_eval_cached_count"] < 2) is is_first


def test_requests_have_log_lines_and_metrics(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    def counted() -> float:
        count: float = served.metric("rootstock_requests_total", route="/api/chat", outcome="ok")
        return count

    def lines() -> list[Any]:
        fields = [record.fields for record in caplog.records if record.name == ACCESS_LOGGER]
        return [line for line in fields if line["route"] == "/api/chat"]

    before = counted()
    with caplog.at_level(logging.INFO, ACCESS_LOGGER):
        served.client.post("/api/chat", json={"messages": user("Hi"), **GREEDY_OPTIONS})
        wait_until(lines)  # the answer comes before its line
    [line] = lines()
    assert line["model"] == "fake"
    assert line["prompt_tokens"] > line["cached_tokens"]
    assert counted() == before + 1


def test_requests_have_spans() -> None:
    with traced() as (url, exporter), httpx.Client(base_url=url) as client:
        client.post("/api/chat", json={"messages": user("Hi"), **GREEDY_OPTIONS})
        client.post("/api/generate", json={"prompt": "Hi", **GREEDY_OPTIONS})
        found = spans(exporter, 2)
    assert {"chat fake", "text_completion fake", "prefill"} <= set(found)


def test_embeddings_are_openais(tmp_path: Path) -> None:
    save_embedding_model(tmp_path / "model")
    with serving(tmp_path / "model") as client:
        texts = ["one fir", "two oaks"]
        data = client.post("/v1/embeddings", json={"input": texts}).json()["data"]
        told = client.post("/api/embed", json={"model": "tiny:latest", "input": texts}).json()
        assert told["embeddings"] == [one["embedding"] for one in data]
        assert told["prompt_eval_count"] > 1
        one = client.post("/api/embeddings", json={"model": "tiny", "prompt": texts[0]}).json()
        assert one["embedding"] == pytest.approx(
            told["embeddings"][0], rel=1e-5
        )  # another batch rounds otherwise
        assert client.post("/api/show", json={"model": "tiny"}).json()["capabilities"] == ["embedding"]
