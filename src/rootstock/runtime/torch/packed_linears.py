"""Packing of a loaded model's weights for the device that runs them, without changing the model's code.

A plain `nn.Linear` gets a `forward` that multiplies with packed weights, and its original weight is freed. A tensor
of the same shape and dtype that has no memory and reads as NaN takes its place. Code that still reads `linear.weight`
then gets NaN, never a wrong or accidentally right number. Experts of mixtures are packed likewise
(packed_experts.py). Everything else is unchanged: subclasses of `nn.Linear`, modules with hooks or parametrizations,
other raw parameters. A head that is tied to the embedding is packed, and the embedding keeps its weight.

Some code reads a linear layer's weight directly (latents are attended with absorbed weights, some mixers multiply by
hand). The model is therefore run once before packing, and every read of a weight outside its layer's own forward is
recorded. Such a layer stays as it is. Afterwards the same inputs run again. If the logits differ by more than
rounding, or are not numbers, a weight was read in a way that the watch did not see, and all original weights are
restored.

With `--quantize`, weights are also quantized to fewer bits, of experts too where there are loops for them. A layer
that cannot be quantized stays packed or plain, and is reported with the reason. The head, whose errors go straight
into the logits, is not quantized below 8 bits.

Linear layers with the same input can be packed as one (`groups`). Fused code calls the group. The model's own code
goes on calling the members, of which the first computes the product for all.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rootstock.errors import InvalidOption
from rootstock.kernels.torch.linear import Linear, Plain, is_packed, prepare, stacked
from rootstock.runtime.base import Logits
from rootstock.runtime.torch.fusion.base import Projection
from rootstock.runtime.torch.packed_experts import (
    PackedExperts,
    find_experts,
    not_coded,
    off_by_more_than_rounding,
    pack_experts,
    rms,
)
from rootstock.runtime.torch.stored.coded_tensor import CodedTensor, by_triton
from rootstock.runtime.trial import relative_error

if TYPE_CHECKING:  # these modules import Numba, which only quantization needs
    from rootstock.kernels.torch.coded_linear import Rounding
    from rootstock.kernels.torch.quantized_linear import DequantizeScratch

_log = logging.getLogger(__name__)

_SAMPLE_ROWS = 4
# numbers of weights that are packed: the memory of their old forms goes back to the system

# Attributes and operations that do not read a weight's numbers.
_SHAPE_ONLY = {
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_meta", "is_cpu", "is_cuda", "is_mps",
    "is_xpu", "is_sparse", "is_quantized", "is_leaf", "grad", "names", "itemsize", "nbytes", "size", "dim", "numel",
    "nelement", "element_size", "is_floating_point", "is_complex", "get_device", "__len__", "__hash__", "_is_view",
}  # fmt: skip


@dataclass(slots=True)
class Packing:
    """Result of packing a model's weights."""

    # For each requested group the packed layer; None: its members could not be packed as one.
    groups: list[Linear | None]
    packed: int = 0  # number of packed linear layers
    experts: dict[str, PackedExperts] = field(default_factory=dict)  # by the module's name
    logits: dict[str, Logits] = field(default_factory=dict)  # of the packed model; empty if nothing is packed
    kept: dict[str, str] = field(default_factory=dict)  # unchanged: name → reason
    unrounded: dict[str, str] = field(default_factory=dict)  # not quantized: name → reason
    rounded: dict[str, float] = field(default_factory=dict)  # quantized: name → relative error
    difference: float = 0.0  # relative error of the logits caused by packing and quantization


# "coded": as the checkpoint stores it; "": unchanged
Way = Literal["packed", "int8", "int4", "coded", ""]


@dataclass(frozen=True, slots=True)
class _PackingJob:
    """Linear layers that share one product: the members of a group, or a single layer."""

    names: list[str]
    modules: list[nn.Linear]
    way: Way

    @property
    def weights(self) -> tuple[object, ...]:
        """Returns a key of the weights, equal for layers that share them."""
        return self.way, *(
            0 if tensor is None else _address(tensor)
            for module in self.modules
            for tensor in (module.weight, module.bias)
        )


def _address(tensor: Tensor) -> int:
    return (tensor.form.codes if isinstance(tensor, CodedTensor) else tensor).data_ptr()


def pack_linears(
    model: nn.Module,
    groups: Sequence[Sequence[nn.Linear]],
    exercise: Callable[[], dict[str, Logits]],
    allowed: Callable[[], float],
    progress: Callable[[float], None],
    quantize: str = "none",
) -> Packing:
    """Packs module by module and frees memory as it goes, so that the weights are never in memory twice.

    `exercise` runs the model in every way in which it will be run, and returns the logits of each. `allowed` returns
    the `relative_error` of the logits that packing may cause; it is called only if they change. The error of
    quantization is reported, not judged. Raises InvalidOption if the model cannot run with quantized weights.
    """
    packing = Packing([None] * len(groups))
    linears = {module: name for name, module in model.named_modules() if type(module) is nn.Linear}
    for linear in [linear for linear in linears if _is_changed(linear)]:
        packing.kept[linears.pop(linear)] = "it has hooks or its own forward"
    ways = _ways(model, linears, quantize, packing)
    for linear in [linear for linear in linears if not ways[linear]]:
        packing.kept[linears.pop(linear)] = f"{_name_of(linear.weight)} weights are not packed"
    experts = find_experts(model)
    if linears or experts:
        before, read = _watched(linears, exercise)
        for linear in read:
            packing.kept[linears.pop(linear)] = "its weight is read by other code"
        total = sum(linear.weight.numel() for linear in linears) + sum(map(_numbers_of, experts))
        _pack(linears, ways, groups, packing, lambda numbers: progress(numbers / total))
        _pack_experts(experts, packing, lambda numbers: progress(1.0 - numbers / total), quantize)
        packing.logits = exercise()
        packing.difference = difference(packing.logits, before)
        if packing.rounded:
            if packing.difference == float("inf"):
                raise InvalidOption(
                    "--quantize", quantize, "none: this model computes NaN or infinity with such weights"
                )
        elif not (packing.difference == 0.0 or packing.difference <= allowed()):
            _restore(linears, packing, f"with packed weights the logits differ by {packing.difference:.2g}")
    left = [number for number, group in enumerate(packing.groups) if group is None]
    # In threads, because most of the time goes into the first touch of new memory.
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        plain = threads.map(_side_by_side, [groups[number] for number in left])
        for number, stacked_group in zip(left, plain, strict=True):
            packing.groups[number] = stacked_group
    progress(1.0)
    return packing


def use_packed(
    projections: Sequence[Projection],
    packing: Packing,
    exercise: Callable[[], dict[str, Logits]],
    allowed: Callable[[], float],
) -> None:
    """Lets fused parts compute with packed groups, whose functions they also record. They go on layer by layer if
    the logits then differ from the packed model's by more than rounding."""
    for projection, linear in zip(projections, packing.groups, strict=True):
        if linear is not None:
            projection.use(linear.product())
    if not packing.logits or not any(projection.is_packed for projection in projections):
        return
    changed = difference(exercise(), packing.logits)
    if changed and not changed <= allowed():
        _log.warning("Fused layers do not use packed products: the logits would differ by %.2g.", changed)
        for projection in projections:
            projection.use_linears()


def _ways(
    model: nn.Module, linears: dict[nn.Linear, str], quantize: str, packing: Packing
) -> dict[nn.Linear, Way]:
    """Returns the format in which each linear layer is to be multiplied."""
    ways: dict[nn.Linear, Way] = {}
    for linear in linears:
        is_coded = isinstance(linear.weight, CodedTensor)
        ways[linear] = "coded" if is_coded else "packed" if is_packed(linear.weight) else ""
    if quantize == "none":
        return ways
    from rootstock.kernels.torch.quantized_linear import not_rounded

    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    for linear, name in linears.items():
        if ways[linear] == "coded":
            packing.unrounded[name] = "it is quantized in the checkpoint"
            continue
        rounding: Rounding = "int8" if quantize == "int8" or linear is head else "int4"
        if reason := not_rounded(linear.weight, rounding):
            packing.unrounded[name] = reason
        else:
            ways[linear] = rounding
    return ways


# ------------------------------------------------------------------------------------------ reads of weights


def _is_changed(linear: nn.Linear) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    own = set(linear._parameters) - {"weight", "bias"}
    return bool("forward" in vars(linear) or own or any(getattr(linear, name, None) for name in hooks))


def _watched(
    linears: dict[nn.Linear, str], exercise: Callable[[], dict[str, Logits]]
) -> tuple[dict[str, Logits], list[nn.Linear]]:
    """Returns the logits, and the layers whose weights are read outside of their own forward."""
    own = {linear: linear.weight for linear in linears}
    watch = _Watch(linears)
    try:
        with watch:
            computed = exercise()
    finally:
        for linear, weight in own.items():
            linear.weight = weight
            del linear.forward
    return computed, [linear for linear in linears if id(linear) in watch.read]


class _Watch(TorchFunctionMode):
    """Watch on every operation on a weight. Each linear layer gets a new parameter for it, on the same memory, which
    distinguishes a tied head from the embedding."""

    def __init__(self, linears: dict[nn.Linear, str]) -> None:
        super().__init__()
        self.read: set[int] = set()  # ids of modules
        self._inside: nn.Linear | None = None
        self._owners: dict[int, nn.Linear] = {}
        for linear in linears:
            linear.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
            self._owners[id(linear.weight)] = linear
            linear.forward = self._watching(linear)  # type: ignore[method-assign, assignment]

    def _watching(self, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            self._inside = linear
            try:
                return nn.Linear.forward(linear, x)
            finally:
                self._inside = None

        return forward

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for given in _flat((*args, *kwargs.values())):
            owner = self._owners.get(id(given))
            if owner is not None and owner is not self._inside and _asked(func) not in _SHAPE_ONLY:
                self.read.add(id(owner))
        return func(*args, **kwargs)


def _flat(given: Sequence[Any]) -> Iterator[Any]:
    for one in given:
        if isinstance(one, (tuple, list)):
            yield from _flat(one)
        else:
            yield one


def _asked(func: Any) -> str:
    """Returns the name of an operation, or of the attribute that a getter reads."""
    name = str(getattr(func, "__name__", ""))
    return str(getattr(func.__self__, "__name__", name)) if name == "__get__" else name


# --------------------------------------------------------------------------------------------------- packing


def _pack(
    linears: dict[nn.Linear, str],
    ways: dict[nn.Linear, Way],
    groups: Sequence[Sequence[nn.Linear]],
    packing: Packing,
    progress: Callable[[int], None],
) -> None:
    """Packs linear layers, and reports how many numbers of weights are done."""
    jobs, numbers = _jobs(linears, ways, groups)
    done = 0
    scratch = None
    if {"int8", "int4"} & set(ways.values()):
        from rootstock.kernels.torch.quantized_linear import DequantizeScratch

        scratch = DequantizeScratch()
    same: dict[tuple[object, ...], list[_PackingJob]] = {}
    for job in jobs:
        same.setdefault(job.weights, []).append(job)
    for sharing in same.values():
        job = sharing[0]
        weight, bias = stacked(
            [module.weight.detach() for module in job.modules], [module.bias for module in job.modules]
        )
        done += sum(module.weight.numel() for each in sharing for module in each.modules)
        linear, wrong, error = _made(weight, bias, job.way, scratch)
        del weight, bias
        for each in sharing:
            if wrong and job.way != "packed":
                packing.unrounded |= dict.fromkeys(each.names, wrong)
            if linear is None:
                packing.kept |= dict.fromkeys(each.names, wrong)
                continue
            _replace(each, linear)
            packing.packed += len(each.modules)
            if error is not None:
                packing.rounded |= dict.fromkeys(each.names, error)
            if id(each) in numbers:
                packing.groups[numbers[id(each)]] = linear
        progress(done)


def _pack_experts(
    experts: dict[nn.Module, str], packing: Packing, progress: Callable[[int], None], quantize: str
) -> None:
    """Packs or quantizes modules of experts, and reports how many numbers of weights are left."""
    left = sum(map(_numbers_of, experts))
    for module, name in experts.items():
        left -= _numbers_of(module)
        rounding: Rounding | None = "int8" if quantize == "int8" else "int4" if quantize == "int4" else None
        if rounding and (reason := not_coded(module, rounding)):
            packing.unrounded[name] = reason
            rounding = None
        packed, wrong, error = pack_experts(module, rounding)
        if packed is None:
            packing.kept[name] = wrong
        else:
            packing.experts[name] = packed
            if rounding:
                packing.rounded[name] = error
        progress(left)


def _numbers_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _jobs(
    linears: dict[nn.Linear, str], ways: dict[nn.Linear, Way], groups: Sequence[Sequence[nn.Linear]]
) -> tuple[list[_PackingJob], dict[int, int]]:
    """Returns jobs in the model's order, and the group number by the id of a job. A layer is in one group at most."""
    members = Counter(member for group in groups for member in group)
    assert all(count == 1 for count in members.values()), "a linear is in one group at most"
    jobs, numbers, grouped = [], {}, set()
    for number, group in enumerate(groups):
        if all(
            member in linears and _alike(member, group[0]) and ways[member] == ways[group[0]]
            for member in group
        ):
            job = _PackingJob([linears[member] for member in group], list(group), ways[group[0]])
            jobs.append(job)
            numbers[id(job)] = number
            grouped |= set(group)
    jobs += [
        _PackingJob([name], [linear], ways[linear])
        for linear, name in linears.items()
        if linear not in grouped
    ]
    return jobs, numbers


def _alike(one: nn.Linear, other: nn.Linear) -> bool:
    if isinstance(one.weight, CodedTensor) and isinstance(other.weight, CodedTensor):
        return one.weight.is_coded_like(other.weight)
    return one.weight.dtype == other.weight.dtype and one.weight.shape[1] == other.weight.shape[1]


def _made(
    weight: Tensor, bias: Tensor | None, way: Way, scratch: DequantizeScratch | None
) -> tuple[Linear | None, str, float | None]:
    """Returns the packed layer, the reason why it is not in the requested format, and the relative error of products
    with quantized weights. Checks and errors are measured with a few random rows."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(_SAMPLE_ROWS, weight.shape[1], generator=random).to(weight.device, weight.dtype)
    expected = nn.functional.linear(x, weight, bias).float()
    size, rounding = rms(expected), torch.finfo(weight.dtype).eps * rms(expected)
    wrong = ""
    if way == "coded":
        assert isinstance(weight, CodedTensor)
        linear: Linear | None = _coded_linear(weight, bias)
        if linear is None:
            return None, "no kernel multiplies its codes", None
        off = off_by_more_than_rounding(linear(x), expected, 4)
        return (None, off, None) if off else (linear, "", None)
    if scratch is not None and (way == "int8" or way == "int4"):
        from rootstock.kernels.torch.quantized_linear import FEW_ROWS, rounded

        linear = rounded(weight, bias, way, scratch)
        few, many = linear(x).float(), linear(x.repeat(FEW_ROWS, 1))[: len(x)].float()
        exact = nn.functional.linear(x, linear.unpacked().to(x.dtype), bias).float()
        difference = max(rms(few - exact), rms(many - exact))
        if difference <= 4 * rounding:
            return linear, "", rms(few - expected) / size if size else 0.0
        wrong = f"few or many rows are off by {difference:.2g}, allowed is {4 * rounding:.2g}"
    if is_packed(weight):
        linear = prepare(weight, bias)
        off = off_by_more_than_rounding(linear(x), expected)
        if not off:
            return linear, wrong, None
        wrong = off
    return None, wrong, None


def _coded_linear(weight: CodedTensor, bias: Tensor | None) -> Linear | None:
    """Returns the layer of coded weights [out, in] for their device."""
    layers: Any = weight.layers
    if by_triton(weight.device):
        layers = layers or weight.looped().layers
        made: Linear | None = None if layers is None else layers.linear(bias)
        return made
    from rootstock.kernels.torch.coded_linear import coded_linear

    return coded_linear(layers or weight.coded, weight.dtype, bias)


def _replace(job: _PackingJob, linear: Linear) -> None:
    forwards: list[Any]
    if len(job.modules) == 1:
        forwards = [_Packed(linear)]
    else:
        together = _Together(linear, [module.out_features for module in job.modules])
        forwards = [_Member(together, number) for number in range(len(job.modules))]
    for module, forward in zip(job.modules, forwards, strict=True):
        old = module.weight
        gone = torch.full((), torch.nan, dtype=old.dtype, device=old.device).expand(old.shape)
        module.weight = nn.Parameter(gone, requires_grad=False)
        module.forward = forward  # type: ignore[method-assign]


class _Packed:
    """Replacement of a linear layer's `forward`."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(self, input: Tensor) -> Tensor:
        return self.linear(input)


class _Together:
    """Product of several linear layers that are called with the same tensor, one after the other."""

    def __init__(self, linear: Linear, sizes: list[int]) -> None:
        self.linear = linear
        self.sizes = sizes
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def part(self, number: int, x: Tensor) -> Tensor:
        """Returns x […, in] → […, sizes[number]]. A second request for the same part and input computes it again,
        because the input may have been overwritten in between."""
        if self._input is not x or number not in self._parts:
            self._input = x
            self._parts = dict(enumerate(torch.split(self.linear(x), self.sizes, -1)))
        part = self._parts.pop(number)
        if not self._parts:
            self._input = None
        return part


class _Member:
    """Replacement of the `forward` of one of several linear layers."""

    def __init__(self, together: _Together, number: int) -> None:
        self.together = together
        self.number = number

    def __call__(self, input: Tensor) -> Tensor:
        return self.together.part(self.number, input)


def weight_of(module: nn.Linear, forward: object) -> Tensor:
    """Returns the weight [out, in] that a linear layer with this `forward` multiplies with: of a packed or quantized
    layer a copy, in a new tensor."""
    match forward:
        case _Packed(linear=linear):
            return linear.unpacked()
        case _Member(together=together, number=number):
            return torch.split(together.linear.unpacked(), together.sizes)[number]
    return module.weight


def weight_nbytes(model: nn.Module) -> int:
    """Returns the bytes of a model's weights in memory, in whatever form they are multiplied."""
    found: dict[int, int] = {}
    for module in model.modules():
        match vars(module).get("forward"):
            case _Packed(linear=linear) | _Member(together=_Together(linear=linear)):
                found[id(linear)] = linear.nbytes
            case PackedExperts() as experts:
                found[id(experts)] = experts.nbytes
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if isinstance(tensor, CodedTensor):
                found[_address(tensor)] = tensor.form.nbytes
            else:
                found[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def _side_by_side(group: Sequence[nn.Linear]) -> Linear | None:
    """Stacks plain weights in one tensor, of which each member keeps a view. Returns None if they are not plain."""
    first = group[0]
    for member in group:
        if type(member) is not nn.Linear or _is_changed(member) or not _alike(member, first):
            return None
    weight, bias = stacked([member.weight.detach() for member in group], [member.bias for member in group])
    parts = torch.split(weight, [member.out_features for member in group])
    for member, part in zip(group, parts, strict=True):
        member.weight = nn.Parameter(part, requires_grad=False)
    return Plain(weight, bias)


# --------------------------------------------------------------------------------------------------- checking


def difference(after: dict[str, Logits], before: dict[str, Logits]) -> float:
    """Returns the largest `relative_error` over the kinds of rows; infinity if a logit is not a number."""
    assert after.keys() == before.keys()
    largest = 0.0
    for kind, expected in before.items():
        if np.array_equal(after[kind], expected, equal_nan=True):
            continue
        if not np.isfinite(after[kind]).all():
            return float("inf")
        largest = max(largest, relative_error(after[kind], expected))
    return largest


def _restore(linears: dict[nn.Linear, str], packing: Packing, why: str) -> None:
    """Unpacks the weights again: slower, but correct."""
    restored: dict[int, Tensor] = {}
    for linear, name in linears.items():
        forward = vars(linear).get("forward")
        if isinstance(forward, _Packed):
            weight = _unpacked(forward.linear, restored)
        elif isinstance(forward, _Member):
            together = forward.together
            weight = torch.split(_unpacked(together.linear, restored), together.sizes)[forward.number]
        else:
            continue
        linear.weight = nn.Parameter(weight, requires_grad=False)
        del linear.forward
        packing.kept[name] = why
    while packing.experts:
        name, experts = packing.experts.popitem()
        experts.restore()
        packing.kept[name] = why
    packing.groups = [None] * len(packing.groups)
    packing.packed = 0
    packing.logits = {}


def _unpacked(linear: Linear, restored: dict[int, Tensor]) -> Tensor:
    assert not isinstance(linear, Plain), "only packed weights are restored"
    if id(linear) not in restored:
        restored[id(linear)] = linear.unpacked()
    return restored[id(linear)]


def _name_of(weight: Tensor) -> str:
    return f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
