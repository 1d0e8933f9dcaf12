"""Hypothesis profiles: quick and repeatable by default, long and random with ROOTSTOCK_SOAK=1. Triton's interpreter
where Triton is installed and there is no CUDA device. Temporary directories in memory where there is room."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib.util
import logging
import os
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import torchvision_here  # noqa: F401  # isort: skip  (before transformers looks for it)
import transformers  # noqa: F401  (before a command for MLX imports it without torch, in the same process)
from hypothesis import HealthCheck, settings

from rootstock.logs import ACCESS_LOGGER

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("quick", derandomize=True, database=None, **_COMMON)
settings.register_profile("soak", max_examples=20_000, database=None, **_COMMON)
settings.load_profile("soak" if os.environ.get("ROOTSTOCK_SOAK") else "quick")

# Test processes of pytest-xdist share the processors: torch takes this process's part of the threads.
# Tests of several threads set their number themselves.
if (workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT")) is not None:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

# Images of containers often set this variable. Without cached bytecode, each process of pytest rewrites the asserts
# of all test files anew, which takes longer than any test, and each server that a test starts compiles the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if importlib.util.find_spec("triton") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = (
            "1"  # before the first import of Triton, which makes its functions for one of both
        )

# Tests of the disk tier sync thousands of times, which takes minutes on a disk and checks nothing more: they simulate
# power cuts by a record of the synced bytes.
_IN_MEMORY, _NEEDED_BYTES = Path("/dev/shm"), 4 << 30
if os.access(_IN_MEMORY, os.W_OK) and shutil.disk_usage(_IN_MEMORY).free >= _NEEDED_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_IN_MEMORY))  # of tmp_path


def pytest_collection_finish() -> None:
    """Leaves the modules and the tests out of garbage collections: one of all of them takes half a second."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown() -> None:
    """Lets go of the test's applications. FastAPI remembers functions that were routes, and with them dozens of whole
    applications: two million objects, through which each garbage collection would go."""
    for function in vars(sys.modules.get("fastapi.dependencies.models", object)).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@pytest.fixture(autouse=True)
def log_levels_as_before() -> Iterator[None]:
    """Takes back the levels of log lines that a command of the test has set for the whole process."""
    loggers = [logging.getLogger(name) for name in ("rootstock", "uvicorn", ACCESS_LOGGER)]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


_freeze, _unfreeze = gc.freeze, gc.unfreeze


@pytest.fixture(scope="session", autouse=True)
def kept_frozen() -> Iterator[None]:
    """Keeps frozen the objects that `pytest_collection_finish` has frozen: an unload collects all twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture
def really_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the code of a test freeze, and collect its frozen objects, as servers do."""
    monkeypatch.setattr(gc, "freeze", _freeze)
    monkeypatch.setattr(gc, "unfreeze", _unfreeze)
    yield
    _freeze()


@pytest.fixture(scope="session", autouse=True)
def one_validator_of_each_type() -> Iterator[None]:
    """Makes the validators of each answer and parameter once. FastAPI makes them anew for each application, in four
    fifths of the time of a server's start."""
    from fastapi import routing
    from fastapi._compat import v2
    from pydantic import TypeAdapter

    made: dict[tuple[Any, str], TypeAdapter[Any]] = {}

    def adapter(annotated: Any, config: Any) -> TypeAdapter[Any]:
        key = (annotated.__origin__, repr((annotated.__metadata__, config)))
        return made.get(key) or made.setdefault(key, TypeAdapter(annotated, config=config))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v2, "TypeAdapter", adapter)
        patch.setattr(routing, "create_model_field", functools.cache(routing.create_model_field))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_list_of_authorities() -> Iterator[None]:
    """Reads the certificates of the authorities once: each client of httpx would."""
    from httpx._transports import default

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", functools.cache(default.create_ssl_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_command_line() -> Iterator[None]:
    """Makes the command line from its declarations once: that takes ten times as long as reading arguments by it."""
    import typer.main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def servers_that_end_soon() -> Iterator[None]:
    """Lets uvicorn look every hundredth of a second whether to end, and not every tenth: the tests end hundreds."""
    import uvicorn.server

    sooner = vars(asyncio) | {"sleep": lambda seconds: asyncio.sleep(seconds / 10)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", types.SimpleNamespace(**sooner))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_host_of_grammars() -> Iterator[None]:
    """Keeps the process that compiles grammars, once it has started, for all tests of this process."""
    from rootstock.text.constraints.host import HOST

    with HOST.used():
        yield


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of the demo's kind, made in a second or two: it chats in words and depends on every token."""
    from rootstock.bench.tiny_model import TinyModelSpec, ensure_tiny_model

    spec = TinyModelSpec(
        hidden_size=64,
        intermediate_size=128,
        layers=2,
        heads=2,
        kv_heads=1,
        corpus_lines=400,
        context_limit=4096,
    )
    return ensure_tiny_model(spec, tmp_path_factory.mktemp("models"))
