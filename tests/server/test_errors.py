"""Wrong requests get one clear error in OpenAI's shape, and the server answers the next request."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
from pydantic import ValidationError

from rootstock.config import EngineConfig, ServerConfig
from rootstock.engine.engine import Engine
from rootstock.errors import ChatTemplateFailed, ChatTemplateMissing
from rootstock.server.formats.openai.schema import (
    IGNORED,
    REFUSED,
    ChatCompletionRequest,
    CompletionRequest,
)
from rootstock.testing.byte_tokenizer import PADDED_LOGITS, ByteTokenizer
from rootstock.text.constraints.openai_fields import _FIELDS as STRUCTURED
from server.conftest import assert_error
from server.held import Held
from waiting import join, wait_for, wait_until

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
EXPLAIN = "/v1/cache/explain"
OWN_PATHS = {"/tokenize", "/detokenize"}  # that are there without /v1 as well
EVERY_TOKEN = [str(token) for token in range(PADDED_LOGITS)]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


Case = tuple[str, Any, str, str, str]  # route, body, code, param, a part of the message
INVALID, UNSUPPORTED, MISSING = "invalid_parameter", "unsupported_parameter", "missing_parameter"
TOO_LONG, EMPTY, NOT_FOUND = "context_length_exceeded", "empty_prompt", "model_not_found"


def chat(part: str, param: str | None = None, code: str = INVALID, **fields: Any) -> Case:
    """A chat with wrong fields. `param` is the last of them unless it is given."""
    return CHAT, {"messages": MESSAGES} | fields, code, param or list(fields)[-1], part


def text(part: str, param: str | None = None, code: str = INVALID, **fields: Any) -> Case:
    return TEXT, {"prompt": "x"} | fields, code, param or list(fields)[-1], part


BODIES: list[Case] = [
    (CHAT, {}, MISSING, "messages", "'messages' is missing"),
    (CHAT, [1], INVALID, "body", "must be an object"),
    chat("'messages' is 'hi', but must be a list", messages="hi"),
    chat("a list of at least 1", messages=[]),
    chat("an object", "messages[0]", messages=["hi"]),
    chat("missing", "messages[0].role", MISSING, messages=[{"content": "x"}]),
    chat("a string", "messages[0].role", messages=[{"role": 3, "content": "x"}]),
    chat("missing", "messages[0].content", MISSING, messages=[{"role": "user"}]),
    chat("a string or a list of parts", "messages[0].content", messages=[{"role": "user", "content": 5}]),
    chat(
        "'smell', but must be 'text', 'image_url'",
        "messages[0].content[0].type",
        messages=[{"role": "user", "content": [{"type": "smell", "smell": {"url": "data:,"}}]}],
    ),
    chat(
        "'wizard', but must be one of system,",
        "messages[0].role",
        messages=[{"role": "wizard", "content": "abra"}],
    ),
    chat("surrogate", messages=[{"role": "user", "content": "half \ud83d of a pair"}]),
    chat("Ask for 'fake'", code=NOT_FOUND, model="gpt-9"),
    chat("a valid number", temperature="hot"),
    chat("a valid number", temperature="0.5"),
    chat("equal to 0", temperature=-1),
    chat("less than or equal to 1", top_p=1.5),
    chat("integer", top_k=2.5),
    chat("equal to 1", min_p=2),
    chat("equal to 0.01", repetition_penalty=0),
    chat("equal to 2", presence_penalty=3),
    chat("equal to 1", n=0),
    chat("128", n=1000),
    chat("boolean", stream="yes"),
    chat("a string or a list", stop=5),
    chat("a string", "stop[1]", stop=["a", 5]),
    chat("1 to 512 characters", stop=[""]),
    chat("at most 16", stop=["x"] * 99),
    chat("token ids", logit_bias={"x": 1}),
    chat(f"to {PADDED_LOGITS - 1}", logit_bias={"999": 1}),
    chat("-100 to", "logit_bias.9", logit_bias={"9": 101}),
    chat("true with", "logprobs", top_logprobs=2),
    chat("equal to -1", max_tokens=-2),
    chat("4,096", "max_tokens", TOO_LONG, max_tokens=9999, strict_max_tokens=True),
    chat("is 1", max_tokens=1, min_tokens=2),
    chat("5,004 tokens", code=TOO_LONG, messages=[{"role": "user", "content": "x" * 5000}]),
    chat("'text', 'json_object' or", "response_format.type", response_format={"type": "poem"}),
    chat("'auto' or 'none' in a request without tools", tool_choice="required"),
    chat("the name of a tool of the request", tool_choice={"type": "function", "function": {"name": "f"}}),
    chat(
        "--chat-template",
        "chat_template_kwargs.chat_template",
        UNSUPPORTED,
        chat_template_kwargs={"chat_template": "x"},
    ),
    chat("surrogate", cache_salt="\ud800"),
    # ---- values that once caused a 500
    *(
        chat("reads no variable", f"chat_template_kwargs.{name}", UNSUPPORTED, chat_template_kwargs={name: 1})
        for name in ("messages", "self", "conversation", "tokenize")
    ),
    chat(
        "a field of the request itself",
        "chat_template_kwargs.tools",
        UNSUPPORTED,
        chat_template_kwargs={"tools": 1},
    ),
    chat("some token may be chosen", logit_bias=dict.fromkeys(EVERY_TOKEN, -100)),
    text("some token may be chosen", "logit_bias", logit_bias={"257": 100}, min_tokens=1),
    text("some token may be chosen", stop_token_ids=list(range(PADDED_LOGITS)), min_tokens=1),
    chat("128", "tools[0]", tools=[FUNCTION | {"x": deep(300)}]),
    chat("128 deep", "messages[0]", messages=[{**MESSAGES[0], "x": deep(300)}]),
    # ---- limits
    chat("at most 16,384", messages=MESSAGES * 16_385),
    chat("at most 1,024", tools=[FUNCTION] * 1025),
    chat("4,194,304 characters", tools=[FUNCTION | {"x": "y" * 4_200_000}]),
    chat(
        "at most 4,096",
        "messages[0].content",
        messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 4097}],
    ),
    chat(
        "at most 1,024",
        "messages[0].tool_calls",
        messages=[{"role": "assistant", "tool_calls": [FUNCTION] * 1025}],
    ),
    chat(
        "256 characters",
        "tools[0].function.name",
        tools=[{"type": "function", "function": {"name": "x" * 257}}],
    ),
    text("at most 2,048", prompt=["x"] * 2049),
    text("most 1,024", stop_token_ids=[1] * 1025),
    text(f"to {PADDED_LOGITS - 1}", "stop_token_ids[0]", stop_token_ids=[PADDED_LOGITS]),
    text("an object of at most 16,384", logit_bias={str(i): 1 for i in range(16_385)}),
    *(text("1,024 characters", **{name: "x" * 1025}) for name in ("user", "model", "prompt_cache_key")),
    text("surrogate", stop="\ud800"),
    text("equal to 100", temperature=3.5e38),
    text("less than", seed=2**64),
    text("96", prompt="x" * 4000, max_tokens=200, min_tokens=97),
    # ---- fields that would silently change the answer
    *(
        make(part, code=UNSUPPORTED, **{name: value})
        for make in (chat, text)
        for name, value, part in (
            ("truncate_prompt_tokens", 10, "never cut"),
            ("length_penalty", 2.0, "send 1"),
            ("use_beam_search", True, "Beam search"),
            ("top_a", 0.2, "sampler"),
            ("typical_p", 0.9, "sampler"),
            ("audio", {"voice": "alloy"}, "Only text"),
            ("web_search_options", {}, "searched"),
            ("max_new_tokens", 5, "'max_tokens'"),
        )
    ),
    *(
        chat(part, code=UNSUPPORTED, **{name: value})
        for name, value, part in (
            ("best_of", 4, "n choices"),
            ("documents", [{"text": "x"}], "Send it in a message"),
            ("chat_template", "{{ x }}", "--chat-template"),
            ("system", "Be brief.", "role 'system'"),
        )
    ),
    chat("a number of tokens", thinking_token_budget=-5),
    chat("left out", "functions", functions=[{"name": "f"}], tools=[FUNCTION]),
    chat("'name'", "tools[0].function", tools=[{"name": "f"}]),
    chat("'web_search'", "tools[0].type", tools=[{"type": "web_search"}]),
    text("no chat template", code=UNSUPPORTED, enable_thinking=True),
    (TEXT, {}, MISSING, "prompt", "missing"),
    text("no tokens", code=EMPTY, prompt=""),
    text("no tokens", code=EMPTY, prompt=[]),
    text("no tokens", code=EMPTY, prompt=["a", ""]),
    text("a string, a list of token ids", prompt=5),
    text("'a', but must be a token id", "prompt[1]", prompt=[1, "a"]),
    text("a string or a list of token ids", "prompt[1]", prompt=["a", 1]),
    text("-2", prompt=[1, -2]),
    text(str(2**40), prompt=[1, 2**40]),
    text(str(PADDED_LOGITS), prompt=[PADDED_LOGITS]),
    text("4,096 tokens", code=TOO_LONG, prompt="x" * 4096),
    text("infilling", code=UNSUPPORTED, suffix="y"),
    text("n choices", code=UNSUPPORTED, best_of=4),
    text("integer", logprobs=True),
    (EXPLAIN, {}, INVALID, "messages", "or else 'prompt'"),
    (EXPLAIN, {"prompt": "x", "messages": MESSAGES}, INVALID, "messages", "not both"),
    (EXPLAIN, {"prompt": ""}, EMPTY, "prompt", "no tokens"),
    (EXPLAIN, {"prompt": ["a", "b"]}, INVALID, "prompt", "one prompt"),
]


@pytest.mark.parametrize(
    ("route", "body", "code", "param", "part"),
    BODIES,
    ids=[
        f"{route.rsplit('/', 1)[-1]}-{code}-{param}-{i}"
        for i, (route, _, code, param, _) in enumerate(BODIES)
    ],
)
def test_a_wrong_request_is_one_clear_error(
    served: Any, route: str, body: Any, code: str, param: str, part: str
) -> None:
    bodies = [body]
    if isinstance(body, dict) and route != EXPLAIN:
        bodies.append(body | {"stream": body.get("stream", True)})
    for each in bodies:
        raw = json.dumps(each)  # spells surrogates out, as clients in other languages do
        response = served.client.post(route, content=raw, headers={"Content-Type": "application/json"})
        assert_error(response, 404 if code == NOT_FOUND else 400, code, part, param=param)
    assert served.chat("still there?", max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"{bad", "not JSON"),
        (b"", "it is empty"),
        (b'{"messages": [', "not JSON"),
        (b"\xff\xfe", "body"),
        (b"[" * 100_000, "body"),
        (b'{"messages": [], "temperature": NaN}', "finite"),
    ],
)
def test_a_body_that_is_not_json_is_one_clear_error(served: Any, content: bytes, part: str) -> None:
    response = served.client.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert part in response.json()["error"]["message"]


def test_a_wrong_route_and_a_wrong_method_have_the_same_shape(served: Any) -> None:
    assert_error(served.client.get("/v1/nothing"), 404, "not_found", "GET /v1/nothing", "/docs", param=None)
    wrong = served.client.get(CHAT)
    assert_error(wrong, 405, "method_not_allowed", "Allow", param=None)
    assert wrong.headers["allow"] == "POST"
    assert_error(served.client.get("/v1/models/gpt-9"), 404, "model_not_found", "gpt-9", param="model")


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {str(i): "x" for i in range(100_000)}},
        {"logit_bias": {f"\ud800{i}": 1 for i in range(100)}},
        {"messages": [{f"\ud800{i}": 1 for i in range(100_000)}, *(["x"] * 100)]},
        {"messages": ["x"] * 10_000},
        {"messages": MESSAGES, "stop": [1] * 100_000},
        {"messages": MESSAGES, "stop_token_ids": ["x"] * 1000},
        {"messages": MESSAGES, "tools": ["x"] * 1000},
    ],
)
def test_many_wrong_values_are_few_errors(fields: Any) -> None:
    """One error for each of a million values would block the event loop for half a minute."""
    with pytest.raises(ValidationError) as raised:
        ChatCompletionRequest.model_validate(fields)
    assert raised.value.error_count() <= 3


@pytest.mark.parametrize(("route", "body"), [(CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "x"})])
def test_neutral_values_and_ignored_and_unknown_fields_do_not_change_the_answer(
    served: Any, route: str, body: Any
) -> None:
    plain = {**body, "max_tokens": 3, "temperature": 0}
    expected = served.client.post(route, json=plain).json()["choices"]
    neutral = {name: refused.neutral[0] for name, refused in REFUSED.items() if refused.neutral}
    if route == CHAT:
        neutral |= {"tools": [], "thinking": {"type": "adaptive"}, "documents": None}
    else:
        del neutral["echo"]
    for extra in (
        neutral,
        dict.fromkeys(REFUSED.keys() - {"prompt"}),
        dict.fromkeys(IGNORED, "x"),
        {"unheard_of": [1]},
    ):
        answer = served.client.post(route, json=extra | plain)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == expected


def test_no_table_names_a_field_that_is_implemented() -> None:
    """A field of both routes never reaches the tables, and a remedy names what there is."""
    declared = ChatCompletionRequest.model_fields.keys() & CompletionRequest.model_fields.keys()
    for name in declared | STRUCTURED.keys():
        assert name not in REFUSED
        assert name not in IGNORED
    assert not REFUSED.keys() & IGNORED
    known = ChatCompletionRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    for name, refused in REFUSED.items():
        assert set(re.findall(r"'([a-z_]+)'", refused.remedy)) <= known | {"system", "reasoning_content"}, (
            name
        )
        assert set(re.findall(r"/v1/[a-z/]+[a-z]", refused.remedy)) <= {TEXT, CHAT, "/v1/responses"}, name


def test_a_path_whose_base_is_wrong_is_answered_with_the_right_one(served: Any) -> None:
    """OpenAI's clients are given a base without /v1, and Anthropic's one with it."""
    paths = [
        (method.upper(), path)
        for path, methods in served.app.openapi()["paths"].items()
        if path.startswith("/v1/")
        for method in methods
    ]
    assert len(paths) >= 25
    for method, template in paths:
        path = re.sub(r"{.*?}", "x", template)
        for wrong in (path.removeprefix("/v1"), f"/v1{path}", f"/api{path}"):
            if (method, wrong) in {(each, found) for each, found in paths} or wrong in OWN_PATHS:
                continue
            answer = served.client.request(method, wrong, headers={"Content-Type": "application/json"})
            assert answer.status_code == 404, wrong
            told = answer.json()["error"]["message"]
            assert f"Use {method} {path}. " in told
            is_anthropics = path.startswith("/v1/messages")
            assert ("request_id" in answer.json()) == is_anthropics
    assert_error(served.client.get("/chat/completions"), 404, "not_found", "/docs")


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_beyond_the_context_is_lowered_and_a_header_says_so(served: Any, stream: bool) -> None:
    """Claude Code asks for 32,000 tokens after a prompt of 25,000, with any context limit."""
    for route, body in (
        (CHAT, {"messages": [{"role": "user", "content": "x" * 4080}]}),
        (TEXT, {"prompt": "x" * 4084}),
    ):
        fields = body | {"max_tokens": 9_999, "ignore_eos": True, "stream": stream}
        answer = served.client.post(route, json=fields)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-max-tokens"] == "12"
        if not stream:
            assert answer.json()["usage"]["completion_tokens"] == 12
            assert answer.json()["choices"][0]["finish_reason"] == "length"
        fits = served.client.post(route, json=fields | {"max_tokens": 12})
        assert "x-max-tokens" not in fits.headers
        strict = served.client.post(route, json=fields | {"strict_max_tokens": True})
        assert_error(strict, 400, "context_length_exceeded", "at most 12 tokens", param="max_tokens")


def test_the_header_of_several_prompts_has_the_lowest_max_tokens(served: Any) -> None:
    answer = served.complete(["x" * 4090, "x" * 4093, "x"], max_tokens=5, ignore_eos=True)
    assert answer.headers["x-max-tokens"] == "3"
    assert answer.json()["usage"]["completion_tokens"] == 5 + 3 + 5


def test_a_large_agents_request_is_within_the_limits(serve: Any) -> None:
    """1,500 messages, 60 tools of 8 kB, schemas 64 deep."""
    call = {"id": "call00001", "type": "function", "function": {"name": "f0", "arguments": "{}"}}
    messages = [{"role": "system", "content": "x"}, *MESSAGES]
    for _ in range(500):
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00001", "content": "ok"},
            {"role": "user", "content": "on"},
        ]
    tools = [
        {
            "type": "function",
            "function": {"name": f"f{i}", "description": "x" * 8_000, "parameters": deep(64)},
        }
        for i in range(60)
    ]
    with serve(context_limit=600_000, blocks=80_000) as served:
        answer = served.client.post(CHAT, json={"messages": messages, "tools": tools, "max_tokens": 1})
        assert answer.status_code == 200, answer.text


def test_a_model_without_a_chat_template_names_the_remedy(serve: Any) -> None:
    class Bare(ByteTokenizer):
        def render_chat(self, *_messages: Any, **_options: Any) -> str:
            raise ChatTemplateMissing

    with serve(tokenizer=Bare()) as served:
        assert_error(served.chat("x"), 400, "chat_template_missing", "--chat-template", param="messages")
        assert served.complete("x", max_tokens=1).status_code == 200


def test_every_route_but_health_requires_the_api_key(serve: Any) -> None:
    with serve(server=ServerConfig(api_key="s3cret")) as served:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            refused = served.client.post(CHAT, json={"messages": MESSAGES}, headers=headers)
            assert_error(refused, 401, "invalid_api_key", "Authorization", param=None)
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.headers["x-should-retry"] == "false"
        for path in ("/v1/models", "/v1/cache/stats", "/metrics", "/openapi.json", "/nothing"):
            assert served.client.get(path).status_code == 401
        health = served.client.get("/health")
        assert (health.status_code, health.json()) == (200, {"status": "ok", "alive": True, "detail": "ok"})
        known = {"Authorization": "Bearer s3cret"}
        assert served.client.get("/v1/models", headers=known).status_code == 200


# ---- failures after a request was accepted


def live_requests(engine: Engine) -> int:
    health = engine.health()
    return health.running + health.waiting


def test_a_full_queue_answers_429_with_retry_after(serve: Any) -> None:
    held = Held()
    with serve(EngineConfig(max_batch=1, max_queue=3), fault=held) as served:
        answers: list[int] = []

        def ask() -> None:
            answers.append(served.chat("wait", max_tokens=40, ignore_eos=True).status_code)

        def start(count: int) -> None:
            for _ in range(count):
                threads.append(threading.Thread(target=ask))
                threads[-1].start()
            wait_until(lambda: live_requests(served.assembly.engine) == len(threads))

        threads: list[threading.Thread] = []
        start(2)
        # Two places are left for three choices: none of them may stay in the queue.
        for stream in (False, True):
            refused = served.chat("three", n=3, stream=stream)
            assert_error(refused, 429, "queue_full", "--max-queue", param=None)
            assert int(refused.headers["retry-after"]) >= 1
            wait_until(lambda: live_requests(served.assembly.engine) == 2)
        start(2)
        assert served.chat("one too many").status_code == 429
        held.let_go()
        join(*threads)
        assert answers == [200] * 4
        served.settled()
        assert served.metric("rootstock_requests_total", outcome="error", route=CHAT) == 3


class FailsOnce:
    """A fault that raises at one forward."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, _batch: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("the accelerator hiccuped")


def test_a_failed_step_fails_its_requests_and_the_server_goes_on(serve: Any) -> None:
    with serve(fault=FailsOnce(3)) as served:
        failed = served.chat("boom", max_tokens=20, ignore_eos=True)
        assert_error(failed, 500, "step_failed", "RuntimeError", param=None)
        assert "hiccuped" not in failed.text, "it may quote other requests of the same forward"
        assert failed.json()["error"]["type"] == "server_error"
        assert served.chat("again", max_tokens=20).status_code == 200
        served.settled()


@pytest.mark.parametrize("n", [1, 3])
def test_a_failure_ends_a_stream_with_an_error_event(serve: Any, n: int) -> None:
    with serve(fault=FailsOnce(4)) as served:
        body = {"messages": MESSAGES, "max_tokens": 20, "stream": True, "ignore_eos": True, "n": n}
        with served.client.stream("POST", CHAT, json=body) as response:
            assert response.status_code == 200
            events = "".join(response.iter_text()).strip().split("\n\n")
        assert "chat.completion.chunk" in events[0]
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert error["code"] == "step_failed"
        assert sum('"error"' in event for event in events) == 1
        served.settled()
        assert served.chat("again", max_tokens=2).status_code == 200


def test_logits_that_are_not_finite_fail_only_their_request(serve: Any) -> None:
    with serve() as served:
        forward = served.runtime.forward

        def poisoned(batch: Any) -> Any:
            logits = forward(batch)
            logits[:, 7] = float("nan")
            return logits

        served.runtime.forward = poisoned
        assert_error(served.chat("nan"), 500, "sampling_failed", "nan", param=None)
        del served.runtime.forward
        assert served.chat("fine", max_tokens=1).status_code == 200


def test_a_stopping_server_ends_its_streams_with_an_error_event(serve: Any) -> None:
    events: list[str] = []
    with serve(fault=Held(free_forwards=3)) as served:
        body = {"messages": MESSAGES, "max_tokens": 3000, "stream": True, "ignore_eos": True}
        started = threading.Event()

        def read() -> None:
            with served.client.stream("POST", CHAT, json=body) as response:
                for line in response.iter_lines():
                    events.append(line)
                    started.set()

        reader = threading.Thread(target=read)
        reader.start()
        wait_for(started)
        served.assembly.engine.stop()
        join(reader)
    said = [event for event in events if event]
    assert "engine_stopped" in said[-1]
    assert "data: [DONE]" not in said


class DropsResults(ByteTokenizer):
    """A tokenizer whose template drops results of tools, and fails at the word "refuse"."""

    def render_chat(self, messages: Any, tools: Any, **options: Any) -> str:
        if any("refuse" in str(message["content"]) for message in messages):
            raise ChatTemplateFailed("Do not say that")
        return super().render_chat([each for each in messages if each["role"] != "tool"], tools, **options)


def test_an_error_of_the_template_names_the_clients_own_place(serve: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "found"}
    asked, half = {"role": "user", "content": "go"}, "\ud800"
    skipped = {"role": "system", "content": "now", "clear_at": "next_user_message"}
    chat, messages, responses = "/v1/chat/completions", "/v1/messages", "/v1/responses"
    cases: list[tuple[str, dict[str, Any], str]] = [
        (
            chat,
            {
                "messages": [
                    asked,
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c", "content": "found"},
                ]
            },
            "messages[2].role",
        ),
        (
            messages,
            {
                "system": "Be brief.",
                "messages": [
                    skipped,
                    asked,
                    {"role": "assistant", "content": [use]},
                    {"role": "user", "content": [result]},
                ],
            },
            "messages[3]",
        ),
        (
            responses,
            {
                "instructions": "Be brief.",
                "input": [
                    asked,
                    {"type": "reasoning", "summary": []},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "found"},
                ],
            },
            "input[3]",
        ),
        (chat, {"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
        (messages, {"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
        (responses, {"input": "refuse"}, "input"),
        (chat, {"messages": [{"role": "user", "content": half}]}, "messages"),
        (messages, {"messages": [{"role": "user", "content": half}]}, "messages"),
        (responses, {"input": half}, "input"),
    ]
    with serve(tokenizer=DropsResults()) as served:
        for path, body, place in cases:
            answer = served.client.post(
                path, content=json.dumps(body), headers={"Content-Type": "application/json"}
            )
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error.get("param", place) == place  # Anthropic's errors have none
            if "refuse" in str(body):
                assert error["message"] == "The model's chat template refuses these messages: Do not say that"
            else:
                assert error["message"].startswith(f"'{place}' is "), error
