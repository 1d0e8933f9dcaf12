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
    │   ├── WebSocketRefused            426
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
    │   ├── SessionsFull                429
    │   ├── EmbeddingsFull              429  the embeddings of all requests together
    │   ├── RateLimited                 429  a limit of the tenant's own
    │   ├── ClearUnderWay               429
    │   ├── ModelUnavailable            503  a model could not be loaded
    │   ├── IdleWorkFull                429  too many prompts wait to be cached in idle time
    │   ├── CompilerBusy                503  too many grammars that take long are being compiled
    │   ├── TooManyConnections          503
    │   └── TooManyBodyBytes            503  the bodies of all requests together
    ├── InternalError                   500  a bug in the server's own code
    ├── CacheMisuse                          a wrong call of the cache by an engine of one's own
    ├── EngineError                     500
    │   ├── StepFailed                  500  a forward raised: only the requests of that step fail
    │   ├── PoolsLost                   500  a forward raised and left the pools unusable
    │   ├── EngineFault                 500  a bug of Rootstock: every open request fails, the cache is emptied
    │   ├── OutOfBlocks                 500  a request needs more blocks than the pool has, alone
    │   ├── SamplingFailed              500  no token can be chosen from a request's logits
    │   ├── ResponseStoreFailed         500
    │   ├── ClearFailed                 500  records may remain on the disk
    │   ├── ConstraintFailed            400  a grammar that reached a limit while the answer was generated
    │   └── EngineStopped               503
    │       ├── LLMForked                    the library's LLM was made in the parent of this process
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

from rootstock.errors.base import RequestError, RootstockError, quoted, shown
from rootstock.errors.engine import (
    CacheMisuse,
    ClearFailed,
    ConstraintFailed,
    EngineError,
    EngineFault,
    EngineStopped,
    ImageFailed,
    InternalError,
    LLMClosed,
    LLMForked,
    OutOfBlocks,
    PoolsLost,
    ResponseStoreFailed,
    SamplingFailed,
    StepFailed,
)
from rootstock.errors.http import (
    AdminOnly,
    BodyTooLarge,
    ContentTypeNotJson,
    CsrfTokenMissing,
    HeadTooLarge,
    HostNotAllowed,
    HttpRefused,
    KeyNotAllowed,
    KeysDiffer,
    MalformedHttp,
    MethodNotAllowed,
    ModelNotAllowed,
    OriginNotAllowed,
    RequestTimeout,
    RouteNotFound,
    Unauthorized,
    UrlTooLong,
    WebSocketRefused,
)
from rootstock.errors.overload import (
    ClearUnderWay,
    CompilerBusy,
    Draining,
    EmbeddingsFull,
    IdleWorkFull,
    ImagesFull,
    ModelUnavailable,
    Overloaded,
    QueueFull,
    RateLimited,
    SessionsFull,
    TooManyBodyBytes,
    TooManyConnections,
)
from rootstock.errors.requests import (
    AdapterExists,
    AdapterLimit,
    AdapterNotLoaded,
    ChatTemplateFailed,
    ChatTemplateMissing,
    CompletionTooLong,
    ConstraintRefused,
    EmptyPrompt,
    HistoryTooLong,
    IdleWorkOff,
    ImageUnusable,
    InputTooLong,
    InvalidJson,
    InvalidParameter,
    JsonTooComplex,
    MissingParameter,
    ModelBusy,
    ModelNotFound,
    ModelNotLoaded,
    PinNotFound,
    PinNotGranted,
    PreviousResponseNotFound,
    PromptTextTooLong,
    PromptTooLong,
    ResponseNotFound,
    SpecialTokenInText,
    TooManyLogprobs,
    Unsupported,
)
from rootstock.errors.startup import (
    AdapterUnusable,
    AddressUnavailable,
    BudgetTooSmall,
    ChatTemplateInvalid,
    ConfigFileInvalid,
    InvalidOption,
    MemoryLacks,
    ModelError,
    ModelFileInvalid,
    ModelPathNotFound,
    ModelTooLarge,
    ModelUnsupported,
    ModelWeightsMissing,
    SelfCheckFailed,
    StartupError,
    TokenizerUnusable,
)

__all__ = [
    "AdapterExists",
    "AdapterLimit",
    "AdapterNotLoaded",
    "AdapterUnusable",
    "AddressUnavailable",
    "AdminOnly",
    "BodyTooLarge",
    "BudgetTooSmall",
    "CacheMisuse",
    "ChatTemplateFailed",
    "ChatTemplateInvalid",
    "ChatTemplateMissing",
    "ClearFailed",
    "ClearUnderWay",
    "CompilerBusy",
    "CompletionTooLong",
    "ConfigFileInvalid",
    "ConstraintFailed",
    "ConstraintRefused",
    "ContentTypeNotJson",
    "CsrfTokenMissing",
    "Draining",
    "EmbeddingsFull",
    "EmptyPrompt",
    "EngineError",
    "EngineFault",
    "EngineStopped",
    "HeadTooLarge",
    "HistoryTooLong",
    "HostNotAllowed",
    "HttpRefused",
    "IdleWorkFull",
    "IdleWorkOff",
    "ImageFailed",
    "ImageUnusable",
    "ImagesFull",
    "InputTooLong",
    "InternalError",
    "InvalidJson",
    "InvalidOption",
    "InvalidParameter",
    "JsonTooComplex",
    "KeyNotAllowed",
    "KeysDiffer",
    "LLMClosed",
    "LLMForked",
    "MalformedHttp",
    "MemoryLacks",
    "MethodNotAllowed",
    "MissingParameter",
    "ModelBusy",
    "ModelError",
    "ModelFileInvalid",
    "ModelNotAllowed",
    "ModelNotFound",
    "ModelNotLoaded",
    "ModelPathNotFound",
    "ModelTooLarge",
    "ModelUnavailable",
    "ModelUnsupported",
    "ModelWeightsMissing",
    "OriginNotAllowed",
    "OutOfBlocks",
    "Overloaded",
    "PinNotFound",
    "PinNotGranted",
    "PoolsLost",
    "PreviousResponseNotFound",
    "PromptTextTooLong",
    "PromptTooLong",
    "QueueFull",
    "RateLimited",
    "RequestError",
    "RequestTimeout",
    "ResponseNotFound",
    "ResponseStoreFailed",
    "RootstockError",
    "RouteNotFound",
    "SamplingFailed",
    "SelfCheckFailed",
    "SessionsFull",
    "SpecialTokenInText",
    "StartupError",
    "StepFailed",
    "TokenizerUnusable",
    "TooManyBodyBytes",
    "TooManyConnections",
    "TooManyLogprobs",
    "Unauthorized",
    "Unsupported",
    "UrlTooLong",
    "WebSocketRefused",
    "quoted",
    "shown",
]
