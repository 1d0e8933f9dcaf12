"""E3: prompts of 1 to 70 tokens, cut in every way, equal the model's one pass within the bar of B1.

Every architecture that is served, as the tiny float32 model of B1, with prompts that are prefixes of one random
sequence. For nemotron_h and zamba2, whose own decodes differ from their prefill:

    chunks        each length from 1 to 70 in chunks of each size from 1 to itself (2,485 prompts), sixteen sequences
                  of different chunk sizes in one forward
    compositions  each length in 8 random compositions
    cache         each length from 2 to 70 and each position before its end (2,415 pairs), each in a cache of its own:
                  cold with a checkpoint at the position, a prompt that parts there, and the first prompt twice more,
                  the second time with one token left to compute
    engine        every third length from 1 to 70, with chunk_tokens 1, 2, 3, 7 and 64, four requests at a time in
                  room for hardly more than two: cold, repeated, after shorter prompts that it begins with, parting
                  in the middle, and with its own answer and more tokens, where the answer was decoded and where it
                  is not known
    preempted     with the same chunk_tokens, four answers of 32 tokens for which there is no room at once, and then
                  each alone

For every other architecture `chunks` covers the lengths 1 to 4, 7 to 9, 15 to 17, 31, 33, 47, 64 and 70 with all
chunk sizes, `compositions` 3 of each of them, `cache` the positions 1, the middle and the last two of each of them,
`engine` the lengths 2, 9, 17 and 33 with chunk_tokens 1, 3 and 8, and `preempted` the same chunk_tokens.

No logit of any computed row may differ from the one pass of transformers over the same tokens by more than four times
the model's own noise, which is measured as in B1, over the two sequences that prompts are made of. Tokens can lie
within rounding between two experts, or between two positions that an indexer chooses. A run beyond the bar is
therefore judged by the noise of the model's own cache on the tokens of all such runs (`runs_over_ties`). A model that
is still beyond the bar is judged by other tokens, like in B1 (ties.py).

`--models nemotron_h,zamba2` runs a few; `--jobs` is the number of processes, with one thread each.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common import argument_parser, at_least, at_most, conclude, exactly
from ties import ALLOWED, Measured, figures_of, judged, run_quietly

from checkpoints import save
from rootstock.runtime.torch.runner import TorchRuntime
from twins import chunkings
from twins.architectures import ARCHITECTURES, OWN_DECODES_ARE_WRONG, VOCAB
from twins.chunkings import LONGEST, Prompts
from twins.driving import allocate
from twins.reference import Reference
from twins.torch_models import load
from twins.twin import largest_difference
from twins.ways import Ran

LEAST_OF_NOISE = 8  # tokens of a sequence over which noise is measured: it is decoded from an eighth on


@dataclass(frozen=True)
class Coverage:
    lengths: tuple[int, ...]
    compositions: int  # of each length
    positions: tuple[int, ...] | None  # of checkpoints, negative ones from the end, 0 the middle; None: all
    served_lengths: tuple[int, ...]
    chunk_tokens: tuple[int, ...]


EVERYTHING = Coverage(
    tuple(range(1, LONGEST + 1)), 8, None, tuple(range(1, LONGEST + 1, 3)), (1, 2, 3, 7, 64)
)
SPREAD = Coverage(
    (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 47, 64, 70), 3, (1, 0, -2, -1), (2, 9, 17, 33), (1, 3, 8)
)


@dataclass
class Chunked(Measured):
    ties: int = 0  # runs that were judged by the model's own noise on their tokens
    runs: int = 0
    rows: int = 0
    preemptions: int = 0
    several_answers: int = 0  # prompts that were answered in more than one way

    def __str__(self) -> str:
        return (
            f"{super().__str__()}, {self.runs} runs, {self.rows} rows, {self.ties} over ties, "
            f"{self.preemptions} preemptions, {self.several_answers} prompts with several answers"
        )


def measured_of(model_type: str) -> Chunked:
    """Measures one model in this process, which is its own."""
    run_quietly()
    return judged(partial(measure, model_type))


def measure(model_type: str, draw: int) -> Chunked:
    measured, began = Chunked(model_type), time.monotonic()
    coverage = EVERYTHING if model_type in OWN_DECODES_ARE_WRONG else SPREAD
    prompts = Prompts.drawn(draw, VOCAB)
    with tempfile.TemporaryDirectory() as folder:
        directory = save(Path(folder) / model_type, model_type)
        try:
            runtime = load(directory)
            allocate(runtime)
            reference = Reference(model_type, directory)
            bases = (prompts.base[:LONGEST], prompts.other[:LONGEST])
            measured.noise = reference.noise(
                Ran(tokens, reference.logits(tokens), (LONGEST // 2,)) for tokens in bases
            )
            for way, ran in ways(measured, runtime, prompts, coverage):
                compare(measured, reference, way, ran)
        except Exception as error:
            measured.failed = f"{type(error).__name__}: {error}"
            return measured
    measured.seconds = time.monotonic() - began
    return measured


def ways(
    measured: Chunked, runtime: TorchRuntime, prompts: Prompts, coverage: Coverage
) -> Iterator[tuple[str, Iterable[Ran]]]:
    lengths = coverage.lengths
    yield "chunks", chunkings.every_chunk(runtime, prompts, lengths)
    yield "compositions", chunkings.compositions(runtime, prompts, lengths, coverage.compositions, seed=0)
    for length in lengths:
        positions = range(1, length) if coverage.positions is None else spread(coverage.positions, length)
        yield "cache", chunkings.through_the_cache(runtime, prompts, length, positions)
    for chunk_tokens in coverage.chunk_tokens:
        for way, served in (
            ("engine", chunkings.served(runtime, prompts, coverage.served_lengths, chunk_tokens)),
            ("preempted", chunkings.preempted(runtime, prompts, chunk_tokens)),
        ):
            measured.preemptions += served.preemptions
            measured.several_answers += sum(len(answers) > 1 for answers in served.answers.values())
            yield way, served.ran


def spread(positions: Iterable[int], length: int) -> list[int]:
    found = {
        position + (length if position < 0 else 0) if position else length // 2 for position in positions
    }
    return sorted(position for position in found if 0 < position < length)


def compare(measured: Chunked, reference: Reference, way: str, ran: Iterable[Ran]) -> None:
    beyond: list[tuple[float, Ran]] = []
    worst = 0.0
    for run in ran:
        difference = largest_difference(run.logits, reference.logits(run.tokens)[run.first :])
        measured.runs += 1
        measured.rows += len(run.logits)
        if difference > ALLOWED * measured.noise and run.cuts and len(run.tokens) >= LEAST_OF_NOISE:
            beyond.append((difference, run))
        else:
            worst = max(worst, difference / measured.noise)
    if beyond:
        own = max(measured.noise, *(reference.noise_of(run) for _, run in beyond))
        measured.ties += len(beyond)
        worst = max(worst, *(difference / own for difference, _ in beyond))
    measured.factors[way] = max(measured.factors.get(way, 0.0), worst)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--models", help="model types, separated by commas")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="processes")
    options = parser.parse_args()
    models = options.models.split(",") if options.models else list(ARCHITECTURES)
    unknown = [name for name in models if name not in ARCHITECTURES]
    if unknown:
        parser.error(f"there is no tiny model of {', '.join(unknown)}")
    # The slowest come first.
    models.sort(key=lambda name: name not in OWN_DECODES_ARE_WRONG)
    began, all_measured = time.monotonic(), []
    with concurrent.futures.ProcessPoolExecutor(
        options.jobs, mp_context=multiprocessing.get_context("spawn")
    ) as processes:
        for done in concurrent.futures.as_completed(processes.submit(measured_of, name) for name in models):
            all_measured.append(done.result())
            print(all_measured[-1], flush=True)
    right = [m for m in all_measured if not m.failed]
    conclude(
        "E3",
        {
            "models": len(right),
            "runs": sum(m.runs for m in right),
            "rows": sum(m.rows for m in right),
            "runs_over_ties": sum(m.ties for m in right),
            **figures_of(right, all_measured),
            "failed": {m.model_type: m.failed for m in all_measured if m.failed},
            "preemptions": sum(m.preemptions for m in right),
            "prompts_with_several_answers": sum(m.several_answers for m in right),
            "seconds": round(time.monotonic() - began, 1),
        },
        {"models": exactly(len(models)), "worst_factor": at_most(ALLOWED), "preemptions": at_least(1)},
    )


if __name__ == "__main__":
    main()
