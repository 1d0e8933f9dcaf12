"""Our pool under a transformers model, by three public hooks and without touching the model's code.

    cache       `PagedCache.update` writes the new K and V to the pool, marks both tensors, and returns them
    mask        a model's own create_*_mask gives the pattern; no mask tensor is ever built
    attention   the marks on K and V lead to the step and the layer; the kernel reads the pool

The marks make the hooks free of ambient state. They are also the proof that K and V reached attention unchanged:
whatever a model does to them in between (expanding latents, splitting heads) makes a tensor without a mark, which
is refused rather than attended to wrongly. Both tensors are checked, since some models change only one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.masking_utils import causal_mask_function

from rootstock.kernels.scores import Scores, StepAttention
from rootstock.runtime.torch_pool import LayerMemory, TorchPool

IMPLEMENTATION = "rootstock"  # our name in transformers' registries
_MARK = "_rootstock"


class LayerUnsupported(Exception):
    """A layer does what the hooks cannot serve. The loader turns it into ModelUnsupported."""

    def __init__(self, reason: str, *, module: str | None = None, layer: int | None = None) -> None:
        where = [] if layer is None else [f"layer {layer}"]
        where += [] if module is None else [module]
        super().__init__(f"{' '.join(where) or 'the model'} {reason}")


class MaskPattern(NamedTuple):
    """What a layer may see, as the model itself says it: a function of (batch, head, query, key position)."""

    function: Callable[..., Any]
    local_size: int | None  # of a window or chunk

    @property
    def is_causal(self) -> bool:
        return self.function is causal_mask_function and self.local_size is None


class MarkedLayer(Protocol):
    """What the mark on K and V leads to: one layer within one forward."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        scores: Scores,
        extra: dict[str, Any],
    ) -> Tensor:
        """query [1, q_heads, tokens, head_dim], key and value [1, kv_heads, tokens, …]
        → [1, tokens, q_heads, value_dim]; `extra` is what else the model passed to attention."""
        ...


def mark(key: Tensor, value: Tensor, layer: MarkedLayer) -> None:
    setattr(key, _MARK, layer)
    setattr(value, _MARK, layer)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; parameter names are its own. Dropout is 0 outside training."""
    layer: MarkedLayer | None = getattr(key, _MARK, None)
    of_value: MarkedLayer | None = getattr(value, _MARK, None)
    if layer is None or of_value is not layer:
        raise LayerUnsupported(
            "changes K or V between the cache and attention (latent or derived K/V), and this version attends "
            "plain K and V only",
            module=type(module).__name__,
            layer=getattr(module, "layer_idx", None),
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(scale, softcap, s_aux)
    return layer.attend(module, query, key, value, attention_mask, scores, extra), None


def _mask(mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> MaskPattern:
    """transformers' mask interface: the pattern travels through the model in the mask's place."""
    return MaskPattern(mask_function, local_size)


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)


class HookedCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """What a model sees as `past_key_values` for one forward. It holds nothing and has no length.

    Positions are given to the model explicitly, so no layer should ask for a length; one that does gets 0, and
    the self-check tells whether that was right.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # transformers' word for "no limit"

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        raise LayerUnsupported(
            "keeps a recurrent state, and this version serves attention only", layer=layer_idx
        )

    def _refuse_state(self, *args: Any, **kwargs: Any) -> Any:
        layer = next((a for a in (*args, *kwargs.values()) if isinstance(a, int)), None)
        raise LayerUnsupported("keeps a recurrent state, and this version serves attention only", layer=layer)

    get_conv_state = update_conv_state = _refuse_state
    get_recurrent_state = update_recurrent_state = _refuse_state
    update_indexer = _refuse_state


class PagedCache(HookedCache):
    """One packed step over the pool. `slots` [tokens] int64: where each row's K and V go."""

    def __init__(self, pool: TorchPool, slots: Tensor, attention: Sequence[StepAttention]) -> None:
        super().__init__()
        self._memory = pool.layers
        self._slots = slots
        self._attention = attention  # one per kernel of the pool

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """key_states and value_states [1, kv_heads, tokens, …]"""
        memory = self._memory[layer_idx]
        layer = _PagedLayer(memory, self._attention[memory.kernel], key_states, value_states)
        memory.write(self._slots, layer.key, layer.value)
        mark(key_states, value_states, layer)
        return key_states, value_states


class _PagedLayer:
    __slots__ = ("attention", "key", "memory", "value")

    def __init__(self, memory: LayerMemory, attention: StepAttention, key: Tensor, value: Tensor) -> None:
        self.memory = memory
        self.attention = attention
        self.key = key[0].transpose(0, 1)  # [tokens, kv_heads, key_dim]
        self.value = value[0].transpose(0, 1)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        scores: Scores,
        extra: dict[str, Any],
    ) -> Tensor:
        assert isinstance(mask, MaskPattern), (
            f"{type(module).__name__} came with a mask that the probe did not see"
        )
        assert mask.is_causal, f"{type(module).__name__} came with a pattern that the probe did not see"
        rows = query[0].transpose(0, 1)  # [tokens, q_heads, head_dim]
        memory = self.memory
        return self.attention(rows, self.key, self.value, memory.keys, memory.values, scores).unsqueeze(0)
