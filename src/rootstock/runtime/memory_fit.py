"""Memory and context that the options ask for, checked before the weights are read, which takes minutes.

The runtimes estimate the weights' bytes, each by its library's means.
"""

from __future__ import annotations

from dataclasses import dataclass

from rootstock.errors import InvalidOption, MemoryLacks, ModelTooLarge
from rootstock.units import in_units


@dataclass(frozen=True, slots=True)
class Demands:
    """Memory and context that the options ask for, checked before the weights are read."""

    pool_bytes: int = 0  # KV cache on the model's device; 0: it takes the memory that is left
    host_bytes: int = 0  # host tier in main memory, beside an accelerator
    context_limit: int | None = None
    adapter_weights: int = 0  # numbers in the tensors of LoRA adapters that are loaded with the model


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Lower bound of the memory of a model's weights."""

    resident: int  # after loading, without adapters
    converted: int  # private copies during loading: tensors of another dtype; the others stay mapped files
    adapters: int = 0  # of LoRA adapters, which are loaded last and never quantized


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


def refuse_longer_context(asked: int | None, limit: int) -> None:
    """Raises InvalidOption for more context than the model was made for."""
    if asked is not None and asked > limit:
        raise InvalidOption(
            "--context-limit",
            f"{asked:,}",
            f"at most {limit:,}, which the model's config.json allows. For more, set the values of its authors "
            "(max_position_embeddings, and rope_parameters for RoPE scaling)",
        )
