"""Errors of one request: its fields, its prompt, and the models and stored things that it names."""

from __future__ import annotations

from collections.abc import Sequence

from rootstock.errors.base import RequestError, quoted, shown

_LISTED_MODELS = 4


class InvalidJson(RequestError):
    code = "invalid_json"

    def __init__(self, detail: str) -> None:
        super().__init__(f"The body of the request is not JSON: {detail}.")


class JsonTooComplex(RequestError):
    code = "json_too_complex"

    def __init__(self, detail: str) -> None:
        super().__init__(f"The body of the request has {detail}. Send less in one request.")
        self.detail = detail


class InvalidParameter(RequestError):
    code = "invalid_parameter"

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"'{name}' is {shown(value)}, but must be {allowed}.", param=name)
        self.name = name
        self.value = value
        self.allowed = allowed


class MissingParameter(RequestError):
    code = "missing_parameter"

    def __init__(self, name: str) -> None:
        super().__init__(f"'{name}' is missing.", param=name)


class Unsupported(RequestError):
    code = "unsupported_parameter"

    def __init__(self, name: str, remedy: str) -> None:
        super().__init__(f"'{name}' is not supported here. {remedy}", param=name)


class IdleWorkOff(RequestError):
    code = "idle_work_off"
    http_status = 404

    def __init__(self) -> None:
        super().__init__(
            "This server caches no prompts in idle time. Start it without --no-idle-work and --no-cache."
        )


class ConstraintRefused(RequestError):
    code = "invalid_constraint"

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(f"'{param}' cannot be enforced: {reason}.", param=param)
        self.reason = reason


class EmptyPrompt(RequestError):
    code = "empty_prompt"

    def __init__(self, param: str = "prompt") -> None:
        super().__init__("The prompt has no tokens. Send at least one token of text.", param=param)


class PromptTooLong(RequestError):
    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, limit_tokens: int, *, param: str = "prompt") -> None:
        super().__init__(
            f"The prompt has {prompt_tokens:,} tokens, but at most {limit_tokens - 1:,} fit into the limit of "
            f"{limit_tokens:,} tokens with one token of answer. Shorten the prompt, or serve with a larger "
            "--kv-budget or --context-limit.",
            param=param,
        )
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens


class PromptTextTooLong(RequestError):
    code = "context_length_exceeded"

    def __init__(self, chars: int, limit_tokens: int) -> None:
        super().__init__(
            f"The prompt has {chars:,} characters, which make more than {limit_tokens:,} tokens, the limit of prompt "
            "and answer. Shorten the prompt, or serve with a larger --kv-budget or --context-limit.",
            param="prompt",
        )
        self.chars = chars
        self.limit_tokens = limit_tokens


class InputTooLong(RequestError):
    code = "context_length_exceeded"

    def __init__(self, length: int, unit: str, limit_tokens: int, *, param: str = "input") -> None:
        super().__init__(
            f"The input has {length:,} {unit}, but the model takes at most {limit_tokens:,} tokens. Divide the "
            "text, and send each part as an input of its own.",
            param=param,
        )
        self.limit_tokens = limit_tokens


class SpecialTokenInText(RequestError):
    code = "special_token_in_text"

    def __init__(self, token: str) -> None:
        super().__init__(
            f"A message holds the special token {quoted(token)}, which this model's tokenizer cannot read as plain "
            "text. Leave it out, or serve with --parse-special-tokens to have it act as a control token.",
            param="messages",
        )
        self.token = token


class ImageUnusable(RequestError):
    code = "invalid_image"

    def __init__(self, name: str, reason: str, remedy: str) -> None:
        super().__init__(f"The image at '{name}' cannot be read: {reason}. {remedy}", param=name)
        self.reason = reason


class CompletionTooLong(RequestError):
    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_tokens: int, limit_tokens: int) -> None:
        super().__init__(
            f"The prompt's {prompt_tokens:,} tokens and max_tokens={max_tokens:,} make "
            f"{prompt_tokens + max_tokens:,}, over the limit of {limit_tokens:,} tokens. Ask for at most "
            f"{limit_tokens - prompt_tokens:,} tokens.",
            param="max_tokens",
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.limit_tokens = limit_tokens


class TooManyLogprobs(RequestError):
    code = "too_many_logprobs"

    def __init__(
        self,
        *,
        prompts: int,
        choices: int,
        prompt_tokens: int,
        max_tokens: int,
        top: int,
        count: int,
        limit: int,
    ) -> None:
        super().__init__(
            f"One request may ask for {limit:,} log-probabilities, but this one asks for {count:,}: "
            f"prompts {prompts:,}, choices of each {choices:,}, prompt tokens to be scored {prompt_tokens:,}, "
            f"most tokens of an answer {max_tokens:,}, alternatives to each token {top:,}. "
            "Lower max_tokens, n or the number of alternatives, or send fewer prompts at once.",
            param="logprobs",
        )
        self.count = count
        self.limit = limit


class ChatTemplateMissing(RequestError):
    code = "chat_template_missing"

    def __init__(self) -> None:
        super().__init__(
            "This model has no chat template, so messages cannot become a prompt. Use /v1/completions, or "
            "serve it with --chat-template FILE.",
            param="messages",
        )


class ChatTemplateFailed(RequestError):
    code = "chat_template_failed"

    def __init__(self, detail: str) -> None:
        super().__init__(f"The model's chat template refuses these messages: {detail}", param="messages")
        self.detail = detail


class ModelNotFound(RequestError):
    code = "model_not_found"
    http_status = 404

    def __init__(self, asked: str, served: Sequence[str]) -> None:
        listed = " or ".join(map(quoted, served[:_LISTED_MODELS]))
        if len(served) > _LISTED_MODELS:
            listed += ", or for another one that /v1/models lists"
        super().__init__(
            f"Model {shown(asked)} is not served here. Ask for {listed}, or serve with --alias.",
            param="model",
        )


class ModelNotLoaded(RequestError):
    code = "model_not_loaded"
    http_status = 409

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The model {shown(name)} is not loaded. A request to it loads it, and so does POST /v1/models/load.",
            param="model",
        )


class ModelBusy(RequestError):
    code = "model_busy"
    http_status = 409

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The model {shown(name)} cannot be unloaded now: requests use it, it is being loaded, or it is served "
            "for good. Try again when they have ended.",
            param="model",
        )


class AdapterNotLoaded(RequestError):
    code = "adapter_not_loaded"
    http_status = 404

    def __init__(self, adapter: str) -> None:
        super().__init__(
            f"The LoRA adapter {shown(adapter)} is not loaded, or was unloaded meanwhile.", param="model"
        )
        self.adapter = adapter


class AdapterExists(RequestError):
    code = "adapter_exists"
    http_status = 409

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The name {shown(name)} is taken by a model or by another adapter. Unload that adapter first, or choose "
            "another name.",
            param="lora_name",
        )
        self.name = name


class AdapterLimit(RequestError):
    code = "adapter_limit"

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} LoRA adapters are loaded, and no more are allowed. Unload one first.")
        self.limit = limit


class ResponseNotFound(RequestError):
    code = "response_not_found"
    http_status = 404

    def __init__(self, id: str) -> None:
        super().__init__(
            f"There is no stored response {shown(id)}. It was sent with 'store': false, or deleted, or evicted to "
            "make room for later ones (--responses-budget)."
        )


class PinNotFound(RequestError):
    code = "pin_not_found"
    http_status = 404

    def __init__(self, id: str) -> None:
        super().__init__(
            f"There is no pin {shown(id)}. It was released, or dropped to make room for a request. "
            "GET /v1/cache/pins lists the pins.",
            param="id",
        )


class PinNotGranted(RequestError):
    code = "pin_not_granted"
    http_status = 409

    def __init__(self, reason: str) -> None:
        super().__init__(f"Nothing is pinned: {reason}.")


class PreviousResponseNotFound(RequestError):
    code = "previous_response_not_found"

    def __init__(self, id: str) -> None:
        super().__init__(
            f"The previous response {shown(id)}, or one before it, is not stored: it was sent with 'store': false, "
            "or deleted, or evicted. Send the whole history as 'input'.",
            param="previous_response_id",
        )


class HistoryTooLong(RequestError):
    code = "history_too_long"

    def __init__(self, id: str, detail: str) -> None:
        super().__init__(
            f"The history that ends with response {shown(id)} has {detail}. Send a shorter one as 'input'.",
            param="previous_response_id",
        )
