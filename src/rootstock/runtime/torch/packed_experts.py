"""Packing of the experts of mixtures, which transformers keep in raw parameters of three dimensions.

A module of experts that transformers dispatches (`use_experts_implementation`) says by attributes how its weights lie
and whether they have gates and biases. Such a module gets a `forward` that multiplies with packed weights; the
module's own code still computes the gate or activation between the two products, and the norm after them. As with
linear layers, the original weights are freed, and read as NaN afterwards. With `--quantize` they get codes of fewer
bits, if there are loops for these and the sizes allow it.

This is for bfloat16 on processors with AVX512-BF16. Processors with matrix units (AMX) keep torch's grouped product,
which uses the units for many rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rootstock.kernels.torch.linear import (
    has_matrix_units,
    has_pair_loops,
    packs_bfloat16,
)
from rootstock.runtime.model_files import in_one_line
from rootstock.runtime.torch.stored.coded_tensor import CodedTensor

if TYPE_CHECKING:  # these modules import Numba, which may be missing
    from rootstock.kernels.cpu.packed_products import PackedLayers
    from rootstock.kernels.torch.coded_linear import CodedLayers, Rounding

_SAMPLE_ROWS = 4
_IS_PARALLEL, _APPLY_GATE = (
    "_is_expert_parallel",
    "_apply_gate",
)  # attributes that transformers gives the modules
_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", _IS_PARALLEL)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def find_experts(model: nn.Module) -> dict[nn.Module, str]:
    """Returns the modules of experts that can be packed here, with their names."""
    if not packs_bfloat16(torch.device("cpu")) or not has_pair_loops() or has_matrix_units():
        return {}
    return {module: name for name, module in model.named_modules() if _is_packable(module)}


def are_experts(module: nn.Module) -> bool:
    """Returns whether transformers dispatches the module of experts."""
    return all(isinstance(getattr(module, flag, None), bool) for flag in _FLAGS)


def _is_packable(module: nn.Module) -> bool:
    if not are_experts(module):
        return False
    is_changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    if is_changed or module._is_expert_parallel:
        return False
    weights = _weights(module)
    if set(weights) != set(module._parameters):
        return False
    return all(
        isinstance(weight, Tensor) and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        for weight in weights.values()
    ) and all(
        weights[name].dim() == 3 and weights[name].shape[1 if module.is_transposed else 2] % 2 == 0
        for name in (_first(module), "down_proj")
    )


def _first(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _weights(module: Any) -> dict[str, Any]:
    """Returns the parameters that a module of experts should have. A missing one is None."""
    names = [_first(module), "down_proj"]
    if module.has_bias:
        names += [f"{name}_bias" for name in names]
    return {name: module._parameters.get(name) for name in names}


class PackedExperts:
    """Replacement of the `forward` of a module of experts."""

    def __init__(self, module: nn.Module, rounding: Rounding | None) -> None:
        self._module: Any = module
        self._names = _first(module), "down_proj"
        self._first, self._down = (self._packed(name, rounding) for name in self._names)

    def _packed(self, name: str, rounding: Rounding | None) -> PackedLayers | CodedLayers:
        from rootstock.kernels.cpu.packed_products import PackedLayers

        parameters, transposed = self._module._parameters, self._module.is_transposed
        weights = parameters[name].detach()
        weights = weights.mT if transposed else weights
        biases = parameters[f"{name}_bias"].detach() if self._module.has_bias else None
        if isinstance(weights, CodedTensor):
            from rootstock.kernels.torch.coded_linear import CodedLayers

            layers = weights.layers
            in_order = not weights.is_transposed and weights.form.order is None
            if isinstance(layers, CodedLayers) and in_order:
                return layers.with_biases(biases)
            weights = weights.unpacked()
        if rounding is None:
            return PackedLayers(weights, biases)
        from rootstock.kernels.torch.coded_linear import CodedLayers, coded

        return CodedLayers.of(coded(weights, rounding), biases)

    @property
    def nbytes(self) -> int:
        return self._first.nbytes + self._down.nbytes

    def unpacked(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the names of parameters and the weights that are multiplied, in the module's own order of axes."""
        for name, layers in zip(self._names, (self._first, self._down), strict=True):
            yield name, self._in_own_order(layers.unpacked())

    def _in_own_order(self, weights: Tensor) -> Tensor:
        return weights.mT.contiguous() if self._module.is_transposed else weights

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes hidden_states [rows, hidden] → [rows, hidden]. top_k_index, top_k_weights: [rows, choices]"""
        module = self._module
        chosen = top_k_index.reshape(-1).to(torch.int64).contiguous()
        inner = self._first.multiply(hidden_states.to(torch.bfloat16), chosen)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        products = self._down.multiply(inner.to(torch.bfloat16), chosen)
        if module.has_post_expert_norm:
            products = module.post_expert_norm(products)
        rows, choices = top_k_index.shape
        weighted = products.view(rows, choices, products.shape[-1]) * top_k_weights.view(rows, choices, 1)
        return weighted.sum(1).to(hidden_states.dtype)

    def use(self) -> None:
        """Lets the module compute with the packed weights, and frees its own."""
        for name in self._names:
            gone = torch.full((), torch.nan, dtype=torch.bfloat16).expand(
                self._module._parameters[name].shape
            )
            setattr(self._module, name, nn.Parameter(gone, requires_grad=False))
        self._module.forward = self

    def restore(self) -> None:
        """Gives the module its own `forward` and weights back."""
        layers = [self._first, self._down]
        del self._first, self._down
        for name in self._names:
            weights = self._in_own_order(layers.pop(0).unpacked())
            setattr(self._module, name, nn.Parameter(weights, requires_grad=False))
        del self._module.forward


def are_coded(module: Any) -> bool:
    """Returns whether the experts are quantized in the checkpoint."""
    return any(isinstance(parameter, CodedTensor) for parameter in module._parameters.values())


def not_coded(module: Any, rounding: Rounding) -> str:
    """Returns the reason why a module's experts cannot be quantized; "" if they can."""
    from rootstock.kernels.torch.quantized_linear import is_coded, not_rounded

    if are_coded(module):
        return "they are quantized in the checkpoint"
    for name in (_first(module), "down_proj"):
        weights = module._parameters[name]
        one = (weights.mT if module.is_transposed else weights)[0]
        reason = not_rounded(one, rounding) if is_coded(one) else "there are no loops for coded experts here"
        if reason:
            return reason
    return ""


def pack_experts(module: Any, rounding: Rounding | None = None) -> tuple[PackedExperts | None, str, float]:
    """Packs the weights of a module that `find_experts` returned, or quantizes them.

    Returns None and the reason if the module stays as it is, because it computes something else, or its products
    would differ by more than rounding; and the relative error that quantization causes.
    """
    sample = _sample(module)
    error = 0.0
    try:
        expected = before = module(*sample).float()
        packed = PackedExperts(module, rounding)
        got = packed(*sample)
        if rounding is not None:
            own = dict(module._parameters)
            try:
                for name, weights in packed.unpacked():
                    setattr(module, name, nn.Parameter(weights, requires_grad=False))
                expected = module(*sample).float()
            finally:
                module._parameters.update(own)
            error = rms(got.float() - before) / (rms(before) or 1.0)
        # The module's own code has coded weights rounded to bfloat16, each to its own nearest number.
        wrong = off_by_more_than_rounding(got, expected, 4 if rounding or are_coded(module) else 1)
    except Exception as failure:  # from the module's own code
        return None, f"its code is another one: {in_one_line(failure)}", error
    if wrong:
        return None, wrong, error
    packed.use()
    return packed, "", error


def _sample(module: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns arguments of a forward: a few random rows, whose choices are all experts in turn."""
    weights = module._parameters[_first(module)]
    experts, inputs = weights.shape[0], weights.shape[1 if module.is_transposed else 2]
    choices = min(2, experts)
    random = torch.Generator().manual_seed(0)
    rows = max(_SAMPLE_ROWS, -(-experts // choices))
    x = torch.randn(rows, inputs, generator=random).to(weights.dtype)
    chosen = torch.arange(rows * choices).view(rows, choices) % experts
    return x, chosen, torch.rand(rows, choices, generator=random).to(weights.dtype)


def off_by_more_than_rounding(packed: Tensor, expected: Tensor, times: int = 1) -> str:
    """Returns the reason why a packed product is not used: it differs from `expected`, in float32, by more than
    `times` a rounding to its own dtype. "" if it does not."""
    allowed = times * torch.finfo(packed.dtype).eps * rms(expected)
    difference = rms(packed.float() - expected)
    if difference <= allowed:
        return ""
    return f"packed it is off by {difference:.2g}, allowed is {allowed:.2g}"


def rms(numbers: Tensor) -> float:
    return float(numbers.square().mean().sqrt())
