"""Fleets to compare, each of processes of its own: Rootstock's, Ray Serve's policies, nginx, and a single server.

Everything that a fleet starts ends with its block, and so does its shared store.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
from common import ROOT
from fleet_replicas import STEPS

from balancers import balancer_command
from rootstock.bench.serving import ServerProcess
from rootstock.bench.tiny_model import ensure_tiny_model
from shared_store import SharedStore
from waiting import unused_port, wait_until

HERE = Path(__file__).parent
REPLICAS = 3
ENDS_WITHIN_S = 60.0
MARK = "> "  # of a program's lines for its parent: libraries may print, too
LAST_LINES = 40
BARE = "single"  # one server, without a fleet
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it ends workers for the memory of others
    "OMP_NUM_THREADS": "1",
}
ENVIRONMENT = {
    **os.environ,
    **RAY,
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests", HERE))),
}


@dataclass(frozen=True, slots=True)
class Side:
    """A running fleet."""

    url: str
    restart: Callable[[], None]  # all replicas, one after the other
    steps: Path  # of the oracles, by process

    def replicas(self) -> set[int]:
        """Returns the processes that are oracles."""
        return {int(file.name) for file in self.steps.iterdir() if Path(f"/proc/{file.name}").exists()}

    def kill_busiest(self) -> None:
        """Kills the replica that has made the most steps."""
        busiest = max(self.replicas(), key=lambda process: (self.steps / str(process)).stat().st_size)
        os.kill(busiest, signal.SIGKILL)


@contextlib.contextmanager
def started(policy: str, runtime: str = "oracle", *, shared: bool = False) -> Iterator[Side]:
    """Starts a fleet, with a store that its replicas share if `shared`, and waits until it answers."""
    with ExitStack() as stack:
        # A short path: Ray's sockets are below it.
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True))
        )
        shutil.copytree(ensure_tiny_model(), model := folder / "model")
        remote_url = []
        if shared:
            store = stack.enter_context(SharedStore(folder))
            remote_url = [f"unix://{store.config.path}"]
        if policy == BARE and runtime == "torch":
            side = stack.enter_context(_torch_server(model))
        elif policy == BARE:
            side = Side(
                stack.enter_context(_oracle_server(folder, model, remote_url)), lambda: None, folder / STEPS
            )
        elif policy == "nginx":
            side = stack.enter_context(_behind_nginx(folder, model, remote_url))
        else:
            side = stack.enter_context(_on_ray(policy, runtime, folder, model, remote_url))
        wait_until(lambda: _answers(side.url))
        yield side


def _answers(url: str) -> bool:
    body = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    try:
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30.0).status_code == 200
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def _torch_server(model: Path) -> Iterator[Side]:
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--threads", "1"]
    with ServerProcess([str(model), *options]) as server:
        yield Side(server.url, lambda: None, model)


@contextlib.contextmanager
def _oracle_server(folder: Path, model: Path, remote_url: Sequence[str]) -> Iterator[str]:
    with _program(["fleet_replicas.py", str(model), *remote_url], folder) as process:
        yield _line_of(process)
        process.terminate()


@contextlib.contextmanager
def _behind_nginx(folder: Path, model: Path, remote_url: Sequence[str]) -> Iterator[Side]:
    with ExitStack() as stack:
        urls = [stack.enter_context(_oracle_server(folder, model, remote_url)) for _ in range(REPLICAS)]
        ports = {f"replica-{number}": int(url.rpartition(":")[2]) for number, url in enumerate(urls, 1)}
        with unused_port() as port:
            pass
        command = balancer_command("nginx", port, ports, folder)
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as nginx:
            stack.callback(nginx.wait)
            stack.callback(nginx.terminate)
            yield Side(f"http://127.0.0.1:{port}", lambda: None, folder / STEPS)
            nginx.terminate()


@contextlib.contextmanager
def _on_ray(
    policy: str, runtime: str, folder: Path, model: Path, remote_url: Sequence[str]
) -> Iterator[Side]:
    command = ["ray_fleet.py", policy, runtime, str(REPLICAS), str(folder), str(model), *remote_url]
    with _program(command, folder) as process:

        def restart() -> None:
            process.stdin.write("restart\n")
            process.stdin.flush()
            _line_of(process)

        yield Side(_line_of(process), restart, folder / STEPS)


@contextlib.contextmanager
def _program(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Starts a program of this directory. Its input ends with the block, and after a while so does the program.

    If the block fails, prints the end of what the program wrote: Ray says much about a replica that is killed.
    """
    script, *arguments = command
    with (
        tempfile.TemporaryFile("w+", dir=folder, errors="replace") as said,
        subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        ) as process,
    ):
        try:
            yield process
        except BaseException:
            said.seek(0)
            print("".join(deque(said, LAST_LINES)), flush=True)
            raise
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _line_of(process: subprocess.Popen[str]) -> str:
    """Returns the next line that a program prints for its parent, which begins with "> "."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            return line.removeprefix(MARK).strip()
    raise AssertionError("the program ended")
