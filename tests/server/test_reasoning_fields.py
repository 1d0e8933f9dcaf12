"""Fields about reasoning mean the same in every API, with templates of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from rootstock.errors import InvalidParameter
from rootstock.server.formats.anthropic.schema import MessagesRequest
from rootstock.server.formats.openai.schema import ChatCompletionRequest
from rootstock.server.formats.responses.schema import ResponseRequest
from rootstock.server.wire.fields import EFFORTS
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.text.chat_template import TemplateNames
from server.conftest import Served, served_by_oracle, user

Json = dict[str, Any]
# Templates by what they read, and how each of them says that reasoning is on or off.
SWITCHES = ("enable_thinking", "thinking")
TEMPLATES: dict[str, TemplateNames] = {
    "neither": TemplateNames(),
    "enable_thinking": TemplateNames(frozenset({"enable_thinking"})),
    "thinking": TemplateNames(frozenset({"thinking"})),
    "effort": TemplateNames(frozenset({"reasoning_effort"})),
    "effort with none": TemplateNames(frozenset({"reasoning_effort"}), frozenset({"none", "max"})),
    "both": TemplateNames(frozenset({"reasoning_effort", "enable_thinking"}), frozenset({"max"})),
}
# The same wish in each API: the bodies that ask for an effort, and for a switch.
EFFORT_FIELDS: dict[str, Any] = {
    "chat": lambda effort: {"reasoning_effort": effort},
    "chat, as OpenRouter": lambda effort: {"reasoning": {"effort": effort}},
    "chat, as a variable": lambda effort: {"chat_template_kwargs": {"reasoning_effort": effort}},
    "responses": lambda effort: {"reasoning": {"effort": effort, "summary": "auto"}},
    "responses, as a chat": lambda effort: {"reasoning_effort": effort},
    "responses, as a variable": lambda effort: {"chat_template_kwargs": {"reasoning_effort": effort}},
    "messages": lambda effort: {"output_config": {"effort": effort}},
    "messages, as a chat": lambda effort: {"reasoning_effort": effort},
    "messages, as OpenRouter": lambda effort: {"reasoning": {"effort": effort}},
    "messages, as a variable": lambda effort: {"chat_template_kwargs": {"reasoning_effort": effort}},
}
SWITCH_FIELDS: dict[str, Any] = {
    "chat": lambda on: {"enable_thinking": on},
    "chat, as DeepSeek": lambda on: {"thinking": {"type": "enabled" if on else "disabled"}},
    "chat, as a variable": lambda on: {"chat_template_kwargs": {"enable_thinking": on}},
    "chat, as the other variable": lambda on: {"chat_template_kwargs": {"thinking": on}},
    "chat, as OpenRouter": lambda on: {"reasoning": {"enabled": on}},
    "responses": lambda on: {"enable_thinking": on},
    "responses, as a variable": lambda on: {"chat_template_kwargs": {"enable_thinking": on}},
    "messages": lambda on: {"thinking": {"type": "enabled" if on else "disabled"}},
    "messages, as true or false": lambda on: {"thinking": on},
    "messages, as a chat": lambda on: {"enable_thinking": on},
    "messages, as a variable": lambda on: {"chat_template_kwargs": {"enable_thinking": on}},
}


def variables(api: str, fields: Json, names: TemplateNames) -> tuple[Json, list[str]]:
    """Returns the template's variables about reasoning, and the fields that are ignored."""
    tokenizer = ByteTokenizer()
    if api.startswith("chat"):
        chat = ChatCompletionRequest.model_validate({"messages": user("x"), **fields})
        found = chat.conversation(chat.messages, _with_names(tokenizer, names))
        options, ignored = dict(found.options), found.ignored
    elif api.startswith("responses"):
        options, ignored = ResponseRequest.model_validate({"input": "x", **fields}).template_options(names)
    else:
        found = MessagesRequest.model_validate({"messages": user("x"), **fields}).conversation(names)
        options, ignored = dict(found.options), found.ignored
    options.pop("add_generation_prompt", None)
    return options, [one.field for one in ignored]


def _with_names(tokenizer: ByteTokenizer, names: TemplateNames) -> Any:
    class Named(ByteTokenizer):
        @property
        def template_names(self) -> TemplateNames:
            return replace(names, variables=names.variables | {"add_generation_prompt"})

    return Named()


def expected_of_effort(effort: str, names: TemplateNames) -> tuple[Json, bool]:
    """Returns the variables that an effort sets by the rule in docs/answers.md, and whether it is ignored."""
    switch = next((name for name in SWITCHES if name in names.variables), None)
    found: Json = {}
    if "reasoning_effort" in names.variables and not (
        effort == "none" and switch is not None and "none" not in names.literals
    ):
        known = effort in names.literals or effort in ("none", "low", "medium", "high")
        found["reasoning_effort"] = effort if known else "low" if effort == "minimal" else "high"
    if switch is not None:
        found[switch] = effort != "none"
    return found, not found


@pytest.mark.parametrize(("template", "api", "effort"), list(product(TEMPLATES, EFFORT_FIELDS, EFFORTS)))
def test_an_effort_means_the_same_in_every_api(template: str, api: str, effort: str) -> None:
    names = TEMPLATES[template]
    found, ignored = variables(api, EFFORT_FIELDS[api](effort), names)
    expected, is_ignored = expected_of_effort(effort, names)
    if "variable" in api and "reasoning_effort" in names.variables:
        expected = {"reasoning_effort": effort}  # the client sets the template's own variable
    assert found == expected
    assert bool(ignored) == is_ignored


@pytest.mark.parametrize("api", EFFORT_FIELDS)
def test_an_effort_of_another_name_is_the_templates_or_ignored(api: str) -> None:
    fields = EFFORT_FIELDS[api]("ultra")
    found, ignored = variables(api, fields, TEMPLATES["effort"])
    assert (found, ignored) == ({"reasoning_effort": "ultra"}, [])
    found, ignored = variables(api, fields, TEMPLATES["neither"])
    assert (found, len(ignored)) == ({}, 1)


@pytest.mark.parametrize(("template", "api", "on"), list(product(TEMPLATES, SWITCH_FIELDS, [True, False])))
def test_a_switch_means_the_same_in_every_api(template: str, api: str, on: bool) -> None:
    names = TEMPLATES[template]
    found, ignored = variables(api, SWITCH_FIELDS[api](on), names)
    switch = next((name for name in SWITCHES if name in names.variables), None)
    assert found == ({} if switch is None else {switch: on})
    assert bool(ignored) == (switch is None)


@pytest.mark.parametrize(("template", "api"), list(product(TEMPLATES, SWITCH_FIELDS)))
def test_a_switch_outranks_an_effort(template: str, api: str) -> None:
    names, base = TEMPLATES[template], api.partition(",")[0]
    effort = {"output_config": {"effort": "high"}} if base == "messages" else {"reasoning_effort": "high"}
    found, ignored = variables(api, {**SWITCH_FIELDS[api](False), **effort}, names)
    switches = [value for name, value in found.items() if name in SWITCHES]
    assert switches in ([], [False])
    assert ("reasoning_effort" in found) == ("reasoning_effort" in names.variables)
    if "reasoning_effort" not in names.variables:
        assert len(ignored) == (1 if switches else 2)


@pytest.mark.parametrize("api", SWITCH_FIELDS)
def test_switches_that_contradict_each_other_are_refused(api: str) -> None:
    fields = {**SWITCH_FIELDS[api](True), "reasoning_effort": "none"}
    with pytest.raises(InvalidParameter, match="in agreement with enable_thinking=True"):
        variables(api, fields, TEMPLATES["enable_thinking"])


# ---- over HTTP

ROUTES = {
    "chat": ("/v1/chat/completions", {"messages": user("hi"), "max_tokens": 2}),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    "messages": ("/v1/messages", {"messages": user("hi"), "max_tokens": 2}),
}


def warnings_of(served: Served, api: str, fields: Json) -> list[str]:
    """Posts a body, whole and streamed, and returns the fields of the warnings."""
    route, body = ROUTES[api.partition(",")[0]]
    streamed = served.client.post(route, json={**body, **fields, "stream": True})
    assert streamed.status_code == 200, streamed.text
    whole = served.client.post(route, json={**body, **fields})
    assert whole.status_code == 200, whole.text
    return [one["field"] for one in whole.json().get("rootstock", {}).get("warnings", [])]


@pytest.mark.parametrize("api", {**EFFORT_FIELDS, **SWITCH_FIELDS})
def test_a_model_without_reasoning_follows_off_and_warns_of_on(served: Served, api: str) -> None:
    if api in EFFORT_FIELDS:
        assert warnings_of(served, api, EFFORT_FIELDS[api]("none")) == []
        for effort in EFFORTS[1:]:
            assert len(warnings_of(served, api, EFFORT_FIELDS[api](effort))) == 1
    if api in SWITCH_FIELDS:
        assert warnings_of(served, api, SWITCH_FIELDS[api](False)) == []
        assert len(warnings_of(served, api, SWITCH_FIELDS[api](True))) == 1


class AlwaysThinking(ByteTokenizer):
    """A tokenizer whose template opens reasoning in every answer, and has no switch."""

    def render_chat(self, messages: Any, tools: Any, **options: Any) -> str:
        shown = [
            {**each, "content": f"<think>{each['reasoning_content']}</think>{each.get('content') or ''}"}
            if each.get("reasoning_content")
            else each
            for each in messages
        ]
        text = super().render_chat(shown, tools, **options)
        return text + "<think>" if text.endswith("<|assistant|>") else text

    @property
    def template_names(self) -> TemplateNames:
        literals = frozenset({"<think>", "</think>"})
        return TemplateNames(
            frozenset({"add_generation_prompt"}), literals, attributes=frozenset({"reasoning_content"})
        )


@pytest.fixture(scope="module")
def thinking() -> Iterator[Served]:
    with served_by_oracle(tokenizer=AlwaysThinking()) as served:
        yield served


@pytest.mark.parametrize("api", SWITCH_FIELDS)
def test_a_model_that_always_reasons_warns_of_off_alone(thinking: Served, api: str) -> None:
    assert warnings_of(thinking, api, SWITCH_FIELDS[api](True)) == []
    assert len(warnings_of(thinking, api, SWITCH_FIELDS[api](False))) == 1


def test_the_length_of_answers_is_ignored_with_a_warning(served: Served) -> None:
    for verbosity in ("low", "medium", "high"):
        expected = [] if verbosity == "medium" else ["verbosity"]
        for api in ROUTES:
            assert warnings_of(served, api, {"verbosity": verbosity}) == expected
        told = warnings_of(served, "responses", {"text": {"verbosity": verbosity}})
        assert told == [f"text.{field}" for field in expected]


OFF_FIELDS = [
    *(of("none") for of in EFFORT_FIELDS.values()),
    *(of(False) for of in SWITCH_FIELDS.values()),
    {"chat_template_kwargs": {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}},
    {"reasoning": {"max_tokens": 0}},
]


@pytest.mark.parametrize("fields", OFF_FIELDS, ids=str)
def test_a_completion_and_a_chat_take_off_in_any_form(served: Served, fields: Json) -> None:
    for body in ({"prompt": "hi"}, {"messages": user("hi")}):
        route = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        answer = served.client.post(route, json={**body, "max_tokens": 1, **fields})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "fields", [of(True) for api, of in SWITCH_FIELDS.items() if api.startswith("chat")], ids=str
)
def test_a_completion_has_no_template_that_reasoning_is_switched_on_in(served: Served, fields: Json) -> None:
    answer = served.complete("hi", max_tokens=1, **fields)
    assert answer.status_code == 400
    assert "A completion has no chat template" in answer.json()["error"]["message"]
