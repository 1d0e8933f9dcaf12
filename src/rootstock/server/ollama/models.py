"""The models of the server as Ollama's API describes them: a list, one model, and those that are loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from rootstock.pipeline.model import ServedModel
from rootstock.server.embedding_model import AnyModel
from rootstock.server.model_slots import ModelSlot
from rootstock.server.models import ModelRegistry
from rootstock.server.wire import Json

LATEST = ":latest"
_BYTES_PER_PARAMETER = {"int4": 0.5, "int8": 1.0, "float32": 4.0}
_NEVER = datetime(9999, 12, 31, tzinfo=UTC)


def tagged(name: str) -> str:
    """Returns a model's name with a tag, as all names of Ollama's have one."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def served_name(models: ModelRegistry, asked: str | None) -> str | None:
    """Returns the name by which the server knows a model: clients add or leave out the tag 'latest'."""
    if asked is None:
        return None
    names = models.names
    return next((one for one in (asked, asked.removesuffix(LATEST), asked + LATEST) if one in names), asked)


class OllamaModels:
    """The description of models. A model that is not loaded has no numbers."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    def listed(self, names: Iterable[str]) -> list[Json]:
        return [self._entry(name) for name in names]

    def loaded(self, names: Iterable[str]) -> list[Json]:
        found = [(name, slot, slot.model) for name in names for slot in [self._models.slot(name)]]
        return [
            self._entry(name)
            | {
                "expires_at": _expires_at(slot),
                "size_vram": 0 if _device(model) == "cpu" else _bytes_of(model),
                "context_length": _context_length(model),
            }
            for name, slot, model in found
            if model is not None
        ]

    def shown(self, name: str | None) -> Json:
        """Raises ModelNotFound and MissingParameter."""
        slot = self._models.slot(name)
        model, name = slot.model, name or slot.name
        told: Json = {
            "details": self._details(name, model),
            "capabilities": _capabilities(slot),
            "model_info": {},
            "modified_at": _modified_at(slot),
        }
        if model is not None:
            family = model.description.architecture
            told["model_info"] = {
                "general.architecture": family,
                "general.parameter_count": model.description.parameters,
                f"{family}.context_length": _context_length(model),
            }
        if isinstance(model, ServedModel):
            sampled = model.defaults
            numbers = {"temperature": sampled.temperature, "top_k": sampled.top_k, "top_p": sampled.top_p}
            told["parameters"] = "\n".join(f"{option:<30} {value}" for option, value in numbers.items())
        return told

    def _entry(self, name: str) -> Json:
        slot = self._models.slot(name)
        # Names of one model have one digest, as Ollama's tags of one model do.
        of_adapter = self._models.is_adapter(name)
        digest = hashlib.sha256((name if of_adapter else slot.name).encode()).hexdigest()
        return {
            "name": tagged(name),
            "model": tagged(name),
            "modified_at": _modified_at(slot),
            "size": _bytes_of(slot.model),
            "digest": digest,
            "details": self._details(name, slot.model),
            "capabilities": _capabilities(slot),
        }

    def _details(self, name: str, model: AnyModel | None) -> Json:
        told: dict[str, Any] = {
            "parent_model": self._models.slot(name).name if self._models.is_adapter(name) else "",
            "format": "safetensors",
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": "",
        }
        if model is not None:
            described = model.description
            told["family"], told["families"] = described.architecture, [described.architecture]
            told["parameter_size"] = _in_billions(described.parameters)
            told["quantization_level"] = _weights(model)
        return told


def _capabilities(slot: ModelSlot) -> list[str]:
    if slot.task == "embed":
        return ["embedding"]
    model = slot.loaded
    if model is None:
        return ["completion"]
    more = {"tools": model.output.has_calls, "thinking": model.output.shows_reasoning}
    return ["completion", *(name for name, has in more.items() if has)]


def _modified_at(slot: ModelSlot) -> str:
    return datetime.fromtimestamp(slot.created, UTC).isoformat()


def _expires_at(slot: ModelSlot) -> str:
    """Returns when the model will be unloaded, if no request uses it until then."""
    config = slot.config
    if config is None or config.pin or config.idle_unload_s is None:
        return _NEVER.isoformat()
    return (datetime.now(UTC) + timedelta(seconds=config.idle_unload_s)).isoformat()


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


def _device(model: AnyModel) -> str:
    return model.description.device


def _in_billions(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"
