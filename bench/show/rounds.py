"""Two sides timed in turn, and the ratio of each round. Rounds that other processes disturbed are left out."""

from __future__ import annotations

import math
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch
from common import argument_parser
from llamas import say
from neighbours import Neighbours

QUIET = 0.05  # largest share of the processors of other processes, where wall time is measured
ANYHOW = 1.0  # every round counts

Timed = Callable[[], float]  # returns seconds


class Rounds:
    """Rounds of two sides. Quiet ones count, or all of them if fewer than `least` were quiet."""

    def __init__(self, least: int, quiet: float = QUIET) -> None:
        """`quiet` is the largest share of the processors that others may take in a quiet round."""
        self._least = least
        self._quiet = quiet
        self._all: list[tuple[float, float, float | None]] = []  # our seconds, theirs, others' share

    def add(self, ours_s: float, dense_s: float, others: float | None) -> None:
        self._all.append((ours_s, dense_s, others))

    @property
    def quiet(self) -> int:
        return len(self._quiet_ones)

    @property
    def counted(self) -> list[tuple[float, float]]:
        quiet = self._quiet_ones
        return quiet if len(quiet) >= self._least else [(ours, dense) for ours, dense, _ in self._all]

    @property
    def _quiet_ones(self) -> list[tuple[float, float]]:
        return [(ours, dense) for ours, dense, others in self._all if others is None or others <= self._quiet]

    @property
    def ratios(self) -> list[float]:
        return [ours / dense for ours, dense in self.counted]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def ours_ms(self) -> float:
        return statistics.median(ours for ours, _ in self.counted) * 1e3

    @property
    def dense_ms(self) -> float:
        return statistics.median(dense for _, dense in self.counted) * 1e3

    def figures(self, name: str) -> dict[str, Any]:
        return {
            f"ratio_{name}": round(self.ratio, 4),
            f"ratios_{name}": [round(ratio, 3) for ratio in self.ratios],
            f"quiet_{name}": f"{self.quiet} of {len(self._all)} rounds",
            f"ours_ms_{name}": round(self.ours_ms, 2),
            f"dense_ms_{name}": round(self.dense_ms, 2),
        }


def comparison_options(description: str | None, model: str) -> ArgumentParser:
    options = argument_parser(description)
    options.add_argument("--model", default=model)
    options.add_argument("--rounds", type=int, help="number of rounds")
    options.add_argument("--threads", type=int, help="of both sides (default: torch's own)")
    options.add_argument(
        "--cpu-time",
        action="store_true",
        help="measure the processor time of one thread on both sides, for a machine that others use",
    )
    return options


def parse_comparison(
    options: ArgumentParser, rounds: tuple[int, int]
) -> tuple[Namespace, tuple[int, int], dict[str, Any]]:
    """Sets torch's threads. Returns the options, the least and the most rounds, and the first figures."""
    given = options.parse_args()
    if given.cpu_time:
        given.threads = 1
    if given.threads:
        torch.set_num_threads(given.threads)
    figures: dict[str, Any] = {"threads": torch.get_num_threads(), "dtype": "bfloat16", "model": given.model}
    figures["clock"] = "processor" if given.cpu_time else "wall"
    return given, (given.rounds, given.rounds) if given.rounds else rounds, figures


def in_turn(
    name: str,
    ours: Timed,
    dense: Timed,
    rounds: tuple[int, int],
    seconds: float = math.inf,
    quiet: float = QUIET,
    between: Callable[[], object] = lambda: None,
    other: str = "dense",
) -> Rounds:
    """Times both sides in turn, for the least to the most quiet `rounds`.

    After `seconds` no round begins if the least number of quiet ones is reached; after three times as long none
    begins if the least number of rounds of any kind is reached.
    """
    least, most = rounds
    done = Rounds(least, quiet)
    began = time.monotonic()
    number = 0
    while True:
        took_s = time.monotonic() - began
        if done.quiet >= most or (done.quiet >= least and took_s > seconds):
            break
        if number >= least and took_s > 3 * seconds:
            break
        neighbours = Neighbours()
        # The sides change places, so that neither always finds the machine in the other's state.
        if number % 2:
            dense_s = dense()
            ours_s = ours()
        else:
            ours_s = ours()
            dense_s = dense()
        done.add(ours_s, dense_s, neighbours.share())
        between()
        number += 1
    say(
        f"{name}: {done.ours_ms:.1f} ms, {other} {done.dense_ms:.1f} ms, ratio {done.ratio:.3f} "
        f"({min(done.ratios):.3f} to {max(done.ratios):.3f}; {done.quiet} of {number} rounds were quiet)"
    )
    return done
