"""Every wrong request is answered in OpenAI's shape, with the right status and one clear sentence, and the
server answers the next one."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from pydantic import ValidationError

from rootstock.config import EngineConfig, ServerConfig
from rootstock.engine.engine import Engine
from rootstock.server.openai.schema import IGNORED, REFUSED, ChatCompletionRequest
from server.held import Held
from waiting import join, wait_for, wait_until

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
EXPLAIN = "/v1/cache/explain"
EVERY_TOKEN = [str(token) for token in range(262)]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


BODIES: list[tuple[str, Any, int, str, str | None, str]] = [
    # route, body, status, code, param, a part of the message
    (CHAT, {}, 400, "missing_parameter", "messages", "'messages' is missing"),
    (CHAT, [1], 400, "invalid_parameter", "body", "must be an object"),
    (
        CHAT,
        {"messages": "hi"},
        400,
        "invalid_parameter",
        "messages",
        "'messages' is 'hi', but must be a list",
    ),
    (CHAT, {"messages": []}, 400, "invalid_parameter", "messages", "a list of at least 1"),
    (CHAT, {"messages": ["hi"]}, 400, "invalid_parameter", "messages[0]", "an object"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "missing_parameter", "messages[0].role", "missing"),
    (
        CHAT,
        {"messages": [{"role": 3, "content": "x"}]},
        400,
        "invalid_parameter",
        "messages[0].role",
        "a string",
    ),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "missing_parameter", "messages[0].content", "missing"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": 5}]},
        400,
        "invalid_parameter",
        "messages[0].content",
        "a string or a list of parts",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        400,
        "invalid_parameter",
        "messages[0].content[0].type",
        "'image_url', but must be a part of type 'text'",
    ),
    (
        CHAT,
        {"messages": [{"role": "wizard", "content": "abra"}]},
        400,
        "invalid_parameter",
        "messages[0].role",
        "'wizard', but must be one of system,",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "half \ud83d of a pair"}]},
        400,
        "invalid_parameter",
        "messages",
        "surrogate",
    ),
    (CHAT, {"messages": MESSAGES, "model": "gpt-9"}, 404, "model_not_found", "model", "Ask for 'fake'"),
    (
        CHAT,
        {"messages": MESSAGES, "temperature": "hot"},
        400,
        "invalid_parameter",
        "temperature",
        "a valid number",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "temperature": "0.5"},
        400,
        "invalid_parameter",
        "temperature",
        "a valid number",
    ),
    (CHAT, {"messages": MESSAGES, "temperature": -1}, 400, "invalid_parameter", "temperature", "equal to 0"),
    (
        CHAT,
        {"messages": MESSAGES, "top_p": 1.5},
        400,
        "invalid_parameter",
        "top_p",
        "less than or equal to 1",
    ),
    (CHAT, {"messages": MESSAGES, "top_k": 2.5}, 400, "invalid_parameter", "top_k", "integer"),
    (CHAT, {"messages": MESSAGES, "min_p": 2}, 400, "invalid_parameter", "min_p", "equal to 1"),
    (
        CHAT,
        {"messages": MESSAGES, "repetition_penalty": 0},
        400,
        "invalid_parameter",
        "repetition_penalty",
        "equal to 0.01",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "presence_penalty": 3},
        400,
        "invalid_parameter",
        "presence_penalty",
        "equal to 2",
    ),
    (CHAT, {"messages": MESSAGES, "n": 0}, 400, "invalid_parameter", "n", "equal to 1"),
    (CHAT, {"messages": MESSAGES, "n": 1000}, 400, "invalid_parameter", "n", "128"),
    (CHAT, {"messages": MESSAGES, "stream": "yes"}, 400, "invalid_parameter", "stream", "boolean"),
    (CHAT, {"messages": MESSAGES, "stop": 5}, 400, "invalid_parameter", "stop", "a string or a list"),
    (CHAT, {"messages": MESSAGES, "stop": ["a", 5]}, 400, "invalid_parameter", "stop[1]", "a string"),
    (CHAT, {"messages": MESSAGES, "stop": ""}, 400, "invalid_parameter", "stop", "1 to 512 characters"),
    (CHAT, {"messages": MESSAGES, "stop": ["x"] * 99}, 400, "invalid_parameter", "stop", "at most 16"),
    (
        CHAT,
        {"messages": MESSAGES, "logit_bias": {"x": 1}},
        400,
        "invalid_parameter",
        "logit_bias",
        "token ids",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "logit_bias": {"999": 1}},
        400,
        "invalid_parameter",
        "logit_bias",
        "to 261",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "logit_bias": {"9": 101}},
        400,
        "invalid_parameter",
        "logit_bias.9",
        "-100 to",
    ),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, 400, "invalid_parameter", "logprobs", "true with"),
    (CHAT, {"messages": MESSAGES, "max_tokens": -1}, 400, "invalid_parameter", "max_tokens", "equal to 0"),
    (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 9999, "strict_max_tokens": True},
        400,
        "context_length_exceeded",
        "max_tokens",
        "4,096",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 1, "min_tokens": 2},
        400,
        "invalid_parameter",
        "min_tokens",
        "is 1",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        400,
        "context_length_exceeded",
        "messages",
        "5,004 tokens",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "response_format": {"type": "json_object"}},
        400,
        "unsupported_parameter",
        "response_format",
        "not supported",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "tool_choice": "required"},
        400,
        "unsupported_parameter",
        "tool_choice",
        "forced",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}},
        400,
        "unsupported_parameter",
        "chat_template_kwargs.chat_template",
        "--chat-template",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "cache_salt": "\ud800"},
        400,
        "invalid_parameter",
        "cache_salt",
        "surrogate",
    ),
    # ---- what would be a 500
    *(
        (
            CHAT,
            {"messages": MESSAGES, "chat_template_kwargs": {name: 1}},
            400,
            "unsupported_parameter",
            f"chat_template_kwargs.{name}",
            part,
        )
        for name, part in (
            ("messages", "reads no variable"),
            ("self", "reads no variable"),
            ("conversation", "reads no variable"),
            ("tokenize", "reads no variable"),
            ("tools", "a field of the request itself"),
        )
    ),
    (
        CHAT,
        {"messages": MESSAGES, "logit_bias": dict.fromkeys(EVERY_TOKEN, -100)},
        400,
        "invalid_parameter",
        "logit_bias",
        "some token may be chosen",
    ),
    (
        TEXT,
        {"prompt": "x", "logit_bias": {"257": 100}, "min_tokens": 1},
        400,
        "invalid_parameter",
        "logit_bias",
        "some token may be chosen",
    ),
    (
        TEXT,
        {"prompt": "x", "stop_token_ids": list(range(262)), "min_tokens": 1},
        400,
        "invalid_parameter",
        "min_tokens",
        "some token may be chosen",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [FUNCTION | {"x": deep(300)}]},
        400,
        "invalid_parameter",
        "tools[0]",
        "128",
    ),
    (
        CHAT,
        {"messages": [{**MESSAGES[0], "x": deep(300)}]},
        400,
        "invalid_parameter",
        "messages[0]",
        "128 deep",
    ),
    # ---- limits
    (CHAT, {"messages": MESSAGES * 16_385}, 400, "invalid_parameter", "messages", "at most 16,384"),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [FUNCTION] * 1025},
        400,
        "invalid_parameter",
        "tools",
        "at most 1,024",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [FUNCTION | {"x": "y" * 4_200_000}]},
        400,
        "invalid_parameter",
        "tools",
        "4,194,304 characters",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4097}]},
        400,
        "invalid_parameter",
        "messages[0].content",
        "at most 4,096",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [FUNCTION] * 1025}]},
        400,
        "invalid_parameter",
        "messages[0].tool_calls",
        "at most 1,024",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "x" * 257}}]},
        400,
        "invalid_parameter",
        "tools[0].function.name",
        "256 characters",
    ),
    (TEXT, {"prompt": ["x"] * 2049}, 400, "invalid_parameter", "prompt", "at most 2,048"),
    (
        TEXT,
        {"prompt": "x", "stop_token_ids": [1] * 1025},
        400,
        "invalid_parameter",
        "stop_token_ids",
        "most 1,024",
    ),
    (TEXT, {"prompt": "x", "stop_token_ids": [262]}, 400, "invalid_parameter", "stop_token_ids[0]", "to 261"),
    (
        TEXT,
        {"prompt": "x", "logit_bias": {str(i): 1 for i in range(16_385)}},
        400,
        "invalid_parameter",
        "logit_bias",
        "an object of at most 16,384",
    ),
    *(
        (TEXT, {"prompt": "x", name: "x" * 1025}, 400, "invalid_parameter", name, "1,024 characters")
        for name in ("user", "model", "prompt_cache_key")
    ),
    (TEXT, {"prompt": "x", "stop": "\ud800"}, 400, "invalid_parameter", "stop", "surrogate"),
    (TEXT, {"prompt": "x", "temperature": 3.5e38}, 400, "invalid_parameter", "temperature", "equal to 100"),
    (TEXT, {"prompt": "x", "seed": 2**64}, 400, "invalid_parameter", "seed", "less than"),
    (
        TEXT,
        {"prompt": "x" * 4000, "max_tokens": 200, "min_tokens": 97},
        400,
        "invalid_parameter",
        "min_tokens",
        "96",
    ),
    # ---- what would change the answer without a word
    *(
        (route, body | {name: value}, 400, "unsupported_parameter", name, part)
        for route, body in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "x"}))
        for name, value, part in (
            ("guided_json", {"type": "object"}, "constrained"),
            ("structured_outputs", {"json": {}}, "constrained"),
            ("truncate_prompt_tokens", 10, "never cut"),
            ("length_penalty", 2.0, "send 1"),
            ("use_beam_search", True, "Beam search"),
            ("top_a", 0.2, "sampler"),
            ("typical_p", 0.9, "sampler"),
            ("audio", {"voice": "alloy"}, "Only text"),
            ("web_search_options", {}, "searched"),
            ("response_format", {"type": "json_object"}, "text"),
            ("max_new_tokens", 5, "'max_tokens'"),
        )
    ),
    *(
        (CHAT, {"messages": MESSAGES, name: value}, 400, "unsupported_parameter", name, part)
        for name, value, part in (
            ("best_of", 4, "n choices"),
            ("reasoning_effort", "high", "no efforts"),
            ("enable_thinking", False, "no switch"),
            ("thinking", {"type": "disabled"}, "no switch"),
            ("documents", [{"text": "x"}], "Send it in a message"),
            ("chat_template", "{{ x }}", "--chat-template"),
            ("system", "Be brief.", "role 'system'"),
        )
    ),
    (
        CHAT,
        {"messages": MESSAGES, "thinking": {"type": "enabled", "budget_tokens": 5}},
        400,
        "unsupported_parameter",
        "thinking.budget_tokens",
        "limited",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "functions": [{"name": "f"}], "function_call": {"name": "f"}},
        400,
        "unsupported_parameter",
        "function_call",
        "forced",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "functions": [{"name": "f"}], "tools": [FUNCTION]},
        400,
        "invalid_parameter",
        "functions",
        "left out",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [{"name": "f"}]},
        400,
        "invalid_parameter",
        "tools[0].function",
        "'name'",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [{"type": "web_search"}]},
        400,
        "invalid_parameter",
        "tools[0].type",
        "'web_search'",
    ),
    (
        TEXT,
        {"prompt": "x", "enable_thinking": True},
        400,
        "unsupported_parameter",
        "enable_thinking",
        "no chat template",
    ),
    (TEXT, {}, 400, "missing_parameter", "prompt", "missing"),
    (TEXT, {"prompt": ""}, 400, "empty_prompt", "prompt", "no tokens"),
    (TEXT, {"prompt": []}, 400, "empty_prompt", "prompt", "no tokens"),
    (TEXT, {"prompt": ["a", ""]}, 400, "empty_prompt", "prompt", "no tokens"),
    (TEXT, {"prompt": 5}, 400, "invalid_parameter", "prompt", "a string, a list of token ids"),
    (TEXT, {"prompt": [1, "a"]}, 400, "invalid_parameter", "prompt[1]", "'a', but must be a token id"),
    (TEXT, {"prompt": ["a", 1]}, 400, "invalid_parameter", "prompt[1]", "a string or a list of token ids"),
    (TEXT, {"prompt": [1, -2]}, 400, "invalid_parameter", "prompt", "-2"),
    (TEXT, {"prompt": [1, 2**40]}, 400, "invalid_parameter", "prompt", str(2**40)),
    (TEXT, {"prompt": [262]}, 400, "invalid_parameter", "prompt", "262"),
    (TEXT, {"prompt": "x" * 4096}, 400, "context_length_exceeded", "prompt", "4,096 tokens"),
    (TEXT, {"prompt": "x", "suffix": "y"}, 400, "unsupported_parameter", "suffix", "infilling"),
    (TEXT, {"prompt": "x", "best_of": 4}, 400, "unsupported_parameter", "best_of", "n choices"),
    (TEXT, {"prompt": "x", "logprobs": True}, 400, "invalid_parameter", "logprobs", "integer"),
    (EXPLAIN, {}, 400, "invalid_parameter", "messages", "or else 'prompt'"),
    (EXPLAIN, {"prompt": "x", "messages": MESSAGES}, 400, "invalid_parameter", "messages", "not both"),
    (EXPLAIN, {"prompt": ""}, 400, "empty_prompt", "prompt", "no tokens"),
    (EXPLAIN, {"prompt": ["a", "b"]}, 400, "invalid_parameter", "prompt", "one prompt"),
]


def assert_error(response: Any, status: int, code: str, param: str | None, part: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert part in error["message"], error
    assert len(error["message"]) < 400
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("route", "body", "status", "code", "param", "part"),
    BODIES,
    ids=[f"{body[0].rsplit('/', 1)[-1]}-{body[3]}-{body[4]}-{i}" for i, body in enumerate(BODIES)],
)
def test_a_wrong_request_is_one_clear_error(
    served: Any, route: str, body: Any, status: int, code: str, param: str | None, part: str
) -> None:
    raw = json.dumps(body)  # spells surrogates out, as clients in other languages do
    response = served.client.post(route, content=raw, headers={"Content-Type": "application/json"})
    assert_error(response, status, code, param, part)
    if isinstance(body, dict) and route != EXPLAIN:
        raw = json.dumps(body | {"stream": body.get("stream", True)})
        streamed = served.client.post(route, content=raw, headers={"Content-Type": "application/json"})
        assert_error(streamed, status, code, param, part)
    assert served.chat("still there?", max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("content", "content_type", "part"),
    [
        (b"{bad", "application/json", "not JSON"),
        (b"", "application/json", "it is empty"),
        (b'{"messages": [', "application/json", "not JSON"),
        (b"\xff\xfe", "application/json", "body"),
        (b"[" * 100_000, "application/json", "body"),
        (b'{"messages": [], "temperature": NaN}', "application/json", "finite"),
    ],
)
def test_a_body_that_is_not_json_is_one_clear_error(
    served: Any, content: bytes, content_type: str, part: str
) -> None:
    response = served.client.post(CHAT, content=content, headers={"Content-Type": content_type})
    assert response.status_code == 400, response.text
    assert part in response.json()["error"]["message"]


def test_a_wrong_route_and_a_wrong_method_have_the_same_shape(served: Any) -> None:
    assert_error(served.client.get("/v1/nothing"), 404, "not_found", None, "GET /v1/nothing")
    wrong = served.client.get(CHAT)
    assert_error(wrong, 405, "method_not_allowed", None, "Allow")
    assert wrong.headers["allow"] == "POST"
    assert_error(served.client.get("/v1/models/gpt-9"), 404, "model_not_found", "model", "gpt-9")


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
    """An error for each of a million values held up the event loop for half a minute."""
    with pytest.raises(ValidationError) as raised:
        ChatCompletionRequest.model_validate(fields)
    assert raised.value.error_count() <= 3


@pytest.mark.parametrize(("route", "body"), [(CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "x"})])
def test_fields_that_change_nothing_change_nothing(served: Any, route: str, body: Any) -> None:
    """Neutral values, fields that are ignored on purpose, fields that nobody knows."""
    plain = {**body, "max_tokens": 3, "temperature": 0}
    expected = served.client.post(route, json=plain).json()["choices"]
    neutral = {name: refused.neutral[0] for name, refused in REFUSED.items() if refused.neutral}
    if route == CHAT:
        neutral |= {
            "tools": [],
            "thinking": {"type": "adaptive"},
            "documents": None,
        }
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


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_beyond_the_context_is_lowered_and_told(served: Any, stream: bool) -> None:
    """As Claude Code asks for 32,000 tokens after a prompt of 25,000, whatever the model's context is."""
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
        assert_error(strict, 400, "context_length_exceeded", "max_tokens", "at most 12 tokens")


def test_of_several_prompts_the_one_with_the_least_room_is_told(served: Any) -> None:
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
    from rootstock.errors import ChatTemplateMissing
    from rootstock.testing.byte_tokenizer import ByteTokenizer

    class Bare(ByteTokenizer):
        def render_chat(self, *_messages: Any, **_options: Any) -> str:
            raise ChatTemplateMissing

    with serve(codec=Bare()) as served:
        assert_error(served.chat("x"), 400, "chat_template_missing", "messages", "--chat-template")
        assert served.complete("x", max_tokens=1).status_code == 200


def test_an_api_key_is_asked_for_everywhere_but_at_health(serve: Any) -> None:
    with serve(server=ServerConfig(api_key="s3cret")) as served:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            refused = served.client.post(CHAT, json={"messages": MESSAGES}, headers=headers)
            assert_error(refused, 401, "invalid_api_key", None, "Authorization")
            assert refused.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/v1/cache/stats", "/metrics", "/openapi.json", "/nothing"):
            assert served.client.get(path).status_code == 401
        assert served.client.get("/health").status_code == 200
        known = {"Authorization": "Bearer s3cret"}
        assert served.client.get("/v1/models", headers=known).status_code == 200


# ---- what goes wrong later


def live_requests(engine: Engine) -> int:
    health = engine.health()
    return health.running + health.waiting


def test_a_full_queue_answers_429_with_a_time_to_wait(serve: Any) -> None:
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
        # Two places are left, and three choices are asked for: none of them may stay behind.
        for stream in (False, True):
            refused = served.chat("three", n=3, stream=stream)
            assert_error(refused, 429, "queue_full", None, "--max-queue")
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
    """A forward that raises after so many others."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, _batch: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("the accelerator hiccuped")


def test_a_step_that_fails_answers_its_requests_and_the_server_goes_on(serve: Any) -> None:
    with serve(fault=FailsOnce(3)) as served:
        failed = served.chat("boom", max_tokens=20, ignore_eos=True)
        assert_error(failed, 500, "step_failed", None, "RuntimeError")
        assert "hiccuped" not in failed.text, "it may tell of others in the same forward"
        assert failed.json()["error"]["type"] == "server_error"
        assert served.chat("again", max_tokens=20).status_code == 200
        served.settled()


@pytest.mark.parametrize("n", [1, 3])
def test_a_failure_in_a_stream_is_an_error_event_and_the_streams_end(serve: Any, n: int) -> None:
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


def test_logits_that_are_not_finite_fail_their_request_alone(serve: Any) -> None:
    with serve() as served:
        forward = served.runtime.forward

        def poisoned(batch: Any) -> Any:
            logits = forward(batch)
            logits[:, 7] = float("nan")
            return logits

        served.runtime.forward = poisoned
        assert_error(served.chat("nan"), 500, "sampling_failed", None, "nan")
        del served.runtime.forward
        assert served.chat("fine", max_tokens=1).status_code == 200


def test_a_server_that_stops_ends_its_streams_with_an_error_event(serve: Any) -> None:
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
