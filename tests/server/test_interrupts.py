"""Ctrl-C and SIGTERM at known points of a real process: no traceback, and the right exit status."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.running import serve_oracle
from rootstock.tiers.disk.index import INDEX_NAME
from rootstock.tiers.disk.tier import DiskTier
from waiting import HANG_S

# Sends a signal from inside the process, at the import of a module, the opening of a file or the connection to a
# database: the speed of the machine does not matter.
HOOK = """
import os, signal, sys
event_, part = os.environ["INTERRUPT_AT"].split("=")
left = [int(os.environ["INTERRUPT_WITH"])]

def interrupt(event, args):
    if event == event_ and left and (args[0] == part or str(args[0]).endswith("/" + part)):
        os.kill(os.getpid(), left.pop())

sys.addaudithook(interrupt)
"""


@pytest.fixture(autouse=True)
def sigint_not_ignored() -> Iterator[None]:
    """Child processes inherit an ignored SIGINT, and shells ignore it in background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(
    folder: Path, at: str, sent: signal.Signals, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python with `arguments` and sends it a signal at one point."""
    (folder / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    hook = {"PYTHONPATH": path, "INTERRUPT_AT": at, "INTERRUPT_WITH": str(int(sent))}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **hook, "ROOTSTOCK_API_KEY": ""},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


@pytest.mark.parametrize(
    ("at", "sent"),
    [
        # while the command line is imported
        ("import=rootstock.cli.main", signal.SIGINT),
        ("import=numpy", signal.SIGINT),
        ("import=numpy", signal.SIGTERM),
        # in the command, before and while the model is loaded
        ("import=rootstock.server.http.listen", signal.SIGINT),
        ("import=torch", signal.SIGINT),
        ("open=model.safetensors", signal.SIGINT),
        ("open=model.safetensors", signal.SIGTERM),
        # when it is loaded
        ("import=rootstock.server.app", signal.SIGTERM),
    ],
)
def test_a_signal_before_the_server_is_ready_ends_the_process_by_that_signal(
    checkpoint: Path, tmp_path: Path, at: str, sent: signal.Signals
) -> None:
    options = ("--port", "0", "--device", "cpu", "--dtype", "float32", "--kv-budget", "1MiB")
    done = interrupted(tmp_path, at, sent, "-m", "rootstock", "serve", str(checkpoint), *options)
    # A shell shows 130 or 143, and scripts that run the server end with it.
    assert (done.returncode, done.stdout) == (-sent, ""), done.stderr
    stages = [line for line in done.stderr.splitlines() if line.startswith("rootstock: ")]
    assert done.stderr.splitlines() == stages


def test_an_interrupted_command_closes_its_files_and_exits_with_130(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path / "disk", 1 << 30)
    assert isinstance(tier, DiskTier)
    tier.close()
    at = f"sqlite3.connect={INDEX_NAME}"
    command = ("-m", "rootstock", "cache", "verify", str(tmp_path / "disk"))
    done = interrupted(tmp_path, at, signal.SIGINT, *command)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_process_that_inherits_an_ignored_sigint_goes_on(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"  # like nohup
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = ("-S", "-c", code, "-m", "rootstock", "--version")
    done = interrupted(tmp_path, "import=typer", signal.SIGINT, *command)
    assert (done.returncode, done.stderr) == (0, "")


def _read_all(terminal: int) -> bytes:
    """Reads until the other side is closed. The kernel passes each of its writes on when it has the time."""
    written = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed and nothing is left
        while piece := os.read(terminal, 1 << 16):
            written += piece
    return written


def test_an_interrupted_load_shows_the_terminals_cursor_again() -> None:
    code = (
        "import signal\n"
        "from rootstock.cli.output import LoadProgress\n"
        "with LoadProgress() as progress:\n"
        "    progress('load', 0.5)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
    )
    terminal, side = pty.openpty()
    try:
        env = {**os.environ, "TERM": "xterm"}
        done = subprocess.run([sys.executable, "-c", code], stderr=side, env=env, timeout=HANG_S)
        os.close(side)
        written = _read_all(terminal)
    finally:
        os.close(terminal)
    assert done.returncode == -signal.SIGINT
    assert b"\x1b[?25l" in written, "a bar hides the cursor"
    assert b"\x1b[?25h" in written.rpartition(b"\x1b[?25l")[2]
    assert b"Traceback" not in written


def serve_that_writes_forever(disk: Path, first: str) -> subprocess.Popen[str]:
    """Starts a server. As it stops, its write of the cache to disk executes the line `first` and does not end."""
    hanging = (
        "import signal, threading\n"
        "from rootstock.engine.tiers.connector import TierConnector\n"
        "def flush(self):\n"
        f"    {first}\n"
        "    threading.Event().wait()\n"
        "TierConnector.flush = flush\n"
    )
    options = ("--kv-budget", "1MiB", "--disk-dir", str(disk), "--disk-budget", "64MiB")
    return serve_oracle(*options, before=hanging).process


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_a_server_that_is_still_writing(tmp_path: Path, first: signal.Signals) -> None:
    process = serve_that_writes_forever(tmp_path / "disk", "print('writing', flush=True)")
    assert process.stdout is not None
    process.send_signal(first)
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, out) == (-signal.SIGINT, "")
    [line] = [line for line in err.splitlines() if "Loading" not in line]
    assert line == "rootstock: writing the cache to disk (Ctrl-C again: exit at once without it)"


def test_a_second_ctrl_c_that_another_thread_receives_ends_the_server(tmp_path: Path) -> None:
    """The system may give a signal to any thread. Python's handlers wait for the main thread to wake up."""
    interrupting = "signal.pthread_kill(threading.get_ident(), signal.SIGINT)"
    process = serve_that_writes_forever(tmp_path / "disk", interrupting)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=HANG_S)
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize("late", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_a_clean_stop_does_not_change_its_status(late: signal.Signals) -> None:
    at_exit = f"import atexit, os\natexit.register(lambda: os.kill(os.getpid(), {int(late)}))\n"
    returncode, out, err = serve_oracle("--kv-budget", "1MiB", before=at_exit).stop(signal.SIGTERM)
    assert (returncode, out) == (0, ""), err
    assert err == "rootstock: Loading the weights\n"
