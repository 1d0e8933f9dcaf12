"""Boundaries of chats: the positions at which later requests diverge from a prompt, for many chat templates."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from rootstock.cache.radix_node import CheckpointKind
from rootstock.errors import RootstockError
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.text.conversation.template import TemplateInput
from rootstock.text.prompts.boundaries import boundaries_of
from rootstock.text.prompts.prompt_tokenizer import PromptTokenizer, placed_chat
from rootstock.text.prompts.text_alignment import common_chars, common_tokens, shared
from rootstock.text.tokenizer import HFTokenizer, Message, ModelTokenizer, PlacedTokens
from text.prompts.chat_tokenizers import TEMPLATES, WITHOUT_TOOLS, chat_tokenizer, template_of, tokenizer_of

Json = dict[str, Any]
SYSTEM, USER = CheckpointKind.SYSTEM, CheckpointKind.USER
TOOL, MARK = CheckpointKind.TOOL, CheckpointKind.MARK
TOOLS: list[Json] = [
    {"type": "function", "function": {"name": name, "description": f"{name} a word.", "parameters": {}}}
    for name in ("look_up", "count")
]
RULES = {"role": "system", "content": "You are a helpful assistant of a small library."}
CACHED = {"cache_control": {"type": "ephemeral"}}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def answer(text: str, reasoning: str | None = None) -> Json:
    more = {} if reasoning is None else {"reasoning_content": reasoning}
    return {"role": "assistant", "content": text, **more}


def call(number: int, reasoning: str | None = None) -> Json:
    function = {"name": "look_up", "arguments": f'{{"word": "w{number}"}}'}
    calls = [{"id": f"call{number:05}", "type": "function", "function": function}]
    return {**answer("", reasoning), "tool_calls": calls}


def result(number: int) -> Json:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "content": f"w{number} is a plant."}


def placed_in(tokenizer: ModelTokenizer, conversation: TemplateInput) -> PlacedTokens:
    return placed_chat(conversation, PromptTokenizer(tokenizer, 10**6))[1]


def found(
    template: str, messages: list[Json], tools: list[Json] | None = None, kind: str = "bytes", **options: Any
) -> dict[CheckpointKind, list[str]]:
    """Returns the last 80 characters of the prompt before each boundary."""
    tokenizer = chat_tokenizer(template, kind)
    conversation = template_of(tokenizer, messages, tools or [], options)
    placed = placed_in(tokenizer, conversation)
    told: dict[CheckpointKind, list[str]] = {}
    for boundary in boundaries_of(tokenizer, conversation, placed):
        end = placed.char_at(boundary.position) if boundary.position < len(placed.tokens) else None
        told.setdefault(boundary.kind, []).append(placed.text[:end][-80:])
    return told


# ---- the kinds of templates


def test_a_template_that_drops_nothing_has_a_boundary_at_the_end_of_the_prompt() -> None:
    told = found("chatml", [RULES, user("What is a tree?")], TOOLS)
    assert [text[-17:] for text in told.pop(SYSTEM)] == ["<|im_start|>user\n"]
    [end] = told.pop(USER)
    assert end.endswith("tree?<|im_end|>\n<|im_start|>assistant\n")
    assert told == {}


@pytest.mark.behaviour(24)
def test_boundaries_lie_before_the_reasoning_of_the_last_turn_and_after_a_tools_result() -> None:
    turn = [user("What is a tree?"), call(1, "I look."), result(1), call(2, "Again."), result(2)]
    told = found("qwen3", [RULES, user("Hi."), answer("Hello."), *turn], TOOLS)
    assert [text[-17:] for text in told[SYSTEM]] == ["<|im_start|>user\n"]
    assert [text[-22:] for text in told[USER]] == ["<|im_start|>assistant\n"]
    assert "What is a tree?" in told[USER][0]
    assert [text.endswith("<|im_end|>\n<|im_start|>assistant\n") for text in told[TOOL]] == [True]
    assert "</tool_response>" in told[TOOL][0]


@pytest.mark.behaviour(24)
@pytest.mark.parametrize("template", ["qwen3_thinking", "deepseek"])
def test_the_boundary_lies_before_reasoning_that_the_prompt_opens(template: str) -> None:
    told = found(template, [RULES, user("What is a tree?")], TOOLS)
    [end] = told[USER]
    assert "tree?" in end
    assert "<think>" not in end
    turn = [user("What is a tree?"), call(1, "I look."), result(1)]
    [end] = found(template, [RULES, *turn], TOOLS)[TOOL]
    assert "is a plant." in end
    assert "<think>" not in end


def test_reasoning_within_the_content_is_dropped_too() -> None:
    thought = "<think>\nI look.\n</think>\n\n"
    calling = {**call(1), "content": thought}
    told = found("qwen3", [RULES, user("What is a tree?"), calling, result(1)], TOOLS)
    assert [text.endswith("tree?<|im_end|>\n<|im_start|>assistant\n") for text in told[USER]] == [True]


def test_tools_in_the_first_user_message_precede_the_system_boundary() -> None:
    told = found("llama_3", [RULES, user("What is a tree?")], TOOLS)
    assert told[SYSTEM][0].endswith('"parameters": {}\n    }\n}\n\n')


def test_a_system_prompt_that_moves_to_the_last_user_message_has_a_boundary_before_it() -> None:
    told = found("mistral", [RULES, user("What is a tree?"), answer("A plant."), user("And a bush?")], TOOLS)
    assert any(text.endswith("[INST] What is a tree?[/INST] A plant.</s>[") for text in told[USER])


@pytest.mark.parametrize("template", WITHOUT_TOOLS)
def test_a_rendering_that_the_template_refuses_yields_no_boundary_and_no_error(template: str) -> None:
    tools: list[Json] = TOOLS if template == "strict" else []
    told = found(template, [RULES, user("What is a tree?")], tools)
    assert set(told) == {SYSTEM, USER}
    only_user = (
        "{%- if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    )
    tokenizer = HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("bytes")), only_user)
    conversation = template_of(tokenizer, [user("What?")])
    assert boundaries_of(tokenizer, conversation, placed_in(tokenizer, conversation)) == ()


def test_system_messages_within_the_history_have_no_boundary() -> None:
    middle = {"role": "system", "content": "Be brief from now on."}
    told = found("chatml", [RULES, RULES, user("Hi."), answer("Hello."), middle, user("What is a tree?")])
    assert len(told[SYSTEM]) == len(told[USER]) == 1
    assert told[USER][0].endswith("tree?<|im_end|>\n<|im_start|>assistant\n")


def test_begun_answers_and_prompts_without_a_user_have_boundaries() -> None:
    begun = [RULES, user("What is a tree?"), answer("A tree is")]
    told = found("qwen3", begun, add_generation_prompt=False, continue_final_message=True)
    assert told[USER][0].endswith("tree?<|im_end|>\n<|im_start|>assistant\n")
    assert found("chatml", [RULES])[USER] == [found("chatml", [RULES])[USER][0]]


# ---- exactness


def conversations(template: str, seed: int) -> Iterator[tuple[list[Json], list[Json]]]:
    """Yields the messages and tools of each request of a growing conversation."""
    rng = random.Random(seed)
    tools = [] if template in WITHOUT_TOOLS else TOOLS
    words = ["tree", "bush", "é", "plant", "w1", "<b>", "Done.", "{}", "Go", "17", "\n\n", "", "of"]

    def text(most: int) -> str:
        """Makes a text whose beginning no tokenizer merges with the end of the prompt."""
        return " ".join(["It", *(rng.choice(words) for _ in range(rng.randint(1, most)))])

    messages: list[Json] = [{"role": "system", "content": text(30)}]
    for turn in range(4):
        messages.append(user(text(20)))
        yield list(messages), tools
        for step in range(rng.randint(0, 4) if tools else 0):
            messages += [call(10 * turn + step, text(9)), result(step)]
            yield list(messages), tools
        messages.append(answer(text(12), text(12)))


def by_the_whole_rendering(
    tokenizer: HFTokenizer, conversation: TemplateInput, following: list[Message]
) -> int | None:
    try:
        rendered = tokenizer.render_chat([*conversation.messages, *following], conversation.tools)
    except Exception:
        return None
    prompt = tokenizer.encode_chat(conversation.render(tokenizer))
    return shared(prompt, tokenizer.encode_chat(rendered))


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_boundaries_equal_the_positions_at_which_whole_renderings_diverge(template: str, kind: str) -> None:
    tokenizer = chat_tokenizer(template, kind)
    next_turn: list[Message] = [answer("Done.", "Well."), user("Go on.")]
    called = [{"id": "call00000", "function": {"name": "look_up", "arguments": {}}}]
    next_step: list[Message] = [
        {**answer(""), "tool_calls": called},
        {"role": "tool", "tool_call_id": "call00000", "content": "Done."},
    ]
    for seed in range(3):
        for messages, tools in conversations(template, seed):
            conversation = template_of(tokenizer, messages, tools)
            placed = placed_in(tokenizer, conversation)
            boundaries = boundaries_of(tokenizer, conversation, placed)
            positions = [boundary.position for boundary in boundaries]
            assert positions == sorted(set(positions))
            assert all(0 < position <= len(placed.tokens) for position in positions)
            for following in (next_turn, next_step) if tools else (next_turn,):
                expected = by_the_whole_rendering(tokenizer, conversation, following)
                assert expected is not None
                # A boundary a few tokens after another is left out.
                near = (0 <= expected - position < 4 for position in [0, *positions])
                assert any(near), (expected, positions)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("template", sorted(set(TEMPLATES) - {"mistral", "gemma", "strict"}))
def test_each_request_of_an_agent_diverges_at_a_boundary_of_an_earlier_one_or_continues_it(
    template: str, kind: str
) -> None:
    """The agent sends generated answers back unchanged, with their reasoning until the template drops it."""
    tokenizer = chat_tokenizer(template, kind)
    for seed in range(3):
        known: list[tuple[np.ndarray[Any, Any], set[int]]] = []
        for messages, tools in conversations(template, seed):
            conversation = template_of(tokenizer, messages, tools)
            placed = placed_in(tokenizer, conversation)
            if known:
                longest, at = max((shared(tokens, placed.tokens), at) for at, (tokens, _) in enumerate(known))
                tokens, positions = known[at]
                near = max((position for position in positions if position <= longest), default=0)
                goes_on = longest >= len(tokens)
                assert goes_on or longest - near < 4, (longest, sorted(positions), len(tokens))
            known.append(
                (placed.tokens, {b.position for b in boundaries_of(tokenizer, conversation, placed)})
            )


def test_tokens_that_merge_across_the_divergence_of_two_texts_are_not_common() -> None:
    tokenizer = chat_tokenizer("chatml")
    one, other = "tree assistant of", "tree assistance"
    placed = tokenizer.place_chat(one)
    assert common_tokens(tokenizer, placed, other) == shared(
        tokenizer.encode_chat(one), tokenizer.encode_chat(other)
    )
    assert common_chars(one, other) == len("tree assistan")


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_common_tokens_by_a_window_equal_those_of_the_whole_texts(kind: str) -> None:
    tokenizer, rng = chat_tokenizer("chatml", kind), random.Random(3)
    pieces = ["assistant", " of", "\n", "  ", "é", "tool", "<|im_end|>", "aaaa", "."]
    for _ in range(300):
        one = "".join(rng.choices(pieces, k=rng.randint(0, 300)))
        cut = rng.randint(0, len(one))
        other = one[:cut] + "".join(rng.choices(pieces, k=rng.randint(0, 30)))
        placed = tokenizer.place_chat(one)
        assert common_tokens(tokenizer, placed, other) == shared(placed.tokens, tokenizer.encode_chat(other))


def test_a_tokenizer_without_places_of_tokens_tokenizes_whole_texts() -> None:
    tokenizer = ByteTokenizer()
    conversation = template_of(tokenizer, [RULES, user("What is a tree?")])
    placed = placed_in(tokenizer, conversation)
    system, turn = boundaries_of(tokenizer, conversation, placed)
    assert system.kind is SYSTEM
    assert placed.tokens[system.position - 1] == 256 + ByteTokenizer.SPECIAL.index("<|user|>")
    assert turn.position == len(placed.tokens)


# ---- marks


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_a_clients_marks_are_boundaries_and_do_not_reach_the_template(template: str) -> None:
    document = {"type": "text", "text": "A long document.", **CACHED}
    question = {"type": "text", "text": "What does it say?"}
    messages: list[Json] = [RULES, {"role": "user", "content": [document, question]}]
    marked = found(template, messages)
    [end] = marked[MARK]
    assert end.endswith("A long document.")
    plain = [RULES, user("A long document.\nWhat does it say?")]
    tokenizer = chat_tokenizer(template)
    assert template_of(tokenizer, messages).render(tokenizer) == template_of(tokenizer, plain).render(
        tokenizer
    )


def test_marks_on_messages_and_on_tools_are_boundaries() -> None:
    marked_tools = [{**TOOLS[0], "function": TOOLS[0]["function"] | CACHED}, {**TOOLS[1], **CACHED}]
    messages = [{**RULES, **CACHED}, user("Hi."), {**answer("Hello."), **CACHED}, user("What is a tree?")]
    told = found("qwen3", messages, marked_tools)
    assert [text[-20:] for text in told[MARK]] == [
        RULES["content"][-20:],
        found("qwen3", [RULES, user("Hi.")], TOOLS)[SYSTEM][0][-20:],
        told[MARK][2][-20:],
    ]
    assert told[MARK][2].endswith("assistant\nHello.")
    tokenizer = chat_tokenizer("qwen3")
    conversation = template_of(tokenizer, messages, marked_tools)
    assert conversation.tools == TOOLS
    assert "cache_control" not in conversation.render(tokenizer)


def test_marks_in_texts_that_a_template_rewrites_are_ignored() -> None:
    marked = {**answer("<think>\nWell.\n</think>\n\nDone."), **CACHED}
    messages = [RULES, user("Hi."), marked, user("What is a tree?")]
    assert len(found("qwen3", messages)[MARK]) == 1  # the template keeps the end of the text
    inside = {"type": "text", "text": "<think>\nWell.", **CACHED}
    rest = {"type": "text", "text": "</think>\n\nDone."}
    messages = [RULES, user("Hi."), {"role": "assistant", "content": [inside, rest]}, user("What?")]
    assert MARK not in found("qwen3", messages)


# ---- cost


@pytest.mark.parametrize("shape", ["chat", "loop"])
def test_the_cost_of_boundaries_does_not_grow_with_the_history(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = chat_tokenizer("qwen3_thinking")
    long = "The reader asks, the tool answers, and then you say what it means. " * 8
    if shape == "chat":
        messages = [RULES, *[m for _ in range(49) for m in (user(long), answer(long, long))], user(long)]
    else:
        messages = [RULES, user(long), *[m for i in range(49) for m in (call(i, long), result(i))]]
    conversation = template_of(tokenizer, messages, TOOLS)
    placed = placed_in(tokenizer, conversation)

    prompt_calls = calls_of(lambda: placed_in(tokenizer, conversation))
    assert calls_of(lambda: boundaries_of(tokenizer, conversation, placed)) < 2 * prompt_calls

    rendered, tokenised, chars = [0], [0], [0]
    render, encode = tokenizer.render_chat, tokenizer.encode_chat

    def counted(messages: list[Message], *rest: Any, **options: Any) -> Any:
        rendered[0] += len(messages)
        text = render(messages, *rest, **options)
        chars[0] += len(text)
        return text

    def counted_encode(text: str) -> Any:
        tokenised[0] += len(text)
        return encode(text)

    monkeypatch.setattr(tokenizer, "render_chat", counted)
    monkeypatch.setattr(tokenizer, "encode_chat", counted_encode)
    boundaries_of(tokenizer, conversation, placed)
    assert 0 < rendered[0] <= len(messages)
    assert 0 < chars[0] <= len(placed.text)
    assert 0 < tokenised[0] <= len(placed.text) / 4


def calls_of(work: Callable[[], object]) -> int:
    """Counts calls of functions, which are the same on every machine, unlike seconds."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


# ---- random conversations


def test_boundaries_of_any_conversation_lie_within_its_prompt() -> None:
    rng = random.Random(5)
    texts = [
        "",
        "  ",
        "\n",
        "x",
        "Yes?",
        "<think>\nhm\n</think>\n\nok",
        "a b c " * 40,
        "é\ue000",
        "<|im_end|>",
    ]
    all_tools = [[], TOOLS, TOOLS[1:], [{"function": {"name": "look_up"}}]]
    all_options = [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ]

    def message() -> Json:
        role = rng.choice(["system", "user", "user", "assistant", "assistant", "tool", "developer"])
        marked = {"type": "text", "text": rng.choice(texts), **CACHED}
        parts = [marked, {"type": "text", "text": rng.choice(texts)}]
        made: Json = {"role": role, "content": rng.choice([rng.choice(texts), parts])}
        if role == "assistant" and rng.random() < 0.5:
            made |= call(rng.randint(0, 9), rng.choice([None, *texts]))
        return made | (CACHED if rng.random() < 0.1 else {})

    rendered = 0
    while rendered < 300:
        tokenizer = chat_tokenizer(rng.choice(sorted(TEMPLATES)), rng.choice(["bytes", "pieces"]))
        messages = [message() for _ in range(rng.randint(1, 24))]
        conversation = template_of(tokenizer, messages, rng.choice(all_tools), rng.choice(all_options))
        try:
            placed = placed_in(tokenizer, conversation)
        except RootstockError:  # the template refuses it
            continue
        rendered += 1
        positions = [boundary.position for boundary in boundaries_of(tokenizer, conversation, placed)]
        assert positions == sorted(set(positions))
        assert all(0 < position <= len(placed.tokens) for position in positions)
