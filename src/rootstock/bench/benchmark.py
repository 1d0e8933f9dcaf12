"""`rootstock bench`: workloads × states of the cache → rows, a table and a picture."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from rootstock.bench.machine import this_machine, this_source
from rootstock.bench.play import play
from rootstock.bench.report import plot, same_answers, table_of
from rootstock.bench.rows import CACHE_STATES, Row, Setting, json_lines, make_row
from rootstock.bench.targets import EngineTarget, Target, UrlTarget
from rootstock.bench.tiny_model import NAME, ensure_tiny_model
from rootstock.bench.workloads import SIZES, Workload, make_workload
from rootstock.config import CacheConfig, EngineConfig, ModelConfig
from rootstock.engine.build import Assembly, build_engine
from rootstock.engine.request import Finished, Request, RequestId, ResolvedSampling, StopParams
from rootstock.errors import InvalidOption, StartupError
from rootstock.runtime.base import ModelDescription
from rootstock.runtime.select import leave_out_torch


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Server that is already running."""

    url: str
    api_key: str | None = None
    name: str | None = None  # None: the first that it lists


@dataclass(frozen=True, slots=True)
class OwnEngine:
    """Engine that the benchmark builds in this process."""

    model: str | None = None  # a directory or a hub name; None: the demo's small model
    device: str = "auto"
    dtype: str | None = None  # None: float32 for the small model, else "auto"
    threads: int | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    quantize: str = "none"
    runtime: str = "auto"


@dataclass(frozen=True, slots=True)
class BenchConfig:
    workloads: tuple[str, ...] = tuple(SIZES)
    caches: tuple[str, ...] | None = None  # of CACHE_STATES; None: all states that the target supports
    seed: int = 0
    scale: float = 1.0  # factor of the lengths of prompts
    out: Path = field(default_factory=lambda: Path("bench") / "results")

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

    def made_workloads(self) -> list[Workload]:
        return [make_workload(name, self.seed, SIZES[name].scaled(self.scale)) for name in self.workloads]


def run_bench(
    config: BenchConfig, target: ServedModel | OwnEngine | None = None, console: Console | None = None
) -> int:
    """Runs the workloads and returns the exit status: 0 only if no request failed. Raises StartupError."""
    console = console or Console()
    target = target or OwnEngine()
    source = (
        _rows_of_url(config, target) if isinstance(target, ServedModel) else _rows_of_engine(config, target)
    )
    rows: list[Row] = []
    with console.status("measuring"):
        for row in source:
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
    written = write_results(rows, config.out)
    for path in written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    return 1 if any(row.failed for row in rows) else 0


def write_results(rows: Sequence[Row], out: Path) -> list[Path]:
    """Writes `<date>-<commit>.jsonl` and a `.png` beside it below `out`, and returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    setting = rows[0].setting
    stamp = setting.date.replace("-", "").replace(":", "").replace("+0000", "Z")
    stem = out / f"{stamp}-{setting.source.commit or 'no-commit'}"
    lines, picture = stem.with_suffix(".jsonl"), stem.with_suffix(".png")
    lines.write_text(json_lines(rows), encoding="utf-8")
    try:
        plot(rows, picture)
    except StartupError as error:  # matplotlib is missing: the rows are written without a picture
        print(error.message)
        return [lines]
    return [lines, picture]


# ---- the two kinds of targets


def _rows_of_engine(config: BenchConfig, own: OwnEngine) -> Iterator[Row]:
    states = config.caches or CACHE_STATES
    if own.model is None:
        model = ModelConfig(
            str(ensure_tiny_model()),
            own.device,
            own.dtype or "float32",
            served_name=NAME,
            threads=own.threads,
            quantize=own.quantize,
            runtime=own.runtime,
        )
    else:
        model = ModelConfig(
            own.model,
            own.device,
            own.dtype or "auto",
            threads=own.threads,
            quantize=own.quantize,
            runtime=own.runtime,
        )
    leave_out_torch((model,))
    # The engines run one after the other: two at once would need twice the memory.
    if "cold" in states or "warm" in states:
        yield from _rows_with_cache(config, own, model, states)
    if "off" in states:
        yield from _rows_without_cache(config, own, model)


def _rows_with_cache(
    config: BenchConfig, own: OwnEngine, model: ModelConfig, states: Sequence[str]
) -> Iterator[Row]:
    made = build_engine(model, replace(own.cache, enabled=True), own.engine)
    with made.engine:
        target = _warmed_up(made)
        setting = _setting_of_engine(made.description)
        for workload in config.made_workloads():
            made.engine.clear_cache()
            yield from _cold_and_warm(workload, target, setting, states)


def _rows_without_cache(config: BenchConfig, own: OwnEngine, model: ModelConfig) -> Iterator[Row]:
    made = build_engine(model, replace(own.cache, enabled=False), own.engine)
    with made.engine:
        target = _warmed_up(made)
        setting = _setting_of_engine(made.description)
        for workload in config.made_workloads():
            yield make_row(setting, workload, "off", play(workload, target), exact=target.exact)


def _cold_and_warm(
    workload: Workload, target: Target, setting: Setting, states: Sequence[str]
) -> Iterator[Row]:
    """Plays the workload on a cache that holds none of it, and then again."""
    cold = play(workload, target)
    if "cold" in states:
        yield make_row(setting, workload, "cold", cold, exact=target.exact)
    if "warm" in states:
        warm = play(workload, target)
        yield make_row(setting, workload, "warm", warm, exact=target.exact, before=cold)


def _rows_of_url(config: BenchConfig, served: ServedModel) -> Iterator[Row]:
    states = config.caches or ("cold", "warm")
    if "off" in states:
        raise InvalidOption("--cache", "off", "cold or warm with --url: a server's cache cannot be disabled")
    workloads = config.made_workloads()
    at_once = max(workload.sizes.at_once for workload in workloads)
    with UrlTarget(served.url, at_once, served.name, served.api_key) as target:
        name = _last_part(target.model)
        setting = Setting(this_source(), this_machine(), _now(), "url", name, None, None, None)
        for workload in workloads:
            target.forget()
            yield from _cold_and_warm(workload, target, setting, states)


def _warmed_up(made: Assembly) -> EngineTarget:
    """Sends a long and a short request, so that kernels and buffers of first use exist before the measurement."""
    vocab_size = made.description.vocab_size
    for i, tokens in enumerate((256, 8)):
        prompt = np.full(min(tokens, made.engine.context_limit // 2), vocab_size - 1, np.int32)
        request = Request(
            RequestId(f"warm-up-{i}"), prompt, ResolvedSampling(temperature=0.0), StopParams(max_tokens=4)
        )
        *_, last = made.engine.generate(request)
        if not isinstance(last, Finished):
            raise StartupError(f"The model does not answer: {last}.")
    made.engine.clear_cache()
    return EngineTarget(made.engine, vocab_size)


def _setting_of_engine(described: ModelDescription) -> Setting:
    return Setting(
        this_source(),
        this_machine(described.device),
        _now(),
        "in process",
        _last_part(described.name),
        described.parameters,
        described.dtype,
        described.device,
        described.runtime,
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _last_part(name: str) -> str:
    """Returns the last part of a model's name: the path of a folder is private."""
    return name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
