"""Answers of Anthropic's API: the grammar of their events, and whole answers that equal the sum of the events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootstock.engine.diagnosis import Diagnosis
from rootstock.engine.request import Usage
from rootstock.errors import QueueFull, StepFailed
from rootstock.server.formats.anthropic.answers import PromptUsage
from rootstock.server.formats.anthropic.block_events import AnswerStyle
from rootstock.server.formats.anthropic.signatures import text_held
from rootstock.server.wire.api_call import ChoiceHistory
from rootstock.text.output.deltas import ContentDelta, Delta, ReasoningDelta
from server.anthropic.streams import call, events_in, finished, format_of, message_of, streamed

THINKING = [ReasoningDelta("I should "), ReasoningDelta("look.")]


def whole(script: list[list[Delta]], style: AnswerStyle | None = None, **fields: Any) -> dict[str, Any]:
    end = fields.pop("end", None) or finished()
    history = ChoiceHistory()
    history.add(finished(text=" ".join(map(str, range(len(script))))))
    history.end = end
    message: dict[str, Any] = format_of(script, style, **fields).whole([history], end.usage)
    return message


def content_of(script: list[list[Delta]], style: AnswerStyle | None = None) -> list[dict[str, Any]]:
    """Returns the content of a streamed answer, after asserting that the whole answer has the same."""
    message = message_of(streamed(script, style))
    assert message == whole(script, style)
    content: list[dict[str, Any]] = message["content"]
    return content


def test_thinking_text_and_calls_are_blocks_in_the_order_of_the_model() -> None:
    script: list[list[Delta]] = [
        [THINKING[0]],
        [THINKING[1], ContentDelta("Let me ")],
        [ContentDelta("look.\n"), *call(0, "read", '{"path": ', '"a.txt"}')],
        call(1, "list"),
        [ContentDelta(" Done.")],
    ]
    thinking, text, read, listed, last = content_of(script)
    assert thinking["thinking"] == "I should look."
    assert thinking["signature"]
    assert text == {"type": "text", "text": "Let me look.\n"}
    direct = {"type": "tool_use", "caller": {"type": "direct"}}
    assert read == direct | {"id": "toolu_0abc", "name": "read", "input": {"path": "a.txt"}}
    assert listed == direct | {"id": "toolu_1abc", "name": "list", "input": {}}
    assert last["text"] == " Done."


def test_arguments_stream_as_the_model_writes_them_and_empty_ones_are_an_object() -> None:
    events = streamed([call(0, "read", '{"n":', " 1 }"), call(1, "list"), call(2, "list", "")])
    parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert parts == ['{"n":', " 1 }", "{}", "{}"]


def test_whitespace_alone_makes_no_block_and_is_kept_before_and_within_text() -> None:
    script: list[list[Delta]] = [
        [ContentDelta("\n"), ContentDelta("\n"), *call(0, "a")],
        [ContentDelta("\n\n"), *call(1, "b")],
        [ContentDelta(" \n"), ContentDelta("x"), ContentDelta(" "), ContentDelta("y ")],
        [*call(2, "c"), ContentDelta("\n")],
    ]
    kinds = [block.get("name") or block["text"] for block in content_of(script)]
    assert kinds == ["a", "b", " \nx y ", "c"]
    assert content_of([[ContentDelta(" \n ")]]) == []
    assert content_of([[]]) == []


def test_a_malformed_call_is_text_in_its_place_and_a_stream_keeps_its_block_too() -> None:
    script: list[list[Delta]] = [[ContentDelta("So: "), *call(0, "read", "{'path'", ": 1}")], call(1, "list")]
    content = whole(script)["content"]
    assert [block["type"] for block in content] == ["text", "tool_use"]
    assert content[0]["text"] == "So: <call>{'path': 1}</call>"
    message = message_of(streamed(script))
    text, malformed, raw, last = message["content"]
    assert malformed["input"] == "{"  # no client can parse more of it
    assert raw["text"] == "<call>{'path': 1}</call>"
    assert (text["text"], last["name"], message["stop_reason"]) == ("So: ", "list", "tool_use")
    cut = message_of(streamed([call(0, "read", '{"path": "a')]))["content"]
    assert [block["input"] for block in cut] == ['{"path": "a']
    alone = call(0, "read", "{'path'")
    assert whole([alone])["stop_reason"] == "end_turn"
    assert message_of(streamed([alone]))["stop_reason"] == "end_turn"


def test_omitted_thinking_is_in_the_signature() -> None:
    style = AnswerStyle(shows_thinking=False)
    [thinking, _] = content_of([[*THINKING, ContentDelta("é")]], style)
    assert thinking["thinking"] == ""
    assert text_held(thinking["signature"]) == "I should look."
    [shown, _] = content_of([[*THINKING, ContentDelta("é")]])
    assert text_held(shown["signature"]) == ""


def test_only_the_first_call_is_shown_where_parallel_calls_are_disabled() -> None:
    content = content_of([call(0, "a"), call(1, "b"), [ContentDelta("!")]], AnswerStyle(parallel=False))
    assert [block.get("name") for block in content] == ["a", None]


parts = st.sampled_from(["", " ", "\n", "a", "é\u2028", '"'])
deltas = st.lists(
    st.one_of(
        st.builds(lambda text: [ContentDelta(text)], parts),
        st.builds(lambda text: [ReasoningDelta(text)], parts.filter(bool)),
        st.sampled_from([["{}"], ['{"a": ', "1}"], [], ['{"a": "\\ud83d']]),
    ),
    max_size=12,
)


@given(script=deltas, parallel=st.booleans(), shown=st.booleans())
def test_any_answer_has_the_same_blocks_whole_and_streamed(script: Any, parallel: bool, shown: bool) -> None:
    made: list[list[Delta]] = []
    calls = 0
    for each in script:
        if all(isinstance(part, str) for part in each):
            each = call(calls, "f", *each)
            calls += 1
        made.append(each)
    style = AnswerStyle(shown, parallel)
    message = message_of(streamed(made, style))
    is_malformed = any(isinstance(block.get("input"), str) for block in message["content"])
    if not is_malformed:
        assert message["content"] == whole(made, style)["content"]
        assert message["stop_reason"] == whole(made, style)["stop_reason"]


@pytest.mark.parametrize(
    ("end", "has_calls", "reason", "sequence"),
    [
        (finished(), False, "end_turn", None),
        (finished(), True, "tool_use", None),
        (finished(stopped_by=7), False, "end_turn", None),
        (finished(stopped_by="END"), False, "stop_sequence", "END"),
        (finished(stopped_by="END"), True, "stop_sequence", "END"),
        (finished(reason="length"), False, "max_tokens", None),
        (finished(reason="length"), True, "max_tokens", None),
        (finished(reason="length", usage=Usage(4000, 0, 96)), False, "model_context_window_exceeded", None),
    ],
)
def test_the_reason_of_the_stop(end: Any, has_calls: bool, reason: str, sequence: str | None) -> None:
    script = [call(0, "a")] if has_calls else [[ContentDelta("a")]]
    for message in (message_of(streamed(script, end=end)), whole(script, end=end)):
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("prompt", "cached", "created", "rest"),
    [
        (PromptUsage(100, 99), 60, 39, 1),
        (PromptUsage(100, 99), 0, 99, 1),
        (PromptUsage(100, 99), 99, 0, 1),
        (PromptUsage(100, 0), 0, 0, 100),  # nothing is cached
    ],
)
def test_the_parts_of_usage_are_disjoint_and_add_up(
    prompt: PromptUsage, cached: int, created: int, rest: int
) -> None:
    body = prompt.body(cached, 7)
    assert body == {
        "input_tokens": rest,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "output_tokens": 7,
    }


def test_a_message_begins_with_the_first_token_and_the_numbers_of_its_prompt() -> None:
    writer = format_of([]).stream()
    assert writer.begin() == ""
    assert list(events_in(writer.keep_alive())) == [{"type": "ping"}]
    start, *_, delta, _ = streamed([[ContentDelta("a")], [ContentDelta("b")]])
    assert start["message"]["usage"]["cache_read_input_tokens"] == 60
    assert start["message"]["usage"]["output_tokens"] == 1
    assert delta["usage"] == {
        "input_tokens": 1,
        "cache_creation_input_tokens": 39,
        "cache_read_input_tokens": 60,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 0},
    }


def test_an_answer_without_tokens_is_a_message_too() -> None:
    message = message_of(streamed([], end=finished(reason="length", usage=Usage(100, 60, 0))))
    assert message["content"] == []
    assert message["usage"]["output_tokens"] == 0
    assert message["usage"]["cache_read_input_tokens"] == 60


def test_edits_and_diagnostics_are_told_where_they_are_asked_for() -> None:
    edit = {"type": "clear_thinking_20251015", "cleared_thinking_turns": 1, "cleared_input_tokens": 5}
    diagnosis = Diagnosis(100, 60, 60, "diverged", 60, 40, "a text that only the operator may see")
    told: Any = {"cache_miss_reason": None}
    fields: Any = {"applied_edits": [edit], "diagnose": lambda given: told if given is diagnosis else None}
    end = finished(diagnosis=diagnosis)
    for message in (
        message_of(streamed([], end=end, **fields)),
        whole([[ContentDelta("a")]], end=end, **fields),
    ):
        assert message["context_management"] == {"applied_edits": [edit]}
        assert message["diagnostics"] == {"cache_miss_reason": None}
    for message in (message_of(streamed([])), whole([[ContentDelta("a")]])):
        assert not {"context_management", "diagnostics"} & message.keys()


@pytest.mark.parametrize(
    ("error", "kind"), [(StepFailed(ValueError()), "api_error"), (QueueFull(1, 2), "rate_limit_error")]
)
def test_an_error_in_mid_stream_is_an_event(error: Any, kind: str) -> None:
    [event] = events_in(format_of([]).stream().error(error))
    assert event["error"] == {"type": kind, "message": error.message}
    assert event["request_id"].startswith("req_")


def test_events_are_json_of_any_text() -> None:
    odd = 'a"\\\n\u2028\x00é\U0001f600'
    [block] = content_of([[ContentDelta(odd)]])
    assert block["text"] == odd
    assert json.loads(json.dumps(block)) == block
