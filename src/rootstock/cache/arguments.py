"""Checks of arguments at the cache's public surface: a mistake of the engine above raises an error with its reason.

The cache's own invariants are assertions. These checks take well below a microsecond, because they run in every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rootstock.cache.keys import Namespace
from rootstock.cache.types import Tokens
from rootstock.errors import CacheMisuse, InvalidOption, shown

_INT32 = np.dtype(np.int32)


def require_tokens(call: str, tokens: Any, least: int = 0) -> None:
    """Raises CacheMisuse unless these are token ids: an array [tokens] of int32."""
    if type(tokens) is np.ndarray and tokens.dtype == _INT32 and tokens.ndim == 1 and len(tokens) >= least:
        return
    if isinstance(tokens, np.ndarray):
        found = f"an array of shape {list(tokens.shape)} and dtype {tokens.dtype}"
    else:
        found = f"a {type(tokens).__name__}"
    some = f"with at least {least} of them" if least else "[tokens]"
    raise CacheMisuse(call, f"the tokens are {found}, but must be a NumPy array {some}, of dtype int32")


def require_namespace(call: str, namespace: Any) -> None:
    """Raises CacheMisuse unless this is a Namespace."""
    if not isinstance(namespace, Namespace):
        raise CacheMisuse(call, f"the namespace is {shown(namespace)}, but must be a Namespace")


def require_count(call: str, name: str, value: Any, least: int = 0) -> None:
    """Raises CacheMisuse unless this is an integer of at least `least`."""
    if not is_count(value, least):
        raise CacheMisuse(call, f"{name} is {shown(value)}, but must be an integer, {least} or more")


def require_agreement(known: Tokens, tokens: Tokens, position: int) -> None:
    """Raises CacheMisuse if committed tokens differ from the prompt. A view of the prompt itself is not read."""
    if tokens.base is not None and (tokens.base is known or tokens.base is known.base):
        return
    differs = np.flatnonzero(known[: len(tokens)] != tokens[: len(known)])
    if len(differs):
        first = int(differs[0])
        raise CacheMisuse(
            "commit",
            f"token {int(tokens[first])} at position {position + first} is not the prompt's, which is "
            f"{int(known[first])}",
        )


def is_count(value: Any, least: int) -> bool:
    if type(value) is int:
        return value >= least
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)


def require_option(name: str, value: Any, least: int) -> None:
    """Raises InvalidOption unless an option is an integer of at least `least`."""
    if not is_count(value, least):
        raise InvalidOption(name, value, f"an integer, {least} or more")


def require_fields(of: object, *names: str) -> None:
    """Raises InvalidOption unless these fields are positive integers. Makes Python's integers of NumPy's."""
    for name in names:
        value = getattr(of, name)
        require_option(name, value, 1)
        object.__setattr__(of, name, int(value))  # it is frozen


def require_share(name: str, value: Any) -> None:
    """Raises InvalidOption unless an option is a part of a whole."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise InvalidOption(name, value, "a number from 0 to 1")


def require_rows(rows: Any, families: Sequence[object]) -> None:
    """Raises InvalidOption unless there is a positive number of rows for each family."""
    fits = isinstance(rows, Sequence) and len(rows) == len(families) and all(is_count(row, 1) for row in rows)
    if not fits:
        raise InvalidOption(
            "rows", shown(rows), f"a list of {len(families)} positive numbers, one for each family"
        )
