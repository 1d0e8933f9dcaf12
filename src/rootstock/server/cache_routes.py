"""Routes under /v1/cache: its state, the explanation of a prompt's hit, and clearing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from fastapi import APIRouter, Request

from rootstock.cache.types import Tokens
from rootstock.cache.volatile import VolatileSpan
from rootstock.config import ServerConfig
from rootstock.engine.prompts.explained import volatile_in_words
from rootstock.engine.prompts.salt import salt_of
from rootstock.engine.stats import Cleared
from rootstock.engine.tokenizer import ModelTokenizer
from rootstock.errors import InvalidParameter, RequestError
from rootstock.server.access import Tenant, is_operator, may_read_prompts, refuse_unless
from rootstock.server.errors import MODEL_ROUTE, documented_errors
from rootstock.server.explainer import Explainer
from rootstock.server.models import ModelRegistry
from rootstock.server.openai.calls import explained_prompt
from rootstock.server.openai.schema import ClearRequest, ExplainRequest
from rootstock.server.request_bodies import BoundedJsonRoute
from rootstock.server.wire import ServedModel

VOLATILE_CONTEXT_CHARS = 80  # of the text before and after a volatile span
VOLATILE_EXAMPLE_CHARS = 200


def cache_routes(models: ModelRegistry, config: ServerConfig, explainer: Explainer) -> APIRouter:
    router = APIRouter(
        prefix="/v1/cache", tags=["Cache"], route_class=BoundedJsonRoute, responses=documented_errors()
    )

    # A plain function runs on another thread: it waits for the engine's.
    @router.get("/stats")
    def stats(request: Request, model: str | None = None) -> dict[str, Any]:
        """Counts hits, misses, blocks and bytes of a model, or by model where the server has several."""
        refuse_unless(is_operator(request), config)
        if model is None and models.are_several:
            return {
                "budget": models.budget_numbers(),
                "models": {one.name: _stats_of(one) for one in models.loaded},
            }
        return _stats_of(models.find(model))

    @router.get("/volatile", responses=documented_errors(401, 403))
    def volatile(
        request: Request, tenant: Tenant, cache_salt: str | None = None, model: str | None = None
    ) -> dict[str, Any]:
        """Lists the spans of prompts that differ between requests which agree before and after them."""
        salt = salt_of(tenant, cache_salt)
        if not salt:
            refuse_unless(is_operator(request), config)
        spans = [
            (one, span)
            for one in models.chosen(model, request)
            for span in one.engine.volatile_spans(salt or None)
        ]
        spans.sort(key=lambda pair: -pair[1].recomputed_tokens)
        shows_texts = may_read_prompts(request, config)
        return {
            "texts": "of your own prompts"
            if shows_texts
            else "withheld: the option --explain all shows them",
            "spans": [
                _volatile(span, shows_texts and span.namespace.salt == salt, one.model_tokenizer)
                | ({"model": one.name} if models.are_several else {})
                for one, span in spans
            ],
        }

    @router.post("/explain/chat/completions", responses=documented_errors(*MODEL_ROUTE))
    @router.post("/explain/completions", responses=documented_errors(*MODEL_ROUTE))
    @router.post("/explain", responses=documented_errors(*MODEL_ROUTE))
    async def explain(body: ExplainRequest, request: Request, tenant: Tenant) -> dict[str, Any]:
        """Explains how much of a prompt is cached, and why not more."""
        try:
            return await explainer.explain(
                body.model, request, lambda model: explained_prompt(model, body, tenant)
            )
        except RequestError as error:
            if error.param == "prompt" and body.messages is not None:  # the engine's name for `messages`
                error.param = "messages"
            raise

    @router.post("/clear", responses=documented_errors(415, 429))
    def clear(request: Request, tenant: Tenant, body: ClearRequest | None = None) -> dict[str, Any]:
        """Removes cached prefixes: those of one salt, public heads, or all; of one model, or of all."""
        salt = salt_of(tenant, None if body is None else body.cache_salt)
        if not salt:
            refuse_unless(is_operator(request), config)
        cleared = Cleared(0, 0)
        chosen = models.chosen(None if body is None else body.model, request)
        if body is not None and body.public:
            refuse_unless(is_operator(request), config)
            if body.cache_salt is not None:
                raise InvalidParameter("cache_salt", body.cache_salt, "left out with 'public'")
            for model in chosen:
                cleared += model.engine.clear_public_heads()
            return asdict(cleared)
        for model in chosen:
            model.tokenizer.forget(salt or None)
            model.fingerprints.forget(salt or None)
            cleared += model.engine.clear_cache(salt or None)
        return asdict(cleared)

    return router


def _stats_of(model: ServedModel) -> dict[str, Any]:
    found = model.engine.stats()
    derived = {"resident_bytes": found.cache.resident_bytes, "hit_rate": found.cache.hit_rate}
    told: dict[str, Any] = _as_json(found)
    told["cache"] |= derived
    return told


def _volatile(span: VolatileSpan, shows_text: bool, tokenizer: ModelTokenizer) -> dict[str, Any]:
    """Returns the JSON of a span, with the texts of the prompts if the sender may see them."""

    def text(tokens: Tokens) -> str:
        return tokenizer.decode(tokens.tolist())

    return {
        "position": span.position,
        "tokens": span.longest,
        "count": span.count,
        "recomputed_tokens": span.recomputed_tokens,
        "last_seen_s_ago": round(max(0.0, time.monotonic() - span.last_seen), 3),
        "before": text(span.before)[-VOLATILE_CONTEXT_CHARS:] if shows_text else None,
        "examples": [text(example)[:VOLATILE_EXAMPLE_CHARS] for example in span.examples]
        if shows_text
        else None,
        "after": text(span.after)[:VOLATILE_CONTEXT_CHARS] if shows_text else None,
        "hint": volatile_in_words(span),
    }


def _as_json(value: Any) -> Any:
    """Turns dataclasses into objects. `asdict` would count the items of a Counter again."""
    if is_dataclass(value):
        return {field.name: _as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, list | tuple) else value
