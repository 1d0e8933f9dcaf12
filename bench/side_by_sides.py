"""Runs the shows of speed (D1, D2, …), each as a process of its own, and keeps their results.

    side_by_sides.py [D2 D4 …] [--out bench/results]

For each one a JSON file, `<date>-<commit>-<show>.json`: figures, bars, the machine, the commit, the seconds it took;
and a picture beside it. `make bench` calls this. Exit status 0 only if every bar was met.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "show"))

from run import Outcome, available_scripts, print_summary, run  # noqa: E402  # found by the line above

from rootstock.cli.machine import this_machine  # noqa: E402
from source import this_source  # noqa: E402

SPEED = ("D", "M")
EXACTNESS = "D8"  # runs the tests, measures nothing
OURS, THEIRS, LIMIT, GOOD, BAD = "#4477aa", "#bbbbbb", "#ee6677", "#228833", "#cc3311"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("shows", nargs="*", help="all of D and M unless given")
    options.add_argument("--out", type=Path, default=HERE / "results")
    given = options.parse_args()
    scripts = available_scripts()
    asked = [show.upper() for show in given.shows] or [
        show for show in scripts if show.startswith(SPEED) and show != EXACTNESS
    ]
    unknown = [show for show in asked if show not in scripts]
    if unknown:
        print(f"There is no show {', '.join(unknown)}; there are {', '.join(scripts)}.", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for show in asked:
        outcomes.append(run(show, scripts[show]))
        for path in keep(outcomes[-1], given.out):
            print(f"wrote {path}")
    print_summary(outcomes)
    return 0 if all(outcome.met for outcome in outcomes) else 1


def keep(outcome: Outcome, out: Path) -> list[Path]:
    """Writes a show's result, or that it printed none. Returns the written files."""
    source, now = this_source(), datetime.datetime.now(datetime.UTC)
    stem = out / f"{now:%Y%m%dT%H%M%SZ}-{source.commit or 'no-commit'}-{outcome.show}"
    row = {
        **asdict(source),
        "machine": asdict(this_machine()),
        "date": now.isoformat(timespec="seconds"),
        "seconds": round(outcome.seconds, 1),
        **(outcome.result or {"show": outcome.show, "figures": {"could_not": outcome.remark}, "met": False}),
    }
    lines, picture = stem.with_suffix(".json"), stem.with_suffix(".png")
    lines.write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
    return [lines, picture] if plot(row, picture) else [lines]


def plot(row: dict[str, Any], path: Path) -> bool:
    """Draws a PNG. Returns False if there is nothing to draw, or no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed (make setup)")
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    draw = {"D2": draw_decode_steps, "D4": draw_agents}.get(row["show"], draw_bars)
    figure = pyplot.figure(figsize=(9, 4.2), layout="constrained")
    drawn = draw(figure, row)
    if drawn:
        machine, commit = row["machine"]["cpu"], row["commit"]
        figure.suptitle(f"{row['show']} · {machine} · {commit}", fontsize=9)
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return drawn


def draw_decode_steps(figure: Any, row: dict[str, Any]) -> bool:
    """Draws a panel for each context: the ratio to dense, and the limit, by batch."""
    figures = row["figures"]
    cases = [name.removeprefix("ratio_b").split("_") for name in figures if name.startswith("ratio_b")]
    contexts = list(dict.fromkeys(context for _, context in cases))
    for panel, context in enumerate(contexts):
        axes = figure.add_subplot(1, len(contexts), panel + 1)
        batches = [batch for batch, of in cases if of == context]
        ratios = [figures[f"ratio_b{batch}_{context}"] for batch in batches]
        limits = [figures[f"limit_b{batch}_{context}"] for batch in batches]
        axes.bar(batches, ratios, color=OURS, label="Rootstock")
        axes.bar(batches, limits, 0.4, color=LIMIT, label="reading weights and K/V once")
        axes.axhline(1.0, color=THEIRS, label="transformers, DynamicCache")
        axes.set_title(f"A decode step, contexts of {int(context):,}")
        axes.set_xlabel("sequences")
        axes.set_ylabel("time, dense = 1")
        axes.set_ylim(0, 1.4 * max(1.0, *ratios))  # the legend has its room above
        axes.legend(fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return bool(contexts)


def draw_agents(figure: Any, row: dict[str, Any]) -> bool:
    figures = row["figures"]
    sides = [name.removeprefix("wall_s_") for name in figures if name.startswith("wall_s_")]
    for panel, (key, title) in enumerate(
        (
            ("wall_s", "Wall time, s"),
            ("ttft_p50_ms", "Time to first token, median, ms"),
            ("inter_token_p95_ms", "Between tokens, p95, ms"),
        )
    ):
        axes = figure.add_subplot(1, 3, panel + 1)
        heights = [figures[f"{key}_{side}"] for side in sides]
        axes.bar(sides, heights, color=[OURS if side == "ours" else THEIRS for side in sides])
        axes.set_title(title, fontsize=9)
        axes.tick_params(axis="x", rotation=20)
        axes.spines[["top", "right"]].set_visible(False)
    return bool(sides)


def draw_bars(figure: Any, row: dict[str, Any]) -> bool:
    """Draws every judged figure as a share of its bound, so that all fit one axis."""
    judged: list[tuple[str, float, bool]] = []
    for name, bar in row.get("bars", {}).items():
        relation, _, bound = bar.partition(" ")
        value = row["figures"].get(name)
        if relation in ("<=", ">=") and isinstance(value, int | float) and float(bound):
            met = value <= float(bound) if relation == "<=" else value >= float(bound)
            judged.append((f"{name} {bar}", value / float(bound), met))
    if not judged:
        return False
    names, shares, met = zip(*judged, strict=True)
    axes = figure.add_subplot()
    axes.barh(names, shares, color=[GOOD if each else BAD for each in met])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("figure ÷ its bar")
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return True


if __name__ == "__main__":
    sys.exit(main())
