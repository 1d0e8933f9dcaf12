"""L1: a fleet of three replicas beside other ways to choose one: hit rates, first tokens, and a killed replica.

    pow2, prefix    Ray Serve's power of two choices, and its router by prefixes (ray_policies.py)
    nginx           deploy/nginx.conf, by session, before three servers
    ours            `rootstock fleet`

Each policy has the same 150 streamed requests (fleet_load.py), without and with a shared tier. Replicas are oracles
at the speed of a small accelerator (fleet_replicas.py). How well teams fit into three caches is a matter of luck for
each policy, so without a shared tier figures are means over rounds of other texts. Then the busiest of our replicas
is killed midway: a client that asks once more loses nothing. Then real replicas, of the tiny model on torch. Every
answer is compared with the one of a single server.

Parts: policies, shared, kill, torch; about a minute for each fleet. The interpreter needs rootstock[fleet].
"""

from __future__ import annotations

import importlib.util
import shutil
import statistics
from collections.abc import Sequence
from typing import Any

from common import Bar, argument_parser, at_least, at_most, conclude, could_not, exactly
from fleet_load import Load, Place, Played, Shape
from fleet_sides import BARE, started

SHOW = "L1"
PARTS = ("policies", "shared", "kill", "torch")
POLICIES = ("pow2", "prefix", "nginx", "ours")
TORCH_SHAPE = Shape(teams=4, sessions=4, turns=4)


class Comparison:
    """Runs of fleets, and the answers that all of them have to give."""

    def __init__(self) -> None:
        self.runs: dict[str, list[Played]] = {}
        self.different = 0
        self._expected: dict[tuple[str, int], dict[Place, str]] = {}

    def run(
        self, policy: str, seed: int, runtime: str = "oracle", *, shared: bool = False, kills: bool = False
    ) -> None:
        """Plays the load on a fleet that starts for it, and compares its answers with those of a single server."""
        expected = self._expected_of(runtime, seed)
        with started(policy, runtime, shared=shared) as side:
            played = Load(side.url, _shape(runtime), seed).play(side.kill_busiest if kills else lambda: None)
        marks = [policy, *(["torch"] if runtime == "torch" else []), *(["shared"] if shared else [])]
        name = " ".join([*marks, *(["killed"] if kills else [])])
        self.runs.setdefault(name, []).append(played)
        different = sum(expected[place] != text for place, text in played.texts.items())
        self.different += different
        print(
            f"{name:<20} seed {seed}: {played.figures()}, {len(played.answers)} answers, {different} different, "
            f"{len(played.errors)} errors, {played.retried} after a retry, {len(played.lost)} lost",
            flush=True,
        )
        for error in played.errors[:6]:
            print(f"    {error}", flush=True)

    def _expected_of(self, runtime: str, seed: int) -> dict[Place, str]:
        if (runtime, seed) not in self._expected:
            with started(BARE, runtime) as side:
                played = Load(side.url, _shape(runtime), seed).play()
            assert not played.errors, played.errors
            self._expected[runtime, seed] = played.texts
        return self._expected[runtime, seed]

    def mean(self, name: str, figure: str) -> float | None:
        """Returns the mean of a figure over the rounds; None: there is no such run."""
        found = [played.figures()[figure] for played in self.runs.get(name, ())]
        return statistics.mean(found) if found else None


def _shape(runtime: str) -> Shape:
    return TORCH_SHAPE if runtime == "torch" else Shape()


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--part", default=",".join(PARTS), help="some of them, with commas between")
    options.add_argument("--policies", default=",".join(POLICIES), help="also: pow2-direct")
    options.add_argument("--rounds", type=int, default=3, help="of the part policies: the others have one")
    options.add_argument("--seed", type=int, default=0, help="of the first round")
    given = options.parse_args()
    parts, policies = given.part.split(","), given.policies.split(",")
    if importlib.util.find_spec("ray") is None:
        could_not(SHOW, "rootstock[fleet] is not installed")
    if "nginx" in policies and shutil.which("nginx") is None:
        could_not(SHOW, "nginx is not installed")
    compared = Comparison()
    for seed in range(given.seed, given.seed + given.rounds):
        for policy in policies if "policies" in parts else ():
            compared.run(policy, seed)
    for policy in policies if "shared" in parts else ():
        compared.run(policy, given.seed, shared=True)
    if "kill" in parts:
        compared.run("ours", given.seed, kills=True)
        compared.run("ours", given.seed, shared=True, kills=True)
    for policy in ("pow2", "ours") if "torch" in parts else ():
        compared.run(policy, given.seed, "torch")
    print_table(compared)
    conclude(SHOW, *judged(compared, parts, policies))


def judged(
    compared: Comparison, parts: Sequence[str], policies: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Bar]]:
    figures: dict[str, Any] = {
        f"{name.replace(' ', '_')}_{figure}": round(value, 4)
        for name in compared.runs
        for figure in ("hit_rate", "ttft_p50_ms", "ttft_p95_ms")
        if (value := compared.mean(name, figure)) is not None
    }
    killed = [played for name, runs in compared.runs.items() if "killed" in name for played in runs]
    whole = [played for name, runs in compared.runs.items() if "killed" not in name for played in runs]
    figures |= {
        "different_answers": compared.different,
        "errors_without_a_kill": sum(len(played.errors) for played in whole),
        "cut_by_a_kill": sum(len(played.errors) for played in killed),
        "lost": sum(len(played.lost) for played in (*whole, *killed)),
    }
    bars = {name: exactly(0) for name in ("different_answers", "errors_without_a_kill", "lost")}
    if "policies" in parts and {"ours", "prefix"} <= set(policies):
        ours, prefix = (
            [compared.mean(policy, figure) or 0.0 for figure in ("hit_rate", "ttft_p95_ms")]
            for policy in ("ours", "prefix")
        )
        figures["hit_rate_to_prefix"] = round(ours[0] / prefix[0], 4)
        figures["ttft_p95_to_prefix"] = round(ours[1] / prefix[1], 4)
        bars |= {"hit_rate_to_prefix": at_least(1.0), "ttft_p95_to_prefix": at_most(0.7)}
    if "shared" in parts:
        rates = [compared.mean(f"{policy} shared", "hit_rate") or 0.0 for policy in policies]
        figures["least_shared_hit_rate"] = round(min(rates), 4)
        bars["least_shared_hit_rate"] = at_least(0.87)
    return figures, bars


def print_table(compared: Comparison) -> None:
    print("\nfleet                 hit rate  TTFT p50 ms  p95 ms  errors  lost")
    for name, runs in compared.runs.items():
        rate, middle, high = (
            compared.mean(name, figure) for figure in ("hit_rate", "ttft_p50_ms", "ttft_p95_ms")
        )
        errors, lost = sum(len(run.errors) for run in runs), sum(len(run.lost) for run in runs)
        print(f"{name:<20}  {rate:>8.3f}  {middle:>11.0f}  {high:>6.0f}  {errors:>6}  {lost:>4}")
    print(flush=True)


if __name__ == "__main__":
    main()
