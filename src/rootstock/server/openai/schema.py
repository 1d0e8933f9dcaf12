"""OpenAI's wire format of requests: the fields, and their translation to parameters of the engine.

Fields that OpenAI does not have (top_k, min_p, cache_salt, …) have the names of other OpenAI-compatible servers.
A field of OpenAI, vLLM, SGLang, llama.cpp or another server that is not implemented and would change the answer is
refused (`REFUSED`) unless its value is neutral: null, or a value that means "off" or equals this server's behaviour.
A field that never changes the answer is ignored (`IGNORED`), and so is a field that no table names: clients send
fields of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from rootstock.engine.chat_template import TemplateNames
from rootstock.engine.constraints.asked import Constraint
from rootstock.engine.conversation.openai import conversation_of
from rootstock.engine.conversation.template import refuse_unread_variables
from rootstock.engine.conversation.types import Conversation
from rootstock.engine.limits import (
    MAX_CHOICES,
    MAX_DOCUMENTS_CHARS,
    MAX_LABEL_CHARS,
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    refuse_deep,
    refuse_large,
)
from rootstock.engine.tokenizer import ModelTokenizer
from rootstock.errors import InvalidParameter, Unsupported
from rootstock.server.fields import (
    REASONING_SWITCHES,
    Count,
    JsonObject,
    Label,
    SamplingFields,
    Wire,
)
from rootstock.server.hints.fields import HintFields
from rootstock.server.openai.chat_answers import CallStyle
from rootstock.server.openai.structured import constraint_of
from rootstock.server.wire import Json

Messages = Annotated[list[JsonObject], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
ToolList = Annotated[list[JsonObject], Field(max_length=MAX_TOOLS, fail_fast=True)]


class StreamOptions(Wire):
    include_usage: bool = False


class TemplateFields(Wire):
    """Arguments of a chat template other than the messages."""

    tools: ToolList | None = None
    tool_choice: str | JsonObject | None = None
    functions: Annotated[ToolList | None, Field(description="OpenAI's older name of 'tools'")] = None
    function_call: Annotated[str | JsonObject | None, Field(description="of 'tool_choice'")] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    documents: Annotated[list[JsonObject], Field(fail_fast=True)] | None = None
    enable_thinking: bool | None = None
    thinking: Annotated[
        bool | JsonObject | None,
        Field(description="true, false, or an object with a 'type': enabled, disabled, adaptive"),
    ] = None
    reasoning_effort: Label | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def conversation(self, messages: Sequence[Json], tokenizer: ModelTokenizer) -> Conversation:
        """Checks and translates the conversation. Raises RequestError."""
        options = self._options(tokenizer.template_names)
        parallel = self.parallel_tool_calls is not False
        if not self._is_legacy:
            return conversation_of(messages, self.tools, self.tool_choice, options, parallel=parallel)
        if self.tools is not None or self.tool_choice is not None:
            older = "functions" if self.functions is not None else "function_call"
            raise InvalidParameter(
                older, getattr(self, older), "left out where 'tools' or 'tool_choice' is sent"
            )
        functions = [{"type": "function", "function": function} for function in self.functions or ()]
        names = ("functions", "function_call")
        return conversation_of(messages, functions, self.function_call, options, parallel=False, names=names)

    @property
    def _is_legacy(self) -> bool:
        return self.functions is not None or self.function_call is not None

    def call_style(self) -> CallStyle:
        """Returns the form in which the answer shows its calls."""
        custom = [tool["custom"]["name"] for tool in self.tools or () if tool.get("type") == "custom"]
        return CallStyle(frozenset(custom), self._is_legacy, self.parallel_tool_calls is not False)

    def _options(self, names: TemplateNames) -> Json:
        """Returns the template's variables. Raises InvalidParameter and Unsupported."""
        options = {"add_generation_prompt": self.add_generation_prompt, **self._template_kwargs(names)}
        for field, name, value in self._reasoning(names):
            if options.setdefault(name, value) != value:
                raise InvalidParameter(
                    field, getattr(self, field), f"in agreement with {name}={options[name]!r}"
                )
        if self.documents is not None:
            if "documents" not in names.variables:
                raise Unsupported(
                    "documents", "The model's chat template does not read it. Send it in a message."
                )
            refuse_large(self.documents, "documents", MAX_DOCUMENTS_CHARS)
            refuse_deep(self.documents, "documents")
            options["documents"] = self.documents
        if self.continue_final_message:
            if options["add_generation_prompt"]:
                raise InvalidParameter("add_generation_prompt", True, "false with 'continue_final_message'")
            options["continue_final_message"] = True
        return options

    def _template_kwargs(self, names: TemplateNames) -> Json:
        kwargs = self.chat_template_kwargs or {}
        for name in kwargs:
            path = f"chat_template_kwargs.{name[:MAX_LABEL_CHARS]}"
            if name == "chat_template":
                raise Unsupported(path, "Serve with --chat-template FILE.")
            is_field = name in TemplateFields.model_fields and name != "add_generation_prompt"
            if is_field and name not in names.variables:
                raise Unsupported(path, "Send it as a field of the request itself.")
        refuse_unread_variables(kwargs, names)
        return kwargs

    def _reasoning(self, names: TemplateNames) -> Iterator[tuple[str, str, Any]]:
        """Yields each given field about reasoning, with the template's variable and its value."""
        switch = next((name for name in REASONING_SWITCHES if name in names.variables), None)
        asked: dict[str, bool | None] = {
            "enable_thinking": self.enable_thinking,
            "thinking": _thinking(self.thinking),
        }
        if "reasoning_effort" in names.variables:
            if self.reasoning_effort is not None:
                yield "reasoning_effort", "reasoning_effort", self.reasoning_effort
        elif self.reasoning_effort is not None:
            if self.reasoning_effort != "none" or switch is None:
                remedy = "Leave it out" if switch is None else "Send 'none', or 'enable_thinking'"
                raise Unsupported(
                    "reasoning_effort", f"The model's chat template knows no efforts. {remedy}."
                )
            asked["reasoning_effort"] = False
        for field, value in asked.items():
            if value is None:
                continue
            if switch is None:
                raise Unsupported(
                    field, "The model's chat template has no switch for reasoning. Leave it out."
                )
            yield field, switch, value


# Names of other servers for the most tokens of reasoning; -1: any number.
_BUDGETS = ("max_thinking_tokens", "reasoning_budget", "thinking_budget", "thinking_token_budget")


class GenerationFields(SamplingFields, HintFields):
    """Fields that both routes have."""

    model: Label | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    strict_max_tokens: Annotated[
        bool | None, Field(description="refuse 'max_tokens' beyond the context rather than to lower it")
    ] = None
    response_format: JsonObject | None = None

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    def refuse_unsupported(self) -> None:
        refuse_unsupported_fields(self.model_extra or {})

    def constraint(self) -> Constraint | None:
        """Returns the grammar that the answer must follow. Raises RequestError."""
        return constraint_of({**(self.model_extra or {}), "response_format": self.response_format})


class ChatCompletionRequest(GenerationFields, TemplateFields):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    max_completion_tokens: Count | None = None
    modalities: Annotated[list[str], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None

    def reasoning_budget(self) -> int | None:
        """Returns the most tokens of reasoning; None: any number. Raises InvalidParameter."""
        asked = {name: (self.model_extra or {}).get(name) for name in _BUDGETS}
        if isinstance(self.thinking, dict):
            asked["thinking.budget_tokens"] = self.thinking.get("budget_tokens")
        given = {name: value for name, value in asked.items() if value not in (None, -1)}
        for name, value in given.items():
            if type(value) is not int or not 0 <= value < 2**63:
                raise InvalidParameter(name, value, "a number of tokens")
        return min(given.values(), default=None)

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.add_special_tokens:
            raise Unsupported("add_special_tokens", "A chat template writes them itself.")
        if self.modalities is not None and self.modalities != ["text"]:
            raise Unsupported("modalities", "Only ['text'] is.")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameter("logprobs", self.logprobs, "true with 'top_logprobs'")


class CompletionRequest(GenerationFields):
    # Any: pydantic would try four alternatives, element by element, and report the errors of each.
    prompt: Annotated[Any, Field(description="text, token ids, or a list of either")]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Count | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        for name, value in (self.model_extra or {}).items():
            if value is not None and (name == "messages" or name in TemplateFields.model_fields):
                raise Unsupported(name, "A completion has no chat template. Use /v1/chat/completions.")
        if self.add_special_tokens is False:
            raise Unsupported("add_special_tokens", "Send the prompt as token ids to have none added.")
        if self.best_of is not None and self.best_of != self.choices_per_prompt:
            raise Unsupported("best_of", "Ask for n choices, and choose.")
        if self.suffix:
            raise Unsupported("suffix", "Put the marks of the model's own infilling format into 'prompt'.")


class ExplainRequest(TemplateFields):
    """Either `messages`, as in a chat, or `prompt`, as in a completion."""

    model: Label | None = None
    messages: Messages | None = None
    prompt: Any = None
    cache_salt: str | None = None


class ModelRequest(Wire):
    """The name of a model to load or unload."""

    model: str


class ReleaseRequest(Wire):
    """The pin that is released."""

    id: Label


class WarmRequest(ExplainRequest):
    """Either one prompt, as in ExplainRequest, or several as `prompts`."""

    prompts: Annotated[list[ExplainRequest], Field(fail_fast=True)] | None = None


class ClearRequest(Wire):
    """The salt and the model whose prefixes are removed."""

    cache_salt: str | None = None
    model: str | None = None


def _thinking(asked: bool | Json | None) -> bool | None:
    """Returns whether the model reasons; None leaves it to the template. Raises InvalidParameter."""
    if not isinstance(asked, dict):
        return asked
    match asked.get("type"):
        case "enabled":
            return True
        case "disabled":
            return False
        case "adaptive":
            return None
        case other:
            raise InvalidParameter("thinking.type", other, "'enabled', 'disabled' or 'adaptive'")


# Fields that name the sender, that tell how to schedule, bill, log or time the request, or that format content which
# this server never sends.
IGNORED = frozenset(
    {
        # OpenAI
        "metadata", "prediction", "safety_identifier",
        "service_tier", "store",
        # vLLM, SGLang
        "data_parallel_rank", "extra_key", "request_id", "rid", "routing_key", "session_id",
        "spaces_between_special_tokens", "stream_reasoning",
        # llama.cpp
        "cache_prompt", "id_slot", "n_keep", "return_progress", "timings_per_token",
        # Settings of samplers whose switch is in REFUSED: without effect while it is off
        "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent",
        "mirostat_eta", "mirostat_tau", "repeat_last_n", "smoothing_curve", "xtc_threshold",
        # OpenRouter, Anthropic
        "anthropic_beta", "anthropic_version", "betas", "provider", "usage",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is refused unless its value is neutral."""

    remedy: str
    neutral: tuple[Any, ...] = ()  # values besides null that change nothing

    def refuse(self, name: str, value: Any) -> None:
        """Raises Unsupported unless `value` is neutral."""
        if value is None or value in self.neutral:
            return
        known = f", or send {_spelled(self.neutral[0])}" if self.neutral else ""
        raise Unsupported(name, f"{self.remedy} Leave it out{known}.")


def _group(remedy: str, **neutral: tuple[Any, ...]) -> dict[str, Refused]:
    return {name: Refused(remedy, values) for name, values in neutral.items()}


_OFF = (False,)
_EMPTY: tuple[Any, ...] = ([], "", {})

REFUSED: Mapping[str, Refused] = {
    **_group("It is not implemented.", guided_decoding_backend=(), guided_whitespace_pattern=()),
    **_group("Use 'response_format'.", output_config=_EMPTY, output_format=()),
    **_group(
        "The sampler does not have it.",
        allowed_token_ids=_EMPTY, bad_words=_EMPTY, banned_tokens=_EMPTY, custom_logit_processor=_EMPTY,
        custom_params=_EMPTY, do_sample=(True,), dry_multiplier=(0,), dynatemp_range=(0,), dynamic_temperature=_OFF,
        encoder_repetition_penalty=(1,), epsilon_cutoff=(0,), eta_cutoff=(0,), guidance_scale=(1,),
        logits_processors=_EMPTY, mirostat=(0,), mirostat_mode=(0,), negative_prompt=("",),
        no_repeat_ngram_size=(0,), penalty_alpha=(0,), samplers=_EMPTY, sampler_order=_EMPTY,
        sampler_priority=_EMPTY, smoothing_factor=(0,), temperature_last=_OFF, tfs=(1,), tfs_z=(1,), top_a=(0,),
        top_n_sigma=(-1, 0), typical=(1,), typical_p=(1,), xtc_probability=(0,),
    ),
    **_group(
        "Beam search is not implemented.",
        beam_width=(1,), diversity_penalty=(0,), early_stopping=_OFF, length_penalty=(1,), num_beam_groups=(1,),
        num_beams=(1,), use_beam_search=_OFF,
    ),
    **_group(
        "A prompt is never cut: shorten it before you send it.",
        transforms=_EMPTY, truncate=(False, "END", "NONE"), truncate_prompt_tokens=(), truncation=("disabled", False),
        truncation_side=(),
    ),
    **_group(
        "Use 'max_tokens'.",
        max_length=(), max_new_tokens=(), max_output_tokens=(), n_predict=(-1,), num_predict=(-1,),
    ),
    **_group("Use 'min_tokens'.", min_length=(0,), min_new_tokens=(0,)),
    **_group("Use 'repetition_penalty'.", repeat_penalty=(1,)),
    **_group("Use 'seed'.", random_seed=(-1,), sampler_seed=(-1,)),
    **_group("Use 'stop'.", stop_regex=_EMPTY, stop_sequences=_EMPTY),
    **_group("Send it as a message of role 'system'.", instructions=("",), system=_EMPTY),
    **_group("Use /v1/completions.", prompt=(), suffix=("",)),
    **_group("Use /v1/responses of a server that has it.", input=(), previous_response_id=()),
    **_group("Serve with --chat-template FILE.", chat_template=()),
    **_group("Ask for n choices, and choose.", best_of=(1,)),
    **_group(
        "Only text is read and written.",
        audio=(), image_data=_EMPTY, images=_EMPTY, mm_processor_kwargs=_EMPTY, prompt_embeds=(), video=(),
    ),
    **_group(
        "Nothing is searched, called or kept on the server.",
        container=(), context_management=_EMPTY, data_sources=_EMPTY, mcp_servers=_EMPTY, models=_EMPTY,
        plugins=_EMPTY, web_search_options=(),
    ),
    **_group("One model is served, without adapters.", lora=(), lora_path=(), lora_request=()),
    **_group("Use 'reasoning_effort', 'enable_thinking' or 'thinking'.", reasoning=_EMPTY),
    **_group(
        "Reasoning comes in 'reasoning_content'.",
        include_reasoning=(True,), reasoning_format=("auto", "parsed", "deepseek"), separate_reasoning=(True,),
    ),
    **_group("The length of answers cannot be set by it.", verbosity=("medium",)),
    **_group(
        "The answer does not have this form.",
        echo=_OFF, include_stop_str_in_output=_OFF, logprob_start_len=(-1,), n_probs=(0,), no_stop_trim=_OFF,
        prompt_logprobs=(), return_hidden_states=_OFF, return_logprob=_OFF, return_routed_experts=_OFF,
        return_text_in_logprobs=_OFF, return_token_ids=_OFF, return_tokens=_OFF,
        return_tokens_as_token_ids=_OFF, skip_special_tokens=(True,), top_logprobs_num=(0,),
    ),
    **_group("It is not implemented.", kv_transfer_params=(), session_params=(), vllm_xargs=_EMPTY),
}  # fmt: skip


def refuse_unsupported_fields(fields: Mapping[str, Any]) -> None:
    """Refuses fields of REFUSED among those that the schema does not declare. Raises Unsupported."""
    for name, value in fields.items():
        refused = REFUSED.get(name)
        if refused is not None:
            refused.refuse(name, value)


def _spelled(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
