"""Files of a LoRA adapter in PEFT's or mlx-lm's format: finds, bounds and checks them. Imports neither torch nor MLX.

A directory has `adapter_config.json`, and `adapter_model.safetensors` of PEFT or `adapters.safetensors` of mlx-lm.
The tensors decide which modules are adapted: there are two for each module that the training chose. The configuration
gives their scaling. A field of PEFT's that would change the answer and is not supported is refused. mlx-lm writes all
options of the training into its own, of which only the kind and the parameters of LoRA count.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash
from safetensors import SafetensorError, safe_open

from rootstock.errors import AdapterUnusable, ModelFileInvalid, shown
from rootstock.runtime.model_files import first_line, read_json
from rootstock.units import in_units

ADAPTER_CONFIG = "adapter_config.json"

AdapterFormat = Literal["peft", "mlx-lm"]

_WEIGHTS: Mapping[AdapterFormat, str] = {
    "peft": "adapter_model.safetensors",
    "mlx-lm": "adapters.safetensors",
}

_MAX_CONFIG_BYTES = 1 << 20
_MAX_WEIGHT_BYTES = 8 << 30
_MAX_HEADER_BYTES = 32 << 20
_MAX_TENSORS = 200_000
_MAX_NAME_CHARS = 512
_MAX_RANK = 4_096
_MAX_ALPHA = 1e6
_MAX_PATTERNS = 512  # of rank_pattern and of alpha_pattern
_MAX_PATTERN_CHARS = 256
_MAX_REPEATS = 2  # in a pattern: with more, the time of a match could grow beyond all bounds
_HASH_CHUNK_BYTES = 16 << 20
_VERSION = b"lora.1"  # changes with the arithmetic: K and V under the old fingerprint are not used then

_FLOATS = {"F64", "F32", "F16", "BF16"}

# Fields that say how an adapter was made, or that the tensors decide.
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_config", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules", "task_type",
}  # fmt: skip
_READ = {
    "alpha_pattern", "bias", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "lora_bias", "peft_type", "r",
    "rank_pattern", "use_dora", "use_rslora",
}  # fmt: skip
_REASONS = {
    "alora_invocation_tokens": "an activated LoRA is off until its invocation tokens",
    "layer_replication": "it repeats layers of the base model",
    "target_parameters": "it adapts parameters that are not linear layers, such as experts",
    "trainable_token_indices": "it replaces rows of the embedding",
    "use_qalora": "QALoRA needs a base quantized in its own format",
}
# Values with which PEFT leaves the base's weights as they are.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Checked files of an adapter, without the tensors' data."""

    name: str  # for messages
    format: AdapterFormat
    directory: Path
    weights: Path
    fingerprint: str  # of all bytes of both files
    scalings: Scalings
    tensors: Mapping[str, ModuleTensors]  # by the name of the base model's module
    nbytes: int
    stamp: tuple[int, ...]  # of both files, when they were hashed

    @property
    def weight_count(self) -> int:
        """Numbers in all tensors."""
        return _count(self.tensors)

    def refuse_changed(self) -> None:
        """Raises AdapterUnusable if a file was written since it was hashed. OSError if it is gone."""
        if _stamp(self.directory / ADAPTER_CONFIG, self.weights) != self.stamp:
            raise AdapterUnusable(self.name, "its files were changed while they were read. Load it again")


Role = Literal["A", "B", "B.bias", "embedding_A", "embedding_B", "magnitude", "weight", "bias"]


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """Tensors of one module of the base model: for each role the tensor's name in the file, and its shape."""

    names: Mapping[Role, str]
    shapes: Mapping[Role, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Scalings:
    """Fields of the configuration from which a module's rank and scaling follow."""

    rank: int
    alpha: float
    by_root: bool  # rank-stabilized LoRA: alpha / √rank instead of alpha / rank
    ranks: Mapping[str, int]  # pattern → rank
    alphas: Mapping[str, float]
    with_magnitudes: bool  # DoRA

    def rank_of(self, module: str) -> int:
        return next((rank for pattern, rank in self.ranks.items() if _matches(pattern, module)), self.rank)

    def scaling_of(self, module: str) -> float:
        """Returns the factor of B·A."""
        alpha = next((a for pattern, a in self.alphas.items() if _matches(pattern, module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def read_adapter(name: str, path: str | Path) -> AdapterSource:
    """Checks an adapter's files and hashes them. Takes as long as reading them. Raises AdapterUnusable."""
    with _refusing(name, path):
        directory = _directory(name, path)
        config = directory / ADAPTER_CONFIG
        stamp = _stamp(config)
        read = _read_config(name, directory)
        weights = _weights(name, directory, read.format)
        stamp += _stamp(weights)
        tensors = _read_header(name, weights, read)
        return AdapterSource(
            name,
            read.format,
            directory,
            weights,
            _fingerprint(config, weights),
            read.scalings,
            tensors,
            weights.stat().st_size,
            stamp,
        )


def count_weights(name: str, path: str | Path) -> int:
    """Counts the numbers in an adapter's tensors. Checks the files, and reads no tensor. Raises AdapterUnusable."""
    with _refusing(name, path):
        directory = _directory(name, path)
        read = _read_config(name, directory)
        return _count(_read_header(name, _weights(name, directory, read.format), read))


def stored_bytes(path: Path) -> int:
    """Returns the size of an adapter's weights on disk; 0: there are none that can be read."""
    for weights in _WEIGHTS.values():
        with contextlib.suppress(OSError, RuntimeError):
            return (path.expanduser() / weights).stat().st_size
    return 0


def _count(modules: Mapping[str, ModuleTensors]) -> int:
    return sum(math.prod(shape) for module in modules.values() for shape in module.shapes.values())


def _directory(name: str, path: str | Path) -> Path:
    """Returns the directory of an adapter if it has a configuration. Raises AdapterUnusable."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise AdapterUnusable(name, f"{shown(str(directory))} is not a directory")
    if not (directory / ADAPTER_CONFIG).is_file():
        raise AdapterUnusable(name, f"{directory} has no {ADAPTER_CONFIG}")
    return directory


def _weights(name: str, directory: Path, format: AdapterFormat) -> Path:
    """Returns the file of an adapter's weights. Raises AdapterUnusable."""
    weights = directory / _WEIGHTS[format]
    if not weights.is_file():
        raise AdapterUnusable(name, _without_weights(weights))
    if weights.stat().st_size > _MAX_WEIGHT_BYTES:
        raise AdapterUnusable(name, f"{weights.name} is larger than {in_units(_MAX_WEIGHT_BYTES)}")
    return weights


@contextlib.contextmanager
def _refusing(name: str, path: str | Path) -> Iterator[None]:
    """Turns errors of files and paths into AdapterUnusable."""
    try:
        yield
    except OSError as error:
        raise AdapterUnusable(
            name, f"it cannot be read ({error.strerror or type(error).__name__})"
        ) from error
    except (ValueError, RuntimeError) as error:  # a NUL in the path, or ~user without such a user
        raise AdapterUnusable(name, f"{shown(str(path))} is not a path: {first_line(error)}") from error


def _without_weights(weights: Path) -> str:
    others = sorted(path.name for path in weights.parent.glob("adapter_model.*"))
    if not others:
        return f"{weights.parent} has no {weights.name}"
    return (
        f"there is {others[0]} and no {weights.name}. A file of that kind is a pickle, which can run code when "
        "it is read. Load it with PEFT where you trust it, and save it with safe_serialization=True"
    )


def _stamp(*files: Path) -> tuple[int, ...]:
    found = [file.stat() for file in files]
    return tuple(number for one in found for number in (one.st_ino, one.st_size, one.st_mtime_ns))


def _fingerprint(*files: Path) -> str:
    digest = xxhash.xxh3_128(_VERSION)
    buffer = bytearray(_HASH_CHUNK_BYTES)
    for file in files:
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


# ---- the configuration


@dataclass(frozen=True, slots=True)
class _Config:
    """Checked configuration."""

    format: AdapterFormat
    scalings: Scalings
    saved: tuple[str, ...] = ()  # ends of the names of modules of which the adapter has whole weights
    has_biases: bool = False


def _read_config(name: str, directory: Path) -> _Config:
    try:
        fields = read_json(name, directory, ADAPTER_CONFIG, _MAX_CONFIG_BYTES)
    except ModelFileInvalid as error:
        raise AdapterUnusable(name, error.message.rstrip(".")) from error
    return _of_mlx_lm(name, fields) if "lora_parameters" in fields else _of_peft(name, fields)


def _of_mlx_lm(name: str, fields: dict[str, Any]) -> _Config:
    kind, given = fields.get("fine_tune_type", "lora"), fields["lora_parameters"]
    if kind not in ("lora", "dora"):
        raise AdapterUnusable(
            name,
            f"its fine_tune_type is {shown(kind)}, and only lora and dora are supported. Make a model of it with "
            "mlx_lm.fuse",
        )
    if not isinstance(given, dict):
        raise AdapterUnusable(name, f"lora_parameters is {shown(given)}, but must be an object")
    rank = int(_number(name, "rank", given.get("rank"), _MAX_RANK, whole=True))
    scale = _number(name, "scale", given.get("scale"), _MAX_ALPHA)
    return _Config("mlx-lm", Scalings(rank, scale * rank, False, {}, {}, kind == "dora"))


def _of_peft(name: str, fields: dict[str, Any]) -> _Config:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise AdapterUnusable(name, f"its peft_type is {shown(kind)}, and only LORA is supported")
    for field, value in fields.items():
        if field not in _READ | _HARMLESS and value not in (None, False, [], {}):
            reason = _REASONS.get(field, "this field is not supported")
            raise AdapterUnusable(name, f"{ADAPTER_CONFIG} has {shown(field)}: {reason}")
    init = fields.get("init_lora_weights")
    if not any(init is plain or init == plain for plain in _PLAIN_INITS):
        raise AdapterUnusable(
            name,
            f"init_lora_weights is {shown(init)}: its training changed the base's weights as well. Save it with "
            "PEFT's path_initial_model_for_weight_conversion, which makes a plain LoRA of it",
        )
    if fields.get("bias", "none") not in ("none", "all", "lora_only"):
        raise AdapterUnusable(name, f"bias is {shown(fields['bias'])}, but must be none, all or lora_only")
    for field in ("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out"):
        if fields.get(field) not in (None, True, False):
            raise AdapterUnusable(name, f"{field} is {shown(fields[field])}, but must be true or false")
    saved = fields.get("modules_to_save")
    if saved is not None and not (isinstance(saved, list) and all(isinstance(each, str) for each in saved)):
        raise AdapterUnusable(name, f"modules_to_save is {shown(saved)}, but must be a list of names")
    scalings = Scalings(
        int(_number(name, "r", fields.get("r", 8), _MAX_RANK, whole=True)),
        _number(name, "lora_alpha", fields.get("lora_alpha", 8), _MAX_ALPHA),
        bool(fields.get("use_rslora")),
        {
            pattern: int(_number(name, "rank_pattern", rank, _MAX_RANK, whole=True))
            for pattern, rank in _patterns(name, "rank_pattern", fields)
        },
        {
            pattern: _number(name, "alpha_pattern", alpha, _MAX_ALPHA)
            for pattern, alpha in _patterns(name, "alpha_pattern", fields)
        },
        bool(fields.get("use_dora")),
    )
    return _Config("peft", scalings, tuple(saved or ()), fields.get("bias", "none") != "none")


def _number(name: str, field: str, value: Any, most: float, *, whole: bool = False) -> float:
    right = type(value) is int or (type(value) is float and not whole)
    if not right or not 0 < value <= most:
        kind = "a whole number" if whole else "a number"
        raise AdapterUnusable(
            name, f"{field} has {shown(value)}, but needs {kind} above 0 and up to {most:,.0f}"
        )
    return float(value)


def _patterns(name: str, field: str, fields: dict[str, Any]) -> list[tuple[str, Any]]:
    given = fields.get(field) or {}
    if not isinstance(given, dict) or len(given) > _MAX_PATTERNS:
        raise AdapterUnusable(name, f"{field} is no object of at most {_MAX_PATTERNS:,} fields")
    for pattern in given:
        if not _is_bounded(pattern):
            raise AdapterUnusable(
                name,
                f"{field} has {shown(pattern)}, which is not a module's name or a short regular expression with at "
                f"most {_MAX_REPEATS} repeats and no repeated group",
            )
    return list(given.items())


def _is_bounded(pattern: str) -> bool:
    """Returns whether matching the pattern takes little time on any module's name."""
    if len(pattern) > _MAX_PATTERN_CHARS or re.search(r"\)[*+?{]|\(\?|\\[1-9]", pattern):
        return False
    if len(re.findall(r"(?<!\\)[*+?{]", pattern)) > _MAX_REPEATS:
        return False
    try:
        re.compile(pattern)
    except (re.error, OverflowError):
        return False
    return True


def _matches(pattern: str, module: str) -> bool:
    """Returns whether a pattern names a module, as PEFT matches its patterns: the end of the name, from a dot on."""
    return re.match(rf"(?:.*\.)?(?:{pattern})$", module) is not None


# ---- the weights


def _read_header(name: str, weights: Path, config: _Config) -> dict[str, ModuleTensors]:
    """Returns the modules that the tensors adapt. Reads no tensor."""
    with weights.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise AdapterUnusable(
            name, f"the header of {weights.name} is longer than {in_units(_MAX_HEADER_BYTES)}"
        )
    names: dict[str, dict[Role, str]] = {}
    shapes: dict[str, dict[Role, tuple[int, ...]]] = {}
    try:
        with safe_open(weights, framework="np") as opened:
            keys = list(opened.keys())
            if not 1 <= len(keys) <= _MAX_TENSORS:
                raise AdapterUnusable(name, f"{weights.name} has {len(keys):,} tensors")
            for key in keys:
                if len(key) > _MAX_NAME_CHARS:
                    raise AdapterUnusable(
                        name, f"a tensor's name is longer than {_MAX_NAME_CHARS}: {shown(key)}"
                    )
                module, role = _place_of(name, key, config.format)
                if role in ("weight", "bias") and ".base_layer." not in key:
                    is_saved = any(module == one or module.endswith(f".{one}") for one in config.saved)
                    if not is_saved and not (role == "bias" and config.has_biases):
                        raise AdapterUnusable(
                            name, f"{shown(key)} is no tensor of a LoRA, and modules_to_save does not name it"
                        )
                tensor = opened.get_slice(key)
                if tensor.get_dtype() not in _FLOATS:
                    raise AdapterUnusable(
                        name, f"{shown(key)} is {tensor.get_dtype()}, not floating-point numbers"
                    )
                if role in names.setdefault(module, {}):
                    raise AdapterUnusable(name, f"{shown(key)} is there twice")
                names[module][role] = key
                shapes.setdefault(module, {})[role] = tuple(tensor.get_shape())
    except SafetensorError as error:
        raise AdapterUnusable(name, f"{weights.name} is damaged ({first_line(error)})") from error
    return {module: ModuleTensors(names[module], shapes[module]) for module in sorted(names)}


_PEFT_ENDS: tuple[tuple[str, Role], ...] = (
    (".lora_A.weight", "A"),
    (".lora_B.weight", "B"),
    (".lora_B.bias", "B.bias"),
    (".lora_embedding_A", "embedding_A"),
    (".lora_embedding_B", "embedding_B"),
    (".lora_magnitude_vector", "magnitude"),
    (".lora_magnitude_vector.weight", "magnitude"),
    (".base_layer.weight", "weight"),
    (".base_layer.bias", "bias"),
    (".weight", "weight"),
    (".bias", "bias"),
)
_MLX_LM_ENDS: tuple[tuple[str, Role], ...] = ((".lora_a", "A"), (".lora_b", "B"), (".m", "magnitude"))
# For each format: the prefix of a tensor's name, the ends of names with their roles, and the format in words.
_NAMES: Mapping[AdapterFormat, tuple[str, tuple[tuple[str, Role], ...], str]] = {
    "peft": ("base_model.model.", _PEFT_ENDS, "PEFT's format"),
    "mlx-lm": ("", _MLX_LM_ENDS, "mlx-lm's format"),
}


def _place_of(name: str, key: str, format: AdapterFormat) -> tuple[str, Role]:
    """Returns the module's name in the base model and the tensor's role."""
    prefix, ends, words = _NAMES[format]
    for end, role in ends:
        if key.startswith(prefix) and key.endswith(end) and len(key) > len(prefix) + len(end):
            return key[len(prefix) : -len(end)], role
    raise AdapterUnusable(name, f"{shown(key)} is no tensor of a LoRA in {words}")


def allowed_directory(path: str, roots: tuple[Path, ...]) -> Path | None:
    """Returns the real path if it is within one of the directories, links followed. None: it is not."""
    try:
        real = Path(os.path.realpath(path))
        return real if any(real.is_relative_to(os.path.realpath(root)) for root in roots) else None
    except (OSError, ValueError):
        return None
