"""Options that a runtime does not have, and memory and context that the options ask for: checked before the weights
are read, which takes minutes.

The runtimes estimate the weights' bytes, each by its library's means.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rootstock.cache.families import Family
from rootstock.cache.pools import refuse_small_budget
from rootstock.config import CacheConfig
from rootstock.errors import AdapterUnusable, InvalidOption, MemoryLacks, ModelTooLarge
from rootstock.runtime.adapter_files import AdapterSource
from rootstock.runtime.host_memory import footprint_bytes
from rootstock.units import in_units


@dataclass(frozen=True, slots=True)
class Demands:
    """Memory and context that the options ask for, checked before the weights are read."""

    pool_bytes: int = 0  # KV cache on the model's device; 0: it takes the memory that is left
    host_bytes: int = 0  # host tier in main memory, beside an accelerator
    context_limit: int | None = None
    adapter_weights: int = 0  # numbers in the tensors of LoRA adapters that are loaded with the model
    memory_limit: int | None = None  # bytes that the whole process may take; None: any
    kv_budget: int | None = (
        None  # bytes of the whole KV cache, which must hold a short request; None: automatic
    )
    block_size: int = CacheConfig().block_size
    draft_heads: bool = False  # whether the model's own are loaded, if it has any


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Lower bound of the memory of a model's weights."""

    resident: int  # after loading, without adapters
    converted: int  # private copies during loading: tensors of another dtype; the others stay mapped files
    adapters: int = 0  # of LoRA adapters, which are loaded last and never quantized


def refuse_options(runtime: str, options: Iterable[tuple[str, object, object, str]]) -> None:
    """Raises InvalidOption for an option that the runtime does not have. Each has a name, a value, the value that the
    runtime takes (None or False: the option is omitted), and the reason."""
    for name, value, taken, reason in options:
        if value != taken:
            what = taken if isinstance(taken, str) else "omitted"
            raise InvalidOption(name, value, f"{what} with the {runtime} runtime: {reason}")


def refuse_beyond(
    model: str, weights: int, dtype: str, option: str, beside: int, free: int, memory: str
) -> None:
    """Raises ModelTooLarge if weights exceed the free memory, MemoryLacks if they do with the bytes of an option."""
    if weights > free:
        raise ModelTooLarge(model, weights, dtype, free, memory)
    if weights + beside > free:
        raise MemoryLacks(
            option,
            in_units(beside),
            f"at most {in_units(free - weights)}: {in_units(free)} of the {memory} is free, and the weights take "
            f"{in_units(weights)} (--no-memory-check serves all the same)",
        )


def refuse_beyond_limit(model: str, weights: int, dtype: str, demands: Demands) -> None:
    """Raises ModelTooLarge or MemoryLacks if weights and KV cache do not fit under the limit of the process's memory,
    beside the memory that the process has taken already. For pools in main memory."""
    if demands.memory_limit is not None:
        free = max(0, demands.memory_limit - (footprint_bytes() or 0))
        refuse_beyond(model, weights, dtype, "--kv-budget", demands.pool_bytes, free, "--memory-limit")


def refuse_adapter_beyond(source: AdapterSource, weight_bytes: int, free: int, memory: str) -> None:
    """Raises AdapterUnusable if an adapter does not fit in the free memory, with so many bytes for each weight."""
    needed = source.weight_count * weight_bytes
    if needed > free:
        raise AdapterUnusable(
            source.name,
            f"its weights need {in_units(needed)}, but {in_units(free)} of the {memory} is free "
            "(a server with --no-memory-check loads it all the same)",
        )


def refuse_hopeless_budget(families: Sequence[Family], demands: Demands) -> None:
    """Raises BudgetTooSmall for a KV cache that could not hold a short request of these families."""
    if demands.kv_budget is not None:
        refuse_small_budget(families, demands.kv_budget, demands.block_size)


def refuse_longer_context(asked: int | None, limit: int) -> None:
    """Raises InvalidOption for more context than the model was made for."""
    if asked is not None and asked > limit:
        raise InvalidOption(
            "--context-limit",
            f"{asked:,}",
            f"at most {limit:,}, which the model's config.json allows. For more, set the values of its authors "
            "(max_position_embeddings, and rope_parameters for RoPE scaling)",
        )
