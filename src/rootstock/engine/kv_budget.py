"""The KV cache's budget: its default size, and its division among pools."""

from __future__ import annotations

from collections.abc import Sequence

from rootstock.cache.families import Family, FullAttention, RecurrentState, row_bytes
from rootstock.config import EngineConfig
from rootstock.runtime.base import DeviceMemory, ModelDescription, PoolMemory, Runtime

# Shares of the memory that is free once the model is loaded. On a CPU half is left to activations, other programs and
# the file cache. On a GPU only activations and fragmentation need some. Unified memory is a part of main memory that
# the system grants to the GPU, and other programs have the rest.
FREE_SHARES: dict[PoolMemory, float] = {"host": 0.5, "device": 0.85, "unified": 0.7}

_LEAST_FREE_SHARE = (
    0.1  # of the free memory is left by the weights, for an automatic budget of several models
)

_WEIGHT_BYTES = {"bfloat16": 2, "float16": 2}

USEFUL_CHECKPOINTS = 16  # that the longest request leaves, for an automatic budget
# Weight of a window's or the states' pool, relative to full attention's, where memory is divided at start.
FIXED_SHARE = 0.5


def auto_budget_bytes(
    runtime: Runtime, engine: EngineConfig, beside_bytes: int = 0, spare_bytes: int | None = None
) -> int:
    """Returns a share of the free memory, capped at the need of `max_batch` requests of the longest context.

    `beside_bytes` of the free memory are taken later. A limit of the process's memory leaves `spare_bytes`.
    """
    description = runtime.description
    free = runtime.free_bytes() if spare_bytes is None else min(runtime.free_bytes(), spare_bytes)
    share = FREE_SHARES[description.memory] * max(0, free - beside_bytes)
    longest = min(description.context_limit, engine.context_limit or description.context_limit)
    # A request leaves a few checkpoints besides the rows of its positions.
    per_request = sum(
        (1 + USEFUL_CHECKPOINTS) * family.bytes_per_state
        if isinstance(family, RecurrentState)
        else longest * family.bytes_per_token
        for family in description.families
    )
    return int(min(share, engine.max_batch * per_request))


def auto_shared_bytes(memory: DeviceMemory, weight_bytes: int, spare_bytes: int | None = None) -> int:
    """Returns a share of the memory that is free beside the weights of several models, before they are loaded.

    A limit of the process's memory leaves `spare_bytes`.
    """
    free = memory.free_bytes if spare_bytes is None else min(memory.free_bytes, spare_bytes)
    return int(FREE_SHARES[memory.kind] * max(free - weight_bytes, free * _LEAST_FREE_SHARE))


def adapter_bytes(description: ModelDescription, weights: int) -> int:
    """Returns the bytes of so many weights of LoRA adapters, which have the model's dtype."""
    return weights * _WEIGHT_BYTES.get(description.dtype, 4)


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
