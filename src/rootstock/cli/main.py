"""The command line, and the composition root: here options become configuration, and parts become a server."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from enum import StrEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, ClassVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from rootstock._version import __version__
from rootstock.cli.cache import cache_app
from rootstock.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ServerConfig,
    TierConfig,
    parse_bytes,
    parse_draft_tokens,
    parse_names,
    parse_seconds,
    read_tenant_keys,
)
from rootstock.engine.build import Assembly, build_engine
from rootstock.engine.tiers.connector import TierStats
from rootstock.errors import InvalidOption, StartupError
from rootstock.interrupts import AT_ONCE, UNWINDING, ctrl_c
from rootstock.openmp import wait_briefly
from rootstock.runtime.model_files import locate
from rootstock.units import in_units

EXIT_STARTUP_ERROR = 2
EXIT_INTERRUPTED = 130
MAX_TEMPLATE_BYTES = 1 << 20
NO_CHAT = " · no chat template: only /v1/completions serves, or start it with --chat-template FILE"

# Their values are the options' defaults.
_MODEL, _CACHE, _ENGINE, _SERVER = ModelConfig(""), CacheConfig(), EngineConfig(), ServerConfig()
_TIER = TierConfig()

_CLEAR_LINE_SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"

app = typer.Typer(
    name="rootstock",
    help="An LLM inference server whose core is one KV cache for every model, request and tier.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

models_app = typer.Typer(no_args_is_help=True)
app.add_typer(models_app, name="models", help="What Rootstock makes of a model.")
app.add_typer(cache_app, name="cache", help="What a disk tier's directory holds, while no server has it.")


def main() -> None:
    wait_briefly()
    try:
        with ctrl_c(UNWINDING):
            app()
    except KeyboardInterrupt:  # outside of the command itself, which typer looks after
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


class SamplingSource(StrEnum):
    model = "model"
    openai = "openai"


@app.command()
@ctrl_c(AT_ONCE)
def serve(
    model: Annotated[str, typer.Argument(help="A directory with config.json, or a hub name.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = _SERVER.host,
    port: Annotated[int, typer.Option(help="0: any free port.")] = _SERVER.port,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="ROOTSTOCK_API_KEY", show_envvar=True, help="Ask every client but /health for it."
        ),
    ] = None,
    max_body: Annotated[
        str, typer.Option(help="Largest body of a request, such as 16MiB; larger ones get 413.")
    ] = "16MiB",
    max_connections: Annotated[
        int, typer.Option(help="Open connections; further ones get 503.")
    ] = _SERVER.max_connections,
    allowed_origins: Annotated[
        str,
        typer.Option(
            help="Origins whose web pages may use the server, comma-separated: https://chat.example.com. *: all."
        ),
    ] = "",
    allowed_hosts: Annotated[
        str,
        typer.Option(
            help="Names by which clients may address the server, comma-separated. *: any. Default: if --host is a "
            "loopback address, localhost and IP addresses; any otherwise."
        ),
    ] = "",
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with a line 'KEY TENANT' for each API key. The key decides whose cache a request shares, "
            "whatever X-Cache-Salt says."
        ),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            envvar="ROOTSTOCK_ADMIN_KEY",
            show_envvar=True,
            help="Ask for it at /v1/cache/stats, /v1/cache/explain, and to clear what is not a tenant's own.",
        ),
    ] = None,
    explain: Annotated[
        str,
        typer.Option(
            help="What /v1/cache/explain tells. own: of the prompt alone; all: also others' tokens, evictions and "
            "running requests, of everybody who shares its salt."
        ),
    ] = _SERVER.explain,
    served_model_name: Annotated[str | None, typer.Option(help="How clients call the model.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = _MODEL.device,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = _MODEL.dtype,
    quantize: Annotated[
        str,
        typer.Option(
            help="Of linear layers' weights, on a CPU: none, int8 or int4. Less memory, faster while few requests "
            "run, and less exact."
        ),
    ] = _MODEL.quantize,
    threads: Annotated[int | None, typer.Option(help="CPU threads of one forward.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    kv_budget: Annotated[
        str,
        typer.Option(
            help="Memory of the KV cache, such as 4GiB. auto: half of the memory that is free once the model is "
            "loaded (85 % on a GPU), but no more than --max-batch requests of the longest context can use."
        ),
    ] = "auto",
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="Of K and V that are kept: auto is what the model computes in; int8, on a CPU, takes about half of "
            "bfloat16's memory, and is less exact."
        ),
    ] = _MODEL.kv_dtype,
    state_dtype: Annotated[
        str,
        typer.Option(
            help="Of recurrent states that are kept: auto is what the model computes in, bfloat16 halves their size."
        ),
    ] = _MODEL.state_dtype,
    cuda_graphs: Annotated[
        bool,
        typer.Option(
            "--cuda-graphs",
            help="Record decodes and replay them, on a CUDA device. Compared with plain decodes at the start.",
        ),
    ] = _MODEL.cuda_graphs,
    attention: Annotated[
        str,
        typer.Option(
            help="Of decodes on a CPU: numba is compiled, torch is not; auto: numba where it can be imported."
        ),
    ] = _MODEL.attention,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = _CACHE.block_size,
    cache: Annotated[
        bool,
        typer.Option("--cache/--no-cache", help="Without: no prefix is found, to measure what it saves."),
    ] = _CACHE.enabled,
    disk_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where the cache goes on below memory, and outlives a restart. One server at a time."
        ),
    ] = None,
    disk_budget: Annotated[
        str, typer.Option(help="The most that everything under --disk-dir may take, such as 50GiB.")
    ] = "50GiB",
    disk_write: Annotated[
        str,
        typer.Option(
            help="back: what memory evicts, and the rest at the end. through: all, as it is computed."
        ),
    ] = _TIER.disk_write,
    host_budget: Annotated[
        str, typer.Option(help="RAM between an accelerator and the disk, such as 16GiB. Not for a CPU.")
    ] = "0",
    tier_compress: Annotated[
        str, typer.Option(help="Of blocks below the device's memory: none, or int8, which is lossy.")
    ] = _TIER.compress,
    verify_hits: Annotated[
        float,
        typer.Option(help="Share of hits that are computed anew in idle time and compared, such as 0.01."),
    ] = _TIER.verify_hits,
    max_batch: Annotated[int, typer.Option(help="Requests that run at once.")] = _ENGINE.max_batch,
    chunk_tokens: Annotated[
        int, typer.Option(help="Tokens of one forward: how long a prefill may hold up the others.")
    ] = _ENGINE.chunk_tokens,
    idle_chunk_tokens: Annotated[
        int | None,
        typer.Option(
            help="Of one forward while nobody decodes: more are faster. 4 times --chunk-tokens unless given."
        ),
    ] = None,
    itl_target: Annotated[
        str | None,
        typer.Option(
            help="How long a step that carries decodes may take, such as 100ms: by what steps take here, so many "
            "fewer tokens of prompts go into it, down to 16."
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Requests accepted beyond --max-batch; above that clients get 429.")
    ] = _ENGINE.max_queue,
    memory_check: Annotated[
        bool,
        typer.Option(
            "--memory-check/--no-memory-check",
            help="Refuse a model whose weights and --kv-budget do not fit in the free memory, before it is loaded.",
        ),
    ] = _MODEL.memory_check,
    context_limit: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer together, at most the model's own limit.")
    ] = None,
    speculate: Annotated[
        str,
        typer.Option(
            help="Guess ahead what was seen before, and verify it in the same forward: auto, off, or how many tokens "
            "at most."
        ),
    ] = "off",
    chat_template: Annotated[
        Path | None, typer.Option(help="A file with a Jinja chat template, instead of the model's own.")
    ] = None,
    parse_special_tokens: Annotated[
        bool,
        typer.Option(
            "--parse-special-tokens",
            help="Read special tokens that messages spell out as control tokens. By default they are plain text.",
        ),
    ] = _SERVER.parse_special_tokens,
    sampling_defaults: Annotated[
        SamplingSource,
        typer.Option(
            help="Where temperature, top_p, top_k, min_p and repetition_penalty come from if a request does not "
            "name them: the model's generation_config.json, or OpenAI's defaults."
        ),
    ] = SamplingSource.model,
) -> None:
    """Serve a model to OpenAI clients."""
    _log_warnings()
    model_config = ModelConfig(
        model,
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
    )
    cache_config = CacheConfig(
        block_size, None if kv_budget == "auto" else parse_bytes(kv_budget), enabled=cache
    )
    engine_config = EngineConfig(
        max_batch,
        chunk_tokens,
        max_queue,
        context_limit,
        itl_target_s=None if itl_target is None else parse_seconds(itl_target, "--itl-target"),
        draft_tokens=parse_draft_tokens(speculate),
        idle_chunk_tokens=idle_chunk_tokens,
    )
    tier_config = TierConfig(
        disk_dir,
        parse_bytes(disk_budget, "--disk-budget"),
        disk_write,
        parse_bytes(host_budget, "--host-budget"),
        tier_compress,
        verify_hits,
    )
    server_config = ServerConfig(
        host,
        port,
        api_key,
        admin_key=admin_key,
        tenant_keys={} if api_keys_file is None else read_tenant_keys(api_keys_file),
        explain=explain,
        max_body_bytes=parse_bytes(max_body, "--max-body"),
        max_connections=max_connections,
        allowed_origins=parse_names(allowed_origins, "--allowed-origins"),
        allowed_hosts=parse_names(allowed_hosts, "--allowed-hosts"),
        parse_special_tokens=parse_special_tokens,
    )
    template = None if chat_template is None else _read_template(chat_template)

    from rootstock.server.listen import listen, serve, url_of
    from rootstock.server.sampling_defaults import SamplingDefaults

    taken = listen(host, port)  # before the model is loaded, which may take minutes
    with LoadProgress() as progress:
        directory = locate(model, with_code=trust_remote_code, progress=progress)
        defaults = SamplingDefaults()
        if sampling_defaults is SamplingSource.model:
            defaults = SamplingDefaults.of_model(model, directory)
        made = build_engine(
            model_config,
            cache_config,
            engine_config,
            tier_config,
            chat_template=template,
            progress=progress,
            directory=directory,
        )

    from rootstock.server.app import create_app

    web = create_app(
        made.engine, made.tokenizer, made.description, server_config, defaults, block_size=block_size
    )
    # What is loaded stays: the garbage collector need not look at it again between two tokens.
    gc.collect()
    gc.freeze()
    with made.engine:
        ready = ready_line(made, url_of(taken), block_size)
        serve(
            web,
            made.engine,
            taken,
            on_ready=lambda: print(ready, flush=True),
            on_stop=lambda: _tell_of_writing(made),
            max_connections=server_config.max_connections,
        )


def _tell_of_writing(made: Assembly) -> None:
    if made.tier is not None and made.tier.state != "off":
        words = "writing down what only memory has (Ctrl-C again: end at once, without it)"
        print(f"rootstock: {words}", file=sys.stderr, flush=True)


@models_app.command("check")
@ctrl_c(AT_ONCE)
def check_model(
    model: Annotated[str, typer.Argument(help="A directory with config.json, or a hub name.")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = _MODEL.device,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = _MODEL.dtype,
    quantize: Annotated[
        str,
        typer.Option(
            help="Of linear layers' weights, on a CPU: none, int8 or int4. Less memory, faster while few requests "
            "run, and less exact."
        ),
    ] = _MODEL.quantize,
    threads: Annotated[int | None, typer.Option(help="CPU threads of one forward.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    memory_check: Annotated[
        bool,
        typer.Option(
            "--memory-check/--no-memory-check",
            help="Refuse a model whose weights do not fit in the free memory, before it is loaded.",
        ),
    ] = _MODEL.memory_check,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = _CACHE.block_size,
) -> None:
    """Load a model, check it against its own forward, and tell how it is served. Exit status 2: it is not."""
    _log_warnings()
    config = ModelConfig(
        model,
        device,
        dtype,
        None,
        trust_remote_code,
        threads,
        quantize=quantize,
        memory_check=memory_check,
    )
    CacheConfig(block_size)  # refuses what is none

    with LoadProgress() as progress:
        directory = locate(model, with_code=trust_remote_code, progress=progress)

        from rootstock.runtime.torch.runner import load_model
        from rootstock.server.model_card import table_of

        description = load_model(config, progress, directory=directory).description
    for what, told in table_of(description, block_size):
        print(f"{what:<14}  {told}")


@app.command()
def demo() -> None:
    """Show what the cache saves: three agents, a small model, a real server, no download."""
    from rootstock.bench.demo import run_demo

    raise typer.Exit(run_demo())


@app.command()
def bench(
    workload: Annotated[
        str, typer.Option(help="Which, comma-separated: agents, chat, fewshot, burst.")
    ] = "agents,chat,fewshot,burst",
    url: Annotated[
        str | None,
        typer.Option(help="A running server of OpenAI's chat API, instead of an engine of our own."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="For --url.")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="For --url; the first model that it lists unless given.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A directory or a hub name; a small made-up model unless given.")
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            help="States to measure, comma-separated: cold, warm, and off for an engine of our own."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the workloads.")] = 0,
    scale: Annotated[float, typer.Option(help="Factor on the lengths of prompts.")] = 1.0,
    out: Annotated[Path, typer.Option(help="Folder for the rows (.jsonl) and the picture (.png).")] = Path(
        "bench/results"
    ),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = _MODEL.device,
    dtype: Annotated[
        str | None,
        typer.Option(help="auto, float32, bfloat16 or float16; float32 for the small model unless given."),
    ] = None,
    quantize: Annotated[
        str,
        typer.Option(
            help="Of linear layers' weights, on a CPU: none, int8 or int4. Less memory, faster while few requests "
            "run, and less exact."
        ),
    ] = _MODEL.quantize,
    threads: Annotated[int | None, typer.Option(help="CPU threads of one forward.")] = None,
    kv_budget: Annotated[str, typer.Option(help="Memory of the KV cache, such as 4GiB.")] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = _CACHE.block_size,
    max_batch: Annotated[int, typer.Option(help="Requests that run at once.")] = _ENGINE.max_batch,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of one forward.")] = _ENGINE.chunk_tokens,
) -> None:
    """Measure what the cache does for agents, chats, few-shot prompts and bursts."""
    _log_warnings()

    from rootstock.bench.benchmark import BenchConfig, OwnEngine, ServedModel, run_bench

    config = BenchConfig(_names(workload), _names(cache) if cache else None, seed, scale, out)
    if url is not None and model is not None:
        raise InvalidOption("--model", model, "left out with --url")
    if url is not None:
        raise typer.Exit(run_bench(config, ServedModel(url, api_key, served_model_name)))
    budget = None if kv_budget == "auto" else parse_bytes(kv_budget)
    own = OwnEngine(
        model,
        device,
        dtype,
        threads,
        CacheConfig(block_size, budget),
        EngineConfig(max_batch, chunk_tokens),
        quantize,
    )
    raise typer.Exit(run_bench(config, own))


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip())


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
        f"{families_in_words(families)}, {dtypes_in_words(described)} on {described.device}, {described.rung} · "
        f"{costs}, "
        f"pool of {made.pool_tokens:,} tokens, {in_units(made.pool_bytes)}{_below_in_words(made.tier)}"
        f"{'' if made.serves_chat else NO_CHAT}"
    )


def _below_in_words(tier: TierStats | None) -> str:
    if tier is None:
        return ""
    if tier.state == "off":
        return " · nothing below it: see the warning above"
    if not tier.cap_bytes:
        return " · the host's memory below it"
    used, cap = in_units(tier.used_bytes), in_units(tier.cap_bytes)
    return f" · on disk {tier.records:,} records, {used} of {cap}"


class LoadProgress:
    """Shows how far loading is: a bar on a terminal, else a line for each stage."""

    STAGES: ClassVar = {
        "download": "Fetching the model",
        "load": "Loading the weights",
        "hash": "Hashing the weights",
        "compile": "Compiling attention for this CPU, once",
        "check": "Checking the paged forward against the model's own",
        "pack": "Packing the weights",
    }

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._told: set[str] = set()
        self._handlers: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> LoadProgress:
        if self._bar is not None:
            if threading.current_thread() is threading.main_thread():
                # A bar hides the cursor: who ends the process here shows it again.
                ending = (signal.SIGINT, signal.SIGTERM)
                self._handlers = {number: signal.signal(number, self._end) for number in ending}
            self._bar.start()
        return self

    def _end(self, number: int, _frame: FrameType | None) -> None:
        os.write(self._console.file.fileno(), _CLEAR_LINE_SHOW_CURSOR)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def __call__(self, stage: str, done: float) -> None:
        """`done` of `stage`, from 0 to 1."""
        words = self.STAGES.get(stage, stage)
        if self._bar is None:
            if stage not in self._told:
                self._told.add(stage)
                print(f"rootstock: {words}", file=sys.stderr, flush=True)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(words, total=1.0)
        self._bar.update(self._tasks[stage], completed=done)


def _read_template(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TEMPLATE_BYTES + 1)
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption("--chat-template", str(path), f"a file that can be read ({error})") from error
    if len(raw) > MAX_TEMPLATE_BYTES:
        raise InvalidOption("--chat-template", str(path), f"a file of at most {in_units(MAX_TEMPLATE_BYTES)}")
    return text


def _log_warnings() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")


if __name__ == "__main__":
    main()
