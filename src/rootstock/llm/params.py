"""Public sampling parameters of the library, with vLLM's names."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import StopParams
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.errors import InvalidParameter

_SEEDS = range(-(2**63), 2**64)
_BIAS_LIMIT = 100.0
DEFAULT_MAX_TOKENS = 1024  # of an answer for which none is given: a base model may never end one by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one generation, with vLLM's names. Raises InvalidParameter when it is made.

    Differs from vLLM in two defaults. A parameter that is None is the one that the model's `generation_config.json`
    recommends, so `SamplingParams(max_tokens=64)` keeps the model's temperature. `max_tokens` None means
    `DEFAULT_MAX_TOKENS`, not 16: most answers end before, and one that does not is cut with a warning. Give
    `max_tokens=llm.context_limit` for as many as the context has room for.
    """

    temperature: float | None = None  # 0: greedy. None, here and for the next four: the model's, or OpenAI's
    top_p: float | None = None
    top_k: int | None = None  # 0 or -1: off
    min_p: float | None = None
    repetition_penalty: float | None = None  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0
    # token id → -100 (never) to 100 (only these)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: another one for each request, drawn from the LLM's `seed`
    n: int = 1  # answers to each prompt; with a seed, answer i uses seed + i
    max_tokens: int | None = None  # None: DEFAULT_MAX_TOKENS, or `min_tokens` if that is more
    min_tokens: int = 0  # tokens before any token that ends the answer may be sampled
    stop: str | Sequence[str] = ()  # cut from the text
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: no log-probabilities; 0: of each token; k: also of the k best
    prompt_logprobs: int | None = None  # the same for the prompt, which is then computed whole

    def __post_init__(self) -> None:
        for name, least, most, allowed in (
            ("temperature", 0.0, math.inf, "0 or more"),
            ("top_p", 0.0, 1.0, "from 0 to 1"),
            ("min_p", 0.0, 1.0, "from 0 to 1"),
            ("repetition_penalty", 0.0, math.inf, "more than 0"),
        ):
            if getattr(self, name) is not None:
                _refuse_outside(name, getattr(self, name), least, most, allowed)
        if self.repetition_penalty == 0:
            raise InvalidParameter("repetition_penalty", self.repetition_penalty, "a number more than 0")
        _refuse_outside("presence_penalty", self.presence_penalty, -math.inf, math.inf, "finite")
        _refuse_outside("frequency_penalty", self.frequency_penalty, -math.inf, math.inf, "finite")
        for name, least in (
            ("top_k", -1),
            ("n", 1),
            ("max_tokens", 0),
            ("min_tokens", 0),
            ("logprobs", 0),
            ("prompt_logprobs", 0),
        ):
            value = getattr(self, name)
            optional = name not in ("n", "min_tokens")
            if not (_is_int(value) and value >= least) and not (value is None and optional):
                raise InvalidParameter(name, value, f"an integer, {least} or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        if self.seed is not None and not (_is_int(self.seed) and self.seed in _SEEDS):
            raise InvalidParameter("seed", self.seed, "an integer of 64 bits")
        self._refuse_wrong_stops()
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidParameter("logit_bias", self.logit_bias, "a mapping of token ids to biases")
        for token, bias in self.logit_bias.items():
            if not _is_int(token) or token < 0:
                raise InvalidParameter("logit_bias", token, "a mapping of token ids to biases")
            _refuse_outside(f"logit_bias[{token}]", bias, -_BIAS_LIMIT, _BIAS_LIMIT, "from -100 to 100")

    def _refuse_wrong_stops(self) -> None:
        if not isinstance(self.stop, str | Sequence):
            raise InvalidParameter("stop", self.stop, "a string, or a list of strings, none of them empty")
        if not isinstance(self.stop_token_ids, Sequence):
            raise InvalidParameter("stop_token_ids", self.stop_token_ids, "a list of token ids")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise InvalidParameter("stop", text, "a string, or a list of strings, none of them empty")
        for token in self.stop_token_ids:
            if not _is_int(token) or token < 0:
                raise InvalidParameter("stop_token_ids", token, "a list of token ids")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling(self, defaults: SamplingDefaults) -> ResolvedSampling:
        """Returns the part that chooses tokens, with `defaults` for the parameters that are None."""

        def given(value: float | None, default: float) -> float:
            return default if value is None else float(value)

        return ResolvedSampling(
            temperature=given(self.temperature, defaults.temperature),
            top_p=given(self.top_p, defaults.top_p),
            top_k=max(0, defaults.top_k if self.top_k is None else self.top_k),
            min_p=given(self.min_p, defaults.min_p),
            repetition_penalty=given(self.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.logit_bias),
            seed=self.seed,
            top_logprobs=self.logprobs,
        )

    def stopping(self) -> StopParams:
        """Returns the part that ends an answer."""
        return StopParams(
            max_tokens=max(DEFAULT_MAX_TOKENS, self.min_tokens)
            if self.max_tokens is None
            else self.max_tokens,
            min_tokens=self.min_tokens,
            stop_strings=self.stop_strings,
            stop_tokens=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


def warn_of_default(prompts: int, stacklevel: int) -> None:
    """Warns that answers to so many prompts were cut by a limit that the caller has not set."""
    warnings.warn(
        f"The answers to {prompts} prompts were cut at {DEFAULT_MAX_TOKENS:,} tokens or at the end of the context, "
        "because SamplingParams has no max_tokens.",
        stacklevel=stacklevel + 1,
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse_outside(name: str, value: Any, least: float, most: float, allowed: str) -> None:
    """Raises InvalidParameter unless `value` is a finite number in the range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and least <= value <= most):
        raise InvalidParameter(name, value, f"a number, {allowed}")
