"""Structure of mixers that are a short convolution between two gates (kernels/cpu/gated_convolution.py): LFM2.

Such a mixer is one projection to two gates and inputs, a short convolution, and a projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from rootstock.kernels.cpu.gated_convolution import GatedConvolutionLoops
from rootstock.runtime.torch.fusion.recurrences import RecurrentParts
from rootstock.runtime.torch.state_pool import TorchStateShape


def gated_convolutions(mixer: nn.Module, shapes: Sequence[TorchStateShape]) -> Iterator[RecurrentParts]:
    """Yields the parts that a mixer may have, as `FindParts` does."""
    children = dict(mixer.named_children())
    if set(children) != {"conv", "in_proj", "out_proj"} or len(shapes) != 1:
        return
    if any(True for _ in mixer.parameters(recurse=False)):
        return
    conv, before, after = (children[name] for name in ("conv", "in_proj", "out_proj"))
    if type(conv) is not nn.Conv1d or type(before) is not nn.Linear or type(after) is not nn.Linear:
        return
    channels = conv.in_channels
    if conv.groups != channels or conv.out_channels != channels or shapes[0].key.kind != "conv_states":
        return
    if before.out_features != 3 * channels or after.in_features != channels:
        return
    try:
        loops = GatedConvolutionLoops(conv.weight.detach()[:, 0], conv.bias)
    except ValueError:
        return
    yield RecurrentParts([before], loops, after)
