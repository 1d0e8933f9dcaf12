"""Rootstock: an LLM inference server whose core is one KV cache for every model, request and tier."""

from rootstock._version import __version__

__all__ = ["__version__"]
