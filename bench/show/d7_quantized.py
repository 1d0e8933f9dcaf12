"""D7: weights in 8 and 4 bits, and K and V in 8 bits: speed and error.

Speed, on a 600M Llama of random weights in bfloat16: a decode step of B sequences of 512 tokens, and the steps from a
prompt of 512 tokens to its first token, each by a real engine, relative to the same engine with unrounded (packed)
weights. Rounds alternate who goes first; a ratio is the median of the rounds' ratios.

Error, on three models of different kinds that were trained for a minute (trained_tiny.py), all in bfloat16:

- logits, in one pass over 256 bytes of unseen text: the median row's root mean square difference from the unrounded
  model, relative to the spread of its logits;
- agreement: the share of the 256 positions of the unrounded model's own greedy answers at which the rounded model,
  after the same bytes, chooses the same one; and the share where the unrounded model leads by less than 0.1 nats,
  which any rounding may change;
- the average number of tokens, of 256, before a greedy answer of the engine first differs.

The unrounded model in bfloat16 is measured against the same in float32 in the same way: the cost of rounding
activations.

K and V in 8 bits (`--kv-dtype int8`) are measured in the same way, with two exceptions. Their logits are those of 256
bytes computed four at a time through the pools, by the loops that decode, against the same with exact pools. And
attention is measured by itself: the compiled decode of B sequences of 4k and 16k positions over scattered blocks, 16
query heads and 8 KV heads of 128, in 8 bits relative to bfloat16 in the same rounds. It runs on one thread and counts
processor time: on a busy machine, threads that wait for each other measure the scheduler. The bytes of a token are
those of the 600M model's pool.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import argument_parser, at_least, at_most, conclude
from llamas import random_prompts, save_model, say
from our_side import Ours
from trained_tiny import models, text_tokens, train_and_save

from rootstock.cache.families import token_families
from rootstock.kernels.api import Scores
from rootstock.kernels.cpu.attention import NumbaAttention
from rootstock.kernels.cpu.prefill_attention import with_prefill_loops
from rootstock.kernels.quantized_rows import RoundedRows, rounded
from rootstock.kernels.spans import Span
from rootstock.kernels.torch.sliced_attention import SlicedAttention
from rootstock.runtime.base import Batch, Logits, Segment
from rootstock.runtime.torch.self_check import dense_logits, own_attention
from rootstock.runtime.trial import relative_error

SHOW = "D7"
WEIGHTS = ("int8", "int4")
BATCHES = (1, 8)
CONTEXT_TOKENS = 512
ROUNDS, STEPS = 5, 10
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 3, 64, 256
NEAR_TIE = 0.1  # nats between the best two

# Of each model. Weights in 4 bits make another model, which must stay close to the unrounded one.
MOST_ERROR = {"int8": 0.02, "int4": 0.1, "kv_int8": 0.02}
LEAST_AGREEMENT = {"int8": 0.95, "int4": 0.85, "kv_int8": 0.95}
# Against packed bfloat16: one row reads half or a quarter of the bytes.
MOST_DECODE = {"int8": 1.1, "int4": 0.8}
# Decodes of K and V in 8 bits: they must save almost half of the memory and take no more time.
MOST_KV_BYTES, MOST_KV_ATTENTION = 0.55, 1.0
ATTENTION_BATCHES, ATTENTION_CONTEXTS = (1, 8), (4096, 16384)
Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
PIECE_TOKENS = 4  # computed at a time by the loops that decode


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--model", default="600m")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--threads", type=int, help="as many as torch takes unless given")
    options.add_argument("--skip-speed", action="store_true")
    options.add_argument("--skip-error", action="store_true")
    given = options.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)

    figures: dict[str, Any] = {"threads": torch.get_num_threads(), "dtype": "bfloat16", "model": given.model}
    changes = {name: {"quantize": name} for name in WEIGHTS}
    changes["kv_int8"] = {"kv_dtype": "int8"}
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        trained = {} if given.skip_error else models()
        paths = {name: train_and_save(name, model, Path(folder)) for name, model in trained.items()}
        with torch.inference_mode():
            for name, path in paths.items():
                figures |= errors_of(name, path, changes, given.threads)
            if not given.skip_speed:
                figures |= attention_speed(given.rounds)
                path = save_model(given.model, Path(folder))
                figures |= speed_of(path, changes, given.rounds, given.threads)
    # Below about 0.8 other processes used these cores, and times of several threads mean little.
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    figures["cpu_share"] = round(cpu_s / wall_s / torch.get_num_threads(), 3)
    bars = {}
    for change in (*WEIGHTS, "kv_int8"):
        for name in models():
            bars[f"logit_error_{change}_{name}"] = at_most(MOST_ERROR[change])
            bars[f"agreement_{change}_{name}"] = at_least(LEAST_AGREEMENT[change])
    bars |= {f"decode_{change}_b1": at_most(most) for change, most in MOST_DECODE.items()}
    bars["kv_bytes_per_token"] = at_most(MOST_KV_BYTES)
    for batch in ATTENTION_BATCHES:
        for context in ATTENTION_CONTEXTS:
            bars[f"kv_attention_b{batch}_{context}"] = at_most(MOST_KV_ATTENTION)
    conclude(SHOW, figures, bars)


# ---- error


def errors_of(
    name: str, path: Path, changes: dict[str, dict[str, str]], threads: int | None
) -> dict[str, Any]:
    unseen = text_tokens(3, ANSWER_TOKENS).numpy().astype(np.int32)
    prompts = [text_tokens(10 + i, PROMPT_TOKENS).numpy().astype(np.int32) for i in range(PROMPTS)]
    plain = Ours(path, "bfloat16", gib=0.1, threads=threads)
    answers = plain.generate(prompts, ANSWER_TOKENS)
    asked = [
        np.concatenate([prompt, np.array(answer, np.int32)])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    references = {
        way: (way(plain, unseen), np.concatenate([answered(way(plain, tokens)) for tokens in asked]))
        for way in (logits_of, logits_by_pools)
    }
    best = np.sort(references[logits_of][1], -1)
    figures: dict[str, Any] = {
        f"near_ties_{name}": round(float(np.mean(best[:, -1] - best[:, -2] < NEAR_TIE)), 4)
    }
    for change, options in {"float32": {"dtype": "float32"}, **changes}.items():
        way = logits_by_pools if change == "kv_int8" else logits_of
        expected, own = references[way]
        changed = Ours(path, gib=0.1, threads=threads, **{"dtype": "bfloat16", **options})
        theirs = np.concatenate([answered(way(changed, tokens)) for tokens in asked])
        equal = [
            first_difference(answer, other)
            for answer, other in zip(answers, changed.generate(prompts, ANSWER_TOKENS), strict=True)
        ]
        found = {
            f"logit_error_{change}_{name}": round(relative_error(way(changed, unseen), expected), 4),
            f"agreement_{change}_{name}": round(float(np.mean(theirs.argmax(-1) == own.argmax(-1))), 4),
            f"equal_tokens_{change}_{name}": round(statistics.mean(equal), 1),
        }
        say(f"{name}, {change}: {found}")
        figures |= found
    return figures


def logits_of(ours: Ours, tokens: np.ndarray) -> Logits:
    """Computes [tokens, vocab] by the model's own code and the engine's linear layers, in one pass."""
    with own_attention(ours.runtime._model):
        return dense_logits(ours.runtime._model, tokens[None])[0]


def logits_by_pools(ours: Ours, tokens: np.ndarray) -> Logits:
    """Computes [tokens, vocab] by a few tokens at a time, which read the earlier ones in the pools."""
    ours.engine.clear_cache()
    blocks = np.arange(-(-len(tokens) // ours.block_size), dtype=np.int32)
    tables = tuple(blocks for _ in token_families(ours.runtime.description.families))
    pieces = [tokens[past : past + PIECE_TOKENS] for past in range(0, len(tokens), PIECE_TOKENS)]
    return np.concatenate(
        [
            ours.runtime.forward(Batch([Segment(piece, i * PIECE_TOKENS, tables, len(piece))]))
            for i, piece in enumerate(pieces)
        ]
    )


def answered(logits: Logits) -> Logits:
    """Returns the rows that choose the tokens of the answer."""
    return logits[PROMPT_TOKENS - 1 : -1]


def first_difference(answer: list[int], other: list[int]) -> int:
    different = [i for i, (one, two) in enumerate(zip(answer, other, strict=True)) if one != two]
    return different[0] if different else len(answer)


# ---- speed


def speed_of(
    path: Path, changes: dict[str, dict[str, str]], rounds: int, threads: int | None
) -> dict[str, Any]:
    sides = {
        change: Ours(path, "bfloat16", gib=1.0, threads=threads, **options)
        for change, options in {"plain": {}, **changes}.items()
    }
    gc.collect()
    sizes = {
        name: sum(f.bytes_per_token for f in token_families(sides[name].runtime.description.families))
        for name in ("plain", "kv_int8")
    }
    figures: dict[str, Any] = {
        "kv_bytes_per_token": round(sizes["kv_int8"] / sizes["plain"], 4),
        "kv_bytes_per_token_plain": sizes["plain"],
    }
    prompts = random_prompts(max(BATCHES), CONTEXT_TOKENS)
    for side in sides.values():
        side.generate(list(prompts), 1)  # now they are cached, and will all begin to decode in one step
    for batch in BATCHES:
        timed = alternate(
            sides, rounds, lambda side, i, batch=batch: side.decode_step_s(prompts[:batch], STEPS)
        )
        figures |= told(f"decode_{{}}_b{batch}", timed)
    fresh = random_prompts(rounds + 1, CONTEXT_TOKENS, seed=1)
    figures |= told("prefill_{}", alternate(sides, rounds, lambda side, i: side.first_token_s(fresh[i])))
    return figures


def attention_speed(rounds: int) -> dict[str, Any]:
    """Times decodes over pools in 8 bits, relative to bfloat16."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for batch in ATTENTION_BATCHES:
        for context in ATTENTION_CONTEXTS:
            exact = [random_rows(batch * context) for _ in "kv"]
            coarse = [RoundedRows(*rounded(rows), torch.bfloat16) for rows in exact]
            tables = np.random.default_rng(0).permutation(batch * context // BLOCK_SIZE).astype(np.int32)
            spans = [Span(i, 1, context - 1, table) for i, table in enumerate(tables.reshape(batch, -1))]
            beside = with_prefill_loops(BLOCK_SIZE, SlicedAttention(BLOCK_SIZE, KV_HEADS * HEAD_DIM * 2))
            step = NumbaAttention(BLOCK_SIZE, beside).prepare(spans)
            query = torch.randn(batch, Q_HEADS, HEAD_DIM).bfloat16()
            new, scores = query[:, :KV_HEADS], Scores(HEAD_DIM**-0.5)
            seconds: dict[str, list[float]] = {"plain": [], "kv_int8": []}
            for i in range(4 * rounds + 2):
                for name, (keys, values) in (("plain", exact), ("kv_int8", coarse)):
                    began = time.thread_time()
                    step(query, new, new, keys, values, scores)
                    if i >= 2:
                        seconds[name].append(time.thread_time() - began)
            ratio = statistics.median(
                a / b for a, b in zip(seconds["kv_int8"], seconds["plain"], strict=True)
            )
            figures[f"kv_attention_b{batch}_{context}"] = round(ratio, 4)
            for name, took in seconds.items():
                figures[f"attention_{name}_b{batch}_{context}_ms"] = round(statistics.median(took) * 1e3, 2)
    torch.set_num_threads(threads)
    say(str(figures))
    return figures


def random_rows(slots: int) -> torch.Tensor:
    """Draws [slots, KV_HEADS, HEAD_DIM] bfloat16: 4096 of them, again and again."""
    rows = torch.randn(4096, KV_HEADS, HEAD_DIM).bfloat16()
    return rows.repeat(-(-slots // 4096), 1, 1)[:slots]


def alternate(sides: dict[str, Ours], rounds: int, timed: Any) -> dict[str, list[float]]:
    """Times the sides in turn. Returns the seconds of each round, after one more in which first uses allocate."""
    seconds: dict[str, list[float]] = {change: [] for change in sides}
    order = list(sides)
    for i in range(rounds + 1):
        for change in order:
            took = timed(sides[change], i)
            if i:
                seconds[change].append(took)
        order = order[1:] + order[:1]
    return seconds


def told(name: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for change, took in seconds.items():
        figures[name.format(change) + "_ms"] = round(statistics.median(took) * 1e3, 2)
        if change != "plain":
            ratio = statistics.median(t / p for t, p in zip(took, seconds["plain"], strict=True))
            figures[name.format(change)] = round(ratio, 4)
    say(str(figures))
    return figures


if __name__ == "__main__":
    main()
