"""Fields of requests that several wire formats have: types of values, and parameters of sampling.

Fields that OpenAI does not have (top_k, min_p, cache_salt, …) have the names of other OpenAI-compatible servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from rootstock.engine.limits import (
    MAX_LABEL_CHARS,
    MAX_LOGIT_BIASES,
    MAX_REPETITION_PENALTY,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    refuse_surrogates,
)
from rootstock.engine.request import ResolvedSampling, StopParams
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.errors import InvalidParameter

REASONING_SWITCHES = ("enable_thinking", "thinking")  # a template has one of them, or none

Count = Annotated[int, Field(ge=0, lt=2**63)]
Label = Annotated[str, Field(max_length=MAX_LABEL_CHARS)]
# `fail_fast`, because each wrong value would be an error of its own, and reporting many takes minutes. Keys are
# not checked: a key may be half of a surrogate pair, which is no valid text.
JsonObject = dict[Any, Any]


class Wire(BaseModel):
    # extra="allow" keeps the fields that are not declared, for `refuse_unsupported`.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class SamplingFields(Wire):
    """Parameters of sampling, and conditions that end an answer."""

    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**63, description="0 and -1: off")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: (
        Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None
    ) = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            JsonObject, Field(max_length=MAX_LOGIT_BIASES, description="token ids to biases from -100 to 100")
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    user: Label | None = None
    cache_salt: Annotated[str | None, Field(description="prefixes are shared only within one salt")] = None

    def sampling(
        self, vocab_size: int, defaults: SamplingDefaults, top_logprobs: int | None
    ) -> ResolvedSampling:
        def given(value: Any, default: Any) -> Any:
            return default if value is None else value

        return ResolvedSampling(
            temperature=given(self.temperature, defaults.temperature),
            top_p=given(self.top_p, defaults.top_p),
            top_k=max(0, given(self.top_k, defaults.top_k)),
            min_p=given(self.min_p, defaults.min_p),
            repetition_penalty=given(self.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=given(self.presence_penalty, 0.0),
            frequency_penalty=given(self.frequency_penalty, 0.0),
            logit_bias=_biases(self.logit_bias or {}, vocab_size),
            seed=self.seed,
            top_logprobs=top_logprobs,
        )

    def stopping(self, max_tokens: int | None, vocab_size: int) -> StopParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        for text in stop:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidParameter("stop", text, f"strings of 1 to {MAX_STOP_CHARS} characters")
            refuse_surrogates(text, "stop")
        for i, token in enumerate(self.stop_token_ids or ()):
            if not 0 <= token < vocab_size:
                raise InvalidParameter(
                    f"stop_token_ids[{i}]", token, f"a token id from 0 to {vocab_size - 1}"
                )
        min_tokens = self.min_tokens or 0
        if max_tokens is not None and min_tokens > max_tokens:
            raise InvalidParameter("min_tokens", min_tokens, f"at most max_tokens, which is {max_tokens}")
        return StopParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_strings=tuple(stop),
            stop_tokens=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


def _biases(logit_bias: Mapping[str, Any], vocab_size: int) -> dict[int, float]:
    biases = {}
    for key, bias in logit_bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) >= vocab_size:
            allowed = f"a mapping of token ids from 0 to {vocab_size - 1} to biases"
            raise InvalidParameter("logit_bias", key, allowed)
        if type(bias) not in (int, float) or not -100 <= bias <= 100:  # also NaN
            raise InvalidParameter(f"logit_bias.{key}", bias, "a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases
