"""The canonical conversation as the arguments of chat templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rootstock.text.conversation.template import Mark, TemplateInput, template_input
from rootstock.text.conversation.types import (
    Conversation,
    Message,
    MessagePart,
    PrefixMark,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolReference,
    ToolResult,
)
from rootstock.text.tokenizer import HFTokenizer
from text.prompts.chat_tokenizers import chat_tokenizer, tokenizer_of

PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}}
LOOK_UP = Tool("look_up", "Looks a word up.", PARAMETERS)
LATER = Tool("count", "Counts.", PARAMETERS, deferred=True)

MARKED = PrefixMark("cache_control", 300.0)


def user(*parts: MessagePart | str) -> Message:
    return Message("user", tuple(Text(part) if isinstance(part, str) else part for part in parts))


def made(*messages: Message, template: str = "qwen3", **fields: Any) -> TemplateInput:
    return template_input(Conversation(messages, **fields), chat_tokenizer(template))


def rendered(*messages: Message, template: str = "qwen3", **fields: Any) -> str:
    return made(*messages, template=template, **fields).render(chat_tokenizer(template))


def test_results_beside_text_of_the_user_become_messages_of_their_own_in_order() -> None:
    asks = Message("assistant", (Text("Let me see."), ToolCall("a", "look_up", {"word": "oak"})))
    results = user(ToolResult("a", (Text("a tree"),)), "And now?", ToolResult("b", (Text("x"), Text("y"))))
    messages = made(user("Oak?"), asks, results).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user", "tool"]
    assert messages[2] == {"role": "tool", "content": "a tree", "tool_call_id": "a", "name": "look_up"}
    assert messages[4]["content"] == "x\ny"


def test_results_of_parallel_calls_are_in_the_order_of_the_calls() -> None:
    asks = Message("assistant", tuple(ToolCall(id, "look_up", {"word": id}) for id in "abc"))
    results = [ToolResult(id, (Text(f"of {id}", mark=MARKED if id == "a" else None),)) for id in "cxab"]
    apart = made(user("Oak?"), asks, *(Message("tool", (result,)) for result in results), user("And now?"))
    together = made(user("Oak?"), asks, user(*results, "And now?"))
    for prompt in (apart, together):
        shown = [message["content"] for message in prompt.messages[2:]]
        assert shown == ["of a", "of b", "of c", "of x", "And now?"]
        assert prompt.marks == (Mark(2, len("of a"), MARKED),)
    alone = made(user("Oak?"), *(Message("tool", (result,)) for result in results))
    assert [message["content"] for message in alone.messages[1:]] == ["of c", "of x", "of a", "of b"]


def test_a_deferred_tool_is_shown_at_its_first_reference_only() -> None:
    found = user(ToolResult("s", (Text("Found:"), ToolReference("count"))))
    again = user(ToolResult("t", (ToolReference("count"), ToolReference("unknown"))))
    prompt = made(user("Hi."), found, again, tools=[LOOK_UP, LATER])
    assert [tool["function"]["name"] for tool in prompt.tools] == ["look_up"]
    definition = prompt.messages[1]["content"].removeprefix("Found:\nYou can call this tool now:\n")
    assert json.loads(definition)["function"] == {
        "name": "count",
        "description": "Counts.",
        "parameters": PARAMETERS,
    }
    assert prompt.messages[2]["content"] == "count\nunknown"


def test_a_prompt_with_a_deferred_tool_extends_the_prompt_without_it() -> None:
    turn = (user("Hi."), Message("assistant", (ToolCall("s", "look_up", {"word": "count"}),)))
    before = rendered(*turn[:1], tools=[LOOK_UP])
    after = rendered(*turn, user(ToolResult("s", (ToolReference("count"),))), tools=[LATER, LOOK_UP])
    assert after.startswith(before)
    assert "Counts." in after.removeprefix(before)


def test_no_tools_are_shown_if_none_may_be_called() -> None:
    assert made(user("Hi."), tools=[LOOK_UP], tool_choice=ToolChoice("none")).tools == []


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_given_in_the_field_that_the_template_reads(field: str) -> None:
    template = f"{{% for m in messages %}}[{{{{ m.{field} }}}}]{{{{ m.content }}}}{{% endfor %}}"
    tokenizer = HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("bytes")), template)
    conversation = Conversation([Message("assistant", (Reasoning("because"), Text("yes"), Reasoning("and")))])
    assert template_input(conversation, tokenizer).render(tokenizer) == "[because\nand]yes"


def test_marks_keep_their_places_in_joined_parts_and_joined_messages() -> None:
    system = Message("system", (Text("abc", mark=MARKED), Text("de", mark=MARKED)))
    late = Message("system", (Text("fg", mark=MARKED),))
    template = """{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif -%}
    [{{ m.role }}]{{ m.content }}
    {%- endfor %}"""
    tokenizer = HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("bytes")), template)
    prompt = template_input(Conversation([system, late, user("x")]), tokenizer)
    assert [message["content"] for message in prompt.messages] == ["abc\nde\n\nfg", "x"]
    assert prompt.marks == (Mark(0, 3, MARKED), Mark(0, 6, MARKED), Mark(0, 10, MARKED))
    assert made(user("x"), tools=[Tool("f", mark=MARKED)]).marks == (Mark(None, asked=MARKED),)


def test_an_error_without_text_is_shown_as_an_error() -> None:
    result = user(ToolResult("a", (), is_error=True))
    assert made(user("x"), result).messages[1]["content"] == "Error"
