"""Anthropic's wire format of requests: the fields, and their translation to parameters of the engine.

A field that would change the answer and is not implemented is refused (`REFUSED`) unless its value is neutral. Other
unknown fields are ignored: clients of Anthropic's API send new ones before a server can know them. Parameters of
sampling that Anthropic does not have (min_p, seed, …) have the names of OpenAI-compatible servers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from rootstock.engine.request import StopParams
from rootstock.errors import InvalidParameter, Unsupported
from rootstock.server.formats.anthropic.conversation import conversation_of
from rootstock.server.formats.anthropic.edits import Edit, edits_of
from rootstock.server.formats.anthropic.errors import ThreadUnsupported
from rootstock.server.wire.fields import (
    Count,
    JsonObject,
    Label,
    ModelName,
    ReasoningFields,
    ReasoningWish,
    SamplingFields,
    Wire,
    is_empty,
    null_if,
)
from rootstock.server.wire.hints.fields import HintFields
from rootstock.text.chat_template import TemplateNames
from rootstock.text.conversation.marks import CACHE_CONTROL, cache_control_of
from rootstock.text.conversation.types import Conversation
from rootstock.text.limits import (
    MAX_LABEL_CHARS,
    MAX_MESSAGES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOOLS,
    MAX_TOOLS_CHARS,
    refuse_deep,
    refuse_large,
    refuse_other_text,
    refuse_surrogates,
)

DISPLAYS = ("summarized", "omitted", "updates")
MAX_EDITS = 2  # of each kind one

Messages = Annotated[list[JsonObject], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
ToolList = Annotated[list[JsonObject], Field(max_length=MAX_TOOLS, fail_fast=True)]
# Any: pydantic would try both alternatives, element by element, and report the errors of each.
Blocks = Annotated[Any, Field(description="a string, or a list of text blocks")]


@dataclass(frozen=True, slots=True)
class Thinking:
    """The request's wish about reasoning."""

    enabled: bool | None = None  # None: as the model's chat template has it
    budget_tokens: int | None = None
    is_shown: bool = True  # False: the signature holds the text in its place


class DiagnosticsFields(Wire):
    previous_message_id: Annotated[
        Label | None, Field(description="of the message whose prompt this one repeats; null on a first turn")
    ] = None


class PromptFields(ReasoningFields):
    """Fields from which a prompt is made. Those about reasoning may also have their names in OpenAI's API."""

    model: ModelName = None
    messages: Messages
    system: Blocks = None
    tools: ToolList | None = None
    tool_choice: Annotated[JsonObject | None, null_if({})] = None
    thinking: Annotated[
        bool | JsonObject | None,
        Field(description="an object with a 'type': enabled, disabled, adaptive, between_tools"),
        null_if({}),
    ] = None
    output_config: JsonObject | None = None
    output_format: Annotated[
        JsonObject | None, Field(description="the older name of 'output_config.format'"), null_if({})
    ] = None
    context_management: JsonObject | None = None
    cache_control: Annotated[
        JsonObject | None, Field(description="marks the end of the last message"), null_if({})
    ] = None
    cache_salt: Annotated[str | None, Field(description="prefixes are shared only within one salt")] = None
    thread: Annotated[JsonObject | None, null_if({})] = None

    def conversation(self, names: TemplateNames) -> Conversation:
        """Checks and translates the conversation. Raises RequestError."""
        options, ignored = self.template_variables(names)
        conversation = conversation_of(
            self.messages,
            self.system,
            self.tools,
            self.tool_choice,
            options,
            last_mark=cache_control_of({CACHE_CONTROL: self.cache_control}, ""),
        )
        return replace(conversation, ignored=ignored)

    def edits(self) -> list[Edit]:
        return edits_of(self.context_management, "context_management", MAX_EDITS)

    def refuse_unsupported(self) -> None:
        """Raises Unsupported."""
        if self.thread is not None:
            raise ThreadUnsupported
        for name, value in (self.model_extra or {}).items():
            refused = REFUSED.get(name)
            if refused is not None and not is_empty(value) and value not in refused.neutral:
                raise Unsupported(name, f"{refused.remedy} Leave it out.")

    def thought(self) -> Thinking:
        """Returns the wish about reasoning. Raises InvalidParameter."""
        asked = self.thinking
        if not isinstance(asked, dict):
            return Thinking(asked)
        display = asked.get("display")
        if display is not None and display not in DISPLAYS:
            raise InvalidParameter("thinking.display", display, f"one of {', '.join(DISPLAYS)}")
        is_shown = display != "omitted"
        match asked.get("type"):
            case "enabled":
                budget = asked.get("budget_tokens")
                if budget is not None and (type(budget) is not int or not 1 <= budget < 2**63):
                    raise InvalidParameter("thinking.budget_tokens", budget, "a number of tokens, at least 1")
                return Thinking(True, budget, is_shown)
            case "disabled":
                return Thinking(False)
            case "adaptive" | "between_tools":
                return Thinking(None, None, is_shown)
            case other:
                allowed = "'enabled', 'disabled', 'adaptive' or 'between_tools'"
                raise InvalidParameter("thinking.type", other, allowed)

    def json_schema(self) -> tuple[str, str] | None:
        """Returns the schema that the answer must follow, as JSON, and its path. Raises InvalidParameter."""
        config = self.output_config or {}
        older = self.output_format is not None
        format, path = config.get("format"), "output_config.format"
        if older:
            if format is not None:
                raise InvalidParameter(
                    "output_format", self.output_format, f"left out where '{path}' is sent"
                )
            format, path = self.output_format, "output_format"
        if format is None:
            return None
        if not isinstance(format, Mapping) or format.get("type") != "json_schema":
            raise InvalidParameter(path, format, "an object with the type 'json_schema' and a 'schema'")
        schema = format.get("schema")
        if not isinstance(schema, Mapping):
            raise InvalidParameter(f"{path}.schema", schema, "a JSON schema, which is an object")
        refuse_large(schema, f"{path}.schema", MAX_TOOLS_CHARS)
        refuse_deep(schema, f"{path}.schema")
        return json.dumps(schema, ensure_ascii=False), f"{path}.schema"

    def _switch(self) -> bool | None:
        return self.thought().enabled

    def _wishes(self) -> Iterator[ReasoningWish]:
        yield from super()._wishes()
        effort = (self.output_config or {}).get("effort")
        refuse_other_text(effort, "output_config.effort", MAX_LABEL_CHARS)
        yield ReasoningWish("output_config.effort", effort, effort=effort or None)


class CountTokensRequest(PromptFields):
    """The fields of a request whose prompt is counted. Fields for the answer are ignored."""


class MessagesRequest(PromptFields, SamplingFields, HintFields):
    max_tokens: Count | None = None
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    diagnostics: Annotated[
        DiagnosticsFields | None, Field(description="asks why the prompt was not found in the cache")
    ] = None

    def stopping(self, max_tokens: int | None, vocab_size: int) -> StopParams:
        if self.stop:
            raise Unsupported("stop", "Send 'stop_sequences'.")
        for i, text in enumerate(self.stop_sequences or ()):
            path = f"stop_sequences[{i}]"
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidParameter(path, text, f"a string of 1 to {MAX_STOP_CHARS} characters")
            refuse_surrogates(text, path)
        found = super().stopping(max_tokens, vocab_size)
        return replace(found, stop_strings=tuple(self.stop_sequences or ()))


@dataclass(frozen=True, slots=True)
class RefusedMessagesField:
    """A field that is refused unless its value is neutral."""

    remedy: str
    neutral: tuple[Any, ...] = ()  # values besides null and empty ones that change nothing


REFUSED: Mapping[str, RefusedMessagesField] = {
    "mcp_servers": RefusedMessagesField("The server calls no MCP servers: give their tools to the client."),
    "container": RefusedMessagesField("Nothing is run on the server."),
    "compaction": RefusedMessagesField("The server summarizes nothing: the client does it."),
    "n": RefusedMessagesField("An answer of this API is one message.", (1,)),
    "best_of": RefusedMessagesField("An answer of this API is one message.", (1,)),
    "logprobs": RefusedMessagesField("Use /v1/chat/completions.", (False,)),
    "top_logprobs": RefusedMessagesField("Use /v1/chat/completions.", (0,)),
    "response_format": RefusedMessagesField("Send 'output_config'.", ({"type": "text"},)),
    "max_completion_tokens": RefusedMessagesField("Send 'max_tokens'.", (-1,)),
    "prompt": RefusedMessagesField("Send 'messages'."),
}
