"""transformers as the other side of a comparison: a model with sdpa attention and DynamicCache, and its `generate`.

The time of a decode step is that between two calls of a logits processor, inside one `generate` that was handed a
filled cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llamas import VOCAB
from transformers import AutoModelForCausalLM, DynamicCache

from engine_target import as_tokens
from rootstock.bench.workloads import Workload

Clock = Callable[[], float]  # seconds


class Stopwatch:
    """Logits processor that notes the time after every forward of `generate`."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.times: list[float] = []
        self._clock = clock

    def __call__(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(self._clock())
        return scores


class Dense:
    def __init__(self, path: Path, dtype: torch.dtype, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        self._rows: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # of each prompt, of each layer: K, V

    @property
    def config(self) -> Any:
        return self._model.config

    def prefill(self, prompts: np.ndarray) -> None:
        """Computes and keeps K and V of all but the last token of each prompt, one prompt at a time."""
        self._rows = []
        for prompt in prompts:
            cache = DynamicCache(config=self._model.config)
            ids = torch.from_numpy(prompt[None, :-1].astype(np.int64))
            self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            self._rows.append([(layer.keys, layer.values) for layer in cache.layers])

    def keep(self, computed: np.ndarray) -> None:
        """Keeps K and V of this prompt, to fill contexts with them again and again."""
        self.prefill(np.append(computed, 0)[None])

    def first_token_s(self, new: np.ndarray, cache: DynamicCache) -> float:
        """Returns the seconds of the forward of new tokens after the cached ones. They are added to the cache."""
        ids = torch.from_numpy(new[None].astype(np.int64))
        began = self._clock()
        self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return self._clock() - began

    def holding(self, batch: int, tokens: int) -> DynamicCache:
        """Returns a new cache of so many positions of each of `batch` sequences, filled with the rows of `keep`.

        It is filled layer by layer, so that only one layer is in memory twice.
        """
        cache = DynamicCache(config=self._model.config)
        for layer, (keys, values) in enumerate(self._rows[0]):
            times = -(-tokens // keys.shape[2])
            cache.update(*(t.repeat(batch, 1, times, 1)[:, :, :tokens] for t in (keys, values)), layer)
        return cache

    def decode_step_s(self, prompts: np.ndarray, steps: int) -> float:
        """Returns the median seconds between two forwards of `generate`, after the first one."""
        watch = Stopwatch(self._clock)
        self._generate(
            torch.from_numpy(prompts.astype(np.int64)), None, steps + 1, watch, self._filled(prompts)
        )
        times = np.diff(watch.times)
        assert len(times) == steps
        return float(np.median(times))

    def generate(
        self, prompts: list[np.ndarray], tokens: int, watch: Stopwatch | None = None
    ) -> list[list[int]]:
        """Generates answers to one left-padded batch."""
        width = max(map(len, prompts))
        ids = torch.zeros((len(prompts), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, width - len(prompt) :] = 1
        out = self._generate(ids, mask, tokens, watch)
        return [list(map(int, row)) for row in out[:, width:]]

    def agents_s(self, workload: Workload) -> float:
        """Runs each turn of all agents as one batch, which `generate` computes from its first token on."""
        histories = [as_tokens(each.prefix, VOCAB) for each in workload.conversations]
        began = time.monotonic()
        for turn in range(workload.sizes.turns):
            for i, conversation in enumerate(workload.conversations):
                new = as_tokens(conversation.turns[turn].new, VOCAB)
                histories[i] = np.concatenate([histories[i], new])
            answers = self.generate(histories, workload.sizes.answer_tokens)
            histories = [
                np.concatenate([history, np.array(answer, np.int32)])
                for history, answer in zip(histories, answers, strict=True)
            ]
        return time.monotonic() - began

    def _filled(self, prompts: np.ndarray) -> DynamicCache:
        """Returns a new cache with all but the last token of each prompt: generate writes into it."""
        if len(self._rows) < len(prompts) or self._rows[0][0][0].shape[2] != prompts.shape[1] - 1:
            return self.holding(len(prompts), prompts.shape[1] - 1)
        cache = DynamicCache(config=self._model.config)
        for layer, rows in enumerate(zip(*self._rows[: len(prompts)], strict=True)):
            keys, values = zip(*rows, strict=True)
            cache.update(torch.cat(keys), torch.cat(values), layer)
        return cache

    def _generate(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        tokens: int,
        watch: Stopwatch | None = None,
        cache: DynamicCache | None = None,
    ) -> torch.Tensor:
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids) if mask is None else mask,
            past_key_values=cache,
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
            use_cache=True,
            logits_processor=[watch] if watch else [],
        )
        assert isinstance(out, torch.Tensor)
        return out
