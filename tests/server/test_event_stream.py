"""The text of a stream's chunks, and the way of a step's events to the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootstock.config import ServerConfig
from rootstock.engine.request import (
    Event,
    Finished,
    PromptScored,
    Request,
    RequestId,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from rootstock.server.answers.event_stream import LONG_ANSWER_CHARS
from rootstock.server.answers.generation import Bridge, Generation, Indexed, Mailbox
from rootstock.server.answers.keep_alive import KeepAlive
from rootstock.server.formats.openai.answers import ChoiceFormat, ChunkWriter, UsageChunkWriter
from rootstock.server.formats.openai.chat_answers import ChatFormat
from rootstock.server.formats.openai.completion_answers import CompletionFormat
from rootstock.server.wire.api_call import ChoiceHistory
from rootstock.server.wire.hints.sent import NO_HINTS
from rootstock.server.wire.json_pieces import CHUNK_CHARACTERS
from rootstock.testing.byte_tokenizer import ByteTokenizer
from server.held import Held
from server.raw_http import Clock, MovedClock

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


@pytest.mark.parametrize("make", [chat, completion])
@given(texts=st.lists(st.text(max_size=8), min_size=1, max_size=5))
def test_each_chunk_can_tell_the_usage_up_to_it(make: Callable[[], ChoiceFormat], texts: list[str]) -> None:
    writer, format = UsageChunkWriter(make(), 7, None, NO_HINTS), make()
    head = HEAD | {"object": format.chunk_object}
    tokens: list[TokenEvent | Finished] = [TokenEvent(ID, 1, text) for text in texts]
    count = 0
    for event in [*tokens, Finished(ID, "stop", Usage(7, 0, len(texts)), "the rest")]:
        count += isinstance(event, TokenEvent)
        assert writer.tokens([(0, event)]) is None, "a chunk's end is not that of the chunk before"
        expected = []
        for choice in format.choices(0, event):
            told = 0 if "role" in choice.get("delta", ()) else count
            usage = {"prompt_tokens": 7, "completion_tokens": told, "total_tokens": 7 + told}
            expected.append(head | {"choices": [choice], "usage": usage})
        assert written(writer.events(0, event)) == expected


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
    generation = Generation(_Nothing())  # type: ignore[arg-type]
    requests = [Request(RequestId(str(i)), np.array([1], np.int32)) for i in range(3)]
    generation.submit(engine, requests)  # type: ignore[arg-type]
    assert engine.submitted == ["0", "1", "2"]
    assert sorted(set(engine.aborted)) == ["0", "1", "2"]


def test_events_for_a_closed_loop_do_not_pile_up() -> None:
    loop = asyncio.new_event_loop()
    bridge = Bridge(loop)
    loop.close()
    for _ in range(3):
        bridge.send(Mailbox(), (0, TokenEvent(ID, 1, "x")))
        bridge._wake()
        assert not bridge._arrived


# ---- keep-alives

EVERY_S = 10_000.0  # far more than a busy machine takes


def test_a_keep_alive_is_sent_when_no_text_was_sent_for_the_time() -> None:
    sent: list[str] = []

    async def send(text: str) -> None:
        sent.append(text)

    def write(chunk: bytes) -> bool:
        sent.append(chunk.decode())
        return True

    async def pass_time(seconds: float) -> list[str]:
        """Returns the texts that were sent meanwhile."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MovedClock)
        loop.ahead_s += seconds
        for _ in range(5):
            await asyncio.sleep(0)
        texts = sent.copy()
        sent.clear()
        return texts

    async def run() -> None:
        keep_alive = KeepAlive(send, write, EVERY_S, lambda: "keep-alive")
        generation = Generation(_Nothing())  # type: ignore[arg-type]
        engine = _Engine(lambda: None)
        generation.submit(engine, [Request(ID, np.array([1], np.int32))])  # type: ignore[arg-type]
        generation.keep_alive(keep_alive)

        def written(events: list[Indexed]) -> bool:
            if not all(isinstance(event, TokenEvent) for _, event in events):
                return False
            text = "".join(event.text for _, event in events if isinstance(event, TokenEvent))
            assert keep_alive.write is not None
            return not text or keep_alive.write(text.encode())

        generation.offer_to(written)
        waiting = asyncio.create_task(generation.next())
        assert await pass_time(EVERY_S - 100) == []
        generation._mailbox.put([(0, TokenEvent(ID, 1, "text"))])
        assert await pass_time(EVERY_S - 100) == ["text"]
        generation._mailbox.put([(0, TokenEvent(ID, 2, ""))])  # the client gets none of it
        assert await pass_time(101) == ["keep-alive"]
        assert await pass_time(EVERY_S - 100) == []
        assert await pass_time(101) == ["keep-alive"]
        await keep_alive.send("more")
        assert await pass_time(EVERY_S - 100) == ["more"]
        end = (0, Finished(ID, "stop", Usage(1, 0, 2)))
        generation._mailbox.put([end])
        assert await waiting == [end]
        assert await pass_time(EVERY_S * 3) == []

    with asyncio.Runner(loop_factory=MovedClock) as runner:
        runner.run(run())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_has_keep_alives_before_its_first_token(
    serve: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    clock, held = Clock(monkeypatch), Held()
    body = {"stream": True, "max_tokens": 3, "ignore_eos": True}
    body |= (
        {"prompt": "x"}
        if path.endswith("v1/completions")
        else {"messages": [{"role": "user", "content": "x"}]}
    )
    with (
        serve(server=ServerConfig(sse_keep_alive_s=EVERY_S), fault=held) as served,
        served.client.stream("POST", path, json=body) as response,
    ):
        lines = response.iter_lines()
        for _ in range(2):
            clock.pass_time(EVERY_S + 1)
            assert (next(lines), next(lines)) == (": keep-alive", "")
        held.let_go()
        rest = [line for line in lines if line]
        assert rest.pop() == "data: [DONE]"
        assert rest
        assert all(line.startswith("data: {") for line in rest)


def test_a_long_whole_answer_is_parsed_and_encoded_beside_the_event_loop(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    whole = CompletionFormat.whole

    def noted(format: CompletionFormat, index: int, history: ChoiceHistory) -> dict[str, Any]:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return whole(format, index, history)

    monkeypatch.setattr(CompletionFormat, "whole", noted)
    body = {"prompt": "x", "ignore_eos": True, "logit_bias": {"97": 100}}
    with serve() as served:
        for length in (1, LONG_ANSWER_CHARS):
            answer = served.client.post("/v1/completions", json=body | {"max_tokens": length})
            assert answer.json()["choices"][0]["text"] == "a" * length
    assert [name == "rootstock-encoder" for name in threads] == [False, True]


def test_keep_alives_can_be_switched_off(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, held = Clock(monkeypatch), Held()
    body = {"prompt": "x", "stream": True, "max_tokens": 1}
    with (
        serve(server=ServerConfig(sse_keep_alive_s=0), fault=held) as served,
        served.client.stream("POST", "/v1/completions", json=body) as response,
    ):
        clock.pass_time(EVERY_S)
        held.let_go()
        assert ": keep-alive" not in list(response.iter_lines())


# ---- a writer that fails


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, Event], bool], str], None]:
    """Makes every stream fail at the events that a predicate names, after `first` was written of such an event."""

    def fail(is_wrong: Callable[[int, Event], bool], first: str) -> None:
        events = ChunkWriter.events

        def writing(writer: ChunkWriter, index: int, event: Any) -> Iterator[str]:
            if is_wrong(index, event):
                yield first
                raise RuntimeError("the writer fails")
            yield from events(writer, index, event)

        monkeypatch.setattr(ChunkWriter, "events", writing)
        monkeypatch.setattr(ChunkWriter, "tokens", lambda writer, events: None)

    return fail


def streamed(served: Any, **fields: Any) -> list[str]:
    body = {"stream": True, "max_tokens": 20, "ignore_eos": True, **fields}
    text: str = served.client.post("/v1/completions", json=body).text
    return text.split("\n\n")


@pytest.fixture
def one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each stream the events of its whole answer at once."""
    next_events = Generation.next

    async def all_events(generation: Generation) -> list[Indexed]:
        events: list[Indexed] = []
        while more := await next_events(generation):
            events += more
        return events

    monkeypatch.setattr(Generation, "next", all_events)


@pytest.mark.usefixtures("one_batch")
def test_a_writer_that_fails_does_not_lose_the_text_before_it(serve: Any, failing: Any) -> None:
    failing(lambda _index, event: isinstance(event, Finished), "lost")
    with serve() as served:
        *tokens, error, rest = streamed(served, prompt="x")
        assert tokens
        assert all('"finish_reason":null' in token for token in tokens)
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "step_failed"
        assert rest == ""
        served.settled()
        assert served.metric("rootstock_requests_total", route="/v1/completions", outcome="error") == 1


@pytest.mark.usefixtures("one_batch")
def test_text_before_a_scored_prompt_is_sent_once(serve: Any, failing: Any) -> None:
    failing(lambda index, event: index == 1 and isinstance(event, PromptScored), "x" * CHUNK_CHARACTERS)
    with serve() as served:
        events = streamed(served, prompt=["ab", "cd"], echo=True, logprobs=1)
        assert len(events) > 3
        assert len(set(events)) == len(events)
        [last] = [event for event in events if event.startswith("x" * CHUNK_CHARACTERS)]
        assert '"code":"step_failed"' in last
        served.settled()


@pytest.mark.parametrize("method", ["begin", "end"])
def test_a_stream_whose_writer_cannot_begin_or_end_ends_with_an_error(
    serve: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_arguments: Any) -> str:
        raise RuntimeError("the writer fails")

    monkeypatch.setattr(ChunkWriter, method, fail)
    with serve() as served:
        *_, error, rest = streamed(served, prompt="x")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "step_failed"
        assert rest == ""
        served.settled()
        outcomes = [
            served.metric("rootstock_requests_total", route="/v1/completions", outcome=outcome)
            for outcome in ("ok", "error")
        ]
        assert outcomes == [0, 1]
