"""Options that several commands share, grouped into panels of `--help`.

An option is an `Annotated` alias with its name, its sentence in `--help` and its environment variable.
A value comes from the command line, else from the environment, else from the file of `--config`, else from the
default in the command's signature.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from rootstock.cli.config_file import PLACES, load_config
from rootstock.errors import InvalidOption

ENV_PREFIX = "ROOTSTOCK"

MODEL, CACHE, TIERS = "Model", "Cache", "Tiers"
SCHEDULING, SAMPLING, SERVER = "Scheduling", "Sampling and speculation", "Server"
RETENTION = "Hints and idle work"
OBSERVATION = "Dashboard, metrics, traces and logs"

# vLLM's name of an option → ours, where both mean the same.
VLLM_NAMES = {
    "max-num-seqs": "max-batch",
    "max-num-batched-tokens": "chunk-tokens",
    "max-model-len": "context-limit",
    "lora-modules": "adapter",
    "kv-cache-dtype": "kv-dtype",
    "enforce-eager": "eager",
    "enable-prefix-caching": "cache",
    "no-enable-prefix-caching": "no-cache",
}

# A name that an option has had → its name now.
EARLIER_NAMES = {"api-keys-file": "api-keys"}


class SamplingSource(StrEnum):
    model = "model"
    openai = "openai"


def our_name(name: str) -> str:
    """Maps a current, old or vLLM name of an option to ours. All names are without leading dashes."""
    return VLLM_NAMES.get(name) or EARLIER_NAMES.get(name, name)


class Command(TyperCommand):
    """A command whose errors name the environment variable or the line of the file that set a wrong option."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except InvalidOption as error:
            for parameter in self.params:
                if error.option in parameter.opts and (place := _place_of(ctx, parameter)):
                    raise InvalidOption(f"{error.option} ({place})", error.value, error.allowed) from error
            raise


def _place_of(ctx: typer.Context, parameter: Any) -> str | None:
    """Returns the environment variable, or the file and line, that set the value. None: neither did."""
    source = ctx.get_parameter_source(parameter.name)
    if source is None or source.name not in ("ENVIRONMENT", "DEFAULT_MAP"):
        return None
    if source.name == "DEFAULT_MAP":
        return str(ctx.meta[PLACES][parameter.name])
    names = parameter.envvar or f"{ctx.auto_envvar_prefix}_{parameter.name.upper()}"
    if not isinstance(names, str):  # the option has had another name
        names = next(name for name in names if os.environ.get(name))
    return f"environment variable {names}"


def option(panel: str, name: str, help: str, **more: Any) -> Any:
    """Makes a shared option, also set by ROOTSTOCK_<NAME>. `name` may have a negative form: "--cache/--no-cache"."""
    ours = name.split("/")[0].removeprefix("--")
    given = [each.removeprefix("--") for each in name.split("/")]
    theirs = ", ".join(f"--{vllm}" for vllm, own in VLLM_NAMES.items() if own in given)
    variables = [
        f"{ENV_PREFIX}_{each.upper().replace('-', '_')}"
        for each in (ours, *(old for old, now in EARLIER_NAMES.items() if now == ours))
    ]
    return typer.Option(
        name,
        help=f"{help} vLLM: {theirs}." if theirs else help,
        rich_help_panel=panel,
        envvar=variables if len(variables) > 1 else variables[0],
        allow_from_autoenv=False,
        **more,
    )


ModelPath = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        envvar=f"{ENV_PREFIX}_MODEL",
        help="Model directory with config.json, or name on the Hugging Face Hub.",
    ),
]
ServedModelPath = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        envvar=f"{ENV_PREFIX}_MODEL",
        help="Model directory with config.json, or name on the Hugging Face Hub.",
        show_default=False,
    ),
]
MoreModels = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL]...",
        help="Further models. They share --kv-budget. Requests name one of them.",
        show_default=False,
    ),
]
ModelsFile = Annotated[
    Path | None,
    typer.Option(
        "--models",
        metavar="FILE",
        envvar=f"{ENV_PREFIX}_MODELS",
        allow_from_autoenv=False,
        rich_help_panel=MODEL,
        help="YAML file of models with options of their own, such as 'small: {model: DIRECTORY, load: demand}'.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar=f"{ENV_PREFIX}_CONFIG",
        allow_from_autoenv=False,
        is_eager=True,
        callback=load_config,
        help="YAML file of options, such as 'max-batch: 32'. The command line and the environment override it.",
    ),
]

# -- model

ServedModelName = Annotated[
    str | None,
    option(
        SERVER, "--served-model-name", "Model name in the API.", show_default="the last part of MODEL's name"
    ),
]
Alias = Annotated[
    list[str] | None,
    option(
        SERVER,
        "--alias",
        "Further model name in the API, such as gpt-4o, or gpt-4o=MODEL with several models. May be repeated, or "
        "hold several, comma-separated. *: any other name.",
        metavar="NAME[=MODEL]",
        show_default="* with one model",
    ),
]
Adapter = Annotated[
    list[str] | None,
    option(
        MODEL,
        "--adapter",
        "LoRA adapter in PEFT's format, on MLX in mlx-lm's, too, which requests choose by NAME as their model. May "
        "be repeated.",
        metavar="NAME=PATH",
        show_default="none",
    ),
]
AdapterDirectory = Annotated[
    list[Path] | None,
    option(
        SERVER,
        "--adapter-directory",
        "Directory from which operators may load LoRA adapters while the server runs. May be repeated.",
        metavar="DIR",
        show_default="none: no adapter may be loaded then",
    ),
]
Runtime = Annotated[
    str,
    option(
        MODEL,
        "--runtime",
        "Library that computes the model: torch, mlx, or auto (mlx on Apple Silicon if it is installed, else torch).",
    ),
]
Device = Annotated[str, option(MODEL, "--device", "Device: auto, cpu, cuda or mps. MLX: auto or cpu.")]
DTYPE = option(MODEL, "--dtype", "Data type of the model: auto, float32, bfloat16 or float16.")
Dtype = Annotated[str, DTYPE]
Quantize = Annotated[
    str,
    option(
        MODEL,
        "--quantize",
        "Weight quantization of linear layers, on a CPU or by MLX: none, int8 or int4. Takes less memory and is "
        "faster at small batch sizes, but less exact.",
    ),
]
Threads = Annotated[
    int | None,
    option(
        MODEL,
        "--threads",
        "CPU threads of a forward, of the torch runtime.",
        show_default="chosen by the runtime",
    ),
]
TrustRemoteCode = Annotated[
    bool, option(MODEL, "--trust-remote-code", "Run Python code that comes with the model.")
]
CudaGraphs = Annotated[
    bool | None,
    option(
        MODEL,
        "--cuda-graphs/--eager",
        "Run decode steps as CUDA graphs. They are compared with eager steps at startup.",
        show_default="on CUDA devices",
    ),
]
Attention = Annotated[
    str,
    option(
        MODEL,
        "--attention",
        "Backend of decode attention on a CPU: numba (compiled), torch, or auto (numba if it can be imported).",
    ),
]
ContextLimit = Annotated[
    int | None,
    option(
        MODEL,
        "--context-limit",
        "Maximum tokens of prompt and output together.",
        show_default="the model's limit",
    ),
]
ChatTemplate = Annotated[
    Path | None,
    option(MODEL, "--chat-template", "File with a Jinja chat template.", show_default="the model's own"),
]

# -- cache

KVBudget = Annotated[
    str,
    option(
        CACHE,
        "--kv-budget",
        "Memory of the KV cache, such as 4GiB. auto: half of the memory that is free after loading (85 % on a GPU), "
        "but no more than --max-batch requests of maximum length can use.",
    ),
]
MemoryCheck = Annotated[
    bool,
    option(
        CACHE,
        "--memory-check/--no-memory-check",
        "Refuse, before loading, a model whose weights and KV cache exceed the free memory.",
    ),
]
MemoryLimit = Annotated[
    str,
    option(
        CACHE,
        "--memory-limit",
        "Memory that the whole process may take, such as 24GiB. Near it, unused memory goes back to the system, and "
        "close to it requests wait until others have ended. off: no limit. auto: most of the machine's memory if "
        "the model is in unified memory, else off.",
    ),
]
KVDtype = Annotated[
    str,
    option(
        CACHE,
        "--kv-dtype",
        "Data type of cached K and V: auto (the model's), or int8 on a CPU or by MLX, which takes about half the "
        "memory of bfloat16 and is less exact.",
    ),
]
StateDtype = Annotated[
    str,
    option(CACHE, "--state-dtype", "Data type of cached recurrent states: auto (the model's) or bfloat16."),
]
BlockSize = Annotated[int, option(CACHE, "--block-size", "Tokens per cache block.")]
RetainedShare = Annotated[
    float,
    option(
        RETENTION,
        "--retained-share",
        "Part of the KV budget that cache hints may retain, from 0 to 1. Active tenants divide it.",
    ),
]
PinnedShare = Annotated[
    float,
    option(
        RETENTION,
        "--pinned-share",
        "Part of the KV budget that can be pinned, from 0 to 1. Active tenants divide it.",
    ),
]
PrefixCache = Annotated[
    bool,
    option(
        CACHE,
        "--cache/--no-cache",
        "Enable prefix caching. --no-cache: Disable prefix caching (for comparison).",
    ),
]

# -- tiers

DiskDir = Annotated[
    Path | None,
    option(
        TIERS,
        "--disk-dir",
        "Directory of the disk tier, which survives restarts. One server at a time can use it.",
        show_default="no disk tier",
    ),
]
DISK_BUDGET = option(TIERS, "--disk-budget", "Maximum size of everything under --disk-dir, such as 50GiB.")
DiskBudget = Annotated[str, DISK_BUDGET]
DiskWrite = Annotated[
    str,
    option(
        TIERS,
        "--disk-write",
        "back: Write blocks to disk when memory evicts them, and the rest at shutdown. through: Write all blocks "
        "as they are computed.",
    ),
]
HostBudget = Annotated[
    str,
    option(
        TIERS,
        "--host-budget",
        "Host RAM between an accelerator and the disk, such as 16GiB. Not for a CPU.",
    ),
]
IdleWork = Annotated[
    bool,
    option(
        RETENTION,
        "--idle-work/--no-idle-work",
        "Cache expected prompts while no request runs: the known beginning of each conversation's next turn, and "
        "the prompts of --warm and /v1/cache/warm.",
    ),
]
Warm = Annotated[
    Path | None,
    option(
        RETENTION,
        "--warm",
        "File of prompts to cache after the start, while no request runs: JSON lines, each the body of a request.",
        metavar="FILE",
    ),
]
AnswerMemory = Annotated[
    str,
    option(
        CACHE,
        "--answer-memory",
        "Memory for the token ids of answers, such as 64MiB, and as much for the token ids of recent prompts. "
        "Prompts that repeat an answer get the ids that were sampled, which are cached.",
    ),
]
VerifyHits = Annotated[
    float,
    option(TIERS, "--verify-hits", "Fraction of hits to recompute in idle time and compare, such as 0.01."),
]

# -- scheduling

MaxBatch = Annotated[int, option(SCHEDULING, "--max-batch", "Maximum number of running requests.")]
ChunkTokens = Annotated[
    int,
    option(
        SCHEDULING,
        "--chunk-tokens",
        "Maximum tokens of a step, decodes included. It bounds how long a prefill delays decodes.",
    ),
]
IdleChunkTokens = Annotated[
    int | None,
    option(
        SCHEDULING,
        "--idle-chunk-tokens",
        "Maximum tokens of a step while no request decodes. Larger steps are faster.",
        show_default="4 × --chunk-tokens",
    ),
]
ItlTarget = Annotated[
    str | None,
    option(
        SCHEDULING,
        "--itl-target",
        "Maximum duration of a step with decodes, such as 100ms. Such steps take fewer prompt tokens to meet it, "
        "but at least 16.",
    ),
]
MaxQueue = Annotated[
    int,
    option(SCHEDULING, "--max-queue", "Maximum number of waiting requests. Further ones get status 429."),
]

# -- sampling and speculation

SamplingDefaults = Annotated[
    SamplingSource,
    option(
        SAMPLING,
        "--sampling-defaults",
        "Source of temperature, top_p, top_k, min_p and repetition_penalty for requests without them: the model's "
        "generation_config.json, or OpenAI's defaults.",
    ),
]
Speculate = Annotated[
    str,
    option(
        SAMPLING,
        "--speculate",
        "Speculative decoding with n-gram proposals: auto, off, or the maximum number of draft tokens.",
    ),
]

# -- server

Host = Annotated[str, option(SERVER, "--host", "Address to listen at.")]
Port = Annotated[int, option(SERVER, "--port", "Port to listen at. 0: any free port.")]
ApiKey = Annotated[
    str | None,
    option(
        SERVER,
        "--api-key",
        "API key that clients must send, except to /health.",
        metavar="KEY",
        show_default=False,
    ),
]
ApiKeys = Annotated[
    Path | None,
    option(
        SERVER,
        "--api-keys",
        "File of API keys with their tenants, roles and limits, in YAML or JSON, or with a line 'KEY TENANT' per "
        "key. Read again whenever it changes.",
        metavar="FILE",
    ),
]
PublicPrompts = Annotated[
    Path | None,
    option(
        SERVER,
        "--public-prompts",
        "JSONL file of system prompts with tools, or of texts, whose cached K and V all tenants share. Tokens that "
        "follow them stay each tenant's own.",
        metavar="FILE",
    ),
]
AdminKey = Annotated[
    str | None,
    option(
        SERVER,
        "--admin-key",
        "Key that /v1/cache/stats, /v1/cache/explain and clearing the cache of all tenants require.",
        metavar="KEY",
        show_default=False,
    ),
]
Explain = Annotated[
    str,
    option(
        SERVER,
        "--explain",
        "Detail of /v1/cache/explain. own: about the prompt alone. all: also other requests' tokens, evictions and "
        "running requests with the same salt.",
    ),
]
MaxBody = Annotated[
    str,
    option(
        SERVER, "--max-body", "Maximum size of a request body, such as 16MiB. Larger ones get status 413."
    ),
]
MaxConnections = Annotated[
    int, option(SERVER, "--max-connections", "Maximum open connections. Further ones get status 503.")
]
ResponsesStore = Annotated[
    Path | None,
    option(
        SERVER,
        "--responses-file",
        "File that keeps responses of /v1/responses for previous_response_id. One server at a time can use it.",
        show_default="in memory, until the server stops",
    ),
]
ResponsesBudget = Annotated[
    str,
    option(
        SERVER,
        "--responses-budget",
        "Maximum size of stored responses, such as 1GiB. The least recently used conversations are removed first.",
    ),
]
SSEKeepAlive = Annotated[
    str,
    option(
        SERVER,
        "--sse-keep-alive",
        "Time after which a stream that has nothing to send sends a comment, or its API's event, which keeps clients "
        "and proxies from giving up, such as 10s. 0s: never.",
    ),
]
DrainTimeout = Annotated[
    str,
    option(
        SERVER,
        "--drain-timeout",
        "Time that running requests have to finish after SIGTERM, such as 30s. New ones are refused meanwhile. A "
        "second signal ends it. 0s: none.",
    ),
]
AllowedOrigins = Annotated[
    str,
    option(
        SERVER,
        "--allowed-origins",
        "Origins whose web pages may use the server, comma-separated, such as https://chat.example.com. *: all.",
    ),
]
AllowedHosts = Annotated[
    str,
    option(
        SERVER,
        "--allowed-hosts",
        "Host names of this server, comma-separated. *: any.",
        show_default="local names and IP addresses if --host is a loopback address or there is no key, else any",
    ),
]
ParseSpecialTokens = Annotated[
    bool,
    option(
        SERVER,
        "--parse-special-tokens",
        "Parse special tokens in messages as control tokens instead of plain text.",
    ),
]
ToolParser = Annotated[
    str,
    option(
        SERVER,
        "--tool-parser",
        "Format of the tool calls in answers: the name of a format in docs/answers.md, or none. "
        "auto: the format in which the chat template writes calls.",
    ),
]
Dashboard = Annotated[
    bool,
    option(OBSERVATION, "--dashboard/--no-dashboard", "Serve a dashboard at / to browsers."),
]
ShowPrompts = Annotated[
    bool,
    option(
        OBSERVATION,
        "--show-prompts",
        "Show the text of cached prompts in the dashboard. A tenant's key shows the tenant's own prompts only.",
    ),
]
DropVolatile = Annotated[
    bool,
    option(
        CACHE,
        "--drop-volatile/--no-drop-volatile",
        "Drop lines of known clients that change the head of every prompt, such as Claude Code's billing header. "
        "--no-drop-volatile: Keep them.",
    ),
]
Media = Annotated[
    str,
    option(
        SERVER,
        "--media",
        "Images, audio, video and files in messages, which no model here reads. mention: A line of text in the "
        "prompt says that there was one. refuse: The request gets status 400.",
    ),
]

# -- metrics, traces and logs

MetricsTenants = Annotated[
    int,
    option(
        OBSERVATION,
        "--metrics-tenants",
        "Tenants with time series of their own in /metrics, those with the most requests. The others are added up.",
    ),
]
Traces = Annotated[
    bool,
    option(
        OBSERVATION,
        "--traces",
        "Export an OpenTelemetry span for each request to a model, without its text, by OTLP over HTTP, as the "
        "variables OTEL_EXPORTER_OTLP_… say. Needs the package's extra otel.",
    ),
]
LogFormat = Annotated[
    str, option(OBSERVATION, "--log-format", "Format of log lines on standard error: text or json.")
]
LogLevel = Annotated[
    str, option(OBSERVATION, "--log-level", "Least level of log lines: debug, info, warning or error.")
]
AccessLog = Annotated[
    bool,
    option(
        OBSERVATION,
        "--access-log",
        "Log a line for each HTTP request: its id, route, status, tokens and times, and no text.",
    ),
]
