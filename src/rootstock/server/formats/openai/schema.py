"""OpenAI's wire format of requests: the fields, and their translation to parameters of the engine.

Fields that OpenAI does not have (top_k, min_p, cache_salt, …) have the names of other OpenAI-compatible servers.
A field of OpenAI, vLLM, SGLang, llama.cpp or another server that is not implemented and would change the answer is
refused (`REFUSED`) unless its value is neutral: null, or a value that means "off" or equals this server's behaviour.
A field that never changes the answer is ignored (`IGNORED`), and so is a field that no table names: clients send
fields of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from rootstock.errors import InvalidParameter, Unsupported
from rootstock.server.formats.openai.chat_answers import CallStyle
from rootstock.server.wire.api_call import Json
from rootstock.server.wire.fields import (
    NOT_SAMPLED,
    USUAL_VERBOSITY,
    Count,
    JsonObject,
    ModelName,
    ReasoningFields,
    RefusedField,
    SamplingFields,
    Wire,
    asks_no_reasoning,
    default_if_null,
    is_empty,
    null_if,
    refused_fields,
)
from rootstock.server.wire.hints.fields import HintFields
from rootstock.text.chat_template import TemplateNames
from rootstock.text.constraints.asked import Constraint
from rootstock.text.constraints.openai_fields import constraint_of
from rootstock.text.conversation.openai import conversation_of
from rootstock.text.conversation.types import Conversation, IgnoredField
from rootstock.text.limits import (
    MAX_CHOICES,
    MAX_DOCUMENTS_CHARS,
    MAX_LABEL_CHARS,
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    refuse_deep,
    refuse_large,
)
from rootstock.text.tokenizer import ModelTokenizer

Messages = Annotated[list[JsonObject], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
ToolList = Annotated[list[JsonObject], Field(max_length=MAX_TOOLS, fail_fast=True)]
MaxTokens = Annotated[int, Field(ge=-1, lt=2**63)]


class StreamOptions(Wire):
    include_usage: Annotated[bool, default_if_null(False)] = False
    continuous_usage_stats: Annotated[
        bool,
        Field(description="with 'include_usage': every chunk tells the usage up to it"),
        default_if_null(False),
    ] = False


class TemplateFields(ReasoningFields):
    """Arguments of a chat template other than the messages."""

    tools: ToolList | None = None
    tool_choice: Annotated[str | JsonObject | None, null_if("", {})] = None
    functions: Annotated[ToolList | None, Field(description="OpenAI's older name of 'tools'")] = None
    function_call: Annotated[
        str | JsonObject | None, Field(description="of 'tool_choice'"), null_if("", {})
    ] = None
    parallel_tool_calls: bool | None = None
    documents: Annotated[list[JsonObject], Field(fail_fast=True)] | None = None
    add_generation_prompt: Annotated[
        bool | None, Field(description="true, unless 'continue_final_message' is")
    ] = None
    continue_final_message: Annotated[bool, default_if_null(False)] = False

    def conversation(self, messages: Sequence[Json], tokenizer: ModelTokenizer) -> Conversation:
        """Checks and translates the conversation. Raises RequestError."""
        options, ignored = self._options(tokenizer.template_names)
        return replace(self._conversation(messages, options), ignored=ignored)

    def _conversation(self, messages: Sequence[Json], options: Json) -> Conversation:
        parallel = self.parallel_tool_calls is not False
        if not self._is_legacy:
            return conversation_of(messages, self.tools, self.tool_choice, options, parallel=parallel)
        if self.tools or self.tool_choice not in (None, "auto", "none"):
            older = "functions" if self.functions else "function_call"
            raise InvalidParameter(
                older, getattr(self, older), "left out where 'tools' or 'tool_choice' is sent"
            )
        functions = [{"type": "function", "function": function} for function in self.functions or ()]
        names = ("functions", "function_call")
        return conversation_of(messages, functions, self.function_call, options, parallel=False, names=names)

    @property
    def _is_legacy(self) -> bool:
        return bool(self.functions) or self.function_call is not None

    def call_style(self) -> CallStyle:
        """Returns the form in which the answer shows its calls."""
        custom = [tool["custom"]["name"] for tool in self.tools or () if tool.get("type") == "custom"]
        return CallStyle(frozenset(custom), self._is_legacy, self.parallel_tool_calls is not False)

    def _options(self, names: TemplateNames) -> tuple[Json, tuple[IgnoredField, ...]]:
        """Returns the template's variables, and the fields that it cannot follow.

        Raises InvalidParameter and Unsupported.
        """
        self._refuse_misplaced(names)
        variables, ignored = self.template_variables(names)
        begins_turn = self.add_generation_prompt
        if begins_turn is None:
            begins_turn = not self.continue_final_message
        options = {"add_generation_prompt": begins_turn, **variables}
        if self.documents:
            if "documents" not in names.variables:
                raise Unsupported(
                    "documents", "The model's chat template does not read it. Send it in a message."
                )
            refuse_large(self.documents, "documents", MAX_DOCUMENTS_CHARS)
            refuse_deep(self.documents, "documents")
            options["documents"] = self.documents
        if self.continue_final_message:
            if options["add_generation_prompt"]:
                allowed = "false or left out with 'continue_final_message'"
                raise InvalidParameter("add_generation_prompt", True, allowed)
            options["continue_final_message"] = True
        return options, ignored

    def _refuse_misplaced(self, names: TemplateNames) -> None:
        """Refuses fields of the request among the template's variables. Raises Unsupported."""
        for name, value in (self.chat_template_kwargs or {}).items():
            path = f"chat_template_kwargs.{name[:MAX_LABEL_CHARS]}"
            if name == "chat_template" and not is_empty(value):
                raise Unsupported(path, "Serve with --chat-template FILE.")
            if name in _NEUTRAL_IN_CHATS and name not in names.variables:
                RefusedField("Send it as a field of the request itself.", _NEUTRAL_IN_CHATS[name]).refuse(
                    path, value
                )


class GenerationFields(SamplingFields, HintFields):
    """Fields that both routes have."""

    model: ModelName = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[MaxTokens | None, Field(description="-1: as many as the context has room for")] = (
        None
    )
    strict_max_tokens: Annotated[
        bool | None, Field(description="refuse 'max_tokens' beyond the context rather than to lower it")
    ] = None
    response_format: Annotated[JsonObject | None, null_if({})] = None

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    def refuse_unsupported(self) -> None:
        refuse_unsupported_fields(self.model_extra or {})

    def constraint(self) -> Constraint | None:
        """Returns the grammar that the answer must follow. Raises RequestError."""
        if self.response_format is None and not self.model_extra:
            return None
        return constraint_of({**(self.model_extra or {}), "response_format": self.response_format})


class ChatCompletionRequest(GenerationFields, TemplateFields):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    max_completion_tokens: MaxTokens | None = None
    modalities: Annotated[list[str], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.add_special_tokens:
            raise Unsupported("add_special_tokens", "A chat template writes them itself.")
        if self.modalities and self.modalities != ["text"]:
            raise Unsupported("modalities", "Only ['text'] is.")
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter("logprobs", self.logprobs, "true with 'top_logprobs'")


class CompletionRequest(GenerationFields):
    # Any: pydantic would try four alternatives, element by element, and report the errors of each.
    prompt: Annotated[Any, Field(description="text, token ids, or a list of either")]
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None, null_if(False)  # the value of a chat
    ] = None
    echo: bool | None = None
    best_of: Count | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        for name, value in (self.model_extra or {}).items():
            if name in ReasoningFields.model_fields and asks_no_reasoning(name, value):
                continue
            if name == "messages" or name in TemplateFields.model_fields:
                remedy = "A completion has no chat template. Use /v1/chat/completions."
                RefusedField(remedy, _NEUTRAL_IN_CHATS.get(name, _OFF_IN_CHATS.get(name, ()))).refuse(
                    name, value
                )
        if self.add_special_tokens is False:
            raise Unsupported("add_special_tokens", "Send the prompt as token ids to have none added.")
        if self.best_of not in (None, 1, self.choices_per_prompt):
            raise Unsupported("best_of", "Ask for n choices, and choose.")
        if self.suffix:
            raise Unsupported("suffix", "Put the marks of the model's own infilling format into 'prompt'.")


class PromptRequest(TemplateFields):
    """Either `messages`, as in a chat, or `prompt`, as in a completion."""

    model: ModelName = None
    messages: Messages | None = None
    prompt: Any = None
    cache_salt: str | None = None


# Fields that name the sender, that tell how to schedule, bill, log or time the request, or that format content which
# this server never sends.
IGNORED = frozenset(
    {
        # OpenAI
        "metadata", "prediction", "safety_identifier",
        "service_tier", "store",
        # vLLM, SGLang
        "data_parallel_rank", "extra_key", "guided_decoding_backend", "request_id", "rid", "routing_key",
        "session_id", "spaces_between_special_tokens", "stream_reasoning",
        # llama.cpp
        "cache_prompt", "id_slot", "n_keep", "return_progress", "timings_per_token",
        # Settings whose switch is in REFUSED: without effect while it is off
        "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent",
        "mirostat_eta", "mirostat_tau", "repeat_last_n", "smoothing_curve", "truncation_side", "xtc_threshold",
        # OpenRouter, Anthropic
        "anthropic_beta", "anthropic_version", "betas", "provider", "usage",
    }
)  # fmt: skip


_OFF = (False,)
# Values of TemplateFields that ask for nothing. Those about reasoning are variables of chat templates as well.
_NEUTRAL_IN_CHATS: Mapping[str, tuple[Any, ...]] = {
    "tools": (),
    "tool_choice": ("auto", "none"),
    "functions": (),
    "function_call": ("auto", "none"),
    "parallel_tool_calls": (True, False),
    "chat_template_kwargs": (),
    "documents": (),
    "verbosity": (USUAL_VERBOSITY,),
    "continue_final_message": _OFF,
}
_OFF_IN_CHATS: Mapping[str, tuple[Any, ...]] = {
    "enable_thinking": _OFF,
    "thinking": (False, {"type": "disabled"}, {"type": "adaptive"}),
    "reasoning_effort": ("none",),
    "reasoning": ({"effort": None}, {"effort": "none"}, {"enabled": False}),
    "add_generation_prompt": (True,),
}

REFUSED: Mapping[str, RefusedField] = {
    **refused_fields("The whitespace of JSON cannot be set by it.", guided_whitespace_pattern=()),
    **refused_fields(
        "Use 'response_format'.",
        output_config=({"effort": None}, {"effort": "none"}), output_format=(),
    ),
    **NOT_SAMPLED,
    **refused_fields(
        "Beam search is not implemented.",
        beam_width=(1,), diversity_penalty=(0,), early_stopping=_OFF, length_penalty=(1,), num_beam_groups=(1,),
        num_beams=(1,), use_beam_search=_OFF,
    ),
    **refused_fields(
        "A prompt is never cut: shorten it before you send it.",
        transforms=(), truncate=(False, "END", "NONE"), truncate_prompt_tokens=(), truncation=("disabled", False),
    ),
    **refused_fields(
        "Use 'max_tokens'.",
        max_length=(-1,), max_new_tokens=(-1,), max_output_tokens=(-1,), n_predict=(-1,), num_predict=(-1,),
    ),
    **refused_fields("Use 'min_tokens'.", min_length=(0,), min_new_tokens=(0,)),
    **refused_fields("Use 'repetition_penalty'.", repeat_penalty=(1,)),
    **refused_fields("Use 'seed'.", random_seed=(-1,), sampler_seed=(-1,)),
    **refused_fields("Use 'stop'.", stop_regex=(), stop_sequences=()),
    **refused_fields("Send it as a message of role 'system'.", instructions=("",), system=()),
    **refused_fields("Use /v1/completions.", prompt=(), suffix=("",)),
    **refused_fields("Use /v1/responses.", input=(), previous_response_id=()),
    **refused_fields("Serve with --chat-template FILE.", chat_template=()),
    **refused_fields("Ask for n choices, and choose.", best_of=(1,)),
    **refused_fields(
        "Only text is read and written.",
        audio=(), image_data=(), images=(), mm_processor_kwargs=(), prompt_embeds=(), video=(),
    ),
    **refused_fields(
        "Nothing is searched, called or kept on the server.",
        container=(), context_management=(), data_sources=(), mcp_servers=(), models=(),
        plugins=(),
    ),
    "web_search_options": RefusedField("Nothing is searched, called or kept on the server.", empty_asks=True),
    **refused_fields("Name the adapter as the 'model'.", lora=(), lora_path=(), lora_request=()),
    **refused_fields(
        "Reasoning comes in 'reasoning_content'.",
        include_reasoning=(True,), reasoning_format=("auto", "parsed", "deepseek"), separate_reasoning=(True,),
    ),
    **refused_fields(
        "The answer does not have this form.",
        echo=_OFF, include_stop_str_in_output=_OFF, logprob_start_len=(-1,), n_probs=(0,), no_stop_trim=_OFF,
        prompt_logprobs=(), return_hidden_states=_OFF, return_logprob=_OFF, return_routed_experts=_OFF,
        return_text_in_logprobs=_OFF, return_token_ids=_OFF, return_tokens=_OFF,
        return_tokens_as_token_ids=_OFF, skip_special_tokens=(True,), top_logprobs_num=(0,),
    ),
    **refused_fields("It is not implemented.", kv_transfer_params=(), session_params=(), vllm_xargs=()),
}  # fmt: skip


def refuse_unsupported_fields(fields: Mapping[str, Any]) -> None:
    """Refuses fields of REFUSED among those that the schema does not declare. Raises Unsupported."""
    for name, value in fields.items():
        refused = REFUSED.get(name)
        if refused is not None:
            refused.refuse(name, value)
