"""Tokens bypass the task that answers and go to the connection as they arrive: the bytes of the stream stay the same,
and so does the handling of clients that read slowly or disconnect."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rootstock.engine.engine import Engine
from rootstock.engine.request import Finished, RequestId, TokenEvent, Usage
from rootstock.runtime.base import Batch
from rootstock.server.answers import event_stream
from rootstock.server.answers.generation import Bridge, Generation, Indexed, Mailbox, NoEvents, Shortcut
from rootstock.server.app import create_app
from rootstock.server.http.connection import Connection, write_chunk_of
from rootstock.server.http.errors import ClientGone
from server.asgi import ask
from server.raw_http import RawClient, dechunked, post
from waiting import HANG_S, wait_for

ID = RequestId("r")
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a stream", "max_tokens": 60}),
    ("/v1/completions", {"prompt": "of two", "max_tokens": 30, "n": 2, "temperature": 1, "seed": 3}),
    ("/v1/completions", {"prompt": "with scores", "max_tokens": 9, "logprobs": 1, "echo": True}),
    ("/v1/completions", {"prompt": "stopped", "max_tokens": 60, "stop": ["zz", "qq"]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 60}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "usage"}],
            "max_tokens": 40,
            "stream_options": {"include_usage": True},
        },
    ),
]


def token(number: int) -> TokenEvent:
    return TokenEvent(ID, number, f"{number} ")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The chunks that bypassed the tasks."""
    chunks: list[bytes] = []
    write = Connection._write_chunk

    def noted(self: Connection, data: bytes) -> bool:
        if taken := write(self, data):
            chunks.append(data)
        return taken

    monkeypatch.setattr(Connection, "_write_chunk", noted)
    return chunks


@pytest.fixture
def in_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Batch], None]:
    """A fault by which each forward waits until the event loop has handled all events of the forward before.

    The first forward waits for the stream. On a busy machine an engine could otherwise end before the loop's turn.
    """
    loops: list[asyncio.AbstractEventLoop] = []
    offered = threading.Event()
    offer_to = Generation.offer_to

    class NotedBridge(Bridge):
        def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
            super().__init__(loop)
            loops.append(loop)

    def noted(self: Generation, shortcut: Shortcut) -> None:
        offer_to(self, shortcut)
        offered.set()

    def wait(_batch: Batch) -> None:
        wait_for(offered)
        asyncio.run_coroutine_threadsafe(turns(), loops[-1]).result(HANG_S)

    monkeypatch.setattr(event_stream, "Bridge", NotedBridge)
    monkeypatch.setattr(Generation, "offer_to", noted)
    return wait


# ---- bytes that a client receives


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_a_stream_has_the_same_bytes_with_and_without_the_shortcut(
    serve: Any, written: list[bytes], in_step: Callable[[Batch], None], path: str, body: dict[str, Any]
) -> None:
    body = {"temperature": 0, "ignore_eos": True, **body, "stream": True}
    with serve(fault=in_step) as served:
        with served.client.stream("POST", path, json=body) as response:
            over_a_socket = b"".join(response.iter_raw())
        assert bool(written) == ("logprobs" not in body)
        count = len(written)
        made = served.assembly
        app = create_app(made)
        by_tasks = asyncio.run(ask(app, path, body))  # from a server without the extension
        assert len(written) == count
        assert told(over_a_socket) == told(by_tasks)


def told(stream: bytes) -> list[Any]:
    """Returns the events without the parts that differ between two requests: id, time, and sharing of chunks."""
    events = stream.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    for chunk in chunks:
        assert list(chunk)[:4] == ["id", "object", "created", "model"]
        del chunk["id"], chunk["created"]
        if chunk.get("usage"):
            del chunk["usage"]["prompt_tokens_details"]  # the second has its prompt in the cache
    return sorted(chunks, key=lambda chunk: chunk["choices"][0]["index"] if chunk["choices"] else 99)


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Connection.connection_made

    def made_small(self: Connection, transport: Any) -> None:
        # Otherwise the kernel buffers as much as it likes.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", made_small)


def test_a_client_that_reads_slowly_gets_everything_and_delays_no_other(
    serve: Any, written: list[bytes], in_step: Callable[[Batch], None], small_buffers: None
) -> None:
    fields = {"temperature": 0, "ignore_eos": True, "max_tokens": 300}
    with serve(fault=in_step) as served:
        with RawClient(served, receive_buffer_bytes=4096) as slow:
            body = {"prompt": "slow", "stream": True, "n": 4, **fields}
            slow.send(post("/v1/completions", body, "connection: close"))
            # It is computed to its end without a reader, and other clients are answered meanwhile.
            other = served.complete("other", max_tokens=5, temperature=0, ignore_eos=True)
            assert other.json()["usage"]["completion_tokens"] == 5
            served.settled()
            count = len(written)
            received = slow.everything()
        # From some step on all chunks went through the task; before, a chunk of 4 tokens for each step bypassed it.
        assert 0 < count < 300 - 100
        text = dechunked(received.partition(b"\r\n\r\n")[2])
        assert text.endswith(b"data: [DONE]\n\n")
        chunks = [json.loads(line[6:]) for line in text.decode().split("\n\n")[:-2]]
        expected = served.complete("slow", **fields).json()
        for index in range(4):
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert "".join(choice["text"] for choice in mine) == expected["choices"][0]["text"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_client_of_an_agents_api_that_reads_slowly_gets_everything(
    serve: Any,
    written: list[bytes],
    in_step: Callable[[Batch], None],
    small_buffers: None,
    path: str,
) -> None:
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    if path == "/v1/messages":
        body |= {"messages": [{"role": "user", "content": "slow"}], "max_tokens": 300}
    else:
        body |= {"input": "slow", "max_output_tokens": 300}
    with serve(fault=in_step) as served:
        with RawClient(served, receive_buffer_bytes=4096) as slow:
            slow.send(post(path, body | {"stream": True}, "connection: close"))
            assert served.complete("other", max_tokens=5, ignore_eos=True).status_code == 200
            served.settled()
            count = len(written)
            received = slow.everything()
        assert 0 < count < 300 - 100
        events = dechunked(received.partition(b"\r\n\r\n")[2]).decode().split("\n\n")
        assert events.pop() == ""
        if path == "/v1/responses":
            assert events.pop() == "data: [DONE]"
        told = [json.loads(event.partition("data: ")[2]) for event in events]
        assert told[-1]["type"] in ("message_stop", "response.incomplete")
        whole = served.client.post(path, json=body).json()
        if path == "/v1/messages":
            deltas = [one["delta"] for one in told if one["type"] == "content_block_delta"]
            assert "".join(delta["text"] for delta in deltas) == whole["content"][0]["text"]
        else:
            assert [one["sequence_number"] for one in told] == list(range(len(told)))
            shown = "".join(one["delta"] for one in told if one["type"] == "response.output_text.delta")
            assert shown == whole["output"][0]["content"][0]["text"]


def test_a_client_of_http_1_0_gets_no_chunks(serve: Any, written: list[bytes]) -> None:
    body = {"prompt": "old", "stream": True, "max_tokens": 30, "ignore_eos": True}
    with serve() as served, RawClient(served) as old:
        old.send(post("/v1/completions", body, version="1.0"))
        received = old.everything()
    assert not written
    assert received.partition(b"\r\n\r\n")[2].count(b"data: ") > 3


# ---- events taken by the shortcut or by the task

END = Finished(ID, "length", Usage(1, 0, 2))


class Reader:
    """A mailbox whose shortcut takes tokens alone. It records the offered events, and those that its task took."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.offered: list[list[Indexed]] = []
        self.taken: list[list[Indexed] | NoEvents] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.mailbox.offer_to(self._shortcut)

    def _shortcut(self, events: list[Indexed]) -> bool:
        self.offered.append(events)
        return all(isinstance(event, TokenEvent) for _, event in events)

    async def read(self) -> None:
        while True:
            self.taken.append(await self.mailbox.take())
            await self.may_go_on.wait()


def beside_a_reader(scenario: Callable[[Reader], Awaitable[None]]) -> None:
    async def run() -> None:
        reader = Reader()
        task = asyncio.create_task(reader.read())
        await asyncio.sleep(0)
        await scenario(reader)
        task.cancel()

    asyncio.run(run())


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_waiting_task_is_not_woken_for_events_that_the_shortcut_takes() -> None:
    async def scenario(reader: Reader) -> None:
        steps = [[(0, token(step)), (1, token(step))] for step in range(3)]
        for step in steps:
            reader.mailbox.put(list(step))
        await turns()
        assert reader.offered == steps
        assert reader.taken == []

    beside_a_reader(scenario)


def test_the_shortcut_is_offered_no_events_while_others_wait_for_the_task() -> None:
    async def scenario(reader: Reader) -> None:
        reader.mailbox.put([(0, token(0)), (0, END)])  # the shortcut takes all or none: these go to the task
        reader.mailbox.put([(1, token(1))])  # and so do all events until it runs
        assert len(reader.offered) == 1
        await turns()
        assert reader.taken == [[(0, token(0)), (0, END), (1, token(1))]]
        reader.mailbox.put([(1, token(2))])
        assert reader.offered[1:] == [[(1, token(2))]]

    beside_a_reader(scenario)


def test_the_shortcut_is_offered_no_events_while_the_task_is_busy() -> None:
    async def scenario(reader: Reader) -> None:
        reader.may_go_on.clear()
        reader.mailbox.put([(0, END)])
        await turns()
        reader.mailbox.put([(1, token(0))])
        reader.may_go_on.set()
        await turns()
        assert reader.taken == [[(0, END)], [(1, token(0))]]
        assert reader.offered == [[(0, END)]]

    beside_a_reader(scenario)


def test_the_shortcut_is_offered_no_events_of_a_client_that_hung_up() -> None:
    async def run() -> None:
        reader = Reader()
        task = asyncio.create_task(reader.mailbox.take())
        await asyncio.sleep(0)
        reader.mailbox.hang_up()
        reader.mailbox.put([(0, token(0))])
        assert await task == [(0, token(0))]
        assert reader.offered == []
        with pytest.raises(ClientGone):
            await reader.mailbox.take()

    asyncio.run(run())


@pytest.mark.parametrize("fails", [False, True])
def test_each_token_is_timed_once_by_the_shortcut_or_the_task(fails: bool) -> None:
    """Events at which a shortcut raises go to the task."""

    async def run() -> None:
        generation = Generation(None)  # type: ignore[arg-type]
        generation._open.add(0)

        def take(events: list[Indexed]) -> bool:
            if fails:
                raise ValueError("no text")
            return events != [(0, token(1))]

        generation.offer_to(take)
        task = asyncio.ensure_future(generation.next())
        await asyncio.sleep(0)
        generation._mailbox.put([(0, token(0))])
        generation._mailbox.put([(0, token(1))])
        assert await task == ([(0, token(0)), (0, token(1))] if fails else [(0, token(1))])
        assert generation.measured.token_requests.tolist() == [0, 0]

    asyncio.run(run())


class _Engine:
    def __getattr__(self, name: str) -> Any:
        return getattr(Engine, name)


# ---- the connection


class _Transport:
    def __init__(self) -> None:
        self.written = b""
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.written += data


class _Flow:
    write_paused = False


def test_a_chunk_is_not_written_to_a_client_that_is_slow_or_gone() -> None:
    connection = Connection.__new__(Connection)
    transport, flow = _Transport(), _Flow()
    connection.transport, connection.flow = transport, flow  # type: ignore[assignment]
    assert connection._write_chunk(b"data: 0123456789\n\n")
    assert transport.written == b"12\r\ndata: 0123456789\n\n\r\n"
    flow.write_paused = True
    assert not connection._write_chunk(b"x")
    flow.write_paused, transport.closing = False, True
    assert not connection._write_chunk(b"x")
    assert transport.written.endswith(b"9\n\n\r\n")


def test_there_is_no_shortcut_on_other_servers_and_in_http_1_0() -> None:
    extensions = {"rootstock.write_chunk": lambda data: True}
    assert write_chunk_of({"type": "http", "http_version": "1.1"}) is None
    assert write_chunk_of({"type": "http", "http_version": "1.0", "extensions": extensions}) is None
    assert write_chunk_of({"type": "http", "http_version": "1.1", "extensions": extensions}) is not None
