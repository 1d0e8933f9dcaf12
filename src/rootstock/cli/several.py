"""Serving several models: each is built from the options of the server and its own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rootstock.cache.shared_budget import SharedBudget
from rootstock.cli.output import LoadProgress
from rootstock.cli.starting import Start
from rootstock.config import Configuration, ServedModelConfig, TierConfig
from rootstock.engine.build import Assembly, build_engine
from rootstock.engine.kv_budget import auto_shared_bytes
from rootstock.engine.memory_watch import MemoryWatch, memory_limit
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.errors import InvalidOption
from rootstock.runtime.adapter_files import stored_bytes
from rootstock.runtime.base import Embedder
from rootstock.runtime.embedding_files import is_embedding_model
from rootstock.runtime.memory_fit import Demands
from rootstock.runtime.select import (
    device_memory,
    leave_out_torch,
    load_embedder,
    locate_model,
    stored_files,
)
from rootstock.units import in_units

if TYPE_CHECKING:
    from rootstock.server.models.model_slots import ModelSlot

Report = Callable[[str, float], None]


def shared_budget(models: Sequence[ServedModelConfig], config: Configuration, report: Report) -> SharedBudget:
    """Return the budget of all models: the one of the options, or a share of the memory beside their weights.

    The weights of the models that are loaded at the start, and of the largest other model, count. Embedding models
    have no part in the budget, but their weights count."""
    if config.cache.budget_bytes is not None:
        return SharedBudget(config.cache.budget_bytes)
    start = [_weight_bytes(one, report) for one in models if one.load == "start"]
    later = [
        _weight_bytes(one, report) for one in models if one.load != "start" and Path(one.model.model).is_dir()
    ]
    memories = [device_memory(one.model) for one in models]
    memory = next((each for each in memories if each.kind != "host"), memories[0])
    limit = memory_limit(config.engine.memory_limit_bytes, memory.kind)
    spare = None if limit is None else MemoryWatch(limit).spare_bytes
    return SharedBudget(auto_shared_bytes(memory, sum(start) + max(later, default=0), spare))


def _weight_bytes(one: ServedModelConfig, report: Report) -> int:
    directory = locate_model(one.model, report)
    total = 0
    for file in stored_files(one.model, directory):
        with suppress(OSError):
            total += (directory / file).stat().st_size
    return total + sum(stored_bytes(adapter.path) for adapter in one.model.adapters)


def loader(
    models: Sequence[ServedModelConfig],
    config: Configuration,
    budget: SharedBudget,
    report: Report,
) -> Callable[[ServedModelConfig], Assembly | Embedder]:
    """Return a function that loads a model."""
    generating = [one for one in models if one.task != "embed"]
    shares = sum(one.kv_share for one in generating if one.budget_bytes is None) or 1.0

    def load(one: ServedModelConfig) -> Assembly | Embedder:
        directory = locate_model(one.model, report)
        if is_embedding_model(directory):
            report("load", 0.0)
            embedder = _load_embedder(one, directory, budget, generates=bool(generating))
            report("load", 1.0)
            return embedder
        defaults = SamplingDefaults.chosen(config.server.sampling_defaults, one.model.model, directory)
        made = build_engine(
            one.model,
            replace(config.cache, budget_bytes=one.budget_bytes, device_share=one.kv_share / shares),
            replace(config.engine, context_limit=one.context_limit or config.engine.context_limit),
            _tier_of(one, config.tier, len(generating)),
            chat_template=one.chat_template,
            progress=report,
            directory=directory,
            shared=budget,
        )
        return replace(made, defaults=defaults)

    return load


def _load_embedder(
    one: ServedModelConfig, directory: Path, budget: SharedBudget, *, generates: bool
) -> Embedder:
    """Return an embedding model, whose weights fit beside the memory that caches on a CPU may still take."""
    left = 0
    if generates and device_memory(one.model).kind == "host":  # others have allocated their pools
        left = max(0, budget.budget_bytes - budget.backed_bytes)
    return load_embedder(one.model, directory, Demands(pool_bytes=left))


def _tier_of(one: ServedModelConfig, tier: TierConfig, models: int) -> TierConfig:
    """Return the tiers of a model: a folder of its own, with an equal part of the budgets."""
    folder = None
    if tier.disk_dir is not None:
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", one.name)[:40]
        folder = tier.disk_dir / f"{readable}-{hashlib.sha256(one.name.encode()).hexdigest()[:8]}"
    return replace(
        tier,
        disk_dir=folder,
        disk_budget_bytes=max(1, tier.disk_budget_bytes // models),
        host_budget_bytes=tier.host_budget_bytes // models,
    )


def models_of(
    first: ServedModelConfig, more: Sequence[str], of_file: Sequence[ServedModelConfig]
) -> tuple[ServedModelConfig, ...]:
    """Return the models of the command line, then the models of the file. Raises InvalidOption."""
    own = [first] if first.model.model else []
    named = [
        replace(
            first, name=name_of(model), model=replace(first.model, model=model, served_name=None, adapters=())
        )
        for model in more
    ]
    if (named or of_file) and first.model.served_name is not None:
        raise InvalidOption(
            "--served-model-name", first.model.served_name, "left out with several models: see --alias"
        )
    return (*own, *named, *of_file)


def with_tasks(models: Sequence[ServedModelConfig], report: Report) -> tuple[ServedModelConfig, ...]:
    """Return the models with their tasks, but for those whose files are downloaded when they are asked for."""

    def with_task(one: ServedModelConfig) -> ServedModelConfig:
        directory = Path(one.model.model)
        if one.load == "start":
            directory = locate_model(one.model, report)
        elif not directory.is_dir():
            return one
        return replace(one, task="embed" if is_embedding_model(directory) else "generate")

    return tuple(map(with_task, models))


def name_of(model: str) -> str:
    """Return the name by which clients ask for a model: its directory's own name, or its name on the Hub."""
    directory = Path(model).expanduser()
    return directory.resolve().name if directory.is_dir() else model


def serve_models(models: Sequence[ServedModelConfig], config: Configuration, start: Start) -> None:
    """Load the models that are served from the start, and serve all until a signal ends the process."""
    with LoadProgress() as progress:
        shown: list[Report] = [progress]

        def report(stage: str, done: float) -> None:
            for show in shown:
                show(stage, done)

        models = with_tasks(models, report)
        if all(one.task == "generate" for one in models):
            leave_out_torch(one.model for one in models)
        budget = shared_budget(models, config, report)

        from rootstock.server.app import create_app
        from rootstock.server.models.registry import ModelRegistry

        load = loader(models, config, budget, report)
        generating = sum(one.task != "embed" for one in models)
        registry = ModelRegistry.of_several(
            models,
            load,
            config.server,
            config.engine,
            budget,
            lambda one: _tier_of(one, config.tier, generating).disk_dir,
        )
        web = create_app(registry, config.server, start.drain, start.keys, start.tracing)
        registry.start()
        shown.clear()  # the terminal shows no progress of later loads
    listed = ", ".join(f"{slot.name} ({_state_in_words(slot)})" for slot in registry.slots.all)
    ready = f"Rootstock serves {listed} at {start.url}/v1"
    if any(one.task != "embed" for one in models):
        ready += f" · {in_units(budget.budget_bytes)} for the KV of all"
    start.serve(web, registry, ready, config.server.max_connections)


def _state_in_words(slot: ModelSlot) -> str:
    model = slot.loaded_embedding
    if model is None:
        return slot.status
    return f"{slot.status}, embeddings of {model.description.dimensions} dimensions"
