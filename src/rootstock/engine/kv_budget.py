"""The KV cache's budget: its default size, and its division among pools."""

from __future__ import annotations

from collections.abc import Sequence

from rootstock.cache.families import Family, FullAttention, RecurrentState, row_bytes
from rootstock.config import EngineConfig
from rootstock.runtime.base import ModelDescription
from rootstock.runtime.host_memory import free_host_bytes

# Shares of the memory that is free once the model is loaded. On a CPU half is left to activations, other programs and
# the file cache. On a GPU only activations and fragmentation need some.
HOST_SHARE = 0.5
DEVICE_SHARE = 0.85

USEFUL_CHECKPOINTS = 16  # that the longest request leaves, for an automatic budget
# Weight of a window's or the states' pool, relative to full attention's, where memory is divided at start.
FIXED_SHARE = 0.5


def auto_budget_bytes(description: ModelDescription, engine: EngineConfig) -> int:
    """Returns a share of the free memory, capped at the need of `max_batch` requests of the longest context."""
    if description.device.startswith("cuda"):
        import torch

        share = DEVICE_SHARE * torch.cuda.mem_get_info()[0]
    else:
        share = HOST_SHARE * free_host_bytes()
    longest = min(description.context_limit, engine.context_limit or description.context_limit)
    # A request leaves a few checkpoints besides the rows of its positions.
    per_request = sum(
        (1 + USEFUL_CHECKPOINTS) * family.bytes_per_state
        if isinstance(family, RecurrentState)
        else longest * family.bytes_per_token
        for family in description.families
    )
    return int(min(share, engine.max_batch * per_request))


def divided_rows(families: Sequence[Family], budget_bytes: int, block_size: int) -> list[int] | None:
    """Divides the budget into rows for each family's pool, for devices that allocate memory at once.

    None: there is one family only. A CPU allocates a page when it is first written, so its pools share the budget.
    """
    if len(families) < 2:
        return None
    weights = [1.0 if isinstance(family, FullAttention) else FIXED_SHARE for family in families]
    return [
        max(2, int(budget_bytes * weight / sum(weights)) // row_bytes(family, block_size))
        for family, weight in zip(families, weights, strict=True)
    ]
