"""Commands of `rootstock` for tests: in this process, or in a process of its own with an oracle as the model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from waiting import HANG_S

# `rootstock serve` with the oracle as the loaded model. Everything else is the real code.
ORACLE = """
import sys, time
from pathlib import Path
import rootstock.cli.main as cli
import rootstock.engine.tiers.connector
import rootstock.server.http.listen
from rootstock.config import CacheConfig
from rootstock.engine.build import assemble
from rootstock.testing.byte_tokenizer import PADDED_LOGITS, ByteTokenizer
from rootstock.testing.fake_runtime import FakeRuntime

def build_engine(model, cache, engine, tier, *, chat_template, progress, directory):
    progress("load", 0.0)
    progress("load", 1.0)
    runtime = FakeRuntime(
        PADDED_LOGITS, 1 << 17, eos_token_ids=(ByteTokenizer.END,), fault=lambda _: time.sleep(0.01)
    )
    return assemble(runtime, ByteTokenizer(), cache, engine, tier)

# On a busy machine, a load or the end of an answer may take any time.
rootstock.engine.tiers.connector.OVERDUE_LEAST_S = rootstock.server.http.listen.GRACE_S = 600
cli.build_engine = build_engine
cli.locate_model = lambda *_: Path('no directory')
cli.main()
"""


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


Run = Callable[..., Ran]


def refusal(rootstock: Run, *arguments: object) -> str:
    """Runs `rootstock serve`, which must refuse the arguments. Returns its one line of error."""
    done = rootstock("serve", "nowhere", *arguments)
    assert (done.status, done.out) == (2, "")
    [line] = done.err.splitlines()
    assert line.startswith("rootstock: ")
    return line


def run_process(*arguments: str, path: str | None = None) -> Ran:
    done = subprocess.run(
        [sys.executable, "-m", "rootstock", *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=None if path is None else {**os.environ, "PATH": path},
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def get(url: str, **options: Any) -> httpx.Response:
    return httpx.get(url, timeout=HANG_S, **options)


class Process:
    """A server that is ready, in a process of its own."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        """`arguments` are those of Python."""
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        found = re.search(r"http://[\d.]+:\d+", self.ready)
        assert found, (self.ready, self.process.communicate())
        self.url = found[0]

    def stop(self, sent: signal.Signals) -> tuple[int, str, str]:
        self.process.send_signal(sent)
        out, err = self.process.communicate(timeout=HANG_S)
        return self.process.returncode, out, err

    def stop_cleanly(self, sent: signal.Signals) -> None:
        returncode, out, err = self.stop(sent)
        assert (returncode, out) == (0, ""), err
        assert "Traceback" not in err


def serve_oracle(*arguments: str, before: str = "", env: dict[str, str] | None = None) -> Process:
    """Starts a server of the oracle. Its process runs the code of `before` first."""
    return Process("-c", before + ORACLE, "serve", "oracle", "--port", "0", *arguments, env=env)
