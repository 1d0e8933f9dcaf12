"""The known beginning of the next request: what a client sends next begins with it, whatever the template does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rootstock.cache.types import Tokens
from rootstock.text.conversation.openai import conversation_of
from rootstock.text.conversation.template import template_input
from rootstock.text.output.deltas import WholeAnswer, WholeCall
from rootstock.text.prompts.next_turn import known_prefixes
from rootstock.text.prompts.prompt_tokenizer import PromptTokenizer, chat_prompt, escaped
from rootstock.text.prompts.tenant_salt import ANYBODY
from text.prompts.chat_tokenizers import TEMPLATES, WITHOUT_TOOLS, chat_tokenizer

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "Which word?"}]
CALL = WholeCall("call00001", "look_up", {"word": "library"}, '{"word": "library"}')


def prompt_of(tokenizer: PromptTokenizer, messages: Sequence[Any], tools: Sequence[Any] = ()) -> Tokens:
    template = template_input(conversation_of(messages, tools), tokenizer.model_tokenizer)
    return chat_prompt(escaped(template, tokenizer), tokenizer, ANYBODY).tokens


def begins_with(prompt: Tokens, prefix: Tokens) -> bool:
    return prompt[: len(prefix)].tolist() == prefix.tolist()


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_the_next_turn_begins_with_it_and_only_the_new_message_is_missing(template: str, kind: str) -> None:
    tokenizer = PromptTokenizer(chat_tokenizer(template, kind), 4096)
    answer = WholeAnswer("The word is library.", "The reader asks. Well.", ())
    prefixes = known_prefixes(conversation_of(ASKED), answer, tokenizer, ANYBODY)
    answered = {"role": "assistant", "content": answer.text}
    for question in ("And?", "77 more", "What does it mean?"):
        prompt = prompt_of(tokenizer, [*ASKED, answered, {"role": "user", "content": question}])
        known = max((len(each) for each in prefixes if begins_with(prompt, each)), default=0)
        rest = tokenizer.model_tokenizer.decode(prompt[known:].tolist())
        assert question in rest
        assert "library" not in rest, "a part of the answer is not known"
        assert known > len(prompt) / 2


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("template", sorted(TEMPLATES.keys() - set(WITHOUT_TOOLS)))
@pytest.mark.parametrize("sends_reasoning", [True, False])
def test_the_next_step_begins_with_it_up_to_the_tools_result(
    template: str, kind: str, sends_reasoning: bool
) -> None:
    tokenizer = PromptTokenizer(chat_tokenizer(template, kind), 4096)
    answer = WholeAnswer("", "The tool answers.", (CALL,))
    prefixes = known_prefixes(conversation_of(ASKED, [TOOL]), answer, tokenizer, ANYBODY)
    function = {"name": CALL.name, "arguments": CALL.text}
    called: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": CALL.id, "type": "function", "function": function}],
    }
    if sends_reasoning:
        called["reasoning_content"] = answer.reasoning
    result = {"role": "tool", "tool_call_id": CALL.id, "content": "eleven of them"}
    prompt = prompt_of(tokenizer, [*ASKED, called, result], [TOOL])
    known = max((len(each) for each in prefixes if begins_with(prompt, each)), default=0)
    rest = tokenizer.model_tokenizer.decode(prompt[known:].tolist())
    assert "eleven" in rest
    assert CALL.text not in rest


def test_a_history_tells_whether_a_client_sends_reasoning() -> None:
    tokenizer = PromptTokenizer(chat_tokenizer("qwen3"), 4096)
    answer = WholeAnswer("", "Well.", (CALL,))
    function = {"name": "look_up", "arguments": "{}"}
    called = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "a", "content": "one"}
    first = known_prefixes(conversation_of(ASKED, [TOOL]), answer, tokenizer, ANYBODY)
    without = known_prefixes(conversation_of([*ASKED, called, result], [TOOL]), answer, tokenizer, ANYBODY)
    told = called | {"reasoning_content": "Well."}
    within = known_prefixes(conversation_of([*ASKED, told, result], [TOOL]), answer, tokenizer, ANYBODY)
    assert (len(first), len(without), len(within)) == (2, 1, 1)
    text = tokenizer.model_tokenizer.decode
    assert "Well." not in text(without[0].tolist())
    assert "Well." in text(within[0].tolist())


def test_an_answer_that_continues_the_clients_own_beginning_has_no_next_turn() -> None:
    tokenizer = PromptTokenizer(chat_tokenizer("chatml"), 4096)
    begun = conversation_of(
        [*ASKED, {"role": "assistant", "content": "The"}], options={"continue_final_message": True}
    )
    assert known_prefixes(begun, WholeAnswer(" word", "", ()), tokenizer, ANYBODY) == []
