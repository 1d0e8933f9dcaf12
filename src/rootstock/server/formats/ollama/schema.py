"""Ollama's wire format of requests: the fields, and their translation to the canonical conversation.

Ollama's server ignores fields and options that it does not know, and so does this one: the last line of an answer
names those that have no effect here. A field that would change the prompt and is not implemented is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.errors import InvalidParameter, Unsupported
from rootstock.server.wire.fields import (
    EFFORTS,
    Count,
    JsonObject,
    Label,
    ModelName,
    ReasoningFields,
    ReasoningWish,
    SamplingFields,
    Wire,
    default_if_null,
    is_empty,
    null_if,
)
from rootstock.server.wire.hints.fields import HintFields
from rootstock.text.chat_template import TemplateNames
from rootstock.text.constraints.asked import ANY_JSON_OBJECT, Constraint
from rootstock.text.constraints.json_schema import json_schema_of
from rootstock.text.conversation.media import image_lines
from rootstock.text.conversation.openai import conversation_of
from rootstock.text.conversation.types import Conversation, IgnoredField, Message, Text
from rootstock.text.limits import (
    MAX_LABEL_CHARS,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_REPETITION_PENALTY,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
)

Json = dict[str, Any]

_DURATION = re.compile(r"-?(?:[0-9]{1,12}(?:\.[0-9]{1,9})?(?:ns|us|µs|ms|s|m|h))+")  # Go's
_PART = re.compile(r"([0-9.]+)([a-zµ]+)")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_TOLD_OPTIONS = 16  # further ones without effect are not named

_NEVER_CUT = "a prompt is never cut: one that does not fit is refused"
_OF_SERVER = ("num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "numa", "low_vram")
_REASONS: Mapping[str, str] = {
    "num_ctx": "the context limit is the server's: serve with --context-limit",
    "num_keep": _NEVER_CUT,
    "repeat_last_n": "penalties read the whole prompt and answer",
    **dict.fromkeys(_OF_SERVER, "options of the server decide about it, for all requests"),
}
# Values of options that ask for what the server does anyway.
_NEUTRAL: Mapping[str, Any] = {"mirostat": 0, "repeat_last_n": -1, "tfs_z": 1, "typical_p": 1}


class OllamaOptions(SamplingFields):
    """Parameters of sampling, with Ollama's names for some."""

    num_predict: Annotated[
        int | None, Field(ge=-2, lt=2**63, description="at most so many tokens; 0 and below: no limit")
    ] = None
    repeat_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = (
        None
    )

    @property
    def max_tokens(self) -> int | None:
        return self.num_predict if self.num_predict is not None and self.num_predict > 0 else None

    def sampling(
        self, vocab_size: int, defaults: SamplingDefaults, top_logprobs: int | None
    ) -> ResolvedSampling:
        found = super().sampling(vocab_size, defaults, top_logprobs)
        if self.repeat_penalty is not None:
            found = replace(found, repetition_penalty=self.repeat_penalty)
        return replace(found, seed=None) if self.seed == -1 else found  # Ollama's word for any seed

    def ignored(self) -> Iterator[IgnoredField]:
        """Yields the options that have no effect."""
        others = (self.model_extra or {}).items()
        names = [name for name, value in others if value not in (None, False, _NEUTRAL.get(name))]
        for name in names[:_TOLD_OPTIONS]:
            reason = _REASONS.get(name, "the sampler does not have it")
            yield IgnoredField(f"options.{name[:MAX_NAME_CHARS]}", reason)


class OllamaFields(ReasoningFields, HintFields):
    """Fields that chats and generations have. Those about reasoning may also have their names in OpenAI's API."""

    model: ModelName = None
    stream: Annotated[bool, default_if_null(True)] = True
    options: Annotated[OllamaOptions, default_if_null({})] = OllamaOptions()
    think: Annotated[
        bool | Label | None, Field(description="true, false, or an effort: low, medium, high"), null_if("")
    ] = None
    format: Annotated[str | JsonObject | None, Field(description="'json', or a JSON schema")] = None
    keep_alive: Annotated[
        float | Label | None,
        Field(description="how long the cache keeps the prompt: seconds, or a duration such as '5m'"),
    ] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    truncate: bool | None = None
    shift: bool | None = None
    cache_salt: Annotated[str | None, Field(description="prefixes are shared only within one salt")] = None

    @property
    def salt(self) -> str | None:
        return self.cache_salt or self.options.cache_salt

    @property
    def asked_logprobs(self) -> int | None:
        """The number of alternatives to each token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def refuse_unsupported(self) -> None:
        """Raises Unsupported."""
        if (self.model_extra or {}).get("_debug_render_only"):
            raise Unsupported(
                "_debug_render_only", "Prompts are explained by /v1/cache/explain. Leave it out."
            )

    def keep_alive_s(self) -> float | None:
        """Returns the time; negative: as long as can be. None: the request does not tell. Raises InvalidParameter."""
        asked = self.keep_alive
        if not isinstance(asked, str):
            return asked
        if asked in ("", "0", "-1"):
            return float(asked) if asked else None
        if not _DURATION.fullmatch(asked):
            raise InvalidParameter("keep_alive", asked, "seconds, or a duration such as '5m' or '1h30m'")
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(asked))
        return -seconds if asked.startswith("-") else seconds

    def constraint(self) -> Constraint | None:
        """Returns the grammar that the answer must follow. Raises RequestError."""
        if is_empty(self.format):
            return None
        if self.format == "json":
            return Constraint(ANY_JSON_OBJECT, param="format")
        if isinstance(self.format, str):
            raise InvalidParameter("format", self.format, "'json', or a JSON schema, which is an object")
        return Constraint(json_schema_of(self.format, "format", strict=False), param="format")

    def ignored(self) -> Iterator[IgnoredField]:
        """Yields the fields, other than those about reasoning, that have no effect."""
        for name in ("truncate", "shift"):
            if getattr(self, name):
                yield IgnoredField(name, _NEVER_CUT)
        yield from self.options.ignored()

    def _wishes(self) -> Iterator[ReasoningWish]:
        yield from super()._wishes()
        if isinstance(self.think, str) and self.think not in EFFORTS:
            raise InvalidParameter("think", self.think, "true, false, 'low', 'medium' or 'high'")
        if isinstance(self.think, bool):
            yield ReasoningWish("think", self.think, switch=self.think)
        else:
            yield ReasoningWish("think", self.think, effort=self.think)


class OllamaChatRequest(OllamaFields):
    messages: Annotated[
        list[JsonObject],
        Field(max_length=MAX_MESSAGES, fail_fast=True, description="without any, the model is loaded"),
        default_if_null([]),
    ] = []  # noqa: RUF012 - pydantic copies it
    tools: Annotated[list[JsonObject], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    def conversation(self, names: TemplateNames) -> Conversation:
        """Checks and translates the conversation. Raises RequestError."""
        options, ignored = self.template_variables(names)
        found = conversation_of([_in_openais_form(each) for each in self.messages], self.tools, None, options)
        return replace(found, ignored=(*ignored, *self.ignored()))


class OllamaGenerateRequest(OllamaFields):
    prompt: Annotated[str, Field(description="without any, the model is loaded"), default_if_null("")] = ""
    system: str | None = None
    images: Annotated[list[Any], Field(fail_fast=True)] | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: Any = None

    @property
    def is_empty(self) -> bool:
        """True if the request only loads or unloads the model."""
        return not self.prompt and not self.images

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.suffix:
            raise Unsupported(
                "suffix", "Send 'raw' with the marks of the model's own infilling format. Leave it out."
            )
        if self.template:
            raise Unsupported("template", "Serve with --chat-template FILE, or send 'raw'. Leave it out.")
        if not is_empty(self.context):
            raise Unsupported("context", "Send the conversation to /api/chat. Leave it out.")
        if self.raw and (self.system or self.images):
            name = "system" if self.system else "images"
            raise Unsupported(name, "A raw prompt is the text of 'prompt' alone. Leave it out.")

    def conversation(self, names: TemplateNames) -> Conversation:
        """Makes a conversation of the prompt. Raises RequestError."""
        options, ignored = self.template_variables(names)
        parts = [Text(self.prompt)] if self.prompt else []
        if self.images:
            parts += image_lines(self.images, "images")
        system = [Message("system", (Text(self.system),), origin="system")] if self.system else []
        messages = [*system, Message("user", tuple(parts), origin="prompt")]
        return Conversation(messages, options=options, ignored=(*ignored, *self.ignored()))


class OllamaModelRequest(Wire):
    """The name of a model; `name` is Ollama's older field."""

    model: ModelName = None
    name: ModelName = None


class OllamaEmbedRequest(Wire):
    model: ModelName = None
    input: Annotated[Any, Field(description="a string, or a list of strings")] = None
    dimensions: Count | None = None


class OllamaEmbeddingsRequest(Wire):
    """The fields of the older route, which embeds one text."""

    model: ModelName = None
    prompt: Annotated[str, Field(max_length=2**31)]


def _in_openais_form(message: Mapping[Any, Any]) -> Json:
    """Renames the fields of a message: Ollama's other ones have OpenAI's names and meaning."""
    told = {name: value for name, value in message.items() if name != "tool_name"}
    role = told.get("role")
    if isinstance(role, str) and len(role) <= MAX_LABEL_CHARS:
        told["role"] = role = role.lower()
    if told.get("content") is None and role != "assistant":
        told["content"] = ""
    if message.get("tool_name") is not None:
        told.setdefault("name", message["tool_name"])
    return told
