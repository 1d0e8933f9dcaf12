"""Bodies that would block the server are refused before parsing, and long ones are prepared one after another."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from rootstock.config import EngineConfig, ServerConfig
from rootstock.errors import InvalidJson, JsonTooComplex, QueueFull
from rootstock.server.http import request_bodies
from rootstock.server.http.errors import ClientGone
from rootstock.server.http.request_bodies import LONG_BODY_BYTES, ParsingQueue, PreparationQueue, check_shape
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.text.constraints.turns import CompileTurns
from rootstock.text.limits import MAX_BODY_DEPTH, MAX_BODY_OBJECTS, MAX_BODY_VALUES
from rootstock.text.prompts.prompt_tokenizer import TokenizedPieces
from waiting import HANG_S

CHAT = "/v1/chat/completions"

values = st.recursive(
    st.text('a"\\[]{},é', max_size=6) | st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\{[,', max_size=3), inner, max_size=3)
    ),
    max_leaves=30,
)


def shape_of(value: Any) -> tuple[int, int, int]:
    """Counts the depth of a value, its lists, objects and separators, and its lists, objects and fields."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [shape_of(each) for each in (value.values() if isinstance(value, dict) else value)]
    separators, fields = max(0, len(value) - 1), len(value) if isinstance(value, dict) else 0
    return (
        1 + max((depth for depth, _, _ in inner), default=0),
        1 + separators + sum(count for _, count, _ in inner),
        1 + fields + sum(objects for _, _, objects in inner),
    )


@given(value=values, ascii=st.booleans(), slice_bytes=st.integers(1, 9))
def test_the_shape_of_a_body_is_found_without_parsing_it(value: Any, ascii: bool, slice_bytes: int) -> None:
    depth, count, objects = shape_of(value)
    # A body of fewer than two characters for each level of depth is not looked at.
    body = json.dumps(value, ensure_ascii=ascii).encode() + b" " * 2 * depth
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_bodies, "_SLICE_BYTES", slice_bytes)
        figures = {"MAX_BODY_DEPTH": depth, "MAX_BODY_VALUES": count, "MAX_BODY_OBJECTS": objects}
        for name, figure in figures.items():
            patch.setattr(request_bodies, name, figure)
            check_shape(body)
            if figure:
                patch.setattr(request_bodies, name, figure - 1)
                with pytest.raises(JsonTooComplex):
                    check_shape(body)
                patch.setattr(request_bodies, name, figure)


@given(
    before=st.integers(0, 700),
    digits=st.integers(1, 1_200),
    form=st.sampled_from(["{}", "-{}", "0.{}", "1e{}", '"{}"', '"\\"{}"', '[1,"x{}"]']),
    slice_bytes=st.sampled_from([1_024, 4_096]),
)
def test_numbers_of_many_digits_are_refused_and_texts_are_not(
    before: int, digits: int, form: str, slice_bytes: int
) -> None:
    value = form.format("7" * digits)
    body = (" " * before + '{"a":' + value + "}" + " " * 2 * MAX_BODY_DEPTH).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_bodies, "_SLICE_BYTES", slice_bytes)
        if '"' not in value and digits >= 512 + 2:
            with pytest.raises(JsonTooComplex, match="a number of more than 256 digits"):
                check_shape(body)
        elif '"' in value or digits < 256 - 2:
            check_shape(body)


def test_other_encodings_than_utf_8_are_refused() -> None:
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        with pytest.raises(InvalidJson, match="not in UTF-8"):
            check_shape(json.dumps([1, 2]).encode(encoding))


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("[" * 100_000, f"nested more than {MAX_BODY_DEPTH} deep"),
        ('{"messages": ' * 3_000, f"nested more than {MAX_BODY_DEPTH} deep"),
        ("[" + "1," * MAX_BODY_VALUES + "1]", f"more than {MAX_BODY_VALUES:,} values"),
        ("[" + "[]," * MAX_BODY_OBJECTS + "1]", f"more than {MAX_BODY_OBJECTS:,} lists, objects and fields"),
        (
            "{" + '"a":1,' * MAX_BODY_OBJECTS + '"b":1}',
            f"more than {MAX_BODY_OBJECTS:,} lists, objects and fields",
        ),
    ],
)
def test_a_body_with_deep_or_too_many_values_is_refused(served: Any, body: str, detail: str) -> None:
    explain = "/v1/cache/explain"
    for route in (CHAT, "/v1/completions", explain, f"{explain}/messages", f"{explain}/responses"):
        answer = served.client.post(route, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "json_too_complex"
        assert detail in answer.json()["error"]["message"]


class CountingTokenizer(ByteTokenizer):
    """A tokenizer that records the length of its longest text."""

    longest = 0

    def encode(self, text: str) -> Any:
        self.longest = max(self.longest, len(text))
        return super().encode(text)

    def encode_chat(self, rendered: str) -> Any:
        self.longest = max(self.longest, len(rendered))
        return super().encode_chat(rendered)


def test_a_text_that_cannot_fit_is_refused_without_being_tokenized(serve: Any) -> None:
    tokenizer = CountingTokenizer()
    text = "word " * 200_000
    with serve(tokenizer=tokenizer, context_limit=4096) as served:
        for route, body, param in (
            (CHAT, {"messages": [{"role": "user", "content": text}]}, "messages"),
            ("/v1/completions", {"prompt": text}, "prompt"),
            ("/v1/cache/explain", {"prompt": text}, "prompt"),
            ("/v1/cache/explain", {"messages": [{"role": "user", "content": text}]}, "messages"),
            ("/v1/cache/explain/messages", {"messages": [{"role": "user", "content": text}]}, "messages"),
            ("/v1/cache/explain/responses", {"input": text}, "input"),
        ):
            answer = served.client.post(route, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert error["code"] == "context_length_exceeded"
            assert "characters, which make more than 4,096 tokens" in error["message"]
    assert tokenizer.longest < 4096 * tokenizer.longest_token_chars


@pytest.mark.parametrize("parsed", [False, True])
def test_special_tokens_in_messages_are_control_tokens_only_by_the_operators_option(
    serve: Any, parsed: bool
) -> None:
    with serve(server=ServerConfig(parse_special_tokens=parsed)) as served:
        body = {"messages": [{"role": "user", "content": "<|end|>"}], "max_tokens": 1}
        usage = served.client.post(CHAT, json=body).json()["usage"]
        around = len(served.chat_prompt(""))
    assert usage["prompt_tokens"] == around + (1 if parsed else len("<|end|>"))


def test_more_choices_than_the_engine_can_hold_are_refused_for_good(serve: Any) -> None:
    with serve(EngineConfig(max_batch=4, max_queue=4)) as served:
        answer = served.complete(["a"] * 3, n=3, max_tokens=1)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        assert "at most 8, not 9" in answer.json()["error"]["message"]


def test_clearing_drops_the_texts_that_were_tokenized(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TokenizedPieces] = []
    make = TokenizedPieces.__init__

    def noted(self: TokenizedPieces, *arguments: Any) -> None:
        made.append(self)
        make(self, *arguments)

    monkeypatch.setattr(TokenizedPieces, "__init__", noted)
    with serve() as served:
        for salt in ("one", "two"):
            assert served.chat("a secret", max_tokens=1, cache_salt=salt).status_code == 200
        (pieces,) = made
        held = pieces.held_bytes
        assert served.client.post("/v1/cache/clear", json={"cache_salt": "one"}).status_code == 200
        assert 0 < pieces.held_bytes < held
        assert served.client.post("/v1/cache/clear", json={}).status_code == 200
        assert pieces.held_bytes == 0


# ---- the queue of preparations


def request_of(body: bytes, disconnected: Callable[[], bool] = lambda: False) -> Request:
    async def receive() -> dict[str, Any]:
        if disconnected():
            return {"type": "http.disconnect"}
        await asyncio.sleep(3600)
        raise AssertionError

    request = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)
    request._body = body
    return request


def test_long_bodies_are_prepared_one_after_another_and_short_ones_overtake_them() -> None:
    queue = PreparationQueue(max_batch=4, max_queue=4)
    queue._long.total_tokens = 1  # as on two cores
    release = threading.Event()
    running, most = 0, 0
    lock = threading.Lock()

    def prepare_long() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        assert release.wait(HANG_S)
        with lock:
            running -= 1

    async def scenario() -> None:
        long = request_of(b" " * LONG_BODY_BYTES)
        waiting = [asyncio.ensure_future(queue.run(long, prepare_long)) for _ in range(3)]
        await asyncio.sleep(0)
        assert await queue.run(request_of(b"short"), lambda: "passed") == "passed"
        assert not any(each.done() for each in waiting)
        release.set()
        await asyncio.gather(*waiting)

    asyncio.run(scenario())
    assert most == 1


def test_the_request_of_a_client_that_left_the_queue_is_not_prepared() -> None:
    queue = PreparationQueue(max_batch=4, max_queue=4)

    async def scenario() -> None:
        with pytest.raises(ClientGone):
            await queue.run(request_of(b"{}", lambda: True), lambda: pytest.fail("it was prepared"))

    asyncio.run(scenario())


def test_no_more_requests_wait_than_the_engine_would_queue() -> None:
    queue = PreparationQueue(max_batch=1, max_queue=1)
    queue._long.total_tokens = 1
    release = threading.Event()

    async def scenario() -> None:
        long = request_of(b" " * LONG_BODY_BYTES)
        waiting = [asyncio.ensure_future(queue.run(long, lambda: release.wait(HANG_S))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await queue.run(long, lambda: None)
        release.set()
        await asyncio.gather(*waiting)
        assert await queue.run(long, lambda: "later") == "later"

    asyncio.run(scenario())


def test_a_short_body_that_waits_for_a_compile_lets_another_one_be_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_bodies, "_short_work", threading.Semaphore(1))
    queue = PreparationQueue(max_batch=4, max_queue=4)
    compiles, works, release = threading.Event(), threading.Event(), threading.Event()

    def compile_first() -> str:
        with CompileTurns(1).of("tenant", 1):
            compiles.set()
            assert release.wait(HANG_S)
        return "compiled"

    def work() -> str:
        works.set()
        assert release.wait(HANG_S)
        return "prepared"

    async def scenario() -> None:
        first = asyncio.ensure_future(queue.run(request_of(b"{}"), compile_first))
        assert await asyncio.to_thread(compiles.wait, HANG_S)
        second = asyncio.ensure_future(queue.run(request_of(b"{}"), work))
        assert await asyncio.to_thread(works.wait, HANG_S)
        third = asyncio.ensure_future(queue.run(request_of(b"{}"), lambda: works.is_set()))
        while queue._waiting[queue._short] != 3:
            await asyncio.sleep(0)
        assert not third.done()  # one place, and the second one has it
        release.set()
        assert await asyncio.gather(first, second, third) == ["compiled", "prepared", True]

    asyncio.run(scenario())


def test_long_bodies_are_parsed_one_at_a_time_the_shortest_first_and_with_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[int] = []

    async def scenario() -> None:
        queue = ParsingQueue.of_loop()
        assert queue is ParsingQueue.of_loop()
        pauses: list[float] = []
        loop = asyncio.get_running_loop()

        def call_later(delay: float, begin: Callable[[], None]) -> asyncio.Handle:
            pauses.append(delay)
            return loop.call_soon(begin)

        monkeypatch.setattr(loop, "call_later", call_later)

        async def parse(size: int) -> None:
            await queue.wait(size)
            order.append(size)
            queue.release(float(size))

        await queue.wait(1)
        waiting = [asyncio.ensure_future(parse(size)) for size in (300, 100, 200, 100)]
        gone = asyncio.ensure_future(parse(50))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        assert order == []
        queue.release_after_this_task()
        await asyncio.gather(*waiting)
        assert order == [100, 100, 200, 300]
        assert pauses[1:] == [300, 300, 600, 900]
        assert pauses[0] >= 0
        await queue.wait(1)  # nobody holds it any more

    asyncio.run(scenario())


def test_a_turn_that_comes_to_a_request_in_the_moment_of_its_end_goes_to_the_next_one() -> None:
    async def scenario() -> None:
        queue = ParsingQueue.of_loop()
        await queue.wait(1)
        gone, next_one = (asyncio.ensure_future(queue.wait(size)) for size in (1, 2))
        await asyncio.sleep(0)
        queue._begin_next()
        gone.cancel()
        await asyncio.wait_for(next_one, HANG_S)
        assert gone.cancelled()

    asyncio.run(scenario())


@given(
    value=st.recursive(
        st.text(max_size=4)
        | st.integers()
        | st.floats()
        | st.none()
        | st.booleans()
        | st.sampled_from(["\ud800", "\udc00a", "\x00"]),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=4),
        max_leaves=30,
    ),
    mark=st.sampled_from([b"", "\ufeff".encode()]),
)
def test_a_long_body_has_the_values_of_the_standard_parser(value: Any, mark: bytes) -> None:
    body = mark + json.dumps(value).encode()
    found = asyncio.run(request_bodies._LongRequest(request_of(b""), body).json())
    assert json.dumps(found) == json.dumps(value)  # also equal for NaN, and not for 1 and 1.0


def test_a_long_body_that_is_no_json_is_an_error_of_the_standard_parser() -> None:
    with pytest.raises(json.JSONDecodeError, match="line 1 column 4"):
        asyncio.run(request_bodies._LongRequest(request_of(b""), b"[1,}").json())
