"""B1: tiny models of every served architecture, in every way of running them, within the model's own noise.

Windows are 7 and chunks 8 positions long, so that they really slide. Four sequences in float32 run as

    whole       each in one forward
    chunked     each in random pieces, and prefilled and then decoded
    batch       all four in packed mixtures of pieces and decodes
    resumed     from a checkpoint after every piece, by another sequence first and then by the same one
    cached      through the real cache, which leaves checkpoints and is hit at every one of them
    readmitted  through a cache that holds hardly more than the longest, so that each evicts the others
    served      by the real engine, four requests at a time that share prefixes, with room for hardly more than two

and no logit may differ from the reference by more than four times the noise of the model's own cache: the largest
difference between one pass without a cache and the model's own cache, prefilled and then decoded, and filled in the
same random pieces. The reference is the model's one pass, by the attention of its own modelling file. A model beyond
that is judged by other tokens (ties.py).

The table of all of them is written to docs/models.md. `--only gemma3_text,mamba` runs a few and writes nothing.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common import argument_parser, at_most, conclude, exactly
from ties import ALLOWED, Measured, figures_of, judged, run_quietly

from checkpoints import save
from rootstock.errors import ModelUnsupported, SelfCheckFailed
from rootstock.runtime.torch.runner import TorchRuntime
from twins.architectures import ARCHITECTURES, OWN_DECODES_ARE_WRONG, OWN_PIECES_ARE_WRONG, REFUSED, VOCAB
from twins.driving import allocate, random_tokens
from twins.reference import Reference
from twins.torch_models import load
from twins.twin import largest_difference
from twins.ways import WAYS

LENGTHS = (60, 33, 45, 23)
TABLE = Path(__file__).parents[2] / "docs" / "models.md"


# ------------------------------------------------------------------------------------------------- measuring


@dataclass
class Described(Measured):
    architecture: str = ""
    families: str = ""
    attention: str = ""  # way of K and V: "plain", "latent", "alone"
    execution_mode: str = ""
    mode_reason: str = ""

    def __str__(self) -> str:
        return super().__str__() + (f" [{self.families}; {self.execution_mode}]" if self.is_served else "")


def measure(model_type: str, draw: int) -> Described:
    measured, began = Described(model_type), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        directory = save(Path(folder) / model_type, model_type)
        (measured.architecture,) = json.loads((directory / "config.json").read_text())["architectures"]
        at = "load"
        try:
            runtime = load(directory)
            describe(measured, runtime)
            allocate(runtime)
            reference = Reference(model_type, directory)
            sequences = [random_tokens(VOCAB, length, draw + i) for i, length in enumerate(LENGTHS)]
            compared = []
            differences: dict[str, float] = {}
            for at, way in WAYS.items():
                ran = list(way(runtime, sequences))
                differences[at] = max(
                    largest_difference(r.logits, reference.logits(r.tokens)[r.first :]) for r in ran
                )
                compared += ran
        except (ModelUnsupported, SelfCheckFailed) as refusal:
            measured.refused = refusal.reason if isinstance(refusal, ModelUnsupported) else refusal.message
            return measured
        except Exception as error:
            measured.failed = f"{at}: {type(error).__name__}: {error}"
            return measured
        measured.noise = reference.noise(compared)
    measured.factors = {way: difference / measured.noise for way, difference in differences.items()}
    measured.seconds = time.monotonic() - began
    return measured


def describe(measured: Described, runtime: TorchRuntime) -> None:
    described = runtime.description
    measured.families = ", ".join(family.name for family in described.families)
    measured.attention = ", ".join(sorted({layer.kind for layer in runtime._layout.layers}))
    measured.execution_mode, measured.mode_reason = described.execution_mode, described.mode_reason


# ----------------------------------------------------------------------------------------------- the table

HEAD = """# Models

Every architecture that was tried, as a tiny model with random weights; `make show ID=B1` runs them and writes this
page. Windows are 7 and chunks 8 positions long, so that they do slide. {counts}

*Families* are the kinds of state that the cache keeps for a model. *Attention* is the way in which K and V are
attended: plain; latent (MLA: latents are attended without expanding them); or alone, where the attention of a
module has no packed form and runs one sequence at a time. *Execution mode* is how a step is run.

*Own noise* is the largest difference between a logit of the model's one forward over a whole sequence and of
transformers' own cached run (a prefill and decodes, and a prefill in pieces), over all sequences, in float32. The
columns behind it have, for each way of running the model here, the largest difference from that one forward in
multiples of the noise. At most {allowed:g} is allowed.

- *whole*: each sequence in one forward; *chunked*: in random pieces, and prefilled and then decoded
- *batch*: four sequences in packed mixtures of pieces and decodes
- *resumed*: from a checkpoint after every piece, by another sequence and then by the same
- *cached*: through the cache, hit at every checkpoint that it left
- *readmitted*: through a cache that holds hardly more than the longest sequence, so that each evicts the others
- *served*: by the engine, four requests at a time that share prefixes, with room for hardly more than two

| architecture | families | attention | execution mode | own noise | {ways} | remark |
|---|---|---|---|---|{rules}---|
"""


def table(all_measured: Sequence[Described]) -> str:
    rows = []
    for measured in all_measured:
        if measured.is_served:
            factors = [f"{factor:.2f}" for factor in measured.factors.values()]
            cells = [
                measured.families,
                measured.attention,
                measured.execution_mode,
                f"{measured.noise:.1e}",
                *factors,
            ]
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


def remark(measured: Described) -> str:
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
    parser = argument_parser(__doc__)
    parser.add_argument("--only", help="model types, separated by commas")
    only = parser.parse_args().only
    models = only.split(",") if only else [*ARCHITECTURES, *REFUSED]
    run_quietly()
    began, all_measured = time.monotonic(), []
    for model_type in models:
        all_measured.append(judged(partial(measure, model_type)))
        print(all_measured[-1], flush=True)
    if not only:
        _, found, on_mlx = TABLE.read_text().partition("\n## ")  # written by I1
        TABLE.write_text(table(all_measured) + found + on_mlx)
    served = [m for m in all_measured if m.is_served and m.model_type in ARCHITECTURES]
    refused = [m for m in all_measured if m.refused and m.model_type in REFUSED]
    conclude(
        "B1",
        {
            "served": len(served),
            "refused": len(refused),
            **figures_of(served, all_measured),
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
