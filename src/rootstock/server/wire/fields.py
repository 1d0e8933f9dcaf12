"""Fields of requests that several wire formats have: types of values, parameters of sampling, and reasoning.

Fields that OpenAI does not have (top_k, min_p, cache_salt, …) have the names of other OpenAI-compatible servers. A
value that asks for nothing is never refused: null, an empty value (`is_empty`), or a neutral value of the field
(`null_if`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import StopParams
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.errors import InvalidParameter, RequestError, Unsupported, shown
from rootstock.text.chat_template import TemplateNames
from rootstock.text.conversation.template import refuse_unread_variables
from rootstock.text.conversation.types import IgnoredField
from rootstock.text.limits import (
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

REASONING_SWITCHES = ("enable_thinking", "thinking")  # for reasoning: a template has one of them, or none
_EFFORT = "reasoning_effort"
_NO_EFFORT = "none"
# Levels that clients know. A template knows the levels of its model. The last of them is usually "high".
EFFORTS = (_NO_EFFORT, "minimal", "low", "medium", "high", "xhigh", "max")
_USUAL_EFFORTS = ("low", "medium", "high")
USUAL_VERBOSITY = "medium"
NO_VERBOSITY = "no model here has answers of several lengths to choose from"
# Names of other servers for the most tokens of reasoning; -1: any number.
_BUDGETS = ("max_thinking_tokens", "reasoning_budget", "thinking_budget", "thinking_token_budget")

Json = dict[str, Any]


def is_empty(value: Any) -> bool:
    """Returns whether a value asks for nothing in any field: null, or an empty text, list or object."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def null_if(*neutral: Any) -> BeforeValidator:
    """Reads values that ask for nothing as null."""
    return BeforeValidator(
        lambda value: None if any(type(value) is type(each) and value == each for each in neutral) else value
    )


def default_if_null(default: Any) -> BeforeValidator:
    """Reads null as the field's default, for a field whose type has no null."""
    return BeforeValidator(lambda value: default if value is None else value)


Count = Annotated[int, Field(ge=0, lt=2**63)]
Label = Annotated[str, Field(max_length=MAX_LABEL_CHARS)]
ModelName = Annotated[Label | None, null_if("")]
# `fail_fast`, because each wrong value would be an error of its own, and reporting many takes minutes. Keys are
# not checked: a key may be half of a surrogate pair, which is no valid text.
JsonObject = dict[Any, Any]


class Wire(BaseModel):
    # extra="allow" keeps the fields that are not declared, for `refuse_unsupported`.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class ClosedWire(Wire):
    """A body of the server's own routes: a field that is not declared is refused.

    Without a misspelled one, the route would do something else: clear all models instead of one.
    """

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A field that is refused unless its value is neutral."""

    remedy: str
    neutral: tuple[Any, ...] = ()  # values besides null and empty ones that change nothing
    empty_asks: bool = False  # an empty value asks for the feature

    def refuse(self, name: str, value: Any) -> None:
        """Raises Unsupported unless `value` is neutral."""
        if value is None or value in self.neutral or (is_empty(value) and not self.empty_asks):
            return
        known = f", or send {_spelled(self.neutral[0])}" if self.neutral else ""
        raise Unsupported(name, f"{self.remedy} Leave it out{known}.")


def _spelled(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


def refused_fields(remedy: str, **neutral: tuple[Any, ...]) -> dict[str, RefusedField]:
    """Returns fields that are refused with one remedy, each with its neutral values."""
    return {name: RefusedField(remedy, values) for name, values in neutral.items()}


# Parameters of other servers that SamplingFields does not have: a new field leaves this table.
NOT_SAMPLED: Mapping[str, RefusedField] = refused_fields(
    "The sampler does not have it.",
    allowed_token_ids=(), bad_words=(), banned_tokens=(), custom_logit_processor=(),
    custom_params=(), do_sample=(True,), dry_multiplier=(0,), dynatemp_range=(0,), dynamic_temperature=(False,),
    encoder_repetition_penalty=(1,), epsilon_cutoff=(0,), eta_cutoff=(0,), guidance_scale=(1,),
    logits_processors=(), mirostat=(0,), mirostat_mode=(0,), negative_prompt=("",),
    no_repeat_ngram_size=(0,), penalty_alpha=(0,), samplers=(), sampler_order=(),
    sampler_priority=(), smoothing_factor=(0,), temperature_last=(False,), tfs=(1,), tfs_z=(1,), top_a=(0,),
    top_n_sigma=(-1, 0), typical=(1,), typical_p=(1,), xtc_probability=(0,),
)  # fmt: skip


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
    logit_bias: Annotated[
        Annotated[
            JsonObject, Field(max_length=MAX_LOGIT_BIASES, description="token ids to biases from -100 to 100")
        ]
        | None,
        null_if([], False),  # llama.cpp's types
    ] = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[
        str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None, null_if("")
    ] = None
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
        if max_tokens == -1:  # other servers' word for no limit
            max_tokens = None
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


# ---- reasoning


@dataclass(frozen=True, slots=True)
class ReasoningWish:
    """The wish of one field: to switch reasoning on or off, or an effort, or neither."""

    field: str
    value: Any  # as the client sends it
    switch: bool | None = None
    effort: str | None = None


class ReasoningOptions(Wire):
    """`reasoning` of OpenAI's Responses, and of OpenRouter's chats."""

    effort: Label | None = None
    enabled: bool | None = None
    max_tokens: Count | None = None


class ReasoningFields(Wire):
    """Fields about reasoning and the length of answers, and other variables of a chat template."""

    chat_template_kwargs: JsonObject | None = None
    enable_thinking: bool | None = None
    thinking: Annotated[
        bool | JsonObject | None,
        Field(description="true, false, or an object with a 'type': enabled, disabled, adaptive"),
        null_if({}),
    ] = None
    reasoning_effort: Annotated[Label | None, null_if("")] = None
    reasoning: ReasoningOptions | None = None
    verbosity: Annotated[Label | None, Field(description="no effect")] = None

    def reasoning_budget(self) -> int | None:
        """Returns the most tokens of reasoning; None: any number. Raises InvalidParameter."""
        asked = {name: (self.model_extra or {}).get(name) for name in _BUDGETS}
        if isinstance(self.thinking, dict):
            asked["thinking.budget_tokens"] = self.thinking.get("budget_tokens")
        if self.reasoning is not None:
            asked["reasoning.max_tokens"] = self.reasoning.max_tokens
        given = {name: value for name, value in asked.items() if value not in (None, -1)}
        for name, value in given.items():
            if type(value) is not int or not 0 <= value < 2**63:
                raise InvalidParameter(name, value, "a number of tokens")
        return min(given.values(), default=None)

    def template_variables(self, names: TemplateNames) -> tuple[Json, tuple[IgnoredField, ...]]:
        """Returns the template's variables, and the fields that it cannot follow.

        Raises InvalidParameter and Unsupported.
        """
        # An empty value of a variable that the template does not read has no effect either.
        given = {
            name: value
            for name, value in (self.chat_template_kwargs or {}).items()
            if value is not None and not (is_empty(value) and name not in names.variables)
        }
        wishes = [*_wishes_of(given, names), *self._wishes()]
        of_wishes = {wish.field.removeprefix(_KWARGS) for wish in wishes if wish.field.startswith(_KWARGS)}
        variables = {name: value for name, value in given.items() if name not in of_wishes}
        refuse_unread_variables(variables, names)
        ignored = set_reasoning(variables, wishes, names)
        return variables, (*ignored, *self._ignored_verbosity())

    def _ignored_verbosity(self) -> Iterator[IgnoredField]:
        if self.verbosity not in (None, "", USUAL_VERBOSITY):
            yield IgnoredField("verbosity", NO_VERBOSITY)

    def _switch(self) -> bool | None:
        """Returns the wish of `thinking`. Raises InvalidParameter."""
        return switch_of_thinking(self.thinking)

    def _wishes(self) -> Iterator[ReasoningWish]:
        options = self.reasoning or ReasoningOptions()
        yield ReasoningWish("enable_thinking", self.enable_thinking, switch=self.enable_thinking)
        yield ReasoningWish("thinking", self.thinking, switch=self._switch())
        yield ReasoningWish("reasoning.enabled", options.enabled, switch=options.enabled)
        yield ReasoningWish(_EFFORT, self.reasoning_effort, effort=self.reasoning_effort)
        yield ReasoningWish("reasoning.effort", options.effort, effort=options.effort or None)


def asks_no_reasoning(name: str, value: Any) -> bool:
    """Returns whether a field of ReasoningFields has a value that a model without reasoning follows."""
    try:
        _, ignored = ReasoningFields.model_validate({name: value}).template_variables(TemplateNames())
    except (ValidationError, RequestError):
        return False
    return all(one.wants_reasoning is False for one in ignored)


_KWARGS = "chat_template_kwargs."


def _wishes_of(kwargs: Mapping[Any, Any], names: TemplateNames) -> Iterator[ReasoningWish]:
    """Yields the wishes of variables that the template does not read, although others of their kind do."""
    for name in (*REASONING_SWITCHES, _EFFORT):
        value = kwargs.get(name)
        if name in names.variables:
            continue
        if name in REASONING_SWITCHES and isinstance(value, bool):
            yield ReasoningWish(_KWARGS + name, value, switch=value)
        elif name == _EFFORT and isinstance(value, str) and len(value) <= MAX_LABEL_CHARS:
            yield ReasoningWish(_KWARGS + name, value, effort=value or None)


def switch_of_thinking(asked: bool | Json | None) -> bool | None:
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


def set_reasoning(
    variables: Json, wishes: Iterable[ReasoningWish], names: TemplateNames
) -> tuple[IgnoredField, ...]:
    """Sets the template's variables of reasoning, and returns the fields that it cannot follow.

    A template may have a switch, a variable of the effort, both or neither. An effort above none also switches
    reasoning on, unless another field switches it off. Raises InvalidParameter for fields that contradict each other.
    """
    switch = next((name for name in REASONING_SWITCHES if name in names.variables), None)
    ignored: list[IgnoredField] = []

    def agree(wish: ReasoningWish, name: str, value: bool | str) -> None:
        if variables.setdefault(name, value) != value:
            raise InvalidParameter(
                wish.field, wish.value, f"in agreement with {name}={shown(variables[name])}"
            )

    def ignore(wish: ReasoningWish, reason: str, wants_reasoning: bool | None) -> None:
        ignored.append(IgnoredField(wish.field, reason, wants_reasoning))

    in_order = sorted(wishes, key=lambda wish: wish.switch is None)  # switches outrank efforts
    for wish in in_order:
        if wish.switch is not None:
            if switch is None:
                ignore(wish, "the model's chat template has no switch for reasoning", wish.switch)
            else:
                agree(wish, switch, wish.switch)
        elif wish.effort is not None:
            is_off = wish.effort == _NO_EFFORT
            is_read = _EFFORT in names.variables
            # Without a switch, the word is all that such a template gets.
            is_told = not is_off or switch is None or _NO_EFFORT in names.literals
            if is_read and is_told and variables.get(_EFFORT) != wish.effort:
                agree(wish, _EFFORT, _known_effort(wish.effort, names))
            if switch is None:
                if not is_read:
                    ignore(wish, "the model's chat template knows no efforts", False if is_off else None)
            elif is_off:
                agree(wish, switch, False)
            elif not variables.setdefault(switch, True) and not is_read:
                ignore(wish, "reasoning is switched off", None)
    return tuple(ignored)


def _known_effort(effort: str, names: TemplateNames) -> str:
    """Returns the effort that the template knows in the place of one of EFFORTS. Other names are the template's."""
    if effort in names.literals or effort in _USUAL_EFFORTS or effort not in EFFORTS[1:]:
        return effort
    return "low" if effort == "minimal" else "high"
