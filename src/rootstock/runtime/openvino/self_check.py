"""Self-check of every load: the exported graph with its own cache and the runtime must agree on some tokens.

`runtime/trial.py` has the schedule that the runtime runs, and the comparison.
"""

from __future__ import annotations

import contextlib

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from rootstock.cache.types import Tokens
from rootstock.runtime.base import Logits
from rootstock.runtime.openvino.graph import NOISE
from rootstock.runtime.trial import Measure

_NOISE_SAMPLES = 3
_ROUNDING = {"float32": 2.0**-23, "bfloat16": 2.0**-7}


class ExportedModel:
    """The exported graph, which keeps the K, V and states of one sequence. The input `noise` is in it
    (`shake_embeddings`)."""

    def __init__(self, compiled: ov.CompiledModel, width: int, dtype: str) -> None:
        """`width` of the embedded tokens."""
        self._width = width
        self._request = compiled.create_infer_request()
        self._names = {port.get_any_name(): port for port in compiled.inputs}
        self._rounding = _ROUNDING[dtype]

    def running(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def in_one_pass(self, tokens: Tokens) -> Logits:
        return self.decoded(tokens, len(tokens))

    def decoded(self, tokens: Tokens, prefilled: int) -> Logits:
        self._request.reset_state()
        steps = [(0, prefilled), *((at, at + 1) for at in range(prefilled, len(tokens)))]
        still = np.ones((1, 1, 1), np.float32)
        return np.concatenate([self._computed(tokens[:end], start, still) for start, end in steps])

    def noise(self, tokens: Tokens, measure: Measure) -> float:
        own, figures, random = self.in_one_pass(tokens), [], np.random.default_rng(0)
        for _ in range(_NOISE_SAMPLES):  # one at a time: with a large vocabulary each takes hundreds of MB
            self._request.reset_state()
            shape = (1, len(tokens), self._width)
            factors = 1 + self._rounding * (random.random(shape, np.float32) - np.float32(0.5))
            figures.append(measure(self._computed(tokens, 0, factors), own))
        # The logits themselves are rounded, so the two sides may always differ by as much.
        return max(self._rounding, float(np.median(figures)))

    def _computed(self, tokens: Tokens, past: int, noise: NDArray[np.float32]) -> Logits:
        """Computes the logits [new, vocab] of tokens[past:], behind the others."""
        positions = np.arange(past, len(tokens))[None]
        inputs: dict[str, NDArray[np.generic]] = {
            "input_ids": tokens[None, past:].astype(np.int64),
            "attention_mask": np.ones((1, len(tokens)), np.int64),
            "beam_idx": np.zeros(1, np.int32),
            "position_ids": positions,
            NOISE: noise,
        }
        for name, port in self._names.items():
            array = inputs[name]
            if name == "position_ids" and len(port.partial_shape) == 3:
                array = np.tile(array, (int(port.partial_shape[0].get_length()), 1, 1))
            self._request.set_tensor(name, ov.Tensor(np.ascontiguousarray(array)))
        self._request.infer()
        logits: Logits = self._request.get_tensor("logits").data[0].astype(np.float32)
        return logits
