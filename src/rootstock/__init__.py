"""Rootstock: an LLM inference server whose core is one KV cache for every model, request and tier.

`LLM` is the library, `rootstock.cache` the cache on its own. Importing this package imports neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rootstock._version import __version__

if TYPE_CHECKING:
    from rootstock.llm.llm import LLM, Stream
    from rootstock.llm.outputs import CompletionOutput, RequestOutput, TextDelta
    from rootstock.llm.params import SamplingParams

_LAZY = {
    "LLM": "rootstock.llm.llm",
    "Stream": "rootstock.llm.llm",
    "CompletionOutput": "rootstock.llm.outputs",
    "RequestOutput": "rootstock.llm.outputs",
    "TextDelta": "rootstock.llm.outputs",
    "SamplingParams": "rootstock.llm.params",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "Stream",
    "TextDelta",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public name of the library when it is first asked for (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
