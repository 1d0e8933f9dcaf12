"""Model, cache and text put together into an engine: for the command line, the benchmarks and the demo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rootstock.cache import KVCache
from rootstock.cache.families import Family, FullAttention, RecurrentState, row_bytes
from rootstock.config import CacheConfig, EngineConfig, ModelConfig, TierConfig
from rootstock.engine.engine import Engine
from rootstock.engine.tiers.build import open_below, stored_index
from rootstock.engine.tiers.connector import TierStats
from rootstock.engine.tokenizer import HFTokenizer, ModelTokenizer
from rootstock.runtime.base import ModelDescription, Runtime
from rootstock.runtime.host_memory import free_host_bytes
from rootstock.runtime.model_files import check_configs, locate, weight_files

# Of what is free once the model is loaded. A CPU's memory is everybody's: half is left to activations, other
# programs and the file cache. A GPU's is ours, but for activations and fragmentation.
HOST_SHARE = 0.5
DEVICE_SHARE = 0.85

USEFUL_CHECKPOINTS = 16  # that the longest request leaves, for an automatic budget
# Of a window's or the states' pool, relative to full attention's, where memory is divided at start.
FIXED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine that was not started, and what it was made of."""

    engine: Engine
    codec: ModelTokenizer
    description: ModelDescription
    pool_tokens: int
    pool_bytes: int
    serves_chat: bool = True  # False: without a chat template only /v1/completions has prompts
    tier: TierStats | None = None  # what lay below memory at the start; None: nothing is asked for


def assemble(
    runtime: Runtime,
    codec: ModelTokenizer,
    cache: CacheConfig | None = None,
    engine: EngineConfig | None = None,
    tier: TierConfig | None = None,
) -> Assembly:
    """Raises BudgetTooSmall or InvalidOption."""
    cache, engine, tier = cache or CacheConfig(), engine or EngineConfig(), tier or TierConfig()
    described = runtime.description
    budget = auto_budget_bytes(described, engine) if cache.budget_bytes is None else cache.budget_bytes
    rows = None if described.device == "cpu" else divided_rows(described.families, budget, cache.block_size)
    kv = KVCache(
        described.families,
        budget,
        cache.block_size,
        reuse=cache.enabled,
        rows=rows,
        stored=stored_index(runtime, tier, cache.block_size),
        through=tier.disk_write == "through",
    )
    runtime.allocate(kv.rows, cache.block_size)
    tiering = open_below(runtime, kv, tier, engine.chunk_tokens)
    return Assembly(
        Engine(runtime, kv, engine, codec, tiering=tiering, verify_hits=tier.verify_hits),
        codec,
        described,
        pool_tokens=kv.capacity_tokens,
        pool_bytes=kv.budget_bytes,
        tier=None if tiering is None else tiering.stats(tiering.measure()),
    )


def build_engine(
    model: ModelConfig,
    cache: CacheConfig | None = None,
    engine: EngineConfig | None = None,
    tier: TierConfig | None = None,
    *,
    chat_template: str | None = None,
    progress: Callable[[str, float], None] | None = None,
    directory: Path | None = None,
) -> Assembly:
    """Loads a model and assembles an engine around it. Raises StartupError.

    `chat_template` is used instead of the model's own. `progress` is called with a stage and how much of it is
    done, from 0 to 1. `directory` is what `locate` has found, if it was called already. Takes seconds to minutes;
    torch is imported here.
    """
    report = progress or (lambda stage, done: None)
    directory = directory or locate(model.model, with_code=model.trust_remote_code, progress=report)
    # Broken files are told before torch is imported, and a missing tokenizer before minutes of weights.
    check_configs(model.model, directory)
    weight_files(model.model, directory)

    from rootstock.kernels.cpu.threads import end_team
    from rootstock.runtime.torch.memory_fit import Demands
    from rootstock.runtime.torch.runner import load_model
    from rootstock.runtime.torch.weights import read_config

    read_config(model.model, directory, trust_remote_code=model.trust_remote_code)
    codec = HFTokenizer.load(str(directory), chat_template, trust_remote_code=model.trust_remote_code)
    demands = Demands(
        pool_bytes=0 if cache is None else cache.budget_bytes or 0,
        host_bytes=0 if tier is None else tier.host_budget_bytes,
        context_limit=None if engine is None else engine.context_limit,
    )
    runtime = load_model(model, report, demands, directory=directory)
    made = replace(assemble(runtime, codec, cache, engine, tier), serves_chat=codec.has_chat_template)
    end_team()  # from here on the engine's thread computes, and this one does not
    return made


def auto_budget_bytes(description: ModelDescription, engine: EngineConfig) -> int:
    """A share of the free memory, but no more than `max_batch` requests of the longest context can use."""
    if description.device.startswith("cuda"):
        import torch

        share = DEVICE_SHARE * torch.cuda.mem_get_info()[0]
    else:
        share = HOST_SHARE * free_host_bytes()
    longest = min(description.context_limit, engine.context_limit or description.context_limit)
    # A request of n positions leaves a few checkpoints besides what it keeps of every position.
    per_request = sum(
        (1 + USEFUL_CHECKPOINTS) * family.bytes_per_state
        if isinstance(family, RecurrentState)
        else longest * family.bytes_per_token
        for family in description.families
    )
    return int(min(share, engine.max_batch * per_request))


def divided_rows(families: Sequence[Family], budget_bytes: int, block_size: int) -> list[int] | None:
    """Rows for each family's pool, for a device that hands out its memory once. None: there is one family only.

    On a CPU the system gives a page when it is first written, and pools can share the budget as requests need it.
    """
    if len(families) < 2:
        return None
    weights = [1.0 if isinstance(family, FullAttention) else FIXED_SHARE for family in families]
    return [
        max(2, int(budget_bytes * weight / sum(weights)) // row_bytes(family, block_size))
        for family, weight in zip(families, weights, strict=True)
    ]
