"""K1: files, functions and calls between files that chat requests touch. `make check` runs it: no bar may be raised
without a reason.

`rootstock serve` on a small model of torch answers requests, each after a first one of another text. Counted are the
files and functions of the package that any thread calls between the request's first byte and the answer's last, and
the calls from one file to another. Compiled loops and calls inside libraries do not count.

    plain  a chat of 16 tokens, not streamed
    rich   a streamed chat with a tool, a time to live, a tenant and a salt, on a server whose K/V are int8

Threads that work by time add a few functions to some runs. Each request is asked three times: functions of every run
and the least number of calls are judged.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from common import argument_parser, at_most, conclude, exactly

from docs.test_imports import circles, imports
from docs.traced_chat import files_of, traced

# The goals of issue 28 are 50 files, 380 functions and 1,800 calls, and 70 files of the rich chat.
# Processors differ in a few kernels: the bars are some 3 % above the counts.
PLAIN_FILES, PLAIN_FUNCTIONS, PLAIN_CALLS = 74, 525, 1_870
RICH_FILES = 87

TOOL = {
    "name": "weather",
    "description": "Returns the weather.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}
PLAIN: Any = {"body": {"model": "m", "max_tokens": 16, "ignore_eos": True}, "headers": {}}
RICH: Any = {
    "body": PLAIN["body"]
    | {
        "stream": True,
        "tools": [{"type": "function", "function": TOOL}],
        "cache_salt": "salt",
        "prompt_cache_retention": "24h",
    },
    "headers": {"X-Cache-Salt": "tenant"},
}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--list", action="store_true", help="print the functions of the plain chat by file")
    parser.add_argument(
        "--edges", action="store_true", help="print the plain chat's calls between files by count"
    )
    args = parser.parse_args()
    from rootstock.bench.tiny_model import TinyModelSpec, write_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        model.mkdir()
        write_tiny_model(TinyModelSpec(), model)
        plain = counted(traced(Path(folder, "plain.json"), PLAIN, str(model), "--dtype", "float32"))
        # The dtype is given, because the automatic one depends on the processor, and so do the kernels.
        options = ("--dtype", "float32", "--kv-dtype", "int8")
        rich = counted(traced(Path(folder, "rich.json"), RICH, str(model), *options))
    if args.list:
        for file in files_of(plain["functions"]):
            print(file, *(f"    {name}" for of, name in plain["functions"] if of == file), sep="\n")
    if args.edges:
        for edge, calls in plain["edges"].most_common():
            print(f"{calls:5d} {edge}")
    figures = {
        "circles": len(circles(imports())),
        "plain_files": len(files_of(plain["functions"])),
        "plain_functions": len(plain["functions"]),
        "plain_calls_between_files": plain["edges"].total(),
        "rich_files": len(files_of(rich["functions"])),
        "rich_functions": len(rich["functions"]),
        "rich_calls_between_files": rich["edges"].total(),
        "answered": plain["answered"] and rich["answered"],
    }
    bars = {
        "circles": exactly(0),
        "plain_files": at_most(PLAIN_FILES),
        "plain_functions": at_most(PLAIN_FUNCTIONS),
        "plain_calls_between_files": at_most(PLAIN_CALLS),
        "rich_files": at_most(RICH_FILES),
        "answered": exactly(True),
    }
    conclude("K1", figures, bars)


def counted(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the functions that every run called, and the calls of the run with the least number."""
    in_each = set.intersection(*({(file, name) for file, name in run["functions"]} for run in runs))
    return {
        "functions": sorted(in_each),
        "edges": min((Counter(run["edges"]) for run in runs), key=Counter.total),
        "answered": all(run["answered"] for run in runs),
    }


if __name__ == "__main__":
    main()
