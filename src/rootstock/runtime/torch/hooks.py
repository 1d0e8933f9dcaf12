"""Hooks that put the pool under a transformers model, through its public interfaces and without changing its code.

    cache       `update` of the step's cache writes the new K and V to the pool, marks both tensors, returns them
    mask        a model's own create_*_mask gives the pattern (mask_pattern.py); no mask tensor is ever built
    attention   the marks on K and V lead to the step and the layer; the kernel reads the pool
    expand_kv   latents (MLA) that carry the marks are not expanded; attention reads them with absorbed weights

Because of the marks the hooks need no ambient state. The marks also prove that K and V reached attention unchanged:
any operation in between (splitting heads, repeating them) makes a tensor without a mark. Such a layer is refused
rather than attended wrongly, unless its module runs one sequence at a time (module_parts.py) and so has all of its K
and V at hand. Both tensors are checked, because some models change only one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache

from rootstock.kernels.api import Scores
from rootstock.kernels.torch.gathered_attention import attend_dense
from rootstock.runtime.torch.inspect.mask_pattern import IMPLEMENTATION

_MARK = "_rootstock"

# Arguments of attention that change nothing, or that repeat the mask's pattern.
HARMLESS = {
    "cache_position",
    "is_causal",
    "layer_idx",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "sliding_window",
    "training",
    "use_cache",
}


class LayerUnsupported(Exception):
    """Error: a layer does something that the hooks do not support. The loader turns it into ModelUnsupported."""

    def __init__(self, reason: str, *, module: str | None = None, layer: int | None = None) -> None:
        where = [] if layer is None else [f"layer {layer}"]
        where += [] if module is None else [module]
        super().__init__(f"{' '.join(where) or 'the model'} {reason}")


class RowsWritten(Exception):
    """Signal of a cache: the K and V that a forward was run for are written, and the rest of it is not needed."""


class AttentionCall(NamedTuple):
    """Arguments of a module's call of attention."""

    module: nn.Module
    query: Tensor  # [1, q_heads, tokens, head_dim]
    key: Tensor  # [1, kv_heads, tokens, …]
    value: Tensor
    mask: object
    scores: Scores
    extra: dict[str, Any]  # further arguments that the model passes to attention


class MarkedLayer(Protocol):
    """Layer within one forward, to which the mark on its K and V leads."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Attends the call's query to key and value as returned by `update`. Returns [1, tokens, q_heads,
        value_dim]."""
        ...


def mark(key: Tensor, value: Tensor, layer: MarkedLayer) -> None:
    setattr(key, _MARK, layer)
    setattr(value, _MARK, layer)


def marked(key: Tensor, value: Tensor) -> MarkedLayer | None:
    """Returns the layer whose mark both tensors carry, or None."""
    layer: MarkedLayer | None = getattr(key, _MARK, None)
    return layer if getattr(value, _MARK, None) is layer else None


class Unexpanded:
    """Replacement of a module's `expand_kv`: leaves latents with marks as they are and expands all others."""

    def __init__(self, module: nn.Module) -> None:
        self.expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = module.expand_kv  # type: ignore[assignment]

    def __call__(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Takes latent [1, 1, tokens, rank] and rotary [1, 1, tokens, rotary_dim], which have no heads yet."""
        if marked(latent, rotary) is None:
            return self.expand(latent, rotary)
        return latent, rotary


def keeps_latents(module: nn.Module) -> bool:
    return isinstance(vars(module).get("expand_kv"), Unexpanded)


def expansion(module: nn.Module) -> Tensor:
    """Returns the weight that expands latents, [q_heads, nope_dim + value_dim, rank]: for each head its part of the
    keys, then its values. Raises LayerUnsupported for a module that expands latents differently."""
    linear = getattr(module, "kv_b_proj", None)
    nope_dim, value_dim = getattr(module, "qk_nope_head_dim", None), getattr(module, "v_head_dim", None)
    if (
        not isinstance(linear, nn.Linear)
        or getattr(linear, "bias", None) is not None
        or not nope_dim
        or not value_dim
    ):
        raise LayerUnsupported("expands latents in an unknown way", module=type(module).__name__)
    current = getattr(vars(linear).get("forward"), "current_weight", None)  # of a layer that adapters change
    weight: Tensor = linear.weight if current is None else current()
    return weight.view(-1, nope_dim + value_dim, linear.in_features)


def runs_alone(module: nn.Module) -> bool:
    """Returns True if the module's `forward` runs one sequence at a time, on dense K and V and a real mask."""
    return bool(getattr(vars(module).get("forward"), "alone", False))


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
    """Implements transformers' attention interface, whose parameter names it uses. Dropout is 0 outside training."""
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    call = AttentionCall(module, query, key, value, attention_mask, scores, extra)
    layer = marked(key, value)
    if layer is not None:
        return layer.attend(call), None
    if runs_alone(module):
        return _attend_alone(call), None
    raise LayerUnsupported(
        "changes K or V between the cache and attention",
        module=type(module).__name__,
        layer=getattr(module, "layer_idx", None),
    )


def _attend_alone(call: AttentionCall) -> Tensor:
    """Attends one sequence with all of its K and V, a bias if given, and only the keys that the module chose."""
    module, query, key, value, mask, scores, extra = call
    chosen, bias = extra.get("indices"), extra.get("position_bias")
    refuse_unknown(module, {name: extra[name] for name in extra if name not in ("indices", "position_bias")})
    if not isinstance(mask, Tensor):
        raise LayerUnsupported(
            f"attends with {type(mask).__name__} as its mask", module=type(module).__name__
        )
    end = key.shape[2]
    allowed = mask[0, :, :, :end]  # [1 or q_heads, new, end]
    if allowed.dtype != torch.bool:  # a mask in numbers is added to the scores
        bias = allowed if bias is None else allowed + bias[0]
        allowed = torch.ones(allowed.shape[-2:], dtype=torch.bool, device=key.device)
    elif bias is not None:
        bias = bias[0]
    if chosen is not None:  # [1, new, chosen] positions of keys
        kept = torch.zeros(allowed.shape[-2:], dtype=torch.bool, device=key.device)
        allowed = allowed & kept.scatter(-1, chosen[0].long(), True)
    allowed = allowed[0] if allowed.dim() == 3 and len(allowed) == 1 else allowed
    out = attend_dense(query[0], key[0], value[0], end - query.shape[2], scores, allowed, bias)
    return out.transpose(0, 1)[None].contiguous()


def refuse_unknown(module: nn.Module, extra: dict[str, Any]) -> None:
    unknown = sorted(name for name, given in extra.items() if given is not None and name not in HARMLESS)
    if unknown:
        raise LayerUnsupported(
            f"passes {', '.join(unknown)} to attention, which this version does not know",
            module=type(module).__name__,
            layer=getattr(module, "layer_idx", None),
        )


AttentionInterface.register(IMPLEMENTATION, _attention)


@dataclass(frozen=True, slots=True)
class Calling:
    """Arguments with which a model's forward is called."""

    cache: str  # name of the parameter that takes the cache
    use_cache: bool  # value with which the model uses the given cache and makes none of its own
    positions: bool  # whether it takes position ids
    keeps_rows: bool  # whether `logits_to_keep` may be an index tensor

    def __call__(
        self, model: nn.Module, ids: Tensor, positions: Tensor, cache: object, rows: Tensor, **more: Any
    ) -> Tensor:
        """Runs a forward of ids and positions, [tokens] or [axes, tokens], with `more` arguments. Returns logits
        [rows, vocab] of the given rows [rows]."""
        given: dict[str, Any] = {
            "input_ids": ids[None],
            self.cache: cache,
            "use_cache": self.use_cache,
            **more,
        }
        if self.positions:
            given["position_ids"] = positions.unsqueeze(-2)
        if self.keeps_rows:
            given["logits_to_keep"] = rows
        logits: Tensor = model(**given).logits[0]
        return logits if self.keeps_rows else logits[rows]

    def own(self, model: nn.Module, ids: Tensor, positions: Tensor, cache: object) -> Any:
        """Calls the model as plain transformers does, with its own cache (None at first). Returns the full output."""
        given: dict[str, Any] = {"input_ids": ids[None], self.cache: cache, "use_cache": True}
        if self.positions:
            given["position_ids"] = positions[None]
        return model(**given)


class HookedCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """Cache object that a model gets for one forward. It owns nothing and implements only the methods that the hooks
    need.

    Positions are passed to the model explicitly, so the cache reports a length of 0. Subclasses implement the
    methods for the tensors that they keep (`update`, states, indexer keys); all others are refused here.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int | None = None) -> int | Tensor:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # transformers' value for "no limit"

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def previous_hidden(self, layer_idx: int, hidden: Tensor) -> Tensor | None:
        """Keeps the model's last hidden states [1, rows, hidden] for a draft head's layer. Returns those of the rows
        before, zeros at the start: here of one new sequence. None: the head is not to run.

        Only the K and V of the head's layer are needed then: the cache may raise RowsWritten when it has them."""
        return torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        layer = next((a for a in (*args, *kwargs.values()) if isinstance(a, int)), None)
        raise LayerUnsupported("keeps state that this cache does not support", layer=layer)

    update = update_indexer = has_previous_state = _refuse
    get_conv_state = update_conv_state = _refuse
    get_recurrent_state = update_recurrent_state = _refuse
    get_linear_cache = set_linear_cache = _refuse
