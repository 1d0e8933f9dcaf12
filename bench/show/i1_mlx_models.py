"""I1: small models of every architecture of mlx-lm, on the MLX runtime, against the model with its own cache.

Windows are 7 and chunks 8 positions long, so that they really slide. Each model is saved by mlx-lm, loaded by the
real loader in float32 and served by the real engine (cache, scheduler, self-check), block size 8 and chunks of 24:

- a first prompt of 70 tokens, in chunks, with checkpoints inside and at its end
- four prompts at once that share 40, 43, 64 and 70 tokens of it: at the end of a block and inside one. A model with
  windows or recurrent states resumes at the checkpoints.
- the first prompt again with its answer and a new turn

Every computed row is scored. `exact` means that every row of every kind has the logits of the model with its own
cache, by the rule of the self-check (runtime/trial.py): the largest difference is at most 1e-3 standard deviations of
the logits, or within the model's own noise. A second engine then serves the same requests as users get them. All
greedy answers must be those of the model with its own cache, token for token.

Each model runs in a process of its own, with a time limit. The table is written to docs/models.md.
`--only llama,mamba2` runs a few and writes nothing, and `--results FILE` keeps the figures of each model in a file,
so that a run can be continued.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import argument_parser, at_least, conclude, exactly, replace_section

from twins.mlx_architectures import ARCHITECTURES, UNTESTED

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LIMIT_S = 240
LEAST_EXACT = 94


@dataclass
class Measured:
    name: str
    families: str = ""
    execution_mode: str = ""
    mode_reason: str = ""
    differences: dict[str, float] = field(default_factory=dict)  # by kind of row, in standard deviations
    forwards_of_several: int = 0  # with rows of several requests
    cached_tokens: int = 0
    remark: str = ""
    answers: int = 0
    equal_answers: int = 0
    pool_copies: int | None = 0
    refused: str = ""
    failed: str = ""
    seconds: float = 0.0

    @property
    def is_exact(self) -> bool:
        return (
            not self.refused and not self.failed and self.answers > 0 and self.answers == self.equal_answers
        )

    @property
    def worst(self) -> float:
        return max(self.differences.values(), default=float("nan"))

    def __str__(self) -> str:
        if self.refused or self.failed:
            return f"{self.name:36} {'refused' if self.refused else 'FAILED'}: {self.refused or self.failed}"
        return (
            f"{self.name:36} {self.execution_mode:26} {self.worst:.1e} {self.equal_answers}/{self.answers} answers "
            f"[{self.families}] {self.seconds:.1f} s"
        )


# ------------------------------------------------------------------------------------ one model, in its process


def measure(name: str) -> Measured:
    import mlx.core as mx

    mx.disable_compile()  # on a CPU it calls a C++ compiler for each function
    from mlx_lm.utils import load_model as load_by_mlx_lm

    from rootstock.errors import ModelError
    from rootstock.runtime.trial import Disagreement
    from twins import mlx_models, mlx_served

    measured, began, at = Measured(name), time.monotonic(), "saving"
    with tempfile.TemporaryDirectory() as folder:
        try:
            directory = mlx_models.save(Path(folder) / name, name)
            at = "loading by mlx-lm"
            own, _ = load_by_mlx_lm(directory)
            at = "loading"
            recorder = mlx_served.Recorder(mlx_served.load(directory))
            described = recorder.description
            measured.families = mlx_served.names_of(described)
            measured.execution_mode, measured.mode_reason = described.execution_mode, described.mode_reason
            at = "serving with every row scored"
            scored, _ = mlx_served.serve(recorder)
            measured.forwards_of_several = recorder.forwards_of_several
            measured.pool_copies = recorder.pool_copies
            at = "comparing"
            verdict = mlx_served.compared(recorder, own)
            measured.differences, measured.remark = verdict.figures, verdict.remark
            at = "serving"
            plain = mlx_served.load(directory)
            served, _ = mlx_served.serve(plain)
            measured.pool_copies = _sum(measured.pool_copies, plain.pool_copies)
            expected = [mlx_served.own_greedy(own, prompt) for prompt in served.prompts]
            measured.answers = 2 * len(expected)
            measured.equal_answers = sum(
                ours == theirs
                for answers in (scored.answers, served.answers)
                for ours, theirs in zip(answers, expected, strict=True)
            )
            measured.cached_tokens = sum(served.cached)
            measured.failed = "; ".join(scored.failed + served.failed)
        except ModelError as refusal:
            measured.refused = getattr(refusal, "reason", refusal.message)
        except Disagreement as disagreement:
            measured.failed = f"{at}: {disagreement}"
        except Exception as error:  # of any model's code
            measured.failed = f"{at}: {type(error).__name__}: {error}"[:300]
    measured.seconds = round(time.monotonic() - began, 1)
    return measured


def _sum(*counts: int | None) -> int | None:
    return None if None in counts else sum(count or 0 for count in counts)


def measured_apart(name: str) -> Measured:
    """Measures a model in a process of its own: a crash or hang of its code ends that process alone."""
    command = [sys.executable, __file__, "--model", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=dict(os.environ))
    except subprocess.TimeoutExpired:
        return Measured(name, failed=f"no end after {LIMIT_S} s")
    try:
        return Measured(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return Measured(name, failed=f"its process ended with {done.returncode}: {last[:200]}")


# ------------------------------------------------------------------------------------------------ the table

SECTION = "## On MLX"
HEAD = """{section}

The models of mlx-lm {version}'s own tests ({tested}, with smaller sizes), and further modules that those leave out
(*). `make show ID=I1` runs them on MLX's CPU backend and writes this section. Nothing of it ran on Metal. {counts}

*Execution mode* is how a step is run. The columns behind it have the largest difference of a logit, for each kind of
row, from the model of mlx-lm with its own cache, in standard deviations of the logits, in float32:

- *first chunk*: the beginning of a prompt; *later chunk*: further pieces of it
- *shared*: behind a prefix that another request computed, at the end of a block
- *copied*: behind a prefix that ends inside a block, whose rows are copied
- *restored*: behind a checkpoint of windows or recurrent states
- *decode*: decodes, most of them of four sequences in one forward

At most 1e-3 is allowed, or the model's own noise. All greedy answers of the models that are served are those of
mlx-lm, token for token.

| model | families | execution mode | {kinds} | remark |
|---|---|---|{rules}---|
"""
KINDS = ("first chunk", "later chunk", "shared", "copied", "restored", "decode")


def section(all_measured: Sequence[Measured], version: str) -> str:
    rows = []
    for measured in all_measured:
        mark = "" if measured.name in ARCHITECTURES else " *"
        if measured.is_exact:
            figures = [_figure(measured.differences, kind) for kind in KINDS]
            cells = [measured.families, measured.execution_mode, *figures]
        else:
            cells = ["", "refused" if measured.refused else "failed", *[""] * len(KINDS)]
        remarks = [measured.refused or measured.failed, measured.mode_reason, measured.remark]
        remark = "; ".join(part.replace("|", "\\|") for part in remarks if part)
        rows.append("| " + " | ".join([f"`{measured.name}`{mark}", *cells, remark]).rstrip() + " |")
    exact = sum(m.is_exact for m in all_measured)
    refused = sum(bool(m.refused) for m in all_measured)
    head = HEAD.format(
        section=SECTION,
        version=version,
        tested=len(ARCHITECTURES),
        counts=f"{exact} are served, {refused} refused.",
        kinds=" | ".join(KINDS),
        rules="---|" * len(KINDS),
    )
    return head + "\n".join(rows) + "\n"


def _figure(differences: Mapping[str, float], kind: str) -> str:
    return f"{differences[kind]:.0e}" if differences.get(kind) else "0" if kind in differences else ""


def figures_of(all_measured: Sequence[Measured]) -> dict[str, Any]:
    tested = [m for m in all_measured if m.name in ARCHITECTURES]
    exact = [m for m in tested if m.is_exact]
    modes = dict.fromkeys(m.execution_mode for m in exact)
    return {
        "exact": len(exact),
        "modes": {mode: sum(m.execution_mode == mode for m in exact) for mode in modes},
        "refused": {m.name: m.refused for m in tested if m.refused},
        "failed": {m.name: m.failed for m in all_measured if m.failed},
        "other_answers": [m.name for m in all_measured if m.answers != m.equal_answers],
        "worst": max((m.worst for m in exact), default=None),
        "pool_copies": sum(m.pool_copies or 0 for m in all_measured),
        "exact_of_the_untested": sum(m.is_exact for m in all_measured if m.name in UNTESTED),
    }


def read_results(path: Path | None) -> dict[str, Measured]:
    if path is None or not path.exists():
        return {}
    found = [Measured(**json.loads(line)) for line in path.read_text().splitlines()]
    return {measured.name: measured for measured in found}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", help="models, separated by semicolons or commas")
    parser.add_argument("--results", type=Path, help="file of figures: models in it are not run again")
    parser.add_argument(
        "--most", type=int, help="run at most so many models, and write no table until all have run"
    )
    parser.add_argument("--model", help="measure this one in this process, for the script itself")
    options = parser.parse_args()
    if options.model:
        print(json.dumps(asdict(measure(options.model))))
        return
    names = [*ARCHITECTURES, *UNTESTED]
    if options.only:
        wanted = options.only.split(";") if ";" in options.only else options.only.split(",")
        names = [name for name in names if name in wanted]
    began = time.monotonic()
    known = read_results(options.results)
    left = [name for name in names if name not in known]
    for name in left[: options.most]:
        known[name] = measured_apart(name)
        print(known[name], flush=True)
        if options.results is not None:
            with options.results.open("a") as file:
                file.write(json.dumps(asdict(known[name])) + "\n")
    all_measured = [known[name] for name in names if name in known]
    if not options.only and len(all_measured) == len(names):
        replace_section(PAGE, SECTION, section(all_measured, version("mlx-lm")))
    figures = figures_of(all_measured) | {"models": len(names), "seconds": round(time.monotonic() - began, 1)}
    least = (
        LEAST_EXACT if not options.only else len(set(names) & set(ARCHITECTURES)) - len(figures["refused"])
    )
    bars = {
        "exact": at_least(least),
        "failed": exactly({}),
        "other_answers": exactly([]),
        "pool_copies": exactly(0),
    }
    conclude("I1", figures, bars)


if __name__ == "__main__":
    main()
