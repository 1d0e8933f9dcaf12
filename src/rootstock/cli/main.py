"""The command line, and the composition root: options become configuration, and parts become a server."""

from __future__ import annotations

import gc
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rootstock._version import __version__
from rootstock.cli import options
from rootstock.cli.cache import cache_app
from rootstock.cli.config_file import read_bounded
from rootstock.cli.doctor import doctor
from rootstock.cli.launch import launch
from rootstock.cli.options import SamplingSource
from rootstock.cli.output import LoadProgress
from rootstock.cli.pins import pin, pins, release
from rootstock.cli.starting import prepare
from rootstock.config import (
    ANY_NAME,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ServedModelConfig,
    ServerConfig,
    TierConfig,
    parse_adapter,
    parse_bytes,
    parse_draft_tokens,
    parse_memory_limit,
    parse_names,
    parse_seconds,
)
from rootstock.engine.build import Assembly, build_engine
from rootstock.engine.tiers.connector import TierStats
from rootstock.errors import InvalidOption, StartupError
from rootstock.interrupts import AT_ONCE, UNWINDING, ctrl_c
from rootstock.logs import announce, log_warnings
from rootstock.openmp import wait_briefly
from rootstock.runtime.embedding_files import is_embedding_model
from rootstock.runtime.model_files import locate
from rootstock.runtime.select import leave_out_torch
from rootstock.units import in_units

EXIT_STARTUP_ERROR = 2
EXIT_INTERRUPTED = 130
MAX_TEMPLATE_BYTES = 1 << 20
NO_CHAT = " · no chat template: only /v1/completions serves, or start it with --chat-template FILE"

# The defaults of the options.
_MODEL, _CACHE, _ENGINE, _SERVER = ModelConfig(""), CacheConfig(), EngineConfig(), ServerConfig()
_TIER = TierConfig()

app = typer.Typer(
    name="rootstock",
    help="An LLM inference server with one KV cache for every model, request and tier.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={
        "auto_envvar_prefix": options.ENV_PREFIX,  # of options that only one command has: ROOTSTOCK_BENCH_SEED
        "token_normalize_func": options.our_name,
    },
)

models_app = typer.Typer(no_args_is_help=True)
app.add_typer(models_app, name="models", help="Check a model.")
app.add_typer(
    cache_app,
    name="cache",
    help="Look into a disk tier that no server uses. Warm the cache of a server, and pin prefixes.",
)
for command in (pin, release, pins):
    cache_app.command(cls=options.Command)(command)
app.command(cls=options.Command)(doctor)


def main() -> None:
    wait_briefly()
    try:
        with ctrl_c(UNWINDING):
            app()
    except KeyboardInterrupt:  # outside the command; typer handles it inside
        sys.exit(EXIT_INTERRUPTED)
    except StartupError as error:
        print(f"rootstock: {error.message}", file=sys.stderr)
        sys.exit(EXIT_STARTUP_ERROR)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"rootstock {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            allow_from_autoenv=False,
            help="Show the version.",
        ),
    ] = False,
) -> None: ...


@app.command(cls=options.Command)
@ctrl_c(AT_ONCE)
def serve(
    model: options.ServedModelPath = None,
    more_models: options.MoreModels = None,
    _config: options.ConfigFile = None,
    models_file: options.ModelsFile = None,
    runtime: options.Runtime = _MODEL.runtime,
    device: options.Device = _MODEL.device,
    dtype: options.Dtype = _MODEL.dtype,
    quantize: options.Quantize = _MODEL.quantize,
    attention: options.Attention = _MODEL.attention,
    cuda_graphs: options.CudaGraphs = _MODEL.cuda_graphs,
    threads: options.Threads = None,
    context_limit: options.ContextLimit = None,
    chat_template: options.ChatTemplate = None,
    trust_remote_code: options.TrustRemoteCode = _MODEL.trust_remote_code,
    kv_budget: options.KVBudget = "auto",
    memory_check: options.MemoryCheck = _MODEL.memory_check,
    memory_limit: options.MemoryLimit = "auto",
    kv_dtype: options.KVDtype = _MODEL.kv_dtype,
    state_dtype: options.StateDtype = _MODEL.state_dtype,
    block_size: options.BlockSize = _CACHE.block_size,
    retained_share: options.RetainedShare = _CACHE.retained_share,
    pinned_share: options.PinnedShare = _CACHE.pinned_share,
    cache: options.PrefixCache = _CACHE.enabled,
    disk_dir: options.DiskDir = None,
    disk_budget: options.DiskBudget = "50GiB",
    disk_write: options.DiskWrite = _TIER.disk_write,
    host_budget: options.HostBudget = "0",
    verify_hits: options.VerifyHits = _TIER.verify_hits,
    max_batch: options.MaxBatch = _ENGINE.max_batch,
    chunk_tokens: options.ChunkTokens = _ENGINE.chunk_tokens,
    idle_chunk_tokens: options.IdleChunkTokens = None,
    itl_target: options.ItlTarget = None,
    max_queue: options.MaxQueue = _ENGINE.max_queue,
    idle_work: options.IdleWork = True,
    warm: options.Warm = None,
    answer_memory: options.AnswerMemory = "64MiB",
    sampling_defaults: options.SamplingDefaults = SamplingSource.model,
    speculate: options.Speculate = "off",
    host: options.Host = _SERVER.host,
    port: options.Port = _SERVER.port,
    served_model_name: options.ServedModelName = None,
    alias: options.Alias = None,
    adapter: options.Adapter = None,
    adapter_directory: options.AdapterDirectory = None,
    api_key: options.ApiKey = None,
    api_keys: options.ApiKeys = None,
    admin_key: options.AdminKey = None,
    public_prompts: options.PublicPrompts = None,
    explain: options.Explain = _SERVER.explain,
    max_body: options.MaxBody = "16MiB",
    max_connections: options.MaxConnections = _SERVER.max_connections,
    responses_file: options.ResponsesStore = None,
    responses_budget_bytes: options.ResponsesBudget = "128MiB",
    sse_keep_alive: options.SSEKeepAlive = "10s",
    drain_timeout: options.DrainTimeout = "30s",
    allowed_origins: options.AllowedOrigins = "",
    allowed_hosts: options.AllowedHosts = "",
    parse_special_tokens: options.ParseSpecialTokens = _SERVER.parse_special_tokens,
    tool_parser: options.ToolParser = _SERVER.tool_parser,
    drop_volatile: options.DropVolatile = _SERVER.drop_volatile,
    media: options.Media = _SERVER.media,
    metrics_tenants: options.MetricsTenants = _SERVER.metrics_tenants,
    traces: options.Traces = _SERVER.traces,
    log_format: options.LogFormat = _SERVER.log_format,
    log_level: options.LogLevel = _SERVER.log_level,
    access_log: options.AccessLog = _SERVER.access_log,
    dashboard: options.Dashboard = _SERVER.dashboard,
    show_prompts: options.ShowPrompts = _SERVER.show_prompts,
) -> None:
    """Serve a model, or several, over OpenAI's HTTP API."""
    log_warnings()
    if model is None and models_file is None:
        needed = "give a model's directory or its name on the Hub, or --models FILE."
        raise typer.BadParameter(needed, param_hint="MODEL")
    model_config = ModelConfig(
        model or "",
        device,
        dtype,
        served_model_name,
        trust_remote_code,
        threads,
        state_dtype,
        quantize,
        kv_dtype,
        cuda_graphs=cuda_graphs,
        attention=attention,
        memory_check=memory_check,
        adapters=tuple(map(parse_adapter, adapter or ())),
        runtime=runtime,
    )
    cache_config = CacheConfig(
        block_size,
        _budget_bytes(kv_budget),
        enabled=cache,
        retained_share=retained_share,
        pinned_share=pinned_share,
    )
    engine_config = EngineConfig(
        max_batch,
        chunk_tokens,
        max_queue,
        context_limit,
        itl_target_s=None if itl_target is None else parse_seconds(itl_target, "--itl-target"),
        draft_tokens=parse_draft_tokens(speculate),
        idle_chunk_tokens=idle_chunk_tokens,
        answer_memory_bytes=parse_bytes(answer_memory, "--answer-memory"),
        idle_work=idle_work,
        memory_limit_bytes=parse_memory_limit(memory_limit),
    )
    tier_config = TierConfig(
        disk_dir,
        parse_bytes(disk_budget, "--disk-budget"),
        disk_write,
        parse_bytes(host_budget, "--host-budget"),
        verify_hits,
    )
    server_config = ServerConfig(
        host,
        port,
        api_key,
        admin_key=admin_key,
        api_keys=api_keys,
        public_prompts=public_prompts,
        explain=explain,
        max_body_bytes=parse_bytes(max_body, "--max-body"),
        max_connections=max_connections,
        responses_file=responses_file,
        responses_budget_bytes=parse_bytes(responses_budget_bytes, "--responses-budget"),
        allowed_origins=parse_names(allowed_origins, "--allowed-origins"),
        allowed_hosts=parse_names(allowed_hosts, "--allowed-hosts"),
        parse_special_tokens=parse_special_tokens,
        aliases=tuple(name for given in alias or () for name in parse_names(given, "--alias")),
        adapter_directories=tuple(adapter_directory or ()),
        sse_keep_alive_s=parse_seconds(sse_keep_alive, "--sse-keep-alive"),
        drain_timeout_s=parse_seconds(drain_timeout, "--drain-timeout"),
        tool_parser=tool_parser,
        drop_volatile=drop_volatile,
        media=media,
        metrics_tenants=metrics_tenants,
        traces=traces,
        log_format=log_format,
        log_level=log_level,
        access_log=access_log,
        dashboard=dashboard,
        show_prompts=show_prompts,
    )
    template = _template(chat_template)
    if models_file is None and not more_models:
        if alias is None:
            server_config = replace(server_config, aliases=(ANY_NAME,))
        run_server(
            model_config,
            cache_config,
            engine_config,
            tier_config,
            server_config,
            template,
            sampling_defaults,
            warm,
        )
        return
    from rootstock.cli.models_file import read_models
    from rootstock.cli.several import models_of, name_of, run_several

    name = served_model_name or name_of(model or "none")
    first = ServedModelConfig(name, model_config, chat_template=template, tool_parser=tool_parser)
    of_file = () if models_file is None else read_models(models_file, model_config)
    models = models_of(first, more_models or (), of_file)
    run_several(models, cache_config, engine_config, tier_config, server_config, sampling_defaults, warm)


def run_server(
    model: ModelConfig,
    cache: CacheConfig,
    engine: EngineConfig,
    tier: TierConfig,
    server: ServerConfig,
    chat_template: str | None,
    sampling_source: SamplingSource,
    warm: Path | None = None,
) -> None:
    """Load the model and serve it until a signal ends the process."""
    from rootstock.engine.sampling_defaults import SamplingDefaults
    from rootstock.server.listen import serve, url_of

    start = prepare(cache, engine, server, warm)
    with LoadProgress() as progress:
        directory = locate(model.model, with_code=model.trust_remote_code, progress=progress)
    if is_embedding_model(directory):
        from rootstock.cli.several import name_of, serve_models

        one = ServedModelConfig(model.served_name or name_of(model.model), model)
        serve_models((one,), cache, engine, tier, server, sampling_source, start)
        return
    leave_out_torch((model,))
    with LoadProgress() as progress:
        defaults = SamplingDefaults()
        if sampling_source is SamplingSource.model:
            defaults = SamplingDefaults.of_model(model.model, directory)
        made = build_engine(
            model, cache, engine, tier, chat_template=chat_template, progress=progress, directory=directory
        )

    from rootstock.server.app import create_app

    web = create_app(replace(made, defaults=defaults), server, start.drain, start.keys, start.tracing)
    # Keeps the garbage collector from visiting the loaded model, which stays until the end, between two tokens.
    gc.collect()
    gc.freeze()

    def on_ready() -> None:
        print(ready_line(made, url_of(start.listener), cache.block_size), flush=True)
        start.warm_up(web)

    with closing(web.state.responses), made.engine:
        serve(
            web,
            made.engine,
            start.listener,
            on_ready=on_ready,
            on_stop=lambda: _announce_writing(made),
            max_connections=server.max_connections,
            drain=start.drain,
        )
    start.close()


def _announce_writing(made: Assembly) -> None:
    if made.tier is not None and made.tier.state != "off":
        announce("writing the cache to disk (Ctrl-C again: exit at once without it)")


@models_app.command("check", cls=options.Command)
@ctrl_c(AT_ONCE)
def check_model(
    model: options.ModelPath,
    runtime: options.Runtime = _MODEL.runtime,
    device: options.Device = _MODEL.device,
    dtype: options.Dtype = _MODEL.dtype,
    quantize: options.Quantize = _MODEL.quantize,
    threads: options.Threads = None,
    trust_remote_code: options.TrustRemoteCode = _MODEL.trust_remote_code,
    context_limit: options.ContextLimit = None,
    chat_template: options.ChatTemplate = None,
    adapter: options.Adapter = None,
    tool_parser: options.ToolParser = _SERVER.tool_parser,
    kv_budget: options.KVBudget = "auto",
    memory_check: options.MemoryCheck = _MODEL.memory_check,
    kv_dtype: options.KVDtype = _MODEL.kv_dtype,
    state_dtype: options.StateDtype = _MODEL.state_dtype,
    block_size: options.BlockSize = _CACHE.block_size,
) -> None:
    """Load a model as serve does, compare it with its own forward, describe it, and let it answer once.

    Exit status 2: Rootstock can't serve it."""
    log_warnings()
    from rootstock.cli.model_check import try_model

    config = ModelConfig(
        model,
        device,
        dtype,
        None,
        trust_remote_code,
        threads,
        state_dtype,
        quantize,
        kv_dtype,
        memory_check=memory_check,
        adapters=tuple(map(parse_adapter, adapter or ())),
        runtime=runtime,
    )
    rows = try_model(
        config,
        CacheConfig(block_size, _budget_bytes(kv_budget)),
        EngineConfig(context_limit=context_limit),
        _template(chat_template),
        tool_parser,
    )
    for name, value in rows:
        print(f"{name:<14}  {value}")


@app.command(cls=options.Command)
def demo() -> None:
    """Compare a server with and without its cache: three agents, a small model, no download."""
    from rootstock.bench.demo import run_demo

    raise typer.Exit(run_demo())


@app.command(cls=options.Command)
def bench(
    workload: Annotated[
        str, typer.Option(help="Workloads, comma-separated: agents, chat, fewshot, burst.")
    ] = "agents,chat,fewshot,burst",
    url: Annotated[
        str | None,
        typer.Option(
            help="Server with OpenAI's chat API to measure, instead of one that the command starts."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", metavar="KEY", show_default=False, help="API key for --url."),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="Model name for --url.", show_default="the first that the server lists"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model directory or Hub name.", show_default="a small generated model"),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            help="Cache states to measure, comma-separated: cold, warm, and off without --url.",
            show_default="all",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the workloads.")] = 0,
    scale: Annotated[float, typer.Option(help="Factor on the lengths of prompts.")] = 1.0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for a file of rows (.jsonl).", show_default="no file"),
    ] = None,
    mlx_report: Annotated[str | None, typer.Option(hidden=True)] = None,
    small: Annotated[bool, typer.Option("--small", hidden=True)] = False,
    runtime: options.Runtime = _MODEL.runtime,
    device: options.Device = _MODEL.device,
    dtype: Annotated[str | None, options.DTYPE] = None,
    quantize: options.Quantize = _MODEL.quantize,
    threads: options.Threads = None,
    kv_budget: options.KVBudget = "auto",
    block_size: options.BlockSize = _CACHE.block_size,
    max_batch: options.MaxBatch = _ENGINE.max_batch,
    chunk_tokens: options.ChunkTokens = _ENGINE.chunk_tokens,
) -> None:
    """Send a server the requests of agents, chats, few-shot prompts and bursts. Show cached shares, waits and speed.

    Without --url, it starts a server with the options of Model, Cache and Scheduling. Without --dtype, the small
    generated model runs in float32."""
    log_warnings()
    for option, moved in (("--mlx-report", mlx_report), ("--small", small or None)):
        if moved is not None:
            instead = "left out: the report of a Mac is `make mac-report` in a checkout of the repository"
            raise InvalidOption(option, moved, instead)

    from rootstock.bench.benchmark import BenchConfig, LoadedModel, OwnServer, run_bench

    config = BenchConfig(
        parse_names(workload, "--workload"),
        parse_names(cache, "--cache") if cache else None,
        seed,
        scale,
        out,
    )
    if url is not None and model is not None:
        raise InvalidOption("--model", model, "left out with --url")
    if url is not None:
        raise typer.Exit(run_bench(config, LoadedModel(url, api_key, served_model_name)))
    dtype = dtype or ("float32" if model is None else "auto")
    # The server would refuse wrong values, too, but only after it has started.
    ModelConfig(model or "", device, dtype, threads=threads, quantize=quantize, runtime=runtime)
    CacheConfig(block_size, _budget_bytes(kv_budget))
    EngineConfig(max_batch, chunk_tokens)
    given = {
        "--device": device,
        "--dtype": dtype,
        "--quantize": quantize,
        "--runtime": runtime,
        "--threads": threads,
        "--kv-budget": kv_budget,
        "--block-size": block_size,
        "--max-batch": max_batch,
        "--chunk-tokens": chunk_tokens,
    }
    of_server = [text for name, value in given.items() if value is not None for text in (name, str(value))]
    raise typer.Exit(run_bench(config, OwnServer(model, tuple(of_server))))


app.command(cls=options.Command)(launch)


def _template(path: Path | None) -> str | None:
    return None if path is None else read_bounded("--chat-template", path, MAX_TEMPLATE_BYTES)


def _budget_bytes(kv_budget: str) -> int | None:
    return None if kv_budget == "auto" else parse_bytes(kv_budget)


def ready_line(made: Assembly, url: str, block_size: int = _CACHE.block_size) -> str:
    from rootstock.server.model_card import (
        bytes_per_checkpoint,
        bytes_per_token,
        dtypes_in_words,
        families_in_words,
    )

    described = made.description
    families = described.families
    costs = f"{in_units(bytes_per_token(families))} per token"
    if checkpoint := bytes_per_checkpoint(families, block_size):
        costs += f" and {in_units(checkpoint)} per checkpoint"
    return (
        f"Rootstock serves {described.name} at {url}/v1 · {described.architecture}, "
        f"{families_in_words(families)}, {dtypes_in_words(described)} on {described.device} by "
        f"{described.runtime}, {described.execution_mode} · {costs}, "
        f"pool of {made.pool_tokens:,} tokens, {in_units(made.pool_bytes)}{_tiers_in_words(made.tier)}"
        f"{'' if made.serves_chat else NO_CHAT}"
    )


def _tiers_in_words(tier: TierStats | None) -> str:
    if tier is None:
        return ""
    if tier.state == "off":
        return " · no disk tier: see the warning above"
    if not tier.cap_bytes:
        return " · host tier"
    used, cap = in_units(tier.used_bytes), in_units(tier.cap_bytes)
    return f" · on disk {tier.records:,} records, {used} of {cap}"


if __name__ == "__main__":
    main()
