"""Every check that needs a GPU, within ten minutes: kernels, CUDA graphs, self-checks, tiers, the server.

Each stage is a process of its own with a time limit, the most important first. A stage that fails is recorded with
its traceback, and the others go on. Writes results.json and results.md below $OUT, or below bench/gpu, after every
stage. The exit status is 0 only if no stage failed or was stopped.

`--interpret` runs the stages at tiny sizes on a CPU, by Triton's interpreter. It checks the stages, not the speed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from isolation import Outcome, run_stage, skipped
from report import Results, as_markdown

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUDGET_S = 570.0  # of all stages: ten minutes with the start and the report
LEAST_STAGE_S = 10.0  # a stage is not begun with less left
INTERPRETED_LIMIT_S = 900.0
PACKAGES = ("torch", "triton", "transformers", "numpy", "numba")


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    limit_s: float
    module: str  # that holds a function of the same name: Bench → rows
    needs_device: bool = False


STAGES = (
    Stage("environment", 60, "environment_stages"),
    Stage("attention_against_reference", 150, "attention_stages"),
    Stage("decode_speed", 90, "attention_stages"),
    Stage("model", 60, "model_stages"),
    Stage("cuda_graphs", 120, "model_stages", needs_device=True),
    Stage("self_check", 150, "model_stages"),
    Stage("server", 200, "model_stages"),
    Stage("coded_products", 120, "product_stages"),
    Stage("coded_model", 90, "product_stages"),
    Stage("attention_against_dense", 90, "attention_stages"),
    Stage("prefill_speed", 60, "attention_stages"),
    Stage("tiers", 120, "model_stages"),
    Stage("tests", 180, "environment_stages", needs_device=True),
)
NAMES = tuple(stage.name for stage in STAGES)


@dataclass(frozen=True, slots=True)
class Options:
    interpret: bool
    only: tuple[str, ...]
    budget_s: float
    out: Path


def parse_options(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="run on a CPU by Triton's interpreter")
    parser.add_argument("--only", default=",".join(NAMES), help="stages, comma-separated")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of all stages together")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or HERE), help="a folder")
    given = parser.parse_args(arguments)
    only = tuple(name.strip() for name in given.only.split(",") if name.strip())
    unknown = [name for name in only if name not in NAMES]
    if unknown or not only:
        parser.error(f"--only {given.only}: the stages are {', '.join(NAMES)}")
    if given.budget <= 0:
        parser.error("--budget must be more than 0")
    budget_s = len(STAGES) * INTERPRETED_LIMIT_S if given.interpret else given.budget
    return Options(given.interpret, only, budget_s, given.out)


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [stage for stage in STAGES if stage.name in options.only]
    with tempfile.TemporaryDirectory(prefix="rootstock-gpu-") as folder:

        def command(stage: Stage, rows: Path) -> list[str]:
            return [
                sys.executable,
                str(HERE / "run_stage.py"),
                stage.module,
                stage.name,
                str(rows),
                folder,
                "cpu" if options.interpret else "cuda",
            ]

        results = Results(options.interpret, versions(), commit(), [])
        for outcome in outcomes(chosen, command, Path(folder), options):
            results.stages.append(outcome)
            write_results(results, options.out)
            print(f"{outcome.stage}: {outcome.status}, {outcome.wall_s:.1f} s {outcome.reason}", flush=True)
    print(f"wrote {options.out / 'results.json'} and results.md", flush=True)
    return 0 if all(outcome.status in ("passed", "skipped") for outcome in results.stages) else 1


def outcomes(
    stages: Iterable[Stage],
    command: Callable[[Stage, Path], Sequence[str]],
    folder: Path,
    options: Options,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """Runs the stages one after the other until the budget is spent."""
    deadline = clock() + options.budget_s
    for stage in stages:
        left_s = deadline - clock()
        if options.interpret and stage.needs_device:
            yield skipped(stage.name, "needs a CUDA device")
        elif left_s < LEAST_STAGE_S:
            yield skipped(stage.name, "the time budget was spent")
        else:
            print(f"{stage.name}:", flush=True)
            limit_s = min(left_s, INTERPRETED_LIMIT_S if options.interpret else stage.limit_s)
            rows = folder / f"{stage.name}.jsonl"
            yield run_stage(stage.name, command(stage, rows), rows, limit_s)


def write_results(results: Results, out: Path) -> None:
    (out / "results.json").write_text(json.dumps(results.as_json(), indent=1) + "\n", encoding="utf-8")
    (out / "results.md").write_text(as_markdown(results), encoding="utf-8")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"
    asked = subprocess.run(
        [git, "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
