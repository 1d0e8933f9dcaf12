"""The models of the server as Ollama's API describes them. A model that is not loaded has no numbers."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

from rootstock.pipeline.model import ServedModel
from rootstock.server.models.embedding_model import AnyModel
from rootstock.server.models.model_slots import ModelSlot
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.wire.api_call import Json

LATEST = ":latest"
_BYTES_PER_PARAMETER = {"int4": 0.5, "int8": 1.0, "float32": 4.0}
_NEVER = datetime(9999, 12, 31, tzinfo=UTC)


def served_name(models: ModelRegistry, asked: str | None) -> str | None:
    """Returns the name by which the server knows a model: clients add or leave out the tag 'latest'."""
    if asked is None:
        return None
    names = models.names
    return next((one for one in (asked, asked.removesuffix(LATEST), asked + LATEST) if one in names), asked)


def listed(models: ModelRegistry, name: str) -> Json:
    """Returns the entry of a name in the list of models."""
    slot = models.slot(name)
    # Names of one model have one digest, as Ollama's tags of one model do.
    identity = name if models.is_adapter(name) else slot.name
    tagged = name if ":" in name.rpartition("/")[2] else name + LATEST  # as all names of Ollama's are
    return {
        "name": tagged,
        "model": tagged,
        "size": _bytes_of(slot.model),
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        **_described(models, name),
    }


def running(models: ModelRegistry, name: str) -> Json | None:
    """Returns the entry of a name in the list of loaded models. None: it is not loaded."""
    slot = models.slot(name)
    model = slot.model
    if model is None:
        return None
    config, expires = slot.config, _NEVER
    if config is not None and config.idle_unload_s is not None and not config.pin:
        expires = datetime.now(UTC) + timedelta(seconds=config.idle_unload_s)
    return listed(models, name) | {
        "expires_at": expires.isoformat(),
        "size_vram": 0 if model.description.device == "cpu" else _bytes_of(model),
        "context_length": _context_length(model),
    }


def shown(models: ModelRegistry, name: str | None) -> Json:
    """Returns the description of one model. Raises ModelNotFound and MissingParameter."""
    slot = models.slot(name)
    info: Json = {}
    if (model := slot.model) is not None:
        family = model.description.architecture
        info = {
            "general.architecture": family,
            "general.parameter_count": model.description.parameters,
            f"{family}.context_length": _context_length(model),
        }
    return _described(models, name or slot.name) | {"model_info": info}


def _described(models: ModelRegistry, name: str) -> Json:
    slot = models.slot(name)
    details: Json = {
        "parent_model": slot.name if models.is_adapter(name) else "",
        "format": "safetensors",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }
    if (model := slot.model) is not None:
        family, count = model.description.architecture, model.description.parameters
        size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
        details |= {"family": family, "families": [family], "parameter_size": size}
        details["quantization_level"] = _weights(model)
    return {
        "modified_at": datetime.fromtimestamp(slot.created, UTC).isoformat(),
        "details": details,
        "capabilities": _capabilities(slot),
    }


def _capabilities(slot: ModelSlot) -> list[str]:
    if slot.task == "embed":
        return ["embedding"]
    model = slot.loaded
    if model is None:
        return ["completion"]
    more = {
        "tools": model.output.has_calls,
        "thinking": model.output.shows_reasoning,
        "vision": model.images is not None,
    }
    return ["completion", *(name for name, has in more.items() if has)]


def _weights(model: AnyModel) -> str:
    quantized = model.description.quantize if isinstance(model, ServedModel) else "none"
    return model.description.dtype if quantized == "none" else quantized


def _bytes_of(model: AnyModel | None) -> int:
    """Returns the size of a model's weights, from the number of its parameters; 0: it is not loaded."""
    if model is None:
        return 0
    return round(model.description.parameters * _BYTES_PER_PARAMETER.get(_weights(model), 2.0))


def _context_length(model: AnyModel) -> int:
    return model.context_limit if isinstance(model, ServedModel) else model.engine.most_tokens
