"""The text of a stream's chunks, and the way of a step's events to the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootstock.engine.request import Event, Finished, Request, RequestId, TokenEvent, TokenLogprob, Usage
from rootstock.server.event_stream import Bridge, Generation, Mailbox
from rootstock.server.openai.answers import ChatFormat, ChoiceFormat, ChunkWriter, CompletionFormat
from rootstock.testing.byte_tokenizer import ByteTokenizer

HEAD = {"id": "an id", "object": "?", "created": 1, "model": 'a "model"'}
ID = RequestId("r")


def chat() -> ChoiceFormat:
    return ChatFormat(HEAD, ByteTokenizer())


def completion() -> ChoiceFormat:
    return CompletionFormat(HEAD, ByteTokenizer(), None)


def written(chunks: Iterable[str]) -> list[dict[str, Any]]:
    events = "".join(chunks).split("\n\n")
    assert events.pop() == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("include_usage", [False, True])
@given(texts=st.lists(st.text(max_size=8), min_size=1, max_size=5))
def test_a_chunk_with_text_alone_equals_that_of_its_choice(
    make: Callable[[], ChoiceFormat], include_usage: bool, texts: list[str]
) -> None:
    writer, format = ChunkWriter(make(), include_usage), make()
    head = HEAD | {"object": format.chunk_object}
    tail = {"usage": None} if include_usage else {}
    events: list[TokenEvent | Finished] = [TokenEvent(ID, 1, text) for text in texts]
    events.insert(1, TokenEvent(ID, 2, "x", TokenLogprob(2, -0.5)))
    events.append(Finished(ID, "stop", Usage(1, 0, 2), "the rest"))
    for event in events:
        for index in (0, 3):
            expected = [head | {"choices": [choice]} | tail for choice in format.choices(index, event)]
            assert written(writer.events(index, event)) == expected


class _Engine:
    """An engine that records submitted and aborted requests."""

    def __init__(self, during: Callable[[], None]) -> None:
        self.submitted: list[RequestId] = []
        self.aborted: list[RequestId] = []
        self._during = during

    def submit(self, request: Request, sink: Callable[[Event], None]) -> None:
        self.submitted.append(request.id)
        self._during()

    def abort(self, request: RequestId) -> None:
        self.aborted.append(request)


class _Nothing:
    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def test_requests_that_are_submitted_after_the_client_left_are_aborted() -> None:
    generation: Generation
    engine = _Engine(lambda: generation.close())
    generation = Generation(engine, _Nothing(), _Nothing())  # type: ignore[arg-type]
    requests = [Request(RequestId(str(i)), np.array([1], np.int32)) for i in range(3)]
    generation.submit(requests)
    assert engine.submitted == ["0", "1", "2"]
    assert sorted(set(engine.aborted)) == ["0", "1", "2"]


def test_events_for_a_closed_loop_do_not_pile_up() -> None:
    loop = asyncio.new_event_loop()
    bridge = Bridge(loop, _Nothing())  # type: ignore[arg-type]
    loop.close()
    for _ in range(3):
        bridge.send(Mailbox(), (0, TokenEvent(ID, 1, "x")))
        bridge._wake()
        assert not bridge._arrived
