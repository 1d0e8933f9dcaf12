"""Diagnostics of the prompt cache in the shapes of Anthropic's and of OpenAI's API.

Both compare a request with an earlier one that the client names by the id of its answer: Anthropic's clients by
`diagnostics.previous_message_id`, OpenAI's by `prompt_cache_options.comparison_response_id`. Their reasons name the
part of the request that has changed. A prompt that was not found for another cause has no reason among theirs. The
field `rootstock` has the cause in each case: it is an addition of this server.
"""

from __future__ import annotations

from typing import Any

from rootstock.engine.diagnosis import Diagnosis
from rootstock.engine.prompts.fingerprint import Comparison, EarlierNotFound

Json = dict[str, Any]

_ANTHROPIC_REASONS = {
    "model": "model_changed",
    "system": "system_changed",
    "tools": "tools_changed",
    "messages": "messages_changed",
}
_OPENAI_REASONS = {
    "model": "model_changed",
    "tools": "tools_changed",
    "system": "input_changed",
    "messages": "input_changed",
    "settings": "input_changed",
}
_OPENAI_SETTINGS = {"reasoning_effort": "reasoning_effort_changed", "tool_choice": "tools_changed"}


def cause_of(diagnosis: Diagnosis) -> Json:
    """Returns the true cause, as the cache saw it."""
    return {
        "cause": diagnosis.cause,
        "position": diagnosis.position,
        "prompt_tokens": diagnosis.prompt_tokens,
        "cached_tokens": diagnosis.cached_tokens,
        "missed_tokens": diagnosis.missed_tokens,
    }


def anthropic_diagnostics(
    diagnosis: Diagnosis, comparison: Comparison | EarlierNotFound | None
) -> Json | None:
    """Returns the `diagnostics` of a message. `comparison` is None on a first turn, which names no earlier message.

    None: nothing has changed, and all that was cached was found.
    """
    reason: Json | None = None
    match comparison:
        case EarlierNotFound():
            reason = {"type": "previous_message_not_found"}
        case Comparison(change="settings"):
            reason = {
                "type": "unavailable"
            }  # Anthropic's for a change of `tool_choice`, `thinking` and the like
        case Comparison(change=change) if change is not None:
            missed = _missed(diagnosis, comparison)
            reason = {"type": _ANTHROPIC_REASONS[change], "cache_missed_input_tokens": missed}
    if reason is None and diagnosis.cause == "none":
        return None
    return {"cache_miss_reason": reason, "rootstock": cause_of(diagnosis)}


def openai_diagnostics(diagnosis: Diagnosis, comparison: Comparison | EarlierNotFound) -> Json:
    """Returns the `prompt_cache_diagnostics` of a response that names an earlier one."""
    if isinstance(comparison, EarlierNotFound):
        return {"type": "comparison_response_not_found", "rootstock": cause_of(diagnosis)}
    if comparison.change is None:
        kind = "cache_hit" if diagnosis.cause == "none" else "unavailable"
        return {"type": kind, "rootstock": cause_of(diagnosis)}
    reason = _OPENAI_SETTINGS.get(comparison.setting or "", _OPENAI_REASONS[comparison.change])
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": _missed(diagnosis, comparison),
        "comparison_reusable_tokens": comparison.earlier_prompt_tokens,
        "rootstock": cause_of(diagnosis),
    }


def _missed(diagnosis: Diagnosis, comparison: Comparison) -> int:
    """Counts the tokens of the earlier prompt that this one computes again, at most."""
    return max(0, min(comparison.earlier_prompt_tokens, diagnosis.prompt_tokens) - diagnosis.cached_tokens)
