"""Metal kernels run as C++: threads are fibres, and memory is checked (see emulated_threads.hpp).

`Emulation` stands in the place of `mx.fast.metal_kernel`. MLX itself writes the whole function, with its signature
and template arguments, as it would for a device; that text is compiled, with these changes:

- a pointer into `device` or `constant` memory is a class that checks its bounds;
- an array in `threadgroup` memory is a class that finds races;
- the instantiation of the template is a call.

This shows whether the kernel is right. It says nothing of Apple's compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

COMPILER = shutil.which("g++")
THREADS = Path(__file__).with_name("emulated_threads.hpp")
SMALL = 8  # numbers of an input that MLX passes in constant memory

_PARAMETER = re.compile(
    r"^ +(?P<const>const )?(?:(?P<space>device|constant) )?(?P<type>\w+)(?P<kind>[*&]?) (?P<name>\w+) "
    r"\[\[(?P<place>\w+)",
    re.MULTILINE,
)
_SHARED = re.compile(r"\bthreadgroup float (\w+)\[([^\]]+)\];")


class EmulationError(AssertionError):
    """Kernel that does something undefined."""


def generated_source(
    kernel: Any,
    inputs: Sequence[mx.array],
    template: Sequence[tuple[str, Any]],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
) -> str:
    """Returns the function that MLX writes for a call. An export records it without a device."""

    def call(*arrays: mx.array) -> Sequence[mx.array]:
        return kernel(  # type: ignore[no-any-return]
            inputs=list(arrays),
            template=list(template),
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
        )

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.mlxfn"
        mx.export_function(str(path), call, *[mx.zeros(a.shape, a.dtype) for a in inputs])
        exported = path.read_bytes().decode("latin-1")
    found = re.search(r"template <.*?\[\[kernel\]\] decltype\(.*?;\n", exported, re.DOTALL)
    assert found is not None
    return found[0]


def as_cpp(generated: str) -> str:
    """Returns a C++ program with the function `run`, which launches the generated kernel."""
    kernel, instance = generated.split("\ntemplate [[host_name", 1)
    called = re.search(r"decltype\((.*)\) ", instance)
    assert called is not None
    signature, body = kernel.split(") {\n", 1)
    arguments, buffer = [], 0
    for parameter in _PARAMETER.finditer(signature):
        const, kind, name = parameter["const"] or "", parameter["kind"], parameter["name"]
        if kind == "*":
            arguments.append(f"buffer_<{const}{parameter['type']}>({buffer})")
        elif kind == "&":
            arguments.append(f"*(const {parameter['type']}*)buffers_[{buffer}]")
        else:
            arguments.append(f"{name}_()")
        buffer += kind != ""
    numbered = iter(range(10))
    body = _SHARED.sub(lambda m: f"Memory {m[1]}({next(numbered)}, {m[2]});", body)
    text = re.sub(r"(const )?\b(?:device|constant) (\w+)\*", r"Numbers<\1\2>", f"{signature}) {{\n{body}")
    text = re.sub(r"\[\[\w+(?:\(\d+\))?\]\]", "", text).replace("constant ", "")
    return f"""#include "{THREADS}"
static void** buffers_;
static long* lengths_;
static int** marks_;
static uint3 group_, groups_, thread_;
template <typename T> static Numbers<T> buffer_(int i) {{ return {{(T*)buffers_[i], lengths_[i], 0, marks_[i]}}; }}
static uint3 threadgroup_position_in_grid_() {{ return group_; }}
static uint3 threadgroups_per_grid_() {{ return groups_; }}
static uint3 thread_position_in_grid_() {{ return {{group_.x * threads_ + now_, group_.y, group_.z}}; }}
static uint thread_index_in_simdgroup_() {{ return now_ % LANES_; }}
static uint simdgroup_index_in_threadgroup_() {{ return now_ / LANES_; }}
{text}
static void call_kernel() {{ {called[1]}({", ".join(arguments)}); }}
extern "C" const char* run(
    int x, int y, int z, int threads, void** buffers, long* lengths, int** marks, int reversed) {{
    buffers_ = buffers, lengths_ = lengths, marks_ = marks, threads_ = threads;
    groups_ = {{(uint)x, (uint)y, (uint)z}};
    *error_ = 0;
    memset(begun_, 0, sizeof begun_);
    if (!stacks_)
        stacks_ = (char*)malloc(size_t(MOST_THREADS) * STACK_BYTES);
    for (int i = 0; i < x * y * z && !*error_; ++i) {{
        group_ = {{(uint)(i % x), (uint)(i / x % y), (uint)(i / x / y)}};
        run_threadgroup(reversed);
    }}
    return error_;
}}
"""


@dataclass(slots=True)
class Launched:
    """Counts of one launch: how often each number of an input was read."""

    name: str
    grid: tuple[int, int, int]
    reads: Mapping[str, NDArray[np.int32]]


@dataclass(slots=True)
class Emulation:
    """Replacement of `mx.fast.metal_kernel`, whose compiled kernels lie in `directory`."""

    directory: Path
    reversed: int = 0
    replace: Mapping[str, str] = field(default_factory=dict)  # changes of the source, for mutations
    launched: list[Launched] = field(default_factory=list)
    _libraries: dict[object, ctypes.CDLL] = field(default_factory=dict)

    @property
    def kernels(self) -> int:
        """Counts the functions that a device would have compiled."""
        return len(self._libraries)

    def __call__(
        self, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str
    ) -> Any:
        for old, new in self.replace.items():
            source = source.replace(old, new)
        kernel = mx.fast.metal_kernel(name, input_names, output_names, source)

        def launch(
            *,
            inputs: Sequence[mx.array],
            template: Sequence[tuple[str, Any]],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            output_shapes: Sequence[Sequence[int]],
            output_dtypes: Sequence[mx.Dtype],
        ) -> list[mx.array]:
            assert threadgroup[1:] == (1, 1)
            assert threadgroup[0] <= 1024
            assert grid[0] % threadgroup[0] == 0, "MLX would launch a smaller threadgroup"
            kinds = tuple((a.dtype, a.ndim == 0, a.size < SMALL) for a in inputs)
            key = (name, source, tuple(template), kinds, tuple(output_dtypes))
            library = self._libraries.get(key)
            if library is None:
                generated = generated_source(kernel, inputs, template, output_shapes, output_dtypes)
                library = self._libraries[key] = self._compiled(as_cpp(generated))
            arrays = [_to_numpy(array) for array in inputs]
            outputs = [_unwritten(*given) for given in zip(output_shapes, output_dtypes, strict=True)]
            passed: list[NDArray[Any]] = []
            read: dict[str, NDArray[np.int32]] = {}
            marks: list[NDArray[np.int32]] = []
            for input_name, array in zip(input_names, arrays, strict=True):
                counts = np.zeros(max(1, array.size), np.int32)
                read[input_name] = counts[: array.size].reshape(array.shape)
                passed.append(array)
                marks.append(counts)
                if array.ndim and f"{input_name}_shape" in source:
                    passed.append(np.array(array.shape, np.int32))
                    marks.append(np.zeros(array.ndim, np.int32))
            for array in outputs:
                passed.append(array)
                marks.append(np.zeros(array.size, np.int32))
            pointers = (ctypes.c_void_p * len(passed))(*[array.ctypes.data for array in passed])
            lengths = (ctypes.c_long * len(passed))(*[array.size for array in passed])
            counters = (ctypes.c_void_p * len(passed))(*[mark.ctypes.data for mark in marks])
            groups = (grid[0] // threadgroup[0], *grid[1:])
            library.run.restype = ctypes.c_char_p
            error = library.run(*groups, threadgroup[0], pointers, lengths, counters, self.reversed)
            if error:
                raise EmulationError(error.decode())
            self.launched.append(Launched(name, groups, read))
            return [_to_mlx(array, dtype) for array, dtype in zip(outputs, output_dtypes, strict=True)]

        return launch

    def _compiled(self, program: str) -> ctypes.CDLL:
        assert COMPILER is not None
        library = self.directory / f"{hashlib.sha1(program.encode()).hexdigest()[:16]}.so"
        if not library.exists():
            text = library.with_suffix(".cpp")
            text.write_text(program)
            subprocess.run(
                [
                    COMPILER,
                    "-std=c++17",
                    "-O1",
                    "-shared",
                    "-fPIC",
                    "-w",
                    "-U_FORTIFY_SOURCE",
                    text,
                    "-o",
                    library,
                ],
                check=True,
            )
        return ctypes.CDLL(str(library))


def _to_numpy(array: mx.array) -> NDArray[Any]:
    array = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.ascontiguousarray(np.array(array))


def _unwritten(shape: Sequence[int], dtype: mx.Dtype) -> NDArray[Any]:
    """Returns NaNs."""
    if dtype == mx.bfloat16:
        return np.full(shape, 0x7FC0, np.uint16)
    return np.full(shape, np.nan, np.float16 if dtype == mx.float16 else np.float32)


def _to_mlx(array: NDArray[Any], dtype: mx.Dtype) -> mx.array:
    return mx.array(array).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(array)
