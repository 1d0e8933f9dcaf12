"""Self-check on MLX: correct models pass in every dtype, and each mistake made here on purpose is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models import llama

from mlx_checkpoints import KINDS, make_mlx_model
from rootstock.cache.families import SlidingWindow
from rootstock.cache.plan import Plan
from rootstock.runtime.base import Batch, ExecutionMode, Logits
from rootstock.runtime.mlx import kv_pool, rows, state_pool
from rootstock.runtime.mlx.runner import MlxExecution, MlxRuntime
from rootstock.runtime.mlx.self_check import noise, own_logits, self_check
from rootstock.runtime.mlx.survey import UnsupportedModel
from rootstock.runtime.mlx.weights import cast, quantize
from rootstock.runtime.trial import Disagreement, TrialResult, largest_difference, relative_error
from runtime.mlx.helpers import served

TOKENS = np.random.default_rng(0).integers(0, 512, 45).astype(np.int32)


def check(
    model: nn.Module,
    dtype: str = "float32",
    mode: ExecutionMode = "batched",
    runtime: Callable[[nn.Module, MlxExecution], Any] = MlxRuntime,
) -> TrialResult:
    its = served(model, dtype, mode)
    return self_check(model, its.description, lambda: runtime(model, its), lambda done: None)


def made(kind: str, dtype: str = "float32", quantization: str = "none", **config: Any) -> nn.Module:
    model = make_mlx_model(kind, config)
    if quantization != "none":
        quantize(model, quantization)
    cast(model, getattr(mx, dtype))
    return model


# ---- correct models


@pytest.mark.parametrize("mode", ["batched", "batched, gathered K and V", "one sequence per forward"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama4"])
def test_a_correct_model_passes_in_each_mode(kind: str, mode: ExecutionMode) -> None:
    verdict = check(made(kind), mode=mode)
    assert max(verdict.figures.values()) <= 1e-4
    assert verdict.remark == ""


def test_a_model_whose_decodes_differ_from_prefills_passes_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = llama.MLP.__call__
    decoding = 1.02  # times the output of a single row
    monkeypatch.setattr(
        llama.MLP, "__call__", lambda self, x: own(self, x) * (decoding if x.shape[1] == 1 else 1.0)
    )
    verdict = check(made("llama"), mode="one sequence per forward")
    assert max(verdict.figures.values()) <= 1e-4
    assert "a decode by the model itself differs from one pass" in verdict.remark


# MLX multiplies by quantized weights in float16 several times as slowly as in bfloat16 on a CPU: each kind of model
# has one of the two widths there, and both in bfloat16.
ROUNDED = [
    ("bfloat16", "none", ("llama", "qwen3", "gemma3_text", "mamba2", "lfm2", "nemotron_h")),
    ("bfloat16", "int8", ("llama", "qwen3", "gemma3_text", "mamba2", "lfm2", "nemotron_h")),
    ("bfloat16", "int4", ("llama", "qwen3", "gemma3_text", "mamba2", "lfm2", "nemotron_h")),
    ("float16", "none", ("llama", "qwen3", "gemma3_text", "mamba2", "lfm2", "nemotron_h")),
    ("float16", "int8", ("llama", "gemma3_text", "lfm2")),
    ("float16", "int4", ("qwen3", "mamba2", "nemotron_h")),
]


@pytest.mark.parametrize(
    ("kind", "dtype", "quantization"),
    [(kind, dtype, quantization) for dtype, quantization, kinds in ROUNDED for kind in kinds],
)
def test_rounding_is_not_mistaken_for_a_mistake(kind: str, dtype: str, quantization: str) -> None:
    check(made(kind, dtype, quantization, vocab_size=64), dtype)


# ---- mistakes


class Shifted(MlxRuntime):
    """Runtime that computes every continued sequence one position too late."""

    def forward(self, batch: Batch) -> Logits:
        first = [segment.past == 0 for segment in batch.segments]
        return super().forward(
            batch if all(first) else Batch([replace(s, past=max(0, s.past - 1)) for s in batch.segments])
        )


class WithoutCopies(MlxRuntime):
    """Runtime that executes no plan."""

    def apply(self, plan: Plan) -> None: ...


def of_rows(name: str, wrong: Callable[[Any, Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Returns a mistake in a method of FamilyRows: `wrong` changes its result."""

    def make(monkeypatch: pytest.MonkeyPatch) -> None:
        own = getattr(rows.FamilyRows, name)
        call = own.func if hasattr(own, "func") else own
        if hasattr(own, "func"):
            monkeypatch.setattr(rows.FamilyRows, name, property(lambda self: wrong(self, call(self))))
        else:
            monkeypatch.setattr(rows.FamilyRows, name, lambda self, *args: wrong(self, call(self, *args)))

    return make


def a_lost_state(monkeypatch: pytest.MonkeyPatch) -> None:
    own = state_pool.MlxStatePool.joined

    def joined(self: Any, slots: Any) -> Any:
        return {path: [mx.zeros_like(a) for a in arrays] for path, arrays in own(self, slots).items()}

    monkeypatch.setattr(state_pool.MlxStatePool, "joined", joined)


def swapped_states(monkeypatch: pytest.MonkeyPatch) -> None:
    own = state_pool.MlxStatePool.joined
    monkeypatch.setattr(
        state_pool.MlxStatePool, "joined", lambda self, slots: own(self, list(reversed(slots)))
    )


def keys_one_slot_late(monkeypatch: pytest.MonkeyPatch) -> None:
    own = kv_pool.LayerPool.write
    monkeypatch.setattr(
        kv_pool.LayerPool, "write", lambda self, slots, k, v: own(self, slots, mx.roll(k, 1, 2), v)
    )


MISTAKES: Mapping[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "a wrong mask": ("llama", of_rows("mask", lambda self, mask: mx.ones_like(mask))),
    "a window that is ignored": (
        "gemma3_text",
        of_rows("window", lambda self, window: None if isinstance(self.family, SlidingWindow) else window),
    ),
    "a lost state": ("mamba2", a_lost_state),
    "the state of another sequence": ("qwen3_next", swapped_states),
    "keys in the wrong slots": ("qwen3", keys_one_slot_late),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(monkeypatch: pytest.MonkeyPatch, mistake: str, dtype: str) -> None:
    kind, make = MISTAKES[mistake]
    if kind == "qwen3_next" and dtype == "bfloat16":
        kind = "nemotron_h"  # MLX has no experts in bfloat16 on a CPU
    model = made(kind, dtype)
    check(model, dtype, "batched, gathered K and V")
    make(monkeypatch)
    with pytest.raises(Disagreement) as found:
        check(model, dtype, "batched, gathered K and V")
    assert found.value.figure > 5 * found.value.allowed or dtype == "bfloat16"


@pytest.mark.parametrize("runtime", [Shifted, WithoutCopies])
@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "nemotron_h"])
def test_a_runtime_that_is_wrong_is_found(kind: str, runtime: Callable[..., Any]) -> None:
    with pytest.raises((Disagreement, AssertionError, KeyError)):
        check(made(kind), runtime=runtime)


def test_logits_that_are_no_numbers_are_a_mistake() -> None:
    model = made("llama")
    model.model.norm.weight = mx.full(model.model.norm.weight.shape, float("nan"))
    with pytest.raises(Disagreement):
        check(model)


# ---- the reference and its noise


def test_tokens_one_by_one_continue_the_prompt() -> None:
    model = made("qwen3")
    whole, continued = own_logits(model, TOKENS), own_logits(model, TOKENS, 30)
    assert continued.shape == whole.shape
    assert largest_difference(continued, whole) < 1e-4


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama4"])
def test_noise_of_one_more_rounding_is_small_but_seen(kind: str) -> None:
    found = noise(made(kind), TOKENS, "float32", largest_difference)
    assert 2**-23 < found < 1e-3


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_noise_reaches_quantized_models(quantization: str) -> None:
    found = noise(made("qwen3", "bfloat16", quantization), TOKENS, "bfloat16", relative_error)
    assert 2**-7 <= found < 0.5


def test_noise_leaves_the_model_as_it_was() -> None:
    model = made("qwen3", quantization="int8")
    classes = [type(module) for module in model.modules()]
    before, names = own_logits(model, TOKENS), [name for name, _ in tree_flatten(model.parameters())]
    noise(model, TOKENS, "float32", largest_difference)
    assert [type(module) for module in model.modules()] == classes
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    assert np.array_equal(own_logits(model, TOKENS), before)


class Bare(nn.Module):
    """Model with an embedding of positions, and of tokens by `embed`."""

    def __init__(self, embeds: bool) -> None:
        super().__init__()
        self.positions = nn.Embedding(64, 16)
        self.tokens = nn.Embedding(512, 16)
        self.embeds = embeds
        self.head = nn.Linear(16, 512)

    @property
    def layers(self) -> list[nn.Module]:
        return [self.head]

    def make_cache(self) -> list[Any]:
        return [mlx_cache.KVCache()]

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        embedded = self.tokens(ids) if self.embeds else self.tokens.weight[ids]
        return self.head(embedded + self.positions(mx.arange(ids.shape[1])))


def test_only_tokens_are_shaken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Bare(embeds=True)
    model.positions.weight = model.positions.weight * 1e6
    # A rounding of positions would change the logits by much more than one of tokens.
    apart = noise(model, TOKENS, "float32", lambda ours, own: float(np.abs(ours - own).max()))
    assert apart <= 2 * np.abs(own_logits(model, TOKENS)).max() * 2**-23


def test_a_model_without_an_embedding_module_is_told() -> None:
    with pytest.raises(UnsupportedModel, match="embeds its tokens in no module of its own"):
        noise(Bare(embeds=False), TOKENS, "float32", largest_difference)
