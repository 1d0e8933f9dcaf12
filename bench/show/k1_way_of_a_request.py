"""K1: files, functions and calls between files that chat requests touch. `make check` runs it: no bar may be raised
without a reason.

`rootstock serve` on a small model of torch answers requests, each after a first one of another text. Counted are the
files and functions of the package that any thread calls between the request's first byte and the answer's last, and
the calls from one file to another. Compiled loops and calls inside libraries do not count.

    plain  a chat of 16 tokens, not streamed
    rich   a streamed chat with a tool, a time to live, a tenant and a salt, on a server whose K/V are int8

Threads that work by time add a few functions to some runs. Each request is asked three times: functions of every run
and the least number of calls are judged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, argument_parser, at_most, conclude, exactly
from peers import free_port

from docs.test_imports import circles, imports

# The goals of issue 28 are 50 files, 380 functions and 1,800 calls, and 70 files of the rich chat.
# Processors differ in a few kernels: the bars are some 3 % above the counts.
PLAIN_FILES, PLAIN_FUNCTIONS, PLAIN_CALLS = 77, 530, 3_700
RICH_FILES = 87
WITHIN_S = 1_200.0  # a first start compiles loops

# Runs in a process of its own: `serve` in the main thread, the client in another one.
TRACED = r"""
import asyncio.selector_events, json, os, signal, sys, threading, time, urllib.request
from pathlib import Path

import rootstock

package = str(Path(rootstock.__file__).parent) + os.sep
out, port, request, *options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), *sys.argv[4:]
tracing = threading.Event()
called, edges = set(), []


def profile(frame, event, argument):
    if event != "call" or not tracing.is_set():
        return
    code = frame.f_code
    if code.co_filename.startswith(package) and not code.co_name.startswith("<"):
        name = code.co_filename[len(package):]
        called.add((name, code.co_qualname))
        caller = frame.f_back
        if caller is not None and caller.f_code.co_filename.startswith(package):
            if caller.f_code.co_filename != code.co_filename:
                edges.append((caller.f_code.co_filename[len(package):], name))


def write(transport, data, written=asyncio.selector_events._SelectorSocketTransport.write):
    # The trace ends with the answer's last byte: what the server reports afterwards is on no client's way.
    written(transport, data)
    if data.endswith(b"}" if not request["body"].get("stream") else b"0\r\n\r\n"):
        tracing.clear()


def ask(text):
    body = request["body"] | {"messages": [{"role": "user", "content": text}]}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **request["headers"]},
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return answer.read()


def client():
    threading.current_thread().name = "client"
    sys.setprofile(None)
    for _ in range(3600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
            break
        except OSError:
            time.sleep(0.25)
    ask("Name the rivers of Europe and tell where each of them begins.")
    runs = []
    for subject in ("mountains of Asia", "lakes of Africa", "cities of America"):
        time.sleep(1.0)
        called.clear()
        edges.clear()
        tracing.set()
        answer = ask(f"Name the {subject} and tell how large each of them is.")
        tracing.clear()
        runs.append({"functions": sorted(called), "calls": len(edges), "answered": b"finish_reason" in answer})
    Path(out).write_text(json.dumps(runs))
    os.kill(os.getpid(), signal.SIGINT)


asyncio.selector_events._SelectorSocketTransport.write = write
threading.setprofile(profile)
sys.setprofile(profile)
threading.Thread(target=client, daemon=True).start()
sys.argv = ["rootstock", "serve", *options, "--port", str(port), "--served-model-name", "m"]
from rootstock.__main__ import main

main()
"""
TOOL = {
    "name": "weather",
    "description": "Returns the weather.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}
PLAIN: Any = {"body": {"model": "m", "max_tokens": 16, "ignore_eos": True}, "headers": {}}
RICH: Any = {
    "body": PLAIN["body"]
    | {
        "stream": True,
        "tools": [{"type": "function", "function": TOOL}],
        "cache_salt": "salt",
        "prompt_cache_retention": "24h",
    },
    "headers": {"X-Cache-Salt": "tenant"},
}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--list", action="store_true", help="print the functions of the plain chat by file")
    args = parser.parse_args()
    from rootstock.bench.tiny_model import TinyModelSpec, write_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        model.mkdir()
        write_tiny_model(TinyModelSpec(), model)
        plain = traced(Path(folder, "plain.json"), PLAIN, str(model), "--dtype", "float32")
        rich = traced(Path(folder, "rich.json"), RICH, str(model), "--kv-dtype", "int8")
    if args.list:
        for file in sorted(files_of(plain)):
            print(file, *(f"    {name}" for of, name in plain["functions"] if of == file), sep="\n")
    figures = {
        "circles": len(circles(imports())),
        "plain_files": len(files_of(plain)),
        "plain_functions": len(plain["functions"]),
        "plain_calls_between_files": plain["calls"],
        "rich_files": len(files_of(rich)),
        "rich_functions": len(rich["functions"]),
        "rich_calls_between_files": rich["calls"],
        "answered": plain["answered"] and rich["answered"],
    }
    bars = {
        "circles": exactly(0),
        "plain_files": at_most(PLAIN_FILES),
        "plain_functions": at_most(PLAIN_FUNCTIONS),
        "plain_calls_between_files": at_most(PLAIN_CALLS),
        "rich_files": at_most(RICH_FILES),
        "answered": exactly(True),
    }
    conclude("K1", figures, bars)


def files_of(run: dict[str, Any]) -> set[str]:
    return {file for file, _ in run["functions"]}


def traced(out: Path, request: Any, *options: str) -> dict[str, Any]:
    """Serves a model and returns what the request touched in every run, and its least number of calls."""
    port = str(free_port())
    subprocess.run(
        [sys.executable, "-c", TRACED, str(out), port, json.dumps(request), *options],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        check=False,
        timeout=WITHIN_S,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    runs: list[dict[str, Any]] = json.loads(out.read_text())
    in_each = set.intersection(*({(file, name) for file, name in run["functions"]} for run in runs))
    return {
        "functions": sorted(in_each),
        "calls": min(run["calls"] for run in runs),
        "answered": all(run["answered"] for run in runs),
    }


if __name__ == "__main__":
    main()
