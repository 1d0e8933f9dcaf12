"""I5: the Metal kernels of paged attention, run thread by thread as C++, equal the reference for all that they claim.

The grid: every group of query heads from 1 to 16 and larger ones; head sizes from 8 to 576, also those that 32 lanes
do not divide, with V as wide as K, narrower, wider, or the beginning of K; float32, float16 and bfloat16, and pools
of int8 with queries of these; contexts whole and split, decodes and several rows of a sequence; full attention,
windows and chunks; sinks; softcap; block sizes that are powers of two and others; threads in both orders. MLX writes
the whole function, as for a device.

Mutations: the source is changed, each time by one mistake, and each must show: as an error beyond the tolerance or as
undefined behaviour that the emulation reports.

No Metal toolchain exists outside of macOS. The rules of address spaces are checked by tests/kernels/metal/
test_metal_syntax.py, with clang's OpenCL C++.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import argument_parser, at_least, conclude, could_not, exactly

from kernels.batches import make_batch
from kernels.metal.emulation import COMPILER, Emulation, EmulationError
from kernels.metal.metal_batches import TOLERANCES, worst_error
from rootstock.cache.families import ChunkedAttention, SlidingWindow
from rootstock.kernels.metal.launch import Occupancy
from rootstock.kernels.metal.paged_attention import PagedKernel
from rootstock.kernels.metal.source import ATTEND, MERGE
from rootstock.kernels.spans import EVERYTHING

SHOW = "I5"
OCCUPANCIES = (Occupancy(threadgroups=1), Occupancy(threadgroups=1000, least_split=5))
FAMILIES = (EVERYTHING, SlidingWindow(1, 1, 11), ChunkedAttention(1, 1, 16))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = (*range(1, 17), 24, 71, 128)
SIZES = (8, 16, 24, 32, 40, 48, 64, 72, 80, 88, 96, 112, 120, 128, 160, 192, 224, 256, 512)
UNEQUAL = ((192, 128), (128, 192), (96, 64), (80, 256), (256, 80), (576, 512))
SHARED = ((96, 64), (576, 512))  # V is the beginning of K
DECODES = [(36, 1), (0, 1), (21, 1)]
DRAFTS = [(30, 5), (17, 1), (0, 16)]

PARTS = "p < parts; ++p)\n                    "
MUTATIONS: dict[str, tuple[str, str]] = {
    "window dropped: decodes": ("begin = tile[3]", "begin = 0"),
    "window dropped: several rows": ("position >= seen_from[l] && ", ""),
    "not causal": (" && position < seen_to[l]", ""),
    "sink lost": ("sum[l] = 1;", ""),
    "sink in every split": ("SINKS && split == 0 &&", "SINKS &&"),
    "sink in every part": ("split == 0 && part == 0)", "split == 0)"),
    "K of another head": ("(slot * HEADS + head) * D", "(slot * HEADS + (head + 1) % HEADS) * D"),
    "V of another head": ("(slot * HEADS + head) * VALUE_ROW", "slot * HEADS * VALUE_ROW"),
    "query of another head": ("query[place * D", "query[(place / G * G) * D"),
    "next block": ("position / BLOCK]", "(position + 1) / BLOCK]"),
    "table of another sequence": ("table + tile[0]", "table"),
    "scale forgotten": ("q[l][j] = scale * ", "q[l][j] = "),
    "scale of K forgotten": ("score *= key_scale[t];", ""),
    "scale of V forgotten": ("weight * value_scale[t]", "weight"),
    "scale of another head": ("key_scales[slot * HEADS + head]", "key_scales[slot * HEADS]"),
    "scale of another position": ("value_scales[slot *", "value_scales[slot / BLOCK * BLOCK *"),
    "softcap forgotten": ("if (SOFTCAP)", "if (false)"),
    "softcap not restored": ("score = softcap * metal", "score = metal"),
    "earlier sums not faded": ("sum[l] *= fade;", ""),
    "earlier results not faded": ("o[l][j] *= fade;", "o[l][j] *= 1;"),
    "parts merged unfaded": ("sums[other] * metal::fast::exp(tops[other] - highest)", "sums[other]"),
    "a part left out": (f"int p = 0; {PARTS}added", f"int p = 1; {PARTS}added"),
    "splits merged unfaded": ("added += fade * piece[d];", "added += piece[d];"),
    "splits' sums unfaded": ("total += fade * piece[V + 1];", "total += piece[V + 1];"),
    "a split left out": ("for (int s = 0; s < used; ++s) {", "for (int s = 1; s < used; ++s) {"),
    "splits that were never written": ("s < used; ++s)", "s < splits; ++s)"),
    "a position in two splits": ("from + span)", "from + span + 1)"),
    "results not divided": ("total > 0 ? added / total : 0.0f", "added"),
    "no barrier before the merge": ("threadgroup_barrier(mem_flags::mem_threadgroup);\n#pragma", "\n#pragma"),
    "no barrier between lines": ("        threadgroup_barrier(mem_flags::mem_threadgroup);\n    }", "    }"),
    "a lane leaves": ("if (split > 0 && from >= to)", "if (lane == 3)"),
}  # fmt: skip


def cases() -> Iterator[tuple[dict[str, Any], list[tuple[int, int]], dict[str, Any]]]:
    """Yields arguments of `make_batch`, lengths, and options of `metal_batches.attend`."""
    number = 0
    heads: list[dict[str, Any]] = [{"group": g, "head_dim": 64} for g in GROUPS]
    heads += [{"group": 1 + i % 5, "head_dim": size} for i, size in enumerate(SIZES)]
    heads += [{"group": 2, "head_dim": 256}, {"group": 16, "head_dim": 256}, {"group": 16, "head_dim": 128}]
    heads += [{"group": 4, "head_dim": k, "value_dim": v} for k, v in UNEQUAL]
    heads += [{"group": 16, "head_dim": k, "shared": v} for k, v in SHARED]
    for its, lengths in product(heads, (DECODES, DRAFTS)):
        fields = dict(its)
        group, shared = fields.pop("group"), fields.pop("shared", 0)
        kv_heads = 1 if group > 8 else 2
        # Each feature varies at its own pace, so that all pairs of them occur along the grid.
        fields |= {
            "q_heads": kv_heads * group,
            "kv_heads": kv_heads,
            "dtype": DTYPES[number % 3],
            "family": FAMILIES[number // 3 % 3],
            "sinks": number // 2 % 2 == 1,
            "softcap": 3.0 if number // 4 % 2 else None,
            "block_size": (16, 7, 32, 12, 1)[number % 5],
            "layout": ("scattered", "runs", "contiguous")[number % 3],
            "seed": number,
        }
        yield fields, lengths, {"shared_value_dim": shared, "is_quantized": number % 5 == 4}
        number += 1
    for dtype, family, sinks, softcap, lengths, is_quantized in product(
        DTYPES, FAMILIES, (False, True), (None, 3.0), (DECODES, DRAFTS), (False, True)
    ):
        yield (
            {
                "q_heads": 8,
                "kv_heads": 2,
                "head_dim": 128,
                "dtype": dtype,
                "family": family,
                "sinks": sinks,
                "softcap": softcap,
                "block_size": 16,
                "seed": number,
            },
            lengths,
            {"is_quantized": is_quantized},
        )
        number += 1


def is_caught(directory: Path, old: str, new: str) -> bool:
    """Tells whether a mutation shows in a few batches of one kind of layer."""
    fields = {"q_heads": 6, "kv_heads": 2, "head_dim": 32, "block_size": 7, "sinks": True, "softcap": 3.0}
    for lengths, family, occupancy in product(([(60, 1), (9, 1)], [(50, 4), (70, 1)]), FAMILIES, OCCUPANCIES):
        kernel = PagedKernel(Emulation(directory, replace={old: new}), occupancy)
        try:
            batch = make_batch(lengths, family=family, **fields)
            error = max(worst_error(kernel, batch), worst_error(kernel, batch, is_quantized=True))
        except EmulationError:
            return True
        if error > TOLERANCES[torch.float32]:
            return True
    return False


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--every", type=int, default=1, help="take one case in EVERY (default: 1)")
    given = parser.parse_args()
    if COMPILER is None:
        could_not(SHOW, "g++ is not installed")
    began = time.monotonic()
    worst = dict.fromkeys(map(str, DTYPES), 0.0)
    wrong, ran, kernels = [], 0, 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for number, (fields, lengths, attended) in enumerate(cases()):
            if number % given.every:
                continue
            for occupancy in OCCUPANCIES:
                emulation = Emulation(directory, reversed=number % 2)
                batch = make_batch(lengths, **fields)
                error = worst_error(PagedKernel(emulation, occupancy), batch, **attended)
                kernels += emulation.kernels
                ran += 1
                dtype = fields["dtype"]
                worst[str(dtype)] = max(worst[str(dtype)], error)
                if not error <= TOLERANCES[dtype]:
                    wrong.append({"error": error, "lengths": lengths, **attended, **fields})
        baseline = is_caught(directory, "no such text", "")
        missed = [name for name, (old, new) in MUTATIONS.items() if not is_caught(directory, old, new)]
        absent = [name for name, (old, _) in MUTATIONS.items() if old not in ATTEND + MERGE]
    for each in wrong:
        print(each, flush=True)
    figures = {
        "cases": ran,
        "wrong": len(wrong),
        "functions_compiled": kernels,
        **{
            f"worst_{dtype.removeprefix('torch.')}": float(np.float32(error))
            for dtype, error in worst.items()
        },
        "mutations": len(MUTATIONS),
        "mutations_missed": missed,
        "mutations_absent": absent,
        "unchanged_source_is_caught": baseline,
        "seconds": round(time.monotonic() - began),
    }
    conclude(
        SHOW,
        figures,
        {
            "cases": at_least(300 // given.every),
            "wrong": exactly(0),
            "mutations": at_least(10),
            "mutations_missed": exactly([]),
            "mutations_absent": exactly([]),
            "unchanged_source_is_caught": exactly(False),
        },
    )


if __name__ == "__main__":
    main()
