"""A loaded model driven by hand: packed schedules, and prompts through the real cache, with every row's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from rootstock.cache import KVCache, Namespace
from rootstock.cache.lease import Admitted
from rootstock.cache.plan import Tokens
from rootstock.config import ModelConfig
from rootstock.runtime.base import Batch, Logits, Segment
from rootstock.runtime.torch_model import TorchRuntime, load_model

BLOCK_SIZE = 8
BLOCKS = 160


def load(directory: Path, dtype: str = "float32") -> TorchRuntime:
    """By the real loader, on one thread: these models are too small to share."""
    return load_model(ModelConfig(str(directory), dtype=dtype, device="cpu", threads=1))


class Dense:
    """The model as anybody would run it, read from the same files: the reference."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    def logits(self, tokens: Tokens) -> NDArray[np.float32]:
        """[tokens, vocab] in one pass."""
        with torch.inference_mode():
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            logits: NDArray[np.float32] = self.model(ids, use_cache=False).logits[0].float().numpy()
        return logits

    def greedy(self, prompt: Tokens, tokens: int) -> list[int]:
        """What follows, by `generate` with its own cache; end-of-sequence ends nothing."""
        with torch.inference_mode():
            ids = torch.from_numpy(prompt.astype(np.int64))[None]
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        followed: list[int] = out[0, len(prompt) :].tolist()
        return followed


def random_tokens(vocab_size: int, length: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(3, vocab_size, length).astype(np.int32)


def packed_logits(
    runtime: TorchRuntime, sequences: Sequence[Tokens], steps: Sequence[dict[int, int]]
) -> list[Logits]:
    """Each step: sequence → how many of its tokens to compute now. [tokens, vocab] of each, in the end."""
    tables = np.random.default_rng(7).permutation(BLOCKS).astype(np.int32).reshape(len(sequences), -1)
    past, rows = [0] * len(sequences), [[] for _ in sequences]
    for step in steps:
        segments = [
            Segment(sequences[i][past[i] : past[i] + new], past[i], (tables[i],), new)
            for i, new in step.items()
        ]
        logits = runtime.forward(Batch(segments))
        row = 0
        for i, new in step.items():
            rows[i].append(logits[row : row + new])
            past[i], row = past[i] + new, row + new
    return [np.concatenate(r) for r in rows]


def mixed_steps(lengths: Sequence[int], seed: int, longest_chunk: int = 13) -> list[dict[int, int]]:
    """Random steps that mix chunks and decodes of several sequences until all are computed."""
    rng, left, steps = np.random.default_rng(seed), list(lengths), []
    while any(left):
        step = {}
        for i in rng.permutation(len(left)):
            if left[i] and rng.random() < 0.7:
                new = 1 if rng.random() < 0.4 else int(rng.integers(1, longest_chunk + 1))
                step[int(i)] = min(new, left[i])
        for i, new in step.items():
            left[i] -= new
        if step:
            steps.append(step)
    return steps


@dataclass(frozen=True)
class Hit:
    tokens: int  # found, not computed
    copies: int  # blocks copied for it
    logits: Logits  # [prompt - tokens, vocab]


class Cached:
    """One prompt after the other through the real cache: match, admit, forward, commit, finish."""

    def __init__(self, runtime: TorchRuntime, block_size: int = BLOCK_SIZE) -> None:
        described = runtime.description
        token_bytes = sum(family.bytes_per_token for family in described.families)
        self.cache = KVCache(described.families, BLOCKS * block_size * token_bytes, block_size)
        self._runtime = runtime
        self._namespace = Namespace(described.weights_fingerprint, described.kv_dtype, described.rope_regime)

    def run(self, prompt: Tokens) -> Hit:
        admitted = self.cache.admit(self.cache.match(prompt, self._namespace))
        assert isinstance(admitted, Admitted)
        lease, plan = admitted.lease, admitted.plan
        hit = lease.hit_tokens
        self._runtime.apply(plan)
        rest = prompt[hit:]
        logits = self._runtime.forward(Batch([Segment(rest, hit, (lease.table,), len(rest))]))
        self.cache.commit(lease, rest)
        self.cache.finish(lease)
        return Hit(hit, len(plan.copies), logits)
