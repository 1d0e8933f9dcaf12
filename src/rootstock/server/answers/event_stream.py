"""Answers to calls: the engine's events as an HTTP response, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rootstock.engine.request import Aborted, Failed, Finished, PromptScored, Usage
from rootstock.errors import RootstockError, StepFailed
from rootstock.pipeline.model import ServedModel
from rootstock.server.access.guard import meter_of
from rootstock.server.answers.generation import Bridge, Generation, Indexed, total_usage
from rootstock.server.answers.keep_alive import KeepAlive, SendText
from rootstock.server.http.connection import WriteChunk, write_chunk_of
from rootstock.server.http.errors import ClientGone
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.observe.metrics import Metrics
from rootstock.server.request_info import MAX_NAME_CHARS, RequestInfo, info_of
from rootstock.server.wire.api_call import ApiCall, ChoiceHistory, Json
from rootstock.server.wire.json_pieces import CHUNK_CHARACTERS, in_chunks, json_pieces

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 0.02  # between two chunks of a large answer
# Header of an answer: how many requests of its tenant are held for their session's place in memory as it begins.
HELD_HEADER = "X-Rootstock-Held-Requests"
LONG_ANSWER_CHARS = 2_048  # from this length on, an answer is not encoded on the event loop

Stream = Callable[[SendText, WriteChunk | None], Awaitable[str]]  # returns the last text


class Answerer:
    """Answerer of calls: prepares a call, submits its requests to the engine, and makes the response."""

    def __init__(self, models: ModelRegistry, metrics: Metrics, keep_alive_s: float = 0.0) -> None:
        self._models = models
        self._metrics = metrics
        self._keep_alive_s = keep_alive_s  # 0: streams have no keep-alives
        self._bridge: Bridge | None = None
        # One thread for all large answers: the engine then waits for the interpreter behind one of them at most.
        self._encoder = ThreadPoolExecutor(1, "rootstock-encoder")

    async def answer(
        self,
        asked: str | None,
        make_call: Callable[[ServedModel], ApiCall],
        request: HttpRequest,
    ) -> Response:
        """Answers the call that `make_call` renders and tokenizes for the asked model, on another thread.

        Raises ModelNotFound, the errors of `make_call` and of the engine before the response begins, and ClientGone.
        """
        info, meter = info_of(request), meter_of(request)
        generation = Generation(self._bridge_of_this_loop(), meter)
        info.measured = generation.measured

        def begin(model: ServedModel) -> ApiCall:
            call = make_call(model)
            call.refuse_too_many_logprobs(model.context_limit)
            if meter is not None:
                meter.begin([len(each.tokens) for each in call.requests], call.choices_per_prompt)
            if call.next_turn is not None:
                generation.said = []
            info.call, info.submitted_ns = call, time.time_ns()
            generation.submit(model.engine, [replace(one, http_id=info.id) for one in call.requests])
            return call

        try:
            try:
                use = await self._models.use(asked, request)
                generation.on_close(use.end)
                info.model = use.model.parent or use.model.name
                info.asked_model = (asked or "")[:MAX_NAME_CHARS]
                # One switch to another thread, not two.
                call = await self._models.queue.run(request, lambda: begin(use.model))
                held = use.model.engine.held_before(call.requests[0])
                headers = {**call.headers, HELD_HEADER: str(held)} if held else call.headers
                if call.stream:
                    stream = partial(self._stream, call, generation, info)
                    return EventStream(generation, stream, headers)
                generation.watch(request.receive)
                answer = await self._whole(call, generation, info, headers)
            except BaseException:
                generation.close()
                raise
            generation.close()
            return answer
        except RootstockError as error:
            info.failed(error)
            self._metrics.refused(error)
            raise
        except (ClientGone, asyncio.CancelledError):
            info.disconnected()
            raise

    async def _whole(
        self, call: ApiCall, generation: Generation, info: RequestInfo, headers: Mapping[str, str]
    ) -> Response:
        histories = [ChoiceHistory() for _ in call.requests]
        while events := await generation.next():
            for index, event in events:
                assert not isinstance(event, Failed | Aborted)
                histories[index].add(event)
        ends = [history.end for history in histories if history.end is not None]
        usage = total_usage(ends, call.choices_per_prompt)
        _answered(info, call, generation, ends, usage)

        # Parsing the calls of a long answer takes up to a microsecond per character.
        is_long = sum(history.chars for history in histories) >= LONG_ANSWER_CHARS
        return await self.respond(
            lambda: call.format.whole(histories, usage), is_long=is_long, headers=headers
        )

    async def respond(
        self, make_body: Callable[[], Json], *, is_long: bool, headers: Mapping[str, str]
    ) -> Response:
        """Encodes a body as a whole, or in chunks. The event loop encodes the first chunk of one that is not long."""

        def begin() -> tuple[str, Iterator[str]]:
            chunks = in_chunks(json_pieces(make_body()))
            return next(chunks), chunks

        if is_long:
            first, chunks = await asyncio.get_running_loop().run_in_executor(self._encoder, begin)
        else:
            first, chunks = begin()
        if len(first) < CHUNK_CHARACTERS:  # it is the only one
            return Response(first, headers=headers, media_type="application/json")
        body_chunks = self._sent_in_chunks(first, chunks)
        return StreamingResponse(body_chunks, headers=headers, media_type="application/json")

    async def _sent_in_chunks(self, first: str, rest: Iterator[str]) -> AsyncIterator[str]:
        yield first
        async for chunk in self._encoded(rest):
            yield chunk

    async def _encoded(self, chunks: Iterator[str]) -> AsyncIterator[str]:
        """Yields the chunks, each encoded on the encoder's thread, so that the loop has turns between them."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while (chunk := await loop.run_in_executor(self._encoder, next, chunks, None)) is not None:
            if self._models.computes:
                # Leaves half of the time to the engine: a forward needs the interpreter between its kernels.
                await asyncio.sleep(min(loop.time() - began, _LONGEST_PAUSE_S))
            yield chunk
            began = loop.time()

    async def _stream(
        self,
        call: ApiCall,
        generation: Generation,
        info: RequestInfo,
        send: SendText,
        write: WriteChunk | None,
    ) -> str:
        """Sends events as they arrive, and returns the last text of the stream.

        Most events are tokens with text alone: with `write` they are written as they arrive, and this task sleeps on.
        Raises ClientGone, CancelledError and OSError, after which no client is left.
        """
        writer = call.format.stream()
        if self._keep_alive_s > 0:
            keep_alive = KeepAlive(send, write, self._keep_alive_s, writer.keep_alive)
            generation.keep_alive(keep_alive)
            send, write = keep_alive.send, keep_alive.write
        unsent: list[
            tuple[int, str]
        ] = []  # how many of the next events, and their text, which was not written
        if write is not None:

            def write_tokens(events: list[Indexed]) -> bool:
                text = writer.tokens(events)
                if text is None:
                    return False
                if not text or write(text.encode()):
                    return True
                unsent.append((len(events), text))
                return False

            generation.offer_to(write_tokens)
        ends: dict[int, Finished] = {}
        text = ""
        try:
            if begun := writer.begin():
                await send(begun)
            while events := await generation.next():
                skipped = 0
                if unsent:
                    skipped, text = unsent.pop()
                for index, event in events[skipped:]:
                    assert not isinstance(event, Failed | Aborted)
                    pieces = writer.events(index, event)
                    if isinstance(event, PromptScored):
                        before, text = text, ""  # an error must not send it again
                        async for chunk in self._encoded(in_chunks(itertools.chain([before], pieces))):
                            generation.refuse_if_gone()
                            await send(chunk)
                        continue
                    text += "".join(pieces)
                    if isinstance(event, Finished):
                        ends[index] = event
                if text and len(ends) < len(call.requests):  # the last text goes with the end of the stream
                    ready, text = text, ""
                    await send(ready)
            in_order = [ends[index] for index in range(len(ends))]
            usage = total_usage(in_order, call.choices_per_prompt)
            last = text + writer.end(in_order, usage)
        except (ClientGone, asyncio.CancelledError, OSError):
            info.disconnected()
            raise
        except Exception as error:
            # The status has been sent: the error goes into the stream, after the text that precedes it.
            if not isinstance(error, RootstockError):
                log.exception("a stream failed")
                error = StepFailed(error)
            info.failed(error)
            return text + writer.error(error)
        _answered(info, call, generation, in_order, usage)
        return last

    def _bridge_of_this_loop(self) -> Bridge:
        loop = asyncio.get_running_loop()
        if self._bridge is None or self._bridge.loop is not loop:
            if self._bridge is not None:
                self._bridge.close()
            self._bridge = Bridge(loop)
        return self._bridge


def _answered(
    info: RequestInfo, call: ApiCall, generation: Generation, ends: Sequence[Finished], usage: Usage
) -> None:
    """Notes an answer. The reports about it are made after the response."""
    info.outcome, info.ends, info.usage = "ok", tuple(ends), usage
    if call.next_turn is not None and generation.said is not None:
        info.next_turn = partial(call.next_turn, generation.said)


class EventStream(Response):
    """A streaming response that notices the client's leaving even while there is nothing to send."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, stream: Stream, headers: Mapping[str, str]) -> None:
        self._generation = generation
        self._stream = stream
        self.status_code = 200
        self.background = None
        # Without these headers, proxies such as nginx buffer the stream.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._generation.watch(receive)
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)

            def send_text(text: str) -> Awaitable[None]:
                return send({"type": "http.response.body", "body": text.encode(), "more_body": True})

            last = await self._stream(send_text, write_chunk_of(scope))
            await send({"type": "http.response.body", "body": last.encode(), "more_body": False})
        except (ClientGone, OSError):
            pass  # no client is left
        finally:
            self._generation.close()
