"""A whole server over the oracle runtime, whose answers change with any error of the engine or the cache."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from rootstock.cache.families import Family, row_bytes
from rootstock.config import CacheConfig, EngineConfig, ServerConfig, TierConfig
from rootstock.engine.build import Assembly, assemble
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.runtime.base import Batch
from rootstock.server.app import create_app
from rootstock.server.http.connection import HttpLimits
from rootstock.server.http.drain import Drain
from rootstock.server.http.listen import running
from rootstock.server.observe.tracing import Tracing
from rootstock.testing.byte_tokenizer import PADDED_LOGITS, ByteTokenizer
from rootstock.testing.fake_runtime import FULL, FakeRuntime
from rootstock.text.tokenizer import ModelTokenizer
from server.held import Held
from waiting import HANG_S, wait_until

Json = dict[str, Any]
GREEDY: Json = {"temperature": 0}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that can be served. Tests that change it make a copy."""
    from checkpoints import save_served  # imports torch, which most tests here do not need

    return save_served(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def user(text: str) -> list[Json]:
    return [{"role": "user", "content": text}]


def assert_error(response: Any, status: int, code: str, *parts: str, **fields: str | None) -> None:
    """Asserts the shape of an error, its code, parts of its message, and the values of other fields."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error == error | {"code": code} | fields
    assert all(part in error["message"] for part in parts), error
    assert len(error["message"]) < 400
    assert "\n" not in error["message"]


@dataclass
class Served:
    url: str
    client: httpx.Client
    assembly: Assembly
    runtime: FakeRuntime
    app: FastAPI

    def chat(self, text: str, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json={"messages": user(text), **fields})

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, **fields})

    def chunks(self, path: str, **fields: Any) -> list[Json]:
        """Returns the data of a stream's events. Asserts their form and the [DONE] at the end."""
        with self.client.stream("POST", path, json={"stream": True, **fields}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            events = "".join(response.iter_text()).split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") for event in events)
        assert events.pop() == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def chat_prompt(self, text: str) -> list[int]:
        tokenizer = self.assembly.tokenizer
        tokens: list[int] = tokenizer.encode_chat(tokenizer.render_chat(user(text), [])).tolist()
        return tokens

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Computes the oracle's tokens from the prompt alone, up to an end of sequence."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            token = int(self.runtime.expected_logits(np.array(tokens, np.int32)).argmax())
            if token == ByteTokenizer.END:
                break
            tokens.append(token)
        return tokens[len(prompt) :]

    def settled(self) -> None:
        """Waits until no request runs, and asserts that all rows were released."""
        health = self.assembly.engine.health
        wait_until(lambda: not (health().running or health().waiting))
        stats = self.assembly.engine.stats().cache
        assert stats.leases == 0
        assert stats.live_blocks == 0
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks

    def metric(self, name: str, **labels: str) -> float:
        """Adds up the samples of a metric that have these labels, among others."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.client.get("/metrics").text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@contextlib.contextmanager
def served_by_oracle(
    engine: EngineConfig | None = None,
    server: ServerConfig | None = None,
    defaults: SamplingDefaults | None = None,
    tokenizer: ModelTokenizer | None = None,
    fault: Callable[[Batch], None] | None = None,
    context_limit: int = 4096,
    blocks: int = 2000,
    families: Sequence[Family] = (FULL,),
    vocab_size: int = PADDED_LOGITS,
    limits: HttpLimits | None = None,
    reuse: bool = True,
    drain: Drain | None = None,
    tier: TierConfig | None = None,
    tracing: Tracing | None = None,
) -> Iterator[Served]:
    tokenizer = tokenizer or ByteTokenizer()
    runtime = FakeRuntime(
        vocab_size, context_limit, families=families, eos_token_ids=tokenizer.eos_token_ids, fault=fault
    )
    block_bytes = sum(row_bytes(family, 8) for family in runtime.description.families)
    made = assemble(
        runtime,
        tokenizer,
        CacheConfig(block_size=8, budget_bytes=blocks * block_bytes, enabled=reuse),
        engine,
        tier,
    )
    if isinstance(fault, Held):
        fault.engine = made.engine
    server = server or ServerConfig(aliases=())
    app = create_app(replace(made, defaults=defaults or SamplingDefaults()), server, drain, tracing=tracing)
    with (
        made.engine,
        running(app, made.engine, limits=limits) as url,
        httpx.Client(base_url=url, timeout=HANG_S) as client,
    ):
        yield Served(url, client, made, runtime, app)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with served_by_oracle() as one:
        yield one
        one.settled()


@pytest.fixture
def keyed(tmp_path: Path) -> Callable[..., contextlib.AbstractContextManager[Served]]:
    """Serves with a file of keys, `tmp_path / "keys"`, of this text."""

    def serve(
        text: str,
        engine: EngineConfig | None = None,
        fault: Callable[[Batch], None] | None = None,
        **server: Any,
    ) -> contextlib.AbstractContextManager[Served]:
        (tmp_path / "keys").write_text(text)
        config = ServerConfig(api_keys=tmp_path / "keys", **server)
        return served_by_oracle(engine, config, fault=fault)

    return serve


@pytest.fixture
def serve() -> Callable[..., contextlib.AbstractContextManager[Served]]:
    return served_by_oracle
