"""M4: the OpenVINO runtime against transformers in float32, for each architecture that was exported.

    exact       logits of 100 tokens in one forward equal those of transformers
    schedules   random chunks, batches, forks, copies and rows restored from the host equal the exported graph in one
                pass (tests/openvino_schedules.py)
    same bits   a prompt alone and in a batch
    refused     graphs that Rootstock refuses, with the reason

`--exporter` is a command of an interpreter with optimum-intel (bench/setup_peers.py FOLDER openvino). It may be
repeated, because each version of transformers exports other architectures: `--exporter "env PYTHONPATH=FOLDER
PYTHON"` for a folder that `pip install --target FOLDER --no-deps transformers==4.57.6` has made. Schedules run in a
process without torch.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import argument_parser, at_least, at_most, conclude, could_not, exactly
from openvino_exports import REFERENCE

SHOW = "M4"
TOLERANCE = 1e-3  # standard deviations of the logits
_EXPORTS = Path(__file__).with_name("openvino_exports.py")
# Kinds of architectures, each with a bar: twelve of one kind would show little.
_KINDS = {
    "windows": ("cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "mistral", "phi3"),
    "mixtures": ("gpt_oss", "granitemoe", "mixtral", "qwen3_moe", "qwen3_next"),
    "hybrids": ("granitemoehybrid", "lfm2", "qwen3_5_text", "qwen3_next"),
}


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--exporter", action="append", default=[], help="command; may be repeated")
    options.add_argument("--exports", type=Path, help="folder that keeps the exports")
    options.add_argument("--schedules", type=int, default=20, help="of each architecture")
    options.add_argument("--one", type=Path, help="checks one export in this process")
    given = options.parse_args()
    if given.one is not None:
        print(json.dumps(checked(given.one, given.schedules)))
        return
    with tempfile.TemporaryDirectory() as folder:
        exports = given.exports or Path(folder)
        for command in given.exporter:
            subprocess.run([*shlex.split(command), str(_EXPORTS), str(exports)], check=True)
        found = sorted(path.parent for path in exports.glob(f"*/{REFERENCE}"))
        if not found:
            could_not(SHOW, "nothing was exported: name an --exporter or --exports")
        results = {path.name: in_a_process(path, given.schedules) for path in found}
    conclude(SHOW, *judged(results))


def in_a_process(export: Path, schedules: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", str(export), "--schedules", str(schedules)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    result = (
        json.loads(ended.stdout.splitlines()[-1]) if ended.returncode == 0 else {"died": ended.returncode}
    )
    print(f"{export.name:<18} {result}", flush=True)
    return result


def checked(export: Path, schedules: int) -> dict[str, Any]:
    """Returns the figures of one export, or the reason why it is refused."""
    from openvino_schedules import Schedules, reference_difference
    from rootstock.errors import ModelError

    try:
        model = Schedules(export)
    except ModelError as error:
        return {"refused": error.message}
    figures: dict[str, Any] = {"to_transformers": reference_difference(model)}
    for seed in range(schedules):
        model.run(seed)
    alone, batched, chunked = model.three_ways()
    return figures | {
        "schedules": schedules,
        "rows": model.rows,
        "largest": model.largest,
        "same_bits": bool((alone == batched).all()),
        "in_chunks": float(abs(alone - chunked).max()),
        "torch": "torch" in sys.modules,
        "operations": model.operations,
    }


def judged(results: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    served = {name: found for name, found in results.items() if "to_transformers" in found}
    exact = [
        name
        for name, found in served.items()
        if max(found["to_transformers"], found["largest"]) <= TOLERANCE and not found["torch"]
    ]
    if not served:
        could_not(SHOW, "no export is served")
    figures: dict[str, Any] = {
        "exact": len(exact),
        "served": len(served),
        "refused": {name: found["refused"] for name, found in results.items() if "refused" in found},
        "died": sum("died" in found for found in results.values()),
        "largest_to_transformers": max(found["to_transformers"] for found in served.values()),
        "largest_of_schedules": max(found["largest"] for found in served.values()),
        "largest_in_chunks": max(found["in_chunks"] for found in served.values()),
        "same_bits": sum(found["same_bits"] for found in served.values()),
        "schedules": sum(found["schedules"] for found in served.values()),
        "rows": sum(found["rows"] for found in served.values()),
        **{kind: sum(name in exact for name in names) for kind, names in _KINDS.items()},
    }
    bars = {
        "exact": at_least(max(12, len(served))),
        "served": exactly(len(results)),
        "same_bits": exactly(len(served)),
        "schedules": at_least(300),
        "died": exactly(0),
        "largest_of_schedules": at_most(TOLERANCE),
        **{kind: at_least(1) for kind in _KINDS},
    }
    return figures, bars


if __name__ == "__main__":
    main()
