"""The MLX runtime in the place of the oracle: tiny models, whose right logits mlx-lm's own caches give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as mlx_cache

from mlx_faults import counting_linears, failing
from rootstock.cache.families import Family
from rootstock.cache.plan import Plan
from rootstock.cache.types import Tokens
from rootstock.errors import PoolsLost
from rootstock.runtime.base import Batch, Logits, ModelDescription
from rootstock.runtime.mlx.modes import choose_mode
from rootstock.runtime.mlx.runner import MlxExecution, MlxRuntime
from rootstock.runtime.mlx.self_check import own_logits
from rootstock.runtime.mlx.survey import survey
from twins import mlx_models

# Sizes of all tiny models, and for each kind of model those that differ. Windows are 7 and chunks 8 positions long.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "hidden_dim"), 16),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "moe_intermediate_size"), 16),
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "state_size": 4,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},  # full
    "gemma3_text": {},  # full and window
    "qwen3_next": {"full_attention_interval": 2},  # full and state
    "gear": {"num_hidden_layers": 4},  # full, window and state
    "recurrent_gemma": {"num_hidden_layers": 3},  # window and state
    "mamba": {},  # state
    "llama4": {"num_hidden_layers": 4},  # full and chunked, one sequence per forward
}


def _disable_compilation() -> None:
    """Disables mx.compile: on a CPU it calls a C++ compiler for each function."""
    mx.disable_compile()


@dataclass(frozen=True)
class TinyModel:
    """A model that was loaded once for the process. Its runtimes have pools of their own."""

    model: nn.Module
    served: MlxExecution
    linears: int  # calls of linear layers in a forward

    @property
    def families(self) -> tuple[Family, ...]:
        return self.served.layout.families


@functools.cache
def tiny_model(kind: str, vocab_size: int) -> TinyModel:
    """Makes a model of `KINDS` in the best execution mode that passes its self-check."""
    _disable_compilation()
    model = mlx_models.build(kind, sizes=_SIZES | KINDS[kind] | {"vocab_size": vocab_size})
    layout = survey(model)
    description = ModelDescription(
        name=kind,
        architecture=kind,
        vocab_size=layout.vocab_size,
        context_limit=1 << 20,
        families=layout.families,
        weights_fingerprint=kind,
        dtype="float32",
        kv_dtype="float32",
        device="cpu",
        parameters=0,
        runtime="mlx",
        memory="unified",
        lazy_states=True,
    )

    def make(served: MlxExecution) -> MlxRuntime:
        return MlxRuntime(model, served)

    served = choose_mode(model, layout, description, make, lambda done: None)
    with counting_linears() as calls:
        own_logits(model, np.zeros(2, np.int32))
    return TinyModel(model, served, len(calls))


class MlxOracle(MlxRuntime):
    """MLX runtime with the interface of the oracle.

    Calls `fault` with every batch before it runs. If it raises, the forward fails in the middle of the model: while
    the graph is built, or for PoolsLost when it is evaluated.
    """

    def __init__(
        self,
        tiny: TinyModel,
        *,
        eos_token_ids: tuple[int, ...] = (),
        fault: Callable[[Batch], None] | None = None,
    ) -> None:
        _disable_compilation()  # again: others may have enabled it
        described = replace(tiny.served.description, eos_token_ids=eos_token_ids)
        super().__init__(tiny.model, replace(tiny.served, description=described))
        self.fault = fault
        self.adapters: set[str] = set()
        self.returned_rows = 0
        self.releases = 0
        self._tiny = tiny
        self._random = np.random.default_rng(0)
        self._own: tuple[bytes, Any] = (b"", None)  # the tokens whose K, V and states mlx-lm's caches have
        self._expected: dict[bytes, Logits] = {}

    def apply(self, plan: Plan) -> None:
        self.returned_rows += sum(len(returned.rows) for returned in plan.returned)
        super().apply(plan)

    def release_unused(self) -> None:
        self.releases += 1
        super().release_unused()

    def forward(self, batch: Batch) -> Logits:
        try:
            if self.fault is not None:
                self.fault(batch)
        except Exception as error:
            kind = "evaluation" if isinstance(error, PoolsLost) else "graph"
            with failing(kind, int(self._random.integers(self._tiny.linears)), error):
                return super().forward(batch)
        return super().forward(batch)

    def expected_logits(self, tokens: Tokens, adapter: str = "") -> Logits:
        """Computes the logits [vocab] that follow these tokens, by the model with mlx-lm's own caches."""
        assert not adapter
        key = np.ascontiguousarray(tokens, np.int32).tobytes()
        if key not in self._expected:
            known, caches = self._own
            if caches is None or known != key[:-4]:
                known, caches = b"", mlx_cache.make_prompt_cache(self._tiny.model)
            new = np.asarray(tokens, np.int32)[len(known) // 4 :]
            logits: mx.array = self._tiny.model(mx.array(new[None]), cache=caches)[0, -1]
            self._own = key, caches
            self._expected[key] = np.array(logits.astype(mx.float32))
        return self._expected[key]

    def expected_rows(self, tokens: Tokens, first: int, adapter: str = "") -> Logits:
        """Computes in one pass [1 + tokens - first, vocab]: the logits that follow the first `first` of these tokens,
        and each longer prefix up to all of them."""
        assert not adapter
        return own_logits(self._tiny.model, np.asarray(tokens, np.int32))[first - 1 :]
