"""Models of the shows' sizes in stored formats of 4 and 8 bits, made of the same weights in bfloat16."""

from __future__ import annotations

import shutil
from pathlib import Path

from d4_agents_http import as_gguf

from stored_checkpoints import FORMATS, quantize_in_place, w4a16

GGUF = ("Q8_0", "Q4_K_M", "Q4_0")
OF_SAFETENSORS = {"W4A16": w4a16(128), "W8A16": FORMATS["W8A16"], "FP8": FORMATS["FP8"]}
FORMATS_OF_SPEED = (*OF_SAFETENSORS, *GGUF)


def stored_model(path: Path, format: str, llama_python: str | None) -> Path | None:
    """Makes the model at `path` in a format, beside it. None: no interpreter with xllamacpp is given, whose code
    quantizes GGUF files."""
    if format in GGUF:
        return None if llama_python is None else as_gguf(llama_python, path, format)
    made = path.with_name(f"{path.name}-{format}")
    if not made.exists():
        shutil.copytree(path, made)
        quantize_in_place(made, *OF_SAFETENSORS[format])
    return made


def stored_bytes(path: Path) -> int:
    """Returns the bytes of a model's weights in files."""
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)
