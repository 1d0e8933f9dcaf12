"""G5: 5,000 cases of schemathesis over the server's OpenAPI document: no 5xx, no undocumented status, no hang.

`rootstock serve` runs the demo's tiny model in a process of its own. schemathesis is no dependency: --python names
the interpreter that has it (`python -m venv V && V/bin/pip install schemathesis`). The script covers every operation
that the document lists, with valid and invalid values, and with streams. Part of the cases have a prompt that the
server answers: the least share of answers of any route with a prompt is a figure, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from common import argument_parser, at_least, conclude, could_not, exactly
from peers import PeerUnavailable, rootstock_server

from rootstock.bench.tiny_model import ensure_tiny_model

SHOW = "G5"
CASES = Path(__file__).with_name("schemathesis_cases.py")
# Answers have few tokens: the cases are about requests.
SERVER = ("--dtype", "float32", "--context-limit", "512", "--alias", "*")
LEAST_ANSWERED = 1 / 3  # of the cases of each route with a prompt


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument(
        "--python", default=sys.executable, help="interpreter with schemathesis; this one if left out"
    )
    options.add_argument("--cases", type=int, default=5000)
    given = options.parse_args()
    has = subprocess.run([given.python, "-c", "import schemathesis"], capture_output=True, text=True)
    if has.returncode:
        could_not(SHOW, f"{given.python} has no schemathesis: install it with pip, and name it with --python")
    try:
        with rootstock_server(ensure_tiny_model(), *SERVER) as server:
            figures = measure(server.url, given.python, given.cases)
    except PeerUnavailable as error:
        could_not(SHOW, str(error))
    bars = {
        "cases": at_least(given.cases),
        "failures": exactly(0),
        "5xx": exactly(0),
        "hangs": exactly(0),
        "least_answered": at_least(LEAST_ANSWERED),
        "operations never answered with 200": exactly([]),
        "operations never streamed": exactly([]),
        "alive": exactly(True),
    }
    conclude(SHOW, figures, bars)


def measure(url: str, python: str, cases: int) -> dict[str, Any]:
    document = httpx.get(f"{url}/openapi.json", timeout=60).json()
    answers = {
        f"{method.upper()} {path}": operation["responses"].get("200")
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    streaming = {
        name for name, answer in answers.items() if "text/event-stream" in (answer or {}).get("content", {})
    }
    command = [python, str(CASES), url, str(cases)]
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith('{"operation"'):
                continue
            rows.append(json.loads(line))
            told = {
                name: rows[-1][name] for name in ("operation", "cases", "seconds", "statuses", "failures")
            }
            print(told, flush=True)
            for message, count in rows[-1]["refused"].items():
                print(f"    {count} valid bodies: {message}", flush=True)
            for failure in rows[-1]["first"]:
                print(f"    {failure}", flush=True)
    if process.returncode:
        could_not(SHOW, f"{CASES.name} ended with status {process.returncode}")
    return {
        "operations": len(rows),
        "cases": sum(row["cases"] for row in rows),
        "failures": sum(row["failures"] for row in rows),
        "5xx": sum(count for row in rows for status, count in row["statuses"].items() if status[0] == "5"),
        "hangs": sum(row["statuses"].get("hang", 0) for row in rows),
        "least_answered": round(min(_answered(row) for row in rows if row["has_prompt"]), 3),
        "operations never answered with 200": [
            row["operation"] for row in rows if answers[row["operation"]] and not _answered(row)
        ],
        "operations never streamed": sorted(
            streaming - {row["operation"] for row in rows if "200 stream" in row["statuses"]}
        ),
        "statuses": {row["operation"]: row["statuses"] for row in rows},
        "alive": httpx.get(f"{url}/health", timeout=60).status_code == 200,
    }


def _answered(row: Mapping[str, Any]) -> float:
    """Returns the share of an operation's cases that the server answered with 200."""
    answered = sum(count for status, count in row["statuses"].items() if status.startswith("200"))
    return float(answered / row["cases"])


if __name__ == "__main__":
    main()
