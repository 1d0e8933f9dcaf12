"""Tensor whose numbers are coded weights, for the time between a file and the packing of a model's weights.

transformers loads a checkpoint by renaming, stacking, concatenating, splitting and permuting tensors, as each
architecture needs it. A coded tensor takes part in that: operations that leave the inputs of every output together
are done on the codes. Any other operation gets the weights unpacked, which is slow and correct. The model's own code
can therefore run before the weights are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from rootstock.kernels.torch.coded_weight import CodedWeight

_aten = torch.ops.aten


class CodedTensor(Tensor):
    """Weights […, out, in] of a floating-point dtype, or […, in, out] if `is_transposed`."""

    coded: CodedWeight
    is_transposed: bool

    @staticmethod
    def __new__(cls, coded: CodedWeight, dtype: torch.dtype, *, is_transposed: bool = False) -> CodedTensor:
        *leading, outputs, inputs = coded.shape
        shape = (*leading, inputs, outputs) if is_transposed else (*leading, outputs, inputs)
        with torch.inference_mode(False):  # views of a model's parameters are no inference tensors
            made: CodedTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.coded, made.is_transposed = coded, is_transposed
        return made

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"CodedTensor({list(self.shape)}, {self.dtype}, {self.coded.bits} bits)"

    def unpacked(self) -> Tensor:
        """Returns the weights in new memory, rounded to the tensor's dtype."""
        weights = self.coded.widened().to(self.dtype)
        return weights.mT.contiguous() if self.is_transposed else weights

    def with_coded(self, coded: CodedWeight) -> CodedTensor:
        return CodedTensor(coded, self.dtype, is_transposed=self.is_transposed)

    def is_coded_like(self, other: CodedTensor) -> bool:
        """Returns whether codes and scales of both can stand in one tensor."""
        kinds = []
        for tensor in (self, other):
            dtypes = [part.dtype for part in tensor.coded.tensors()]
            coded = tensor.coded
            kinds.append((tensor.dtype, tensor.is_transposed, coded.group, coded.in_scales, dtypes))
        orders = [coded.order for coded in (self.coded, other.coded)]
        same_order = orders[0] is orders[1] or (
            orders[0] is not None and orders[1] is not None and torch.equal(orders[0], orders[1])
        )
        return kinds[0] == kinds[1] and same_order and torch.equal(self.coded.values, other.coded.values)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None:
            done = rule(*args, **kwargs)
            if done is not None:
                return done
        # In inference mode operations that consist of others arrive whole.
        in_parts = func.decompose(*args, **kwargs)
        if in_parts is not NotImplemented:
            return in_parts
        with torch.inference_mode(torch.is_inference_mode_enabled() and not func.is_view):
            return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))


def _plain(given: Any) -> Any:
    return given.unpacked() if isinstance(given, CodedTensor) else given


# ---- operations on codes. A rule returns None for what it cannot do.


def _same(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor.with_coded(tensor.coded)


def _copy(tensor: Any, **kwargs: Any) -> Any:
    dtype, device = kwargs.get("dtype") or tensor.dtype, kwargs.get("device")
    if not dtype.is_floating_point or (device is not None and torch.device(device).type != "cpu"):
        return None
    return CodedTensor(tensor.coded, dtype, is_transposed=tensor.is_transposed)


def _on_parts(tensors: Sequence[Any], change: Callable[[list[Tensor]], Tensor]) -> Any:
    """Returns the coded tensor of changed codes, scales and minima. None: the tensors are not coded alike."""
    first = tensors[0]
    if not all(isinstance(one, CodedTensor) and one.is_coded_like(first) for one in tensors):
        return None
    parts = zip(*(one.coded.tensors() for one in tensors), strict=True)
    return first.with_coded(first.coded.rebuilt(change(list(part)) for part in parts))


def _axis(tensor: Any, axis: int) -> int | None:
    """Returns the axis of the codes, from the front. None: it is the axis of inputs."""
    dims = tensor.dim()
    axis = axis % dims
    if tensor.is_transposed and axis >= dims - 2:
        axis = 2 * dims - 3 - axis
    return None if axis == dims - 1 else axis


def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    coded = next(one for one in tensors if isinstance(one, CodedTensor))
    axis = _axis(coded, dim)
    return None if axis is None else _on_parts(tensors, lambda parts: torch.cat(parts, axis))


def _stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    coded = next(one for one in tensors if isinstance(one, CodedTensor))
    if dim % (coded.dim() + 1) > coded.dim() - 2:
        return None
    return _on_parts(tensors, lambda parts: torch.stack(parts, dim))


def _along(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the rule of an operation (tensor, axis, …) on one axis that stays."""

    def rule(tensor: Any, dim: int = 0, *args: Any) -> Any:
        axis = _axis(tensor, dim)
        return None if axis is None else _on_parts([tensor], lambda parts: operation(parts[0], axis, *args))

    return rule


def _select(tensor: Any, dim: int, index: int) -> Any:
    if dim % tensor.dim() >= tensor.dim() - 2:
        return None
    return _on_parts([tensor], lambda parts: _aten.select.int(parts[0], dim % tensor.dim(), index))


def _split(tensor: Any, size: Any, dim: int = 0) -> Any:
    if _axis(tensor, dim) is None:
        return None
    sizes = size if isinstance(size, (list, tuple)) else None
    total = tensor.shape[dim]
    sizes = sizes or [min(size, total - first) for first in range(0, total, size)]
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    narrow = _along(torch.narrow)
    return [narrow(tensor, dim, first, count) for first, count in zip(firsts, sizes, strict=True)]


def _transpose(tensor: Any, one: int, other: int) -> Any:
    dims = tensor.dim()
    axes = {one % dims, other % dims}
    if axes == {dims - 1, dims - 2}:
        return CodedTensor(tensor.coded, tensor.dtype, is_transposed=not tensor.is_transposed)
    if tensor.is_transposed or dims - 1 in axes:
        return None
    return _on_parts([tensor], lambda parts: parts[0].transpose(one % dims, other % dims))


def _permute(tensor: Any, order: Sequence[int]) -> Any:
    dims = tensor.dim()
    axes = [axis % dims for axis in order]
    if tensor.is_transposed or axes[-1] != dims - 1:
        return None
    return _on_parts([tensor], lambda parts: parts[0].permute(axes))


def _view(tensor: Any, shape: Sequence[int]) -> Any:
    inputs = tensor.shape[-1]
    leading, rest = list(shape[:-1]), shape[-1]
    if tensor.is_transposed or rest not in (inputs, -1):
        return None
    if rest == -1 and torch.Size(leading).numel() * inputs != tensor.numel():
        return None
    return _on_parts([tensor], lambda parts: parts[0].reshape(*leading, parts[0].shape[-1]))


def _embedding(tensor: Any, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
    rows = _along(torch.index_select)(tensor, 0, indices.flatten())
    return None if tensor.is_transposed else rows.unpacked().view(*indices.shape, -1)


_RULES: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.clone.default: _same,  # codes never change
    _aten.lift_fresh.default: _same,
    _aten._to_copy.default: _copy,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.slice.Tensor: _along(_aten.slice.Tensor),
    _aten.index_select.default: _along(torch.index_select),
    _aten.narrow.default: _along(torch.narrow),
    _aten.select.int: _select,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.transpose.int: _transpose,
    _aten.t.default: lambda tensor: _transpose(tensor, 0, 1),
    _aten.permute.default: _permute,
    _aten.embedding.default: _embedding,
    _aten.view.default: _view,
    _aten.reshape.default: _view,
}
