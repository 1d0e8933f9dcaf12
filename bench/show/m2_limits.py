"""M2: a forward's shares of the machine's limit, on a CPU in bfloat16.

The limits are two rates, measured between the rounds: a product of two 2,048² matrices in bfloat16, and a sum over
1 GiB. A share is of the mean of the rates before and after it, because other users of the machine change them. The
figures are medians of the rounds.

  prefill_linear      of 1,650 tokens: products of linear layers (2 · inputs · outputs · rows) by the product's rate
  prefill_attention   of the same prompt: 4 · head_dim · query heads · pairs of a token and a position that it sees
  decode_b1, _b8      weights of linear layers and K and V of all contexts of 512, read once, by the sum's rate, in a
                      whole step of the engine; nothing is shared
  hybrid_decode       a step of eight sequences of a hybrid by the Llama's of equal size
  hybrid_prefill      its tokens per second by the Llama's

The Llama has 80 million random weights. Three of four layers of the hybrid, also of 80 million, are gated delta nets.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import argument_parser, at_least, at_most, conclude
from d2_decode_step import ReadBandwidth
from llamas import random_prompts, save_model, say, write_hybrid
from neighbours import Neighbours
from our_side import Ours

from rootstock.kernels.torch.linear import prepare
from rootstock.runtime.torch.step_cache import PackedCache

SHOW = "M2"
PROMPT, CONTEXT, STEPS = 1650, 512, 16
SIDE = 2048
LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 13, 10, 5, 64  # of the Llama
KV_BYTES = 2 * 2 * LAYERS * KV_HEADS * HEAD_DIM
PAIRS = PROMPT * (PROMPT + 1) // 2
ATTENTION_FLOP = 4 * HEAD_DIM * Q_HEADS * PAIRS * LAYERS


class Rates:
    """Rates of the machine: operations per second, and bytes per second."""

    def __init__(self) -> None:
        self._a, self._b = (torch.randn(SIDE, SIDE).bfloat16() for _ in range(2))
        self._memory = ReadBandwidth()
        self.flops: list[float] = []
        self.bytes_per_s: list[float] = []
        self.measure()

    def measure(self) -> None:
        def product_s() -> float:
            began = time.perf_counter()
            self._a @ self._b
            return time.perf_counter() - began

        self.flops.append(2 * SIDE**3 / min(product_s() for _ in range(7)))
        self.bytes_per_s.append(1e9 * max(self._memory.measure() for _ in range(3)))


class Spent:
    """Seconds and operations of linear layers, and seconds of attention, while it is installed."""

    def __init__(self) -> None:
        self.linear_s = self.attention_s = 0.0
        self.flop = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        packed: Any = type(prepare(torch.zeros(2, 2, dtype=torch.bfloat16), None))
        multiply, attend = packed.__call__, PackedCache.attend

        def timed_multiply(layer: Any, x: Any) -> Any:
            began = time.perf_counter()
            product = multiply(layer, x)
            self.linear_s += time.perf_counter() - began
            self.flop += 2 * layer.in_features * layer.out_features * (x.numel() // layer.in_features)
            return product

        def timed_attend(cache: PackedCache, *given: Any, **more: Any) -> Any:
            began = time.perf_counter()
            attended = attend(cache, *given, **more)
            self.attention_s += time.perf_counter() - began
            return attended

        packed.__call__ = timed_multiply
        PackedCache.attend = timed_attend  # type: ignore[method-assign]
        try:
            yield
        finally:
            packed.__call__ = multiply
            PackedCache.attend = attend  # type: ignore[method-assign]


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--rounds", type=int, default=7)
    given = options.parse_args()
    rates, neighbours = Rates(), Neighbours()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        llama = Ours(save_model("80m", Path(folder)), "bfloat16", gib=1.0)
        hybrid = Ours(write_hybrid(Path(folder) / "hybrid"), "bfloat16", gib=1.0)
        for number in range(-1, given.rounds):  # the first use of each allocates, and is not counted
            measured = one_round(llama, hybrid, rates, number)
            if number >= 0:
                say(", ".join(f"{name} {value:.4f}" for name, value in measured.items()))
                for name, value in measured.items():
                    found.setdefault(name, []).append(value)
    figures: dict[str, Any] = {name: round(statistics.median(values), 4) for name, values in found.items()}
    figures |= {
        "gemm_gflops": round(statistics.median(rates.flops) / 1e9),
        "read_gb_per_s": round(statistics.median(rates.bytes_per_s) / 1e9, 1),
        "read_gb_per_s_least": round(min(rates.bytes_per_s) / 1e9, 1),
        "read_gb_per_s_most": round(max(rates.bytes_per_s) / 1e9, 1),
        "others_share": neighbours.share(),
    }
    conclude(
        SHOW,
        figures,
        {
            "prefill_linear": at_least(0.9),
            "prefill_attention": at_least(0.5),
            "decode_b1": at_least(0.75),
            "decode_b8": at_least(0.6),
            "hybrid_decode": at_most(1.3),
            "hybrid_prefill": at_least(0.8),
        },
    )


def one_round(llama: Ours, hybrid: Ours, rates: Rates, number: int) -> dict[str, float]:
    """Returns the seconds and the shares of one round."""
    measured: dict[str, float] = {}

    def timed(name: str, take: Callable[[], float]) -> float:
        measured[name] = took = take()
        rates.measure()
        return took

    prompts, spent = random_prompts(2, PROMPT, seed=number + 1), Spent()
    with spent.installed():
        timed("prefill_s", lambda: llama.first_token_s(prompts[0]))
    measured["prefill_linear"] = spent.flop / spent.linear_s / mean(rates.flops)
    measured["prefill_attention"] = ATTENTION_FLOP / spent.attention_s / mean(rates.flops)
    prefill_s = timed("prefill_s", lambda: llama.first_token_s(prompts[1]))
    measured["hybrid_prefill"] = prefill_s / timed(
        "hybrid_prefill_s", lambda: hybrid.first_token_s(prompts[0])
    )
    contexts = random_prompts(8, CONTEXT, seed=100 + number)
    step_s = 0.0
    for batch in (1, 8):
        step_s = timed(f"decode_b{batch}_s", lambda batch=batch: decode_s(llama, contexts[:batch]))  # type: ignore[misc]
        limit_s = (weights_bytes(llama) + batch * CONTEXT * KV_BYTES) / mean(rates.bytes_per_s)
        measured[f"decode_b{batch}"] = limit_s / step_s
    measured["hybrid_decode"] = timed("hybrid_decode_s", lambda: decode_s(hybrid, contexts)) / step_s
    return measured


def mean(measured: list[float]) -> float:
    """Returns the mean of the last two, which were measured before and after."""
    return statistics.mean(measured[-2:])


def decode_s(ours: Ours, contexts: Any) -> float:
    ours.generate(list(contexts), 1)  # so that all begin to decode in one step
    return ours.decode_step_s(contexts, STEPS)


def weights_bytes(llama: Ours) -> int:
    """Returns the bytes of linear layers: the embedding is tied, and read as the head."""
    return 2 * llama.parameters


if __name__ == "__main__":
    main()
