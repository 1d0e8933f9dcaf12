"""OpenAI's wire format of requests for responses: the fields, and their translation.

A field that would change the answer and is not implemented is refused. A field that this module does not name is
ignored: it tells how to schedule, bill or log the request, or names its sender.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from rootstock.errors import InvalidParameter, Unsupported
from rootstock.server.wire.api_call import Json
from rootstock.server.wire.fields import (
    NO_VERBOSITY,
    USUAL_VERBOSITY,
    Count,
    JsonObject,
    Label,
    ModelName,
    ReasoningFields,
    SamplingFields,
    Wire,
    is_empty,
    null_if,
)
from rootstock.server.wire.hints.fields import HintFields
from rootstock.text.chat_template import TemplateNames
from rootstock.text.constraints.asked import ANY_JSON_OBJECT, Constraint
from rootstock.text.constraints.json_schema import named_schema
from rootstock.text.conversation.types import IgnoredField
from rootstock.text.limits import (
    MAX_LABEL_CHARS,
    MAX_SCHEMA_CHARS,
    MAX_TOOLS,
    MAX_TOOLS_CHARS,
    MAX_TOP_LOGPROBS,
    refuse_deep,
    refuse_large,
)

MAX_METADATA = 16  # pairs: OpenAI's limits
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_CHARS = 512
MAX_INCLUDES = 64

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"

_USE = {
    "max_completion_tokens": "Use 'max_output_tokens'.",
    "max_tokens": "Use 'max_output_tokens'.",
    "messages": "Use 'input'.",
    "prompt": "Send its text as 'input': no prompts are kept on the server.",
    "response_format": "Use 'text'.",
    "functions": "Use 'tools'.",
    "function_call": "Use 'tool_choice'.",
    "n": "Send the request several times.",
    "background": "Keep the connection open, and read the response from it.",
    "conversation": "Use 'previous_response_id', or send the history as 'input'.",
    "context_management": "Nothing is compacted unasked. POST /v1/responses/compact, or end 'input' with "
    "an item of type 'compaction_trigger'.",
    "moderation": "There is no moderation on the server.",
    "guided_json": "Use 'text' with a format of type 'json_schema'.",
    "guided_regex": "Use 'text' with a format of type 'json_schema'.",
    "guided_choice": "Use 'text' with a format of type 'json_schema'.",
    "guided_grammar": "Use 'text' with a format of type 'json_schema'.",
    "structured_outputs": "Use 'text' with a format of type 'json_schema'.",
    "use_beam_search": "Beam search is not implemented.",
    "truncate_prompt_tokens": "A prompt is never cut: shorten it before you send it.",
    "previous_input_messages": "Send the history as 'input'.",
}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # besides false and empty values
    "function_call": ("auto", "none"),
    "max_completion_tokens": (-1,),
    "max_tokens": (-1,),
    "n": (1,),
    "response_format": ({"type": "text"},),
}


class TextFields(Wire):
    format: JsonObject | None = None
    verbosity: Annotated[Label | None, Field(description="no effect")] = None


class ResponseRequest(SamplingFields, HintFields, ReasoningFields):
    model: ModelName = None
    # Any: pydantic would try every alternative, item by item, and report the errors of each.
    input: Annotated[Any, Field(description="text, or a list of items")] = None
    instructions: str | None = None
    previous_response_id: Annotated[Label | None, null_if("")] = None
    store: bool | None = None
    stream: bool | None = None
    tools: Annotated[list[JsonObject], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[str | JsonObject | None, null_if("", {})] = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    max_tool_calls: Annotated[
        Count | None, Field(description="of tools that the server runs: it has none")
    ] = None
    include: Annotated[list[Label], Field(max_length=MAX_INCLUDES, fail_fast=True)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    text: TextFields | None = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None, Field(description="no effect: a prompt is never cut")
    ] = None
    metadata: JsonObject | None = None
    safety_identifier: Label | None = None

    def refuse_unsupported(self) -> None:
        """Raises Unsupported and InvalidParameter."""
        for name, value in (self.model_extra or {}).items():
            if name in _USE and not is_empty(value) and value not in (False, *_NEUTRAL.get(name, ())):
                raise Unsupported(name, _USE[name])
        refuse_large(self.tools, "tools", MAX_TOOLS_CHARS)
        refuse_large(self.tool_choice, "tool_choice", MAX_SCHEMA_CHARS)
        refuse_large(self.text_format, "text.format", 2 * MAX_SCHEMA_CHARS)
        for name in ("tools", "tool_choice", "metadata", "text_format"):
            refuse_deep(getattr(self, name), name.replace("_format", ".format"))
        if len(self.metadata or ()) > MAX_METADATA:
            raise InvalidParameter("metadata", self.metadata, f"at most {MAX_METADATA} pairs")
        for key, value in (self.metadata or {}).items():
            if (
                not isinstance(value, str)
                or len(key) > MAX_METADATA_KEY_CHARS
                or len(value) > MAX_METADATA_CHARS
            ):
                allowed = f"texts of at most {MAX_METADATA_CHARS} characters, with short names"
                raise InvalidParameter(f"metadata.{key[:MAX_LABEL_CHARS]}", value, allowed)

    def constraint(self) -> Constraint | None:
        """Returns the grammar that the answer's text must follow. Raises InvalidParameter and ConstraintRefused."""
        format = self.text_format
        match format.get("type"):
            case "text":
                return None
            case "json_object":
                return Constraint(ANY_JSON_OBJECT, param="text.format")
            case "json_schema":
                path = "text.format"
                return Constraint(named_schema(format, path), param=f"{path}.schema")
            case other:
                raise InvalidParameter(
                    "text.format", other, "an object of the type 'text', 'json_object' or 'json_schema'"
                )

    @property
    def text_format(self) -> Json:
        asked = None if self.text is None else self.text.format
        return asked or {"type": "text"}

    @property
    def wants_sealed_reasoning(self) -> bool:
        return SEALED_REASONING in (self.include or ())

    @property
    def wanted_logprobs(self) -> int | None:
        """Returns how many alternatives each token's log-probability has; None without log-probabilities."""
        if LOGPROBS in (self.include or ()) or self.top_logprobs:
            return self.top_logprobs or 0
        return None

    def template_options(self, names: TemplateNames) -> tuple[Json, tuple[IgnoredField, ...]]:
        """Returns the template's variables, and the fields that it cannot follow.

        Raises InvalidParameter and Unsupported.
        """
        variables, ignored = self.template_variables(names)
        verbosity = None if self.text is None else self.text.verbosity
        if verbosity not in (None, "", USUAL_VERBOSITY):
            ignored += (IgnoredField("text.verbosity", NO_VERBOSITY),)
        return {"add_generation_prompt": True, **variables}, ignored


def json_text(value: Any, path: str) -> str:
    """Returns a client's value as JSON that a response can have. Raises InvalidParameter."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise InvalidParameter(path, value, "JSON: NaN and Infinity are not") from None
    return text.encode(errors="replace").decode()  # halves of surrogate pairs


def echoed(fields: Mapping[str, Any]) -> Json:
    """Returns a client's fields as the response repeats them. Raises InvalidParameter."""
    return {name: json.loads(json_text(value, name)) for name, value in fields.items()}
