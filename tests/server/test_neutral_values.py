"""A field whose value asks for nothing is never refused, whatever the API: null, empty, its default, or "off".

The values are generated: of each field of a schema the empty ones of its type, of each field of the tables of
refusals its neutral values, and of each field of other servers the default that it has there. All go to every route.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from rootstock.errors import Unsupported
from rootstock.server.formats.anthropic.schema import REFUSED as REFUSED_MESSAGES
from rootstock.server.formats.anthropic.schema import CountTokensRequest, MessagesRequest
from rootstock.server.formats.openai.embeddings import EmbeddingRequest
from rootstock.server.formats.openai.schema import (
    IGNORED,
    REFUSED,
    ChatCompletionRequest,
    CompletionRequest,
    PromptRequest,
)
from rootstock.server.formats.responses.schema import _USE as REFUSED_RESPONSES
from rootstock.server.formats.responses.schema import ResponseRequest
from rootstock.server.wire.fields import SamplingFields, Wire
from rootstock.server.wire.hints.fields import NvExt
from server.conftest import Served, user

Json = dict[str, Any]
TEXT_TYPE = {"type": "text"}

# Each route with a body that it answers, and its schema.
ROUTES: dict[str, tuple[Json, type[Wire]]] = {
    "/v1/chat/completions": ({"messages": user("hi"), "max_tokens": 2}, ChatCompletionRequest),
    "/v1/completions": ({"prompt": "hi", "max_tokens": 2}, CompletionRequest),
    "/v1/responses": ({"input": "hi", "max_output_tokens": 2}, ResponseRequest),
    "/v1/messages": ({"messages": user("hi"), "max_tokens": 2}, MessagesRequest),
    "/v1/messages/count_tokens": ({"messages": user("hi")}, CountTokensRequest),
    "/v1/responses/input_tokens": ({"input": "hi"}, ResponseRequest),
    "/v1/cache/explain/chat/completions": ({"messages": user("hi")}, PromptRequest),
    "/v1/cache/explain/completions": ({"prompt": "hi"}, PromptRequest),
    "/v1/cache/explain/responses": ({"input": "hi"}, ResponseRequest),
    "/v1/cache/explain/messages": ({"messages": user("hi")}, CountTokensRequest),
}
# These are asked for each value alone. The others read the same fields, and are asked for many at once.
ANSWERING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
# Fields that hold the prompt.
PROMPTS = frozenset({"messages", "prompt", "input"})
OFF_OF_THINKING: tuple[Any, ...] = (False, {"type": "disabled"}, {"type": "adaptive"})

# Fields of OpenAI, Anthropic, vLLM, SGLang, llama.cpp, LM Studio and OpenRouter, with the values that are the default
# there or switch them off.
ELSEWHERE: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (), "background": (False,), "best_of": (1,), "conversation": (), "echo": (False,),
    "frequency_penalty": (0, 0.0), "function_call": ("none", "auto"), "functions": ([],),
    "include": ([],), "instructions": ("",), "logit_bias": ({}, []), "logprobs": (False,), "max_tool_calls": (0,),
    "metadata": ({},), "modalities": (["text"], []), "moderation": (), "n": (1,), "parallel_tool_calls": (True,),
    "prediction": (), "presence_penalty": (0,), "previous_response_id": ("",), "prompt_cache_key": ("",),
    "prompt_cache_retention": ("in_memory",), "reasoning": ({}, {"effort": None}, {"effort": "none"}),
    "reasoning_effort": ("none",), "response_format": (TEXT_TYPE, {}), "safety_identifier": ("",), "seed": (0,),
    "service_tier": ("auto", "default"), "stop": ([], ""), "store": (False,), "stream": (False,),
    "stream_options": ({}, {"include_usage": False}), "suffix": ("",), "temperature": (1, 1.0),
    "text": ({}, {"format": TEXT_TYPE}, {"verbosity": "medium"}), "tool_choice": ("none", "auto"), "tools": ([],),
    "top_logprobs": (0,), "top_p": (1, 1.0), "truncation": ("disabled",), "user": ("",), "verbosity": ("medium",),
    "web_search_options": (), "context_management": ([], {}),
    # Anthropic
    "betas": ([],), "cache_control": (), "compaction": (), "container": (), "diagnostics": (), "inference_geo": (),
    "mcp_servers": ([],), "output_config": ({}, {"effort": None}), "output_format": (), "speed": ("standard",),
    "stop_sequences": ([],), "system": ([], ""), "thinking": OFF_OF_THINKING, "thread": (),
    # vLLM
    "add_generation_prompt": (True,), "add_special_tokens": (), "allowed_token_ids": ([],), "bad_words": ([],),
    "cache_salt": (), "chat_template": (), "chat_template_kwargs": ({},), "continue_final_message": (False,),
    "documents": ([],), "enable_thinking": (False,), "guided_decoding_backend": ("auto",), "ignore_eos": (False,),
    "include_reasoning": (True,), "include_stop_str_in_output": (False,), "kv_transfer_params": (),
    "length_penalty": (1.0,), "logits_processors": ([],), "min_p": (0, 0.0), "min_tokens": (0,),
    "mm_processor_kwargs": ({},), "priority": (0,), "prompt_logprobs": (), "repetition_penalty": (1, 1.0),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "stop_token_ids": ([],), "structured_outputs": (), "top_k": (0, -1),
    "truncate_prompt_tokens": (), "truncation_side": ("left", "right"), "use_beam_search": (False,),
    "vllm_xargs": ({},), "thinking_token_budget": (-1,),
    # SGLang
    "custom_logit_processor": ("",), "custom_params": ({},), "ebnf": (), "lora_path": (), "no_stop_trim": (False,),
    "regex": (), "return_hidden_states": (False,), "return_routed_experts": (False,), "separate_reasoning": (True,),
    "session_params": ({},), "stop_regex": ([], ""), "stream_reasoning": (True,),
    # llama.cpp, LM Studio
    "cache_prompt": (True,), "dry_multiplier": (0.0,), "dynatemp_range": (0.0,), "grammar": ("",), "id_slot": (-1,),
    "json_schema": (), "mirostat": (0,), "n_keep": (0,), "n_predict": (-1,), "n_probs": (0,), "repeat_last_n": (64,),
    "repeat_penalty": (1.0,), "return_tokens": (False,), "timings_per_token": (False,), "top_n_sigma": (-1.0,),
    "typical_p": (1.0,), "xtc_probability": (0.0,), "xtc_threshold": (0.1,),
    # OpenRouter
    "models": ([],), "plugins": ([],), "provider": ({},), "transforms": ([],), "usage": ({"include": False},),
}  # fmt: skip
# -1 as a number of tokens is llama.cpp's, whose routes are the first two.
UNLIMITED = ("max_tokens", "max_completion_tokens")


def of_schema(schema: type[Wire]) -> Iterator[tuple[str, Any]]:
    """Yields values of each declared field that ask for nothing: its default, null, and empty ones of its type."""
    for name, info in schema.model_fields.items():
        if name in PROMPTS:
            continue
        if info.annotation is Any:  # a text or a list, whose shape the translation checks
            yield from ((name, value) for value in (None, [], ""))
            continue
        for value in (info.get_default(call_default_factory=True), None, [], {}, ""):
            if is_of_type(info, value):
                yield name, value


def is_of_type(info: FieldInfo, value: Any) -> bool:
    annotation: Any = info.annotation
    for each in info.metadata:
        annotation = Annotated[annotation, each]
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def of_tables() -> Iterator[tuple[str, Any]]:
    for name, refused in REFUSED.items():
        if name not in PROMPTS:
            yield name, None
            yield from ((name, value) for value in refused.neutral)
    for name, one in REFUSED_MESSAGES.items():
        if name not in PROMPTS:
            yield name, None
            yield from ((name, value) for value in one.neutral)
    yield from ((name, None) for name in {*REFUSED_RESPONSES, *IGNORED} - PROMPTS)


def elsewhere() -> Iterator[tuple[str, Any]]:
    for name, values in ELSEWHERE.items():
        yield name, None
        yield from ((name, value) for value in values)


def answer(served: Served, route: str, fields: Json) -> Any:
    return served.client.post(route, json={**ROUTES[route][0], **fields})


@pytest.mark.parametrize("route", ROUTES)
def test_a_value_that_asks_for_nothing_is_not_refused(served: Served, route: str) -> None:
    schema = ROUTES[route][1]
    asked: list[tuple[str, Any]] = [*of_schema(schema), *of_tables(), *elsewhere()]
    if route in ("/v1/chat/completions", "/v1/completions"):
        asked += [(name, -1) for name in UNLIMITED]
    distinct = {(name, repr(value)): (name, value) for name, value in asked}.values()
    values = [each for each in distinct if not _is_of_another_type(schema, *each)]
    refused = []
    for fields in [{name: value} for name, value in values] if route in ANSWERING else together(values):
        got = answer(served, route, fields)
        if got.status_code != 200:
            refused.append(f"{fields}: {got.json()['error']['message'][:90]}")
    assert not refused, "\n".join(refused)


def together(values: list[tuple[str, Any]]) -> list[Json]:
    """Returns few bodies with all values. One that is refused would be named by the error."""
    bodies: list[Json] = [{} for _ in values]
    for name, value in values:
        next(body for body in bodies if name not in body)[name] = value
    return [body for body in bodies if body]


def _is_of_another_type(schema: type[Wire], name: str, value: Any) -> bool:
    """Returns whether another API has a field of the same name and of another type. No type is without null."""
    info = schema.model_fields.get(name)
    return value is not None and info is not None and not is_of_type(info, value)


def all_schemas(of: type[Wire] = Wire) -> Iterator[type[Wire]]:
    for each in of.__subclasses__():
        yield each
        yield from all_schemas(each)


def test_null_is_the_default_of_every_field_that_has_one_at_any_depth() -> None:
    schemas = set(all_schemas())
    assert {ChatCompletionRequest, EmbeddingRequest, NvExt, ResponseRequest, MessagesRequest} <= schemas
    refused = [
        f"{schema.__name__}.{name}"
        for schema in schemas
        for name, info in schema.model_fields.items()
        if not info.is_required() and not is_of_type(info, None)
    ]
    assert not refused


def test_embeddings_take_values_that_ask_for_nothing() -> None:
    neutral = {
        "encoding_format": None,
        "dimensions": None,
        "user": "",
        "model": "",
        "priority": 0,
        "metadata": {},
    }
    neutral |= {
        "add_special_tokens": True,
        "truncate": "NONE",
        "truncate_prompt_tokens": None,
        "lora_path": "",
    }
    for name, value in neutral.items():
        EmbeddingRequest.model_validate({"input": "x", name: value}).refuse_unsupported()
    with pytest.raises(Unsupported):
        EmbeddingRequest.model_validate({"input": "x", "truncate_prompt_tokens": 5}).refuse_unsupported()


@pytest.mark.parametrize("route", ROUTES)
def test_all_of_them_at_once_change_nothing(served: Served, route: str) -> None:
    schema = ROUTES[route][1]
    fields = {
        name: values[0]
        for name, values in ELSEWHERE.items()
        if values and name not in ("temperature", "echo") and not _is_of_another_type(schema, name, values[0])
    }
    plain = answer(served, route, {"temperature": 0}).json()
    loaded = answer(served, route, {**fields, "temperature": 0})
    assert loaded.status_code == 200, loaded.text
    for part in ("choices", "content", "input_tokens", "prompt_tokens"):
        assert loaded.json().get(part) == plain.get(part)
    if "output" in plain:
        assert [item["content"] for item in loaded.json()["output"]] == [
            item["content"] for item in plain["output"]
        ]
    assert "warnings" not in loaded.json().get("rootstock", {})


@pytest.mark.parametrize(
    ("kwargs", "accepted"),
    [
        ({"enable_thinking": False}, True),
        ({"thinking": False}, True),
        ({"reasoning_effort": "none"}, True),
        ({"anything": None}, True),
        ({"documents": [], "tools": [], "chat_template": ""}, True),
        ({"enable_thinking": True}, True),
        ({"enable_thinknig": False}, False),
        ({"documents": [{"text": "x"}]}, False),
        ({"enable_thinking": "no"}, False),
    ],
)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
def test_variables_of_the_template_that_ask_for_nothing_are_not_refused(
    served: Served, route: str, kwargs: Json, accepted: bool
) -> None:
    got = answer(served, route, {"chat_template_kwargs": kwargs})
    assert got.status_code == (200 if accepted else 400), got.text


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        (ChatCompletionRequest, REFUSED),
        (SamplingFields, REFUSED),
        (MessagesRequest, REFUSED_MESSAGES),
        (ResponseRequest, REFUSED_RESPONSES),
    ],
)
def test_a_declared_field_is_in_no_table_of_refusals(schema: type[Wire], refused: Any) -> None:
    """A declared field is read, and its row in the table would say that it is not."""
    assert refused
    assert set(schema.model_fields) & set(refused) == set()
