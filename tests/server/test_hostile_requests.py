"""Hostile values in a body: the answer is 2xx, or 4xx with an error of the usual shape, and the server goes on."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rootstock.server.formats.openai.schema import (
    IGNORED,
    REFUSED,
    ChatCompletionRequest,
    CompletionRequest,
    PromptRequest,
)
from server.conftest import served_by_oracle, user
from text.prompts.chat_tokenizers import chat_tokenizer

CHAT, TEXT, EXPLAIN = "/v1/chat/completions", "/v1/completions", "/v1/cache/explain"
SCHEMAS = {CHAT: ChatCompletionRequest, TEXT: CompletionRequest, EXPLAIN: PromptRequest}
FIELDS = {
    route: sorted(schema.model_fields)
    + sorted({*REFUSED, *IGNORED} - schema.model_fields.keys())
    + ["unheard_of"]
    for route, schema in SCHEMAS.items()
}

CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"word": "oak"}'},
}
CUSTOM = {"id": "call00002", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "What is an oak?", "cache_control": {"type": "ephemeral"}}],
    },
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
    {"role": "tool", "tool_call_id": "call00001", "name": "look_up", "content": "a tree"},
    {"role": "assistant", "content": None, "tool_calls": [CUSTOM]},
    {"role": "tool", "tool_call_id": "call00002", "content": None},
    {"role": "assistant", "content": None, "function_call": {"name": "look_up", "arguments": "{}"}},
    {"role": "function", "name": "look_up", "content": "nothing"},
    {"role": "user", "content": "Go on."},
]
BODIES: list[tuple[str, Any]] = [
    (CHAT, {"messages": MESSAGES, "tools": [TOOL], "max_tokens": 2}),
    (CHAT, {"messages": user("x"), "chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 2}),
    (CHAT, {"messages": user("x"), "logit_bias": {"5": 1.5}, "stop": ["a", "b"], "n": 2}),
    (TEXT, {"prompt": "one two", "max_tokens": 2, "logprobs": 2, "echo": True}),
    (
        TEXT,
        {
            "prompt": ["one", [5, 6]],
            "stop_token_ids": [3],
            "seed": 5,
            "temperature": 0.5,
            "top_p": 0.5,
            "max_tokens": 2,
        },
    ),
    (EXPLAIN, {"messages": MESSAGES, "tools": [TOOL]}),
    (EXPLAIN, {"prompt": [1, 2, 3]}),
]

# Raw text for a body: some values are not JSON, and some no encoder would write.
HOSTILE = [
    "null", "true", "false", "0", "-1", "1", "2", "-0.0", "1e400", "-1e400", "NaN", "Infinity", "1e-320", "1e308",
    "3.5e38", "0.5", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "18446744073709551616",
    "1" + "0" * 4000, "-1" + "0" * 4000, "1" + "0" * 5000, "1.0", '""', '"\\u0000"', '"\\ud800"', '"a\\udfffb"',
    '"\\ud83d\\ude00"', '"<|im_end|>"', '"auto"', '"none"', '"required"', '"x"', '"' + "x" * 5000 + '"', "[]", "{}",
    "[[]]", "[{}]", "[null]", '["a"]', "[true]", "[5]", "[1e400]", "[-1]", '{"a": 1}', '{"\\ud800": 1}', '{"": null}',
    '{"type": "text"}', '{"type": null}', '{"a": 1, "a": {"a": 2}}', '{"messages": []}', '{"self": 1, "tools": 2}',
    '{"0": -100}', '{"00": 1, "0": NaN}', '{"__class__": {}}', '{"role": "user", "content": "x"}', "{", "]", '"',
    "[" * 60 + "]" * 60, "[" * 900 + "]" * 900, "[" * 9_000 + "]" * 9_000, '{"a":' * 500 + "1" + "}" * 500,
    '{"a":' * 9_000 + "1" + "}" * 9_000, '"' + "[" * 200_000 + '"', '"' + '{\\"a\\":' * 2_000 + '"',
    "[" + "0," * 99_999 + "0]", "[" + '"",' * 9_999 + '""]', "[" + "{}," * 99_999 + "{}]",
    "[" + "[]," * 99_999 + "[]]", "{" + ",".join(f'"{i}": -100' for i in range(1000)) + "}",
    "{" + ",".join(f'"{i}": "x"' for i in range(20_000)) + "}",
]  # fmt: skip
raw = st.sampled_from(HOSTILE) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(), max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
).map(json.dumps)


@pytest.fixture(scope="module", params=["bytes", "qwen3", "llama_3", "mistral"])
def served(request: Any) -> Iterator[Any]:
    """A small context: an answer without a limit is a short one."""
    options: dict[str, Any] = {}
    if request.param != "bytes":
        tokenizer = chat_tokenizer(request.param)
        options = {"tokenizer": tokenizer, "vocab_size": len(tokenizer._tokenizer)}
    with served_by_oracle(context_limit=400, **options) as one:
        yield one
        one.settled()


def assert_answered(served: Any, route: str, body: str) -> None:
    content = body.encode("utf-8", "surrogatepass")
    response = served.client.post(route, content=content, headers={"Content-Type": "application/json"})
    shown = (response.status_code, response.text[:500], body[:500])
    assert 200 <= response.status_code < 300 or 400 <= response.status_code < 500, shown
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, shown
        assert error["type"] == "invalid_request_error", shown
        assert 0 < len(error["message"]) < 1000, shown
    elif "event-stream" in response.headers["content-type"]:
        assert '"error"' not in response.text, shown
        assert response.text.endswith("data: [DONE]\n\n"), shown
    else:
        response.json()
    assert served.assembly.engine.health().alive


def spelled(value: Any, at: tuple[Any, ...], new: str) -> str:
    """Encodes `value` as JSON, with the raw text `new` at one place."""
    mark = "\ue001 the place \ue001"

    def replaced(value: Any, at: tuple[Any, ...]) -> Any:
        if not at:
            return mark
        if isinstance(value, dict):
            return {**value, at[0]: replaced(value.get(at[0]), at[1:])}
        return [replaced(each, at[1:]) if i == at[0] else each for i, each in enumerate(value)]

    return json.dumps(replaced(value, at)).replace(json.dumps(mark), new)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*at, key))


PLACES = [(route, body, at) for route, body in BODIES for at in places(body)]


SETTINGS = settings(
    max_examples=settings.default.max_examples if os.environ.get("ROOTSTOCK_SOAK") else 60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
ARGUMENTS = ("messages", 2, "tool_calls", 0, "function", "arguments")
BRACKETS = '"' + "[" * 200_000 + '"'


@example(place=(*BODIES[0], ARGUMENTS), value=BRACKETS)
@example(place=(*BODIES[1], ("chat_template_kwargs",)), value='{"messages": []}')
@example(place=(*BODIES[1], ("chat_template_kwargs",)), value='{"self": 1}')
@example(place=(*BODIES[0], ("tools", 0, "function", "parameters")), value='{"a":' * 900 + "1" + "}" * 900)
@example(place=(*BODIES[4], ("temperature",)), value="3.5e38")
@SETTINGS
@given(place=st.sampled_from(PLACES), value=raw)
def test_a_hostile_value_anywhere_in_a_body_is_answered(served: Any, place: Any, value: str) -> None:
    route, body, at = place
    assert_answered(served, route, spelled(body, at, value))


@SETTINGS
@given(base=st.sampled_from(BODIES), data=st.data(), stream=st.booleans())
def test_hostile_values_in_several_fields_are_answered(
    served: Any, base: Any, data: Any, stream: bool
) -> None:
    route, body = base
    names = data.draw(st.lists(st.sampled_from(FIELDS[route]), min_size=1, max_size=4))
    fields = [json.dumps(body)[1:-1], f'"stream": {json.dumps(stream)}']
    # Of two fields with one name the last counts.
    fields += [f"{json.dumps(name)}: {data.draw(raw)}" for name in names]
    assert_answered(served, route, "{" + ", ".join(fields) + "}")


def test_every_field_of_every_route_is_answered_with_hostile_values(served: Any) -> None:
    """A fixed sample for each template: all pairs would take minutes."""
    chosen = random.Random(len(served.assembly.tokenizer.template_names.literals))
    for route, body in (BODIES[1], BODIES[3], BODIES[6]):
        for name in SCHEMAS[route].model_fields:
            for value in chosen.sample(HOSTILE, 3):
                assert_answered(served, route, spelled(body, (name,), value))
