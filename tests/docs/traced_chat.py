"""The way of a chat through the package: the functions that a server calls for it, in the order of their first call.

`bench/show/k1_way_of_a_request.py` counts them, and `test_architecture.py` compares their files with
docs/architecture.md. Run as a script, this file serves a model and asks it for chats.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from asyncio.selector_events import _SelectorSocketTransport as Transport
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import rootstock

PACKAGE = str(Path(rootstock.__file__).parent) + os.sep
SUBJECTS = ("mountains of Asia", "lakes of Africa", "cities of America")
WITHIN_S = 1_200.0  # a first start compiles loops


class Tracer:
    """Record of the calls of all threads that start while it is installed, between a request and its answer's end."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], None] = {}  # (file, name), in the order of first calls
        self.edges: Counter[str] = Counter()  # calls from one file to another, by caller and callee
        self._tracing = threading.Event()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        written = Transport.write

        def write(transport: Transport, data: bytes) -> None:
            # The trace ends with the answer's last byte: the server's later reports are on no client's way.
            written(transport, data)
            if data.endswith((b"}", b"0\r\n\r\n")):
                self._tracing.clear()

        Transport.write = write
        threading.setprofile(self.profile)
        try:
            yield
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
            Transport.write = written

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not self._tracing.is_set():
            return
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            name = code.co_filename[len(PACKAGE) :]
            self.functions.setdefault((name, code.co_qualname))
            by = frame.f_back and frame.f_back.f_code
            if by and by.co_filename.startswith(PACKAGE) and by.co_filename != code.co_filename:
                caller = f"{by.co_filename[len(PACKAGE) :]}:{by.co_qualname}"
                self.edges[f"{caller} -> {name}:{code.co_qualname}"] += 1

    def trace(self, ask: Callable[[], bytes]) -> bytes:
        """Calls `ask`, which asks for a chat and returns the answer, and records its way alone."""
        self.functions, self.edges = {}, Counter()
        self._tracing.set()
        answer = ask()
        self._tracing.clear()
        return answer


def traced(out: Path, request: Any, *options: str) -> list[dict[str, Any]]:
    """Serves a model and asks for a chat about each subject, after a first one of another text.

    Returns, for each, the functions as (file, name), and the calls between files by caller and callee.
    """
    subprocess.run(
        [sys.executable, __file__, str(out), json.dumps(request), *options],
        env=os.environ | {"PYTHONPATH": str(Path(PACKAGE).parent)},
        check=False,
        timeout=WITHIN_S,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    runs: list[dict[str, Any]] = json.loads(out.read_text())
    return runs


def files_of(functions: Iterator[tuple[str, str]]) -> list[str]:
    """Returns the files of functions, in the order of the functions."""
    return list(dict.fromkeys(file for file, _ in functions))


def chat(url: str, request: Any, text: str) -> bytes:
    body = request["body"] | {"messages": [{"role": "user", "content": text}]}
    headers = {"Content-Type": "application/json", **request["headers"]}
    asked = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=120) as answer:
        read: bytes = answer.read()
        return read


def write_ways(out: Path, url: str, request: Any, tracer: Tracer) -> None:
    """Waits for the server, traces the chats, writes their ways to a file and interrupts the process."""
    sys.setprofile(None)  # the client is not on the way
    for _ in range(3600):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=5).read()
            break
        time.sleep(0.25)
    chat(url, request, "Name the rivers of Europe and tell where each of them begins.")
    runs = []
    for subject in SUBJECTS:
        time.sleep(1.0)  # the reports of the request before
        text = f"Name the {subject} and tell how large each of them is."
        answered = b"finish_reason" in tracer.trace(lambda text=text: chat(url, request, text))
        runs.append({"functions": list(tracer.functions), "edges": tracer.edges, "answered": answered})
    out.write_text(json.dumps(runs))
    os.kill(os.getpid(), signal.SIGINT)


def serve_and_trace(out: Path, request: Any, options: list[str]) -> None:
    """Runs `serve` in the main thread, and a client in another one."""
    from rootstock.__main__ import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    tracer = Tracer()
    with tracer.installed():
        arguments = (out, f"http://127.0.0.1:{port}", request, tracer)
        threading.Thread(target=write_ways, args=arguments, daemon=True).start()
        sys.setprofile(tracer.profile)
        sys.argv = ["rootstock", "serve", *options, "--port", str(port), "--served-model-name", "m"]
        main()


if __name__ == "__main__":
    serve_and_trace(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
