"""Routes under /v1/cache: its state, the explanation of a prompt's hit, and clearing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from fastapi import APIRouter, Request

from rootstock.cache.explain import Explanation
from rootstock.cache.types import Tokens
from rootstock.config import ServerConfig
from rootstock.engine.engine import Engine
from rootstock.engine.prompts.explained import explained_in_words, text_before
from rootstock.engine.prompts.salt import salt_of
from rootstock.engine.tokenizer import ModelTokenizer, token_text
from rootstock.server.access import Tenant, caller_of, is_operator, refuse_unless
from rootstock.server.errors import MODEL_ROUTE, documented_errors
from rootstock.server.openai.calls import explained_prompt
from rootstock.server.openai.schema import ClearRequest, ExplainRequest
from rootstock.server.request_bodies import BoundedJsonRoute, PreparationQueue
from rootstock.server.wire import ServedModel


def cache_routes(
    engine: Engine, model: ServedModel, config: ServerConfig, queue: PreparationQueue
) -> APIRouter:
    router = APIRouter(
        prefix="/v1/cache", tags=["Cache"], route_class=BoundedJsonRoute, responses=documented_errors()
    )

    # A plain function runs on another thread: it waits for the engine's.
    @router.get("/stats")
    def stats(request: Request) -> dict[str, Any]:
        """Counts hits, misses, blocks and bytes."""
        refuse_unless(is_operator(request), config)
        found = engine.stats()
        derived = {"resident_bytes": found.cache.resident_bytes, "hit_rate": found.cache.hit_rate}
        told: dict[str, Any] = _as_json(found)
        told["cache"] |= derived
        return told

    @router.post("/explain", responses=documented_errors(*MODEL_ROUTE))
    async def explain(body: ExplainRequest, request: Request, tenant: Tenant) -> dict[str, Any]:
        """Explains how much of a prompt is cached, and why not more."""
        refuse_unless(config.admin_key is None or caller_of(request).has_admin_key, config)
        salt = salt_of(tenant, body.cache_salt)

        def explained() -> dict[str, Any]:
            tokens, dropped = explained_prompt(model, body, salt)
            explanation = engine.explain(tokens, salt)
            if config.explain == "own":
                explanation = explanation.of_the_prompt()
            told = _explained(explanation, tokens, model.model_tokenizer)
            told["message"] = " ".join([told["message"], *map(str, dropped)])
            return told | {"dropped": [asdict(head) for head in dropped]}

        return await queue.run(request, explained)

    @router.post("/clear", responses=documented_errors(415, 429))
    def clear(request: Request, tenant: Tenant, body: ClearRequest | None = None) -> dict[str, Any]:
        """Removes cached prefixes: those of one salt, or all."""
        salt = salt_of(tenant, None if body is None else body.cache_salt)
        if not salt:
            refuse_unless(is_operator(request), config)
        model.tokenizer.forget(salt or None)
        return asdict(engine.clear_cache(salt) if salt else engine.clear_cache())

    return router


def _as_json(value: Any) -> Any:
    """Turns dataclasses into objects. `asdict` would count the items of a Counter again."""
    if is_dataclass(value):
        return {field.name: _as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, list | tuple) else value


def _explained(explanation: Explanation, tokens: Tokens, tokenizer: ModelTokenizer) -> dict[str, Any]:
    """Returns the JSON of an explanation, with the text of its tokens."""
    at = explanation.divergence
    divergence = None
    if at is not None:

        def shown(token: int) -> dict[str, Any]:
            return {"token": token, "text": token_text(tokenizer, token)}

        others = explanation.cached_tokens_there
        divergence = {
            "position": at,
            "before": text_before(tokens, at, tokenizer),
            "asked": shown(int(tokens[at])),
            "cached": None if others is None else [shown(token) for token in others],
        }
    return {
        "prompt_tokens": explanation.prompt_tokens,
        "matched_tokens": explanation.matched_tokens,
        "found_tokens": explanation.found_tokens,
        "cap": explanation.cap,
        "capped_by": explanation.capped_by,
        "message": explained_in_words(explanation, tokens, tokenizer),
        "divergence": divergence,
        "evicted_tokens": explanation.evicted_tokens,
        "pending_tokens": explanation.pending_tokens,
        "below": None if explanation.below is None else asdict(explanation.below),
    }
