"""A trial of a model by all that a server needs: its files, a load, and one answer by the server's own routes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import numpy as np

from rootstock.cli.output import LoadProgress
from rootstock.config import Configuration, ServerConfig
from rootstock.engine.build import Assembly, build_engine
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.errors import ModelUnsupported, shown
from rootstock.runtime.embedding_files import is_embedding_model
from rootstock.runtime.select import leave_out_torch, load_embedder, locate_model
from rootstock.units import in_units

_MOST_TOKENS = 16  # of the answer
_TEXT = "Hello"


def try_model(config: Configuration) -> list[tuple[str, str]]:
    """Load a model as a server does, ask it once, and return rows of names and values that describe it.

    Raises StartupError."""
    from rootstock.server.models.model_card import table_of, table_of_embedder

    model, server = replace(config.model, recheck=True), config.server
    with LoadProgress() as progress:
        directory = locate_model(model, progress)
        if is_embedding_model(directory):
            embedder = load_embedder(model, directory)
            embedding = embedder.embed([embedder.tokens_of(_TEXT)])
            if not np.isfinite(embedding).all():
                raise ModelUnsupported(model.model, "an embedding has numbers that are not finite")
            return table_of_embedder(embedder.description)
        leave_out_torch((model,))
        defaults = SamplingDefaults.of_model(model.model, directory)
        made = build_engine(
            model,
            config.cache,
            config.engine,
            chat_template=server.chat_template,
            progress=progress,
            directory=directory,
        )
        answer = _answered(model.model, replace(made, defaults=defaults), server)
    fits = f"{min(made.pool_tokens, made.description.context_limit):,} tokens"
    pool = f"a pool of {in_units(made.pool_bytes)} has {made.pool_tokens:,}"
    rows = table_of(made.description, config.cache.block_size)
    return [*rows, ("longest", f"{fits}: {pool}"), ("answers", answer)]


def _answered(model: str, made: Assembly, server: ServerConfig) -> str:
    """Return the answer to one request, in words. Raises ModelUnsupported if there is none."""
    from rootstock.server.app import create_app

    web = create_app(made, server)
    asked: dict[str, Any] = {"max_tokens": _MOST_TOKENS}
    if made.serves_chat:
        kind, path = "chat", "/v1/chat/completions"
        asked["messages"] = [{"role": "user", "content": _TEXT}]
    else:
        kind, path = "completion", "/v1/completions"
        asked["prompt"] = _TEXT

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=web, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=None
        ) as client:
            return await client.post(path, json={"model": made.description.name, **asked})

    with made.engine:
        response = asyncio.run(ask())
    body = response.json()
    if response.status_code != httpx.codes.OK:
        raise ModelUnsupported(
            model, f"it was loaded, but a {kind} fails: {body['error']['message'].rstrip('.')}"
        )
    [choice] = body["choices"]
    usage = body["usage"]
    text = choice["message"].get("content") or "" if made.serves_chat else choice["text"]
    without = "" if made.serves_chat else ", for there is no chat template"
    counts = f"{usage['prompt_tokens']:,} tokens with {usage['completion_tokens']:,}"
    return f"a {kind} of {counts}: {shown(text)}{without}"
