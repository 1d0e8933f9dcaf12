"""The output of a response: items, events and counts, however the text is split into tokens."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootstock.server.formats.responses.output import Output, OutputSettings, WholeCalls
from rootstock.server.formats.responses.tools import Toolbox
from rootstock.text.output.reasoning_tokens import CountingParser
from server.responses.events import checked
from server.responses.scripted import MarkedParser

Json = dict[str, Any]
INPUT = 'one "two"\n\ttäglich 𝄞 \\ end'
ANSWER = (
    '<think>first</think>Text. <call f>{"a": [1, 2]}</call>'
    f"<call patch>{json.dumps({'input': INPUT})}</call>more"
    f"<call patch>{json.dumps({'input': INPUT}, ensure_ascii=False)}</call>"
    '<call patch>{"other": 1, "input": "x"}</call><call f>{"a": </call><call patch>{"input": 5'
)


def tools() -> Toolbox:
    box = Toolbox()
    box.add([{"type": "custom", "name": "patch"}, {"type": "local_shell"}], "tools")
    return box


def answered(pieces: list[str], **settings: Any) -> tuple[Output, list[Json]]:
    output = Output(OutputSettings("resp_0", tools(), **settings), CountingParser(MarkedParser()))
    events = [event for piece in pieces for event in output.push(piece)]
    events += output.finish("", complete=True)
    return output, _numbered(events, output)


def _numbered(events: list[Any], output: Output) -> list[Json]:
    """Returns the events with those around them, as JSON has them."""
    begin = {"id": "resp_0", "status": "in_progress", "output": []}
    end = {"id": "resp_0", "status": "completed", "output": output.items, "usage": {"total_tokens": 1}}
    around: list[Any] = [
        ("response.created", {"response": begin}),
        ("response.in_progress", {"response": begin}),
        *events,
        ("response.completed", {"response": end}),
    ]
    numbered = [{"type": kind, "sequence_number": i, **fields} for i, (kind, fields) in enumerate(around)]
    decoded: list[Json] = json.loads(json.dumps(numbered))
    return decoded


def splits(text: str) -> st.SearchStrategy[list[str]]:
    def cut(places: list[int]) -> list[str]:
        return [text[a:b] for a, b in itertools.pairwise([0, *sorted(places), len(text)])]

    return st.lists(st.integers(0, len(text)), max_size=30).map(cut)


@given(splits(ANSWER))
def test_items_do_not_depend_on_the_split_into_tokens(pieces: list[str]) -> None:
    whole, _ = answered([ANSWER])
    output, events = answered(pieces)
    assert checked(events)["output"] == whole.items == output.items


def test_the_items_of_an_answer() -> None:
    output, _ = answered(list(ANSWER))
    kinds = [item["type"] for item in output.items]
    assert kinds == [
        "reasoning", "message", "function_call", "custom_tool_call", "message", "custom_tool_call",
        "custom_tool_call", "function_call", "custom_tool_call",
    ]  # fmt: skip
    assert [item["input"] for item in output.items if "input" in item] == [INPUT, INPUT, "x", '{"input": 5']
    assert [item["status"] for item in output.items][-2:] == ["incomplete", "incomplete"]
    assert len({item["id"] for item in output.items}) == len(output.items)
    # The input is shown while it arrives.
    pieces = [event for event in answered(list(ANSWER))[1] if event["type"].endswith("call_input.delta")]
    assert len(pieces) > len(INPUT)


@given(st.text(alphabet='<>calthink/ {}":[]input\\u0041dD834\n', max_size=120), st.data())
def test_no_text_raises(text: str, data: st.DataObject) -> None:
    text = (
        data.draw(st.sampled_from(["", "<call patch>", '<call patch>{"input": "', "<call local_shell>"]))
        + text
    )
    pieces = data.draw(splits(text))
    output, events = answered(pieces)
    assert checked(events)["output"] == output.items == answered([text])[0].items
    whole = Output(OutputSettings("resp_0", tools()), WholeCalls(CountingParser(MarkedParser())))
    for piece in pieces:
        whole.push(piece)
    whole.finish("", complete=True)
    calls = [item for item in whole.items if item["type"].endswith("call")]
    assert all(item["status"] == "completed" for item in calls)


@pytest.mark.parametrize("name", ["f", "patch", "local_shell"])
def test_a_whole_answer_shows_a_malformed_call_as_text(name: str) -> None:
    text = f"before <call {name}>[1]</call> after"
    whole = Output(OutputSettings("resp_0", tools()), WholeCalls(CountingParser(MarkedParser())))
    whole.push(text)
    whole.finish("", complete=True)
    [message] = whole.items
    assert message["content"][0]["text"] == text
