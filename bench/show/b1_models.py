"""B1: a tiny twin of every architecture that is served, in every way of running it, within the model's own noise.

Windows are 7 and chunks 8 positions long, so that they really slide. Four sequences in float32 run as

    whole     each in one forward
    chunked   each in random pieces, and prefilled and then decoded
    batch     all four in one packed mixture of pieces and decodes
    resumed   from a checkpoint after every piece, by another sequence first and then by the same one
    cached    through the real cache, one prompt after the other, resuming wherever it left a checkpoint
    readmitted  the same prompts again after the cache has given up what it could

and no logit may differ from the reference by more than four times what the model's own cache costs: the largest
difference between one pass without a cache and the model's own cache, prefilled and then decoded, and filled in the
same random pieces. The reference is the model's one pass, by the attention of its own modelling file, except where
the model itself computes a decode otherwise than a prefill: there it is its own cached run in the same pieces.

The table of all of them is written to docs/models.md. `--only gemma3_text,mamba` runs a few and writes nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from common import at_most, conclude, exactly
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from rootstock.cache.plan import Tokens
from rootstock.errors import ModelUnsupported, SelfCheckFailed
from rootstock.runtime.base import ModelDescription
from rootstock.runtime.torch_model import TorchRuntime

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from twins.architectures import ARCHITECTURES, REFUSED, VOCAB
from twins.checkpoints import save
from twins.driving import ByHand, Dense, allocate, load, mixed_steps, random_tokens

LENGTHS = (60, 33, 45, 23)
ALLOWED = 4.0  # times the model's own noise
TABLE = Path(__file__).parents[2] / "docs" / "models.md"

# Their decode is not their prefill by design: it does not limit the time step as the prefill does.
DECODES_OTHERWISE = {"nemotron_h", "zamba2"}
# Their own cache cannot be filled in pieces: the first four forget the state, the last one fails.
OWN_PIECES_ARE_WRONG = {"mamba", "falcon_mamba", "jamba", "zamba", "minimax"}


class Reference:
    """What the logits should be, and how well the model itself meets that."""

    def __init__(self, model_type: str, directory: Path) -> None:
        self._dense = Dense(directory, attention="eager")
        self._decodes_otherwise = model_type in DECODES_OTHERWISE
        self._pieces_are_wrong = model_type in OWN_PIECES_ARE_WRONG
        self._one_pass: dict[bytes, NDArray[np.float32]] = {}

    def logits(self, tokens: Tokens, cuts: Sequence[int]) -> NDArray[np.float32]:
        """[tokens, vocab] of a sequence that was computed in the pieces between the cuts."""
        if self._decodes_otherwise:
            return self._dense.cached_logits(tokens, cuts)
        return self._whole(tokens)

    def noise(self, sequences: Sequence[Tokens]) -> float:
        """The largest difference that the model's own cache makes; never less than a rounding of the logits."""
        worst = 0.0
        for seed, tokens in enumerate(sequences):
            whole = self._whole(tokens)
            runs = []
            if not self._decodes_otherwise:
                runs.append(range(len(tokens) // 2, len(tokens)))
            if not self._pieces_are_wrong:
                shortest = 2 if self._decodes_otherwise else 1
                runs += [random_cuts(len(tokens), 10 * seed + n, shortest) for n in range(3)]
            for cuts in runs:
                worst = max(worst, largest_difference(self._dense.cached_logits(tokens, list(cuts)), whole))
            worst = max(worst, float(np.finfo(np.float32).eps * np.abs(whole).max()))
        return worst

    def _whole(self, tokens: Tokens) -> NDArray[np.float32]:
        known = self._one_pass.get(tokens.tobytes())
        if known is None:
            known = self._one_pass[tokens.tobytes()] = self._dense.logits(tokens)
        return known


@dataclass(frozen=True)
class Ran:
    """Logits of the last positions of a sequence, and where it was cut."""

    tokens: Tokens
    logits: NDArray[np.float32]  # [≤ tokens, vocab]
    cuts: Sequence[int]


def largest_difference(ours: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.abs(ours - expected).max())


def random_cuts(length: int, seed: int, shortest: int = 1) -> list[int]:
    """Pieces of `shortest` to 13 positions."""
    random, cuts, at = np.random.default_rng(seed), [], 0
    while True:
        at += int(random.integers(shortest, 14))
        if at > length - shortest:
            return cuts
        cuts.append(at)


def pieces(cuts: Sequence[int], length: int) -> list[int]:
    return np.diff([0, *cuts, length]).tolist()


# ------------------------------------------------------------------------------------------ ways of running


def whole(runtime: TorchRuntime, sequences: Sequence[Tokens]) -> Iterator[Ran]:
    for tokens in sequences:
        yield alone(ByHand(runtime), tokens, ())


def chunked(runtime: TorchRuntime, sequences: Sequence[Tokens]) -> Iterator[Ran]:
    hand = ByHand(runtime)
    for seed, tokens in enumerate(sequences):
        yield alone(hand, tokens, random_cuts(len(tokens), seed))
        yield alone(hand, tokens, range(len(tokens) // 2, len(tokens)))


def batch(runtime: TorchRuntime, sequences: Sequence[Tokens]) -> Iterator[Ran]:
    for seed in range(3):
        hand = ByHand(runtime)
        running = [hand.start(tokens) for tokens in sequences]
        for step in mixed_steps([len(tokens) for tokens in sequences], seed):
            hand.step({running[i]: new for i, new in step.items()})
        for each in running:
            yield Ran(each.tokens, np.concatenate(each.logits), each.cuts)


def resumed(runtime: TorchRuntime, sequences: Sequence[Tokens]) -> Iterator[Ran]:
    for seed, tokens in enumerate(sequences):
        hand = ByHand(runtime)
        running, kept = hand.start(tokens), []
        for new in pieces(random_cuts(len(tokens), 50 + seed), len(tokens)):
            hand.step({running: new})
            kept.append(hand.keep(running))
        for checkpoint in kept[:-1]:
            left = len(tokens) - checkpoint.past
            another = np.concatenate([tokens[: checkpoint.past], random_tokens(VOCAB, left, seed=seed)])
            for resuming in (another.astype(np.int32), tokens):
                run = hand.resume(checkpoint, resuming)
                for new in pieces(random_cuts(left, seed), left):
                    hand.step({run: new})
                yield Ran(run.tokens, np.concatenate(run.logits), run.cuts)


def alone(hand: ByHand, tokens: Tokens, cuts: Sequence[int]) -> Ran:
    running = hand.start(tokens)
    for new in pieces(cuts, len(tokens)):
        hand.step({running: new})
    return Ran(tokens, np.concatenate(running.logits), running.cuts)


WAYS: dict[str, Callable[[TorchRuntime, Sequence[Tokens]], Iterator[Ran]]] = {
    "whole": whole,
    "chunked": chunked,
    "batch": batch,
    "resumed": resumed,
}


# ------------------------------------------------------------------------------------------------- measuring


@dataclass
class Measured:
    model_type: str
    architecture: str = ""
    families: str = ""
    rung: str = ""
    noise: float = 0.0
    differences: dict[str, float] = field(default_factory=dict)  # way → largest difference
    refused: str = ""  # with which reason
    failed: str = ""  # what went wrong that should not
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
            f"[{self.families}; {self.rung}] {self.seconds:.1f} s"
        )


def measure(model_type: str) -> Measured:
    measured, began = Measured(model_type), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        directory = save(Path(folder) / model_type, model_type)
        try:
            runtime = load(directory)
        except (ModelUnsupported, SelfCheckFailed) as refusal:
            measured.refused = reason_of(refusal)
            return measured
        except Exception as error:
            measured.failed = f"load: {type(error).__name__}: {error}"
            return measured
        describe(measured, runtime.description)
        allocate(runtime)
        reference = Reference(model_type, directory)
        sequences = [random_tokens(VOCAB, length, seed) for seed, length in enumerate(LENGTHS)]
        measured.noise = reference.noise(sequences)
        for name, way in WAYS.items():
            try:
                measured.differences[name] = max(
                    largest_difference(ran.logits, reference.logits(ran.tokens, ran.cuts)[-len(ran.logits) :])
                    for ran in way(runtime, sequences)
                )
            except Exception as error:
                measured.failed = f"{name}: {type(error).__name__}: {error}"
                break
    measured.seconds = time.monotonic() - began
    return measured


def describe(measured: Measured, described: ModelDescription) -> None:
    measured.architecture = described.architecture
    measured.families = ", ".join(family.name for family in described.families)
    measured.rung = described.rung


def reason_of(refusal: ModelUnsupported | SelfCheckFailed) -> str:
    return refusal.reason if isinstance(refusal, ModelUnsupported) else refusal.message


# ----------------------------------------------------------------------------------------------- the table

HEAD = f"""# Models

Every architecture that Rootstock knows of, as a tiny model with random weights, run by `bench/show/b1_models.py`:
four sequences in float32, windows of 7 and chunks of 8 positions. *Own noise* is the largest difference of a logit
between the model's one pass and its own cache, prefilled and decoded and filled in pieces. Then, for each way of
running it here, the largest difference from the one pass, over that noise; at most {ALLOWED:g} is allowed.

| architecture | families | rung | own noise | {" | ".join(WAYS)} | remark |
|---|---|---|---|{"---|" * len(WAYS)}---|
"""


def table(all_measured: Sequence[Measured]) -> str:
    rows = []
    for measured in all_measured:
        if measured.is_served:
            factors = [f"{difference / measured.noise:.2f}" for difference in measured.differences.values()]
            cells = [measured.families, measured.rung, f"{measured.noise:.1e}", *factors]
        else:
            cells = ["", "refused" if measured.refused else "failed", *[""] * (1 + len(WAYS))]
        name = f"{measured.architecture} (`{measured.model_type}`)"
        rows.append(" | ".join(["", name, *cells, remark(measured), ""]).strip())
    return HEAD + "\n".join(rows) + "\n"


def remark(measured: Measured) -> str:
    if measured.refused or measured.failed:
        return measured.refused or measured.failed
    if measured.model_type in DECODES_OTHERWISE:
        return (
            "computes a decode otherwise than a prefill: compared with its own cached run in the same pieces"
        )
    if measured.model_type in OWN_PIECES_ARE_WRONG:
        return "its own cache cannot be filled in pieces: noise of prefill and decode only"
    return ""


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
        all_measured.append(measure(model_type))
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
