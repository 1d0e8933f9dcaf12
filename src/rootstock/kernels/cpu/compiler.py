"""Numba, configured for the widest vectors of this CPU, and the operations that loops over bfloat16 need.

Import `nb` only from this module: LLVM's target is fixed when Numba is first imported. By default LLVM avoids 512-bit
vectors, which made attention 4 to 8 % slower.

bfloat16 is the upper half of a float32. Arrays hold it as uint16, registers as float32.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import llvmlite.binding as llvm
from llvmlite import ir


def _ask_for_wide_vectors() -> None:
    """Sets Numba's CPU name and features. Leaves the environment's settings and an already imported Numba
    unchanged."""
    if "numba" in sys.modules or "NUMBA_CPU_FEATURES" in os.environ or "NUMBA_CPU_NAME" in os.environ:
        return
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        os.environ["NUMBA_CPU_NAME"] = llvm.get_host_cpu_name()
        os.environ["NUMBA_CPU_FEATURES"] = features.flatten() + ",-prefer-256-bit"


def forget_older_code(directory: Path) -> None:
    """Removes Numba's cached code of a directory's modules if it is older than any of their sources.

    Numba compares the cache only with the source of the function itself, not of the functions that it calls. Without
    this, a change in a called module would have no effect.
    """
    newest = max((source.stat().st_mtime for source in directory.glob("*.py")), default=0.0)
    for index in (directory / "__pycache__").glob("*.nbi"):
        with contextlib.suppress(OSError):  # another process removed it first, or the directory is read-only
            if index.stat().st_mtime < newest:
                index.unlink()


_ask_for_wide_vectors()
forget_older_code(Path(__file__).parent)

import numba as nb  # noqa: E402
import numpy as np  # noqa: E402
from numba.core import cgutils, types  # noqa: E402
from numba.extending import intrinsic, overload  # noqa: E402

__all__ = [
    "c_function",
    "cgutils",
    "compiled",
    "compiled_exactly",
    "compiles_for",
    "exp",
    "fetch_add",
    "float32_bits",
    "float32_from",
    "has_features",
    "intrinsic",
    "narrow",
    "nb",
    "pointer_to",
    "sigmoid",
    "softplus",
    "types",
    "widen",
]

_log = logging.getLogger(__name__)

_I32, _F32 = ir.IntType(32), ir.FloatType()

Function = TypeVar("Function", bound=Callable[..., Any])


def c_function(function: Callable[[Any], None], job: np.dtype[Any]) -> int:
    """Returns the address of a C function void (job *). It is compiled or loaded from disk, and lives as long as the
    process.

    If neither the package's directory nor the user's cache is writable, it is compiled at each start.
    """
    signature = nb.types.void(nb.types.CPointer(nb.from_dtype(job)))
    try:
        made = nb.cfunc(signature, cache=True)(function)
    except RuntimeError as refusal:
        _log.warning(
            "Loops are compiled at each start, because there is no directory to cache them in: %s", refusal
        )
        made = nb.cfunc(signature)(function)
    _kept.append(made)
    return int(made.address)


_kept: list[Any] = []

_IN_ORDER = {"nnan", "ninf", "nsz", "contract"}  # LLVM's fast-math flags that reorder nothing


def compiled(function: Function) -> Function:
    """Compiles a function on its first call for each combination of types, and caches the code on disk.

    Sums may be reassociated, as vectors need. There are no bounds checks. The code runs without the GIL.
    """
    return _decorated(function)


def compiled_exactly(function: Function) -> Function:
    """Compiles like `compiled`, but without fast-math reassociation.

    LLVM makes two versions of a loop that writes: with vectors, and with scalars for arrays that may overlap. Both
    give the same bits only without reassociation.
    """
    return _decorated(function, fastmath=_IN_ORDER)


def _decorated(function: Function, **more: Any) -> Function:
    options = {"cache": True, "fastmath": True, "boundscheck": False, "error_model": "numpy", "nogil": True}
    decorated: Function = nb.njit(**(options | more))(function)
    return decorated


def has_features(*features: str) -> bool:
    """Returns whether this is an x86-64 processor with these features, and Numba may use them."""
    if platform.machine() != "x86_64":
        return False
    host = llvm.get_host_cpu_features()
    return all(host.get(feature) for feature in features) and compiles_for(*features)


def compiles_for(*features: str) -> bool:
    """Returns whether Numba's settings (NUMBA_CPU_FEATURES, NUMBA_CPU_NAME=generic) let LLVM use these host features.

    LLVM ends the process if it is asked for an instruction of a feature that it was not given.
    """
    told = nb.config.CPU_FEATURES  # None: all features of the host
    return told is None or {f"+{feature}" for feature in features} <= set(told.split(","))


@intrinsic  # type: ignore[untyped-decorator]
def _bfloat16_to_float32(typing: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        wide = builder.shl(builder.zext(given[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(wide, _F32)

    return types.float32(types.uint16), generate


@intrinsic  # type: ignore[untyped-decorator]
def float32_bits(typing: Any, value: Any) -> Any:
    """Returns the bits of a float32 as uint32."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.bitcast(given[0], _I32)

    return types.uint32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def float32_from(typing: Any, bits: Any) -> Any:
    """Returns the float32 with these int32 bits."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.bitcast(given[0], _F32)

    return types.float32(types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _to_int32(typing: Any, value: Any) -> Any:
    """Converts a float32 that is a whole number, without checks."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.fptosi(given[0], _I32)

    return types.int32(types.float32), generate


def _inlined(function: Function) -> Function:
    inlined: Function = nb.njit(inline="always", fastmath=True)(function)
    return inlined


def _inlined_exactly(function: Function) -> Function:
    inlined: Function = nb.njit(inline="always", fastmath=_IN_ORDER)(function)
    return inlined


# Numba compares the annotations of a template and of the functions that it returns, so these have none.


def _widen(element):  # type: ignore[no-untyped-def]
    raise NotImplementedError("for compiled code")


def _narrow(value, array):  # type: ignore[no-untyped-def]
    raise NotImplementedError("for compiled code")


@_inlined
def _round_to_bfloat16(value: Any) -> Any:
    bits = float32_bits(value)
    odd = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


def _choose_widen(element):  # type: ignore[no-untyped-def]
    if element == types.uint16:
        return lambda element: _bfloat16_to_float32(element)
    if element == types.int8:
        return lambda element: np.float32(element)
    return lambda element: element


def _choose_narrow(value, array):  # type: ignore[no-untyped-def]
    if array.dtype == types.uint16:
        return lambda value, array: _round_to_bfloat16(np.float32(value))
    return lambda value, array: np.float32(value)


overload(_widen, inline="always")(_choose_widen)
overload(_narrow, inline="always")(_choose_narrow)

# widen(element): an array's element (float32, int8, or bfloat16 as uint16) as float32.
widen: Callable[[Any], Any] = _widen
# narrow(value, array): a float32 as an element of `array`; rounded to nearest, ties to even, if it holds bfloat16.
narrow: Callable[[Any, Any], Any] = _narrow


@_inlined_exactly
def exp(x: Any) -> Any:
    """Computes e^x for x ≤ 0 in float32, in vectors, to about 2 units in the last place. Below -87 returns e^-87.

    Computed as 2^n · e^r with |r| ≤ ln 2 / 2, by Cephes's polynomial for e^r (Moshier, expf).
    """
    x = max(x, np.float32(-87.0)) * np.float32(1.44269504)
    whole = np.floor(x + np.float32(0.5))
    r = (x - whole) * np.float32(0.693147182)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(0.5)
    p = p * r * r + r + np.float32(1.0)
    return p * float32_from((_to_int32(whole) + np.int32(127)) << np.int32(23))


@_inlined_exactly
def sigmoid(x: Any) -> Any:
    """Computes 1 / (1 + e^-x) in float32, in vectors."""
    # 1 / (1 + e^-|x|) cannot overflow; for x < 0 the quotient is e^-|x| / (1 + e^-|x|).
    small = exp(-abs(x))
    return (np.float32(1) if x >= 0 else small) / (np.float32(1) + small)


@_inlined_exactly
def softplus(x: Any) -> Any:
    """Computes ln(1 + e^x) in float32, in vectors, to about 4 units in the last place, also where it is tiny."""
    # ln(1 + u) = 2 artanh s with s = u / (2 + u) ≤ 1/3, by the series s + s³/3 + s⁵/5 + …
    u = exp(-abs(x))
    s = u / (np.float32(2) + u)
    square = s * s
    p = np.float32(1 / 13)
    p = p * square + np.float32(1 / 11)
    p = p * square + np.float32(1 / 9)
    p = p * square + np.float32(1 / 7)
    p = p * square + np.float32(1 / 5)
    p = p * square + np.float32(1 / 3)
    p = p * square + np.float32(1)
    return max(x, np.float32(0)) + np.float32(2) * s * p


@intrinsic  # type: ignore[untyped-decorator]
def pointer_to(typing: Any, address: Any) -> Any:
    """Converts an int64 address to the pointer that `carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(typing: Any, array: Any, index: Any, amount: Any) -> Any:
    """Adds `amount` to array[index] atomically. Returns the previous value. array [n] int64"""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, given[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [given[1]]), given[2], "acq_rel")

    return types.int64(array, types.int64, types.int64), generate
