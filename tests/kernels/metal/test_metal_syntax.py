"""The Metal kernels keep the rules of address spaces, as far as a compiler of OpenCL C++ checks them.

There is no compiler of Metal outside of macOS. OpenCL C++ has the same address spaces, with the same rules: pointers
keep their space, memory of a threadgroup is declared at the outermost level of a kernel, and a kernel has neither
exceptions nor function pointers. clang checks the whole function that MLX writes, with its template arguments filled
in.
"""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import pytest
import torch

from kernels.batches import make_batch
from kernels.metal.emulation import generated_source
from kernels.metal.metal_batches import attend
from rootstock.kernels.metal.launch import Occupancy
from rootstock.kernels.metal.paged_attention import PagedKernel

cindex = pytest.importorskip("clang.cindex", reason="libclang is not installed")

UNROLL = "#pragma clang loop unroll(full)"
_ANY_SPACE = re.compile(r"(?<!device )(?<!constant )(?<!threadgroup )\b[A-Za-z]\w*\* \w+ =.*")

METAL = """
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define thread __private
#define threadgroup __local
typedef unsigned int uint;
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef __SIZE_TYPE__ size_t;
typedef int int32_t;
typedef signed char int8_t;
typedef half float16_t;
struct bfloat16_t {
    unsigned short bits;
    bfloat16_t() = default;
    explicit bfloat16_t(float number);
    operator float() const __constant;
    operator float() const __global;
    operator float() const __private;
};
namespace metal {
int min(int a, int b);
float max(float a, float b);
namespace fast { float exp(float x); }
namespace precise { float tanh(float x); }
}
float simd_sum(float x);
namespace mem_flags { enum Flags { mem_threadgroup }; }
void threadgroup_barrier(mem_flags::Flags flags);
"""


def as_opencl(generated: str) -> str:
    """Returns the kernel with its template arguments as constants and types."""
    kernel, instance = generated.split("\ntemplate [[host_name", 1)
    declared = re.search(r"template <(.*)>\n\[\[kernel\]\]", kernel)
    given = re.search(r"decltype\(\w+<(.*)>\)", instance)
    assert declared is not None
    assert given is not None
    constants = []
    for parameter, argument in zip(declared[1].split(", "), given[1].split(", "), strict=True):
        kind, name = parameter.split()
        constants.append(
            f"typedef {argument} {name};" if kind == "typename" else f"enum {{ {name} = {argument} }};"
        )
    text = kernel[declared.end() :]
    # A kernel of OpenCL takes no reference. The parameter becomes a variable of the caller's kind.
    text = re.sub(r"const constant (\w+)& (\w+)", r"const \1 \2", text)
    text = re.sub(r"\[\[\w+(?:\(\d+\))?\]\]", "", text)
    return METAL + "\n".join(constants) + "\n__kernel" + text


def errors(source: str) -> list[str]:
    options = ["-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-target", "spir64"]
    unit = cindex.Index.create().parse("kernel.clcpp", options, unsaved_files=[("kernel.clcpp", source)])
    found = [str(each) for each in unit.diagnostics if each.severity >= cindex.Diagnostic.Warning]
    # OpenCL C++ has pointers into any address space. Metal has none.
    return found + [f"without an address space: {each}" for each in _ANY_SPACE.findall(source)]


class Recorder:
    """Replacement of `mx.fast.metal_kernel` that keeps what MLX writes, and computes zeros."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def __call__(self, name: str, inputs: Any, outputs: Any, source: str) -> Any:
        kernel = mx.fast.metal_kernel(name, inputs, outputs, source)

        def launch(*, inputs: Any, template: Any, output_shapes: Any, output_dtypes: Any, **_: Any) -> Any:
            self.written.append(generated_source(kernel, inputs, template, output_shapes, output_dtypes))
            return [mx.zeros(*made) for made in zip(output_shapes, output_dtypes, strict=True)]

        return launch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[(0, 1)], [(30, 3), (3, 1)]])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_the_kernels_are_valid_in_their_address_spaces(
    dtype: torch.dtype, lengths: list[tuple[int, int]], head_dim: int
) -> None:
    recorder = Recorder()
    for softcap in (None, 3.0):
        batch = make_batch(lengths, head_dim=head_dim, dtype=dtype, softcap=softcap, sinks=softcap is None)
        for least_split in (4, 1000):
            attend(PagedKernel(recorder, Occupancy(1000, least_split)), batch)
    for written in recorder.written:
        assert errors(as_opencl(written)) == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("const device T* key =", "const T* key =", "without an address space"),
        ("const device T* key =", "const threadgroup T* key =", "cannot initialize"),
        ("    threadgroup float tops", "    if (lane) { threadgroup float x[2]; x[0] = 1; }\n@", "outermost"),
        (f"{UNROLL}\n    for (int l", f"{UNROLL}\n    int l; for (l", "expected a for"),
        ("k[t][j] = key[j];", "k[t][j] = key[j]", "';'"),
        ("const device int* tile = tiles", "device int* tile = tiles", "const"),
    ],
)  # fmt: skip
def test_what_a_metal_compiler_refuses_is_found(old: str, new: str, told: str) -> None:
    recorder = Recorder()
    attend(PagedKernel(recorder), make_batch([(3, 1)], head_dim=64))
    written = as_opencl(recorder.written[0])
    assert old in written
    found = errors(written.replace(old, new.replace("@", old), 1))
    assert any(told in error for error in found), found
