"""A listening server: uvicorn, with a drain, and a shutdown that ends every open answer with an error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Protocol

import uvicorn
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from uvicorn.server import HANDLED_SIGNALS

from rootstock.errors import AddressUnavailable
from rootstock.server.http.connection import Connection, HttpLimits
from rootstock.server.http.drain import Drain

log = logging.getLogger(__name__)

GRACE_S = 10  # for answers that are being sent when the server stops
_OTHER_FILES = 256  # of the limit of open files: the model's, the disk tier's, connections that are refused

# On every answer, also on those that the connection itself sends. Pages of other origins cannot load an answer as an
# image, a script or the like. The CORS headers of allowed origins still let their pages read answers.
_HEADERS_OF_ALL = [("X-Content-Type-Options", "nosniff"), ("Cross-Origin-Resource-Policy", "same-origin")]


class Stoppable(Protocol):
    """An engine, or the models of a server."""

    def stop(self) -> None: ...


def listen(host: str, port: int) -> socket.socket:
    """Binds the address, before a model is loaded for minutes. Connections are refused until `serve`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
    except OSError as error:
        raise AddressUnavailable(host, port, error.strerror or str(error)) from error
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise AddressUnavailable(host, port, error.strerror or str(error)) from error
    return taken


def url_of(taken: socket.socket) -> str:
    host, port = taken.getsockname()[:2]
    return url_at(host, port)


def url_at(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: FastAPI,
    engine: Stoppable,
    taken: socket.socket,
    on_ready: Callable[[], None],
    on_stop: Callable[[], None] = lambda: None,
    max_connections: int = HttpLimits().connections,
    drain: Drain | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM. The engine stops first, so that open streams end with an error event.

    After SIGTERM the drain runs before that; a second signal ends it. `on_stop` is called before the engine stops.
    On the main thread both signals stay ignored afterwards, because the process is about to end. A SIGINT after the
    first signal, or after the drain, ends it at once.
    """
    host, port = taken.getsockname()[:2]
    limits = HttpLimits(connections=_allow_files(max_connections))
    try:
        _Server(app, engine, on_ready, limits, on_stop, drain).run([taken])
    except OSError as error:  # another process listened first
        raise AddressUnavailable(host, port, error.strerror or str(error)) from error


@contextlib.contextmanager
def running(
    app: FastAPI,
    engine: Stoppable,
    host: str = "127.0.0.1",
    port: int = 0,
    limits: HttpLimits | None = None,
) -> Iterator[str]:
    """Runs the same server on a thread for the length of the block, and yields its URL. Stops the engine, too."""
    taken = listen(host, port)
    url, ready = url_of(taken), threading.Event()
    server = _Server(app, engine, ready.set, limits or HttpLimits())
    thread = threading.Thread(target=server.run, args=([taken],), name="rootstock-http", daemon=True)
    thread.start()
    try:
        while not ready.wait(0.1):
            if not thread.is_alive():
                raise AddressUnavailable(host, port, "the server did not start")
        yield url
    finally:
        server.should_exit = True
        thread.join()


def _allow_files(connections: int) -> int:
    """Raises the limit of open files for `connections`. Returns the number of connections that it allows."""
    if sys.platform == "win32":
        return connections
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (OSError, ValueError):  # a system with a lower limit of its own
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = min(connections, max(1, soft - _OTHER_FILES))
    if found < connections:
        log.warning(
            "--max-connections is %d, but the limit of open files (ulimit -n) is %d: only %d are accepted",
            connections,
            soft,
            found,
        )
    return found


class _Server(uvicorn.Server):
    def __init__(
        self,
        app: FastAPI,
        engine: Stoppable,
        on_ready: Callable[[], None],
        limits: HttpLimits,
        on_stop: Callable[[], None] = lambda: None,
        drain: Drain | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, limits=limits),  # type: ignore[arg-type]  # it is only called
                ws="none",
                proxy_headers=False,  # no route asks for the client's address
                # Never uvloop: it holds the interpreter while it writes, and the engine's steps wait.
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                headers=_HEADERS_OF_ALL,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._engine = engine
        self._on_ready = on_ready
        self._on_stop = on_stop
        self._drain = drain or Drain()
        self._drains = False  # the first signal asks for it

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        waking = asyncio.create_task(_wake_for_signals())
        try:
            if self._drains:
                # Connections are still accepted, so that probes and clients learn that the server drains.
                await self._drain.run()
                self._drains = False
            self._on_stop()
            await run_in_threadpool(self._engine.stop)
            await super().shutdown(sockets)
        finally:
            waking.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drains:
            self._drain.end()
            return
        if not self.should_exit:
            self._drains = sig == signal.SIGTERM and self._drain.timeout_s > 0
        elif sig == signal.SIGINT:  # the first one's shutdown may take long
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals until the end of the process, so that a server that was asked to stop exits with 0.

        uvicorn would raise the signal again, and a further signal would end the process with another status.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self.should_exit else handler)


async def _wake_for_signals() -> None:
    """Wakes the event loop ten times a second, as uvicorn does while it serves.

    A signal's handler runs on the main thread when that wakes up. A signal that another thread receives, or that
    comes just before the loop begins to wait, does not wake it.
    """
    while True:
        await asyncio.sleep(0.1)
