"""The command line, and the composition root: options become configuration, and parts become a server."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rootstock._version import __version__
from rootstock.cli import options
from rootstock.cli.cache import cache_app
from rootstock.cli.conformance import conformance
from rootstock.cli.doctor import doctor
from rootstock.cli.fleet import fleet
from rootstock.cli.launch import launch
from rootstock.cli.output import LoadProgress
from rootstock.cli.pins import pin, pins, release
from rootstock.cli.starting import importing_server, prepare
from rootstock.config import CacheConfig, Configuration, ServedModelConfig
from rootstock.engine.build import Assembly, build_engine
from rootstock.engine.tiers.connector import TierStats
from rootstock.errors import InvalidOption, StartupError
from rootstock.interrupts import AT_ONCE, UNWINDING, ctrl_c
from rootstock.logs import announce, configure_logs, log_warnings
from rootstock.openmp import wait_briefly
from rootstock.option_table import our_name
from rootstock.options import parse_names
from rootstock.runtime.embedding_files import is_embedding_model
from rootstock.runtime.select import leave_out_torch, locate_model
from rootstock.units import in_units

EXIT_STARTUP_ERROR = 2
EXIT_INTERRUPTED = 130
NO_CHAT = " · no chat template: only /v1/completions serves, or start it with --chat-template FILE"

app = typer.Typer(
    name="rootstock",
    help="An LLM inference server with one KV cache for every model, request and tier.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={
        "auto_envvar_prefix": options.ENV_PREFIX,  # of options that only one command has: ROOTSTOCK_BENCH_SEED
        "token_normalize_func": our_name,
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
@options.configured()
def serve(
    ctx: typer.Context,
    config: Configuration,
    model: options.ServedModelPath = None,
    more_models: options.MoreModels = None,
    _config: options.ConfigFile = None,
    models_file: options.ModelsFile = None,
) -> None:
    """Serve a model, or several, over OpenAI's HTTP API."""
    if model is None and models_file is None:
        needed = "give a model's directory or its name on the Hub, or --models FILE."
        raise typer.BadParameter(needed, param_hint="MODEL")
    configure_logs(config.server.log_format, config.server.log_level, access=config.server.access_log)
    options.announce_misplaced(ctx)
    if models_file is None and not more_models:
        run_server(config)
        return
    from rootstock.cli.models_file import read_models
    from rootstock.cli.several import models_of, name_of, serve_models

    first = ServedModelConfig(
        config.model.served_name or name_of(model or "none"),
        config.model,
        chat_template=config.server.chat_template,
        tool_parser=config.server.tool_parser,
    )
    of_file = () if models_file is None else read_models(models_file, config.model)
    serve_models(models_of(first, more_models or (), of_file), config, prepare(config))


def run_server(config: Configuration) -> None:
    """Load the model and serve it until a signal ends the process."""
    from rootstock.engine.sampling_defaults import SamplingDefaults

    start = prepare(config)
    model, server = config.model, config.server
    with LoadProgress() as progress:
        directory = locate_model(model, progress)
    if is_embedding_model(directory):
        from rootstock.cli.several import name_of, serve_models

        one = ServedModelConfig(model.served_name or name_of(model.model), model)
        serve_models((one,), config, start)
        return
    leave_out_torch((model,))
    with LoadProgress() as progress:
        defaults = SamplingDefaults.chosen(server.sampling_defaults, model.model, directory)
        made = build_engine(
            model,
            config.cache,
            config.engine,
            config.tier,
            chat_template=server.chat_template,
            progress=importing_server(progress),
            directory=directory,
        )

    from rootstock.server.app import create_app

    web = create_app(replace(made, defaults=defaults), server, start.drain, start.keys, start.tracing)
    ready = ready_line(made, start.url, config.cache.block_size)
    start.serve(web, made.engine, ready, server.max_connections, lambda: _announce_writing(made))


def _announce_writing(made: Assembly) -> None:
    if made.tier is not None and made.tier.state != "off":
        where = "to disk" if made.tier.cap_bytes else "to the shared tier"
        announce(f"writing the cache {where} (Ctrl-C again: exit at once without it)")


@models_app.command("check", cls=options.Command)
@ctrl_c(AT_ONCE)
@options.configured(
    "runtime",
    "device",
    "dtype",
    "quantize",
    "threads",
    "trust-remote-code",
    "context-limit",
    "chat-template",
    "adapter",
    "tool-parser",
    "kv-budget",
    "memory-check",
    "kv-dtype",
    "state-dtype",
    "block-size",
)
def check_model(config: Configuration, model: options.ModelPath) -> None:
    """Load a model as serve does, compare it with its own forward, describe it, and let it answer once.

    Exit status 2: Rootstock can't serve it."""
    log_warnings()
    from rootstock.cli.model_check import try_model

    rows = try_model(config)
    for name, value in rows:
        print(f"{name:<14}  {value}")


@app.command(cls=options.Command)
@ctrl_c(AT_ONCE)
@options.configured("runtime", "device", "trust-remote-code")
def pull(config: Configuration, model: options.ModelPath) -> None:
    """Fetch a model from the Hub, or the missing part of it, and print the directory that serve reads.

    MODEL:Q4_K_M names one of several GGUF files."""
    log_warnings()
    with LoadProgress() as progress:
        directory = locate_model(config.model, progress)
    print(directory)


@app.command(cls=options.Command)
def demo() -> None:
    """Compare a server with and without its cache: three agents, a small model, no download."""
    from rootstock.bench.demo import run_demo

    raise typer.Exit(run_demo())


_OF_OWN_SERVER = (
    "runtime",
    "device",
    "dtype",
    "quantize",
    "threads",
    "kv-budget",
    "block-size",
    "max-batch",
    "chunk-tokens",
)


@app.command(cls=options.Command)
# The server would refuse wrong values, too, but only after it has started.
@options.configured(*_OF_OWN_SERVER)
def bench(
    ctx: typer.Context,
    config: Configuration,
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
        typer.Option(help="Model directory, GGUF file or Hub name.", show_default="a small generated model"),
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

    plan = BenchConfig(
        parse_names(workload, "--workload"),
        parse_names(cache, "--cache") if cache else None,
        seed,
        scale,
        out,
    )
    if url is not None and model is not None:
        raise InvalidOption("--model", model, "left out with --url")
    if url is not None:
        raise typer.Exit(run_bench(plan, LoadedModel(url, api_key, served_model_name)))
    of_server = options.as_arguments(ctx, _OF_OWN_SERVER)
    if model is None:
        of_server.setdefault("--dtype", "float32")
    texts = tuple(text for pair in of_server.items() for text in pair)
    raise typer.Exit(run_bench(plan, OwnServer(model, texts)))


app.command(cls=options.Command)(launch)
app.command(cls=options.Command)(fleet)
app.command(cls=options.Command)(conformance)


def ready_line(made: Assembly, url: str, block_size: int = CacheConfig().block_size) -> str:
    from rootstock.server.models.model_card import (
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
    shared = ""
    if tier.remote is not None:
        shared = " · shared tier" if tier.remote_is_ready else " · no shared tier yet: see the warning above"
    elif tier.state == "off":
        return " · no disk tier: see the warning above"
    if tier.cap_bytes:
        used, cap = in_units(tier.used_bytes), in_units(tier.cap_bytes)
        return f" · on disk {tier.records:,} records, {used} of {cap}{shared}"
    return f" · host tier{shared}" if tier.host_cap_bytes else shared


if __name__ == "__main__":
    main()
