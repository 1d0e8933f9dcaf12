"""The names of options, for errors: the command line's, in which messages are written, and the library's."""

from __future__ import annotations

import re
from typing import TypeVar

from rootstock.errors.base import RootstockError
from rootstock.errors.startup import InvalidOption

E = TypeVar("E", bound=RootstockError)

# Options of the command line whose parameter in the library has another name.
_PARAMETERS = {
    "kv-budget": "budget_bytes",
    "disk-budget": "disk_budget_bytes",
    "host-budget": "host_budget_bytes",
    "itl-target": "itl_target_s",
    "speculate": "draft_tokens",
    "answer-memory": "answer_memory_bytes",
    "memory-limit": "memory_limit_bytes",
    "served-model-name": "served_name",
    "adapter": "adapters",
    "cache": "enabled",
}
_OPTION = re.compile(r"(?<![\w-])--(no-)?([a-z][a-z-]*[a-z])( FILE)?(?![\w-])")


def parameter_of(option: str) -> str:
    """Returns the library's name of an option of the command line."""
    name = option.removeprefix("--")
    return _PARAMETERS.get(name, name.replace("-", "_"))


def in_library_words(error: E) -> E:
    """Makes the message of an error name the library's parameters. Returns the error itself."""

    def parameter(found: re.Match[str]) -> str:
        return parameter_of(found[2]) + ("=False" if found[1] else "")

    error.message = _OPTION.sub(parameter, error.message)
    error.args = (error.message,)
    if isinstance(error, InvalidOption):
        error.option = parameter_of(error.option) if error.option.startswith("--") else error.option
        error.allowed = _OPTION.sub(parameter, error.allowed)
    return error
