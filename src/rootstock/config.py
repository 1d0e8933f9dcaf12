"""Configuration: frozen dataclasses, resolved once at the start. Their fields declare the options that set them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rootstock.errors import InvalidOption
from rootstock.fleet_config import KV_EVENTS, REMOTE, KVEventsConfig, RemoteConfig
from rootstock.options import (
    BUDGET,
    CACHE,
    DRAFT_TOKENS,
    FILE,
    FILES,
    FLEET,
    MEMORY_LIMIT,
    MODEL,
    NAMES,
    NAMES_EACH,
    NUMBER,
    OBSERVATION,
    RETENTION,
    SAMPLING,
    SCHEDULING,
    SERVER,
    SIZE,
    SWITCH,
    TEMPLATE,
    TIERS,
    TIME,
    WHOLE,
    ValueForm,
    check_options,
    option,
)
from rootstock.units import GIB, KIB, MIB

ANY_NAME = "*"  # an alias

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "int4")
EVICTION_POLICIES = ("value", "lru")
SAMPLING_SOURCES = ("model", "openai")
MEDIA = ("mention", "refuse")
LOADS = ("start", "demand")
MAX_THREADS = 4096
MAX_MODEL_NAME_CHARS = 256
LEAST_DISK_BUDGET_BYTES = MIB  # a quarter is reserved for the index's write-ahead log
LEAST_KEEP_ALIVE_S = 0.1
LEAST_IDLE_UNLOAD_S = 1.0
MAX_METRICS_TENANTS = 1000  # each has about 150 series per model
MAX_KEY_LENGTH = 1024
MAX_KEYS = 100_000
MAX_SALT_LENGTH = 1024  # characters; the limit of a tenant's name as well
KEY_FORM = f"1 to {MAX_KEY_LENGTH:,} printable ASCII characters without spaces"


def _refuse_unless_a_name(flag: str, name: str) -> None:
    if not (1 <= len(name) <= MAX_MODEL_NAME_CHARS and name.isprintable() and name.strip()):
        raise InvalidOption(flag, name, f"a name of 1 to {MAX_MODEL_NAME_CHARS} printable characters")


def is_key(text: str) -> bool:
    return re.fullmatch(rf"[!-~]{{1,{MAX_KEY_LENGTH}}}", text) is not None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int = option(
        32, "block-size", CACHE, "Tokens per cache block.", WHOLE, least=1, most=4096, advanced=True
    )
    # None: a share of the memory that is free after the model is loaded
    budget_bytes: int | None = option(
        None,
        "kv-budget",
        CACHE,
        "Memory of the KV cache, such as 4GiB. auto: half of the memory that is free after loading (85 % on a GPU), "
        "but no more than --max-batch requests of maximum length can use.",
        BUDGET,
        above=0,
        vllm="kv-cache-memory-bytes",
        per_model=True,
    )
    enabled: bool = option(
        True,
        "cache",
        CACHE,
        "Enable prefix caching. --no-cache: Disable prefix caching (for comparison).",
        SWITCH,
        two_forms=True,
        vllm="enable-prefix-caching",
        vllm_off="no-enable-prefix-caching",
    )
    eviction: str = option(
        "value",
        "eviction",
        CACHE,
        "Order of eviction. value: The entry that saves the least prefill per byte, weighted by its chance of reuse, "
        "is evicted first. lru: The least recently used one is.",
        choices=EVICTION_POLICIES,
        advanced=True,
    )
    # Part of an automatic budget: of several models, on a device that takes memory at once, or of replicas.
    device_share: float = 1.0
    retained_share: float = option(
        0.9,
        "retained-share",
        RETENTION,
        "Part of the KV budget that cache hints may retain, from 0 to 1. Active tenants divide it.",
        NUMBER,
        least=0,
        most=1,
        advanced=True,
    )
    pinned_share: float = option(
        0.25,
        "pinned-share",
        RETENTION,
        "Part of the KV budget that can be pinned, from 0 to 1. Active tenants divide it.",
        NUMBER,
        least=0,
        most=1,
        advanced=True,
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Tiers below the device's memory. Without a directory and a host budget there are none."""

    disk_dir: Path | None = option(
        None,
        "disk-dir",
        TIERS,
        "Directory of the disk tier, which survives restarts. One server at a time can use it.",
        FILE,
        unset="no disk tier",
    )
    disk_budget_bytes: int = option(
        50 * GIB,
        "disk-budget",
        TIERS,
        "Maximum size of everything under --disk-dir, such as 50GiB.",
        SIZE,
        above=0,
    )
    disk_write: str = option(
        "back",
        "disk-write",
        TIERS,
        "back: Write blocks to disk when memory evicts them, and the rest at shutdown. through: Write all blocks "
        "as they are computed.",
        choices=("back", "through"),
        advanced=True,
    )
    # A CPU's pool is in RAM already and has no host tier.
    host_budget_bytes: int = option(
        0,
        "host-budget",
        TIERS,
        "Host RAM between an accelerator and the disk, such as 16GiB. Not for a CPU.",
        SIZE,
        least=0,
    )
    remote: RemoteConfig | None = option(
        None,
        "remote-url",
        FLEET,
        "Valkey or Redis server whose records several servers share, such as valkey://host:6379. rediss:// with a "
        "user and password: encrypted. In the query: timeout, ca (file), prefix (of keys).",
        REMOTE,
        metavar="ADDRESS",
        unset="no shared tier",
        secret=True,
    )
    remote_key_file: Path | None = option(
        None,
        "remote-key-file",
        FLEET,
        "File with a secret of 32 bytes or more, the same for all servers. Records carry a code made with it, so "
        "that others who can write to the shared server cannot plant records.",
        FILE,
        unset="no codes",
    )
    verify_hits: float = option(
        0.0,
        "verify-hits",
        TIERS,
        "Fraction of hits to recompute in idle time and compare, such as 0.01.",
        NUMBER,
        least=0,
        most=1,
        advanced=True,
    )
    queue_bytes: int = option(256 * MIB, "queue-bytes", "", "Limit of copies that wait to be written.", SIZE)

    def __post_init__(self) -> None:
        check_options(self)
        if self.disk_dir is not None and self.disk_budget_bytes < LEAST_DISK_BUDGET_BYTES:
            raise InvalidOption(
                "--disk-budget", self.disk_budget_bytes, f"at least {LEAST_DISK_BUDGET_BYTES:,} bytes"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    max_batch: int = option(
        64,
        "max-batch",
        SCHEDULING,
        "Maximum number of running requests.",
        WHOLE,
        least=1,
        vllm="max-num-seqs",
    )
    chunk_tokens: int = option(
        512,
        "chunk-tokens",
        SCHEDULING,
        "Maximum tokens of a step, decodes included. It bounds how long a prefill delays decodes.",
        WHOLE,
        least=1,
        vllm="max-num-batched-tokens",
    )
    max_queue: int = option(
        1024,
        "max-queue",
        SCHEDULING,
        "Maximum number of waiting requests. Further ones get status 429.",
        WHOLE,
        least=1,
        advanced=True,
    )
    max_session_wait_s: float = option(
        600.0,
        "max-session-wait",
        SCHEDULING,
        "Maximum time for which a request waits while other sessions need the memory, such as 10m. "
        "0: No session waits for another.",
        TIME,
        least=0,
        most=86_400,
        advanced=True,
    )
    max_held: int = option(
        256,
        "max-held",
        SCHEDULING,
        "Maximum number of requests that wait for their session's place in memory. Further ones get status 429.",
        WHOLE,
        least=1,
        advanced=True,
    )
    context_limit: int | None = option(
        None,
        "context-limit",
        MODEL,
        "Maximum tokens of prompt and output together.",
        WHOLE,
        least=2,
        unset="the model's limit",
        vllm="max-model-len",
        per_model=True,
    )
    # None: the system's randomness. With a known seed, an answer would show how many requests came before it.
    seed: int | None = option(None, "seed", "", "Seed from which requests without a seed get theirs.", WHOLE)
    itl_target_s: float | None = option(
        None,
        "itl-target",
        SCHEDULING,
        "Maximum duration of a step with decodes, such as 100ms. Such steps take fewer prompt tokens to meet it, "
        "but at least 16.",
        TIME,
        above=0,
    )
    # None: 4 × chunk_tokens, or chunk_tokens where a forward runs one sequence. A longer chunk costs less per token,
    # and a new request waits for the same prompts either way.
    idle_chunk_tokens: int | None = option(
        None,
        "idle-chunk-tokens",
        SCHEDULING,
        "Maximum tokens of a step while no request decodes. Larger steps are faster.",
        WHOLE,
        unset="4 × --chunk-tokens",
        advanced=True,
    )
    # Per request and step; None: as many as are expected to pay.
    draft_tokens: int | None = option(
        0,
        "speculate",
        SAMPLING,
        "Speculative decoding with n-gram proposals: auto, off, or the maximum number of draft tokens.",
        DRAFT_TOKENS,
        least=0,
        allowed="at least 0",
    )
    answer_memory_bytes: int = option(
        64 * MIB,
        "answer-memory",
        CACHE,
        "Memory for the token ids of answers, such as 64MiB, and as much for the token ids of recent prompts. "
        "Prompts that repeat an answer get the ids that were sampled, which are cached.",
        SIZE,
        least=0,
        advanced=True,
    )
    idle_work: bool = option(
        False,
        "idle-work",
        RETENTION,
        "Cache expected prompts while no request runs: the known beginning of each conversation's next turn, and "
        "the prompts of --warm and /v1/cache/warm.",
        SWITCH,
        served_default=True,
        two_forms=True,
        library=False,  # a server's routes submit the work
    )
    # 0: any. None: most of the machine's memory if the model is in unified memory, else any.
    memory_limit_bytes: int | None = option(
        None,
        "memory-limit",
        CACHE,
        "Memory that the whole process may take, such as 24GiB. Near it, unused memory goes back to the system, and "
        "close to it requests wait until others have ended. off: no limit. auto: most of the machine's memory if "
        "the model is in unified memory, else off.",
        MEMORY_LIMIT,
        least=0,
    )

    kv_events: KVEventsConfig | None = option(
        None,
        "kv-events",
        FLEET,
        "Publish KV events in vLLM's format at a ZeroMQ address, such as tcp://*:5557?replay=5558, for routers that "
        "send a prompt to the replica that has its beginning. Events hold prompts as token ids, and are not "
        "encrypted. Needs rootstock[events]. In the query: replay (port), topic, format (map or array).",
        KV_EVENTS,
        metavar="ADDRESS",
        unset="no events",
        per_model=True,
        library=False,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.idle_chunk_tokens is not None and self.idle_chunk_tokens < self.chunk_tokens:
            raise InvalidOption(
                "--idle-chunk-tokens", self.idle_chunk_tokens, f"at least {self.chunk_tokens}"
            )


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A LoRA adapter to load with the model."""

    name: str  # by which requests choose it
    path: Path

    def __post_init__(self) -> None:
        _refuse_unless_a_name("--adapter", self.name)


def _parse_adapter(text: str, flag: str) -> AdapterConfig:
    """Parses NAME=PATH, or vLLM's {"name": …, "path": …}. Raises InvalidOption."""
    name, separator, path = text.partition("=")
    if text.lstrip().startswith("{"):
        try:
            given = json.loads(text)
        except ValueError:
            given = {}
        name, path = str(given.get("name", "")), str(given.get("path", ""))
        separator = "=" if set(given) <= {"name", "path", "base_model_name"} else ""
    if not (separator and name.strip() and path.strip()):
        raise InvalidOption(flag, text, "NAME=PATH, such as support=adapters/support")
    return AdapterConfig(name.strip(), Path(path.strip()))


def _parse_adapters(texts: Sequence[str], flag: str) -> tuple[AdapterConfig, ...]:
    return tuple(_parse_adapter(text, flag) for text in texts)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model: str  # a directory, a GGUF file or a hub name; with :VARIANT for one of several GGUF files
    device: str = option(
        "auto",
        "device",
        MODEL,
        "Device: auto, cpu, cuda or mps. MLX: auto or cpu.",
        choices=("auto", "cpu", "cuda", "mps"),
        per_model=True,
    )
    dtype: str = option(
        "auto",
        "dtype",
        MODEL,
        "Data type of the model: auto, float32, bfloat16 or float16.",
        choices=DTYPES,
        per_model=True,
    )
    served_name: str | None = option(
        None,
        "served-model-name",
        SERVER,
        "Model name in the API.",
        unset="the last part of MODEL's name",
        vllm="served-model-name",
    )
    trust_remote_code: bool = option(
        False,
        "trust-remote-code",
        MODEL,
        "Run Python code that comes with the model.",
        SWITCH,
        per_model=True,
    )
    threads: int | None = option(
        None,
        "threads",
        MODEL,
        "CPU threads of a forward, of the torch and the OpenVINO runtime.",
        WHOLE,
        least=1,
        most=MAX_THREADS,
        unset="chosen by the runtime",
    )
    state_dtype: str = option(
        "auto",
        "state-dtype",
        CACHE,
        "Data type of cached recurrent states: auto (the model's) or bfloat16.",
        choices=("auto", "bfloat16"),
        advanced=True,
        per_model=True,
    )
    quantize: str = option(
        "none",
        "quantize",
        MODEL,
        "Weight quantization of linear layers, on a CPU or by MLX: none, int8 or int4. Takes less memory and is "
        "faster at small batch sizes, but less exact.",
        choices=QUANTIZATIONS,
        per_model=True,
    )
    kv_dtype: str = option(
        "auto",
        "kv-dtype",
        CACHE,
        "Data type of cached K and V: auto (the model's), or int8 on a CPU or by MLX, which takes about half the "
        "memory of bfloat16 and is less exact.",
        choices=("auto", "int8"),
        vllm="kv-cache-dtype",
        per_model=True,
    )
    cuda_graphs: bool | None = option(
        None,
        "cuda-graphs",
        MODEL,
        "Run decode steps as CUDA graphs. They are compared with eager steps at startup.",
        SWITCH,
        unset="on CUDA devices",
        off="eager",
        vllm_off="enforce-eager",
        per_model=True,
    )
    attention: str = option(
        "auto",
        "attention",
        MODEL,
        "Backend of decode attention on a CPU: numba (compiled), torch, or auto (numba if it can be imported).",
        choices=("auto", "torch", "numba"),
        advanced=True,
        per_model=True,
    )
    memory_check: bool = option(
        True,
        "memory-check",
        CACHE,
        "Refuse, before loading, a model whose weights and KV cache exceed the free memory.",
        SWITCH,
        two_forms=True,
        per_model=True,
    )
    recheck: bool = option(
        False,
        "recheck",
        MODEL,
        "Check a model again that has passed its self-check on this machine. Models of fewer than 100 million "
        "parameters and those with code of their own are checked at each start.",
        SWITCH,
        per_model=True,
        advanced=True,
    )
    adapters: tuple[AdapterConfig, ...] = option(
        (),
        "adapter",
        MODEL,
        "LoRA adapter in PEFT's format, on MLX in mlx-lm's, too, which requests choose by NAME as their model. May "
        "be repeated.",
        ValueForm(list[str], _parse_adapters),
        metavar="NAME=PATH",
        unset="none",
        vllm="lora-modules",
    )
    # auto: OpenVINO for its graphs, MLX on Apple Silicon, torch elsewhere.
    runtime: str = option(
        "auto",
        "runtime",
        MODEL,
        "Library that computes the model: torch, mlx, openvino, or auto (openvino for its graphs, mlx on Apple "
        "Silicon if it is installed, else torch).",
        choices=("auto", "torch", "mlx", "openvino"),
        per_model=True,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.served_name is not None:
            _refuse_unless_a_name("--served-model-name", self.served_name)
        names = [adapter.name for adapter in self.adapters]
        for name in names:
            if names.count(name) > 1 or name == self.served_name:
                raise InvalidOption("--adapter", name, "a name of its own")


Task = Literal["generate", "embed"]  # of a model, in vLLM's words


@dataclass(frozen=True, slots=True)
class ServedModelConfig:
    """A model of a server, and the options that it has of its own.

    A field that declares nothing has the meaning of the server's option with the same field."""

    name: str  # in the API
    model: ModelConfig
    aliases: tuple[str, ...] = ()
    chat_template: str | None = None
    context_limit: int | None = None
    tool_parser: str = "auto"
    media: str | None = None  # None: as the server's
    budget_bytes: int | None = None  # of its own; None: a part of the budget that all models share
    kv_share: float = option(
        1.0,
        "kv-share",
        "",
        "Weight of its part of the KV budget where a device takes memory at once.",
        NUMBER,
        above=0,
        most=1000,
        per_model=True,
    )
    load: str = option(
        "start",
        "load",
        "",
        "start: Load it with the server. demand: Load it by its first request.",
        choices=LOADS,
        per_model=True,
    )
    idle_unload_s: float | None = option(
        None,
        "idle-unload",
        "",
        "Time without requests after which it is unloaded, such as 10m.",
        TIME,
        least=LEAST_IDLE_UNLOAD_S,
        unset="never",
        per_model=True,
    )
    pin: bool = option(
        False, "pin", "", "Never unload it, but when an operator asks.", SWITCH, per_model=True
    )
    task: Task | None = None  # None: its files tell it when they are loaded

    def __post_init__(self) -> None:
        _refuse_unless_a_name("name", self.name)
        for alias in self.aliases:
            _refuse_unless_a_name("alias", alias)
        check_options(self)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = option("127.0.0.1", "host", SERVER, "Address to listen at.")
    port: int = option(
        8000,
        "port",
        SERVER,
        "Port to listen at. 0: any free port.",
        WHOLE,
        least=0,
        most=65535,
        allowed="from 0 (any free port) to 65535",
    )
    # Without a tenant: its requests may name any tenant.
    api_key: str | None = option(
        None,
        "api-key",
        SERVER,
        "API key that clients must send, except to /health.",
        metavar="KEY",
        secret=True,
    )
    # Required by routes that show or clear data of all tenants.
    admin_key: str | None = option(
        None,
        "admin-key",
        SERVER,
        "Key that /v1/cache/stats, /v1/cache/explain and clearing the cache of all tenants require.",
        metavar="KEY",
        secret=True,
    )
    tenant_keys: Mapping[str, str] = field(default_factory=dict, repr=False)  # API key → tenant
    api_keys: Path | None = option(
        None,
        "api-keys",
        SERVER,
        "File of API keys with their tenants, roles and limits, in YAML or JSON, or with a line 'KEY TENANT' per "
        "key. Read again whenever it changes.",
        FILE,
        metavar="FILE",
        earlier=("api-keys-file",),
    )
    public_prompts: Path | None = option(
        None,
        "public-prompts",
        SERVER,
        "JSONL file of system prompts with tools, or of texts, whose cached K and V all tenants share. Tokens that "
        "follow them stay each tenant's own.",
        FILE,
        metavar="FILE",
    )
    explain: str = option(
        "own",
        "explain",
        SERVER,
        "Detail of /v1/cache/explain. own: about the prompt alone. all: also other requests' tokens, evictions and "
        "running requests with the same salt.",
        choices=("own", "all"),
    )
    chat_template: str | None = option(
        None,
        "chat-template",
        MODEL,
        "File with a Jinja chat template.",
        TEMPLATE,
        unset="the model's own",
        per_model=True,
    )
    sampling_defaults: str = option(
        "model",
        "sampling-defaults",
        SAMPLING,
        "Source of temperature, top_p, top_k, min_p and repetition_penalty for requests without them: the model's "
        "generation_config.json, or OpenAI's defaults (openai).",
        choices=SAMPLING_SOURCES,
        advanced=True,
    )
    warm: Path | None = option(
        None,
        "warm",
        RETENTION,
        "File of prompts to cache after the start, while no request runs: JSON lines, each the body of a request.",
        FILE,
        metavar="FILE",
    )
    parse_special_tokens: bool = option(
        False,
        "parse-special-tokens",
        SERVER,
        "Parse special tokens in messages as control tokens instead of plain text.",
        SWITCH,
        advanced=True,
    )
    tool_parser: str = option(
        "auto",
        "tool-parser",
        SERVER,
        "Format of the tool calls in answers: the name of a format in docs/answers.md, or none. "
        "auto: the format in which the chat template writes calls.",
        per_model=True,
    )
    drop_volatile: bool = option(
        True,
        "drop-volatile",
        CACHE,
        "Drop lines of known clients that change the head of every prompt, such as Claude Code's billing header. "
        "--no-drop-volatile: Keep them.",
        SWITCH,
        two_forms=True,
        advanced=True,
    )
    media: str = option(
        "mention",
        "media",
        SERVER,
        "Media in messages that the model does not read: audio, video, files, and images unless it sees them. "
        "mention: A line of text in the prompt says that there was one. refuse: The request gets status 400.",
        choices=MEDIA,
        per_model=True,
    )
    max_body_bytes: int = option(
        16 * MIB,
        "max-body",
        SERVER,
        "Maximum size of a request body, such as 16MiB. Larger ones get status 413.",
        SIZE,
        least=KIB,
        advanced=True,
    )
    max_connections: int = option(
        2048,
        "max-connections",
        SERVER,
        "Maximum open connections. Further ones get status 503.",
        WHOLE,
        least=1,
        advanced=True,
    )
    responses_file: Path | None = option(
        None,
        "responses-file",
        SERVER,
        "File that keeps responses of /v1/responses for previous_response_id. One server at a time can use it.",
        FILE,
        unset="in memory, until the server stops",
    )
    responses_budget_bytes: int = option(
        128 * MIB,
        "responses-budget",
        SERVER,
        "Maximum size of stored responses, such as 1GiB. The least recently used conversations are removed first.",
        SIZE,
        least=MIB,
        advanced=True,
    )
    # The server's own origin is always allowed.
    allowed_origins: tuple[str, ...] = option(
        (),
        "allowed-origins",
        SERVER,
        "Origins whose web pages may use the server, comma-separated, such as https://chat.example.com. *: all.",
        NAMES,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "allowed-hosts",
        SERVER,
        "Host names of this server, comma-separated. *: any.",
        NAMES,
        unset="local names and IP addresses if --host is a loopback address or there is no key, else any",
    )
    # None: any other name with one model, else no further name.
    aliases: tuple[str, ...] | None = option(
        None,
        "alias",
        SERVER,
        "Further model name in the API, such as gpt-4o, or gpt-4o=MODEL with several models. May be repeated, or "
        "hold several, comma-separated. *: any other name.",
        NAMES_EACH,
        metavar="NAME[=MODEL]",
        unset="* with one model",
        per_model=True,
    )
    adapter_directories: tuple[Path, ...] = option(
        (),
        "adapter-directory",
        SERVER,
        "Directory from which operators may load LoRA adapters while the server runs. May be repeated.",
        FILES,
        metavar="DIR",
        unset="none: no adapter may be loaded then",
        advanced=True,
    )
    dashboard: bool = option(
        True, "dashboard", OBSERVATION, "Serve a dashboard at / to browsers.", SWITCH, two_forms=True
    )
    show_prompts: bool = option(
        False,
        "show-prompts",
        OBSERVATION,
        "Show the text of cached prompts in the dashboard. A tenant's key shows the tenant's own prompts only.",
        SWITCH,
    )
    sse_keep_alive_s: float = option(
        10.0,
        "sse-keep-alive",
        SERVER,
        "Time after which a stream that has nothing to send sends a comment, or its API's event, which keeps clients "
        "and proxies from giving up, such as 10s. 0s: never.",
        TIME,
        advanced=True,
    )
    response_id_prefix: str = ""  # digits with which a replica's ids of responses begin, for its router
    sealing_key: bytes | None = field(
        default=None, repr=False
    )  # of items that clients keep; None: the store's own
    drain_timeout_s: float = option(
        30.0,
        "drain-timeout",
        SERVER,
        "Time that running requests have to finish after SIGTERM, such as 30s. New ones are refused meanwhile. A "
        "second signal ends it. 0s: none.",
        TIME,
    )
    metrics_tenants: int = option(
        20,
        "metrics-tenants",
        OBSERVATION,
        "Tenants with time series of their own in /metrics, those with the most requests. The others are added up.",
        WHOLE,
        least=0,
        most=MAX_METRICS_TENANTS,
        advanced=True,
    )
    traces: bool = option(
        False,
        "traces",
        OBSERVATION,
        "Export an OpenTelemetry span for each request to a model, without its text, by OTLP over HTTP, as the "
        "variables OTEL_EXPORTER_OTLP_… say. Needs the package's extra otel.",
        SWITCH,
    )
    log_format: str = option(
        "text",
        "log-format",
        OBSERVATION,
        "Format of log lines on standard error: text or json.",
        choices=("text", "json"),
    )
    log_level: str = option(
        "warning",
        "log-level",
        OBSERVATION,
        "Least level of log lines: debug, info, warning or error.",
        choices=("debug", "info", "warning", "error"),
    )
    access_log: bool = option(
        False,
        "access-log",
        OBSERVATION,
        "Log a line for each HTTP request: its id, route, status, tokens and times, and no text.",
        SWITCH,
    )

    def __post_init__(self) -> None:
        for flag, key in (("--api-key", self.api_key), ("--admin-key", self.admin_key)):
            if key is not None and not is_key(key):
                raise InvalidOption(flag, "(not shown)", KEY_FORM)
        if self.admin_key is not None and (
            self.admin_key == self.api_key or self.admin_key in self.tenant_keys
        ):
            raise InvalidOption("--admin-key", "(not shown)", "another key than those of clients")
        if self.api_key in self.tenant_keys:
            raise InvalidOption("--api-key", "(not shown)", "another key than those of clients")
        check_options(self)
        if 0 < self.sse_keep_alive_s < LEAST_KEEP_ALIVE_S:
            allowed = f"0s (off), or at least {LEAST_KEEP_ALIVE_S:g}s"
            raise InvalidOption("--sse-keep-alive", f"{self.sse_keep_alive_s:g}s", allowed)
        for alias in self.aliases or ():
            _refuse_unless_a_name("--alias", alias)
        for origin in self.allowed_origins:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+", origin):
                raise InvalidOption(
                    "--allowed-origins",
                    origin,
                    "*, or origins such as https://chat.example.com, in lower case",
                )
        for host in self.allowed_hosts:
            if not re.fullmatch(r"\*|(\*\.)?[a-z0-9._-]+|[0-9a-f:]+", host):
                raise InvalidOption(
                    "--allowed-hosts",
                    host,
                    "*, or names without a port, in lower case, such as *.example.com",
                )


@dataclass(frozen=True, slots=True)
class Configuration:
    """All that the options of a server, or of an `LLM`, set."""

    model: ModelConfig
    cache: CacheConfig
    engine: EngineConfig
    tier: TierConfig
    server: ServerConfig
