"""Model files: finds them on disk or on the Hub and checks them. Imports neither torch nor transformers, so that a
wrong path or a broken file is reported at once."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open

from rootstock.errors import (
    ModelFileInvalid,
    ModelPathNotFound,
    ModelUnsupported,
    ModelWeightsMissing,
    shown,
)
from rootstock.runtime.gguf_files import (
    OpenGguf,
    changed_in,
    has_gguf,
    is_gguf,
    model_of,
    parts_of,
    refuse_gguf,
    stands_for_gguf,
    tensors_in,
    variant_of,
)
from rootstock.runtime.model_formats import (
    OPENVINO_GRAPH,
    OPENVINO_WEIGHTS,
    foreign_format,
    names_below,
    names_in,
    remedy_without_config,
)
from rootstock.units import in_units

Progress = Callable[[str, float], None]
"""Called with a stage ("download", "hash", "load", "compile", "check", "pack") and its progress, 0 to 1."""

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
_ADAPTER_CONFIG = "adapter_config.json"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_OF_ADAPTERS = ("adapter_model.safetensors", "adapters.safetensors")
_LFS_POINTER = b"version https://git-lfs."  # the beginning of a file that Git LFS has not fetched
_POINTER = "is a pointer of Git LFS without the weights: 'git lfs pull' in its directory fetches them"
_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]  # configuration and tokenizer
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

# Limits far above real files: the largest configurations, with lists of unquantized modules, have a few hundred KiB.
# An index of a thousand experts per layer has some tens of MiB.
_MAX_CONFIG_BYTES = 16 << 20
_MAX_INDEX_BYTES = 256 << 20
_MAX_GRAPH_BYTES = 64 << 20  # OpenVINO takes ten times as much memory; the largest graphs have some MiB
_MAX_LAYERS = 10_000  # transformers builds a module for each layer before it reads the weights
_MAX_EOS_TOKENS = 1000
_HASH_CHUNK_BYTES = 16 << 20
_MAX_DETAIL_CHARS = 300  # of a library's message
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Header entry of a tensor in a safetensors file."""

    name: str
    dtype: str  # safetensors' name: "F32", "BF16", "I8", …
    elements: int


# ---- the directory


def locate(
    model: str,
    *,
    with_code: bool,
    progress: Progress,
    takes_graph: Callable[[Collection[str]], bool] = lambda names: False,
    open_gguf: OpenGguf = refuse_gguf,
) -> Path:
    """Returns the model's directory: the given one, or its snapshot from the Hub, downloaded if missing. For GGUF
    files it is the directory that `open_gguf` returns.

    Of a repository only weights of one format are fetched: OpenVINO's graph if `takes_graph` returns True for the
    names of the repository's files, and otherwise safetensors. Raises ModelPathNotFound, ModelFileInvalid or
    ModelWeightsMissing, and ModelUnsupported for a format that is not read.
    """
    directory = _local_directory(model, open_gguf)
    if directory is None:
        directory = _fetched(model, with_code, progress, takes_graph, open_gguf)
    return directory


def names_here(model: str) -> list[str] | None:
    """Returns the names of a model's files on this machine: in its directory, or in its snapshot in the Hub's local
    cache. None: it is not on this machine."""
    try:
        name, variant = variant_of(model)
        path = Path(name).expanduser()
        if path.is_file():
            return [path.name]
        if not path.is_dir():
            from huggingface_hub import snapshot_download

            # With all patterns it would be refused, because weights of other formats are missing.
            path = Path(snapshot_download(str(path), allow_patterns=[CONFIG], local_files_only=True))
    except (OSError, ValueError, RuntimeError):
        return None
    names = names_in(path)
    names += [each for each in names_below(path, names) if is_gguf(each)]
    return [each for each in names if is_gguf(each)] if variant else names


def _local_directory(model: str, open_gguf: OpenGguf) -> Path | None:
    """Returns the directory if `model` names something on disk, None if it can only be a hub name.

    Raises ModelPathNotFound for a path to nothing, to a file that is not GGUF, or to a directory without config.json
    and GGUF files, and ModelUnsupported for files of a format that is not read.
    """
    if not model.strip():
        raise ModelPathNotFound(model, "the name is empty")
    name, variant = variant_of(model)
    try:
        path = Path(name).expanduser()
        kind = _kind_of(path)
        if kind is None and not _looks_like_a_path(name):
            return None
        if kind is None:
            raise ModelPathNotFound(model, "no such directory")
        if not stat.S_ISDIR(kind):
            if is_gguf(path.name) and stat.S_ISREG(kind):
                return open_gguf(model, parts_of(path))
            _refuse_format(model, [path.name])
            raise ModelPathNotFound(model, "it is a file")
        names = names_in(path)
        with_below = [*names, *names_below(path, names)]
        if (variant or has_gguf(with_below)) and (files := model_of(model, with_below, variant)):
            return open_gguf(model, [path / file for file in files])
        if _kind_of(path / CONFIG) is None:
            _refuse_format(model, names, path)
            below = with_below[len(names) :]
            if not any(name.endswith(f"/{CONFIG}") for name in below):
                _refuse_format(model, below)
            raise ModelPathNotFound(model, remedy_without_config(path, names))
    except (OSError, ValueError) as error:  # permissions, a loop of symbolic links, a name that is too long
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelPathNotFound(model, f"it cannot be opened ({reason})") from error
    except RuntimeError as error:  # ~user, without such a user
        raise ModelPathNotFound(model, "no such directory") from error
    return path


def _refuse_format(model: str, names: Sequence[str], directory: Path | None = None) -> None:
    """Raises ModelUnsupported if files of these names make a model in a format that is not read."""
    if found := foreign_format(names, None if directory is None else _base_model(model, directory)):
        raise ModelUnsupported(model, found)


def _base_model(model: str, directory: Path) -> object:
    """Returns the base model that an adapter's configuration names, if there is one."""
    try:
        fields = read_json(model, directory, _ADAPTER_CONFIG)
    except ModelFileInvalid:
        return None
    return fields.get("base_model_name_or_path") or fields.get("model")


def _kind_of(path: Path) -> int | None:
    """Returns the mode of the file at a path, None if there is none. Raises OSError if it cannot be determined."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _looks_like_a_path(model: str) -> bool:
    return model.startswith((".", "~")) or not _HUB_NAME.fullmatch(model)


def _fetched(
    model: str,
    with_code: bool,
    progress: Progress,
    takes_graph: Callable[[Collection[str]], bool],
    open_gguf: OpenGguf,
) -> Path:
    """Returns the snapshot of a repository on the Hub, from the local cache or downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*_TEXT_FILES, *(["*.py"] if with_code else [])]
    name, variant = variant_of(model)
    progress("download", 0.0)
    try:
        # Weight files are fetched by name, because repositories hold other copies of the weights too.
        directory = Path(snapshot_download(name, allow_patterns=patterns))
        here = names_in(directory)
        names = [*here, *_names_on_hub(name)]
        with_below = {*names, *names_below(directory, here)}
        of_gguf = model_of(model, with_below, variant) if variant or has_gguf(with_below) else []
        if of_gguf:
            directory = Path(snapshot_download(name, allow_patterns=of_gguf))
        else:
            _fetch_weights(model, directory, names, patterns, takes_graph)
    except LocalEntryNotFoundError as error:
        raise ModelPathNotFound(
            model, "no such directory, it is not in the local Hub cache, and the Hub cannot be reached"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        detail = f"no such directory, and the Hub answers: {first_line(error)}"
        raise ModelPathNotFound(model, detail) from error
    progress("download", 1.0)
    return open_gguf(model, [directory / file for file in of_gguf]) if of_gguf else directory


def _fetch_weights(
    model: str,
    directory: Path,
    names: Sequence[str],
    patterns: Sequence[str],
    takes_graph: Callable[[Collection[str]], bool],
) -> None:
    """Downloads the weights of a repository with these names into its snapshot, in safetensors or as a graph."""
    from huggingface_hub import snapshot_download

    has_config = (directory / CONFIG).is_file()
    weights = [OPENVINO_GRAPH, OPENVINO_WEIGHTS]
    is_graph = has_config and takes_graph(names)
    if not is_graph:
        weights = _named_weights(model, directory)
    if has_config:
        snapshot_download(model, allow_patterns=[*patterns, *weights])
    if not is_graph and not (has_config and all((directory / name).is_file() for name in weights)):
        _refuse_format(model, [*names, *names_below(directory, names)], directory)
    if not has_config:
        raise ModelPathNotFound(model, f"the repository on the Hub has no {CONFIG}")


def _names_on_hub(model: str) -> list[str]:
    """Returns the names in a repository on the Hub: none if it does not answer."""
    from huggingface_hub import HfApi

    try:
        # One request. A listing of the repository's tree is tried for half a minute if the Hub cannot be reached.
        return [file.rfilename for file in HfApi().model_info(model).siblings or ()]
    except Exception:  # the Hub's client has its own kinds, and the download has reported them
        return []


def public_name(model: str) -> str:
    """Returns the name for clients: a directory's or a GGUF file's own name without its path, or the Hub name."""
    path, variant = variant_of(model)
    found = Path(path).expanduser()
    if found.is_file() and is_gguf(path):
        return found.stem
    return f"{found.resolve().name}:{variant}".removesuffix(":") if found.is_dir() else model


def user_cache_folder() -> Path:
    """Returns the folder in which programs of this system keep files that can be made again."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "rootstock"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rootstock"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "rootstock" / "Cache"
    return Path.home() / ".cache" / "rootstock"


# ---- JSON


def read_json(model: str, directory: Path, name: str, max_bytes: int = _MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ModelFileInvalid, with the position of a syntax error."""
    content = _read_json(model, directory, name, max_bytes)
    if not isinstance(content, dict):
        raise ModelFileInvalid(model, name, f"it holds a {type(content).__name__}, not an object")
    return content


def read_json_list(model: str, directory: Path, name: str) -> list[Any]:
    """Returns the list in a JSON file. Raises ModelFileInvalid."""
    content = _read_json(model, directory, name, _MAX_CONFIG_BYTES)
    if not isinstance(content, list):
        raise ModelFileInvalid(model, name, f"it holds a {type(content).__name__}, not a list")
    return content


def _read_json(model: str, directory: Path, name: str, max_bytes: int) -> Any:
    try:
        if not stat.S_ISREG(os.stat(directory / name).st_mode):  # opening a pipe would block
            raise ModelFileInvalid(model, name, "it is not a regular file")
        with (directory / name).open("rb") as file:
            raw = file.read(max_bytes + 1)
        if len(raw) > max_bytes:
            raise ModelFileInvalid(model, name, f"it is larger than {in_units(max_bytes)}")
        content = json.loads(raw.decode("utf-8"))
    except OSError as error:
        raise ModelFileInvalid(
            model, name, f"it cannot be read ({error.strerror or type(error).__name__})"
        ) from error
    except UnicodeDecodeError as error:
        raise ModelFileInvalid(model, name, f"it is not UTF-8 at byte {error.start:,}") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ModelFileInvalid(model, name, f"it is not JSON at {place}: {error.msg}") from error
    except RecursionError as error:
        raise ModelFileInvalid(model, name, "its values are nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits
        raise ModelFileInvalid(model, name, f"it is not JSON: {first_line(error)}") from error
    return content


def read_configs(model: str, directory: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns config.json, its part about the model of text, and generation_config.json, {} if there is none.

    They are checked before code of the model's family reads them. Raises ModelFileInvalid.
    """
    config, generation = read_json(model, directory, CONFIG), {}
    for inner in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in _LAYER_COUNTS:
            count = inner.get(key)
            if isinstance(count, int) and not (0 <= count <= _MAX_LAYERS):
                raise ModelFileInvalid(
                    model, CONFIG, f"{key} is {shown(count)}, but must be from 0 to {_MAX_LAYERS:,}"
                )
        _check_eos(model, CONFIG, inner.get("eos_token_id"))
    if (directory / GENERATION_CONFIG).exists():
        generation = read_json(model, directory, GENERATION_CONFIG)
        _check_eos(model, GENERATION_CONFIG, generation.get("eos_token_id"))
    text = config.get("text_config")
    return config, text if isinstance(text, dict) else config, generation


def _check_eos(model: str, file: str, found: object) -> None:
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if len(ids) > _MAX_EOS_TOKENS or not all(type(i) is int and abs(i) < 1 << 31 for i in ids):
        raise ModelFileInvalid(
            model, file, f"eos_token_id is {shown(found)}, but must be a token id or a list of them"
        )


# ---- weights


def graph_files(model: str, directory: Path) -> list[Path]:
    """Returns OpenVINO's graph of a model and its weights. Raises ModelWeightsMissing or ModelFileInvalid."""
    files = [directory / OPENVINO_GRAPH, directory / OPENVINO_WEIGHTS]
    for file in files:
        if not file.is_file():
            raise ModelWeightsMissing(
                model, f"there is no {file.name}: optimum-cli export openvino writes the graph of a model"
            )
        if _begins_with(file, _LFS_POINTER):
            raise ModelWeightsMissing(model, f"{file.name} {_POINTER}")
    if files[0].stat().st_size > _MAX_GRAPH_BYTES:
        raise ModelFileInvalid(model, OPENVINO_GRAPH, f"it is larger than {in_units(_MAX_GRAPH_BYTES)}")
    return files


def weight_files(model: str, directory: Path) -> list[Path]:
    """Returns complete safetensors files, in order of name, or the GGUF files for which a directory stands.

    Raises ModelWeightsMissing or ModelFileInvalid.
    """
    if stands_for_gguf(directory):
        if changed := changed_in(directory):
            raise ModelFileInvalid(
                model, changed, "it has changed since its directory was written: name the file"
            )
        return [Path(file) for file in dict.fromkeys(tensor.file for tensor in tensors_in(directory))]
    names = _named_weights(model, directory)
    missing = [name for name in names if not os.path.isfile(directory / name)]
    if missing == [_SINGLE]:
        names = names_in(directory)
        others = [
            name
            for name in names
            if name.endswith(".safetensors") and name not in _OF_ADAPTERS and not foreign_format([name])
        ]
        if not others:
            _refuse_format(model, names, directory)
            _refuse_format(model, names_below(directory, names))
        found = f", but there is {', '.join(others[:3])}: fetch the index as well" if others else ""
        raise ModelWeightsMissing(model, f"there is no {_SINGLE} and no {_INDEX}{found}")
    if missing:
        raise ModelWeightsMissing(
            model, f"{', '.join(missing[:3])} of {len(names)} weight files do not exist"
        )
    files = [directory / name for name in names]
    for file in files:
        if next(_headers(model, [file]), None) is None:
            raise ModelWeightsMissing(model, f"{file.name} holds no tensor")
    return files


def stored_tensors(model: str, files: list[Path]) -> list[StoredTensor]:
    """Returns the tensors that the files' headers list. Raises ModelWeightsMissing."""
    return list(_headers(model, files))


def _headers(model: str, files: list[Path]) -> Iterator[StoredTensor]:
    for file in files:
        try:
            # safetensors reports every file that it cannot open as missing, so the file is opened here first.
            with file.open("rb"):
                pass
            # Opening reads the header and checks the file's length against it.
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    tensor = opened.get_slice(name)
                    elements = 1
                    for length in tensor.get_shape():
                        elements *= length
                    yield StoredTensor(name, tensor.get_dtype(), elements)
        except SafetensorError as error:
            reason = _POINTER if _begins_with(file, _LFS_POINTER) else f"is damaged ({first_line(error)})"
            raise ModelWeightsMissing(model, f"{file.name} {reason}") from error
        except OSError as error:
            raise ModelWeightsMissing(
                model, f"{file.name} cannot be read ({error.strerror or error})"
            ) from error


def _begins_with(file: Path, beginning: bytes) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(beginning)) == beginning
    except OSError:
        return False


def _named_weights(model: str, directory: Path) -> list[str]:
    """Returns the names of the weight files that the index lists. Raises ModelFileInvalid."""
    if not (directory / _INDEX).is_file():
        return [_SINGLE]
    listed = read_json(model, directory, _INDEX, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelFileInvalid(model, _INDEX, "it has no weight_map that names files")
    names = {name if isinstance(name, str) else "" for name in listed.values()}
    for name in names:
        path = PurePosixPath(name)
        if not name.endswith(".safetensors") or path.is_absolute() or ".." in path.parts:
            raise ModelFileInvalid(
                model, _INDEX, f"{shown(name)} does not name a safetensors file in the model's directory"
            )
    return sorted(names)


def fingerprint(directory: Path, files: list[Path], architecture: str) -> str:
    """Computes the content hash of weights, configuration and the model's own code, if any: xxh3-128 over all bytes.

    Processes exchange cached K and V under this name, so every byte counts. It may run in a thread while the weights
    are read: both use the same pages of the files.
    """
    digest = xxhash.xxh3_128(architecture.encode())
    code = (path for path in directory.glob("*.py") if path.is_file())
    named = [directory / CONFIG, *sorted(code), *files]
    buffer = bytearray(_HASH_CHUNK_BYTES)
    for file in named:
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def first_line(error: object) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__).rstrip(".")


def in_one_line(error: object) -> str:
    """Returns a library's message of several lines as one, shortened."""
    text = " ".join(str(error).split()) or type(error).__name__
    return (text if len(text) <= _MAX_DETAIL_CHARS else f"{text[:_MAX_DETAIL_CHARS]}…").rstrip(".")
