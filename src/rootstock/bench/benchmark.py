"""`rootstock bench`: workloads × states of a server's cache → a table of cached shares, waits and speed, and rows."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from rootstock.bench.play import play
from rootstock.bench.rows import (
    CACHE_STATES,
    BenchRow,
    CacheState,
    json_lines,
    make_row,
    same_answers,
    table_of,
)
from rootstock.bench.serving import ServerProcess, signals_unwind
from rootstock.bench.targets import UrlTarget
from rootstock.bench.tiny_model import NAME, ensure_tiny_model
from rootstock.bench.workloads import SIZES, make_workload
from rootstock.errors import InvalidOption

READY_WITHIN_S = 3600.0  # a large model may have to be downloaded


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Server that is already running."""

    url: str
    api_key: str | None = None
    name: str | None = None  # None: the first that it lists


@dataclass(frozen=True, slots=True)
class OwnServer:
    """Server that the benchmark starts, with options of `rootstock serve`."""

    model: str | None = None  # a directory or a hub name; None: the demo's small model
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchConfig:
    workloads: tuple[str, ...] = tuple(SIZES)
    caches: tuple[str, ...] | None = None  # of CACHE_STATES; None: all states that the server can be in
    seed: int = 0
    scale: float = 1.0  # factor of the lengths of prompts
    out: Path | None = None  # folder for the rows

    def __post_init__(self) -> None:
        if not self.workloads:
            raise InvalidOption("--workload", "", " | ".join(SIZES))
        for name in self.workloads:
            if name not in SIZES:
                raise InvalidOption("--workload", name, " | ".join(SIZES))
        for state in self.caches or ():
            if state not in CACHE_STATES:
                raise InvalidOption("--cache", state, " | ".join(CACHE_STATES))
        if not 0 < self.scale <= 1000:
            raise InvalidOption("--scale", self.scale, "more than 0 and at most 1000")


def run_bench(
    config: BenchConfig, target: LoadedModel | OwnServer | None = None, console: Console | None = None
) -> int:
    """Runs the workloads and returns the exit status: 0 only if no request failed. Raises StartupError."""
    console = console or Console()
    rows: list[BenchRow] = []
    with (
        signals_unwind(),
        closing(_rows(config, target or OwnServer())) as found,
        console.status("measuring"),
    ):
        for row in found:
            rows.append(row)
            waited = "no token" if row.ttft_s is None else f"first token after {row.ttft_s.p50 * 1e3:,.0f} ms"
            console.print(
                f"{row.workload:<8} {row.cache:<5} {row.requests} requests in {row.wall_s:.1f} s, {waited}",
                highlight=False,
                soft_wrap=True,
            )
    rows.sort(key=lambda row: (config.workloads.index(row.workload), CACHE_STATES.index(row.cache)))
    console.print()
    # A table in a file has no terminal to fit.
    console.print(table_of(rows), width=None if console.is_terminal else 120)
    console.print(f"\n{same_answers(rows)}", highlight=False)
    if config.out is not None:
        console.print(f"wrote {write_rows(rows, config.out)}", highlight=False, soft_wrap=True)
    return 1 if any(row.failed for row in rows) else 0


def write_rows(rows: Sequence[BenchRow], out: Path) -> Path:
    """Writes `<date>-<model>.jsonl` below `out`, and returns its path."""
    out.mkdir(parents=True, exist_ok=True)
    stamp = rows[0].date.replace("-", "").replace(":", "").replace("+0000", "Z")
    path = out / f"{stamp}-{rows[0].model}.jsonl"
    path.write_text(json_lines(rows), encoding="utf-8")
    return path


def _rows(config: BenchConfig, target: LoadedModel | OwnServer) -> Generator[BenchRow, None, None]:
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    run = uuid.uuid4().hex  # begins all prompts, so that every state of the cache gets the same ones
    states = [state for state in CACHE_STATES if config.caches is None or state in config.caches]
    if isinstance(target, LoadedModel):
        if "off" in (config.caches or ()):
            raise InvalidOption(
                "--cache", "off", "cold or warm with --url: a server's cache cannot be disabled"
            )
        yield from _played(config, date, run, target, [state for state in states if state != "off"])
        return
    options = [target.model or str(ensure_tiny_model()), "--port", "0", *target.options]
    if target.model is None:
        options += ["--served-model-name", NAME]
    # The servers run one after the other: two at once would need twice the memory.
    if cached := [state for state in states if state != "off"]:
        with ServerProcess(options, READY_WITHIN_S) as server:
            yield from _played(config, date, run, LoadedModel(server.url), cached)
    if "off" in states:
        with ServerProcess([*options, "--no-cache"], READY_WITHIN_S) as server:
            yield from _played(config, date, run, LoadedModel(server.url), ["off"])


def _played(
    config: BenchConfig, date: str, run: str, served: LoadedModel, states: Sequence[CacheState]
) -> Iterator[BenchRow]:
    """Plays each workload on a cache that holds none of it, and then again for the state "warm"."""
    workloads = [
        make_workload(name, config.seed, SIZES[name].scaled(config.scale)) for name in config.workloads
    ]
    at_once = max(workload.sizes.at_once for workload in workloads)
    with UrlTarget(served.url, at_once, served.name, served.api_key) as server:
        model = server.model.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]  # a folder's path is private
        for workload in workloads:
            server.begin_with(f"{run}{workload.name}")
            played = play(workload, server)
            for state in states:
                if state != "warm":
                    yield make_row(date, model, workload, state, played)
            if "warm" in states:
                yield make_row(date, model, workload, "warm", play(workload, server))
