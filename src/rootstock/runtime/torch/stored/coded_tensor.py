"""Tensor whose numbers are coded weights, for the time between a file and the packing of a model's weights.

transformers loads a checkpoint by renaming, stacking, concatenating, splitting and permuting tensors, as each
architecture needs it. A coded tensor takes part in that: operations that leave the inputs of every output together
are done on the codes. Any other operation gets the weights unpacked, which is slow and correct. The model's own code
can therefore run before the weights are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from rootstock.kernels.torch.coded_weight import CodedWeight
from rootstock.kernels.torch.linear import has_coded_loops

if TYPE_CHECKING:  # they import Numba, which only the loops need, and Triton
    from rootstock.kernels.cuda.triton_coded import TritonCodedLayers
    from rootstock.kernels.torch.coded_linear import CodedLayers

    Layers = CodedLayers | TritonCodedLayers

_SAMPLE_ROWS, _SAMPLE_OUTPUTS = 4, 256
_MANY_ROWS = 130  # of each expert: more than one block of Triton's kernel
_aten = torch.ops.aten


def by_triton(device: torch.device) -> bool:
    """Returns whether Triton multiplies the codes that are on a device."""
    return device.type == "cuda"


def _layers_of(weight: CodedWeight, dtype: torch.dtype) -> Layers | None:
    """Returns the weights [experts, out, in] or [out, in] in the order of what multiplies them on their device. None:
    nothing does."""
    device = weight.codes.device
    if by_triton(device):
        from rootstock.kernels.cuda.triton_coded import TritonCodedLayers

        is_one = len(weight.shape) == 2
        stacked = weight.rebuilt(each[None] for each in weight.tensors()) if is_one else weight
        return TritonCodedLayers(stacked, dtype)
    if device.type != "cpu" or not has_coded_loops():
        return None
    from rootstock.kernels.torch.coded_linear import looped

    return looped(weight, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _Looped:
    """Weights [experts, out, in] in the order of the loops or the kernel that multiply them, or one expert's [out,
    in]."""

    layers: Layers
    expert: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layers.shape if self.expert is None else self.layers.shape[1:]

    def coded(self) -> CodedWeight:
        """Returns them in the order of rows: in new memory, if the loops have another order."""
        if self.expert is None:
            return self.layers.coded(0, self.layers.shape[0])
        rows = self.layers.coded(self.expert, self.expert + 1)
        return rows.rebuilt(each[0] for each in rows.tensors())

    def multiply(self, x: Tensor, experts: Tensor | None = None) -> Tensor:
        """Multiplies x [rows, in] of the weights' dtype by one expert, or each row by the one that `experts` [rows]
        names."""
        if self.expert:
            experts = torch.full((len(x),), self.expert, device=x.device)
        return self.layers.multiply(self._in_order(x), experts)

    def multiply_sorted(self, x: Tensor, ends: Tensor) -> Tensor:
        """Multiplies x [rows, in] by the experts in their order. ends: [experts], where each one's rows end."""
        return self.layers.multiply_sorted(self._in_order(x), ends)

    def _in_order(self, x: Tensor) -> Tensor:
        order = self.layers.packed.order
        return x if order is None else x.index_select(-1, order)


class CodedTensor(Tensor):
    """Weights […, out, in] of a floating-point dtype, or […, in, out] if `is_transposed`."""

    given: CodedWeight | _Looped
    is_transposed: bool

    @staticmethod
    def __new__(
        cls, given: CodedWeight | _Looped, dtype: torch.dtype, *, is_transposed: bool = False
    ) -> CodedTensor:
        *leading, outputs, inputs = given.shape
        shape = (*leading, inputs, outputs) if is_transposed else (*leading, outputs, inputs)
        form = given if isinstance(given, CodedWeight) else given.layers.packed
        with torch.inference_mode(False):  # views of a model's parameters are no inference tensors
            made: CodedTensor = Tensor._make_wrapper_subclass(
                cls, shape, dtype=dtype, device=form.codes.device
            )
        made.given, made.is_transposed = given, is_transposed
        return made

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"CodedTensor({list(self.shape)}, {self.dtype}, {self.form.bits} bits)"

    @property
    def coded(self) -> CodedWeight:
        """Weights in the order of rows: in new memory if the CPU's loops have another order."""
        return self.given if isinstance(self.given, CodedWeight) else self.given.coded()

    @property
    def form(self) -> CodedWeight:
        """Weights in either order, for what does not depend on it."""
        return self.given if isinstance(self.given, CodedWeight) else self.given.layers.packed

    @property
    def layers(self) -> Layers | None:
        """Layers whose loops or kernel multiply all of the weights, if they are in the order of these."""
        given = self.given
        is_whole = isinstance(given, _Looped) and (given.expert is None or given.layers.shape[0] == 1)
        return given.layers if isinstance(given, _Looped) and is_whole else None

    def looped(self) -> CodedTensor:
        """Returns the weights in the order of the loops or the kernel of their device, which from then on multiply
        them. The same ones if nothing does, or if some outputs of random rows show that it does it wrong."""
        weight = self.coded
        layers = _layers_of(weight, self.dtype)
        if layers is None:
            return self
        made = _Looped(layers, 0 if len(weight.shape) == 2 else None)
        # The blocks of Triton's kernel differ for many rows. The loops compute each row in the same way.
        is_right = _multiplies(made, weight, self.dtype, _MANY_ROWS if by_triton(self.device) else 1)
        return self.with_coded(made) if is_right else self

    def on(self, device: torch.device) -> CodedTensor:
        """Returns the weights on a device, in the order of rows."""
        return self.with_coded(self.coded.to(device))

    def unpacked(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the weights in new memory, rounded to a dtype, or to the tensor's own."""
        weights = self.coded.widened().to(dtype or self.dtype)
        return weights.mT.contiguous() if self.is_transposed else weights

    def with_coded(self, given: CodedWeight | _Looped) -> CodedTensor:
        return CodedTensor(given, self.dtype, is_transposed=self.is_transposed)

    def is_coded_like(self, other: CodedTensor) -> bool:
        """Returns whether codes and scales of both can stand in one tensor."""
        kinds = []
        for tensor in (self, other):
            form = tensor.form
            dtypes = [part.dtype for part in form.tensors()]
            kinds.append((tensor.dtype, tensor.is_transposed, form.group, form.in_scales, dtypes))
        orders = [form.order for form in (self.form, other.form)]
        same_order = orders[0] is orders[1] or (
            orders[0] is not None and orders[1] is not None and torch.equal(orders[0], orders[1])
        )
        return kinds[0] == kinds[1] and same_order and torch.equal(self.form.values, other.form.values)

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
        if func in _PRODUCTS:
            return _product(func, args, kwargs)
        # In inference mode operations that consist of others arrive whole.
        in_parts = func.decompose(*args, **kwargs)
        if in_parts is not NotImplemented:
            return in_parts
        with torch.inference_mode(torch.is_inference_mode_enabled() and not func.is_view):
            return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))


def _multiplies(made: _Looped, weight: CodedWeight, dtype: torch.dtype, times: int) -> bool:
    """Returns whether products of a few random rows, and of them so many times, are the exact ones but for their
    rounding, as far as some outputs show."""
    device, experts = weight.codes.device, made.layers.shape[0]
    x = torch.randn(max(_SAMPLE_ROWS, experts), weight.shape[-1], generator=torch.Generator().manual_seed(0))
    x = x.to(device, dtype)
    chosen = torch.arange(len(x), device=device) % experts
    outputs = (
        torch.linspace(0, weight.shape[-2] - 1, min(weight.shape[-2], _SAMPLE_OUTPUTS)).long().to(device)
    )
    got = [
        made.multiply(x.repeat(count, 1), chosen.repeat(count))[:, outputs].float()
        for count in sorted({1, -(-times // (len(x) // experts))})
    ]
    products = torch.cat(got).view(-1, len(x), len(outputs))
    for expert in range(experts):
        own = weight.tensors() if len(weight.shape) == 2 else weight.part(expert, expert + 1).tensors()
        exact = weight.rebuilt(each.index_select(-2, outputs) for each in own).widened()
        expected = x[chosen == expert].float() @ exact.view(len(outputs), -1).mT
        errors = (products[:, chosen == expert] - expected).square().mean((1, 2)).sqrt()
        if not errors.max() <= torch.finfo(dtype).eps * expected.square().mean().sqrt():
            return False
    return True


def _plain(given: Any) -> Any:
    return given.unpacked() if isinstance(given, CodedTensor) else given


def _wide(given: Any) -> Any:
    if isinstance(given, CodedTensor):
        return given.unpacked(torch.float32)
    return given.float() if isinstance(given, Tensor) and given.is_floating_point() else given


def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Returns a product with the exact weights, rounded once, at its end. Loops or a kernel compute it if one can."""
    done = None if kwargs else _looped_product(func, args)
    if done is not None:
        return done
    dtype = next(arg.dtype for arg in args if isinstance(arg, Tensor))
    done = func(*tree_map(_wide, args), **tree_map(_wide, kwargs))
    made: Tensor = done.to(dtype)
    return made


def _looped_product(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """Returns the product by the loops or the kernel. None: they do not compute it."""
    bias: Tensor | None = None
    ends: Any = None
    match func, args:
        case _aten.mm.default, (x, weights):
            is_transposed = True
        case _aten.addmm.default, (bias, x, weights):
            is_transposed = True
        case _aten.linear.default, (x, weights, *more):
            is_transposed, bias = False, more[0] if more else None
        case _aten._grouped_mm.default, (x, weights, ends):
            is_transposed = True
        case _:
            return None
    if not isinstance(weights, CodedTensor) or weights.is_transposed != is_transposed:
        return None
    given = weights.given
    if isinstance(x, CodedTensor) or x.dtype != weights.dtype or not isinstance(given, _Looped):
        return None
    rows = x.reshape(-1, x.shape[-1])
    if (ends is None) == (given.expert is None):
        return None
    product = given.multiply(rows) if ends is None else given.multiply_sorted(rows, ends)
    product = product.view(*x.shape[:-1], -1)
    return product if bias is None else product + bias


# ---- operations on codes. A rule returns None for what it cannot do.


def _same(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor.with_coded(tensor.given)


def _copy(tensor: Any, **kwargs: Any) -> Any:
    dtype, device = kwargs.get("dtype") or tensor.dtype, kwargs.get("device")
    if not dtype.is_floating_point or (device is not None and not _is_on(tensor, torch.device(device))):
        return None
    given = tensor.given if dtype == tensor.dtype else tensor.coded
    return CodedTensor(given, dtype, is_transposed=tensor.is_transposed)


def _is_on(tensor: Any, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


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
    if axis == 0 and (joined := _joined(tensors)) is not None:
        return joined
    return None if axis is None else _on_parts(tensors, lambda parts: torch.cat(parts, axis))


def _joined(tensors: Sequence[Any]) -> Any:
    """Returns the outputs of linear layers that are in the order of loops, in that order."""
    first = tensors[0]
    if not all(isinstance(one, CodedTensor) and one.is_coded_like(first) for one in tensors):
        return None
    layers = [one.layers for one in tensors]
    if first.dim() != 2 or None in layers:
        return None
    made = type(layers[0]).joined(layers)
    return None if made is None else first.with_coded(_Looped(made, 0))


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
    given = tensor.given
    if isinstance(given, _Looped) and tensor.dim() == 3:
        return tensor.with_coded(_Looped(given.layers, int(index) % tensor.shape[0]))
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
        return CodedTensor(tensor.given, tensor.dtype, is_transposed=not tensor.is_transposed)
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


_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.linear.default,
    _aten._grouped_mm.default,
}
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
