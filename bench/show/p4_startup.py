"""P4: from the command to a server that is ready, and the most memory on the way, against transformers' own load.

A Llama of 530M in bfloat16, as it lies on disk, with a tokenizer. Its file has been read before, so that no side
waits for the disk.

  transformers   a process that imports transformers, and loads the tokenizer and the model in the dtype of ours
  ours, cold     `rootstock serve` without compiled kernels and a self-check from an earlier start, until it is ready
  ours, cached   the same command again

Sides take turns. Memory is the peak of the resident set (VmHWM) when the side is ready, against the bytes of the
weights in that dtype and the K and V that the server may hold (`--kv-budget 1GiB`, of which nothing is used yet). A
peak counts the pages of the file, too, which the system can take back.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import argument_parser, at_most, conclude
from llamas import say, write_chatting_llama

from rootstock.bench.serving import ServerProcess
from rootstock.runtime.torch.runner import resolve_dtype

SHOW = "P4"
POOL_BYTES = 1 << 30
OF_TRANSFORMERS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=sys.argv[2])
print(open("/proc/self/status").read())
"""


def peak_bytes(status: str) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def by_transformers(model: Path, dtype: str) -> tuple[float, int]:
    """Returns the seconds of transformers' load, and its peak."""
    began = time.monotonic()
    command = [sys.executable, "-c", OF_TRANSFORMERS, str(model), dtype]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.monotonic() - began, peak_bytes(told.stdout)


def by_server(model: Path) -> tuple[float, int]:
    """Returns the seconds until a server is ready, and its peak."""
    options = [str(model), "--port", "0", "--device", "cpu", "--kv-budget", str(POOL_BYTES)]
    began = time.monotonic()
    with ServerProcess(options, ready_within_s=600.0) as server:
        seconds = time.monotonic() - began
        return seconds, peak_bytes(Path(f"/proc/{server.pid}/status").read_text())


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--model", default="600m")
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    found: dict[str, list[tuple[float, int]]] = {"transformers": [], "cold": [], "cached": []}
    with tempfile.TemporaryDirectory() as temporary:
        model = write_chatting_llama(given.model, Path(temporary) / "model")
        dtype = resolve_dtype("auto", torch.device("cpu"))
        stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        weights = stored * dtype.itemsize // torch.bfloat16.itemsize
        for file in model.glob("*.safetensors"):
            file.read_bytes()
        for number in range(given.rounds):
            os.environ["NUMBA_CACHE_DIR"] = str(Path(temporary) / f"kernels {number}")
            os.environ["XDG_CACHE_HOME"] = str(Path(temporary) / f"checks {number}")
            found["transformers"].append(by_transformers(model, str(dtype).removeprefix("torch.")))
            found["cold"].append(by_server(model))
            found["cached"].append(by_server(model))
            say(str({side: each[-1] for side, each in found.items()}))
    seconds = {side: statistics.median(each[0] for each in all_) for side, all_ in found.items()}
    peaks = {side: max(each[1] for each in all_) for side, all_ in found.items()}
    figures: dict[str, Any] = {"weights_mib": weights >> 20, "dtype": str(dtype)}
    figures |= {f"{side}_s": round(each, 2) for side, each in seconds.items()}
    figures |= {f"{side}_peak_mib": each >> 20 for side, each in peaks.items()}
    for side in ("cold", "cached"):
        figures[f"{side}_to_transformers"] = round(seconds[side] / seconds["transformers"], 2)
        figures[f"{side}_peak_to_weights_and_pool"] = round(peaks[side] / (weights + POOL_BYTES), 2)
        figures[f"{side}_peak_to_weights"] = round(peaks[side] / weights, 2)
    bars = {
        "cold_to_transformers": at_most(1.5),
        "cached_to_transformers": at_most(1.5),
        "cold_peak_to_weights_and_pool": at_most(1.2),
        "cached_peak_to_weights_and_pool": at_most(1.2),
    }
    conclude(SHOW, figures, bars)


if __name__ == "__main__":
    main()
