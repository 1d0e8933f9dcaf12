"""The grammar of a response's events."""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]

_TEXTS = {
    "response.output_text": "text",
    "response.reasoning_text": "text",
    "response.function_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
}
_DELTAS_OF = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


def parsed(stream: str) -> list[Json]:
    """Returns the events of a stream. Asserts their form."""
    *blocks, last, end = stream.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    events = []
    for block in blocks:
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        events.append(event)
    return events


def checked(events: list[Json]) -> Json:
    """Asserts the grammar of a stream's events, and returns the response of the last one."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events[:2]:
        assert event["response"]["status"] == "in_progress"
        assert event["response"]["output"] == []
    last = events[-1]
    final: Json = last["response"]
    assert last["type"] == f"response.{final['status']}"
    done: list[Json] = []
    open_item: Json | None = None
    inside: list[Json] = []
    for event in events[2:-1]:
        match event["type"]:
            case "response.in_progress":  # keeps the connection alive
                assert event["response"]["id"] == final["id"]
            case "response.output_item.added":
                assert open_item is None
                assert event["output_index"] == len(done)
                open_item, inside = event["item"], []
                assert open_item["status"] == "in_progress"
            case "response.output_item.done":
                assert open_item is not None
                item = event["item"]
                assert event["output_index"] == len(done)
                for name in ("id", "type"):
                    assert item[name] == open_item[name]
                _check_inside(item, inside, len(done))
                done.append(item)
                open_item = None
            case _:
                assert open_item is not None
                inside.append(event)
    if final["status"] == "failed":
        assert final["error"]["message"]
        assert final["output"][: len(done)] == done
    else:
        assert open_item is None
        assert final["output"] == done
        assert final["usage"]["total_tokens"] > 0
    return final


def _check_inside(item: Json, events: list[Json], index: int) -> None:
    if item["type"] not in _DELTAS_OF:  # calls whose arguments are an object
        assert events == []
        return
    prefix = _DELTAS_OF[item["type"]]
    kinds = [event["type"] for event in events]
    has_parts = item["type"] in ("message", "reasoning")
    if has_parts:
        assert kinds[0] == "response.content_part.added"
        assert events[0]["part"]["text"] == ""
        assert kinds[-1] == "response.content_part.done"
        [part] = item["content"]
        assert events[-1]["part"] == part
        events, kinds = events[1:-1], kinds[1:-1]
    assert kinds == [f"{prefix}.delta"] * (len(kinds) - 1) + [f"{prefix}.done"]
    for event in events:
        assert event["item_id"] == item["id"]
        assert event["output_index"] == index
        assert event.get("content_index") == (0 if has_parts else None)
    whole = item["content"][0]["text"] if has_parts else item[_TEXTS[prefix]]
    assert "".join(event["delta"] for event in events[:-1]) == whole
    assert events[-1][_TEXTS[prefix]] == whole
    if item["type"] == "message":
        scored = [entry for event in events[:-1] for entry in event["logprobs"]]
        assert scored == events[-1]["logprobs"] == item["content"][0]["logprobs"]
