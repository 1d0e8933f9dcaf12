"""Model summary: JSON for /v1/models, text for the command line."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rootstock.cache.families import Family, FullAttention, RecurrentState
from rootstock.runtime.base import EmbedderDescription, ModelDescription
from rootstock.units import in_units


def bytes_per_token(families: Sequence[Family]) -> int:
    """Returns the cache bytes of one more token of a running request, before a window releases older ones."""
    return sum(family.bytes_per_token for family in families if not isinstance(family, RecurrentState))


def bytes_per_checkpoint(families: Sequence[Family], block_size: int) -> int:
    """Returns the most bytes of a checkpoint: of the state, and of the blocks of windows and chunks."""
    total = 0
    for family in families:
        if isinstance(family, RecurrentState):
            total += family.bytes_per_state
        elif not isinstance(family, FullAttention) and (positions := family.max_lookback):
            # A run may begin anywhere in its first block.
            blocks = (positions + block_size - 2) // block_size + 1
            total += blocks * block_size * family.bytes_per_token
    return total


def anthropic_model_fields(name: str, created_s: int, context_limit: int | None) -> dict[str, Any]:
    """Returns the fields of a model in Anthropic's API. The object has the fields of OpenAI's API, too.

    `context_limit` is None until the model is loaded.
    """
    return {
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created_s, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": context_limit,
        "max_tokens": context_limit,
    }


def numbers_of(
    description: ModelDescription, block_size: int, why_no_drafts: str | None = None
) -> dict[str, Any]:
    return {
        "architecture": description.architecture,
        "parameters": description.parameters,
        "dtype": description.dtype,
        "quantize": description.quantize,
        "kv_dtype": description.kv_dtype,
        "runtime": description.runtime,
        "execution_mode": description.execution_mode,
        "mode_reason": description.mode_reason,
        "speculation": "off" if why_no_drafts is not None else "ngram",
        "speculation_reason": why_no_drafts or "",
        "families": [_numbers_of_family(family) for family in description.families],
        "bytes_per_token": bytes_per_token(description.families),
        "bytes_per_checkpoint": bytes_per_checkpoint(description.families, block_size),
    }


def numbers_of_embedder(description: EmbedderDescription) -> dict[str, Any]:
    return {
        "architecture": description.architecture,
        "parameters": description.parameters,
        "dtype": description.dtype,
        "dimensions": description.dimensions,
        "pooling": list(description.pooling),
    }


def _numbers_of_family(family: Family) -> dict[str, Any]:
    if isinstance(family, RecurrentState):
        size = {"bytes_per_state": family.bytes_per_state}
    else:
        size = {"bytes_per_token": family.bytes_per_token}
    return {"name": family.name, "layers": family.layers, **size}


def families_in_words(families: Sequence[Family]) -> str:
    return " + ".join(f"{family.name} × {_counted(family.layers, 'layer')}" for family in families)


def dtypes_in_words(description: ModelDescription) -> str:
    """Returns the dtype of computation, and the dtype of quantized weights."""
    if description.quantize == "none":
        return description.dtype
    return f"{description.dtype} with {description.quantize} weights"


def table_of(description: ModelDescription, block_size: int) -> list[tuple[str, str]]:
    """Returns rows of a name and a value."""
    families = description.families
    limit = f"{description.context_limit:,} tokens"
    return [
        ("model", description.name),
        ("architecture", f"{description.architecture}, {description.parameters:,} parameters"),
        *([("weights", description.weights)] if description.weights else []),
        *([("images", description.images)] if description.images else []),
        ("runtime", description.runtime),
        (
            "runs",
            description.execution_mode + (f": {description.mode_reason}" if description.mode_reason else ""),
        ),
        *(("layers", _family_in_words(family)) for family in families),
        ("per token", in_units(bytes_per_token(families))),
        ("per checkpoint", _checkpoint_in_words(families, block_size)),
        ("context limit", limit),
        ("RoPE", description.rope_regime or "the same at every length, or none"),
        (
            "dtype",
            f"{dtypes_in_words(description)}, cache in {description.kv_dtype}, on {description.device}",
        ),
    ]


def table_of_embedder(description: EmbedderDescription) -> list[tuple[str, str]]:
    """Returns rows of a name and a value."""
    return [
        ("model", description.name),
        ("architecture", f"{description.architecture}, {description.parameters:,} parameters"),
        (
            "embeddings",
            f"{_counted(description.dimensions, 'dimension')}, pooling {' + '.join(description.pooling)}",
        ),
        ("input", f"at most {description.most_tokens:,} tokens"),
        ("dtype", f"{description.dtype}, on {description.device}"),
    ]


def _family_in_words(family: Family) -> str:
    if isinstance(family, RecurrentState):
        size = f"{in_units(family.bytes_per_state)} per state"
    else:
        size = f"{in_units(family.bytes_per_token)} per token"
    return f"{family.name} × {_counted(family.layers, 'layer')}, {size}"


def _checkpoint_in_words(families: Sequence[Family], block_size: int) -> str:
    size = bytes_per_checkpoint(families, block_size)
    if not size:
        return "none needed: it resumes anywhere"
    return f"at most {in_units(size)}, with blocks of {block_size} tokens"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
