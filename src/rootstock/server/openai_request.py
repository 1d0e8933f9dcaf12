"""OpenAI's wire format, inwards: what its requests may hold, and what that means to the engine.

Fields that OpenAI does not have (top_k, min_p, cache_salt, …) are named as other OpenAI-compatible servers name
them. Fields that are not known are ignored, as those servers do; a known field that cannot be obeyed and would
change the answer is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from rootstock.cache.plan import Tokens
from rootstock.engine.request import SamplingParams, StopParams
from rootstock.engine.text import TextCodec
from rootstock.errors import EmptyPrompt, InvalidParameter, Unsupported
from rootstock.server.chat import Conversation, chat_tokens, chosen_tools, conversation_of, text_tokens
from rootstock.server.defaults import SamplingDefaults

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512  # characters
MAX_TOP_LOGPROBS = 20

Json = dict[str, Any]


class Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Wire):
    include_usage: bool = False


class TemplateFields(Wire):
    """What a chat template is given beside the messages."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def conversation(self, messages: Sequence[Json]) -> Conversation:
        options = {"add_generation_prompt": self.add_generation_prompt, **(self.chat_template_kwargs or {})}
        if "chat_template" in options:
            raise Unsupported("chat_template_kwargs.chat_template", "Serve with --chat-template FILE.")
        if self.continue_final_message:
            if options["add_generation_prompt"]:
                raise InvalidParameter("add_generation_prompt", True, "false with 'continue_final_message'")
            options["continue_final_message"] = True
        return conversation_of(messages, chosen_tools(self.tools, self.tool_choice), options)


class GenerationFields(Wire):
    """What both routes share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, description="0 and -1: off")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    prompt_cache_key: Annotated[str | None, Field(description="a hint, never part of what is cached")] = None
    cache_salt: Annotated[str | None, Field(description="prefixes are shared only within one salt")] = None

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    def sampling(
        self, vocab_size: int, defaults: SamplingDefaults, top_logprobs: int | None
    ) -> SamplingParams:
        def given(value: Any, default: Any) -> Any:
            return default if value is None else value

        return SamplingParams(
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

    def stopping(self, max_tokens: int | None) -> StopParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidParameter("stop", stop, f"at most {MAX_STOP_STRINGS} strings")
        for text in stop:
            if not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise InvalidParameter("stop", text, f"strings of 1 to {MAX_STOP_LENGTH} characters")
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


class ChatCompletionRequest(GenerationFields, TemplateFields):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None

    def refuse_unsupported(self) -> None:
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise Unsupported("response_format", "Only {'type': 'text'} is.")
        if self.modalities is not None and self.modalities != ["text"]:
            raise Unsupported("modalities", "Only ['text'] is.")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameter("logprobs", self.logprobs, "true with 'top_logprobs'")


class CompletionRequest(GenerationFields):
    # Any: pydantic would try four alternatives, element by element, and answer with all that is wrong in each.
    prompt: Annotated[Any, Field(description="text, token ids, or a list of either")]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def refuse_unsupported(self) -> None:
        if self.best_of is not None and self.best_of != self.choices_per_prompt:
            raise Unsupported("best_of", "Ask for n choices, and choose.")
        if self.suffix:
            raise Unsupported("suffix", "Put the marks of the model's own infilling format into 'prompt'.")


class ExplainRequest(TemplateFields):
    """Either `messages`, as in a chat, or `prompt`, as in a completion."""

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    prompt: Any = None
    cache_salt: str | None = None

    def tokens(self, codec: TextCodec) -> Tokens:
        """Renders and tokenises: not for an event loop."""
        if (self.messages is None) == (self.prompt is None):
            raise InvalidParameter("messages", self.messages, "given, or else 'prompt', and not both")
        if self.messages is not None:
            return chat_tokens(codec, self.conversation(self.messages))
        prompts = prompts_of(self.prompt, codec)
        if len(prompts) != 1:
            raise InvalidParameter("prompt", self.prompt, "one prompt")
        if len(prompts[0].tokens) == 0:
            raise EmptyPrompt
        return prompts[0].tokens


class ClearRequest(Wire):
    """Whose prefixes go."""

    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: Tokens
    text: str | None  # None: given as tokens


def prompts_of(prompt: Any, codec: TextCodec) -> list[Prompt]:
    """Text, token ids, or a list of either. Tokenises: not for an event loop."""
    if isinstance(prompt, str) or _are_ids(prompt):
        return [_prompt_of(prompt, codec)]
    if not isinstance(prompt, list):
        raise InvalidParameter("prompt", prompt, "a string, a list of token ids, or a list of either")
    if not prompt:
        raise EmptyPrompt()
    ids = type(prompt[0]) is int
    for i, each in enumerate(prompt):
        if type(each) is not int if ids else not isinstance(each, str) and not _are_ids(each):
            allowed = "a token id" if ids else "a string or a list of token ids"
            raise InvalidParameter(f"prompt[{i}]", each, allowed)
    return [_prompt_of(each, codec) for each in prompt]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def _prompt_of(prompt: str | list[int], codec: TextCodec) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(text_tokens(codec, prompt), prompt)
    least, largest = min(prompt), max(prompt)
    if not 0 <= least <= largest < 2**31:
        wrong = least if least < 0 else largest
        raise InvalidParameter("prompt", wrong, "token ids of the model's vocabulary")
    return Prompt(np.array(prompt, dtype=np.int32), None)


def _biases(logit_bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    biases = {}
    for key, bias in logit_bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) >= vocab_size:
            allowed = f"a mapping of token ids from 0 to {vocab_size - 1} to biases"
            raise InvalidParameter("logit_bias", key, allowed)
        if not -100 <= bias <= 100:
            raise InvalidParameter(f"logit_bias.{key}", bias, "from -100 to 100")
        biases[int(key)] = bias
    return biases
