"""`rootstock demo`: the savings of the cache for three agents, on a real server with real clients.

small model → server with the cache → agents
            → server without it     → the same agents → compares all answers, counts the savings
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rootstock.bench.agents import (
    Answered,
    Asked,
    FirstToken,
    GaveUp,
    Progress,
    Sent,
    require_openai,
    run_agents,
)
from rootstock.bench.scenario import AGENTS, ScriptedAgent
from rootstock.bench.serving import ServerProcess, signals_unwind
from rootstock.bench.tiny_model import NAME, ensure_tiny_model
from rootstock.units import in_units

KV_BUDGET = "256MiB"
BAR_WIDTH = 12  # characters


@dataclass(slots=True)
class DemoRound:
    """Run of the agents against one server, with the results of its requests. Written by the agents' threads."""

    title: str
    ttft_s: dict[Asked, float] = field(default_factory=dict)
    sent: set[Asked] = field(default_factory=set)
    answers: dict[Asked, Answered] = field(default_factory=dict)
    failures: list[GaveUp] = field(default_factory=list)
    wall_s: float = 0.0
    cache: dict[str, Any] = field(default_factory=dict)  # /v1/cache/stats at the end

    def take(self, progress: Progress) -> None:
        match progress:
            case Sent(asked):
                self.sent.add(asked)
            case FirstToken(asked, ttft_s):
                self.ttft_s[asked] = ttft_s
            case Answered():
                self.ttft_s[progress.asked] = progress.ttft_s
                self.answers[progress.asked] = progress
            case GaveUp():
                self.failures.append(progress)
            case _:
                assert_never(progress)


@dataclass(frozen=True, slots=True)
class Savings:
    """Difference between the two rounds, by the servers' own counters and the clients' clocks."""

    asked_tokens: int
    computed_tokens: int  # with the cache
    saved_tokens: int  # computed without the cache, and not with it
    bytes_per_token: int
    wall_s: tuple[float, float]  # with, without
    median_ttft_s: tuple[float, float]  # with, without
    requests: int
    different: tuple[Asked, ...]  # requests whose answers differ, or that only one round answered

    @property
    def saved_bytes(self) -> int:
        return self.saved_tokens * self.bytes_per_token

    @property
    def saved_s(self) -> float:
        return self.wall_s[1] - self.wall_s[0]


def run_demo(console: Console | None = None, agents: Sequence[ScriptedAgent] = AGENTS) -> int:
    """Runs the demo and returns the exit status: 0 only if every answer was the same with and without the cache.

    Raises StartupError if the openai package is missing or a server does not start.
    """
    console = console or Console()
    require_openai()
    try:
        with signals_unwind():
            return _Demo(console, agents).run()
    except KeyboardInterrupt:
        console.print("\nStopped.")
        return 130


def savings(with_cache: DemoRound, without: DemoRound) -> Savings:
    asked = sorted(with_cache.sent | without.sent, key=lambda each: (each.agent, each.turn))
    warm, cold = with_cache.cache, without.cache
    return Savings(
        asked_tokens=int(warm["asked_tokens"]),
        computed_tokens=int(warm["missed_tokens"]),
        saved_tokens=int(cold["missed_tokens"] - warm["missed_tokens"]),
        bytes_per_token=int(warm["block_bytes"] // warm["block_size"]),
        wall_s=(with_cache.wall_s, without.wall_s),
        median_ttft_s=(_median(with_cache.ttft_s), _median(without.ttft_s)),
        requests=len(asked),
        different=tuple(
            each for each in asked if _outcome(with_cache.answers, each) != _outcome(without.answers, each)
        ),
    )


class _Demo:
    def __init__(self, console: Console, agents: Sequence[ScriptedAgent]) -> None:
        self._console = console
        self._agents = agents
        self._with = DemoRound("with the cache")
        self._without = DemoRound("without it")
        self._note = ""  # the current activity, shown below the table
        self._spinner = Spinner("dots")  # kept between frames: it holds its phase

    def run(self) -> int:
        turns = sum(len(agent.steps) for agent in self._agents)
        self._console.print(
            f"\n[bold]Rootstock[/bold] · {len(self._agents)} agents at once, {turns} requests, one long system "
            "prompt, float32, greedy\n",
            soft_wrap=True,
        )
        with self._shown():
            directory = str(ensure_tiny_model(progress=self._say))
            self._play(self._with, directory, [])
            if not self._with.failures:
                self._play(self._without, directory, ["--no-cache"])
            self._note = ""
        for failure in self._with.failures + self._without.failures:
            self._console.print(f"[red]{failure.agent} gave up:[/red] {failure.reason}", highlight=False)
        if self._with.failures or self._without.failures:
            return 1
        found = savings(self._with, self._without)
        self._console.print(summary(found))
        return 0 if not found.different else 1

    def _play(self, round: DemoRound, directory: str, more_options: list[str]) -> None:
        """Runs all agents against one server and keeps the counters of that server."""
        self._say(f"starting a server: {round.title}")
        options = ["--port", "0", "--dtype", "float32", "--kv-budget", KV_BUDGET, "--served-model-name", NAME]
        with ServerProcess([directory, *options, *more_options]) as server:
            self._say(f"the agents talk to {server.url}/v1: {round.title}")

            def tell(progress: Progress) -> None:
                round.take(progress)
                if isinstance(progress, Answered) and not self._console.is_terminal:
                    self._console.print(_line(round, progress), highlight=False, soft_wrap=True)

            round.wall_s = run_agents(self._agents, server.url, NAME, tell)
            with httpx.Client(trust_env=False) as client:
                round.cache = client.get(f"{server.url}/v1/cache/stats").raise_for_status().json()["cache"]

    def _say(self, text: str) -> None:
        self._note = text
        if not self._console.is_terminal:
            self._console.print(text, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        """Shows the table: live on a terminal, elsewhere once at the end, after a line for each answer."""
        if self._console.is_terminal:
            with Live(get_renderable=self._render, console=self._console, refresh_per_second=10):
                yield
        else:
            yield
            self._console.print()
            self._console.print(self._render())

    def _render(self) -> RenderableType:
        table = requests_table(self._agents, self._with, self._without)
        if not self._note:
            return table
        self._spinner.update(text=Text(self._note, style="dim"))
        return Group(table, Padding(self._spinner, (1, 1)))


# ---- display


def requests_table(agents: Sequence[ScriptedAgent], with_cache: DemoRound, without: DemoRound) -> Table:
    table = Table(box=None, pad_edge=True, padding=(0, 1), header_style="bold")
    table.add_column("agent")
    for heading in ("turn", "prompt\ntokens", "cached\ntokens"):
        table.add_column(heading, justify="right")
    table.add_column("", width=BAR_WIDTH)
    table.add_column("first token\nwith the cache", justify="right")
    table.add_column("\nwithout it", justify="right")
    for agent in agents:
        for turn in range(1, len(agent.steps) + 1):
            table.add_row(*_cells(Asked(agent.name, turn), with_cache, without))
    return table


def _cells(asked: Asked, with_cache: DemoRound, without: DemoRound) -> list[RenderableType]:
    answer = with_cache.answers.get(asked)
    cells: list[RenderableType] = [asked.agent if asked.turn == 1 else "", str(asked.turn)]
    if answer is None:
        cells += ["", "", ""]
    else:
        share = answer.cached_tokens / answer.prompt_tokens
        full = round(share * BAR_WIDTH)
        bar = Text("█" * full, style="green") + Text("░" * (BAR_WIDTH - full), style="dim")
        cells += [f"{answer.prompt_tokens:,}", f"{answer.cached_tokens:,}", bar]
    return [*cells, _wait(asked, with_cache, "green"), _wait(asked, without, "yellow")]


def _wait(asked: Asked, round: DemoRound, style: str) -> Text:
    ttft_s = round.ttft_s.get(asked)
    if ttft_s is None:
        return Text("waits" if asked in round.sent else "", style="dim")
    return Text(f"{ttft_s * 1000:,.0f} ms", style=style if asked in round.answers else f"{style} dim")


def _line(round: DemoRound, answer: Answered) -> str:
    return (
        f"  {round.title:<14}  {answer.asked.agent:<10} turn {answer.asked.turn}  "
        f"{answer.prompt_tokens:>6,} prompt tokens  {answer.cached_tokens:>6,} cached  "
        f"first token after {answer.ttft_s * 1000:>6,.0f} ms"
    )


def summary(found: Savings) -> RenderableType:
    wall_s, without_s = found.wall_s
    ttft_s, ttft_without_s = found.median_ttft_s
    rows = Table.grid(padding=(0, 2))
    share = found.saved_tokens / max(1, found.asked_tokens)
    rows.add_row(
        "prompt tokens",
        f"[bold]{found.saved_tokens:,}[/bold] of {found.asked_tokens:,} not computed ({share:.0%})",
    )
    rows.add_row(
        "KV bytes",
        f"[bold]{in_units(found.saved_bytes)}[/bold] not computed ({found.bytes_per_token:,} bytes a token)",
    )
    rows.add_row(
        "first token",
        f"after [bold]{ttft_s * 1000:,.0f} ms[/bold] rather than {ttft_without_s * 1000:,.0f} ms (median)",
    )
    rows.add_row(
        "all of it",
        f"[bold]{wall_s:.1f} s[/bold] rather than {without_s:.1f} s: {found.saved_s:.1f} s saved, "
        f"{without_s / wall_s:.1f} × as fast",
    )
    same = found.requests - len(found.different)
    if found.different:
        where = ", ".join(f"{asked.agent} turn {asked.turn}" for asked in found.different[:5])
        verdict = f"[bold red]NO[/bold red]: {len(found.different)} of {found.requests} differ, first {where}"
    else:
        verdict = f"[bold green]yes[/bold green], {same} of {found.requests} answers, to the last character"
    rows.add_row("identical", f"with the cache on and off: {verdict}")
    return Group(Text("\n Saved by the cache\n", style="bold"), Padding(rows, (0, 1)), Text())


def _outcome(answers: Mapping[Asked, Answered], asked: Asked) -> object:
    """Returns the part of an answer that must not depend on the cache. A missing answer equals no other."""
    answer = answers.get(asked)
    return object() if answer is None else (answer.text, answer.finish_reason, answer.prompt_tokens)


def _median(seconds: Mapping[Asked, float]) -> float:
    return statistics.median(seconds.values())
