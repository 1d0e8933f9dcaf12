"""Builds an engine from a runtime, a cache and a tokenizer, for the command line, the benchmarks and the demo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rootstock.cache.eviction import POLICIES
from rootstock.cache.kv_cache import KVCache
from rootstock.cache.pools import refuse_small_budget
from rootstock.cache.shared_budget import BudgetShare, SharedBudget
from rootstock.config import CacheConfig, EngineConfig, ModelConfig, TierConfig
from rootstock.engine.engine import Engine
from rootstock.engine.kv_budget import adapter_bytes, auto_budget_bytes, divided_rows
from rootstock.engine.memory_watch import MemoryWatch, memory_limit
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.engine.tiers.build import open_below, stored_index
from rootstock.engine.tiers.connector import TierStats
from rootstock.errors import ModelUnsupported
from rootstock.runtime.adapter_files import count_weights
from rootstock.runtime.base import ImageReader, ModelDescription, Runtime
from rootstock.runtime.embedding_files import is_embedding_model
from rootstock.runtime.memory_fit import Demands
from rootstock.runtime.model_files import read_configs
from rootstock.runtime.select import (
    check_architecture,
    device_memory,
    leave_to_engine_thread,
    load_model,
    locate_model,
    stored_files,
)
from rootstock.text.tokenizer import HFTokenizer, ModelTokenizer


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine that was not started, and its parts."""

    engine: Engine
    tokenizer: ModelTokenizer
    description: ModelDescription
    pool_tokens: int
    pool_bytes: int
    serves_chat: bool = True  # False: no chat template, so only /v1/completions works
    tier: TierStats | None = None  # state of the tiers at the start; None: there are none
    block_size: int = CacheConfig().block_size  # tokens of a block of the cache
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)  # of requests that name none
    images: ImageReader | None = None  # None: the model sees none


def assemble(
    runtime: Runtime,
    tokenizer: ModelTokenizer,
    cache: CacheConfig | None = None,
    engine: EngineConfig | None = None,
    tier: TierConfig | None = None,
    shared: SharedBudget | None = None,
    *,
    beside_bytes: int = 0,
) -> Assembly:
    """Assembles an engine around a loaded model. Raises BudgetTooSmall or InvalidOption.

    With `shared`, its cache has a share in the budget of several models, unless `cache` has a budget of its own. An
    automatic budget leaves room for `beside_bytes` that are loaded later.
    """
    cache, engine, tier = cache or CacheConfig(), engine or EngineConfig(), tier or TierConfig()
    described = runtime.description
    limit = memory_limit(engine.memory_limit_bytes, described.memory)
    watch = None if limit is None else MemoryWatch(limit)
    share = None
    if cache.budget_bytes is not None:
        budget = cache.budget_bytes
    elif shared is not None and described.memory != "host":
        budget = int(shared.budget_bytes * cache.device_share)
    elif shared is not None:
        budget, share = shared.budget_bytes, shared.join()
    else:
        spare = None if watch is None else watch.spare_bytes
        budget = int(auto_budget_bytes(runtime, engine, beside_bytes, spare) * cache.device_share)
    try:
        return _assembled(runtime, tokenizer, cache, engine, tier, budget, share, watch)
    except BaseException:
        if share is not None:
            share.budget.leave(share)
        raise


def _assembled(
    runtime: Runtime,
    tokenizer: ModelTokenizer,
    cache: CacheConfig,
    engine: EngineConfig,
    tier: TierConfig,
    budget: int,
    share: BudgetShare | None,
    watch: MemoryWatch | None,
) -> Assembly:
    described = runtime.description
    refuse_small_budget(described.families, budget, cache.block_size)  # with the names of the command line
    rows = None if described.memory == "host" else divided_rows(described.families, budget, cache.block_size)
    kv = KVCache(
        described.families,
        budget,
        cache.block_size,
        reuse=cache.enabled,
        rows=rows,
        stored=stored_index(runtime, tier, cache.block_size),
        through=tier.disk_write == "through",
        stored_is_shared=tier.remote is not None,
        share=share,
        policy=POLICIES[cache.eviction](),
        retained_share=cache.retained_share,
        pinned_share=cache.pinned_share,
        lazy_states=described.lazy_states,
        announces=engine.kv_events is not None,
    )
    runtime.allocate(kv.rows, cache.block_size)
    tier_connector = open_below(runtime, kv, tier, engine.chunk_tokens)
    try:
        made = Engine(
            runtime,
            kv,
            engine,
            tokenizer,
            tier_connector=tier_connector,
            verify_hits=tier.verify_hits,
            memory_watch=watch,
        )
    except BaseException:  # such as an address of KV events that cannot be used
        if tier_connector is not None:
            tier_connector.close()
        raise
    return Assembly(
        made,
        tokenizer,
        described,
        pool_tokens=kv.capacity_tokens,
        pool_bytes=kv.budget_bytes,
        tier=None if tier_connector is None else tier_connector.stats(tier_connector.measure()),
        block_size=cache.block_size,
        images=runtime.images,
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
    shared: SharedBudget | None = None,
) -> Assembly:
    """Loads a model and assembles an engine around it. Raises StartupError.

    `chat_template` replaces the model's own. `progress` is called with a stage and its done share, from 0 to 1.
    `directory` is the result of `locate_model`, if it was called already. `shared` is the budget of several models.
    Takes seconds to minutes and imports the runtime's library.
    """
    report = progress or (lambda stage, done: None)
    directory = directory or locate_model(model, report)
    # Reports broken files before the runtime's library is imported, and a missing tokenizer before minutes of loading
    # weights.
    check_files(model, directory)
    check_architecture(model, directory)
    tokenizer = HFTokenizer.load(str(directory), chat_template, trust_remote_code=model.trust_remote_code)
    demands = Demands(
        pool_bytes=_pool_bytes(cache, shared),
        host_bytes=0 if tier is None else tier.host_budget_bytes,
        context_limit=None if engine is None else engine.context_limit,
        adapter_weights=_adapter_weights(model),
        memory_limit=_memory_limit(model, engine),
        kv_budget=_budget_bytes(cache, shared),
        block_size=(cache or CacheConfig()).block_size,
        draft_heads=engine is None or engine.draft_tokens != 0,
    )
    runtime = load_model(model, report, demands, directory=directory)
    beside = adapter_bytes(runtime.description, demands.adapter_weights)
    made = replace(
        assemble(runtime, tokenizer, cache, engine, tier, shared, beside_bytes=beside),
        serves_chat=tokenizer.has_chat_template,
    )
    try:
        for adapter in model.adapters:
            made.engine.load_adapter(adapter.name, adapter.path)
    except BaseException:
        made.engine.stop()
        raise
    leave_to_engine_thread(model)
    return made


def check_files(model: ModelConfig, directory: Path) -> None:
    """Checks that the files of a model that generates text are there. Imports no library of a runtime.

    Raises ModelError or InvalidOption."""
    if is_embedding_model(directory):
        reason = "it makes embeddings and no text: 'rootstock serve' answers /v1/embeddings with it"
        raise ModelUnsupported(model.model, reason)
    read_configs(model.model, directory)
    stored_files(model, directory)


def _memory_limit(model: ModelConfig, engine: EngineConfig | None) -> int | None:
    """Returns the bytes that the process may take; None: any. Raises InvalidOption."""
    asked = (engine or EngineConfig()).memory_limit_bytes
    return None if asked == 0 else memory_limit(asked, device_memory(model).kind)


def _adapter_weights(model: ModelConfig) -> int:
    """Counts the weights of the adapters that are loaded with a model. Adapters of the same files share theirs.

    Raises AdapterUnusable.
    """
    by_path = {Path(adapter.path).expanduser().resolve(): adapter for adapter in model.adapters}
    return sum(count_weights(adapter.name, adapter.path) for adapter in by_path.values())


def _budget_bytes(cache: CacheConfig | None, shared: SharedBudget | None) -> int | None:
    """Returns the bytes that the cache has at most; None: it takes a share of the memory that is left."""
    if cache is not None and cache.budget_bytes is not None:
        return cache.budget_bytes
    return None if shared is None else shared.budget_bytes


def _pool_bytes(cache: CacheConfig | None, shared: SharedBudget | None) -> int:
    """Returns the bytes of memory that the caches may still take; 0: they take all memory that is left."""
    if cache is not None and cache.budget_bytes is not None:
        return cache.budget_bytes
    return 0 if shared is None else max(0, shared.budget_bytes - shared.backed_bytes)
