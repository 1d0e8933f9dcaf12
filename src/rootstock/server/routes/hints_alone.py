"""Hints without a request: the body of a request, whose prompt is not answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, ValidationError

from rootstock.cache.retention.hint_types import CacheHints, HintOutcome, Verdict
from rootstock.errors import IdleWorkFull, IdleWorkOff, RateLimited
from rootstock.pipeline.model import ServedModel
from rootstock.server.access.rate_limits import Meter
from rootstock.server.answers.prompt_bodies import PreparedPrompt, PromptOfApi
from rootstock.server.http.errors import wrong_body
from rootstock.server.routes.warming import begin_warming
from rootstock.server.wire.api_call import Json
from rootstock.server.wire.fields import JsonObject
from rootstock.server.wire.hints.fields import HintFields
from rootstock.server.wire.hints.sent import HINT_FIELDS, Prefetch, read_hints
from rootstock.server.wire.sender import Sender
from rootstock.text.prompts.tenant_salt import PromptOwner


class HintedPrompt(PromptOfApi):
    """The name of an API, a body that its route answers, and `kv_hints`, which may also stand in the body."""

    kv_hints: Annotated[JsonObject | None, Field(description="the envelope of actions")] = None

    @property
    def whole_body(self) -> Json:
        return self.body if self.kv_hints is None else {**self.body, "kv_hints": self.kv_hints}


def hint_fields(body: Mapping[str, Any]) -> HintFields:
    """Reads the fields of a body with hints. Raises InvalidParameter and MissingParameter."""
    fields = {name: body[name] for name in HINT_FIELDS & body.keys()}
    try:
        return HintFields.model_validate(fields)
    except ValidationError as error:
        placed = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        raise wrong_body(placed, fields) from None


def follow_hints(
    model: ServedModel,
    prompt: PreparedPrompt,
    fields: HintFields,
    sender: Sender,
    meter: Meter | None,
    *,
    may_pin: bool,
) -> Json:
    """Applies hints to the cached part of a prompt, queues its prefetch, and returns the decisions. It waits for the
    engine: do not call it on an event loop."""
    sent = read_hints(fields, sender.head, PromptOwner(sender.tenant, prompt.salt), prompt.marks)
    cache, outcomes = sent.cache, list[HintOutcome]()
    if cache is not None:
        hints = replace(cache, may_pin=may_pin)
        outcomes += model.engine.apply_hints(prompt.tokens, hints, prompt.namespace(model.engine))
    if sent.prefetches:
        reason = _prefetch(model, prompt, sent.prefetches, cache, sender, meter)
        verdict = Verdict.REFUSED if reason else Verdict.ACCEPTED
        outcomes += [HintOutcome(each.field, verdict, reason) for each in sent.prefetches]
    return {"rootstock": {"hints": []}} | sent.told_of(outcomes)


def _prefetch(
    model: ServedModel,
    prompt: PreparedPrompt,
    asked: tuple[Prefetch, ...],
    hints: CacheHints | None,
    sender: Sender,
    meter: Meter | None,
) -> str:
    """Queues the longest prefetch, which contains the others. Returns the reason if it is refused, or else ""."""
    end = max(len(prompt.tokens) if each.end is None else each.end for each in asked)
    part = replace(
        prompt,
        tokens=prompt.tokens[:end],
        boundaries=tuple(each for each in prompt.boundaries if each.position <= end),
    )
    kept = None if hints is None else CacheHints(hints.tenant, retentions=hints.retentions)
    try:
        begin_warming(model, part, sender.tenant or prompt.salt, hints=kept, meter=meter)
    except (IdleWorkOff, IdleWorkFull, RateLimited) as error:
        return error.message
    return ""
