"""One stage, in this process: run_stage.py MODULE STAGE ROWS FOLDER DEVICE. Started by run_all.py."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path


def main(module: str, stage: str, rows: str, folder: str, device: str) -> None:
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

    import torch
    from devices import Bench
    from isolation import write_rows

    found = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    with torch.inference_mode():
        write_rows(getattr(importlib.import_module(module), stage)(Bench(found, Path(folder))), Path(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
