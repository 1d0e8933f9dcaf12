"""Draws rows of `rootstock bench --out FOLDER`: plot_rows.py FOLDER, a .png beside each .jsonl that has none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # after the backend is chosen

Row = dict[str, Any]

COLOURS = {"cold": "#4477aa", "warm": "#228833", "off": "#bbbbbb"}


def main(folder: Path) -> None:
    for path in sorted(folder.glob("*.jsonl")):
        picture = path.with_suffix(".png")
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if not picture.exists() and all("tokens_per_s" in row for row in rows):
            plot(rows, picture)
            print(f"wrote {picture}")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws a PNG: time to first token, prompt tokens computed, and speed."""
    names = list(dict.fromkeys(row["workload"] for row in rows))
    figure, (waits, tokens, speed) = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    _bars(waits, rows, names, lambda row: row["ttft_s"]["p50"] * 1e3 if row["ttft_s"] else None)
    waits.set_title("Time to first token, median, ms")
    waits.set_yscale("log")
    _bars(tokens, rows, names, _computed)
    tokens.set_title("Prompt tokens computed")
    tokens.set_yscale("log")
    _bars(speed, rows, names, lambda row: row["tokens_per_s"])
    speed.set_title("Generated tokens a second")
    figure.legend(*speed.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"{rows[0]['model']} · {rows[0]['date']}", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _computed(row: Row) -> int | None:
    if row["prompt_tokens"] is None or row["cached_tokens"] is None:
        return None
    return int(row["prompt_tokens"] - row["cached_tokens"])


def _bars(
    axes: Any, rows: Sequence[Row], names: Sequence[str], height: Callable[[Row], float | None]
) -> None:
    states = [state for state in COLOURS if any(row["cache"] == state for row in rows)]
    width = 0.8 / max(1, len(states))
    for offset, state in enumerate(states):
        found = {row["workload"]: height(row) for row in rows if row["cache"] == state}
        at = [i + (offset - (len(states) - 1) / 2) * width for i, name in enumerate(names) if found.get(name)]
        heights = [found[name] for name in names if found.get(name)]
        axes.bar(at, heights, width * 0.92, label=state, color=COLOURS[state])
    axes.set_xticks(range(len(names)), names)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
