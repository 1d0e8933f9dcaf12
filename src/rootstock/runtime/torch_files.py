"""A model's files: found on disk or on the Hub, checked, hashed, and read into a transformers model."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rootstock.errors import ModelPathNotFound, ModelUnsupported, ModelWeightsMissing

Progress = Callable[[str, float], None]
"""Called with a stage ("download", "hash", "load", "compile", "check", "pack") and its share that is done, 0 to 1."""

_HASH_CHUNK_BYTES = 16 << 20
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]  # configuration and tokenizer
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def locate(model: str, *, with_code: bool, progress: Progress) -> Path:
    """The directory that holds the model: itself, or its snapshot from the Hub, fetched if it is not there yet.

    Raises ModelPathNotFound, or ModelWeightsMissing for a repository without safetensors.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelPathNotFound(model, "the directory has no config.json")
        return path
    if path.exists():
        raise ModelPathNotFound(model, "it is a file")
    if not _HUB_NAME.fullmatch(model) or model.startswith("."):
        raise ModelPathNotFound(model, "no such directory")
    patterns = [*_TEXT_FILES, *(["*.py"] if with_code else [])]
    progress("download", 0.0)
    try:
        # The weights are fetched by name: repositories hold other copies of them beside the ones that are meant.
        directory = Path(snapshot_download(model, allow_patterns=patterns))
        if not (directory / "config.json").is_file():
            raise ModelPathNotFound(model, "the repository on the Hub has no config.json")
        snapshot_download(model, allow_patterns=[*patterns, *_named_weights(directory)])
    except LocalEntryNotFoundError as error:
        raise ModelPathNotFound(
            model, "no such directory, it is not in the local Hub cache, and the Hub cannot be reached"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        detail = f"no such directory, and the Hub says: {_first_line(error)}"
        raise ModelPathNotFound(model, detail) from error
    progress("download", 1.0)
    return directory


def _named_weights(directory: Path) -> list[str]:
    """The names of the weight files, as the index lists them."""
    index = directory / _INDEX
    if not index.is_file():
        return [_SINGLE]
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))


def weight_files(model: str, directory: Path) -> list[Path]:
    """Complete safetensors files in the order of their names. Raises ModelWeightsMissing."""
    try:
        names = _named_weights(directory)
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelWeightsMissing(model, f"{_INDEX} is not an index of weights") from error
    missing = [name for name in names if not (directory / name).is_file()]
    if missing == [_SINGLE]:
        others = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f", but {', '.join(others[:3])}: convert it to safetensors" if others else ""
        raise ModelWeightsMissing(model, f"there is no {_SINGLE} and no {_INDEX}{found}")
    if missing:
        raise ModelWeightsMissing(model, f"{', '.join(missing[:3])} of {len(names)} weight files not there")
    files = [directory / name for name in names]
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:  # reads the header, and that the file is as long
                if not opened.keys():
                    raise ModelWeightsMissing(model, f"{file.name} holds no tensor")
        except (SafetensorError, OSError) as error:
            raise ModelWeightsMissing(model, f"{file.name} is damaged ({_first_line(error)})") from error
    return files


def fingerprint(directory: Path, files: list[Path], architecture: str, progress: Progress) -> str:
    """Content hash of weights, configuration and the model's own code if it has any: xxh3-128 over all bytes.

    Cached K and V are exchanged between processes by this name, so every byte counts; it runs at the disk's
    speed, and the bytes it reads are those that are loaded next.
    """
    digest = xxhash.xxh3_128(architecture.encode())
    named = [directory / "config.json", *sorted(directory.glob("*.py")), *files]
    total = sum(file.stat().st_size for file in named)
    done = 0
    buffer = bytearray(_HASH_CHUNK_BYTES)
    for file in named:
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                done += count
                progress("hash", done / total)
    return digest.hexdigest()


def read_config(model: str, directory: Path, *, trust_remote_code: bool) -> Any:
    """Raises ModelPathNotFound if it cannot be read, ModelUnsupported if nobody knows the architecture."""
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "trust_remote_code" in str(error):
            reason = "it comes with code of its own; read that code, then allow it with --trust-remote-code"
        else:
            reason = _first_line(error)
        raise ModelUnsupported(model, reason) from error
    except Exception as error:  # a configuration is checked by whatever code reads it
        raise ModelPathNotFound(model, f"its config.json cannot be used: {_first_line(error)}") from error


def empty_model(model: str, config: Any, *, trust_remote_code: bool) -> nn.Module:
    """The architecture without weights, on the meta device. Raises ModelUnsupported."""
    try:
        with torch.device("meta"), _quiet():
            built = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever the architecture's own code raises
        raise ModelUnsupported(model, _first_line(error)) from error
    assert isinstance(built, nn.Module)
    return built


def read_weights(
    model: str, directory: Path, config: Any, dtype: torch.dtype, *, trust_remote_code: bool
) -> nn.Module:
    """The model with its weights, on the CPU. Raises ModelWeightsMissing, ModelUnsupported.

    A parameter that the files do not hold would be filled with random numbers: that is an error here.
    """
    try:
        with _quiet():
            loaded, info = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
    except ImportError as error:  # a quantisation whose package is not installed
        raise ModelUnsupported(model, _first_line(error)) from error
    except (
        Exception
    ) as error:  # transformers raises RuntimeError, ValueError, OSError and others for bad weights
        raise ModelWeightsMissing(model, _first_line(error)) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelWeightsMissing(model, f"{len(missing)} parameters are missing, {_some(missing)}")
    mismatched = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"])
    if mismatched:
        raise ModelWeightsMissing(
            model, f"{len(mismatched)} parameters have another shape, {_some(mismatched)}"
        )
    if info["error_msgs"]:
        raise ModelWeightsMissing(model, _first_line(info["error_msgs"][0]))
    assert isinstance(loaded, nn.Module)
    return loaded


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own bars and warnings: what matters in them becomes an error of ours."""
    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _some(names: list[str]) -> str:
    return f"among them {', '.join(names[:3])}" if len(names) > 3 else ", ".join(names)


def _first_line(error: object) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__).rstrip(".")
