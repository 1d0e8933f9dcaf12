"""Hints of clients to the cache, in the dialects of Anthropic, OpenAI, Dynamo, vLLM and SGLang.

Each route takes all of them. Of several hints about one thing the first in this order counts, and the others are
refused:

    session    nvext.session_control, nvext.agent_context, agent_hint, headers of requests, prompt_cache_key
    time       nvext.cache_control, agent_hint.cache_control, nvext.session_control.timeout,
               prompt_cache_options.ttl, prompt_cache_retention
    priority   X-Dynamo-Request-Priority, nvext.agent_hints.priority, priority

Marks and the actions of `kv_hints` tell about prefixes of the prompt, and all of them count. A hint that the
server does not follow is refused in the answer, and never as an error: no request fails because of a wish.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rootstock.cache.retention.hint_types import (
    GREATEST_PRIORITY,
    LEAST_PRIORITY,
    MAX_TTL_S,
    ActKind,
    CacheHints,
    HintOutcome,
    PrefixAct,
    RetentionWish,
    Verdict,
)
from rootstock.engine.request import Finished, TokenEvent
from rootstock.errors import InvalidParameter, Unsupported
from rootstock.server.wire.fields import Wire
from rootstock.server.wire.hints.directives import MAX_DIRECTIVES, Directive, directives_of
from rootstock.server.wire.hints.fields import HintFields, NvExt
from rootstock.server.wire.hints.headers import FINAL, PRIORITY, STRICT_PRIORITY, HeaderHints
from rootstock.text.conversation.marks import duration_s
from rootstock.text.conversation.types import IgnoredField
from rootstock.text.limits import MAX_MARKS, MAX_NAME_CHARS
from rootstock.text.prompts.prompt_tokenizer import PlacedMark
from rootstock.text.prompts.tenant_salt import PromptOwner, is_chosen_by_client

Json = dict[str, Any]

_TOLD_UNKNOWN_FIELDS = 8
_OPENAI_TTL_S = 1800.0  # of a breakpoint without a time
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A wish to cache a prompt, or its first tokens, before a request needs it."""

    field: str
    end: int | None = None


@dataclass(frozen=True, slots=True)
class SentHints:
    """The hints of one HTTP request, for the cache or decided without it, and warnings about its other fields."""

    cache: CacheHints | None = None
    decided: tuple[HintOutcome, ...] = ()
    hour_marks: tuple[RetentionWish, ...] = ()  # marks with a time of an hour or more
    warnings: tuple[IgnoredField, ...] = ()
    prefetches: tuple[Prefetch, ...] = ()

    def told(self, events: Iterable[TokenEvent | Finished]) -> Json:
        """Returns the field of an answer with the decisions and the warnings, or an empty object without any.

        For several choices, the field has the most severe decision about each hint.
        """
        return self.told_of(outcome for event in events for outcome in event.hints)

    def told_of(self, outcomes: Iterable[HintOutcome]) -> Json:
        """Returns the same for the cache's decisions, in the order of the events that have them."""
        found: dict[str, HintOutcome] = {}
        for outcome in (*self.decided, *outcomes):
            _note(found, outcome)
        told: Json = {}
        if found:
            told["hints"] = list(map(_outcome_body, found.values()))
        if self.warnings:
            told["warnings"] = [{"field": one.field, "reason": one.reason} for one in self.warnings]
        return {"rootstock": told} if told else {}

    def kept_an_hour(self, outcomes: Iterable[HintOutcome]) -> int:
        """Returns the length of the longest marked prefix that the cache keeps for an hour or more, in tokens."""
        accepted = {one.field for one in outcomes if one.verdict is Verdict.ACCEPTED}
        return max((mark.end or 0 for mark in self.hour_marks if mark.field in accepted), default=0)


NO_HINTS = SentHints()
HINT_FIELDS = frozenset(HintFields.model_fields)
_SEVERITY = (Verdict.ACCEPTED, Verdict.CLIPPED, Verdict.REFUSED)


def _note(found: dict[str, HintOutcome], outcome: HintOutcome) -> None:
    earlier = found.get(outcome.field)
    if earlier is None or _SEVERITY.index(earlier.verdict) < _SEVERITY.index(outcome.verdict):
        found[outcome.field] = outcome


def _outcome_body(outcome: HintOutcome) -> Json:
    body: Json = {"field": outcome.field, "verdict": outcome.verdict.value}
    return body | {"reason": outcome.reason} if outcome.reason else body


def sent_hints(
    body: HintFields,
    headers: HeaderHints,
    owner: PromptOwner,
    marks: Sequence[PlacedMark] = (),
    warnings: tuple[IgnoredField, ...] = (),
) -> SentHints:
    """Reads the hints of a request in all dialects. Raises InvalidParameter and Unsupported.

    Call it only for a request that has any: `NO_HINTS` are the hints of the others.
    """
    found = read_hints(body, headers, owner, marks)
    late = tuple(HintOutcome(each.field, Verdict.REFUSED, _TOO_LATE) for each in found.prefetches)
    return replace(found, decided=found.decided + late, warnings=warnings) if late or warnings else found


def read_hints(
    body: HintFields, headers: HeaderHints, owner: PromptOwner, marks: Sequence[PlacedMark] = ()
) -> SentHints:
    """Reads hints that a request may follow, or none: with it, prefetches come too late. Raises as `sent_hints`."""
    if body.nvext is not None:
        _refuse_other_extensions(body.nvext)
    found = _HintsReader(body, headers, marks).read(owner.tenant)
    if is_chosen_by_client(owner.salt) and found.cache is not None:
        # The cache knows sessions by tenant. Several parties without tenants can have a salt each.
        def own(name: str | None) -> str | None:
            return None if name is None else f"{owner.salt} {name}"

        cache = found.cache
        acts = tuple(replace(act, session=own(act.session)) for act in cache.acts)
        cache = replace(cache, session=own(cache.session), parent=own(cache.parent), acts=acts)
        found = replace(found, cache=cache)
    return found


# Fields of `nvext` that would change the answer, with their neutral value.
_EXTENSIONS: Mapping[str, tuple[Any, str]] = {
    "cache_salt": ("", "Send 'cache_salt' as a field of the request."),
    "greed_sampling": (False, "Send 'temperature': 0."),
    "max_thinking_tokens": (None, "Send 'max_thinking_tokens' as a field of the request."),
    "metadata_upload": (None, "Nothing is uploaded. Leave it out."),
    "token_data": (None, "Send the ids as 'prompt' to /v1/completions."),
    "use_raw_prompt": (False, "Send the text as 'prompt' to /v1/completions."),
}


def _refuse_other_extensions(nvext: NvExt) -> None:
    for name, (neutral, remedy) in _EXTENSIONS.items():
        value = (nvext.model_extra or {}).get(name)
        if value is not None and value != neutral:
            raise Unsupported(f"nvext.{name}", remedy)


# Fields of `nvext` that choose a worker, ask for details of Dynamo's own, or are Dynamo's notes.
_IGNORED_EXTENSIONS = frozenset(
    {
        *_EXTENSIONS, "annotations", "backend_instance_id", "decode_worker_id", "dp_rank", "extra_fields",
        "prefill_dp_rank", "prefill_worker_id", "request_timestamp_ms", "router", "routing_constraints",
    }
)  # fmt: skip


@dataclass
class _HintsReader:
    """Reader of one request's hints."""

    body: HintFields
    headers: HeaderHints
    marks: Sequence[PlacedMark]
    decided: list[HintOutcome] = field(default_factory=list)
    retentions: list[RetentionWish] = field(default_factory=list)
    acts: list[PrefixAct] = field(default_factory=list)
    prefetches: list[Prefetch] = field(default_factory=list)
    session: str | None = None

    def read(self, tenant: str) -> SentHints:
        self.decided += self.headers.decided
        sessions = list(self._sessions())
        ends = list(self._ends())
        session_field, session = self._first(sessions) or ("", None)
        self.session = session
        for path in ends:
            if session is None:
                self._refuse(path, "no session is named")
            else:
                self.decided.append(HintOutcome(path, Verdict.ACCEPTED))
        hour_marks = self._add_marks()
        self._add_actions()
        self._add(self._first(list(self._times())))
        self._add_priority()
        self._refuse_others()
        cache = None
        if session is not None or self.retentions or self.acts:
            cache = CacheHints(
                tenant,
                session,
                session_field,
                ends_session=session is not None and bool(ends),
                retentions=tuple(self.retentions),
                acts=tuple(self.acts),
                parent=next(self._parents(), None),
                may_pin=bool(self.acts and tenant),
            )
        return SentHints(cache, tuple(self.decided), hour_marks, prefetches=tuple(self.prefetches))

    # ---- sessions

    def _sessions(self) -> Iterator[tuple[str, str]]:
        """Yields the names of the session with their fields, the first of which counts."""
        nvext, hint = self.body.nvext, self.body.agent_hint
        if nvext is not None and nvext.session_control is not None:
            yield "nvext.session_control.session_id", nvext.session_control.session_id
        if nvext is not None and nvext.agent_context is not None:
            yield "nvext.agent_context.session_id", nvext.agent_context.session_id
        if hint is not None and hint.session_id is not None:
            yield "agent_hint.session_id", hint.session_id
        if self.headers.session is not None:
            yield self.headers.session_field, self.headers.session
        if self.body.prompt_cache_key:
            yield "prompt_cache_key", self.body.prompt_cache_key

    def _parents(self) -> Iterator[str]:
        """Yields the names of the session that began this one, the first of which counts."""
        nvext, hint = self.body.nvext, self.body.agent_hint
        if nvext is not None and nvext.agent_context is not None and nvext.agent_context.parent_session_id:
            yield nvext.agent_context.parent_session_id
        if hint is not None and hint.parent_session_id is not None:
            yield hint.parent_session_id
        if self.headers.parent is not None:
            yield self.headers.parent

    def _ends(self) -> Iterator[str]:
        """Yields the fields that tell the end of the session."""
        nvext, hint = self.body.nvext, self.body.agent_hint
        if (
            nvext is not None
            and nvext.session_control is not None
            and nvext.session_control.action == "close"
        ):
            yield "nvext.session_control.action"
        if nvext is not None and nvext.agent_context is not None and nvext.agent_context.session_final:
            yield "nvext.agent_context.session_final"
        context = None if nvext is None else nvext.agent_context
        if context is not None and context.kv_hints is not None and context.kv_hints.evict_session:
            yield "nvext.agent_context.kv_hints.evict_session"
        if hint is not None and hint.context_management is not None:
            for i, edit in enumerate(hint.context_management.edits or ()):
                if edit.type == "evict" and edit.block_start is None and edit.block_end is None:
                    yield f"agent_hint.context_management.edits[{i}]"
        if self.headers.ends_session:
            yield FINAL

    def _first(self, asked: Sequence[tuple[str, Any]]) -> tuple[str, Any] | None:
        """Returns the first of several hints about one thing. Refuses the hints that differ from it."""
        if not asked:
            return None
        first, value = asked[0]
        for path, other in asked[1:]:
            if other != value:
                self._refuse(path, f"{first} counts")
        return asked[0]

    # ---- times

    def _times(self) -> Iterator[tuple[str, float]]:
        """Yields the times for the whole prompt and its answer, the first of which counts."""
        nvext, hint, options = self.body.nvext, self.body.agent_hint, self.body.prompt_cache_options
        if nvext is not None and nvext.cache_control is not None:
            yield "nvext.cache_control", _time_s(nvext.cache_control.ttl, "nvext.cache_control.ttl")
        if hint is not None and hint.cache_control is not None:
            control = hint.cache_control
            if control.block_offset is not None:
                self._clip("agent_hint.cache_control.block_offset", "the whole request is kept")
            yield "agent_hint.cache_control", _time_s(control.ttl, "agent_hint.cache_control.ttl")
        if (
            nvext is not None
            and nvext.session_control is not None
            and nvext.session_control.timeout is not None
        ):
            yield "nvext.session_control.timeout", float(nvext.session_control.timeout)
        # With the mode 'explicit' the time holds for the breakpoints alone.
        if options is not None and options.ttl is not None and options.mode != "explicit":
            yield "prompt_cache_options.ttl", self._breakpoint_s()
        if self.body.prompt_cache_retention == "24h":
            yield "prompt_cache_retention", MAX_TTL_S

    def _breakpoint_s(self) -> float:
        """Returns the time of a breakpoint without one of its own."""
        options = self.body.prompt_cache_options
        if options is None or options.ttl is None:
            return _OPENAI_TTL_S
        return duration_s(options.ttl, "prompt_cache_options.ttl")

    def _add(self, time: tuple[str, float] | None) -> None:
        if time is not None:
            self._retain(time[0], None, ttl_s=time[1])

    def _add_marks(self) -> tuple[RetentionWish, ...]:
        """Adds the marks, and returns the marks with a time of an hour or more."""
        if len(self.marks) > MAX_MARKS:
            raise InvalidParameter("cache_control", len(self.marks), f"sent at most {MAX_MARKS} times")
        before = len(self.retentions)
        for mark in self.marks:
            if mark.tokens is None:
                self._refuse(mark.asked.field, "the chat template rewrites the marked text")
                continue
            ttl_s = self._breakpoint_s() if mark.asked.ttl_s is None else mark.asked.ttl_s
            self._retain(mark.asked.field, mark.tokens, ttl_s=ttl_s)
        return tuple(mark for mark in self.retentions[before:] if (mark.ttl_s or 0) >= _HOUR_S)

    def _retain(self, path: str, end: int | None, *, ttl_s: float | None = None, priority: int = 0) -> None:
        if ttl_s is not None and ttl_s > MAX_TTL_S:
            self._clip(path, f"at most {MAX_TTL_S:.0f} s")
            ttl_s = MAX_TTL_S
        self.retentions.append(RetentionWish(path, end, ttl_s, priority))

    # ---- priorities

    def _add_priority(self) -> None:
        asked = []
        if self.headers.priority is not None:
            asked.append((PRIORITY, self.headers.priority))
        hints = None if self.body.nvext is None else self.body.nvext.agent_hints
        if hints is not None and hints.priority is not None:
            asked.append(("nvext.agent_hints.priority", hints.priority))
        if self.body.priority:
            asked.append(("priority", -self.body.priority))  # vLLM's lower values are more important
        first = self._first(asked)
        if first is None:
            return
        path, value = first
        priority = self._bounded(path, value, -1 if path == "priority" else 1)
        self._retain(path, None, priority=priority)

    # ---- actions

    def _add_actions(self) -> None:
        count = 0
        actions = () if self.body.kv_hints is None else self.body.kv_hints.actions
        for i, action in enumerate(actions):
            path = f"kv_hints.actions[{i}]"
            if action.action_type not in _ACTIONS:
                self._refuse(path, f"the server does {', '.join(_ACTIONS)}")
                continue
            if action.action_version.partition(".")[0] != "1":
                raise InvalidParameter(f"{path}.action_version", action.action_version, "'1.0'")
            if action.payload.get("include_current_request") is False:
                self._refuse(path, "no prefix is found by the hashes of its blocks")
                continue
            for each in directives_of(action, path):
                count += 1
                if count > MAX_DIRECTIVES:
                    raise InvalidParameter("kv_hints", count, f"of at most {MAX_DIRECTIVES} directives")
                self._add_directive(action.action_type, each)

    def _add_directive(self, type: str, asked: Directive) -> None:
        kind, session = _ACTIONS[type], asked.session
        if asked.clipped:
            self._clip(asked.path, asked.clipped)
        if kind is _RETAIN and asked.ttl_s == 0 and not asked.priority:
            kind = ActKind.RELEASE
        if kind in (ActKind.DEMOTE, ActKind.RELEASE):
            if type in _ENDS_OF_SESSIONS and session is None:
                session = self.session
            self._act(asked.path, kind, asked, session)
        elif session is not None:
            self._refuse(asked.path, "send it with the prompt, and not with the name of a session")
        elif kind is ActKind.PIN:
            self._act(asked.path, kind, asked)
        elif kind is _PREFETCH:
            self.prefetches.append(Prefetch(asked.path, asked.end))
        else:
            priority = self._bounded(asked.path, asked.priority)
            self._retain(asked.path, asked.end, ttl_s=asked.ttl_s, priority=priority)

    def _act(self, path: str, kind: str, asked: Directive, session: str | None = None) -> None:
        start = None if math.isinf(asked.start) else int(asked.start)
        self.acts.append(PrefixAct(path, ActKind(kind), start, asked.end, session))

    def _bounded(self, path: str, priority: int, sign: int = 1) -> int:
        bounded = max(LEAST_PRIORITY, min(GREATEST_PRIORITY, priority))
        if bounded != priority:
            self._clip(path, f"to {sign * bounded}")
        return bounded

    # ---- hints that the server does not follow

    def _refuse_others(self) -> None:
        nvext, hint = self.body.nvext, self.body.agent_hint
        hints = None if nvext is None else nvext.agent_hints
        if hints is not None:
            at = "nvext.agent_hints"
            if hints.strict_priority:
                self._refuse(f"{at}.strict_priority", _IN_ORDER)
            if hints.osl is not None:
                self._refuse(f"{at}.osl", "the scheduler does not plan with it")
            if hints.latency_sensitivity is not None:
                self._refuse(f"{at}.latency_sensitivity", "send 'priority'")
            if hints.speculative_prefill:
                self._refuse(f"{at}.speculative_prefill", "an option of the server decides about idle time")
        if self.headers.strict_priority:
            self._refuse(STRICT_PRIORITY, _IN_ORDER)
        managed = None if hint is None else hint.context_management
        if managed is not None:
            at = "agent_hint.context_management"
            if managed.manage_request:
                self._refuse(f"{at}.manage_request", "the request is answered")
            for i, edit in enumerate(managed.edits or ()):
                path = f"{at}.edits[{i}]"
                if edit.block_start is not None or edit.block_end is not None:
                    self._refuse(
                        path, "a session has no numbers of blocks: send ranges of tokens in kv_hints"
                    )
                elif edit.type == "offload":
                    self._act(path, ActKind.DEMOTE, Directive(path), self.session)
                elif edit.type == "prefetch":
                    self.prefetches.append(Prefetch(path))
        self._refuse_unknown()

    def _refuse_unknown(self) -> None:
        nvext, hint = self.body.nvext, self.body.agent_hint
        known: list[tuple[str, Wire | None]] = [("nvext", nvext), ("agent_hint", hint)]
        if nvext is not None:
            known += [
                ("nvext.agent_hints", nvext.agent_hints),
                ("nvext.cache_control", nvext.cache_control),
                ("nvext.session_control", nvext.session_control),
                ("nvext.agent_context", nvext.agent_context),
            ]
        for at, fields in known:
            unknown = () if fields is None else tuple(fields.model_extra or ())
            told = [name for name in unknown if at != "nvext" or name not in _IGNORED_EXTENSIONS]
            for name in told[:_TOLD_UNKNOWN_FIELDS]:
                self._refuse(f"{at}.{str(name)[:MAX_NAME_CHARS]}", "it is unknown")

    def _refuse(self, path: str, reason: str) -> None:
        self.decided.append(HintOutcome(path, Verdict.REFUSED, reason))

    def _clip(self, path: str, reason: str) -> None:
        self.decided.append(HintOutcome(path, Verdict.CLIPPED, reason))


_RETAIN, _PREFETCH = "retain", "prefetch"
# The actions of `kv_hints` that the server does: vLLM's, those of Dynamo's policies, SGLang's, and our own pin and
# release, for which no engine has a form.
_ACTIONS: Mapping[str, str] = {
    "kv.retain": _RETAIN,
    "vllm.set_priority": _RETAIN,
    "kv.prefetch": _PREFETCH,
    "kv.demote": ActKind.DEMOTE,
    "kv.evict": ActKind.DEMOTE,
    "kv.deref": ActKind.DEMOTE,
    "kv.release": ActKind.RELEASE,
    "kv.pin": ActKind.PIN,
}
_ENDS_OF_SESSIONS = ("kv.evict", "kv.deref")  # routers send them with the last request of a session
_TOO_LATE = "the request computes its prompt at once: send it to /v1/cache/hints before"
_IN_ORDER = "requests are served in the order of their arrival"


def _time_s(ttl: str | float | None, path: str) -> float:
    """Returns the seconds of a time: a duration, a number or the digits of one; five minutes by default."""
    if ttl is None:
        return 300.0
    if isinstance(ttl, str):
        digits = ttl.isascii() and ttl.isdigit() and len(ttl) <= 9
        return float(ttl) if digits else duration_s(ttl, path)
    return float(ttl)
