"""Rows as a table on the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from rootstock.bench.rows import CACHE_STATES, Quantiles, Row
from rootstock.errors import StartupError

_COLOURS = {"cold": "#4477aa", "warm": "#228833", "off": "#bbbbbb"}
_LEAST_COLOUR = "#ee6677"


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("workload", no_wrap=True)
    table.add_column("cache", no_wrap=True)
    for heading in (
        "TTFT ms\np50/p95", "ms between\np50/p95", "\ntok/s", "wall\ns",
        "prompt\ntokens", "\ncomputed", "\nleast", "times\nleast",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.workload,
            row.cache,
            _milliseconds(row.ttft_s),
            _milliseconds(row.inter_token_s),
            f"{row.tokens_per_s:,.0f}",
            f"{row.wall_s:.2f}",
            _count(row.prompt_tokens),
            _count(row.computed_tokens),
            ("" if row.least_is_exact else "~") + _count(row.least_tokens),
            _times_least(row),
        )
    if any(row.failed for row in rows):
        table.caption = "failed: " + ", ".join(
            f"{row.failed} of {row.requests} of {row.workload} {row.cache}" for row in rows if row.failed
        )
    return table


def same_answers(rows: Sequence[Row]) -> str:
    """Says in one line whether the state of the cache changed any answer."""
    digests: dict[str, set[str]] = {}
    for row in rows:
        digests.setdefault(row.workload, set()).add(row.answers_digest)
    compared = [name for name in digests if sum(row.workload == name for row in rows) > 1]
    different = [name for name in compared if len(digests[name]) > 1]
    if not compared:
        return ""
    if not different:
        return "Answers: the same in every state of the cache."
    below = any(row.setting.dtype != "float32" for row in rows)
    why = " Below float32 near-ties may flip, and over a URL batches differ." if below else ""
    return f"Answers differ between states of the cache in {', '.join(different)}.{why}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws a PNG: time to first token, prompt tokens computed against the least possible, and speed."""
    try:
        import matplotlib
    except ImportError as error:
        raise StartupError(
            "The plot needs matplotlib, which is not installed. Install it with: pip install 'rootstock[bench]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row.workload for row in rows))
    figure, (waits, tokens, speed) = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    _bars(waits, rows, names, lambda row: row.ttft_s.p50 * 1e3 if row.ttft_s else None)
    waits.set_title("Time to first token, median, ms")
    waits.set_yscale("log")
    _bars(tokens, rows, names, lambda row: row.computed_tokens)
    tokens.set_title("Prompt tokens computed")
    tokens.set_yscale("log")
    for i, name in enumerate(names):
        least = [row.least_tokens for row in rows if row.workload == name and row.cache != "warm"]
        if least and least[0] is not None:
            tokens.hlines(
                least[0],
                i - 0.45,
                i + 0.45,
                colors=_LEAST_COLOUR,
                label=None if i else "least possible, cold",
            )
    _bars(speed, rows, names, lambda row: row.tokens_per_s)
    speed.set_title("Generated tokens a second")
    figure.legend(*tokens.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    setting = rows[0].setting
    known = [setting.model, setting.dtype, setting.device, setting.machine.cpu, setting.source.commit]
    figure.suptitle(" · ".join(str(each) for each in known if each), fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars(
    axes: object, rows: Sequence[Row], names: Sequence[str], height: Callable[[Row], float | None]
) -> None:
    states = [state for state in CACHE_STATES if any(row.cache == state for row in rows)]
    width = 0.8 / max(1, len(states))
    for offset, state in enumerate(states):
        found = {row.workload: height(row) for row in rows if row.cache == state}
        at = [i + (offset - (len(states) - 1) / 2) * width for i, name in enumerate(names) if found.get(name)]
        heights = [found[name] for name in names if found.get(name)]
        axes.bar(at, heights, width * 0.92, label=state, color=_COLOURS[state])  # type: ignore[attr-defined]
    axes.set_xticks(range(len(names)), names)  # type: ignore[attr-defined]
    axes.spines[["top", "right"]].set_visible(False)  # type: ignore[attr-defined]


def _milliseconds(found: Quantiles | None) -> str:
    if found is None:
        return "–"
    return "/".join(f"{s * 1e3:,.0f}" if s >= 0.01 else f"{s * 1e3:.1f}" for s in (found.p50, found.p95))


def _count(tokens: int | None) -> str:
    return "?" if tokens is None else f"{tokens:,}"


def _times_least(row: Row) -> str:
    if row.computed_tokens is None or not row.least_tokens:
        return "?"
    return f"{row.computed_tokens / row.least_tokens:.2f}"
