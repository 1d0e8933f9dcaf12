"""Fields of requests with hints to the cache, in the dialects of OpenAI, NVIDIA Dynamo and vLLM.

A value of a wrong type is refused, as the dialect's own server does. Unknown fields within are kept, and
the answer names them. Anthropic's marks (`cache_control`) stand in the conversation, where
`text/conversation/marks.py` reads them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rootstock.server.wire.fields import Count, JsonObject, Label, Wire, default_if_null
from rootstock.server.wire.hints.headers import MAX_SESSION_CHARS

MAX_ACTIONS = 16  # of `kv_hints`, as in vLLM
MAX_EDITS = 16

Session = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_CHARS)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class PromptCacheOptions(Wire):
    comparison_response_id: Annotated[
        Label | None, Field(description="asks how much of that response's prompt was found in the cache")
    ] = None
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Annotated[Label | None, Field(description="such as '30m' or '12h'")] = None


class EphemeralControl(Wire):
    """Dynamo's and vLLM's `cache_control`: of a whole request."""

    type: Annotated[Literal["ephemeral"], default_if_null("ephemeral")] = "ephemeral"
    ttl: str | Annotated[float, Field(ge=0)] | None = None
    block_offset: Count | None = None


class AgentHints(Wire):
    priority: Int32 | None = None
    strict_priority: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    osl: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    speculative_prefill: bool | None = None
    latency_sensitivity: float | None = None


class SessionControl(Wire):
    session_id: Session
    action: Literal["open", "bind", "close"] | None = None
    timeout: Annotated[int, Field(ge=0, lt=2**32, description="seconds without a request")] | None = None


class EndOfSession(Wire):
    evict_session: bool | None = None


class AgentContext(Wire):
    session_id: Session
    parent_session_id: Session | None = None
    session_final: bool | None = None
    kv_hints: EndOfSession | None = None


class NvExt(Wire):
    agent_hints: AgentHints | None = None
    cache_control: EphemeralControl | None = None
    session_control: SessionControl | None = None
    agent_context: AgentContext | None = None


class ContextEdit(Wire):
    type: Literal["offload", "prefetch", "evict"]
    block_start: Count | None = None
    block_end: Count | None = None


class ContextManagement(Wire):
    manage_request: bool | None = None
    edits: Annotated[list[ContextEdit], Field(max_length=MAX_EDITS, fail_fast=True)] | None = None


class AgentHint(Wire):
    session_id: Session | None = None
    parent_session_id: Session | None = None
    cache_control: EphemeralControl | None = None
    context_management: ContextManagement | None = None


class KvHintAction(Wire):
    action_id: Label
    action_type: Label
    action_version: Label
    payload: JsonObject


class KvHints(Wire):
    protocol_version: Label
    message_id: Label
    actions: Annotated[list[KvHintAction], Field(max_length=MAX_ACTIONS, fail_fast=True)]


class HintFields(Wire):
    """Fields of a request with hints to the cache. A hint never changes an answer, and is no part of a key."""

    prompt_cache_key: Annotated[Label | None, Field(description="names a session of requests")] = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    nvext: Annotated[NvExt | None, Field(description="NVIDIA Dynamo's hints")] = None
    agent_hint: Annotated[AgentHint | None, Field(description="hints of vLLM's RFC 52113")] = None
    kv_hints: Annotated[
        KvHints | None, Field(description="the envelope of hints of vLLM, Dynamo and SGLang")
    ] = None
    priority: Annotated[
        Int32 | None, Field(description="vLLM's: prefixes of lower values are evicted later")
    ] = None

    @property
    def comparison_response_id(self) -> str | None:
        """The id of the answer that the diagnostics compare this one with; None: it does not ask for them."""
        options = self.prompt_cache_options
        return None if options is None else options.comparison_response_id
