"""Small checkpoints by the real loader of the torch runtime, and by transformers alone."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from checkpoints import saved
from rootstock.cache.types import Tokens
from rootstock.config import ModelConfig
from rootstock.runtime.torch.fusion.base import NOTHING_FUSED
from rootstock.runtime.torch.runner import TorchRuntime, load_model
from twins.driving import allocate, packed_logits, random_tokens


def load(directory: Path, dtype: str = "float32", **options: Any) -> TorchRuntime:
    """Loads a model by the real loader, on one thread.

    The environment chooses the kernels: `tests/soak/d8_every_kernel.py` runs the same tests with each of them.
    """
    config = ModelConfig(
        str(directory),
        dtype=dtype,
        device="cpu",
        threads=1,
        **options,
        attention=os.environ.get("ROOTSTOCK_TEST_ATTENTION", "auto"),
    )
    if os.environ.get("ROOTSTOCK_TEST_FUSION", "auto") == "none":
        # No option of the server switches fusion off: only tests compare a model with and without it.
        with mock.patch("rootstock.runtime.torch.fallback._fuse", return_value=NOTHING_FUSED):
            return load_model(config)
    return load_model(config)


def loaded(model_type: str, dtype: str = "float32", **options: Any) -> TorchRuntime:
    """Returns a runtime without pools of a model that is loaded once for the process.

    Tests may change neither the model nor its files.
    """
    torch.set_num_threads(1)
    kernels = tuple(os.environ.get(f"ROOTSTOCK_TEST_{of}") for of in ("ATTENTION", "FUSION"))
    once = _loaded_once(model_type, dtype, kernels, tuple(options.items()))
    return TorchRuntime(once._model, once._served)


@functools.cache
def _loaded_once(
    model_type: str, dtype: str, kernels: tuple[str | None, ...], options: tuple[tuple[str, Any], ...]
) -> TorchRuntime:
    return load(saved(model_type), dtype, **dict(options))


class Dense:
    """Reference: the model as transformers runs it, read from the same files.

    `attention` is transformers' name of an implementation: "eager" is the modelling file's own.
    """

    def __init__(
        self, directory: Path, dtype: torch.dtype = torch.float32, attention: str | None = None
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=attention
        ).eval()
        known = inspect.signature(type(self.model).forward).parameters
        self._takes_positions = "position_ids" in known
        self._cache_name = "cache_params" if "cache_params" in known else "past_key_values"

    def logits(self, tokens: Tokens) -> NDArray[np.float32]:
        """Computes [tokens, vocab] in one pass."""
        with torch.inference_mode():
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            logits: NDArray[np.float32] = self.model(ids, use_cache=False).logits[0].float().numpy()
        return logits

    def cached_logits(self, sequences: NDArray[np.int32], cuts: Sequence[int]) -> NDArray[np.float32]:
        """Runs [sequences, tokens] in pieces with the model's own cache. Returns [sequences, tokens, vocab].

        0 < cuts < tokens.
        """
        ids = torch.from_numpy(sequences.astype(np.int64))
        rows, cache = [], {}
        with torch.inference_mode():
            for start, end in itertools.pairwise([0, *cuts, ids.shape[1]]):
                positions = {"position_ids": torch.arange(start, end)[None]} if self._takes_positions else {}
                output = self.model(ids[:, start:end], use_cache=True, **positions, **cache)
                cache = {self._cache_name: getattr(output, self._cache_name)}
                rows.append(output.logits.float().numpy())
        return np.concatenate(rows, axis=1)

    def greedy(self, prompt: Tokens, tokens: int) -> list[int]:
        """Returns the tokens of `generate` with its own cache. End-of-sequence is ignored."""
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


def logit_errors(runtime: TorchRuntime, plain: Path, vocab: int, draws: int = 1) -> tuple[float, float]:
    """Returns errors of logits in standard deviations of the exact ones, which transformers computes in float32 from
    the files in `plain`: of the runtime, in chunks and decodes of two sequences, and of transformers in bfloat16.
    `draws` is how many pairs of sequences are random.

    An error is the one of the median row: where a mixture's router chooses another expert, both are far off.
    """
    exact, own = (Dense(plain, dtype, attention="eager") for dtype in (torch.float32, torch.bfloat16))
    steps = [{0: 17, 1: 20}, {1: 1, 0: 22}, {0: 1}]
    logits: dict[str, list[Any]] = {"exact": [], "own": [], "runtime": []}
    allocate(runtime)
    for draw in range(draws):
        sequences = [random_tokens(vocab, n, n + 100 * draw) for n in (40, 21)]
        logits["runtime"] += packed_logits(runtime, sequences, steps)
        logits["exact"] += map(exact.logits, sequences)
        logits["own"] += map(own.logits, sequences)
    expected = np.concatenate(logits["exact"])
    off, theirs = (
        float(np.sqrt(np.median(np.mean((np.concatenate(logits[of]) - expected) ** 2, -1))) / expected.std())
        for of in ("runtime", "own")
    )
    return off, theirs
