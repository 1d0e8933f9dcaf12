"""Changes that a LoRA adapter makes to one module of the base model, and the same module with merged weights.

A change applies to some rows of a module's input and output. The base's weights are shared and stay as they are,
packed or quantized. Merged weights are the reference of the check at load: they are made by other code, from the
adapter's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rootstock.runtime.adapter_errors import UnfitModule
from rootstock.runtime.adapter_files import Role


@dataclass(frozen=True, slots=True)
class LoraTensors:
    """An adapter's tensors of one module, as they are in the file."""

    tensors: Mapping[Role, Tensor]
    scaling: float
    with_magnitude: bool  # DoRA

    def product(self) -> Tensor | None:
        """Computes B·A times the scaling, [out, in] float32."""
        a, b = self.tensors.get("A"), self.tensors.get("B")
        return None if a is None or b is None else self.scaling * (b.float() @ a.float())


@dataclass(slots=True, eq=False)
class LinearDelta:
    """Change of a linear layer's outputs: y → y · scale + shift + (x · aᵀ) · bᵀ, or another layer's y before."""

    a: Tensor | None = None  # [rank, in]
    b: Tensor | None = None  # [out, rank], times the scaling
    shift: Tensor | None = None  # [out]
    scale: Tensor | None = None  # [out]
    weight: Tensor | None = None  # [out, in] instead of the base's
    bias: Tensor | None = None  # [out] beside `weight`

    def apply(self, x: Tensor, y: Tensor) -> None:
        """Changes y [rows, times, out] in place, of which x [rows, times, in] is the input."""
        if self.weight is not None:
            y.copy_(nn.functional.linear(x, self.weight, self.bias))
        if self.scale is not None:
            y.mul_(self.scale)
        if self.shift is not None:
            y.add_(self.shift)
        if self.a is not None and self.b is not None:
            y.add_(nn.functional.linear(nn.functional.linear(x, self.a), self.b))

    def of_weight(self, weight: Tensor) -> Tensor:
        """Returns the changed weight [out, in] of a layer without a bias."""
        weight = weight if self.weight is None else self.weight
        weight = weight if self.scale is None else weight * self.scale[:, None]
        return weight if self.a is None or self.b is None else weight + self.b @ self.a

    @property
    def nbytes(self) -> int:
        return _nbytes(self.a, self.b, self.shift, self.scale, self.weight, self.bias)


@dataclass(slots=True, eq=False)
class EmbeddingDelta:
    """Change of an embedding's rows: y → y + a[ids] · bᵀ, or another embedding's y before."""

    a: Tensor | None = None  # [vocab, rank]
    b: Tensor | None = None  # [hidden, rank], times the scaling
    weight: Tensor | None = None  # [vocab, hidden]

    def apply(self, x: Tensor, y: Tensor) -> None:
        """Changes y [rows, times, hidden] in place, of which x [rows, times, 1] are the ids."""
        ids = x[..., 0]
        if self.weight is not None:
            y.copy_(nn.functional.embedding(ids, self.weight))
        if self.a is not None and self.b is not None:
            y.add_(nn.functional.linear(nn.functional.embedding(ids, self.a), self.b))

    @property
    def nbytes(self) -> int:
        return _nbytes(self.a, self.b, self.weight)


Delta = LinearDelta | EmbeddingDelta


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(0 if tensor is None else tensor.nbytes for tensor in tensors)


def sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """Returns (inputs, outputs) of a linear layer, (vocabulary, width) of an embedding; None for other modules."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        inputs, outputs = module.weight.shape
        return int(inputs), int(outputs)
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return None


def refuse_misfit(
    module: nn.Module, shapes: Mapping[Role, tuple[int, ...]], rank: int, *, dora: bool
) -> None:
    """Checks the shapes of an adapter's tensors against the module. Raises UnfitModule."""
    sizes = sizes_of(module)
    if sizes is None:
        raise UnfitModule(
            f"is a {type(module).__name__}. Adapters may change linear layers and embeddings; experts that are not "
            "linear layers, norms and convolutions cannot be changed for some rows only"
        )
    inputs, outputs = sizes
    expected: dict[Role, tuple[int, ...]]
    if isinstance(module, nn.Embedding):
        if type(module) is not nn.Embedding:
            raise UnfitModule(f"is a {type(module).__name__}, an embedding of an unknown kind")
        expected = {
            "embedding_A": (rank, inputs),
            "embedding_B": (outputs, rank),
            "weight": (inputs, outputs),
        }
    else:
        expected = {
            "A": (rank, inputs),
            "B": (outputs, rank),
            "B.bias": (outputs,),
            "magnitude": (outputs,),
            "weight": (inputs, outputs) if isinstance(module, Conv1D) else (outputs, inputs),
            "bias": (outputs,),
        }
    for role, shape in shapes.items():
        if role not in expected:
            raise UnfitModule(f"is a {type(module).__name__}, which cannot have the adapter's {role}")
        if shape != expected[role]:
            raise UnfitModule(
                f"has {role} of shape {list(shape)} in the adapter, but needs {list(expected[role])}"
            )
    for one, other in (("A", "B"), ("embedding_A", "embedding_B"), ("B.bias", "B"), ("magnitude", "B")):
        if one in shapes and other not in shapes:
            raise UnfitModule(f"has {one} in the adapter, but no {other}")
    if ("B" in shapes and "A" not in shapes) or ("embedding_B" in shapes and "embedding_A" not in shapes):
        raise UnfitModule("has B in the adapter, but no A")
    if dora and "B" in shapes and "magnitude" not in shapes:
        raise UnfitModule("has no magnitude in the adapter, which use_dora needs")
    if not dora and "magnitude" in shapes:
        raise UnfitModule("has a magnitude in the adapter, whose use_dora is false")
    if dora and "B.bias" in shapes:
        raise UnfitModule("has a bias of B beside a magnitude, which PEFT does not know")
    if isinstance(module, nn.Linear) and not _computes_its_product(module):
        raise UnfitModule(
            f"is a {type(module).__name__}, which computes more than a linear layer, as routers of experts do: leave "
            "it out of target_modules"
        )
    plain = type(module) in (nn.Linear, nn.Embedding) or isinstance(module, Conv1D)
    if not plain and {"weight", "bias", "magnitude"} & shapes.keys():
        raise UnfitModule(
            f"is a {type(module).__name__}, whose weights cannot be replaced for some rows only"
        )
    if "bias" in shapes and getattr(module, "bias", None) is None:
        raise UnfitModule("has a bias in the adapter, but none in the base model")


def _computes_its_product(linear: nn.Linear) -> bool:
    """Returns whether a linear layer's class returns one output for each input, as nn.Linear does."""
    if type(linear) is nn.Linear:
        return True
    # A layer of the same class without weights, which may be packed, and without a replaced forward.
    empty = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    empty.__class__ = type(linear)
    own = {name: value for name, value in vars(linear).items() if not name.startswith("_")}
    vars(empty).update({name: value for name, value in own.items() if name != "forward"})
    try:
        found = empty(torch.empty(1, linear.in_features, device="meta"))
    except Exception:  # a model's own code may raise anything
        return False
    return isinstance(found, Tensor) and found.shape == (1, linear.out_features)


def delta_of(
    module: nn.Module, given: LoraTensors, weight: Callable[[], Tensor], dtype: torch.dtype
) -> Delta:
    """Makes the change of a module whose shapes were checked. `weight` returns the base's, [out, in]."""
    tensors, device = given.tensors, next(module.parameters()).device

    def stored(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device, dtype).contiguous()

    if isinstance(module, nn.Embedding):
        a, b = tensors.get("embedding_A"), tensors.get("embedding_B")
        return EmbeddingDelta(
            stored(None if a is None else a.T),
            stored(None if b is None else given.scaling * b.float()),
            stored(tensors.get("weight")),
        )
    a, b = tensors.get("A"), tensors.get("B")
    delta = LinearDelta(stored(a))
    base_bias: Tensor | None = getattr(module, "bias", None)
    bias = base_bias if tensors.get("bias") is None else tensors["bias"].to(device)
    replaced = tensors.get("weight")
    if replaced is not None:
        replaced = replaced.T if isinstance(module, Conv1D) else replaced
        delta.weight, delta.bias = stored(replaced), stored(bias)
    shift = torch.zeros(1, device=device)
    if replaced is None and bias is not base_bias:
        assert base_bias is not None
        assert bias is not None
        shift = shift + (bias.float() - base_bias.float())
    if "B.bias" in tensors:
        shift = shift + given.scaling * tensors["B.bias"].to(device).float()
    scaled = None if b is None else given.scaling * b.to(device).float()
    if given.with_magnitude and scaled is not None and a is not None:
        base = weight().float() if replaced is None else replaced.to(device).float()
        norm = (base + scaled @ a.to(device).float()).norm(dim=1)
        gain = tensors["magnitude"].to(device).float() / norm
        delta.scale = stored(gain)
        scaled = gain[:, None] * scaled
        computed = (
            base_bias if replaced is None else bias
        )  # a part of y, and the gain is of the product alone
        if computed is not None:
            shift = shift + (1 - gain) * computed.float()
    delta.b = stored(scaled)
    delta.shift = stored(shift) if bool(shift.any()) else None
    return delta


class MergedForward:
    """Replacement of a module's forward by one with merged weights, in float32."""

    def __init__(self, module: nn.Module, given: LoraTensors, weight: Callable[[], Tensor]) -> None:
        self._module = module
        self._given = given
        self._weight = weight

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        tensors, module = self._given.tensors, self._module
        device = x.device
        tensors = {role: tensor.to(device).float() for role, tensor in tensors.items()}
        if isinstance(module, nn.Embedding):
            weight = tensors.get("weight", module.weight.float())
            if "embedding_A" in tensors:
                weight = weight + self._given.scaling * (tensors["embedding_B"] @ tensors["embedding_A"]).T
            return nn.functional.embedding(x, weight).to(module.weight.dtype)
        if "weight" not in tensors:
            weight = self._weight().float()
        else:
            weight = tensors["weight"].T if isinstance(module, Conv1D) else tensors["weight"]
        product = LoraTensors(tensors, self._given.scaling, self._given.with_magnitude).product()
        if product is not None:
            weight = weight + product
        if self._given.with_magnitude and product is not None:
            weight = weight / weight.norm(dim=1, keepdim=True) * tensors["magnitude"][:, None]
        bias: Tensor | None = getattr(module, "bias", None)
        bias = tensors.get("bias", None if bias is None else bias.float())
        if "B.bias" in tensors:
            more = self._given.scaling * tensors["B.bias"]
            bias = more if bias is None else bias + more
        return nn.functional.linear(x.float(), weight, bias).to(x.dtype)
