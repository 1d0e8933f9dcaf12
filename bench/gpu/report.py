"""Results of a run as JSON, and as the Markdown tables of docs/performance.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from isolation import Outcome, Row

Column = tuple[str, Callable[[Row], object]]


@dataclass(frozen=True, slots=True)
class Results:
    interpreted: bool
    versions: dict[str, str]
    commit: str
    stages: list[Outcome]

    def rows(self, stage: str) -> Sequence[Row]:
        return next((outcome.rows for outcome in self.stages if outcome.stage == stage), ())

    def as_json(self) -> dict[str, Any]:
        return {
            "interpreted": self.interpreted,
            "commit": self.commit,
            "versions": self.versions,
            "stages": [outcome.as_json() for outcome in self.stages],
        }


def as_markdown(results: Results) -> str:
    parts = [_head(results), _table(STAGE_COLUMNS, [_of_stage(outcome) for outcome in results.stages])]
    for title, stage, columns in TABLES:
        if rows := [row for row in results.rows(stage) if columns[0][1](row) is not None]:
            parts += [f"### {title}", _table(columns, rows)]
    for outcome in results.stages:
        if outcome.status in ("failed", "timed out"):
            parts += [f"### {outcome.stage} {outcome.status}", f"```\n{outcome.reason}\n```"]
    return "\n\n".join(parts) + "\n"


def _head(results: Results) -> str:
    device = next((row["device"] for row in results.rows("environment") if "device" in row), "unknown device")
    named = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    lines = [f"{device}; commit {results.commit}; {named}."]
    for row in results.rows("decode_speed")[:1]:
        if "copy_tb_per_s" in row:
            lines.append(
                f"A device copy reaches {row['copy_tb_per_s']:.2f} TB/s, bytes read and written together, "
                f"and a sum reads {row['read_tb_per_s']:.2f} TB/s."
            )
    if results.interpreted:
        lines.append("Triton's interpreter ran the kernels on a CPU at tiny sizes: no time here is a speed.")
    return "\n".join(lines)


def _of_stage(outcome: Outcome) -> Row:
    wrong = sum(row.get("ok") is False for row in outcome.rows)
    return {
        "stage": outcome.stage,
        "status": outcome.status,
        "wall_s": outcome.wall_s,
        "rows": len(outcome.rows),
        "wrong": wrong,
        "reason": outcome.reason.split("\n", 1)[0],
    }


def _field(name: str, form: str = "") -> Callable[[Row], object]:
    def read(row: Row) -> object:
        value = row.get(name)
        return format(value, form) if isinstance(value, int | float) and form else value

    return read


def _columns(fields: str) -> tuple[Column, ...]:
    """Parses "name" or "name:format", separated by blanks."""
    return tuple(
        (name.replace("_", " "), _field(name, form))
        for name, _, form in (each.partition(":") for each in fields.split())
    )


STAGE_COLUMNS = _columns("stage status wall_s:.1f rows wrong reason")
TABLES: tuple[tuple[str, str, tuple[Column, ...]], ...] = (
    (
        "Decode attention",
        "decode_speed",
        _columns(
            "batch context triton_us:.1f share_of_copy:.2f triton_to_dense:.2f triton_to_gather:.2f not_measured"
        ),
    ),
    (
        "Prefill attention",
        "prefill_speed",
        _columns("batch context new triton_us:.1f tflops:.0f triton_to_dense:.2f dense_failed"),
    ),
    (
        "CUDA graphs",
        "cuda_graphs",
        _columns(
            "batch context plain_ms:.2f graphs_ms:.2f graphs_to_plain:.2f largest_difference:.2g same_best_token:.3f"
        ),
    ),
    (
        "Server, agents workload",
        "server",
        _columns(
            "server agents wall_s:.1f tokens_per_s:.0f ttft_p50_ms:.0f ttft_p95_ms:.0f between_tokens_p50_ms:.1f "
            "between_tokens_p95_ms:.1f cached_share:.2f"
        ),
    ),
    (
        "Tiers",
        "tiers",
        _columns(
            "from dtype prompt_tokens cached_tokens ttft_ms:.1f loaded_mib:.0f load_gb_per_s:.2f same_answer"
        ),
    ),
    ("Self-check", "self_check", _columns("model_type dtype execution_mode mode_reason ok error")),
    (
        "Attention against the reference",
        "attention_against_reference",
        _columns("case error:.2g allowed:.2g ok"),
    ),
    (
        "Attention against dense attention",
        "attention_against_dense",
        _columns("case batch context new error:.2g allowed:.2g ok"),
    ),
)


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(name for name, _ in columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(_cell(read(row)) for _, read in columns) + " |")
    return "\n".join(lines)


def _cell(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "**no**"
        case _:
            return str(value).replace("|", "\\|").replace("\n", " ")
