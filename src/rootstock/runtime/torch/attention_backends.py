"""Choice of an attention backend for each layer and device, and compilation of those that need it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from rootstock.errors import InvalidOption
from rootstock.kernels.api import Attention
from rootstock.kernels.torch.gathered_attention import GatherAttention
from rootstock.kernels.torch.latent_attention import LatentAttention, sliced_latents
from rootstock.kernels.torch.sliced_attention import SlicedAttention, Tuning

if TYPE_CHECKING:
    from rootstock.kernels.cuda.triton_attention import TritonAttention

_log = logging.getLogger(__name__)

_TRITON_CAPABILITY = (8, 0)  # on older devices Triton uses no matrix units, and the kernel spills registers

Kernel = Literal["sliced", "gather", "latent", "triton"]  # the backend of a layer
# Backends that are compiled for the device; compiling may fail. Triton's attends all rows. Numba's attends decodes on
# a CPU, and leaves prefill chunks to the backends that need no compiler.
Compiled = Literal["triton", "numba"]


class Attended(Protocol):
    """Attributes of a layer's shape that determine its attention backend. `TorchLayerShape` has them."""

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
    """Attention backends that these layers need. They keep scratch memory, so only one thread may use them."""

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
        self.sliced: Attention | None = None
        self.latent: LatentAttention | None = None
        self.triton: TritonAttention | None = None
        # The widest layer determines the number of positions of a slice.
        if "sliced" in of_layers:
            widest = max(layer.kv_heads * layer.key_dim * layer.dtype.itemsize for layer in layers)
            self.sliced = SlicedAttention(block_size, widest, tuning)
        if "latent" in of_layers:
            widest = max(layer.bytes_per_token for layer in layers if layer.kind == "latent")
            self.latent = LatentAttention(block_size, device, widest, tuning)
        if "triton" in of_layers:
            from rootstock.kernels.cuda.triton_attention import TritonAttention  # triton may not be installed

            self.triton = TritonAttention(block_size, device, (tuning or Tuning()).split_positions)
        if compiled == "numba":
            # numba may not be installed
            from rootstock.kernels.cpu.attention import NumbaAttention
            from rootstock.kernels.cpu.prefill_attention import with_prefill_loops

            def with_loops(beside: Attention) -> Attention:
                if any(layer.dtype == torch.bfloat16 for layer in layers):
                    beside = with_prefill_loops(block_size, beside)
                return NumbaAttention(block_size, beside)

            self.gather = with_loops(self.gather)
            if self.sliced is not None:
                self.sliced = with_loops(self.sliced)
            if any(layer.kind == "latent" and layer.dtype == torch.float32 for layer in layers):
                beside = sliced_latents(block_size, widest, tuning)
                self.latent = LatentAttention(
                    block_size, device, attention=NumbaAttention(block_size, beside, latents=True)
                )


def kernel_of(layer: Attended, device: torch.device, compiled: Compiled | None) -> Kernel:
    if layer.kind == "latent":
        return "latent"
    if layer.kind == "plain" and compiled == "triton":
        return compiled
    # The limits of torch's flash attention for CPUs.
    fits_flash = layer.key_dim == layer.value_dim and not layer.softcap and device.type == "cpu"
    return "sliced" if layer.kind == "plain" and fits_flash else "gather"


def compiled_for(device: torch.device, asked: str = "auto") -> Compiled | None:
    """Returns the compiled backend for a device, by --attention. Logs a warning if it is missing where it would be
    used.

    Raises InvalidOption if Numba is requested and missing.
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


def triton_missing(device: torch.device) -> str | None:
    """Returns the reason why Triton's kernels cannot run on a CUDA device; None if they can."""
    if torch.cuda.get_device_capability(device) < _TRITON_CAPABILITY:
        return "its compute capability is below {}.{}, which the kernel needs".format(*_TRITON_CAPABILITY)
    return None if importlib.util.find_spec("triton") is not None else "triton is not installed"


def _triton_for(device: torch.device) -> Compiled | None:
    missing = triton_missing(device)
    if missing is None:
        return "triton"
    _log.warning("Attention gathers each context instead of reading it in place: %s", missing)
    return None


def compile_for(dtypes: set[torch.dtype]) -> None:
    """Compiles or loads Numba's loops for pools of these dtypes. Takes seconds the first time, then tenths."""
    from rootstock.kernels.cpu.attention import compile_loops, has_loops_for
    from rootstock.kernels.cpu.prefill_attention import compile_prefill_loops

    for dtype in dtypes:
        if has_loops_for(dtype):
            compile_loops(dtype)
        compile_prefill_loops(dtype)


def compile_for_parts(dtype: torch.dtype) -> None:
    """Compiles or loads Numba's loops for the fused parts of a model of this dtype, and imports what finds them.
    Without Numba no part is fused."""
    with contextlib.suppress(ImportError):
        importlib.import_module("rootstock.runtime.torch.fusion.find")
        from rootstock.kernels.cpu.row_loops import DTYPES, RowLoops

        if dtype in DTYPES:
            RowLoops(dtype)


@cache
def _numba_missing() -> str | None:
    """Returns the reason why Numba is missing, which is logged once; None if it can be imported."""
    try:
        import rootstock.kernels.cpu.attention  # noqa: F401
    except ImportError as failure:
        _log.warning(
            "Attention runs on torch alone, and decodes take 2 to 4 times as long: "
            "Numba cannot be imported (%s)",
            failure,
        )
        return str(failure)
    return None
