"""`rootstock conformance`: whether any server's prompt cache tells the truth, asked by HTTP alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from rootstock.errors import StartupError
from rootstock.interrupts import AT_ONCE, ctrl_c

EXIT_FINDINGS = 1


@ctrl_c(AT_ONCE)
def conformance(
    url: Annotated[str, typer.Argument(help="URL of a server with OpenAI's chat API.", show_default=False)],
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY", metavar="KEY", show_default=False, help="API key of the server."
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Model name.", show_default="the first that the server lists")
    ] = None,
    cases: Annotated[
        str | None, typer.Option(help="Cases to run, comma-separated.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the texts.")] = 0,
    words: Annotated[int, typer.Option(min=20, max=100_000, help="Words of a usual prompt.")] = 300,
    pressure: Annotated[
        int, typer.Option(min=0, max=10_000, help="Long conversations between two turns, in one case.")
    ] = 12,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="NATS",
            help="Least difference of a log-probability that counts.",
            show_default="10 times the server's rounding, .001 to .25",
        ),
    ] = None,
    restart: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Shell command that restarts the server, for the case of a restart.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the result as JSON, with the requests of each finding."),
    ] = None,
) -> None:
    """Ask a server, ours or another, whether its prompt cache tells the truth.

    Conversations as clients have them: repeated, continued, cut, edited, at once, cancelled, with tools, after a
    restart. Each answer must be the one that the server gives with nothing cached, and each count of cached tokens
    possible. Exit status 1: something is not true. 2: nothing could be compared."""
    from rootstock.conformance.report import as_json, line_of, summary
    from rootstock.conformance.server import Server
    from rootstock.conformance.suite import SuiteOptions, run_suite
    from rootstock.options import parse_names

    options = SuiteOptions(
        parse_names(cases, "--cases") if cases else (),
        seed,
        words,
        pressure=pressure,
        tolerance=tolerance,
    )

    def restarted() -> None:
        assert restart is not None
        if subprocess.run(restart, shell=True, check=False).returncode != 0:
            raise StartupError(f"The command of --restart failed: {restart}")

    if out is not None:
        try:
            out.open("a").close()  # before the requests, which take minutes
        except OSError as error:
            raise StartupError(f"--out {out} cannot be written ({error.strerror}).") from error
    with Server(url, served_model_name, api_key) as server:
        result = run_suite(
            server,
            options,
            None if restart is None else restarted,
            lambda done: print(line_of(done), flush=True),
        )
        print(*summary(result), sep="\n")
        if out is not None:
            told = json.dumps(as_json(result), indent=1, ensure_ascii=False)
            # Half of a surrogate pair is no UTF-8. Its escape is the same in JSON.
            out.write_text(told, encoding="utf-8", errors="backslashreplace")
    if result.findings:
        raise typer.Exit(EXIT_FINDINGS)
    if not result.compared:
        raise StartupError("No answer could be compared: see the lines of the cases.")
