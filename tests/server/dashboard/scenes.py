"""Servers as people meet them, over the oracle runtime: the screens of the dashboard are measured on them.

A scene has several models (loaded, on demand, for embeddings, with adapters), tenants with long names, tiers in host
memory and on disk, past and open requests, and pins. Its requests run until the scene ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from rootstock.cache.families import row_bytes
from rootstock.cache.types import Tokens
from rootstock.config import (
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ServedModelConfig,
    ServerConfig,
    TierConfig,
)
from rootstock.engine.adapters import NamedAdapter
from rootstock.engine.build import Assembly, assemble
from rootstock.engine.engine import Engine
from rootstock.runtime.base import Batch, Embedder, EmbedderDescription, LoadedAdapter
from rootstock.server.app import create_app
from rootstock.server.http.drain import Drain
from rootstock.server.http.listen import running
from rootstock.server.models.registry import ModelRegistry
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, window
from rootstock.units import MIB
from waiting import HANG_S, wait_until

OPERATOR, UNBOUND = "operators-key", "key-of-none"
TENANTS = {
    "key-red": "red",
    "key-long": "research-and-development/agents-of-the-night-shift@eu-central-1.example.com",
    "key-ci": "continuous-integration",
}
MODEL = "assistant-70b-instruct-2507-with-a-long-name"
ON_DEMAND, EMBEDDING = "coder-7b-on-demand", "text-embedding-small"
ADAPTERS = ("customer-support-lora-with-a-long-name-v12", "sql")
SYSTEM = "You are a coding agent. You have a shell and an editor, and you answer in short sentences. " * 12
_FAMILIES = {MODEL: (FULL, window(64), STATE), ON_DEMAND: (FULL,)}
_BLOCK = 16
_FORWARD_S = 0.02  # of one forward while requests stay open: they last for as long as they are looked at
_CONTEXT = 200_000


@dataclass
class Scene:
    """A running server, and what a test changes on it."""

    url: str
    registry: ModelRegistry
    drain: Drain
    server: contextlib.ExitStack = field(repr=False)
    clients: ThreadPoolExecutor = field(repr=False)
    slow: threading.Event = field(repr=False)

    @property
    def engine(self) -> Engine:
        return self.registry.find(MODEL).engine

    def ask(self, key: str, text: str, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": _messages(text), "max_tokens": 3, **fields}
        return httpx.post(
            f"{self.url}/v1/chat/completions", json=body, headers={"x-api-key": key}, timeout=HANG_S
        )

    def past(self, count: int) -> None:
        """Asks and answers: shared heads, dates that cost the cache, and long prompts of each tenant."""
        keys = [*TENANTS, OPERATOR]

        def ask(index: int) -> None:
            session = {"prompt_cache_key": f"session {index % 11} of a conversation with a long name"}
            date = f"It is 10:{index % 60:02}. " if index % 3 == 0 else ""
            answer = self.ask(
                keys[index % len(keys)],
                f"{date}Fix the bug number {index} in module {index % 7}. "
                + "The log says so. " * (index % 30),
                **(session if index % 5 else {}),
            )
            assert answer.status_code == 200, answer.text

        for done in [self.clients.submit(ask, index) for index in range(count)]:
            done.result(HANG_S)

    def load(self, count: int) -> None:
        """Begins requests that last, and waits until some run and some wait."""
        self.slow.set()

        def ask(index: int) -> None:
            with contextlib.suppress(httpx.HTTPError):  # they end with the server
                text = f"Write a novel of part {index}. " + "It is long. " * 40 * (index % 4)
                self.ask([*TENANTS][index % 3], text, max_tokens=_CONTEXT // 2, ignore_eos=True)

        for index in range(count):
            self.clients.submit(ask, index)
        wait_until(lambda: len(self.engine.requests()) >= count)
        wait_until(lambda: any(each.completion_tokens for each in self.engine.requests()))

    def pin(self, count: int) -> None:
        """Pins prefixes of each tenant."""
        for index in range(count):
            key, text = [*TENANTS][index % len(TENANTS)], f"{index} is the part to keep, please."
            self.ask(key, text)
            body = {"model": MODEL, "messages": _messages(text)}
            pinned = httpx.post(
                f"{self.url}/v1/cache/pin", json=body, headers={"x-api-key": key}, timeout=HANG_S
            )
            assert pinned.status_code == 200, pinned.text

    def grow_old(self, seconds: float) -> None:
        """Lets time pass for those who watch."""
        engine, now = self.engine, self.engine.now
        engine.now = lambda: now() + seconds  # type: ignore[method-assign]

    def leave(self) -> None:
        """Ends the server. Its pages stay open."""
        self.server.close()

    def stages(self, past: int, pins: int, load: int) -> Iterator[tuple[str, str]]:
        """Takes the server through its states. Yields each with JavaScript that is true once a page shows it."""
        yield "empty", "document.querySelector('#requests .empty').checkVisibility()"
        self.past(past)
        self.pin(pins)
        yield "past", "document.querySelector('#requests .ended') !== null"
        self.grow_old(3600)
        yield "old", "/ ago/.test(document.querySelector('#requests').innerText)"
        self.load(load)
        yield "load", "/^[1-9]/.test(document.getElementById('requests-count').innerText)"
        self.drain.is_draining = True
        yield "draining", "document.getElementById('banner').innerText.includes('draining')"
        self.leave()
        yield "away", "document.getElementById('banner').innerText.includes('away')"


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


class _FakeEmbedder:
    """An embedding model that is listed and never asked."""

    description = EmbedderDescription(
        EMBEDDING, "BertModel", 30_000, 384, (), 512, ("mean",), "float32", "cpu", 22_000_000
    )

    def tokens_of(self, text: str) -> Tokens:
        return np.arange(1 + len(text) % 512, dtype=np.int32)

    def embed(self, inputs: Sequence[Tokens], between_layers: Any = None) -> NDArray[np.float32]:
        return np.ones((len(inputs), self.description.dimensions), np.float32)


@contextlib.contextmanager
def scene(
    folder: Path,
    *,
    keys: bool = True,
    several: bool = True,
    tiers: str = "host and disk",
    budget: int = 12 * MIB,
) -> Iterator[Scene]:
    """Starts the server. `tiers` are "none", "disk", "host" or "host and disk"."""
    slow = threading.Event()

    def fault(_batch: Batch) -> None:
        if slow.is_set():
            time.sleep(_FORWARD_S)

    def load(config: ServedModelConfig) -> Assembly | Embedder:
        if config.task == "embed":
            return _FakeEmbedder()
        return _assembled(folder, config, tiers, budget, fault)

    models = [
        ServedModelConfig(
            MODEL, ModelConfig(MODEL, adapters=tuple(AdapterConfig(name, folder) for name in ADAPTERS))
        )
    ]
    if several:
        adapter = AdapterConfig("reviewer", folder)
        models += [
            ServedModelConfig(ON_DEMAND, ModelConfig(ON_DEMAND, adapters=(adapter,)), load="demand"),
            ServedModelConfig(EMBEDDING, ModelConfig(EMBEDDING), task="embed"),
        ]
    with_keys = {"admin_key": OPERATOR, "tenant_keys": TENANTS, "api_key": UNBOUND} if keys else {}
    config = ServerConfig(aliases=(), show_prompts=True, allowed_origins=("null",), **with_keys)  # type: ignore[arg-type]
    registry = ModelRegistry.of_several(models, load, config, EngineConfig())
    drain = Drain()
    app = create_app(registry, config, drain)
    registry.start()
    with contextlib.ExitStack() as server, ThreadPoolExecutor(64) as clients:
        server.enter_context(registry)
        url = server.enter_context(running(app, registry))
        try:
            yield Scene(url, registry, drain, server, clients, slow)
        finally:
            server.close()


def _assembled(folder: Path, config: ServedModelConfig, tiers: str, budget: int, fault: Any) -> Assembly:
    tokenizer, families = ByteTokenizer(), _FAMILIES[config.name]
    runtime = FakeRuntime(
        tokenizer.vocab_size,
        _CONTEXT,
        families=families,
        weights=config.name,
        eos_token_ids=tokenizer.eos_token_ids,
        fault=fault,
    )
    runtime.description = replace(
        runtime.description, name=config.name, memory="device" if "host" in tiers else "host"
    )
    tier = TierConfig(
        disk_dir=folder / "tier" / config.name if "disk" in tiers else None,
        disk_budget_bytes=256 * MIB,
        host_budget_bytes=8 * MIB if "host" in tiers else 0,
    )
    least = 64 * sum(row_bytes(family, _BLOCK) for family in families)
    cache = CacheConfig(block_size=_BLOCK, budget_bytes=max(budget, least))
    made = assemble(runtime, tokenizer, cache, EngineConfig(max_batch=4, max_queue=1000), tier)
    for adapter in config.model.adapters:
        runtime.adapters.add(adapter.name)
        loaded = LoadedAdapter(adapter.name, 4, 8, 65_536)
        made.engine.adapters.add(NamedAdapter(adapter.name, adapter.path, loaded))
    return made
