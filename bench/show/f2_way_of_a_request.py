"""F2: files and functions that one chat request touches, before issue 13 and now, and circles of imports.

`rootstock serve` on a small model answers one streamed chat request after a first one of another text. Counted
are the files and functions of the package that any thread calls between the request's first byte and the answer's
last. Compiled loops and calls inside libraries do not count.
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
from f1_prose import BEFORE, extract
from peers import free_port

from docs.test_imports import circles, imports

BAR_FILES = 30
WITHIN_S = 300.0

# Runs in a process of its own, with the package of either commit on its path.
TRACED = r"""
import json, os, signal, sys, threading, time, urllib.request
from pathlib import Path

import rootstock

package = str(Path(rootstock.__file__).parent) + os.sep
out, folder, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
tracing = threading.Event()
called, edges = set(), set()


def profile(frame, event, argument):
    if event != "call" or not tracing.is_set():
        return
    code = frame.f_code
    if code.co_filename.startswith(package) and not code.co_name.startswith("<"):
        name = code.co_filename[len(package):]
        called.add((name, code.co_qualname))
        caller = frame.f_back
        if caller is not None and caller.f_code.co_filename.startswith(package):
            edges.add((caller.f_code.co_filename[len(package):], name))


def ask(text):
    body = {"model": "m", "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read()


def client():
    threading.current_thread().name = "client"
    sys.setprofile(None)
    for _ in range(1200):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
            break
        except OSError:
            time.sleep(0.25)
    ask("Name the rivers of Europe and tell where each of them begins.")
    tracing.set()
    answer = ask("Name the mountains of Asia and tell how high each of them is.")
    tracing.clear()
    files = sorted({name for name, _ in called})
    Path(out).write_text(json.dumps({
        "files": files, "functions": len(called), "edges": len({edge for edge in edges if edge[0] != edge[1]}),
        "answered": b"[DONE]" in answer,
    }))
    os.kill(os.getpid(), signal.SIGINT)


threading.setprofile(profile)
sys.setprofile(profile)
threading.Thread(target=client, daemon=True).start()
sys.argv = ["rootstock", "serve", str(folder), "--port", str(port), "--served-model-name", "m"]
from rootstock.__main__ import main

main()
"""


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--before", default=BEFORE, help="a commit")
    parser.add_argument("--list", action="store_true", help="print the files of the request now")
    args = parser.parse_args()
    from rootstock.bench.tiny_model import TinyModelSpec, write_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        model.mkdir()
        write_tiny_model(TinyModelSpec(), model)
        old = Path(folder, "before")
        extract(args.before, old)
        before = traced(old / "src", model, Path(folder, "before.json"))
        now = traced(ROOT / "src", model, Path(folder, "now.json"))
    if args.list:
        print("\n".join(now["files"]))
    conclude(
        "F2",
        {
            "circles": len(circles(imports())),
            "files_before": len(before["files"]),
            "files": len(now["files"]),
            "functions_before": before["functions"],
            "functions": now["functions"],
            "calls_between_files_before": before["edges"],
            "calls_between_files": now["edges"],
            "answered": before["answered"] and now["answered"],
        },
        {"circles": exactly(0), "files": at_most(BAR_FILES), "answered": exactly(True)},
    )


def traced(source: Path, model: Path, out: Path) -> dict[str, Any]:
    """Serves the model with the package below `source`, and returns the traced request's counts."""
    subprocess.run(
        [sys.executable, "-c", TRACED, str(out), str(model), str(free_port())],
        env=os.environ | {"PYTHONPATH": str(source)},
        check=False,
        timeout=WITHIN_S,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    counts: dict[str, Any] = json.loads(out.read_text())
    return counts


if __name__ == "__main__":
    main()
