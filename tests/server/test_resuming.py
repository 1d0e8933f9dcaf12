"""Chats over HTTP on models that resume only at checkpoints: the oracle with states, windows, or both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rootstock.cache.families import Family, RecurrentState, SlidingWindow
from rootstock.testing.fake_runtime import FULL
from rootstock.text.conversation.openai import conversation_of
from rootstock.text.conversation.template import TemplateInput, template_input
from rootstock.text.prompts import boundaries
from rootstock.text.prompts.text_alignment import shared
from rootstock.text.tokenizer import HFTokenizer
from server.conftest import Served
from text.prompts.chat_tokenizers import chat_tokenizer, tokenizer_of

Json = dict[str, Any]
STATE, WINDOW = RecurrentState(2, 64), SlidingWindow(3, 16, window=24)
HYBRIDS: dict[str, tuple[Family, ...]] = {
    "states": (FULL, STATE),
    "windows": (FULL, WINDOW),
    "both": (FULL, WINDOW, STATE),
}
RULES = {"role": "system", "content": "You are a helpful assistant of a small library."}
QUESTION = {"role": "user", "content": "What is a tree, and what is it for?"}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]


def answer(text: str, reasoning: str | None = None, **more: Any) -> Json:
    return {"role": "assistant", "content": text, "reasoning_content": reasoning, **more}


class Chat:
    """A client of a server whose chat template drops reasoning. It returns the cached tokens of each request."""

    def __init__(self, served: Served, tokenizer: HFTokenizer) -> None:
        self._served = served
        self._tokenizer = tokenizer

    def cached(self, messages: list[Json], **fields: Any) -> int:
        body = {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}
        answered = self._served.client.post("/v1/chat/completions", json=body)
        assert answered.status_code == 200, answered.text
        usage = answered.json()["usage"]
        assert usage["prompt_tokens"] == len(self.prompt(messages, **fields))
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    def prompt(self, messages: list[Json], **fields: Any) -> np.ndarray[Any, Any]:
        return self._tokenizer.encode_chat(self._template(messages, fields).render(self._tokenizer))

    def _template(self, messages: list[Json], fields: Json) -> TemplateInput:
        return template_input(conversation_of(messages, fields.get("tools", ())), self._tokenizer)

    def upto(self, text: str, messages: list[Json], **fields: Any) -> int:
        """Counts the tokens of a prompt up to the end of the last occurrence of `text`."""
        placed = self._tokenizer.place_chat(self._template(messages, fields).render(self._tokenizer))
        at = placed.token_at(placed.text.rindex(text) + len(text))
        assert at is not None
        return at


@pytest.fixture(params=[*HYBRIDS, "full"])
def chat(request: pytest.FixtureRequest, serve: Any) -> Any:
    tokenizer = chat_tokenizer("qwen3_thinking")
    vocab_size = tokenizer_of("bytes").get_vocab_size()
    families = HYBRIDS.get(request.param, (FULL,))
    with serve(tokenizer=tokenizer, families=families, vocab_size=vocab_size) as served:
        yield Chat(served, tokenizer)
        served.settled()


@pytest.mark.behaviour(25)
def test_a_turn_that_drops_reasoning_resumes_at_the_end_of_the_user_message_before_it(chat: Chat) -> None:
    asked = [RULES, QUESTION]
    assert chat.cached(asked) == 0
    ended = [*asked, answer("A plant.", "I know that one."), {"role": "user", "content": "And a bush?"}]
    before_reasoning = chat.upto("for?<|im_end|>\n<|im_start|>assistant\n", ended)
    assert shared(chat.prompt(asked), chat.prompt(ended)) == before_reasoning
    assert chat.cached(ended) == before_reasoning


@pytest.mark.behaviour(24, 25)
def test_after_a_turn_of_tools_the_next_question_resumes_at_the_question_before(chat: Chat) -> None:
    function = {"name": "look_up", "arguments": "{}"}
    calling = [{"id": "call00000", "type": "function", "function": function}]
    turn = [RULES, QUESTION]
    assert chat.cached(turn, tools=TOOLS) == 0
    for step in range(3):
        turn = [
            *turn,
            answer("", f"I look {step}.", tool_calls=calling),
            {"role": "tool", "tool_call_id": "call00000", "content": f"It says {step}."},
        ]
        # The client does not send the oracle's answer back: only the prompt of the step before is cached.
        assert chat.cached(turn, tools=TOOLS) >= chat.upto("assistant\n", turn[:-2], tools=TOOLS)
    ended = [*turn, answer("A plant.", "Now I know."), {"role": "user", "content": "And a bush?"}]
    before_reasoning = chat.upto("for?<|im_end|>\n<|im_start|>assistant\n", ended, tools=TOOLS)
    assert shared(chat.prompt(turn, tools=TOOLS), chat.prompt(ended, tools=TOOLS)) == before_reasoning
    assert chat.cached(ended, tools=TOOLS) == before_reasoning


@pytest.mark.behaviour(24)
def test_the_second_conversation_resumes_at_the_end_of_system_prompt_and_tools(chat: Chat) -> None:
    other = [RULES, {"role": "user", "content": "How many books are there?"}]
    assert chat.cached([RULES, QUESTION], tools=TOOLS) == 0
    assert chat.cached(other, tools=TOOLS) == chat.upto("<|im_start|>user\n", other, tools=TOOLS)


def test_the_next_request_resumes_at_a_clients_mark(serve: Any) -> None:
    tokenizer = chat_tokenizer("chatml")
    vocab_size = tokenizer_of("bytes").get_vocab_size()
    with serve(tokenizer=tokenizer, families=HYBRIDS["both"], vocab_size=vocab_size) as one:
        chat = Chat(one, tokenizer)

        def about(name: str, question: str, **mark: Any) -> list[Json]:
            text = f"{name}: the tool answers, and you say what it means."
            document = {"type": "text", "text": text, **mark}
            return [RULES, {"role": "user", "content": [document, {"type": "text", "text": question}]}]

        marked = {"cache_control": {"type": "ephemeral"}}
        chat.cached(about("Marked", "What does it say?", **marked))
        asked = about("Marked", "Who says it?", **marked)
        assert chat.cached(asked) == chat.upto("what it means.", asked)
        chat.cached(about("Plain", "What does it say?"))
        asked = about("Plain", "Who says it?")
        assert chat.cached(asked) == chat.upto("<|im_start|>user\n", asked)


def test_a_salt_separates_prefixes_and_a_prompt_cache_key_does_not(chat: Chat) -> None:
    asked = [RULES, QUESTION]
    assert chat.cached(asked, prompt_cache_key="a") == 0
    assert chat.cached(asked, prompt_cache_key="b") > 0
    assert chat.cached(asked, prompt_cache_key="a", cache_salt="another tenant") == 0


@pytest.mark.behaviour(30)
def test_explain_names_the_family_that_caps_a_match(serve: Any) -> None:
    with serve(families=HYBRIDS["states"]) as served:
        first = served.complete("The same beginning, and one end.", max_tokens=1, ignore_eos=True)
        assert first.status_code == 200
        body = {"prompt": "The same beginning, and another."}
        explained = served.client.post("/v1/cache/explain", json=body).json()
    beginning = len("The same beginning, and ")
    assert (explained["cap"], explained["capped_by"]) == ("no_checkpoint", "state")
    assert (explained["found_tokens"], explained["matched_tokens"]) == (beginning, 0)
    assert explained["divergence"]["asked"]["text"] == "a"
    said = f"KV to {beginning}, state only to 0: {beginning} tokens recomputed"
    assert explained["message"].startswith(said)


def test_stats_and_metrics_count_checkpoints_and_the_rows_of_each_family(serve: Any) -> None:
    with serve(families=HYBRIDS["both"]) as served:
        served.chat("Hello.", max_tokens=4, ignore_eos=True)
        stats = served.client.get("/v1/cache/stats").json()["cache"]
        assert [family["name"] for family in stats["families"]] == ["full", "window(24)", "state"]
        assert stats["checkpoints"] >= 2
        assert served.metric("rootstock_cache_checkpoints") == stats["checkpoints"]
        assert served.metric("rootstock_cache_bytes", of="checkpoints") == stats["checkpoint_bytes"]
        assert served.metric("rootstock_cache_bytes", of="used") == stats["used_bytes"]
        assert served.metric("rootstock_checkpoint_events_total", event="taken") == stats["checkpoints_taken"]
        assert served.metric("rootstock_cache_rows", family="state", state="cached") == stats["checkpoints"]
        [model] = served.client.get("/v1/models").json()["data"]
        assert model["execution_mode"] == "packed"
        assert model["bytes_per_checkpoint"] == 64 + 4 * 8 * 16


def test_boundaries_are_not_searched_for_a_model_that_resumes_anywhere(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(boundaries, "_Finder", never)
    with serve() as served:
        assert served.chat("Hello.").status_code == 200
    with serve(families=HYBRIDS["states"]) as served:
        assert served.chat("Hello.").status_code == 500
