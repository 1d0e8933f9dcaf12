"""G5: 5,000 cases of schemathesis over the server's OpenAPI document: no 5xx, no undocumented status, no hang.

`rootstock serve` runs the demo's tiny model in a process of its own, and operators may load an adapter. A second
server has an embedding model beside it, for the routes of embeddings and of loading. schemathesis is no dependency:
--python names the interpreter that has it (`python -m venv V && V/bin/pip install schemathesis`). The script covers
every operation that the document lists, with valid and invalid values, and with streams. Part of the cases have a
prompt that the server answers: the least share of answers of any route with a prompt is a figure, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from common import argument_parser, at_least, conclude, could_not, exactly
from peers import PeerUnavailable, rootstock_server
from transformers import AutoModelForCausalLM

from embedding_models import save_embedding_model
from lora import linears_of, save_adapter
from rootstock.bench.tiny_model import ensure_tiny_model

SHOW = "G5"
CASES = Path(__file__).with_name("schemathesis_cases.py")
# Answers have few tokens: the cases are about requests.
SERVER = ("--dtype", "float32", "--context-limit", "512", "--alias", "*")
SEVERAL = ("--dtype", "float32")
EMBEDDER = "embedder"
OF_SEVERAL = ("/v1/embeddings", "/api/embed", "/api/embeddings", "/v1/models/unload")
STREAMS = {"text/event-stream", "application/x-ndjson"}
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
    base = ensure_tiny_model()
    try:
        with tempfile.TemporaryDirectory() as folder:
            adapter = made_adapter(base, Path(folder) / "adapters" / "one")
            embedder = save_embedding_model(Path(folder) / EMBEDDER)
            with rootstock_server(base, *SERVER, "--adapter-directory", str(adapter.parent)) as server:
                rows = measure(server.url, given.python, given.cases, str(adapter))
                answers, alive = answers_of(server.url), is_alive(server.url)
            with rootstock_server(base, str(embedder), *SEVERAL) as server:
                some = sum(row["cases"] for row in rows if row["operation"].endswith(OF_SEVERAL))
                rows_of_several = measure(server.url, given.python, some, "", *OF_SEVERAL)
                alive = alive and is_alive(server.url)
    except PeerUnavailable as error:
        could_not(SHOW, str(error))
    replaced = {row["operation"] for row in rows_of_several}
    rows = [row for row in rows if row["operation"] not in replaced] + rows_of_several
    figures = figures_of(rows, answers) | {"alive": alive}
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


def made_adapter(base: Path, directory: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base)
    return save_adapter(directory, model, linears_of(model))


def answers_of(url: str) -> dict[str, Any]:
    """Returns the documented answer of status 200 of each operation."""
    document = httpx.get(f"{url}/openapi.json", timeout=60).json()
    return {
        f"{method.upper()} {path}": operation["responses"].get("200")
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def is_alive(url: str) -> bool:
    return httpx.get(f"{url}/health", timeout=60).status_code == 200


def measure(url: str, python: str, cases: int, adapter: str, *paths: str) -> list[dict[str, Any]]:
    command = [python, str(CASES), url, str(cases), adapter, EMBEDDER, *paths]
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
    return rows


def figures_of(rows: list[dict[str, Any]], answers: Mapping[str, Any]) -> dict[str, Any]:
    streaming = {
        name for name, answer in answers.items() if not STREAMS.isdisjoint((answer or {}).get("content", {}))
    }
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
    }


def _answered(row: Mapping[str, Any]) -> float:
    """Returns the share of an operation's cases that the server answered with 200."""
    answered = sum(count for status, count in row["statuses"].items() if status.startswith("200"))
    return float(answered / row["cases"])


if __name__ == "__main__":
    main()
