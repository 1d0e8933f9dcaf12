"""Declarations of a model's configuration that every runtime reads: context limit, RoPE regime, end of sequence.

A configuration is the object in config.json, or the object that transformers makes of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rootstock.errors import shown

_UNLIMITED = 1 << 20  # positions, for a model that declares no limit (ALiBi, recurrent models)

# Fields of config.json with the number of positions; transformers' own objects have the first one.
CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)

# Types of RoPE that transformers computes from the longest sequence of a forward.
CHANGING_ROPE = ("dynamic", "longrope")


def declared_positions(*sources: Mapping[str, Any]) -> Any:
    """Returns the number of positions that the first source has under any name; None: none has one."""
    found = (source.get(name) for source in sources for name in CONTEXT_NAMES)
    return next((value for value in found if value is not None), None)


def context_limit(config: Any, changing: Collection[str] = CHANGING_ROPE) -> tuple[int, str]:
    """Returns (positions that the model can serve, RoPE regime or ""). Raises ValueError for an invalid limit.

    `changing` are the types of RoPE whose frequencies the library takes from the longest sequence of a forward. A
    short sequence packed with a long one would get wrong frequencies, and cached K would be wrong. Such models are
    served up to the length at which the frequencies begin to change. The regime keeps their cached K apart from the
    cached K of other regimes.
    """
    limit = _positions(config, "max_position_embeddings") or _UNLIMITED
    regimes = []
    for parameters in _rope_parameters(config):
        kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
        kind = "longrope" if kind == "su" else kind  # its first name, in the first files of Phi-3
        if not any(each in kind for each in changing):
            continue
        if kind == "longrope":
            name = "original_max_position_embeddings"
            limit = min(limit, _positions(parameters, name) or _positions(config, name) or limit)
        regimes.append(kind)
    return limit, ",".join(f"{kind}<={limit}" for kind in sorted(set(regimes)))


def eos_token_ids(*sources: Any) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens of the first source that has any."""
    for source in sources:
        found = _field(source, "eos_token_id")
        if found is not None:
            return tuple(int(i) for i in (found if isinstance(found, (list, tuple)) else [found]))
    return ()


def _rope_parameters(config: Any) -> list[Mapping[str, Any]]:
    """Returns RoPE's parameters: one set, or one for each kind of layer."""
    parameters = _field(config, "rope_parameters") or _field(config, "rope_scaling")
    if not isinstance(parameters, Mapping):
        return []
    nested = [inner for inner in parameters.values() if isinstance(inner, Mapping)]
    return nested or [parameters]


def _positions(config: Any, name: str) -> int:
    """Returns a field that is a number of positions, 0 if it is missing. Raises ValueError."""
    found = _field(config, name) or 0
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < 1 << 62:
        raise ValueError(f"{name} is {shown(found)}, but must be a number of positions")
    return int(found)


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
