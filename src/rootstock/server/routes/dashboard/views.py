"""The data of the dashboard as JSON: the part of an engine's state that one sender may see."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from fastapi import Request

from rootstock.cache.keys import Namespace
from rootstock.cache.stats import PoolUsage
from rootstock.cache.tree_snapshot import NodeDetail
from rootstock.cache.types import NO_TOKENS, Tokens
from rootstock.cache.volatile import VolatileSpan
from rootstock.config import ServerConfig
from rootstock.engine.activity import Activity, LiveRequest, Outcome, PromptMiss
from rootstock.engine.stats import Health
from rootstock.engine.tiers.connector import TierStats
from rootstock.server.access.guard import allowed_models, is_operator, may_read_prompts
from rootstock.server.access.rules import AccessRules
from rootstock.server.models.model_slots import ModelSlot, UnloadedSlot
from rootstock.server.models.registry import ModelRegistry, adapters_of
from rootstock.server.wire.api_call import Json
from rootstock.server.wire.sender import Sender
from rootstock.text.prompts.explained import volatile_in_words
from rootstock.text.prompts.tenant_salt import salt_of
from rootstock.text.tokenizer import ModelTokenizer, token_text

WINDOWS_S = (60, 300, 900)
MAX_REQUESTS = 100  # of the live ones that a page shows; the first come first
MAX_SHOWN_TOKENS = 256  # of a node: half of them from its end
MAX_SHOWN_CHARS = 2_000
MAX_SPANS = 20


@dataclass(frozen=True, slots=True)
class View:
    """The part of an engine's state that one sender may see. Equal views are shown the same."""

    salts: frozenset[str] | None  # None: of all
    reads_prompts: bool  # may see token ids, and texts where the option shows them
    models: frozenset[str] | None = None  # names that requests may ask for; None: all

    def shows(self, salt: str) -> bool:
        return self.salts is None or salt in self.salts

    @property
    def is_all(self) -> bool:
        return self.salts is None

    def may_use(self, name: str) -> bool:
        return self.models is None or name in self.models

    def slots(self, models: ModelRegistry) -> list[ModelSlot]:
        """Returns the models that requests of the sender can have, by their own name, an alias or an adapter."""
        if self.models is None:
            return list(models.slots.all)
        usable = {models.slot(name).name for name in models.names if name in self.models}
        return [slot for slot in models.slots.all if slot.name in usable]

    @staticmethod
    def of(request: Request, sender: Sender, config: ServerConfig) -> View:
        """Returns the view of a sender: all for the operator, else the tenant's own.

        A client that is bound to no tenant and is not the operator shares its prefixes with others like it: it sees
        none. If it names a tenant by the header, it sees sizes and times.
        """
        if is_operator(request):
            return View(None, reads_prompts=True, models=allowed_models(request))
        salts = frozenset({sender.salt} if sender.tenant else ())
        return View(salts, may_read_prompts(request, config), allowed_models(request))


class Names:
    """The names of salts: the tenant's name for the operator's tenants, and a part of the hash for others."""

    def __init__(self, config: ServerConfig) -> None:
        self._of_options = frozenset(config.tenant_keys.values())
        self._names: dict[str, str] = {}
        self.use(AccessRules())

    def use(self, rules: AccessRules) -> None:
        """Takes the tenants of a file of keys beside the tenants of the options. Any thread may call it."""
        of_keys = (rule.tenant for rule in rules.keys.values())
        tenants = self._of_options.union(of_keys, rules.tenants) - {""}
        self._names = {salt_of(tenant, None): tenant for tenant in tenants}

    def of(self, salt: str) -> str:
        if not salt:
            return ""
        return self._names.get(salt, f"salt {salt.rpartition(':')[2][:8]}")

    def tenant(self, salt: str) -> str | None:
        """Returns the tenant with this salt, "" for the salt of none; None: it is not known."""
        return self._names.get(salt) if salt else ""


class Texts:
    """The tokens of prompts as the dashboard shows them: ids, and text where the server's option allows it."""

    def __init__(self, tokenizer: ModelTokenizer, show_prompts: bool) -> None:
        self._tokenizer = tokenizer
        self.show_prompts = show_prompts

    def whole(self, tokens: Tokens) -> str | None:
        return self._tokenizer.decode(tokens.tolist())[:MAX_SHOWN_CHARS] if self.show_prompts else None

    def pieces(self, tokens: Iterable[int]) -> list[Json]:
        """Returns each token with its own text."""
        return [
            {"id": token, "text": token_text(self._tokenizer, token) if self.show_prompts else None}
            for token in map(int, tokens)
        ]


def namespace_json(namespace: Namespace, names: Names) -> Json:
    tenant = "public head" if namespace.is_public else names.of(namespace.salt)
    return {"tenant": tenant, "adapter": namespace.adapter}


def models_json(models: ModelRegistry, view: View) -> list[Json]:
    """Returns the models of a server with their states and adapters, also those that are not loaded."""
    return [
        {
            "name": slot.name,
            "status": slot.status,
            "task": slot.task,  # None: not known before its first load
            "adapters": [name for name in adapters_of(slot) if view.may_use(name)],
            "error": state.error.code
            if isinstance(state := slot.state, UnloadedSlot) and state.error
            else None,
            "may_unload": slot.config is not None,
        }
        for slot in view.slots(models)
    ]


def health_json(health: Health) -> Json:
    return {"alive": health.alive, "detail": health.detail}


def pool_json(usage: PoolUsage, tier: TierStats | None) -> Json:
    """Returns the memory of the pools by family, and of the tiers below them."""
    families = [
        {
            "name": family.name,
            "live": family.live_rows * family.row_bytes,
            "cached": family.cached_rows * family.row_bytes,
        }
        for family in usage.families
    ]
    told: Json = {
        "budget": usage.budget_bytes,
        "used": usage.used_bytes,
        "families": families,
        "hit_tokens": usage.hit_tokens,
        "inside_block_tokens": usage.inside_block_tokens,
    }
    if tier is not None:
        told["tiers"] = [
            {"name": name, "used": used, "foreign": foreign, "cap": cap}
            for name, used, foreign, cap in (
                ("host memory", tier.host_used_bytes, 0, tier.host_cap_bytes),
                ("disk", tier.used_bytes, tier.foreign_bytes, tier.cap_bytes),
            )
            if cap
        ]
        told["tier"] = {
            "state": tier.state,
            "storing": tier.waiting_store_bytes,
            "loading": tier.loading,
        }
    return told


def rates_json(activity: Activity, view: View) -> Json:
    """Returns tokens of prompts by source: for each window, and for each span of the history."""
    windows = {str(s): activity.hits(s, view.salts) for s in WINDOWS_S}
    return {
        "windows": {name: asdict(hits) for name, hits in windows.items()},
        "history": [
            [hits.memory, hits.host, hits.disk, hits.computed] if hits.requests else []
            for hits in activity.history(view.salts)
        ],
    }


def requests_json(
    live: Iterable[LiveRequest], ended: Iterable[LiveRequest], view: View, names: Names
) -> dict[str, Json]:
    """Returns the open requests, the first ones first, and those that ended lately, by id."""
    shown = [request for request in live if view.shows(request.salt)]
    found = {request.id: request for request in ended if view.shows(request.salt)}
    found.update((request.id, request) for request in shown[:MAX_REQUESTS])
    return {str(id): _request(request, names) for id, request in found.items()}


def _request(request: LiveRequest, names: Names) -> Json:
    return {
        "tenant": names.of(request.salt),
        "spans": [
            [span.phase.value, round(span.began, 3), None if span.ended is None else round(span.ended, 3)]
            for span in request.spans
        ],
        "open": request.outcome is Outcome.OPEN,
        "outcome": request.outcome.value,
        "prompt": request.prompt_tokens,
        "cached": request.cached_tokens,
        "computed": request.computed_tokens,
        "completion": request.completion_tokens,
        "max": request.max_tokens,
        "preempted": request.is_preempted,
    }


def misses_json(misses: Iterable[PromptMiss], view: View, names: Names, texts: Texts) -> dict[str, Json]:
    return {str(miss.id): _miss(miss, view, names, texts) for miss in misses if view.shows(miss.salt)}


def _miss(miss: PromptMiss, view: View, names: Names, texts: Texts) -> Json:
    told = miss.diagnosis
    volatile = told.volatile if view.reads_prompts else None

    def pieces(tokens: Iterable[int]) -> list[Json]:
        return texts.pieces(tokens) if view.reads_prompts else []

    return {
        "tenant": names.of(miss.salt),
        "at": round(miss.at, 3),
        "cause": told.cause,
        # The full message has token ids of the prompt, and of cached prefixes at its divergence.
        "message": told.message
        if view.reads_prompts
        else f"{told.cached_tokens:,} of {told.prompt_tokens:,} tokens were found.",
        "prompt": told.prompt_tokens,
        "cached": told.cached_tokens,
        "missed": told.missed_tokens,
        "position": told.position,
        "withheld": not view.reads_prompts,
        "before": pieces(miss.before),
        "asked": pieces(miss.asked),
        "others": pieces(miss.cached),
        "volatile": None
        if volatile is None
        else {
            "asked": pieces(volatile.asked),
            "cached": pieces(volatile.cached),
            "agreed": volatile.agreed,
        },
    }


def volatile_json(spans: Iterable[VolatileSpan], view: View, names: Names, texts: Texts) -> list[Json]:
    shown = [span for span in spans if view.shows(span.namespace.salt)][:MAX_SPANS]

    def whole(tokens: Tokens) -> str | None:
        return texts.whole(tokens) if view.reads_prompts else None

    return [
        {
            "tenant": names.of(span.namespace.salt),
            "position": span.position,
            "count": span.count,
            "recomputed": span.recomputed_tokens,
            "before": whole(span.before),
            "examples": [whole(example) for example in span.examples],
            "hint": volatile_in_words(span),
        }
        for span in shown
    ]


def node_json(detail: NodeDetail, view: View, names: Names, texts: Texts) -> Json:
    tokens, half = detail.tokens if view.reads_prompts else NO_TOKENS, MAX_SHOWN_TOKENS // 2
    is_cut = len(tokens) > MAX_SHOWN_TOKENS
    head, tail = (tokens[:half], tokens[-half:]) if is_cut else (tokens, tokens[:0])
    return {
        "number": detail.number,
        **namespace_json(detail.namespace, names),
        "start": detail.start,
        "end": detail.end,
        "bytes": detail.bytes,
        "hits": detail.hits,
        "idle_s": round(detail.idle_s, 1),
        "leases": detail.leases,
        "children": detail.children,
        "withheld": not view.reads_prompts,
        "head": head.tolist(),
        "tail": tail.tolist(),
        "text": texts.whole(head) if view.reads_prompts else None,
        "tail_text": texts.whole(tail) if view.reads_prompts else None,
        "checkpoints": [asdict(each) for each in detail.checkpoints],
    }
