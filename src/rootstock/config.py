"""Configuration: frozen dataclasses, resolved once at the start."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rootstock.errors import InvalidOption
from rootstock.units import GIB, KIB, MIB, TIB

ANY_NAME = "*"  # an alias
_UNITS = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB}
_UNITS |= {"K": KIB, "M": MIB, "G": GIB, "T": TIB, "KB": 1000, "MB": 1000**2, "GB": 1000**3}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

RUNTIMES = ("auto", "torch", "mlx")
DEVICES = ("auto", "cpu", "cuda", "mps")
STATE_DTYPES = ("auto", "bfloat16")
KV_DTYPES = ("auto", "int8")
ATTENTIONS = ("auto", "torch", "numba")
DISK_WRITES = ("back", "through")
QUANTIZATIONS = ("none", "int8", "int4")
MAX_THREADS = 4096
MAX_MODEL_NAME_CHARS = 256
DTYPES = ("auto", "float32", "bfloat16", "float16")
LEAST_DISK_BUDGET_BYTES = MIB  # a quarter is reserved for the index's write-ahead log
EXPLANATIONS = ("own", "all")
LOG_FORMATS = ("text", "json")
MEDIA = ("mention", "refuse")
LOG_LEVELS = ("debug", "info", "warning", "error")
LEAST_KEEP_ALIVE_S = 0.1
LOADS = ("start", "demand")
LEAST_IDLE_UNLOAD_S = 1.0
MAX_METRICS_TENANTS = 1000  # each has about 150 series per model
MAX_KEY_LENGTH = 1024
MAX_KEYS = 100_000
MAX_SALT_LENGTH = 1024  # characters; the limit of a tenant's name as well
KEY_FORM = f"1 to {MAX_KEY_LENGTH:,} printable ASCII characters without spaces"


def parse_bytes(text: str, option: str = "--kv-budget") -> int:
    """Parses a size such as "4GiB", "512M" or "1500000" to bytes."""
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text)
    unit = found[2].upper() if found else "?"
    if found is None or unit not in _UNITS:
        raise InvalidOption(option, text, "a size such as 4GiB, 512MiB or 1500000")
    return int(float(found[1]) * _UNITS[unit])


def parse_seconds(text: str, option: str) -> float:
    """Parses a time such as "100ms", "2s" or "10m" to seconds."""
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(ms|s|m|h)\s*", text)
    if found is None:
        raise InvalidOption(option, text, "a time with its unit, such as 100ms, 0.1s or 10m")
    return float(found[1]) * _SECONDS[found[2]]


def parse_names(text: str, option: str) -> tuple[str, ...]:
    """Parses a list of names: 'a,b', or '["a", "b"]' as vLLM writes it."""
    if not text.strip().startswith("["):
        return tuple(name.strip() for name in text.split(",") if name.strip())
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidOption(option, text, 'names such as a,b or ["a", "b"]')
    return tuple(names)


def parse_draft_tokens(text: str) -> int | None:
    """Parses a value of `--speculate`: "auto" (None), "off" (0), or a number."""
    if text == "auto":
        return None
    if text == "off":
        return 0
    if not re.fullmatch(r"[0-9]{1,4}", text):
        raise InvalidOption("--speculate", text, "auto, off, or the largest number of draft tokens")
    return int(text)


def parse_memory_limit(text: str) -> int | None:
    """Parses a value of `--memory-limit`: "auto" (None), "off" (0), or a size."""
    if text == "auto":
        return None
    if text == "off":
        return 0
    limit = parse_bytes(text, "--memory-limit")
    if not limit:
        raise InvalidOption("--memory-limit", text, "auto, off, or a size such as 24GiB")
    return limit


def _refuse_unless_in(allowed: Sequence[str], option: str, value: str) -> None:
    if value not in allowed:
        raise InvalidOption(option, value, " | ".join(allowed))


def _refuse_unless_a_name(option: str, name: str) -> None:
    if not (1 <= len(name) <= MAX_MODEL_NAME_CHARS and name.isprintable() and name.strip()):
        raise InvalidOption(option, name, f"a name of 1 to {MAX_MODEL_NAME_CHARS} printable characters")


def is_key(text: str) -> bool:
    return re.fullmatch(rf"[!-~]{{1,{MAX_KEY_LENGTH}}}", text) is not None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int = 32  # tokens
    budget_bytes: int | None = None  # None: a share of the memory that is free after the model is loaded
    enabled: bool = True  # False disables prefix caching (for comparison)
    # Part of a budget of several models, on a device that takes memory at once. On others they share all of it.
    device_share: float = 1.0
    # Parts of the budget that hints may retain and that can be pinned. Active tenants divide them.
    retained_share: float = 0.9
    pinned_share: float = 0.25

    def __post_init__(self) -> None:
        for option, share in (
            ("--retained-share", self.retained_share),
            ("--pinned-share", self.pinned_share),
        ):
            if not (0.0 <= share <= 1.0):
                raise InvalidOption(option, share, "from 0 to 1")
        if not (1 <= self.block_size <= 4096):
            raise InvalidOption("--block-size", self.block_size, "from 1 to 4096")
        if self.budget_bytes is not None and self.budget_bytes <= 0:
            raise InvalidOption("--kv-budget", self.budget_bytes, "more than 0")


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Tiers below the device's memory. Without a directory and a host budget there are none."""

    disk_dir: Path | None = None
    disk_budget_bytes: int = 50 * GIB  # of all files under disk_dir
    disk_write: str = "back"  # "back": write on eviction and at the end; "through": write when published
    # RAM between an accelerator and the disk. A CPU's pool is in RAM already and has no host tier.
    host_budget_bytes: int = 0
    verify_hits: float = 0.0  # share of hits that are recomputed in idle time and compared
    queue_bytes: int = 256 * MIB  # limit of copies that wait to be written

    def __post_init__(self) -> None:
        if self.disk_budget_bytes <= 0:
            raise InvalidOption("--disk-budget", self.disk_budget_bytes, "more than 0")
        if self.disk_dir is not None and self.disk_budget_bytes < LEAST_DISK_BUDGET_BYTES:
            raise InvalidOption(
                "--disk-budget", self.disk_budget_bytes, f"at least {LEAST_DISK_BUDGET_BYTES:,} bytes"
            )
        _refuse_unless_in(DISK_WRITES, "--disk-write", self.disk_write)
        if not (0.0 <= self.verify_hits <= 1.0):
            raise InvalidOption("--verify-hits", self.verify_hits, "from 0 to 1")
        if self.host_budget_bytes < 0:
            raise InvalidOption("--host-budget", self.host_budget_bytes, "0 or more")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    max_batch: int = 64  # requests that run at once
    chunk_tokens: int = 512  # tokens of one step, decodes included: bounds the delay of running decodes
    max_queue: int = 1024  # requests that wait beyond max_batch
    context_limit: int | None = None  # tokens of prompt and answer; None: the model's limit
    # Seed from which requests without a seed get theirs; None: the system's randomness. With a known seed, an answer
    # would show how many requests came before it.
    seed: int | None = None
    # Longest duration of a step with decodes; None: no target. Fewer prompt tokens go into such a step.
    itl_target_s: float | None = None
    # Tokens of a step without decodes; None: 4 × chunk_tokens, or chunk_tokens where a forward runs one sequence. A
    # longer chunk costs less per token, and a new request waits for the same prompts either way.
    idle_chunk_tokens: int | None = None
    draft_tokens: int | None = 0  # draft tokens per request and step; None: as many as are expected to pay
    # Memory of the ids that chats' answers were sampled with: later prompts that repeat an answer get them back.
    answer_memory_bytes: int = 64 * MIB
    idle_work: bool = False  # cache prompts that requests are expected to send, while no request runs
    # Memory that the whole process may take: near it, memory is given back, and requests wait. 0: any. None: most of
    # the machine's memory if the model is in unified memory, else any.
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.itl_target_s is not None and self.itl_target_s <= 0.0:
            raise InvalidOption("--itl-target", f"{self.itl_target_s:g}s", "more than 0")
        for option, value, least in (
            ("--max-batch", self.max_batch, 1),
            ("--chunk-tokens", self.chunk_tokens, 1),
            ("--idle-chunk-tokens", self.idle_chunk_tokens, self.chunk_tokens),
            ("--max-queue", self.max_queue, 1),
            ("--context-limit", self.context_limit, 2),
            ("--speculate", self.draft_tokens, 0),
            ("--answer-memory", self.answer_memory_bytes, 0),
            ("--memory-limit", self.memory_limit_bytes, 0),
        ):
            if value is not None and value < least:
                raise InvalidOption(option, value, f"at least {least}")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A LoRA adapter to load with the model."""

    name: str  # by which requests choose it
    path: Path

    def __post_init__(self) -> None:
        _refuse_unless_a_name("--adapter", self.name)


def parse_adapter(text: str) -> AdapterConfig:
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
        raise InvalidOption("--adapter", text, "NAME=PATH, such as support=adapters/support")
    return AdapterConfig(name.strip(), Path(path.strip()))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model: str  # a directory or a hub name
    device: str = "auto"
    dtype: str = "auto"
    served_name: str | None = None
    trust_remote_code: bool = False
    threads: int | None = None
    state_dtype: str = "auto"  # dtype of cached recurrent states; auto: the dtype that the model computes
    quantize: str = "none"  # weights of linear layers; other weights keep their dtype
    kv_dtype: str = "auto"  # dtype of cached K and V; auto: the dtype that the model computes
    cuda_graphs: bool | None = None  # record decodes as CUDA graphs; None: on CUDA devices
    attention: str = "auto"  # kernel of decodes on a CPU; auto: Numba's where Numba can be imported
    memory_check: bool = True  # refuse a model whose weights and KV cache exceed the free memory
    adapters: tuple[AdapterConfig, ...] = ()
    runtime: str = "auto"  # library that computes the model; auto: MLX on Apple Silicon, torch elsewhere

    def __post_init__(self) -> None:
        _refuse_unless_in(RUNTIMES, "--runtime", self.runtime)
        _refuse_unless_in(DEVICES, "--device", self.device)
        _refuse_unless_in(DTYPES, "--dtype", self.dtype)
        _refuse_unless_in(STATE_DTYPES, "--state-dtype", self.state_dtype)
        _refuse_unless_in(KV_DTYPES, "--kv-dtype", self.kv_dtype)
        _refuse_unless_in(QUANTIZATIONS, "--quantize", self.quantize)
        _refuse_unless_in(ATTENTIONS, "--attention", self.attention)
        if self.threads is not None and not (1 <= self.threads <= MAX_THREADS):
            raise InvalidOption("--threads", self.threads, f"from 1 to {MAX_THREADS}")
        if self.served_name is not None:
            _refuse_unless_a_name("--served-model-name", self.served_name)
        names = [adapter.name for adapter in self.adapters]
        for name in names:
            if names.count(name) > 1 or name == self.served_name:
                raise InvalidOption("--adapter", name, "a name of its own")


Task = Literal["generate", "embed"]  # of a model, in vLLM's words


@dataclass(frozen=True, slots=True)
class ServedModelConfig:
    """A model of a server with several, and the options that it has of its own."""

    name: str  # in the API
    model: ModelConfig
    aliases: tuple[str, ...] = ()  # further names in the API
    chat_template: str | None = None  # its text; None: the model's own
    context_limit: int | None = None
    tool_parser: str = "auto"
    media: str | None = None  # None: as the server's
    kv_budget_bytes: int | None = None  # of its own; None: a part of the budget that all models share
    kv_share: float = 1.0  # weight of its part where a device takes memory at once
    load: str = "start"  # "start": with the server; "demand": by its first request
    idle_unload_s: float | None = None  # unload it after this time without requests; None: never
    pin: bool = False  # never unload it, but when an operator asks
    task: Task | None = None  # None: its files tell it when they are loaded

    def __post_init__(self) -> None:
        _refuse_unless_a_name("name", self.name)
        _refuse_unless_in(LOADS, "load", self.load)
        if self.media is not None:
            _refuse_unless_in(MEDIA, "media", self.media)
        for alias in self.aliases:
            _refuse_unless_a_name("alias", alias)
        if self.idle_unload_s is not None and self.idle_unload_s < LEAST_IDLE_UNLOAD_S:
            raise InvalidOption(
                "idle-unload", f"{self.idle_unload_s:g}s", f"at least {LEAST_IDLE_UNLOAD_S:g}s"
            )
        if not (0.0 < self.kv_share <= 1000.0):
            raise InvalidOption("kv-share", self.kv_share, "more than 0, and at most 1000")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(
        default=None, repr=False
    )  # without a tenant: its requests may name any tenant
    # Required by routes that show or clear data of all tenants.
    admin_key: str | None = field(default=None, repr=False)
    tenant_keys: Mapping[str, str] = field(default_factory=dict, repr=False)  # API key → tenant
    api_keys: Path | None = None  # file of keys and limits, read again whenever it changes
    # File of the beginnings of prompts that all tenants share.
    public_prompts: Path | None = None
    # Content of `explain`'s answers. "own": the prompt alone; "all": other prompts of its namespace as well.
    explain: str = "own"
    # Read special tokens in messages as control tokens instead of plain text.
    parse_special_tokens: bool = False
    tool_parser: str = "auto"  # format of the answers' tool calls; "auto": as the chat template writes them
    drop_volatile: bool = True  # drop lines of known clients that change the head of every prompt
    media: str = "mention"  # "mention": the prompt has a line of text for an image; "refuse": status 400
    max_body_bytes: int = 16 * MIB  # of one request
    max_connections: int = 2048
    # File of the Responses API's store; None: in memory, until the server stops.
    responses_file: Path | None = None
    responses_budget_bytes: int = 128 * MIB  # of stored responses; the oldest are removed first
    # Origins whose web pages may use the server; "*": all. The server's own origin is always allowed.
    allowed_origins: tuple[str, ...] = ()
    # Allowed Host headers, "*" for any. Empty: a server that is bound to a loopback address, or that needs no key,
    # accepts its local names only; any other server accepts all names.
    allowed_hosts: tuple[str, ...] = ()
    aliases: tuple[str, ...] = (ANY_NAME,)  # further names of the model in the API
    # Directories from which operators may load LoRA adapters while the server runs. Empty: none may be loaded.
    adapter_directories: tuple[Path, ...] = ()
    dashboard: bool = True  # a page at / for browsers
    show_prompts: bool = False  # the dashboard shows the text of cached prompts
    sse_keep_alive_s: float = 10.0  # longest time in which a stream sends nothing; 0: any
    drain_timeout_s: float = 30.0  # for running requests after SIGTERM
    metrics_tenants: int = 20  # tenants with series of their own in /metrics; further ones are added up
    traces: bool = False  # export OpenTelemetry traces, as the OTEL_… environment variables say
    log_format: str = "text"
    log_level: str = "warning"  # least level of log lines
    access_log: bool = False  # a log line for each HTTP request

    def __post_init__(self) -> None:
        for option, key in (("--api-key", self.api_key), ("--admin-key", self.admin_key)):
            if key is not None and not is_key(key):
                raise InvalidOption(option, "(not shown)", KEY_FORM)
        if self.admin_key is not None and (
            self.admin_key == self.api_key or self.admin_key in self.tenant_keys
        ):
            raise InvalidOption("--admin-key", "(not shown)", "another key than those of clients")
        if self.api_key in self.tenant_keys:
            raise InvalidOption("--api-key", "(not shown)", "another key than those of clients")
        _refuse_unless_in(EXPLANATIONS, "--explain", self.explain)
        _refuse_unless_in(MEDIA, "--media", self.media)
        _refuse_unless_in(LOG_FORMATS, "--log-format", self.log_format)
        _refuse_unless_in(LOG_LEVELS, "--log-level", self.log_level)
        if not (0 <= self.port <= 65535):
            raise InvalidOption("--port", self.port, "from 0 (any free port) to 65535")
        if self.max_body_bytes < KIB:
            raise InvalidOption("--max-body", self.max_body_bytes, "at least 1KiB")
        if self.responses_budget_bytes < MIB:
            raise InvalidOption("--responses-budget", self.responses_budget_bytes, "at least 1MiB")
        if not (0 <= self.metrics_tenants <= MAX_METRICS_TENANTS):
            allowed = f"from 0 to {MAX_METRICS_TENANTS:,}"
            raise InvalidOption("--metrics-tenants", self.metrics_tenants, allowed)
        if self.max_connections < 1:
            raise InvalidOption("--max-connections", self.max_connections, "at least 1")
        if 0 < self.sse_keep_alive_s < LEAST_KEEP_ALIVE_S:
            allowed = f"0s (off), or at least {LEAST_KEEP_ALIVE_S:g}s"
            raise InvalidOption("--sse-keep-alive", f"{self.sse_keep_alive_s:g}s", allowed)
        for alias in self.aliases:
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
