"""D8: the promises of steps A to C hold with every kernel: their exactness tests, once for each way of computing.

A way is the kernel for decodes (Numba's, or torch's alone), with or without fusion of the common parts of layers.
Steps A to C were shown with the last of them. The tests are the repository's own: tiny checkpoints of every kind
through the real loader against the model's own logits, kernels against float64, restarts bit for bit, and drafts that
change no token. Triton's kernel is tested by its interpreter where Triton is installed, and on a device where there
is one; the figure `triton` says if it is not installed.

The tree, the scheduler and tiers on the oracle runtime use no kernel: they are in `make test`, A3, B3 and C7.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

from common import argument_parser, conclude, exactly
from own_tests import run_tests

WAYS = {
    "numba_fused": {"ROOTSTOCK_TEST_ATTENTION": "numba", "ROOTSTOCK_TEST_FUSION": "auto"},
    "numba": {"ROOTSTOCK_TEST_ATTENTION": "numba", "ROOTSTOCK_TEST_FUSION": "none"},
    "torch_fused": {"ROOTSTOCK_TEST_ATTENTION": "torch", "ROOTSTOCK_TEST_FUSION": "auto"},
    "torch": {"ROOTSTOCK_TEST_ATTENTION": "torch", "ROOTSTOCK_TEST_FUSION": "none"},
}
WITH_EVERY_WAY = (
    "tests/twins",
    "tests/runtime/torch/test_runner.py",
    "tests/runtime/torch/test_kv_pool.py",
    "tests/runtime/torch/test_module_parts.py",
    "tests/runtime/torch/test_rows_as_bytes.py",
    "tests/runtime/torch/test_quantized_kv.py",
    "tests/engine/tiers/test_connector_torch.py",
    "tests/engine/speculation/test_proposer_torch.py",
)


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--ways", default=",".join(WAYS), help="comma-separated")
    given = options.parse_args()

    figures: dict[str, Any] = {}
    figures["kernels"], figures["kernels_s"] = passed({}, "tests/kernels")
    for way in given.ways.split(","):
        figures[way], figures[f"{way}_s"] = passed(WAYS[way], *WITH_EVERY_WAY)
    bars = {name: exactly(True) for name in ("kernels", *WAYS)}
    figures["triton"] = (
        "with tests/kernels" if importlib.util.find_spec("triton") else "not installed: skipped there"
    )
    conclude("D8", figures, bars)


def passed(way: dict[str, str], *tests: str) -> tuple[bool, float]:
    """Runs tests. Returns whether all pass, and the seconds."""
    began = time.perf_counter()
    return run_tests(*tests, environment=way) == 0, round(time.perf_counter() - began, 1)


if __name__ == "__main__":
    main()
