"""Rootstock where torch, or MLX, is not installed, and the imports of servers where both are."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.running import Process, Ran
from waiting import HANG_S

# Python takes a module that is None for absent: an import raises ModuleNotFoundError, and there is no spec of it.
WITHOUT = "import sys\nsys.modules.update(dict.fromkeys({names}))\n"
TORCH = ["torch", "numba", "llvmlite", "triton"]
MLX = ["mlx", "mlx_lm"]

# The loader of the MLX runtime gives the oracle. Everything else of the server is the real code.
ORACLE_AS_MLX = """
import sys, types
from dataclasses import replace
from rootstock.runtime.mlx.memory import device_memory
from rootstock.testing.fake_runtime import FakeRuntime

def load_model(config, progress=None, demands=None, *, directory=None):
    runtime = FakeRuntime(vocab_size={vocab}, context_limit=4096)
    runtime.description = replace(runtime.description, runtime="mlx")
    return runtime

loader = types.ModuleType("rootstock.runtime.mlx.load")
loader.load_model, loader.check_architecture = load_model, lambda config, directory: None
loader.device_memory = device_memory
sys.modules[loader.__name__] = loader
"""

MAIN = """
from rootstock.__main__ import main
main()
"""

# Prints, when the process ends, which of the modules it has imported.
TELL_IMPORTED = """
import atexit, sys
atexit.register(lambda: print("imported:", [n for n in {names} if sys.modules.get(n)], file=sys.stderr))
"""

IMPORT_ALL = """
import importlib, importlib.util, pkgutil
import rootstock
OF_RUNTIMES = ("rootstock.kernels",)
OF_RUNTIMES += ("rootstock.runtime.torch", "rootstock.runtime.mlx", "rootstock.runtime.openvino")
if importlib.util.find_spec("ray") is None:
    OF_RUNTIMES += ("rootstock.fleet.serve_app",)
for module in pkgutil.walk_packages(rootstock.__path__, "rootstock."):
    if not module.name.startswith(OF_RUNTIMES):
        importlib.import_module(module.name)
print(sorted(n for n in {names} if sys.modules.get(n)))
"""


def run_python(code: str, *arguments: object) -> Ran:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=HANG_S
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def oracle_as_mlx(model: Path) -> str:
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    return ORACLE_AS_MLX.format(vocab=vocab)


def test_only_the_runtimes_and_their_kernels_need_a_tensor_library() -> None:
    names = [*TORCH, *MLX, "transformers"]
    done = run_python(WITHOUT.format(names=[*TORCH, *MLX]) + IMPORT_ALL.format(names=names))
    assert (done.status, done.out) == (0, "[]\n"), done.err


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the MLX runtime, in a process without torch and numba."""
    before = WITHOUT.format(names=TORCH) + oracle_as_mlx(small_model)
    options = ["--runtime", "mlx", "--port", "0", "--kv-budget", "4MiB", "--admin-key", "admin"]
    disk = str(tmp_path_factory.mktemp("disk"))
    process = Process("-c", before + MAIN, "serve", str(small_model), *options, "--disk-dir", disk)
    assert "by mlx" in process.ready
    yield process.url
    process.stop_cleanly(signal.SIGTERM)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 4, "logprobs": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 16}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "Hello"}],
                "max_tokens": 8,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "integer"}},
                },
            },
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "Hello"}],
                "max_tokens": 8,
                "tools": [
                    {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
                ],
            },
        ),
    ],
)
def test_a_server_without_torch_answers(server: str, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(server + path, json={"model": "m", "seed": 1, **body}, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) >= 1


def test_a_server_without_torch_streams(server: str) -> None:
    body = {"prompt": "Once", "max_tokens": 4, "stream": True}
    with httpx.stream("POST", f"{server}/v1/completions", json=body, timeout=HANG_S) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_a_server_without_torch_has_its_other_routes(server: str) -> None:
    for path in ("/", "/health", "/metrics", "/docs"):
        assert httpx.get(server + path, timeout=HANG_S).status_code == 200, path
    [model] = httpx.get(f"{server}/v1/models", timeout=HANG_S).json()["data"]
    assert model["runtime"] == "mlx"


def test_commands_need_no_torch(small_model: Path, tmp_path: Path) -> None:
    before = WITHOUT.format(names=TORCH)
    done = run_python(before + oracle_as_mlx(small_model) + MAIN, "models", "check", small_model)
    assert done.status == 0, done.err
    assert "runtime         mlx" in done.out.splitlines()
    assert done.err == ""  # transformers does not tell that it finds no torch
    done = run_python(before + MAIN, "cache", "ls", tmp_path, "--tokenizer", small_model)
    assert done.status == 2, done.err
    assert "not a directory of the disk tier" in done.err
    done = run_python(before + MAIN, "doctor", "--json")
    assert done.status == 0, done.err
    assert "mlx" in {each["name"]: each["value"] for each in json.loads(done.out)}["runtime (--runtime auto)"]


def test_a_model_for_torch_is_refused_with_the_command_that_installs_it(small_model: Path) -> None:
    before = WITHOUT.format(names=TORCH)
    done = run_python(before + MAIN, "serve", small_model, "--port", "0", "--runtime", "torch")
    assert (done.status, done.out) == (2, "")
    assert "pip install 'rootstock[torch]'" in done.err.splitlines()[-1]
    done = run_python(WITHOUT.format(names=[*TORCH, *MLX]) + MAIN, "serve", small_model, "--port", "0")
    assert (done.status, done.out) == (2, "")
    assert "pip install 'rootstock[mlx]' on Apple Silicon" in done.err.splitlines()[-1]


def test_the_library_needs_no_torch(small_model: Path) -> None:
    use = f"""
from rootstock import LLM, SamplingParams
with LLM({str(small_model)!r}, runtime="mlx", budget_bytes="4MiB") as llm:
    chat = llm.chat([{{"role": "user", "content": "Hello"}}], SamplingParams(max_tokens=3))
    print(len(chat[0].outputs[0].token_ids))
"""
    done = run_python(WITHOUT.format(names=TORCH) + oracle_as_mlx(small_model) + use)
    assert (done.status, done.out) == (0, "3\n"), done.err


def test_a_server_of_mlx_leaves_an_installed_torch_alone(small_model: Path) -> None:
    """The runtime is the real one, with mlx-lm, which imports transformers, too."""
    before = TELL_IMPORTED.format(names=TORCH)
    options = ["--runtime", "mlx", "--dtype", "float32", "--port", "0", "--kv-budget", "4MiB"]
    process = Process(
        "-c", before + MAIN, "serve", str(small_model), *options, env={"MLX_DISABLE_COMPILE": "1"}
    )
    assert "by mlx" in process.ready
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    answer = httpx.post(f"{process.url}/v1/chat/completions", json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    status, _, err = process.stop(signal.SIGTERM)
    assert (status, err.splitlines()[-1]) == (0, "imported: []")


def test_a_server_of_torch_leaves_an_installed_mlx_alone(small_model: Path) -> None:
    before = TELL_IMPORTED.format(names=MLX)
    options = ["--runtime", "torch", "--device", "cpu", "--threads", "1", "--dtype", "float32"]
    process = Process(
        "-c", before + MAIN, "serve", str(small_model), "--port", "0", "--kv-budget", "4MiB", *options
    )
    assert "by torch" in process.ready
    body = {"prompt": "Once", "max_tokens": 4}
    answer = httpx.post(f"{process.url}/v1/completions", json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    status, _, err = process.stop(signal.SIGTERM)
    assert (status, err.splitlines()[-1]) == (0, "imported: []")


def test_torch_serves_where_mlx_is_absent(small_model: Path) -> None:
    use = f"""
from rootstock import LLM, SamplingParams
with LLM({str(small_model)!r}, device="cpu", dtype="float32", threads=1, budget_bytes="4MiB") as llm:
    print(len(llm.generate("Once", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))
"""
    done = run_python(WITHOUT.format(names=MLX) + use)
    assert (done.status, done.out) == (0, "3\n"), done.err
