"""Diagnostics of the prompt cache in the shapes of Anthropic's and of OpenAI's API.

Both compare a request with an earlier one that the client names by the id of its answer: Anthropic's clients by
`diagnostics.previous_message_id`, OpenAI's by `prompt_cache_options.comparison_response_id`. Their reasons name the
part of the request that has changed. A prompt that was not found for another cause has no reason among theirs. The
field `rootstock` has the cause in each case: it is an addition of this server.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from rootstock.engine.diagnosis import Diagnosis
from rootstock.engine.request import Finished
from rootstock.pipeline.model import PreparedChat, ServedModel
from rootstock.server.wire.api_call import Diagnose, Json
from rootstock.server.wire.fields import REASONING_SWITCHES
from rootstock.text.prompts.fingerprint import Comparison, EarlierNotFound

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
_OPENAI_SETTINGS = dict.fromkeys(("reasoning_effort", *REASONING_SWITCHES), "reasoning_effort_changed")


def anthropic_diagnose(model: ServedModel, chat: PreparedChat, previous_message: str | None) -> Diagnose:
    """Compares a chat with the earlier one that a client of Anthropic's names; None on a first turn."""
    if previous_message is None:
        return partial(anthropic_diagnostics, comparison=None)
    found = model.fingerprints.compare(chat.owner, previous_message, chat.fingerprint)
    return partial(anthropic_diagnostics, comparison=found)


def openai_diagnose(
    model: ServedModel, chat: PreparedChat, comparison_response: str | None
) -> Diagnose | None:
    """Compares a chat with the earlier one that a client of OpenAI's names. None: it names none."""
    if comparison_response is None:
        return None
    found = model.fingerprints.compare(chat.owner, comparison_response, chat.fingerprint)
    return partial(openai_diagnostics, comparison=found)


def openai_fields(diagnose: Diagnose, ends: Iterable[Finished]) -> Json:
    """Returns the field of a response whose request asks for it.

    Of several choices it tells of the one that found the fewest tokens, as the usage does.
    """
    found = [end.diagnosis for end in ends if end.diagnosis is not None]
    told = diagnose(min(found, key=lambda diagnosis: diagnosis.cached_tokens)) if found else None
    return {"prompt_cache_diagnostics": told}


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
            reason = {"type": "unavailable"}  # Anthropic's for a change of `thinking` and the like
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
    missed = _missed(diagnosis, comparison)
    if missed == 0:  # another request may have cached the tokens that the earlier one did not
        return {"type": "cache_hit", "rootstock": cause_of(diagnosis)}
    if comparison.change is None:
        return {"type": "unavailable", "rootstock": cause_of(diagnosis)}
    reason = _OPENAI_SETTINGS.get(comparison.setting or "", _OPENAI_REASONS[comparison.change])
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": missed,
        "comparison_reusable_tokens": comparison.earlier_prompt_tokens,
        "rootstock": cause_of(diagnosis),
    }


def _missed(diagnosis: Diagnosis, comparison: Comparison) -> int:
    """Counts the tokens of the earlier prompt that this one computes again, at most."""
    # Every prompt computes its last token.
    reusable = min(comparison.earlier_prompt_tokens, diagnosis.prompt_tokens - 1)
    return max(0, reusable - diagnosis.cached_tokens)
