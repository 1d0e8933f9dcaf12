"""A pytest plugin that lets tests of other servers run against a server that already runs.

ROOTSTOCK_SUITE names the suite, ROOTSTOCK_URL the server. Each suite starts a server of its own in a class or a
fixture of its helpers: that one is replaced here. The other server's package is absent, and a test that calls it in
its own process is skipped.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

URL = os.environ["ROOTSTOCK_URL"].rstrip("/")
SUITE = os.environ["ROOTSTOCK_SUITE"]
MODEL = "scripted"

_is_running = False  # a test, or the making of its fixtures


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    global _is_running
    _is_running = True
    try:
        return (yield)
    finally:
        _is_running = False


# ---- vLLM: its package is absent, and tests/utils.py is replaced


class Absent(types.ModuleType):
    """Anything of an absent package: a module, a class, a function or a value. A test that calls it is skipped."""

    __path__ = ()
    __file__ = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **more: Any) -> Any:
        if _is_running:
            pytest.skip(f"it needs {self.__name__} in this process")
        return Absent(self.__name__)

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, key: Any) -> Any:
        return Absent(f"{self.__name__}[]")

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__


class AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of absent packages: importing them or from them gives Absent."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = roots

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in self._roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return Absent(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


class RemoteOpenAIServer:
    """The place of vLLM's class that starts a server."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, vllm_serve_args: Sequence[str] = (), **more: Any) -> None:
        self.model = model
        self.args = list(vllm_serve_args)
        parts = urlsplit(URL)
        self.host, self.port = parts.hostname, parts.port
        self.url_root = URL

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([URL, *(part.strip("/") for part in parts)])

    def get_client(self, **more: Any) -> Any:
        import openai

        options = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return openai.OpenAI(**{**options, **more})

    def get_async_client(self, **more: Any) -> Any:
        import openai

        options = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return openai.AsyncOpenAI(**{**options, **more})

    def get_async_client_anthropic(self, **more: Any) -> Any:
        import anthropic

        options = {"base_url": URL, "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return anthropic.AsyncAnthropic(**{**options, **more})


def _replace_vllm() -> None:
    sys.meta_path.append(AbsentPackages(("vllm", "torch", "pybase64", "fastapi")))
    utils = Absent("tests.utils")
    utils.__dict__["RemoteOpenAIServer"] = RemoteOpenAIServer
    utils.__dict__["VLLM_PATH"] = ""
    utils.__dict__["ROCM_EXTRA_ARGS"] = []
    for name in ("multi_gpu_only", "requires_fp8", "multi_gpu_test"):
        utils.__dict__[name] = pytest.mark.skip(reason="it needs an accelerator")
    sys.modules["tests.utils"] = utils


# ---- llama.cpp: its ServerProcess is replaced, and its paths have /v1 here

_WITHOUT_V1 = (
    "/chat/completions",
    "/completions",
    "/embeddings",
    "/models",
    "/responses",
    "/messages",
    "/rerank",
)


def _replace_llama_cpp() -> None:
    utils: Any = importlib.import_module("utils")
    parts = urlsplit(URL)

    def start(self: Any, timeout_seconds: float = 0) -> None:
        self.server_host, self.server_port = parts.hostname, parts.port

    def make_url(self: Any, path: str, host: str | None = None) -> str:
        if path.startswith(_WITHOUT_V1):
            path = f"/v1{path}"
        return f"{URL}{path}"

    utils.ServerProcess.start = start
    utils.ServerProcess.stop = lambda self: None
    utils.ServerProcess.make_url = make_url
    utils.ServerPreset.load_all = staticmethod(lambda: None)


# ---- SGLang's gateway: its fixtures are replaced


class RemoteGateway:
    """The place of a started gateway."""

    base_url = URL
    url = URL
    host, port = urlsplit(URL).hostname, urlsplit(URL).port

    def __getattr__(self, name: str) -> Any:
        pytest.skip(f"it needs the gateway's {name}")


def _backend(backend: str) -> tuple[str, str, Any, Any]:
    import anthropic
    import openai

    client: Any = openai.OpenAI(base_url=f"{URL}/v1", api_key="x", max_retries=0)
    if backend == "anthropic":
        client = anthropic.Anthropic(base_url=URL, api_key="x", max_retries=0)
    return backend, MODEL, client, RemoteGateway()


def _replace_smg() -> None:
    with suppress(ImportError):
        import smg_client  # noqa: F401
    sys.meta_path.append(AbsentPackages(("smg_client", "smg", "datasets", "pandas", "grpc", "grpc_health")))
    fixtures = types.ModuleType("fixtures")

    @pytest.fixture(scope="class")
    def setup_backend(request: Any) -> Any:
        return _backend(str(getattr(request, "param", "")))

    @pytest.fixture
    def backend_router(request: Any) -> Any:
        pytest.skip("it needs a gateway of its own")

    found: dict[str, Any] = {"setup_backend": setup_backend, "backend_router": backend_router}
    for hook in ("collection_modifyitems", "configure", "runtest_setup", "sessionfinish"):
        found[f"pytest_{hook}"] = lambda: None
    fixtures.__dict__.update(found)
    sys.modules["fixtures"] = fixtures


{"vllm": _replace_vllm, "llama.cpp": _replace_llama_cpp, "smg": _replace_smg}[SUITE]()
