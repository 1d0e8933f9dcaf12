"""A2: twelve architectures from disk, packed, chunked and cached, against the model's own dense run.

float32: the largest difference of any logit, in standard deviations of the logits, over packed mixtures of chunks
and decodes, and over prompts that resume in the cache at the end of an edge, inside an edge and inside a block;
and 64 greedy tokens of eight requests that share prefixes, through the engine, against `generate`.

bfloat16: the relative root mean square of the logits' error against the float32 dense run, over that of the model's
own bfloat16 dense run; and each layer's attention output against float64 attention over the same inputs.

The checkpoints hold bfloat16 numbers, so that all runs have the same weights and only arithmetic differs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from common import argument_parser, at_most, conclude, exactly
from torch import Tensor
from transformers.utils import logging as transformers_logging

from asking import greedy
from checkpoints import SERVED, VOCAB, tiny_model
from rootstock.cache.families import TokenFamily
from rootstock.cache.types import Tokens
from rootstock.config import EngineConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import Event, TokenEvent
from rootstock.kernels import reference
from rootstock.kernels.api import Attention, Scores, StepAttention
from rootstock.kernels.spans import Span
from rootstock.kernels.torch.sliced_attention import SlicedAttention, Tuning
from rootstock.runtime.torch.runner import TorchRuntime
from twins.driving import BLOCK_SIZE, BLOCKS, allocate, mixed_steps, packed_logits, random_tokens, small_cache
from twins.torch_models import Dense, load
from twins.twin import largest_difference
from twins.ways import Ran, resumed_anywhere

GREEDY_TOKENS = 64
# Draws of the weights for the comparison in bfloat16. In a mixture of experts a rounding sends a row to another
# expert, here and in the model's own run alike: of one draw the ratio of their errors was anything from 0.80 to 1.24.
COARSE_DRAWS = 6
LENGTHS = (300, 133, 41, 9)  # of packed sequences


def packed(runtime: TorchRuntime, longest_chunk: int) -> list[Ran]:
    sequences = [random_tokens(VOCAB, length, seed) for seed, length in enumerate(LENGTHS)]
    steps = mixed_steps(LENGTHS, seed=11, longest_chunk=longest_chunk)
    logits = packed_logits(runtime, sequences, steps)
    return [Ran(tokens, rows, ()) for tokens, rows in zip(sequences, logits, strict=True)]


def greedy_mismatches(runtime: TorchRuntime, dense: Dense, prompts: Sequence[Tokens]) -> int:
    """Counts requests, of eight at once with common prefixes, whose tokens differ from those of `generate`."""
    prompts = [*prompts, *(random_tokens(VOCAB, n, n) for n in (5, 33, 70))]
    cache = small_cache(runtime, BLOCKS * BLOCK_SIZE)
    answers: list[list[int]] = [[] for _ in prompts]

    def listen(event: Event, answer: list[int]) -> None:
        if isinstance(event, TokenEvent):
            answer.append(event.token)

    engine = Engine(runtime, cache, EngineConfig(max_batch=5, chunk_tokens=48))
    for prompt, answer in zip(prompts, answers, strict=True):
        engine.submit(greedy(prompt, GREEDY_TOKENS), lambda event, answer=answer: listen(event, answer))
    while engine.step():
        pass
    assert cache.stats().hit_tokens > 0
    expected = [dense.greedy(prompt, GREEDY_TOKENS) for prompt in prompts]
    return sum(answer != tokens for answer, tokens in zip(answers, expected, strict=True))


def worst_difference(runs: Sequence[Ran], dense: Dense) -> float:
    """Returns the largest difference of any logit, in standard deviations of the dense logits."""
    worst = 0.0
    for run in runs:
        expected = dense.logits(run.tokens)
        worst = max(worst, largest_difference(run.logits, expected[run.first :]) / float(expected.std()))
    return worst


def relative_rms(runs: Sequence[Ran], exact: Dense) -> float:
    error, size = 0.0, 0.0
    for run in runs:
        expected = exact.logits(run.tokens)[run.first :]
        error += float(np.square(run.logits - expected, dtype=np.float64).sum())
        size += float(np.square(expected, dtype=np.float64).sum())
    return (error / size) ** 0.5


class Compared:
    """Attention kernel whose every result is also computed by the reference, from the same inputs."""

    def __init__(self, kernel: Attention, block_size: int) -> None:
        self.kernel = kernel
        self.block_size = block_size
        self.errors: list[float] = []  # relative root mean square, per layer and step

    def prepare(self, spans: Sequence[Span], family: TokenFamily) -> StepAttention:
        step = self.kernel.prepare(spans, family)

        def attend(
            query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, scores: Scores
        ) -> Tensor:
            out = step(query, key, value, keys, values, scores)
            blocks = (-1, self.block_size)
            exact = reference.attend(
                query, keys.unflatten(0, blocks), values.unflatten(0, blocks), spans, scores, family
            )
            self.errors.append(float((out.double() - exact).norm() / exact.norm()))
            return out

        return attend


def attention_error(runtime: TorchRuntime) -> float:
    """Returns the worst error of a layer, over packed mixtures and cached prompts, as tuned and in tiny slices."""
    pool = runtime._pool
    assert pool is not None
    size, errors = pool.block_size, []
    sequences = [random_tokens(VOCAB, length, seed) for seed, length in enumerate((60, 33, 9, 5))]
    steps = mixed_steps([len(s) for s in sequences], seed=3)
    sliced = Tuning(slice_bytes=1 << 10, chunk_slice_bytes=2 << 10, share_from=1)
    given: dict[str, Attention | None] = {"sliced": pool.kernels.sliced, "gather": pool.kernels.gather}
    for kernels in (given, given | {"sliced": SlicedAttention(size, 64, sliced)}):
        compared = {name: Compared(kernel, size) for name, kernel in kernels.items() if kernel is not None}
        for name, kernel in compared.items():
            setattr(pool.kernels, name, kernel)
        packed_logits(runtime, sequences, steps)
        list(resumed_anywhere(runtime))
        errors += [error for kernel in compared.values() for error in kernel.errors]
    for name, kernel in given.items():
        setattr(pool.kernels, name, kernel)
    return max(errors)


def measure(model_type: str, directory: Path) -> dict[str, float]:
    tiny_model(model_type).to(torch.bfloat16).save_pretrained(directory)
    runtime, dense = load(directory), Dense(directory)
    allocate(runtime)
    cached = list(resumed_anywhere(runtime))
    figures = {
        "packed": worst_difference(packed(runtime, longest_chunk=300), dense),
        "chunked": worst_difference(packed(runtime, longest_chunk=13), dense),
        "cached": worst_difference(cached, dense),
        "greedy_mismatches": greedy_mismatches(runtime, dense, [run.tokens for run in cached]),
    }
    ours, theirs, attention = [], [], 0.0
    for seed in range(COARSE_DRAWS):
        tiny_model(model_type, seed).to(torch.bfloat16).save_pretrained(directory)
        coarse, own = load(directory, "bfloat16"), Dense(directory, torch.bfloat16)
        exact = Dense(directory)
        allocate(coarse)
        runs = [*packed(coarse, longest_chunk=13), *resumed_anywhere(coarse)]
        ours.append(relative_rms(runs, exact))
        theirs.append(
            relative_rms([replace(run, logits=own.logits(run.tokens)[run.first :]) for run in runs], exact)
        )
        attention = max(attention, attention_error(coarse))
    return figures | {
        "bf16_rms": _rms(ours),
        "bf16_rms_own": _rms(theirs),
        "bf16_ratio": _rms(ours) / _rms(theirs),
        "bf16_attention": attention,
    }


def _rms(values: list[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--models", default=",".join(SERVED), help="model types, separated by commas")
    models = parser.parse_args().models.split(",")
    transformers_logging.disable_progress_bar()
    measured: dict[str, dict[str, float]] = {}
    for model_type in models:
        with tempfile.TemporaryDirectory() as folder:
            measured[model_type] = measure(model_type, Path(folder))
        print(f"{model_type:10}", *(f"{k} {v:.3g}" for k, v in measured[model_type].items()), flush=True)

    def worst(name: str) -> float:
        return max(figures[name] for figures in measured.values())

    conclude(
        "A2",
        {
            "models": len(measured),
            "logits_in_std": max(worst(way) for way in ("packed", "chunked", "cached")),
            "greedy_mismatches": int(worst("greedy_mismatches")),
            "greedy_tokens": GREEDY_TOKENS,
            "bf16_ratio": round(worst("bf16_ratio"), 4),
            "bf16_attention": worst("bf16_attention"),
            "per_model": {
                name: {k: float(f"{v:.4g}") for k, v in figures.items()} for name, figures in measured.items()
            },
        },
        {
            "models": exactly(12 if models == list(SERVED) else len(models)),
            "logits_in_std": at_most(1e-3),
            "greedy_mismatches": exactly(0),
            "bf16_ratio": at_most(1.1),
            "bf16_attention": at_most(5e-3),
        },
    )


if __name__ == "__main__":
    main()
