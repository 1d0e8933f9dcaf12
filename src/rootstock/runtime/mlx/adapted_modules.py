"""Modules of mlx-lm's models that LoRA adapters change: an adapter's change of some rows, and merged weights.

MLX has no hooks, and Python looks `__call__` up in the class. A module that an adapter changes therefore gets a class
that is derived from its own, for as long as an adapter changes it. Its weights stay as they are, quantized or not:
the change y + (x · a) · b is added to the rows of the adapter. The batch dimension of a call is its sequences: rows
of several adapters can share a call (`MlxAdapterRows`). Where a module gets rows in another order, such as rows of
routed experts, they cannot be attributed: it raises `RowsUnknown`, and the check at load then gives the adapter calls
of its own.

Merged weights are the reference of that check. They are made by other code, from the adapter's tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from rootstock.runtime.adapter_errors import RowsUnknown, UnfitModule
from rootstock.runtime.adapter_files import AdapterFormat, Role
from rootstock.runtime.base import Segment

Kind = Literal["linear", "experts", "embedding"]
Change = Callable[..., mx.array]
"""Computes the change of a module's outputs of a delta and the module's arguments."""

_KINDS: Mapping[type[nn.Module], Kind] = {
    nn.Linear: "linear",
    nn.QuantizedLinear: "linear",
    SwitchLinear: "experts",
    QuantizedSwitchLinear: "experts",
    nn.Embedding: "embedding",
    nn.QuantizedEmbedding: "embedding",
}


def kind_of(module: nn.Module) -> Kind | None:
    """Returns how a module multiplies; None: adapters cannot change it."""
    return _KINDS.get(_own_class(module))


# ---- an adapter's change


@dataclass(frozen=True, slots=True, eq=False)
class Lora:
    """An adapter's tensors of one module."""

    a: mx.array  # [in, rank], of experts [experts, in, rank], of an embedding [vocab, rank]
    b: mx.array  # [rank, out], of experts [experts, rank, out]
    scaling: float
    changes_head: bool  # an embedding's change counts where its weight is the head, too

    @property
    def rank(self) -> int:
        return int(self.a.shape[-1])

    def product(self) -> mx.array:
        """Returns the change of the transposed weight in float32: [in, out], or the changes of all experts. For an
        embedding, returns the change of the weight itself, [vocab, out]."""
        return self.scaling * (self.a.astype(mx.float32) @ self.b.astype(mx.float32))

    def delta(self, dtype: mx.Dtype) -> Delta:
        scaled = self.scaling * self.b.astype(mx.float32)
        return Delta(mx.contiguous(self.a.astype(dtype)), scaled.astype(dtype), self.changes_head)


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """Change of one module's outputs, in the model's dtype."""

    a: mx.array
    b: mx.array  # times the scaling
    changes_head: bool

    @property
    def nbytes(self) -> int:
        return int(self.a.nbytes + self.b.nbytes)


def lora_of(
    module: nn.Module, format: AdapterFormat, tensors: Mapping[Role, mx.array], scaling: float, rank: int
) -> Lora:
    """Checks an adapter's tensors against the module that they change. Raises UnfitModule."""
    kind = kind_of(module)
    if kind is None:
        raise UnfitModule(
            f"is a {_own_class(module).__name__}. Adapters may change linear layers, experts and embeddings, "
            "quantized or not"
        )
    if module.get("global_scale") is not None:
        raise UnfitModule("is quantized with a scale for each expert beside those of its groups")
    expected = _expected_shapes(kind, format, _sizes(module), rank)
    for role, array in tensors.items():
        if role not in expected:
            raise UnfitModule(
                f"has the adapter's {role}, but on the MLX runtime a {_own_class(module).__name__} is changed by "
                f"{' and '.join(expected) or 'adapters of mlx-lm'} alone: merge the adapter instead"
            )
        if tuple(array.shape) != expected[role]:
            raise UnfitModule(
                f"has {role} of shape {list(array.shape)} in the adapter, but needs {list(expected[role])}"
            )
    if missing := [role for role in expected if role not in tensors]:
        raise UnfitModule(f"has no {missing[0]} in the adapter")
    for role, array in tensors.items():
        if not mx.isfinite(array).all().item():
            raise UnfitModule(f"has {role} with numbers that are not finite")
    a, b = (tensors[role] for role in expected)
    if format == "peft":
        a, b = a.T, b.T
    elif kind == "experts":
        a, b = a.swapaxes(-1, -2), b.swapaxes(-1, -2)
    # PEFT adapts one of two layers that share a weight, mlx-lm the weight.
    return Lora(a, b, scaling, changes_head=kind == "embedding" and format == "mlx-lm")


def _sizes(module: Any) -> tuple[int, ...]:
    """Returns (in, out) of a linear layer, (experts, in, out) of experts, (vocab, out) of an embedding."""
    *first, width = module["weight"].shape
    if "scales" in module:
        width = module["scales"].shape[-1] * module.group_size
    if kind_of(module) == "embedding":
        return (*first, width)
    *experts, outputs = first
    return (*experts, width, outputs)


def _expected_shapes(
    kind: Kind, format: AdapterFormat, sizes: tuple[int, ...], rank: int
) -> dict[Role, tuple[int, ...]]:
    """Returns the shapes of A and B, in this order; empty: the format has no adapters of this kind."""
    *experts, inputs, outputs = sizes
    if format == "mlx-lm":
        if kind == "experts":
            return {"A": (*experts, rank, inputs), "B": (*experts, outputs, rank)}
        return {"A": (inputs, rank), "B": (rank, outputs)}
    if kind == "experts":
        return {}
    if kind == "embedding":
        return {"embedding_A": (rank, inputs), "embedding_B": (outputs, rank)}
    return {"A": (rank, inputs), "B": (outputs, rank)}


# ---- rows


@dataclass(frozen=True, slots=True)
class _AdapterSpan:
    adapter: str
    first: int  # sequence of the call
    end: int


class MlxAdapterRows:
    """Adapters of the sequences in the call in progress. Owned by one model; its modules read it."""

    def __init__(self) -> None:
        self._parts: tuple[_AdapterSpan, ...] = ()  # of adapters, in order; the base has none
        self._sequences = 0
        self._tokens = 0

    @contextlib.contextmanager
    def of(self, segments: Sequence[Segment], tokens: int) -> Iterator[None]:
        """Attributes a call of these segments, padded to so many tokens each, until the context ends."""
        parts: list[_AdapterSpan] = []
        for row, segment in enumerate(segments):
            if parts and parts[-1].adapter == segment.adapter:
                parts[-1] = _AdapterSpan(segment.adapter, parts[-1].first, row + 1)
            else:
                parts.append(_AdapterSpan(segment.adapter, row, row + 1))
        self._parts = tuple(part for part in parts if part.adapter)
        self._sequences, self._tokens = len(segments), tokens
        try:
            yield
        finally:
            self._parts = ()

    def changed(
        self, module: nn.Module, deltas: Mapping[str, Delta], change: Change, x: mx.array, y: mx.array
    ) -> mx.array:
        """Returns the outputs y of the input x with each adapter's change of its rows, which is change(delta, x)."""
        parts = [part for part in self._parts if part.adapter in deltas]
        if not parts:
            return y
        if len(self._parts) == 1 and parts[0].end - parts[0].first == self._sequences:
            return y + change(deltas[parts[0].adapter], x).astype(y.dtype)
        rows = self._rows_of_a_sequence(module, x)
        pieces, done = [], 0
        for part in parts:
            first, end = part.first * rows, part.end * rows
            pieces += [y[done:first]] if first > done else []
            pieces.append(y[first:end] + change(deltas[part.adapter], x[first:end]).astype(y.dtype))
            done = end
        pieces += [y[done:]] if done < len(y) else []
        return mx.concatenate(pieces)

    def _rows_of_a_sequence(self, module: nn.Module, x: mx.array) -> int:
        """Returns the length in dimension 0 that each sequence has. Raises RowsUnknown."""
        if kind_of(module) != "experts":
            if x.shape[0] == self._sequences:
                return 1
            if x.shape[0] == self._sequences * self._tokens:
                return self._tokens
        raise RowsUnknown(
            f"a {_own_class(module).__name__} gets the rows of several sequences in an order of its own, of shape "
            f"{list(x.shape)}"
        )


@dataclass(frozen=True, slots=True)
class _Changes:
    """Changes of one module by the adapters that are loaded."""

    rows: MlxAdapterRows
    deltas: dict[str, Delta] = field(default_factory=dict)


def add_delta(module: nn.Module, rows: MlxAdapterRows, adapter: str, delta: Delta) -> None:
    """Adds an adapter's change to a module."""
    changes = vars(module).get("lora_changes")
    if changes is None:
        changes = vars(module)["lora_changes"] = _Changes(rows)
        module.__class__ = _adapted_class(type(module))
    changes.deltas[adapter] = delta


def remove_delta(module: nn.Module, adapter: str) -> None:
    """Removes an adapter's change, if there is one. Without changes the module is as it was."""
    changes = vars(module).get("lora_changes")
    if changes is None:
        return
    changes.deltas.pop(adapter, None)
    if not changes.deltas:
        module.__class__ = _own_class(module)
        del vars(module)["lora_changes"]


def _own_class(module: nn.Module) -> type[nn.Module]:
    own: type[nn.Module] = getattr(type(module), "lora_own_class", type(module))
    return own


@functools.cache
def _adapted_class(own: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, x: mx.array, *arguments: Any, **options: Any) -> mx.array:
        y: mx.array = own.__call__(self, x, *arguments, **options)
        changes: _Changes = self.lora_changes
        return changes.rows.changed(self, changes.deltas, functools.partial(change, arguments, options), x, y)

    def change(arguments: Any, options: Any, delta: Delta, x: mx.array) -> mx.array:
        return _CHANGES[_KINDS[own]](delta, x, *arguments, **options)

    def as_linear(self: Any, x: mx.array) -> mx.array:
        y: mx.array = own.as_linear(self, x)  # type: ignore[attr-defined]
        changes: _Changes = self.lora_changes
        of_head = {adapter: delta for adapter, delta in changes.deltas.items() if delta.changes_head}
        return changes.rows.changed(self, of_head, lambda delta, x: (x @ delta.b.T) @ delta.a.T, x, y)

    members: dict[str, Any] = {"__call__": call, "lora_own_class": own}
    if _KINDS[own] == "embedding":
        members["as_linear"] = as_linear
    return type(own.__name__, (own,), members)


def _of_linear(delta: Delta, x: mx.array) -> mx.array:
    return (x @ delta.a) @ delta.b


def _of_experts(delta: Delta, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
    for weight in (delta.a, delta.b):
        x = mx.gather_mm(x, weight, rhs_indices=indices, sorted_indices=sorted_indices)
    return x


def _of_embedding(delta: Delta, ids: mx.array) -> mx.array:
    return delta.a[ids] @ delta.b


_CHANGES: Mapping[Kind, Change] = {
    "linear": _of_linear,
    "experts": _of_experts,
    "embedding": _of_embedding,
}


# ---- merged weights


class MergedWeights:
    """Replacement of a module by one with merged weights, which are computed in float32 at each call: the weights
    of one module at a time are in memory."""

    def __init__(self, module: Any, lora: Lora) -> None:
        self.is_read_elsewhere = False  # code of the model reads the weight itself
        self._module = module
        self._lora = lora
        self._own = type(module)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Replaces the module until the context ends."""
        vars(self._module)["lora_merged"] = self
        self._module.__class__ = _merged_class(_own_class(self._module))
        try:
            yield
        finally:
            self._module.__class__ = self._own
            del vars(self._module)["lora_merged"]

    def weight(self, *, of_head: bool = False) -> mx.array:
        """Returns the merged weight as the module has it, [..., out, in]."""
        module, lora = self._module, self._lora
        weight: mx.array = dict.__getitem__(module, "weight")
        if "scales" in module:
            weight = mx.dequantize(
                weight,
                module["scales"],
                module.get("biases"),
                group_size=module.group_size,
                bits=module.bits,
                mode=module.mode,
            )
        product = lora.product()
        if isinstance(module, _MergedEmbedding):
            product = product if lora.changes_head or not of_head else mx.zeros_like(product)
        else:
            product = product.swapaxes(-1, -2)
        return weight.astype(mx.float32) + product

    @property
    def dtype(self) -> mx.Dtype:
        stored: mx.array = dict.get(self._module, "scales", dict.__getitem__(self._module, "weight"))
        return stored.dtype


class _MergedModule(nn.Module):
    """Module whose calls use merged weights, and which notes other reads of its weight."""

    lora_merged: MergedWeights

    def __getitem__(self, key: str) -> Any:
        self.lora_merged.is_read_elsewhere |= key == "weight"
        return super().__getitem__(key)

    @property
    def weight(self) -> Any:
        return self["weight"]

    def _finished(self, product: mx.array, x: mx.array) -> mx.array:
        """Returns a product in the dtype that the module's own call has."""
        return product.astype((mx.zeros((), x.dtype) + mx.zeros((), self.lora_merged.dtype)).dtype)


class _MergedLinear(_MergedModule):
    def __call__(self, x: mx.array) -> mx.array:
        y = x.astype(mx.float32) @ self.lora_merged.weight().T
        return self._finished(y + self["bias"] if "bias" in self else y, x)


class _MergedExperts(_MergedModule):
    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = mx.gather_mm(
            x.astype(mx.float32),
            self.lora_merged.weight().swapaxes(-1, -2),
            rhs_indices=indices,
            sorted_indices=sorted_indices,
        )
        return self._finished(y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y, x)


class _MergedEmbedding(_MergedModule):
    def __call__(self, ids: mx.array) -> mx.array:
        return self.lora_merged.weight()[ids].astype(self.lora_merged.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return self._finished(x.astype(mx.float32) @ self.lora_merged.weight(of_head=True).T, x)


_MERGED: Mapping[Kind, type[_MergedModule]] = {
    "linear": _MergedLinear,
    "experts": _MergedExperts,
    "embedding": _MergedEmbedding,
}


@functools.cache
def _merged_class(own: type[nn.Module]) -> type[nn.Module]:
    return type(own.__name__, (_MERGED[_KINDS[own]], own), {"lora_own_class": own})
