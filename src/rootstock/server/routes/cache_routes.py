"""Routes under /v1/cache that show the cache's state and clear it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from rootstock.cache.retention.working_set import SessionReport
from rootstock.cache.types import Tokens
from rootstock.cache.volatile import VolatileSpan
from rootstock.config import ServerConfig
from rootstock.engine.clearing import Clearing
from rootstock.engine.stats import Cleared
from rootstock.errors import InvalidParameter, RootstockError
from rootstock.pipeline.model import ServedModel
from rootstock.server.access.guard import SentBy, is_operator, may_read_prompts, may_use_model, refuse_unless
from rootstock.server.http.errors import documented_errors, error_body, error_response
from rootstock.server.http.request_bodies import StateRoute
from rootstock.server.models.model_slots import ModelSlot, ModelSlots
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.routes.pin_routes import owner_of_pins
from rootstock.server.wire.fields import ClosedWire, default_if_null
from rootstock.text.prompts.explained import volatile_in_words
from rootstock.text.tokenizer import ModelTokenizer

MAX_LISTED_SESSIONS = 1000
VOLATILE_CONTEXT_CHARS = 80  # of the text before and after a volatile span
VOLATILE_EXAMPLE_CHARS = 200


class ClearRequest(ClosedWire):
    """The salt, or the public heads, the model and the tiers whose prefixes are removed."""

    cache_salt: str | None = None
    public: Annotated[bool, default_if_null(False)] = False  # the heads of --public-prompts
    model: str | None = None
    tiers: Annotated[
        list[Literal["memory", "disk"]] | None, Field(max_length=2, description="all, if it is left out")
    ] = None


def cache_routes(models: ModelRegistry, config: ServerConfig) -> APIRouter:
    router = APIRouter(
        prefix="/v1/cache", tags=["Cache"], route_class=StateRoute, responses=documented_errors()
    )

    # A plain function runs on another thread: it waits for the engine's.
    @router.get("/stats")
    def stats(request: Request, model: str | None = None) -> dict[str, Any]:
        """Counts hits, misses, blocks and bytes of a model, or by model where the server has several."""
        refuse_unless(is_operator(request), config)
        if model is None and models.are_several:
            return {
                "budget": models.budget_numbers(),
                "models": {one.name: told for one, told in models.ask_loaded(_stats_of)},
            }
        return models.ask_one(model, _stats_of)[1]

    @router.get("/volatile", responses=documented_errors(401, 403))
    def volatile(
        request: Request, sender: SentBy, cache_salt: str | None = None, model: str | None = None
    ) -> dict[str, Any]:
        """Lists the spans of prompts that differ between requests which agree before and after them."""
        salt = sender.owner(cache_salt).salt
        if not salt:
            refuse_unless(is_operator(request), config)
        spans = [
            (one, span)
            for one, found in models.ask(
                model, request, lambda asked: asked.engine.volatile_spans(salt or None)
            )
            for span in found
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

    @router.get("/sessions", responses=documented_errors(401, 403))
    def sessions(
        request: Request,
        sender: SentBy,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED_SESSIONS)] = MAX_LISTED_SESSIONS,
    ) -> dict[str, Any]:
        """Lists the sessions of the tenant, those with held requests first, then the latest.

        The operator sees the sessions of all tenants.
        """
        owner = owner_of_pins(request, sender, config)
        listed = [
            (one, session)
            for one, found in models.ask_loaded(lambda model: model.engine.sessions(owner, limit))
            for session in found
        ]
        listed.sort(key=lambda each: (not each[1].held, each[1].idle_s))
        return {
            "sessions": [
                _session(session) | ({"model": one.name} if models.are_several else {})
                for one, session in listed[:limit]
            ]
        }

    @router.post("/clear", responses=documented_errors(404, 409, 415, 429))
    def clear(request: Request, sender: SentBy, body: ClearRequest | None = None) -> Response:
        """Removes cached prefixes: of one salt, public heads, or all; of one model or all; of one tier or all."""
        asked = body or ClearRequest()
        salt = sender.owner(asked.cache_salt).salt
        if not salt or asked.public:
            refuse_unless(is_operator(request), config)
        if asked.public and asked.cache_salt is not None:
            raise InvalidParameter("cache_salt", asked.cache_salt, "left out with 'public'")
        if asked.tiers == []:
            raise InvalidParameter("tiers", asked.tiers, "a list of 'memory', 'disk' or both")
        clearing = Clearing(
            None if asked.public else salt or None,
            asked.public,
            memory=asked.tiers is None or "memory" in asked.tiers,
            disk=asked.tiers is None or "disk" in asked.tiers,
        )
        chosen = models.slots_of(asked.model, request)
        shown = {slot.name for slot in chosen if asked.model or may_use_model(request, slot.name)}
        return _cleared(models.slots, chosen, clearing, shown)

    return router


def _cleared(
    slots: ModelSlots, chosen: Sequence[ModelSlot], clearing: Clearing, shown: Collection[str]
) -> Response:
    """Clears models and answers with the cleared counts of the models in `shown`.

    A model is cleared even if others fail. The first failure is the error of the answer.
    """
    whole, told = Cleared(0, 0), list[dict[str, Any]]()
    failure: RootstockError | None = None
    one: dict[str, Any]
    for slot in chosen:
        try:
            cleared = slots.clear(slot, clearing)
        except RootstockError as error:
            failure = failure or error
            one = {"state": "failed", "message": error.message}
        else:
            whole += cleared
            one = {"state": "later" if cleared.later else "cleared", **asdict(cleared)}
        if slot.name in shown:
            told.append({"model": slot.name, **one})
    if failure is None:
        return JSONResponse(asdict(whole) | {"models": told})
    return error_response(failure, lambda error: error_body(error) | {"models": told})


def _session(session: SessionReport) -> dict[str, Any]:
    state = "idle"
    if session.held:
        state = "held"
    elif session.running:
        state = "running"
    elif session.is_expected:
        state = "expected"
    elif session.is_active:
        state = "active"
    return {
        "session": session.name,
        "tenant": session.tenant,
        "state": state,
        "running": session.running,
        "held": session.held,
        "idle_s": round(session.idle_s, 3),
        "expected_pause_s": round(session.expected_pause_s, 3),
        "bytes": session.size_bytes,
        "requests": session.requests,
        "prompt_tokens": session.prompt_tokens,
        "cached_tokens": session.hit_tokens,
        "hit_rate": round(session.hit_rate, 4),
        "held_s": round(session.held_s, 3),
        "queued_s": round(session.queued_s, 3),
        "lost_tokens": session.lost_tokens,
        "lost_s": round(session.lost_s, 3),
        "draft_tokens": session.draft_tokens,
        "accepted_draft_tokens": session.accepted_draft_tokens,
    }


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
