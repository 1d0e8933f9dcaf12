"""Compiles the kernels of attention or of products for a CUDA device of the given capability. Needs no device.

Triton's interpreter runs Python. Only the compiler refuses code that is not allowed in a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.batches import make_batch
from rootstock.cache.families import ChunkedAttention, SlidingWindow, TokenFamily
from rootstock.kernels.cuda import triton_attention, triton_coded
from rootstock.kernels.spans import EVERYTHING
from rootstock.kernels.torch.coded_weight import CENTRED, INTEGERS, NORMAL, UNSIGNED, CodedWeight, Numbers

SHARED_BYTES = {80: 99 << 10, 90: 227 << 10}  # 80: the least of any device since then
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
}
FP8 = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0)
VARIANTS: list[tuple[int, TokenFamily, float | None, bool]] = [  # dimensions, family, softcap, sinks
    (128, EVERYTHING, None, False),
    (96, SlidingWindow(1, 1, 20), 30.0, True),
    (512, ChunkedAttention(1, 1, 16), None, False),
]


class Compiles:
    """Replacement of a kernel: a launch compiles it."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel = kernel
        self.shared_bytes = SHARED_BYTES[capability]
        self.target = GPUTarget("cuda", capability, 32)
        self.done: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.compile

    def compile(self, *given: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
        signature, attributes = dict.fromkeys(self.kernel.arg_names, "constexpr"), {}
        for number, (parameter, value) in enumerate(zip(self.kernel.params, given, strict=False)):
            name = parameter.name
            if isinstance(value, torch.Tensor):
                signature[name] = "*" + TYPES[value.dtype]
                attributes[(number,)] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif parameter.do_not_specialize:
                signature[name] = "i32"
            elif value is None or value == 1:
                constants[name] = value
            else:
                signature[name] = "i32"
                if value % 16 == 0:
                    attributes[(number,)] = [["tt.divisibility", 16]]
        options = {"num_warps": num_warps, "num_stages": num_stages}
        compiled = triton.compile(
            ASTSource(self.kernel, signature, constants, attributes), target=self.target, options=options
        )
        assert compiled.metadata.shared <= self.shared_bytes, (compiled.metadata.shared, constants)
        multiplies = constants.get("KEY_DIM", 0) >= 16 or "VALUES" in constants
        if multiplies and signature.get("query", signature.get("x")) == "*bf16":
            assert "mma" in compiled.asm["ptx"], "matrix units are not used"
        self.done.add(compiled.hash)


def weights() -> Iterator[CodedWeight]:
    """Yields weights [2, 96, 1024] of every kind of codes, groups and scales."""
    half = torch.float16
    for values, group, own, shared, minima, in_scales in (
        (NORMAL, 64, torch.bfloat16, None, None, False),
        (NORMAL, 32, torch.float32, None, torch.float32, False),
        (UNSIGNED, 32, torch.uint8, half, torch.uint8, False),
        (CENTRED, 1024, half, None, half, True),
        (INTEGERS, 16, torch.int8, half, None, False),
        (INTEGERS.square(), 96, torch.float32, None, torch.float32, False),
        (FP8, 128, torch.float32, None, None, False),
    ):
        groups = -(-1024 // group)
        factors = None if shared is None else torch.zeros(2, 96, groups // 8, dtype=shared)
        numbers = [
            None if dtype is None else Numbers(torch.zeros(2, 96, groups, dtype=dtype), factors, 8)
            for dtype in (own, minima)
        ]
        assert numbers[0] is not None
        codes = torch.zeros(2, 96, 1024 * (4 if len(values) == 16 else 8) // 8, dtype=torch.uint8)
        yield CodedWeight(codes, values, numbers[0], numbers[1], group, in_scales)


def compile_products(capability: int) -> None:
    kernels = [Compiles(getattr(triton_coded, name), capability) for name in ("_multiply", "_merge")]
    triton_coded._multiply, triton_coded._merge = kernels
    for weight in weights():
        is_first = weight.group == 64
        for dtype in (torch.bfloat16, torch.float32) if is_first else (torch.bfloat16,):
            layers = triton_coded.TritonCodedLayers(weight, dtype, torch.zeros(2, 96))
            for rows in (1, 40, 130, 300) if is_first else (1, 130):  # of 300 rows the inputs are not split
                layers.multiply(torch.zeros(rows, 1024, dtype=dtype))
        layers.multiply(torch.zeros(3, 1024, dtype=torch.bfloat16), torch.tensor([0, 1, 1]))
    assert all(kernel.done for kernel in kernels)
    print("compiled", *(len(kernel.done) for kernel in kernels))


def compile_attention(capability: int) -> None:
    kernels = [Compiles(getattr(triton_attention, name), capability) for name in ("_attend", "_merge")]
    triton_attention._attend, triton_attention._merge = kernels
    cpu = torch.device("cpu")
    for dtype in (torch.bfloat16, torch.float32):
        for dim, family, softcap, sinks in VARIANTS if dtype == torch.bfloat16 else VARIANTS[:1]:
            batch = make_batch(
                [(600, 1), (40, 30)],
                block_size=16,
                q_heads=8,
                kv_heads=2,
                head_dim=dim,
                dtype=dtype,
                family=family,
                softcap=softcap,
                sinks=sinks,
            )
            for least_split in (16, 1000) if dim == 128 else (16,):  # split, and not
                attention = triton_attention.TritonAttention(16, cpu, least_split)
                attention.shared_bytes = SHARED_BYTES[capability]
                step = attention.prepare(batch.spans, batch.family)
                keys, values = batch.keys.flatten(0, 1), batch.values.flatten(0, 1)
                step(batch.query, batch.key, batch.value, keys, values, batch.scores)
    print("compiled", *(len(kernel.done) for kernel in kernels))


if __name__ == "__main__":
    {"attention": compile_attention, "products": compile_products}[sys.argv[2]](int(sys.argv[1]))
