"""One call → its HTTP response, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rootstock.engine.engine import Engine
from rootstock.engine.request import Aborted, Failed, Finished, PromptScored
from rootstock.errors import RootstockError, StepFailed
from rootstock.server.bridge import Bridge, Generation, Indexed, total_usage
from rootstock.server.connection import WriteChunk, write_chunk_of
from rootstock.server.errors import ClientGone, error_body
from rootstock.server.json_pieces import CHUNK_CHARACTERS, in_chunks, json_pieces
from rootstock.server.metrics import Metrics
from rootstock.server.openai.calls import Call
from rootstock.server.openai.responses import DONE, ChoiceHistory, ChunkWriter, error_event, usage_body
from rootstock.server.preparation_queue import PreparationQueue

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 0.02  # between two chunks of a large answer

SendText = Callable[[str], Awaitable[None]]
Stream = Callable[[SendText, WriteChunk | None], Awaitable[str]]  # answers the last text


class Answerer:
    def __init__(self, engine: Engine, metrics: Metrics, queue: PreparationQueue) -> None:
        self._engine = engine
        self._metrics = metrics
        self._queue = queue
        self._bridge: Bridge | None = None
        # One thread for all large answers: the engine then waits for the interpreter behind one of them at most.
        self._encoder = ThreadPoolExecutor(1, "rootstock-encoder")

    async def answer(self, make_call: Callable[[], Call], request: HttpRequest) -> Response:
        """`make_call` renders and tokenises, and runs on another thread. Raises, before anything was sent, what
        it and the engine refuse; and ClientGone."""
        route = request.url.path
        generation = Generation(self._engine, self._bridge_of_this_loop(), self._metrics)

        def begin() -> Call:
            call = make_call()
            call.refuse_too_many_logprobs(self._engine.context_limit)
            generation.submit(call.requests)
            return call

        try:
            try:
                call = await self._queue.run(request, begin)  # one way to another thread and back, not two
                if call.stream:
                    stream = partial(self._stream, call, generation, route)
                    return EventStream(generation, stream, call.headers)
                generation.watch(request.receive)
                answer = await self._whole(call, generation, route)
            except BaseException:
                generation.close()
                raise
            generation.close()
            return answer
        except RootstockError:
            self._metrics.answered(route, "error")
            raise
        except (ClientGone, asyncio.CancelledError):
            self._metrics.answered(route, "disconnected")
            raise

    async def _whole(self, call: Call, generation: Generation, route: str) -> Response:
        histories = [ChoiceHistory() for _ in call.requests]
        while events := await generation.next():
            for index, event in events:
                assert not isinstance(event, Failed | Aborted)
                histories[index].add(event)
        ends = [history.end for history in histories if history.end is not None]
        usage = total_usage(ends, call.choices_per_prompt)
        self._metrics.answered(route, "ok", usage)
        choices = (call.format.whole(index, history) for index, history in enumerate(histories))
        body = call.format.head | {"choices": choices, "usage": usage_body(usage)}
        chunks = in_chunks(json_pieces(body))
        first = next(chunks)
        if len(first) < CHUNK_CHARACTERS:  # it is the only one
            return Response(first, headers=call.headers, media_type="application/json")
        body_chunks = self._sent_in_chunks(first, chunks)
        return StreamingResponse(body_chunks, headers=call.headers, media_type="application/json")

    async def _sent_in_chunks(self, first: str, rest: Iterator[str]) -> AsyncIterator[str]:
        yield first
        async for chunk in self._encoded(rest):
            yield chunk

    async def _encoded(self, chunks: Iterator[str]) -> AsyncIterator[str]:
        """Takes one chunk after the other on the encoder's thread, so that the loop has turns between them."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while (chunk := await loop.run_in_executor(self._encoder, next, chunks, None)) is not None:
            if self._engine.health().running:
                # A forward needs the interpreter between any two of its kernels: half of the time is the engine's.
                await asyncio.sleep(min(loop.time() - began, _LONGEST_PAUSE_S))
            yield chunk
            began = loop.time()

    async def _stream(
        self, call: Call, generation: Generation, route: str, send: SendText, write: WriteChunk | None
    ) -> str:
        """Sends what happens as it happens; answers what is to be sent last.

        Most of what happens are tokens of nothing but text: with `write` those are written as they arrive, and this
        task is not woken for them. Raises what ends a stream without anybody left to be told.
        """
        writer = ChunkWriter(call.format, call.include_usage)
        if write is not None:

            def write_tokens(events: list[Indexed]) -> bool:
                text = writer.texts(events)
                return text is not None and (not text or write(text.encode()))

            generation.offer_to(write_tokens)
        ends: dict[int, Finished] = {}
        text = ""
        try:
            while events := await generation.next():
                for index, event in events:
                    assert not isinstance(event, Failed | Aborted)
                    pieces = writer.chunks(index, event)
                    if isinstance(event, PromptScored):
                        async for chunk in self._encoded(in_chunks(itertools.chain([text], pieces))):
                            generation.refuse_if_gone()
                            await send(chunk)
                        text = ""
                        continue
                    text += "".join(pieces)
                    if isinstance(event, Finished):
                        ends[index] = event
                if text and len(ends) < len(call.requests):  # the last goes out with the end of the stream
                    await send(text)
                    text = ""
        except (ClientGone, asyncio.CancelledError, OSError):
            self._metrics.answered(route, "disconnected")
            raise
        except Exception as error:
            # The status was sent long ago: the client learns of it in the stream, which ends without [DONE].
            self._metrics.answered(route, "error")
            if not isinstance(error, RootstockError):
                log.exception("a stream failed")
                error = StepFailed(error)
            return error_event(error_body(error))
        usage = total_usage([ends[index] for index in range(len(ends))], call.choices_per_prompt)
        self._metrics.answered(route, "ok", usage)
        return text + (writer.usage(usage) if call.include_usage else "") + DONE

    def _bridge_of_this_loop(self) -> Bridge:
        loop = asyncio.get_running_loop()
        if self._bridge is None or self._bridge.loop is not loop:
            if self._bridge is not None:
                self._bridge.close()
            self._bridge = Bridge(loop, self._engine)
        return self._bridge


class EventStream(Response):
    """Like StreamingResponse, but a client that goes away is noticed while there is nothing to send, too."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, stream: Stream, headers: Mapping[str, str]) -> None:
        self._generation = generation
        self._stream = stream
        self.status_code = 200
        self.background = None
        # Proxies such as nginx would otherwise collect the stream before they pass it on.
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
            pass  # nobody is left to be told
        finally:
            self._generation.close()
