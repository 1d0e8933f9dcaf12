"""Servers to compare or to measure, each in a process of its own for the duration of a `with` block.

The peers are no dependencies: options name the interpreters that have them, and a missing one is reported.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx

ENDS_WITHIN_S = 15.0
LAST_LINES = 6


class PeerUnavailable(Exception):
    """Peer that could not be started, with the reason."""


class PeerProcess:
    """Process of a server: `with PeerProcess(command, port) as peer:` then `peer.url`.

    It is ended by its handle on every way out of the block. Raises PeerUnavailable if a GET of `ready_path` does not
    answer in time.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        environment: Mapping[str, str] | None = None,
        ready_path: str = "/v1/models",
        ready_within_s: float = 90.0,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = list(command)
        self._ready_url = self.url + ready_path
        self._environment = {**os.environ, **(environment or {})}
        self._ready_within_s = ready_within_s
        self._process: subprocess.Popen[str] | None = None
        self._output: IO[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> PeerProcess:
        # A file rather than a pipe: without a reader, a server that writes a lot would block on a pipe.
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        try:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self._wait_until_ready(self._process)
        except OSError as error:
            self._end()
            raise PeerUnavailable(f"{self._command[0]}: {error}") from error
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._end()

    def wait(self, timeout_s: float) -> int | None:
        """Returns the exit status, or None for a process that still runs after this time."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def last_lines(self) -> str:
        if self._output is None:
            return ""
        self._output.flush()
        self._output.seek(0)
        return " | ".join(deque((line.strip() for line in self._output if line.strip()), maxlen=LAST_LINES))

    def _wait_until_ready(self, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + self._ready_within_s
        while True:
            if process.poll() is not None:
                raise PeerUnavailable(f"it ended with status {process.returncode}: {self.last_lines()}")
            try:
                if httpx.get(self._ready_url, timeout=2.0, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() > deadline:
                raise PeerUnavailable(f"not ready after {self._ready_within_s:.0f} s: {self.last_lines()}")
            time.sleep(0.1)

    def _end(self) -> None:
        process, output = self._process, self._output
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if output is not None:
            output.close()


def rootstock_server(model: Path, *options: str) -> PeerProcess:
    """Returns `rootstock serve` on a CPU, in bfloat16, with 2 GiB for its cache unless options say otherwise."""
    port = free_port()
    command = [sys.executable, "-m", "rootstock", "serve", str(model), "--port", str(port), "--device", "cpu"]
    command += ["--dtype", "bfloat16", "--kv-budget", "2GiB", *options]
    return PeerProcess(command, port, ready_path="/health")


def transformers_server(
    python: str,
    model: Path,
    threads: int,
    blocks: int,
    page_tokens: int,
    batch_tokens: int,
    dtype: str = "bfloat16",
) -> PeerProcess:
    """Returns transformers' own server with continuous batching: paged, bounded, prefixes shared by whole pages.

    It needs the package accelerate.
    """
    port = free_port()
    command = [
        *(python, "-m", "transformers.cli.transformers", "serve", str(model), "--continuous-batching"),
        *("--cb-block-size", str(page_tokens), "--cb-num-blocks", str(blocks)),
        *("--cb-max-batch-tokens", str(batch_tokens)),
        *("--device", "cpu", "--dtype", dtype, "--attn-implementation", "sdpa"),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    # Its list of models needs a Hub cache, which there may not be.
    environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    return PeerProcess(command, port, environment, ready_path="/health")


def llama_server(python: str, gguf: Path, threads: int, slots: int, context_tokens: int) -> PeerProcess:
    """Returns llama.cpp's own server, which batches up to `slots` requests over a KV buffer of `context_tokens`."""
    port = free_port()
    script = Path(__file__).with_name("llama_cpp_server.py")
    arguments = (port, slots, context_tokens, threads)
    return PeerProcess([python, str(script), str(gguf), *map(str, arguments)], port, ready_path="/health")


def vllm_server(
    python: str, model: Path, bind: str, context_tokens: int, dtype: str = "bfloat16", *more: str
) -> PeerProcess:
    """Returns vLLM's server on a CPU with prefix caching.

    bind    the processors of its threads, or "auto", with which it keeps one processor for the server

    A start compiles the model, which takes a minute or two.
    """
    port = free_port()
    command = [
        *(str(Path(python).with_name("vllm")), "serve", str(model), "--served-model-name", str(model)),
        *("--dtype", dtype, "--max-model-len", str(context_tokens), "--max-num-seqs", "32"),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details", *more),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    environment = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "HF_HUB_OFFLINE": "1",
    }
    if bind != "auto":
        environment["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    return PeerProcess(command, port, environment, ready_path="/health", ready_within_s=600.0)


def sglang_server(python: str, model: Path, folder: Path, context_tokens: int) -> PeerProcess:
    """Returns SGLang's server on a CPU in float32, with its radix cache and pages of one token.

    folder  where a stub of sgl_kernel is written: SGLang imports the package's names, of which there is no build for
            CPUs on PyPI. Without matrix units its layers call none of them; each call would be an error.

    Attention is computed by torch, for one sequence after the other: the times are not worth a comparison.
    """
    package = folder / "sgl_kernel"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(_SGL_KERNEL)
    port = free_port()
    command = [
        *(
            python,
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(model),
            "--served-model-name",
            str(model),
        ),
        *("--device", "cpu", "--dtype", "float32", "--max-total-tokens", str(4 * context_tokens)),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup"),
        *("--enable-cache-report", "--mem-fraction-static", "0.5", "--tool-call-parser", "hermes"),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "2",
    }
    return PeerProcess(command, port, environment, ready_path="/health", ready_within_s=300.0)


_SGL_KERNEL = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not there")

    return refuse
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
