"""Errors that Rootstock raises on purpose.

    RootstockError
    ├── RequestError                    400  something in one request; the server goes on
    │   ├── InvalidJson                 400  the body of the request
    │   ├── JsonTooComplex              400  refused before it is parsed
    │   ├── InvalidParameter            400  a field has a wrong type or value
    │   ├── MissingParameter            400
    │   ├── Unsupported                 400  a field that would change the answer and is not implemented
    │   ├── ConstraintRefused           400  a schema or a grammar that is impossible, unsupported or too large
    │   ├── EmptyPrompt                 400
    │   ├── PromptTooLong               400
    │   ├── PromptTextTooLong           400  refused by its characters, before it is tokenized
    │   ├── InputTooLong                400  of an embedding
    │   ├── SpecialTokenInText          400
    │   ├── CompletionTooLong           400
    │   ├── TooManyLogprobs             400
    │   ├── ChatTemplateMissing         400
    │   ├── ChatTemplateFailed          400  the model's template refuses these messages
    │   ├── ModelNotFound               404
    │   ├── ModelNotLoaded              409  for a route that loads no model
    │   ├── ModelBusy                   409  requests use the model that should be unloaded
    │   ├── AdapterNotLoaded            404  a LoRA adapter that was unloaded meanwhile
    │   ├── AdapterExists               409  another adapter, or a model, has this name
    │   ├── AdapterLimit                400  no further adapter may be loaded
    │   ├── IdleWorkOff                 404  the server caches no prompts in idle time
    │   ├── ResponseNotFound            404  no stored response of the tenant has this id
    │   ├── PreviousResponseNotFound    400
    │   ├── HistoryTooLong              400  the responses before one are too many, or too large
    │   ├── RouteNotFound               404
    │   ├── MethodNotAllowed            405
    │   ├── HttpRefused                 400  by the web framework
    │   ├── Unauthorized                401
    │   │   └── KeysDiffer              401  two headers with different API keys
    │   ├── AdminOnly                   403
    │   ├── KeyNotAllowed               403  the role of a key does not allow the route
    │   ├── ModelNotAllowed             403  the tenant's list of models does not have it
    │   ├── CsrfTokenMissing            403  a change that a browser's session asks for
    │   ├── HostNotAllowed              403  a Host header that is not allowed: DNS rebinding
    │   ├── OriginNotAllowed            403  a web page of another origin
    │   ├── BodyTooLarge                413
    │   ├── ContentTypeNotJson          415
    │   ├── MalformedHttp               400  the head or the framing of the request
    │   ├── RequestTimeout              408  a head or a body that arrives too slowly
    │   ├── UrlTooLong                  414
    │   └── HeadTooLarge                431
    ├── Overloaded                      429  try again later
    │   ├── QueueFull                   429
    │   ├── RateLimited                 429  a limit of the tenant's own
    │   ├── ClearUnderWay               429
    │   ├── ModelUnavailable            503  a model could not be loaded
    │   ├── IdleWorkFull                429  too many prompts wait to be cached in idle time
    │   ├── TooManyLogins               429  failed logins of one address
    │   ├── TooManyConnections          503
    │   └── TooManyBodyBytes            503  the bodies of all requests together
    ├── InternalError                   500  a bug in the server's own code
    ├── EngineError                     500
    │   ├── StepFailed                  500  a forward raised: only the requests of that step fail
    │   ├── EngineFault                 500  a bug of Rootstock: every open request fails, the cache is emptied
    │   ├── OutOfBlocks                 500  a request needs more blocks than the pool has, alone
    │   ├── SamplingFailed              500  no token can be chosen from a request's logits
    │   ├── ResponseStoreFailed         500
    │   ├── ConstraintFailed            400  a grammar that reached a limit while the answer was generated
    │   └── EngineStopped               503
    │       └── LLMClosed                    the library's LLM was closed
    └── StartupError                    exit status 2
        ├── InvalidOption                    an option, its value, the allowed values
        │   └── MemoryLacks                  a size beyond the free memory
        ├── AddressUnavailable
        ├── BudgetTooSmall
        ├── ConfigFileInvalid                the file of --config: its line, and the fault
        └── ModelError
            ├── ModelPathNotFound
            ├── ModelFileInvalid             config.json and the like: the file, the fault, the place
            ├── ModelTooLarge                the weights exceed the free memory, with the figures
            ├── ModelWeightsMissing
            ├── TokenizerUnusable
            ├── ChatTemplateInvalid          its syntax, with the line
            ├── AdapterUnusable          400 a LoRA adapter that is refused, and why
            ├── ModelUnsupported             an architecture or layer kind that is refused, and why
            └── SelfCheckFailed              packed attention and the model's own differ, with the figures

The message of an error states the remedy, and attributes have the data that a caller may need. `code` is stable and
machine-readable, `http_status` is the status of the HTTP response, `param` names the offending field if there is one.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rootstock.units import in_units

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_MOST_SHOWN_CHARS = 160
_LISTED_MODELS = 4


def shown(value: object) -> str:
    """Returns the repr of a wrong value, shortened: it may be a megabyte."""
    text = _SHORT.repr(value)
    return text if len(text) <= _MOST_SHOWN_CHARS else f"{text[:_MOST_SHOWN_CHARS]}..."


class RootstockError(Exception):
    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(RootstockError):
    code = "invalid_request"
    http_status = 400


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
            f"A message holds the special token {token!r}, which this model's tokenizer cannot read as plain text. "
            "Leave it out, or serve with --parse-special-tokens to have it act as a control token.",
            param="messages",
        )
        self.token = token


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
        listed = " or ".join(map(repr, served[:_LISTED_MODELS]))
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


class RouteNotFound(RequestError):
    code = "not_found"
    http_status = 404

    def __init__(self, route: str) -> None:
        super().__init__(f"There is no {route} here. GET /docs lists the routes.")


class MethodNotAllowed(RequestError):
    code = "method_not_allowed"
    http_status = 405

    def __init__(self, route: str) -> None:
        super().__init__(f"{route} is not allowed; see the Allow header.")


class HttpRefused(RequestError):
    code = "http_error"


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


class PrefixNotCached(RequestError):
    code = "prefix_not_cached"
    http_status = 404

    def __init__(self) -> None:
        super().__init__(
            "None of this prompt is cached: there is nothing to export. Send it in a request before, or warm it."
        )


class BundleRefused(RequestError):
    code = "bundle_refused"

    def __init__(self, reason: str) -> None:
        super().__init__(f"The bundle is refused: {reason}. Nothing was imported.")
        self.reason = reason


class ImportsOff(RequestError):
    code = "imports_off"
    http_status = 403

    def __init__(self) -> None:
        super().__init__(
            "This server takes no bundles: start it with --bundle-key FILE, the key that signs them, or with "
            "--unsigned-imports if everything that reaches it can be trusted."
        )


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


class Unauthorized(RequestError):
    code = "invalid_api_key"
    http_status = 401

    def __init__(
        self,
        message: str = "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
    ) -> None:
        super().__init__(message)


class KeysDiffer(Unauthorized):
    code = "api_keys_differ"

    def __init__(self) -> None:
        super().__init__("The headers Authorization and x-api-key hold different API keys. Send one of them.")


class AdminOnly(RequestError):
    code = "admin_only"
    http_status = 403

    def __init__(self, has_admin_key: bool) -> None:
        remedy = (
            "Send the admin key as 'Authorization: Bearer KEY'"
            if has_admin_key
            else "Serve with --admin-key KEY, and send that key as 'Authorization: Bearer KEY'"
        )
        super().__init__(f"This shows or changes data of all tenants. {remedy}.")


class KeyNotAllowed(RequestError):
    code = "key_not_allowed"
    http_status = 403

    def __init__(self, role: str) -> None:
        super().__init__(f"A key of the role {role!r} may not do this. Send a key of another role.")


class ModelNotAllowed(RequestError):
    code = "model_not_allowed"
    http_status = 403

    def __init__(self, asked: str) -> None:
        super().__init__(
            f"This key's tenant may not use model {shown(asked)}. Ask for another, or have it added to --api-keys.",
            param="model",
        )


class CsrfTokenMissing(RequestError):
    code = "csrf_token_missing"
    http_status = 403

    def __init__(self) -> None:
        super().__init__(
            "A browser's session may change things only with its token in the header X-CSRF-Token. Reload the page."
        )


class BodyTooLarge(RequestError):
    code = "body_too_large"
    http_status = 413

    def __init__(self, limit_bytes: int, option: str = "--max-body") -> None:
        super().__init__(
            f"The body of the request has more than {limit_bytes:,} bytes ({option}). Send less at once."
        )


class ContentTypeNotJson(RequestError):
    code = "unsupported_media_type"
    http_status = 415

    def __init__(self, header: str, value: str, expected: str = "application/json") -> None:
        utf8 = "in UTF-8 and " if expected == "application/json" else ""
        super().__init__(
            f"The request's {header} is {_SHORT.repr(value)}. Send the body as 'Content-Type: {expected}', "
            f"{utf8}without a Content-Encoding."
        )


class HostNotAllowed(RequestError):
    code = "host_not_allowed"
    http_status = 403

    def __init__(self, host: str) -> None:
        super().__init__(
            f"This server is not known as {_SHORT.repr(host)}. Address it by localhost or by its IP address, or "
            "serve with --allowed-hosts."
        )


class OriginNotAllowed(RequestError):
    code = "origin_not_allowed"
    http_status = 403

    def __init__(self, origin: str) -> None:
        super().__init__(
            f"Web pages of {_SHORT.repr(origin)} may not use this server. Serve with --allowed-origins to let them."
        )


class MalformedHttp(RequestError):
    code = "malformed_http"

    def __init__(self, detail: str) -> None:
        super().__init__(f"The request is not valid HTTP: {detail}.")


class RequestTimeout(RequestError):
    code = "request_timeout"
    http_status = 408

    def __init__(self, detail: str) -> None:
        super().__init__(f"The request came too slowly: {detail}. Send it again.")


class UrlTooLong(RequestError):
    code = "url_too_long"
    http_status = 414

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The URL of the request has more than {limit_bytes:,} bytes.")


class HeadTooLarge(RequestError):
    code = "head_too_large"
    http_status = 431

    def __init__(self, limit_bytes: int, limit_fields: int) -> None:
        super().__init__(
            f"The request has more than {limit_fields} header fields, or more than {limit_bytes:,} bytes of them "
            "or of chunk extensions and trailers."
        )


class Overloaded(RootstockError):
    code = "overloaded"
    http_status = 429


class QueueFull(Overloaded):
    code = "queue_full"

    def __init__(self, max_batch: int, max_queue: int) -> None:
        super().__init__(
            f"The server is full: {max_batch} requests run (--max-batch) and {max_queue} wait (--max-queue). Try "
            "again in a moment."
        )
        self.max_batch = max_batch
        self.max_queue = max_queue


class ModelUnavailable(Overloaded):
    code = "model_unavailable"
    http_status = 503

    def __init__(self, name: str, cause: str, retry_s: float) -> None:
        super().__init__(
            f"The model {shown(name)} could not be loaded ({cause}); the server's log has the details. The server "
            f"tries again for a request that comes after {max(1, round(retry_s))} s."
        )
        self.cause = cause
        self.retry_s = retry_s


class RateLimited(Overloaded):
    code = "rate_limit_exceeded"

    def __init__(self, name: str, limit: int, retry_after_s: float) -> None:
        super().__init__(
            f"The tenant has reached its limit: {name} is {limit:,} (--api-keys). Try again in "
            f"{max(1, math.ceil(retry_after_s))} s."
        )
        self.name = name
        self.limit = limit
        self.retry_after_s = retry_after_s


class ClearUnderWay(Overloaded):
    code = "clear_under_way"

    def __init__(self) -> None:
        super().__init__("Records are being removed for an earlier request. Try again in a moment.")


class TransferUnderWay(Overloaded):
    code = "transfer_under_way"

    def __init__(self) -> None:
        super().__init__("As many bundles are moved as this server moves at once. Try again in a moment.")


class IdleWorkFull(Overloaded):
    code = "idle_work_full"

    def __init__(self, waiting: int, limit: int) -> None:
        super().__init__(
            f"Too many prompts wait to be cached in idle time: {waiting:,} of yours, of at most {limit:,}. Try again "
            "when some of them are cached."
        )


class TooManyLogins(Overloaded):
    code = "too_many_logins"

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"Too many logins with a wrong key. Try again in {wait_s:.0f} seconds.")


class TooManyConnections(Overloaded):
    code = "too_many_connections"
    http_status = 503

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The server has its most connections, {limit:,} (--max-connections). Try again in a moment."
        )


class TooManyBodyBytes(Overloaded):
    code = "too_many_body_bytes"
    http_status = 503

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"With this request, the bodies that the server holds would exceed {limit_bytes:,} bytes. Try again in a "
            "moment."
        )


class Draining(Overloaded):
    code = "draining"
    http_status = 503

    def __init__(self) -> None:
        super().__init__(
            "The server finishes its requests and stops. Send this one to another server, or try again."
        )


class InternalError(RootstockError):
    def __init__(self, path: str, cause: Exception) -> None:
        detail = f"{type(cause).__name__}. The server's log says more. Please report it."
        super().__init__(f"The server failed on {path}: {detail}")


class EngineError(RootstockError):
    code = "engine_error"


class StepFailed(EngineError):
    code = "step_failed"

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            # The cause's message is left out: it may describe other requests of the same forward.
            f"The forward pass of this request failed: {type(cause).__name__}; the server's log says why. Other "
            "requests go on; send it again, and report it if it fails again."
        )
        self.cause = cause


class EngineFault(EngineError):
    code = "engine_fault"

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            f"The engine failed: {type(cause).__name__}; the server's log says why. Every open request is dropped, "
            "and it has started with an empty cache. Send the request again, and report this: it is a bug."
        )
        self.cause = cause


class OutOfBlocks(EngineError):
    code = "out_of_blocks"

    def __init__(self, needed_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"The request needs {needed_bytes:,} more bytes of KV cache, and no bytes of the {budget_bytes:,} can be "
            "freed. Serve with a larger --kv-budget."
        )
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes


class SamplingFailed(EngineError):
    code = "sampling_failed"

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"No token could be chosen: {reason}. Other requests go on. If the logits are not finite, the "
            "model overflows in this dtype: serve with --dtype float32 or bfloat16."
        )


class ResponseStoreFailed(EngineError):
    code = "response_store_failed"

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            f"The store of responses failed: {type(cause).__name__}; the server's log says why. Send the history as "
            "'input'."
        )
        self.cause = cause


class ConstraintFailed(EngineError):
    code = "constraint_failed"
    http_status = 400

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The grammar or schema of this request could not be followed any further: {reason}. Other requests go "
            "on. Ask with a simpler one: this one would fail again."
        )
        self.reason = reason


class EngineStopped(EngineError):
    code = "engine_stopped"
    http_status = 503

    def __init__(self, reason: str = "The server is shutting down") -> None:
        super().__init__(f"{reason}. Try again when it is back.")


class LLMClosed(EngineStopped):
    code = "llm_closed"

    def __init__(self) -> None:
        RootstockError.__init__(self, "This LLM was closed, which ended its requests. Make another one.")


class StartupError(RootstockError):
    code = "startup_error"


class InvalidOption(StartupError):
    code = "invalid_option"

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{option} is {value!r}, but must be {allowed}.")
        self.option = option
        self.value = value
        self.allowed = allowed


class MemoryLacks(InvalidOption):
    """A size beyond the memory that is free: it may be enough when another model is unloaded."""


class ConfigFileInvalid(StartupError):
    code = "config_file_invalid"

    def __init__(self, path: Path, line: int, detail: str) -> None:
        super().__init__(f"{path}, line {line}: {detail}")
        self.path = path
        self.line = line
        self.detail = detail


class AddressUnavailable(StartupError):
    code = "address_unavailable"

    def __init__(self, host: str, port: int, detail: str) -> None:
        super().__init__(
            f"Cannot listen at {host}:{port}: {detail}. Stop the process that listens there, or choose another "
            "--host or --port (0 takes any free port)."
        )
        self.host = host
        self.port = port


class BudgetTooSmall(StartupError):
    code = "budget_too_small"

    def __init__(self, budget_bytes: int, needed_bytes: int, block_bytes: int, state_bytes: int = 0) -> None:
        and_state = f" and a recurrent state {in_units(state_bytes)}" if state_bytes else ""
        needed = in_units(needed_bytes)
        if needed == in_units(budget_bytes):  # the difference is lost in rounding
            needed += f" ({needed_bytes - budget_bytes:,} bytes more)"
        super().__init__(
            f"--kv-budget is {in_units(budget_bytes)}, but at least {needed} are needed: one block takes "
            f"{in_units(block_bytes)}{and_state}. Raise --kv-budget or lower --block-size."
        )
        self.budget_bytes = budget_bytes
        self.needed_bytes = needed_bytes
        self.block_bytes = block_bytes
        self.state_bytes = state_bytes


class ModelError(StartupError):
    code = "model_error"


class ModelPathNotFound(ModelError):
    code = "model_path_not_found"

    def __init__(self, model: str, detail: str) -> None:
        super().__init__(
            f"No model at {model!r}: {detail}. Give a directory with config.json, or a hub name."
        )
        self.model = model


class ModelFileInvalid(ModelError):
    code = "model_file_invalid"

    def __init__(
        self, model: str, file: str, detail: str, remedy: str = "Correct it, or fetch it again"
    ) -> None:
        super().__init__(f"The {file} of the model at {model!r} cannot be used: {detail}. {remedy}.")
        self.model = model
        self.file = file


class ModelTooLarge(ModelError):
    code = "model_too_large"

    def __init__(self, model: str, weights_bytes: int, dtype: str, free_bytes: int, memory: str) -> None:
        super().__init__(
            f"The weights of {model!r} need at least {in_units(weights_bytes)} in {dtype}, but "
            f"{in_units(free_bytes)} of the {memory} is free. Free memory, or serve with a smaller --dtype, or "
            "--quantize int8 or int4. "
            "--no-memory-check loads them all the same."
        )
        self.model = model
        self.weights_bytes = weights_bytes
        self.free_bytes = free_bytes


class ModelWeightsMissing(ModelError):
    code = "model_weights_missing"

    def __init__(self, model: str, detail: str) -> None:
        super().__init__(f"The model at {model!r} has no usable weights: {detail}.")
        self.model = model


class TokenizerUnusable(ModelError):
    code = "tokenizer_unusable"

    def __init__(self, model: str, detail: str) -> None:
        super().__init__(
            f"The model at {model!r} has no usable tokenizer: {detail}. Put its tokenizer.json and "
            "tokenizer_config.json beside config.json."
        )
        self.model = model


class ChatTemplateInvalid(ModelError):
    code = "chat_template_invalid"

    def __init__(self, source: str, detail: str) -> None:
        super().__init__(
            f"The chat template of {source} cannot be used: {detail}. Correct it, or give another with "
            "--chat-template FILE."
        )


class AdapterUnusable(ModelError):
    code = "adapter_unusable"
    http_status = 400

    def __init__(self, adapter: str, reason: str) -> None:
        super().__init__(f"The LoRA adapter {shown(adapter)} cannot be used: {reason}.")
        self.adapter = adapter
        self.reason = reason


class ModelUnsupported(ModelError):
    code = "model_unsupported"

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"Rootstock cannot run {model!r}: {reason}.")
        self.model = model
        self.reason = reason


class SelfCheckFailed(ModelError):
    code = "self_check_failed"

    def __init__(self, model: str, figure: float, tolerance: float, measure: str) -> None:
        super().__init__(
            f"{model!r} failed its self-check: {measure} is {figure:.3g}, at most {tolerance:.3g} is allowed. The "
            "paged forward would give wrong answers, so the model is refused; please report the architecture."
        )
        self.model = model
        self.figure = figure
        self.tolerance = tolerance
