"""Fields of OpenAI's, vLLM's, SGLang's, llama.cpp's and other servers' requests that are not implemented.

A field that would change the answer is refused unless its value is neutral: null, or the value that means "off" or
equals what happens here anyway. A field that changes nothing in the answer is ignored. A field that no table names is
ignored, too: clients send fields of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rootstock.errors import Unsupported

# They say who asks, how the server should schedule, bill, log or time the request, or how it should write what it
# would not write here in any case.
IGNORED = frozenset(
    {
        # OpenAI
        "metadata", "prediction", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
        "service_tier", "store",
        # Calls are not parsed yet, so that there is nothing to limit.
        "parallel_tool_calls",
        # vLLM, SGLang
        "data_parallel_rank", "extra_key", "priority", "request_id", "rid", "routing_key", "session_id",
        "spaces_between_special_tokens", "stream_reasoning",
        # llama.cpp
        "cache_prompt", "id_slot", "n_keep", "return_progress", "timings_per_token",
        # Of samplers whose switch is refused, and without effect while that is off
        "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent",
        "mirostat_eta", "mirostat_tau", "repeat_last_n", "smoothing_curve", "xtc_threshold",
        # OpenRouter, Anthropic
        "anthropic_beta", "anthropic_version", "betas", "provider", "usage",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Refused:
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
    **_group(
        "Answers cannot be constrained to a grammar or a schema yet.",
        ebnf=_EMPTY, grammar=_EMPTY, guided_choice=_EMPTY, guided_decoding_backend=(), guided_grammar=_EMPTY,
        guided_json=(), guided_json_object=_OFF, guided_regex=_EMPTY, guided_whitespace_pattern=(),
        json_schema=(), output_config=_EMPTY, output_format=(), regex=_EMPTY, structural_tag=(),
        structured_outputs=_EMPTY,
    ),
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
    **_group(
        "How long the model reasons cannot be limited yet.",
        max_thinking_tokens=(), reasoning_budget=(-1,), thinking_budget=(-1,), thinking_token_budget=(-1,),
    ),
    **_group("Use 'reasoning_effort', 'enable_thinking' or 'thinking'.", reasoning=_EMPTY),
    **_group(
        "Reasoning stays in the answer as the model writes it.",
        include_reasoning=(True,), reasoning_format=("none",), separate_reasoning=_OFF,
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
    """`fields`: those that the schema does not declare. Raises Unsupported."""
    for name, value in fields.items():
        refused = REFUSED.get(name)
        if refused is not None:
            refused.refuse(name, value)


def _spelled(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
