"""Which way of attending serves which layer on which device, and which of them are compiled."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from rootstock.errors import InvalidOption
from rootstock.kernels.api import Attention
from rootstock.kernels.torch.gathered_attention import GatherAttention
from rootstock.kernels.torch.latent_attention import LatentAttention, paged_latents
from rootstock.kernels.torch.sliced_attention import SlicedAttention, Tuning

if TYPE_CHECKING:
    from rootstock.kernels.cuda.triton_attention import TritonAttention

_log = logging.getLogger(__name__)

_TRITON_CAPABILITY = (8, 0)  # before it Triton has no matrix units, and the kernel spills its registers

Kernel = Literal["paged", "gather", "latent", "triton"]  # which attends a layer
# Kernels that are compiled for the device, and may fail to. Triton's attends alone; Numba's attends decodes on a CPU,
# and leaves chunks to those that need no compiler.
Compiled = Literal["triton", "numba"]


class Attended(Protocol):
    """What of a layer's shape tells how it is attended. `LayerShape` is one."""

    @property
    def kind(self) -> str: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def softcap(self) -> bool: ...
    @property
    def bytes_per_token(self) -> int: ...


class Kernels:
    """The ways of attending that these layers need. They keep scratch memory, so one thread uses them."""

    def __init__(
        self,
        layers: Sequence[Attended],
        block_size: int,
        device: torch.device,
        tuning: Tuning | None = None,
        compiled: Compiled | None = None,
    ) -> None:
        of_layers = [kernel_of(layer, device, compiled) for layer in layers]
        self.gather: Attention = GatherAttention(block_size, device)
        self.paged: Attention | None = None
        self.latent: LatentAttention | None = None
        self.triton: TritonAttention | None = None
        # The widest layer tells how many positions make a slice.
        if "paged" in of_layers:
            widest = max(layer.kv_heads * layer.key_dim * layer.dtype.itemsize for layer in layers)
            self.paged = SlicedAttention(block_size, widest, tuning)
        if "latent" in of_layers:
            widest = max(layer.bytes_per_token for layer in layers if layer.kind == "latent")
            self.latent = LatentAttention(block_size, device, widest, tuning)
        if "triton" in of_layers:
            from rootstock.kernels.cuda.triton_attention import TritonAttention  # which not everybody has

            self.triton = TritonAttention(block_size, device, (tuning or Tuning()).split_positions)
        if compiled == "numba":
            from rootstock.kernels.cpu.attention import NumbaAttention  # as well

            self.gather = NumbaAttention(block_size, self.gather)
            if self.paged is not None:
                self.paged = NumbaAttention(block_size, self.paged)
            if any(layer.kind == "latent" and layer.dtype == torch.float32 for layer in layers):
                beside = paged_latents(block_size, widest, tuning)
                self.latent = LatentAttention(
                    block_size, device, attention=NumbaAttention(block_size, beside, latents=True)
                )


def kernel_of(layer: Attended, device: torch.device, compiled: Compiled | None) -> Kernel:
    if layer.kind == "latent":
        return "latent"
    if layer.kind == "plain" and compiled == "triton":
        return compiled
    # What torch's flash attention for CPUs can do.
    fits_flash = layer.key_dim == layer.value_dim and not layer.softcap and device.type == "cpu"
    return "paged" if layer.kind == "plain" and fits_flash else "gather"


def compiled_for(device: torch.device, asked: str = "auto") -> Compiled | None:
    """The compiled kernel that fits a device, by --attention. Where one would and cannot be had, the log says so.

    Raises InvalidOption if Numba was asked for and cannot be had.
    """
    match device.type:
        case "cpu" if asked != "torch":
            missing = _numba_missing()
            if missing is None:
                return "numba"
            if asked == "numba":
                raise InvalidOption(
                    "--attention", asked, f"auto or torch: Numba cannot be imported ({missing})"
                )
            return None
        case "cuda":
            return _triton_for(device)
        case _:
            return None


def _triton_for(device: torch.device) -> Compiled | None:
    missing = None
    if torch.cuda.get_device_capability(device) < _TRITON_CAPABILITY:
        missing = "{}.{} is the least compute capability that it is made for".format(*_TRITON_CAPABILITY)
    elif importlib.util.find_spec("triton") is None:
        missing = "triton is not installed"
    if missing is None:
        return "triton"
    _log.warning("Attention gathers each context instead of reading it in place: %s", missing)
    return None


def compile_for(dtypes: set[torch.dtype]) -> None:
    """Compiles Numba's loops for pools of these dtypes, or loads them: seconds the first time, then tenths."""
    from rootstock.kernels.cpu.attention import compile_loops, has_loops_for

    for dtype in dtypes:
        if has_loops_for(dtype):
            compile_loops(dtype)


@cache
def _numba_missing() -> str | None:
    """Why Numba is of no use here, said once in the log; None: it is."""
    try:
        import rootstock.kernels.cpu.attention  # noqa: F401
    except ImportError as failure:
        _log.warning(
            "Attention runs on torch alone, which takes 2 to 4 times as long for decodes: "
            "Numba cannot be imported (%s)",
            failure,
        )
        return str(failure)
    return None
