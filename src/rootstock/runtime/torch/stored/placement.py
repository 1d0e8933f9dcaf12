"""Placement of coded weights on the device that multiplies them, as soon as a model is read.

A CPU's loops and a CUDA device's kernel multiply the codes as they are. Where neither does, weights are unpacked to
the model's dtype, and a line in the log says what that takes.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import Tensor, nn

from rootstock.runtime.model_files import in_one_line
from rootstock.runtime.torch.attention_backends import triton_missing
from rootstock.runtime.torch.packed_experts import are_experts
from rootstock.runtime.torch.stored.coded_tensor import CodedTensor, by_triton
from rootstock.units import in_units

_log = logging.getLogger(__name__)


def codes_missing(device: torch.device) -> str:
    """Returns the reason why a device does not multiply coded weights; "" if it does. A CPU without loops multiplies
    them, too: it unpacks a part at a time."""
    match device.type:
        case "cpu":
            return ""
        case "cuda":
            return triton_missing(device) or ""
        case _:
            return f"nothing multiplies codes on {device.type}"


def place_coded(model: nn.Module, device: torch.device) -> None:
    """Puts a model's coded weights in the order of the loops or the kernel of a device, on that device.

    Embeddings keep the order of rows. Weights that are neither looked up nor multiplied are unpacked, and so are all
    where the device has nothing for them.
    """
    found = list(model.modules())
    looked_up = {id(each.weight) for each in found if type(each) is nn.Embedding}
    multiplied = {
        id(parameter)
        for each in found
        if type(each) is nn.Linear or are_experts(each)
        for parameter in each.parameters(recurse=False)
    }
    placement = _Placement(device)
    placed: dict[int, nn.Parameter] = {}  # by the id of the parameter before, which tied modules share
    for module in found:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, CodedTensor):
                key = id(parameter)
                if key not in placed:
                    made = placement.place(parameter, key in looked_up, key in multiplied)
                    placed[key] = nn.Parameter(made, requires_grad=False)
                    del made
                module._parameters[name] = placed[key]
                del parameter
    placement.tell()


class _Placement:
    """Placement of one weight after the other, and what could not be kept as codes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._missing = codes_missing(device)
        self._reasons: Counter[str] = Counter()
        self._weights = self._coded_bytes = self._unpacked_bytes = 0

    def place(self, weight: CodedTensor, is_looked_up: bool, is_multiplied: bool) -> Tensor:
        """Returns the weight as its device multiplies it, or unpacked on the CPU."""
        if not is_looked_up and not is_multiplied:
            return weight.unpacked()
        self._weights += 1
        if self._missing:
            return self._unpacked(weight, self._missing)
        if not by_triton(self._device):
            return weight if is_looked_up else weight.looped()
        moved = weight.on(self._device)
        if not is_multiplied:
            return moved
        try:
            made = moved.looped()
        except Exception as failure:  # Triton's compiler may raise anything
            return self._unpacked(weight, f"its kernel fails: {in_one_line(failure)}")
        return self._unpacked(weight, "its kernel computes them wrong") if made.layers is None else made

    def _unpacked(self, weight: CodedTensor, why: str) -> Tensor:
        made = weight.unpacked()
        self._reasons[why] += 1
        self._coded_bytes += weight.form.nbytes
        self._unpacked_bytes += made.nbytes
        return made

    def tell(self) -> None:
        """Logs how many weights could not be kept as codes, and what that takes."""
        if not self._reasons:
            return
        _log.warning(
            "%d of %d quantized weights are unpacked for %s, because %s: they take %s instead of %s",
            self._reasons.total(),
            self._weights,
            self._device,
            " and ".join(self._reasons),
            in_units(self._unpacked_bytes),
            in_units(self._coded_bytes),
        )
