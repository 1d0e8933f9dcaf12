"""Cases that schemathesis generates from a server's OpenAPI document.

`python schemathesis_cases.py URL CASES ADAPTER EMBEDDER [PATH...]`: ADAPTER is the directory of a LoRA adapter that
the server may load, EMBEDDER the name of its embedding model. Paths restrict the cases to their operations.

For the interpreter that has schemathesis; it imports nothing of Rootstock. Prints one line of JSON for each
operation: its cases, its answers by status, and its failures. Half of the cases hold valid values, half invalid ones.
Where an operation can stream, half of its cases ask for a stream.

Generated values hardly ever are a conversation that the server answers. In a fifth of the cases of a model's route,
the prompt is therefore a valid one, and in two fifths the whole body is. A valid prompt is answered before it is
pinned. Ids name stored responses, pins and loaded adapters in half of the cases.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
HANGS_AFTER_S = 120.0
MOST_EVENTS = 100_000  # of a stream: schemathesis would read 100
MOST_SHOWN = 5  # failures of an operation
OF_STORED = "/v1/responses/{id}"  # the beginning of the paths of stored responses

Json = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]

# ---- valid bodies

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12) | st.sampled_from(
    ["Hello.", "2 + 2 = ?"]
)
PROBABILITY = st.floats(0.1, 1.0)
NAME = st.sampled_from(["weather", "find"])
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}


def body(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries(dict(required), optional=dict(optional or {}))


SAMPLING = {
    "temperature": st.floats(0, 2),
    "top_p": PROBABILITY,
    "top_k": st.integers(-1, 50),
    "min_p": st.floats(0, 0.5),
    "repetition_penalty": st.floats(0.5, 2),
    "presence_penalty": st.floats(-2, 2),
    "seed": st.integers(0, 2**31),
    "logit_bias": st.dictionaries(st.integers(0, 99).map(str), st.floats(-100, 100), max_size=3),
    "min_tokens": st.integers(0, 1),
    "ignore_eos": st.booleans(),
    "cache_salt": TEXT,
    "prompt_cache_key": TEXT,
}
LENGTH = st.integers(1, 6)


def conversation(draw: Draw) -> list[Json]:
    """Draws messages of OpenAI's chats: turns, and calls with their results."""
    messages: list[Json] = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for number in range(draw(st.integers(0, 2))):
        messages.append({"role": "user", "content": draw(TEXT | TEXT.map(lambda t: [part("text", t)]))})
        if draw(st.booleans()):
            function = {"name": draw(NAME), "arguments": json.dumps({"town": draw(TEXT)})}
            call = {"id": f"call_{number}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": draw(TEXT)})
        messages.append({"role": "assistant", "content": draw(TEXT)})
    return [*messages, {"role": "user", "content": draw(TEXT)}]


def blocks(draw: Draw) -> list[Json]:
    """Draws messages of Anthropic's API: turns, thinking, and calls with their results."""
    messages: list[Json] = []
    for number in range(draw(st.integers(0, 2))):
        messages.append({"role": "user", "content": draw(TEXT)})
        thinking = {"type": "thinking", "thinking": draw(TEXT), "signature": draw(TEXT)}
        said = [thinking] if draw(st.booleans()) else []
        if draw(st.booleans()):
            use = {"type": "tool_use", "id": f"toolu_{number}", "name": draw(NAME), "input": {"town": "Oslo"}}
            result = {"type": "tool_result", "tool_use_id": use["id"], "content": draw(TEXT)}
            messages.append({"role": "assistant", "content": [*said, use]})
            messages.append({"role": "user", "content": [result]})
            said = []
        messages.append({"role": "assistant", "content": [*said, part("text", draw(TEXT))]})
    last = part("text", draw(TEXT)) | draw(st.sampled_from([{}, {"cache_control": {"type": "ephemeral"}}]))
    return [*messages, {"role": "user", "content": [last]}]


def items(draw: Draw) -> list[Json] | str:
    """Draws the input of the Responses API: text, or messages, reasoning, and calls with their outputs."""
    if draw(st.booleans()):
        return str(draw(TEXT))
    drawn: list[Json] = []
    for number in range(draw(st.integers(0, 2))):
        drawn.append({"role": "user", "content": [part("input_text", draw(TEXT))]})
        if draw(st.booleans()):
            drawn.append({"type": "reasoning", "summary": [], "encrypted_content": draw(TEXT)})
        if draw(st.booleans()):
            call = {"type": "function_call", "call_id": f"call_{number}", "name": draw(NAME)}
            drawn.append(call | {"arguments": json.dumps({"town": draw(TEXT)})})
            drawn.append({"type": "function_call_output", "call_id": call["call_id"], "output": draw(TEXT)})
        drawn.append({"role": "assistant", "content": [part("output_text", draw(TEXT))]})
    return [*drawn, {"type": "message", "role": "user", "content": draw(TEXT)}]


def part(kind: str, text: str) -> Json:
    return {"type": kind, "text": text}


FUNCTION = body({"name": NAME, "parameters": st.just(SCHEMA)}, {"description": TEXT, "strict": st.booleans()})
WRAPPED = FUNCTION.map(lambda function: {"type": "function", "function": function})
TOOLS = {
    "openai": st.lists(WRAPPED, max_size=1),
    "anthropic": st.lists(body({"name": NAME, "input_schema": st.just(SCHEMA)}), max_size=1),
    "responses": st.lists(
        FUNCTION.map(lambda function: {"type": "function", **function})
        | st.sampled_from([{"type": "local_shell"}, {"type": "custom", "name": "patch"}]),
        max_size=1,
    ),
}
MESSAGES = body({"messages": st.composite(conversation)()})
BLOCKS = body({"messages": st.composite(blocks)()}, {"system": TEXT, "tools": TOOLS["anthropic"]})
ITEMS = body({"input": st.composite(items)()}, {"instructions": TEXT, "tools": TOOLS["responses"]})
PROMPT = body(
    {
        "prompt": TEXT
        | st.lists(st.integers(5, 200), min_size=1, max_size=8)
        | st.lists(TEXT, min_size=1, max_size=2)
    }
)
STOPS = st.lists(TEXT, max_size=2)
CHAT_FIELDS = body(
    {"max_tokens": LENGTH},
    SAMPLING
    | {
        "n": st.integers(1, 2),
        "stop": STOPS,
        "tools": TOOLS["openai"],
        "logprobs": st.booleans(),
        "stream_options": body({"include_usage": st.booleans()}),
        "response_format": st.sampled_from(
            [
                {"type": "text"},
                {"type": "json_object"},
                {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            ]
        ),
    },
)
COMPLETION_FIELDS = body(
    {"max_tokens": LENGTH},
    SAMPLING | {"n": st.integers(1, 2), "stop": STOPS, "echo": st.booleans(), "logprobs": st.integers(0, 3)},
)
MESSAGES_FIELDS = body(
    {"max_tokens": LENGTH},
    SAMPLING
    | {
        "stop_sequences": STOPS,
        "thinking": st.sampled_from(
            [{"type": "adaptive"}, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}]
        ),
        "metadata": body({"user_id": TEXT}),
        "output_config": st.sampled_from(
            [{"effort": "low"}, {"format": {"type": "json_schema", "schema": SCHEMA}}]
        ),
        "context_management": st.just({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    },
)
RESPONSE_FIELDS = body(
    {"max_output_tokens": LENGTH},
    SAMPLING
    | {
        "store": st.booleans(),
        "include": st.lists(
            st.sampled_from(["reasoning.encrypted_content", "message.output_text.logprobs"]), max_size=2
        ),
        "reasoning": body({"effort": st.sampled_from(["low", "none", "high"])}),
        "text": st.sampled_from([{"format": {"type": "text"}}, {"format": {"type": "json_object"}}]),
        "metadata": st.dictionaries(TEXT, TEXT, max_size=2),
    },
)
TEXT_PROMPT = body({"prompt": TEXT})
DETOKENIZED = body({"tokens": st.lists(st.integers(0, 200), max_size=8)})
EMBEDDED = body({"input": TEXT | st.lists(TEXT, min_size=1, max_size=3)})
EMBEDDING_FIELDS = body({}, {"encoding_format": st.sampled_from(["float", "base64"]), "user": TEXT})
OLLAMA_MESSAGES = body(
    {"messages": st.lists(body({"role": st.just("user"), "content": TEXT}), min_size=1, max_size=3)}
)
OLLAMA_FIELDS = body(
    {"options": body({"num_predict": LENGTH}, {"temperature": st.floats(0, 2), "top_k": st.integers(0, 50)})},
    {"keep_alive": st.sampled_from(["5m", 60, -1]), "logprobs": st.booleans()},
)
NOTHING = st.just(dict[str, Any]())
PROMPTS = st.one_of(
    *(
        body({"api": st.just(api), "body": prompts})
        for api, prompts in (
            ("chat", MESSAGES),
            ("completions", TEXT_PROMPT),
            ("messages", BLOCKS),
            ("responses", ITEMS),
        )
    )
)
# By the path of a POST: a valid prompt, and valid other fields.
VALID: Mapping[str, tuple[st.SearchStrategy[Json], st.SearchStrategy[Json]]] = {
    "/v1/chat/completions": (MESSAGES, CHAT_FIELDS),
    "/v1/completions": (PROMPT, COMPLETION_FIELDS),
    "/v1/messages": (BLOCKS, MESSAGES_FIELDS),
    "/v1/messages/count_tokens": (BLOCKS, NOTHING),
    "/v1/responses": (ITEMS, RESPONSE_FIELDS),
    "/v1/responses/input_tokens": (ITEMS, NOTHING),
    "/v1/responses/compact": (ITEMS, body({"model": TEXT})),
    "/tokenize": (MESSAGES | TEXT_PROMPT, body({}, {"return_token_strs": st.booleans()})),
    "/v1/tokenize": (MESSAGES | TEXT_PROMPT, body({}, {"return_token_strs": st.booleans()})),
    "/detokenize": (DETOKENIZED, body({}, {"skip_special_tokens": st.booleans()})),
    "/v1/detokenize": (DETOKENIZED, body({}, {"skip_special_tokens": st.booleans()})),
    "/v1/embeddings": (EMBEDDED, EMBEDDING_FIELDS),
    "/api/chat": (OLLAMA_MESSAGES, OLLAMA_FIELDS),
    "/api/generate": (TEXT_PROMPT, OLLAMA_FIELDS),
    "/api/embed": (EMBEDDED, NOTHING),
    "/api/embeddings": (TEXT_PROMPT, NOTHING),
    "/api/show": (NOTHING, NOTHING),
    "/v1/load_lora_adapter": (NOTHING, NOTHING),
    "/v1/unload_lora_adapter": (NOTHING, NOTHING),
    "/v1/models/unload": (NOTHING, NOTHING),
    "/v1/cache/release": (NOTHING, NOTHING),
    "/v1/cache/pin": (PROMPTS, NOTHING),
    "/v1/cache/warm": (PROMPTS, NOTHING),
    "/v1/cache/hints": (PROMPTS, NOTHING),
    "/v1/cache/explain": (PROMPTS, NOTHING),
}
BODIES = ("made", "valid", "prompt", "valid", "made")  # in turn: hypothesis would draw mostly the first
SALT = "X-Cache-Salt"
# A prompt is pinned once it is cached: the route that answers it, and its field that bounds the answer.
ANSWERED_BY = {
    "chat": ("/v1/chat/completions", "max_tokens"),
    "completions": ("/v1/completions", "max_tokens"),
    "messages": ("/v1/messages", "max_tokens"),
    "responses": ("/v1/responses", "max_output_tokens"),
}


# ---- the cases


@dataclass(frozen=True)
class Stored:
    """A stored response or a pin, and the headers that name its tenant."""

    id: str
    headers: Mapping[str, str]


@dataclass
class Known:
    """Names that the server was started with, and the entries that earlier cases stored in it."""

    url: str
    adapter: str
    embedder: str
    responses: list[Stored] = field(default_factory=list)
    pins: list[Stored] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)


def main() -> None:
    url, cases, adapter, embedder, *paths = sys.argv[1:]
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.max_stream_events = MOST_EVENTS
    operations = [found.ok() for found in schema.get_all_operations()]
    operations = [one for one in operations if not paths or one.path in paths]
    operations.sort(key=lambda one: one.path == "/v1/cache/clear")  # the last: it drops pins
    known = Known(url, adapter, embedder)
    cases = int(cases)
    # An operation without a body has few different cases, and those with one make up the number.
    few = max(2, cases // (10 * len(operations)))
    many = -(-cases // max(1, sum(bool(one.body) for one in operations)))
    for operation in operations:
        print(json.dumps(check(operation, many if operation.body else few, known)), flush=True)


def prepare(case: Any, path: str, known: Known, number: int, session: requests.Session) -> None:
    """Completes a valid case by the needs of its route: a cached prompt, or a name or an id that the server knows."""
    if path == "/v1/cache/pin":
        answering, length = ANSWERED_BY[case.body["api"]]
        told = case.body["body"] | {length: 1}
        session.post(
            known.url + answering, json=told, headers=dict(case.headers or {}), timeout=HANGS_AFTER_S
        )
    elif path == "/v1/cache/release" and known.pins:
        pin = known.pins.pop()
        case.body, case.headers = {"id": pin.id}, dict(pin.headers)
    elif path == "/v1/load_lora_adapter":
        known.adapters.append(f"adapter-{number}")
        case.body = {"lora_name": known.adapters[-1], "lora_path": known.adapter}
    elif path == "/v1/unload_lora_adapter" and known.adapters:
        case.body = {"lora_name": known.adapters.pop()}
    elif path in ("/v1/embeddings", "/api/embed", "/api/embeddings"):
        case.body |= {"model": known.embedder}
    elif path == "/v1/models/unload":
        case.body = {"model": known.embedder}
        session.post(f"{known.url}/v1/models/load", json=case.body, timeout=HANGS_AFTER_S)


def check(operation: Any, cases: int, known: Known) -> dict[str, Any]:
    statuses, refused, failures = Counter[str](), Counter[str](), list[str]()
    began, session = time.monotonic(), requests.Session()
    kinds = operation.definition.raw["responses"].get("200", {}).get("content", {}).keys()
    streams = not kinds.isdisjoint(STREAMS)
    valid = VALID.get(operation.path) if operation.method.upper() == "POST" else None

    asked, stored = itertools.count(), known.responses

    def ask(case: Any, draws: st.DataObject) -> None:
        number = next(asked)
        is_valid = False
        if valid is not None:
            # Always drawn: hypothesis wants the same draws of the same choices, after any earlier questions.
            prompt, others = draws.draw(valid[0]), draws.draw(valid[1])
            how = BODIES[number % len(BODIES)]
            is_valid = how == "valid"
            if is_valid:
                case.body = prompt | others
                prepare(case, operation.path, known, number, session)
            elif how == "prompt" and isinstance(case.body, dict):
                case.body = case.body | prompt
                for length in {"max_tokens", "max_output_tokens"} & others.keys():
                    if case.body.get(length) is None:  # up to the end of the context, for up to 128 choices
                        case.body[length] = others[length]
            if is_valid and number % 2 and stored and operation.path.startswith("/v1/responses"):
                case.body["previous_response_id"] = stored[-1].id
                case.headers = dict(stored[-1].headers)
        if streams and isinstance(case.body, dict):
            case.body = {**case.body, "stream": number % 4 < 2}
        if operation.path.startswith(OF_STORED) and stored and number % 2:
            one = stored.pop() if operation.method.upper() == "DELETE" else stored[-1]
            case.path_parameters, case.headers = {"id": one.id}, dict(one.headers)
        try:
            response = case.call(session=session, timeout=HANGS_AFTER_S)
        except requests.Timeout:
            statuses["hang"] += 1
            failures.append(f"no answer in {HANGS_AFTER_S:.0f} s: {case.as_curl_command()}"[:2000])
            return
        except (requests.RequestException, ValueError) as error:
            statuses[type(error).__name__] += 1  # by the client: such a request cannot be sent
            if isinstance(error, requests.ConnectionError):
                failures.append(f"{error}: {case.as_curl_command()}"[:2000])
            return
        kind = response.headers.get("content-type", [""])[0].partition(";")[0]
        is_stream = kind in STREAMS
        if is_valid and response.status_code != 200:
            error = response.json()["error"]
            refused[(error if isinstance(error, str) else error["message"])[:100]] += 1
        statuses[f"{response.status_code}{' stream' if is_stream else ''}"] += 1
        if operation.path == "/v1/responses" and response.status_code == 200 and not is_stream:
            made = response.json()
            if made["store"] and made["previous_response_id"] is None:  # a chain would outgrow the context
                stored.append(Stored(made["id"], tenant_in(response.request.headers)))
        if operation.path == "/v1/cache/pin" and response.status_code == 200:
            made = Stored(response.json()["id"], tenant_in(response.request.headers))
            if made not in known.pins:  # the same prompt keeps its pin
                known.pins.append(made)
        try:
            case.validate_response(response, checks=CHECKS)
            if is_stream:
                STREAMS[kind](response.content.decode())
        except (FailureGroup, Exception) as error:
            failures.append(f"{response.status_code} {error}: {case.as_curl_command()}"[:2000])

    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        if mode is GenerationMode.NEGATIVE and not (operation.body or operation.path_parameters):
            continue
        half = cases // 2 if mode is GenerationMode.POSITIVE else cases - cases // 2
        run = given(case=operation.as_strategy(generation_mode=mode), draws=st.data())(ask)
        bounded = settings(
            max_examples=half,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(run)
        with suppress(Unsatisfiable):  # schemathesis finds nothing to make invalid
            bounded()
    return {
        "operation": operation.label,
        "cases": statuses.total(),
        "seconds": round(time.monotonic() - began, 1),
        "statuses": dict(statuses.most_common()),
        "failures": len(failures),
        "first": failures[:MOST_SHOWN],
        "has_prompt": valid is not None and valid[0] is not NOTHING,
        "refused": dict(refused.most_common(MOST_SHOWN)),  # valid bodies
    }


def check_lines(text: str) -> None:
    """Raises AssertionError unless a stream consists of lines of JSON, and has an end that is no error."""
    *lines, rest = text.split("\n")
    assert not rest, f"the stream ends within a line: {rest[-200:]}"
    assert [json.loads(line)["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


def tenant_in(sent: Mapping[str, Any]) -> dict[str, Any]:
    return {SALT: sent[SALT]} if SALT in sent else {}


def check_stream(text: str) -> None:
    """Raises AssertionError unless a stream consists of events of JSON, and has an end that is no error."""
    *events, rest = text.split("\n\n")
    assert not rest, f"the stream ends within an event: {rest[-200:]}"
    assert events, "the stream is empty"
    for event in events:
        for line in event.split("\n"):
            name, _, value = line.partition(": ")
            assert name in ("event", "data", ""), line
            if name == "data" and value != "[DONE]":
                told = json.loads(value)
                assert "error" not in told, value
                assert told.get("type") not in ("error", "response.failed"), value
    last = ("data: [DONE]", "event: message_stop", "event: response.completed", "event: response.incomplete")
    assert events[-1].startswith(last), f"the stream has no end: {events[-1][:200]}"


STREAMS: Mapping[str, Callable[[str], None]] = {  # by their type: checks of a whole stream
    "text/event-stream": check_stream,
    "application/x-ndjson": check_lines,
}


if __name__ == "__main__":
    main()
