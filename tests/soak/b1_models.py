"""B1: a tiny twin of every architecture that is served, in every way of running it, within the model's own noise.

Windows are 7 and chunks 8 positions long, so that they really slide. Four sequences in float32 run as

    whole       each in one forward
    chunked     each in random pieces, and prefilled and then decoded
    batch       all four in packed mixtures of pieces and decodes
    resumed     from a checkpoint after every piece, by another sequence first and then by the same one
    cached      through the real cache, which leaves checkpoints and is hit at every one of them
    readmitted  through a cache that holds hardly more than the longest, so that each turns the others out
    served      by the real engine, four requests at a time that share prefixes, with room for hardly more than two

and no logit may differ from the reference by more than four times what the model's own cache costs: the largest
difference between one pass without a cache and the model's own cache, prefilled and then decoded, and filled in the
same random pieces. The reference is the model's one pass, by the attention of its own modelling file.

Where a model chooses experts, two of them may lie within rounding of each other for one token, and then everything
after it differs, however it is computed. So a model beyond what is allowed is run over two other draws of tokens:
it counts by the worse of those, and what it was is told (`tied`). Wrong states differ in every draw.

The table of all of them is written to docs/models.md. `--only gemma3_text,mamba` runs a few and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from common import at_most, conclude, exactly
from transformers.utils import logging as transformers_logging

from checkpoints import save
from rootstock.errors import ModelUnsupported, SelfCheckFailed
from rootstock.runtime.torch.runner import TorchRuntime
from twins.architectures import ARCHITECTURES, OWN_DECODES_ARE_WRONG, OWN_PIECES_ARE_WRONG, REFUSED, VOCAB
from twins.driving import allocate, load, random_tokens
from twins.reference import Reference, largest_difference
from twins.ways import WAYS

LENGTHS = (60, 33, 45, 23)
DRAWS_AFTER_A_TIE = (100, 200)
ALLOWED = 4.0  # times the model's own noise
TABLE = Path(__file__).parents[2] / "docs" / "models.md"


# ------------------------------------------------------------------------------------------------- measuring


@dataclass
class Measured:
    model_type: str
    architecture: str = ""
    families: str = ""
    attention: str = ""  # how K and V get there: "plain", "latent", "alone"
    mode: str = ""
    mode_reason: str = ""
    noise: float = 0.0
    differences: dict[str, float] = field(default_factory=dict)  # way → largest difference
    refused: str = ""  # with which reason
    failed: str = ""  # what went wrong that should not
    tied: float | None = None  # the factor of a draw that was replaced
    seconds: float = 0.0

    @property
    def factor(self) -> float:
        """Of the model's own noise; the worst way."""
        return max(self.differences.values()) / self.noise if self.differences else float("nan")

    @property
    def is_served(self) -> bool:
        return bool(self.differences) and not self.failed

    def __str__(self) -> str:
        if self.refused:
            return f"{self.model_type:18} refused: {self.refused}"
        if self.failed:
            return f"{self.model_type:18} FAILED: {self.failed}"
        ways = " ".join(f"{way} {difference:.1e}" for way, difference in self.differences.items())
        return (
            f"{self.model_type:18} factor {self.factor:5.2f}  own {self.noise:.1e}  {ways}  "
            f"[{self.families}; {self.mode}] {self.seconds:.1f} s"
        )


def measured_of(model_type: str) -> Measured:
    first = measure(model_type)
    if not first.is_served or first.factor <= ALLOWED:
        return first
    print(first, flush=True)
    others = [measure(model_type, draw) for draw in DRAWS_AFTER_A_TIE]
    broken = [other for other in others if not other.is_served]
    worse = broken[0] if broken else max(others, key=lambda other: other.factor)
    worse.tied = round(first.factor, 2)
    return worse


def measure(model_type: str, draw: int = 0) -> Measured:
    measured, began = Measured(model_type), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        directory = save(Path(folder) / model_type, model_type)
        (measured.architecture,) = json.loads((directory / "config.json").read_text())["architectures"]
        try:
            runtime = load(directory)
        except (ModelUnsupported, SelfCheckFailed) as refusal:
            measured.refused = reason_of(refusal)
            return measured
        except Exception as error:
            measured.failed = f"load: {type(error).__name__}: {error}"
            return measured
        describe(measured, runtime)
        allocate(runtime)
        reference = Reference(model_type, directory)
        sequences = [random_tokens(VOCAB, length, draw + i) for i, length in enumerate(LENGTHS)]
        compared = []
        for name, way in WAYS.items():
            try:
                ran = list(way(runtime, sequences))
            except Exception as error:
                measured.failed = f"{name}: {type(error).__name__}: {error}"
                return measured
            measured.differences[name] = max(
                largest_difference(r.logits, reference.logits(r.tokens)[r.first :]) for r in ran
            )
            compared += ran
        measured.noise = reference.noise(compared)
    measured.seconds = time.monotonic() - began
    return measured


def describe(measured: Measured, runtime: TorchRuntime) -> None:
    described = runtime.description
    measured.families = ", ".join(family.name for family in described.families)
    measured.attention = ", ".join(sorted({layer.kind for layer in runtime._layout.layers}))
    measured.mode, measured.mode_reason = described.execution_mode, described.mode_reason


def reason_of(refusal: ModelUnsupported | SelfCheckFailed) -> str:
    return refusal.reason if isinstance(refusal, ModelUnsupported) else refusal.message


# ----------------------------------------------------------------------------------------------- the table

HEAD = """# Models

Every architecture that was tried, as a tiny model with random weights; `make show ID=B1` runs them and writes this
page. Windows are 7 and chunks 8 positions long, so that they really slide. {counts}

*Families* are the kinds of state that the cache keeps for a model. *Attention* tells how K and V get there: plain; as
latents (MLA), which
are attended as they are; or alone, where a module runs one sequence at a time because it does what no other does.
*Execution mode* is how a step is run.

*Own noise* is the largest difference, over all sequences, between a logit of the model's one pass and its own cached
run by transformers, prefilled and decoded and filled in pieces, in float32. Then, for each way of running the model
here, the largest difference from the one pass, in multiples of that noise; at most {allowed:g} is allowed.

- *whole*: each sequence in one forward; *chunked*: in random pieces, and prefilled and then decoded
- *batch*: four sequences in packed mixtures of pieces and decodes
- *resumed*: from a checkpoint after every piece, by another sequence and then by the same
- *cached*: through the cache, hit at every checkpoint that it left
- *readmitted*: through a cache that holds hardly more than the longest sequence, so that each turns the others out
- *served*: by the engine, four requests at a time that share prefixes, with room for hardly more than two

| architecture | families | attention | execution mode | own noise | {ways} | remark |
|---|---|---|---|---|{rules}---|
"""


def table(all_measured: Sequence[Measured]) -> str:
    rows = []
    for measured in all_measured:
        if measured.is_served:
            factors = [f"{difference / measured.noise:.2f}" for difference in measured.differences.values()]
            cells = [measured.families, measured.attention, measured.mode, f"{measured.noise:.1e}", *factors]
        else:
            cells = ["", "", "refused" if measured.refused else "failed", *[""] * (1 + len(WAYS))]
        name = f"{measured.architecture} (`{measured.model_type}`)"
        rows.append(" | ".join(["", name, *cells, remark(measured), ""]).strip())
    served, refused = sum(m.is_served for m in all_measured), sum(bool(m.refused) for m in all_measured)
    head = HEAD.format(
        counts=f"{served} are served, {refused} refused.",
        allowed=ALLOWED,
        ways=" | ".join(WAYS),
        rules="---|" * len(WAYS),
    )
    return head + "\n".join(rows) + "\n"


def remark(measured: Measured) -> str:
    if measured.refused or measured.failed:
        return measured.refused or measured.failed
    said = []
    if measured.model_type in OWN_DECODES_ARE_WRONG:
        said.append(
            "own noise of pieces of several tokens only, since its own decode does not limit the time step"
        )
    if measured.model_type in OWN_PIECES_ARE_WRONG:
        said.append(
            "own noise of a prefill and decodes only, since its own cache cannot be continued in pieces"
        )
    if measured.tied is not None:
        said.append("over other tokens, since the first draw met a tie between two experts")
    if measured.mode_reason:
        said.append(measured.mode_reason)
    return "; ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="model types, separated by commas")
    only = parser.parse_args().only
    models = only.split(",") if only else [*ARCHITECTURES, *REFUSED]
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    began, all_measured = time.monotonic(), []
    for model_type in models:
        all_measured.append(measured_of(model_type))
        print(all_measured[-1], flush=True)
    if not only:
        TABLE.write_text(table(all_measured))
    served = [m for m in all_measured if m.is_served and m.model_type in ARCHITECTURES]
    refused = [m for m in all_measured if m.refused and m.model_type in REFUSED]
    factors = {m.model_type: round(m.factor, 2) for m in served}
    conclude(
        "B1",
        {
            "served": len(served),
            "refused": len(refused),
            "worst_factor": max(factors.values(), default=None),
            "worst_model": max(factors, key=factors.__getitem__, default=None),
            "over": {name: factor for name, factor in factors.items() if not factor <= ALLOWED},
            "tied": {m.model_type: m.tied for m in all_measured if m.tied is not None},
            "not_served": [m.model_type for m in all_measured if m not in served and m not in refused],
            "seconds": round(time.monotonic() - began, 1),
        },
        {
            "served": exactly(len(set(models) & set(ARCHITECTURES))),
            "refused": exactly(len(set(models) & set(REFUSED))),
            "worst_factor": at_most(ALLOWED),
        },
    )


if __name__ == "__main__":
    main()
