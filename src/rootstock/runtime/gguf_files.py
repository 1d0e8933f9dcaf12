"""GGUF files: which of a directory's files make a model, and the directory that stands for them.

A GGUF file holds configuration, tokenizer, chat template and weights. All but the weights are written once as a
directory in the user's cache, which stands for the model from then on; the weights stay where they are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rootstock.errors import ModelPathNotFound, ModelUnsupported

OpenGguf = Callable[[str, Sequence[Path]], Path]
"""Returns the directory that stands for a model's GGUF files. Raises ModelError."""

TABLE = "gguf.json"
_USUAL = "Q4_K_M"  # llama.cpp takes it, too, where a repository has several
_MOST_LISTED = 8
_GRAPH = "openvino_model.xml"
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")
# Projectors of images, and matrices of importances.
_NO_MODEL = re.compile(r"(^|[-._/])(mmproj|imatrix)([-._]|$)", re.IGNORECASE)
_ADAPTED = re.compile(r"(^|[-._/])(UD|i1)[-._]", re.IGNORECASE)  # variants of a type with other types inside


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Entry of a tensor in a GGUF file's table."""

    name: str
    dtype: str  # GGML's name of its type: "F32", "Q4_K", …
    shape: tuple[int, ...]  # as torch has it: […, out, in]
    file: str
    offset: int  # bytes, from the beginning of the file
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


# ---- the files


def is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def has_gguf(names: Iterable[str]) -> bool:
    """Returns whether files of these names are served as GGUF, or stand for GGUF files: what else is there comes
    first."""
    given = list(names)
    has_others = any("/" not in name and name.endswith((".safetensors", _GRAPH)) for name in given)
    return TABLE in given or (not has_others and any(is_gguf(name) for name in given))


def variant_of(model: str) -> tuple[str, str]:
    """Splits `model:Q4_K_M` into the model and the variant of its weights, "" if none is named."""
    head, _, tail = model.rpartition(":")
    if head and re.fullmatch(r"[\w.-]+", tail) and not Path(model).exists():
        return head, tail
    return model, ""


def model_of(model: str, names: Iterable[str], variant: str) -> list[str]:
    """Returns the files of one model, in order, of all names in its directory. Without GGUF files there are none.

    Raises ModelPathNotFound if several models are there and `variant` does not say which one, or a part is missing.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if is_gguf(name) and not _NO_MODEL.search(name):
            stem = name[: -len(".gguf")]
            models.setdefault(_SHARD.sub("", stem), []).append(name)
    if not models and not variant:
        return []
    wanted = re.compile(rf"(^|[-._/]){re.escape(variant or _USUAL)}($|/)", re.IGNORECASE)
    chosen = [stem for stem in models if wanted.search(stem)]
    if not variant and len(models) == 1:
        chosen = list(models)
    if len(chosen) > 1:
        chosen = [stem for stem in chosen if not _ADAPTED.search(stem)] or chosen
    if len(chosen) != 1:
        listed = ", ".join(name for stem in list(models)[:_MOST_LISTED] for name in models[stem][:1])
        found = "no GGUF file" if not models else f"several GGUF files ({listed})"
        which = f", of which not one is {variant}" if variant and models else ""
        remedy = (
            f"Name one: {variant_of(model)[0]}:{_USUAL}, or the path of a file" if models else "Name a file"
        )
        raise ModelPathNotFound(model, f"it has {found}{which}. {remedy}")
    files = models[chosen[0]]
    shard = _SHARD.search(files[0].lower().removesuffix(".gguf"))
    if shard is not None and len(files) != int(shard[2]):
        raise ModelPathNotFound(model, f"{len(files)} of {int(shard[2])} parts of {chosen[0]} are there")
    return files


def parts_of(file: Path) -> list[Path]:
    """Returns all parts of the model of which `file` is one."""
    shard = _SHARD.search(file.stem)
    if shard is None:
        return [file]
    stem = file.stem[: shard.start()]
    return [file.with_name(f"{stem}-{n:05}-of-{shard[2]}.gguf") for n in range(1, int(shard[2]) + 1)]


def refuse_gguf(model: str, files: Sequence[Path]) -> Path:
    """Raises ModelUnsupported: an `OpenGguf` of the runtimes that do not read the format."""
    raise ModelUnsupported(model, "it is in GGUF: serve it with --runtime torch, which reads that format")


# ---- the directory that stands for them


def stands_for_gguf(directory: Path) -> bool:
    """Returns whether a directory was written for GGUF files."""
    return (directory / TABLE).is_file()


def tensors_in(directory: Path) -> list[GgufTensor]:
    """Returns the tensors of the GGUF files for which a directory stands; none for any other directory."""
    if not stands_for_gguf(directory):
        return []
    listed = _read(directory)["tensors"]
    return [GgufTensor(**{**entry, "shape": tuple(entry["shape"])}) for entry in listed]


def stamp_of(file: Path) -> list[int]:
    """Returns what shows that a file has changed: its size and the time of its last change in nanoseconds."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]


def changed_in(directory: Path) -> str:
    """Returns the name of a GGUF file that has changed since the directory that stands for it was written, or ""."""
    listed = _read(directory)["files"].items()
    return next((Path(file).name for file, stamp in listed if stamp_of(Path(file)) != stamp), "")


def architecture_in(directory: Path) -> str:
    """Returns GGUF's name of the architecture of the files for which a directory stands."""
    return str(_read(directory)["architecture"])


def _read(directory: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((directory / TABLE).read_text(encoding="utf-8"))
    return table
