"""Compiles the kernels of a step for a CUDA device of the given compute capability. Needs no device.

Triton's interpreter runs Python. Only the compiler refuses code that is not allowed in a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.batches import make_batch
from rootstock.cache.families import ChunkedAttention, SlidingWindow, TokenFamily
from rootstock.kernels.cuda import triton_attention
from rootstock.kernels.spans import EVERYTHING

SHARED_BYTES = {80: 99 << 10, 90: 227 << 10}  # 80: the least of any device since then
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32"}
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
        for number, (name, value) in enumerate(zip(self.kernel.arg_names, given, strict=False)):
            if isinstance(value, torch.Tensor):
                signature[name] = "*" + TYPES[value.dtype]
                attributes[(number,)] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[name] = "fp32"
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
        if constants.get("KEY_DIM", 0) >= 16 and "*bf16" in signature.values():
            assert "mma" in compiled.asm["ptx"], "matrix units are not used"
        self.done.add(compiled.hash)


def main() -> None:
    capability = int(sys.argv[1])
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
    main()
