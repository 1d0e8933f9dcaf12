"""N2: memory of models that are served as they are stored.

    resident  the memory of a process that has loaded the model, without its pool, relative to the bytes of its files
    peak      its largest memory while it loads

Memory is anonymous memory (RssAnon): pages of mapped files are the system's. What a process needs with any model,
measured with a small one of the same format, is taken off: Python's modules and compiled loops.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import argument_parser, at_most, conclude
from llamas import say, write_chatting_llama
from packed_models import FORMATS_OF_SPEED, stored_bytes, stored_model

SHOW = "N2"
LARGE: dict[str, int] = {  # fields over those of 600m: 1.5 billion parameters
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
SMALL = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--models", default="600m,1500m", help="comma-separated")
    options.add_argument("--formats", default=",".join(FORMATS_OF_SPEED), help="comma-separated")
    options.add_argument("--llama-python", default=os.environ.get("ROOTSTOCK_LLAMA_PYTHON"))
    options.add_argument("--one", type=Path, help="loads one model in this process")
    given = options.parse_args()
    if given.one is not None:
        print(json.dumps(loaded(given.one)))
        return
    figures: dict[str, Any] = {}
    worst = {"resident": 0.0, "peak": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        small = write_chatting_llama("600m", Path(folder) / "small", **SMALL)
        for name in given.models.split(","):
            fields = LARGE if name == "1500m" else {}
            path = write_chatting_llama("600m", Path(folder) / name, **fields)
            for format in given.formats.split(","):
                stored, of_small = (stored_model(each, format, given.llama_python) for each in (path, small))
                if stored is None or of_small is None:
                    say(f"{name} {format}: no --llama-python")
                    continue
                size = stored_bytes(stored)
                always, found = in_a_process(of_small), in_a_process(stored)
                for kind in worst:
                    ratio = (found[kind] - always[kind]) / (size - stored_bytes(of_small))
                    figures[f"{kind}_{name}_{format}"] = round(ratio, 3)
                    worst[kind] = max(worst[kind], ratio)
                say(
                    f"{name} {format}: {size / 1e6:.0f} MB in files, resident {found['resident'] / 1e6:.0f} and at "
                    f"most {found['peak'] / 1e6:.0f} MB, with a small model {always['resident'] / 1e6:.0f} and "
                    f"{always['peak'] / 1e6:.0f}; "
                    f"{figures[f'resident_{name}_{format}']} and {figures[f'peak_{name}_{format}']} of the files; "
                    f"loaded in {found['seconds']:.1f} s"
                )
                if stored != path and stored.is_dir():
                    (stored / "model.safetensors").unlink()
    figures |= {kind: round(ratio, 3) for kind, ratio in worst.items()}
    conclude(SHOW, figures, {"resident": at_most(1.1), "peak": at_most(1.2)})


def in_a_process(path: Path) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, "--one", str(path)], stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def loaded(path: Path) -> dict[str, float]:
    """Loads a model, and returns bytes of memory and the seconds."""
    from rootstock.config import ModelConfig
    from rootstock.runtime.host_memory import return_free_memory
    from rootstock.runtime.torch.runner import load_model

    peak, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    runtime = load_model(ModelConfig(str(path), device="cpu", dtype="bfloat16"))
    seconds = time.monotonic() - began
    ended.set()
    watcher.join()
    gc.collect()
    return_free_memory()
    resident = anonymous_bytes()
    assert runtime.description.parameters > 0
    return {"resident": resident, "peak": peak, "seconds": seconds}


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("this system tells no anonymous memory")


if __name__ == "__main__":
    main()
