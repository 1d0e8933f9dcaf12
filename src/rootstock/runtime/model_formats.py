"""Formats of models that Rootstock does not read, recognised by the names of files and by config.json.

A recognised format is refused before anything is loaded, by its name and with a remedy. Only names and
configurations are read, and at most a bounded number of them.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rootstock.errors import shown

_MOST_NAMES = 20_000  # that are read of a directory; with thousands of shards there are some thousands
_MOST_FOLDERS = 100
_MOST_LISTED = 3
OPENVINO_GRAPH, OPENVINO_WEIGHTS = "openvino_model.xml", "openvino_model.bin"

_SMALL = "in safetensors; with --quantize int8 or int4 it is small as well (on CPUs and Macs)"
_ORIGINAL = f"serve the model from which it was made, {_SMALL}"
_CONVERT = (
    "convert it: AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(OTHER) of transformers writes "
    "safetensors. Then copy the tokenizer's files"
)
_ADAPTER = "serve its base model{base}, with --adapter NAME=DIRECTORY"


@dataclass(frozen=True, slots=True)
class _Format:
    """A format, the names of its files, and the remedy for a model in it."""

    patterns: tuple[str, ...]
    name: str
    remedy: str
    has_config: bool = True  # False: it is this format only where there is no config.json


# The first match counts: formats that can be converted come first, then the ones that describe the model best.
_FORMATS = (
    _Format(("model_index.json",), "a diffusers pipeline, which makes no text", "serve a language model"),
    _Format(("adapter_config.json",), "a LoRA adapter", _ADAPTER),
    _Format(("pytorch_model*.bin",), "a PyTorch checkpoint (.bin)", _CONVERT),
    _Format(("*.gguf",), "a projector of images in GGUF", "put the model's own GGUF file beside it"),
    _Format(("*.ggml", "*.llamafile"), "in a format of llama.cpp before GGUF, or around it", _ORIGINAL),
    _Format(("modules.json",), "a sentence-transformers model without a config.json beside modules.json",
            "save it again with sentence-transformers, which puts the transformer's files there", False),
    _Format(("consolidated*.safetensors",), "in Mistral's own format", _ORIGINAL),
    _Format(("gptq_model*.safetensors",), "quantized by GPTQ, in AutoGPTQ's files", _ORIGINAL),
    _Format(("weights*.npz", "weights.[0-9]*.safetensors"), "in a format of MLX before mlx-lm's", _ORIGINAL),
    _Format(("mlc-chat-config.json", "params_shard_*.bin"), "compiled by MLC", _ORIGINAL),
    _Format((OPENVINO_GRAPH,), "a graph of OpenVINO without its model's config.json",
            "put that and the tokenizer's files beside it, as optimum-cli export openvino does", False),
    _Format((OPENVINO_GRAPH,), "in OpenVINO's format",
            "serve it with --runtime openvino (pip install 'rootstock[openvino]')"),
    _Format(("openvino_*.xml",), "in OpenVINO's format, in several graphs", _ORIGINAL),
    _Format(("*.onnx", "onnx/"), "in ONNX", _ORIGINAL),
    _Format(("*.mlpackage", "*.mlmodelc", "*.mlmodel", "*.mlpackage/", "*.mlmodelc/"), "in Core ML's format",
            _ORIGINAL),
    _Format(("*.tflite", "*.task", "*.litertlm"), "in LiteRT's format", _ORIGINAL),
    _Format(("*.engine", "rank*.safetensors"), "compiled by TensorRT-LLM", _ORIGINAL),
    _Format(("*.nemo",), "in NeMo's format", _ORIGINAL),
    _Format(("tf_model*.h5", "*.keras", "saved_model.pb"), "in TensorFlow's format", _ORIGINAL),
    _Format(("flax_model*.msgpack", "*.orbax*"), "in Flax's format", _ORIGINAL),
    _Format(("model.bin",), "in CTranslate2's format, or one of PyTorch's", _ORIGINAL),
    _Format(("*.pth", "*.pt", "*.ckpt", "*.bin"), "a PyTorch checkpoint", _ORIGINAL),
)  # fmt: skip

# Files that training leaves beside a model in any format.
_OF_TRAINING = ("optimizer.*", "rng_state*", "scaler.pt", "scheduler.pt", "training_args.bin")


def names_in(directory: Path) -> list[str]:
    """Returns the names in a directory; names of folders end with a slash. A folder that cannot be read has none."""
    try:
        with os.scandir(directory) as entries:
            return sorted(
                f"{entry.name}/" if entry.is_dir() else entry.name
                for entry in itertools.islice(entries, _MOST_NAMES)
            )
    except OSError:
        return []


def names_below(directory: Path, names: Iterable[str]) -> list[str]:
    """Returns the names in a directory's folders: some repositories have a folder for each size."""
    folders = itertools.islice((name for name in names if name.endswith("/")), _MOST_FOLDERS)
    return [f"{folder}{name}" for folder in folders for name in names_in(directory / folder)]


def foreign_format(names: Iterable[str], base_model: object = None) -> str | None:
    """Returns the format of a model's files in words, with the remedy. None: none that is known.

    `base_model` is the name that an adapter's configuration gives.
    """
    lowered = [name.lower() for name in names]
    lowered = [name for name in lowered if not any(fnmatchcase(name, one) for one in _OF_TRAINING)]
    for known in _FORMATS:
        if "config.json" in lowered and not known.has_config:
            continue
        if any(fnmatchcase(name, pattern) for pattern in known.patterns for name in lowered):
            base = f" {shown(base_model)}" if isinstance(base_model, str) and base_model else ""
            return f"it is {known.name}: {known.remedy.format(base=base)}"
    return None


def has_graph(names: Collection[str]) -> bool:
    """Returns whether files of these names are a graph of OpenVINO that makes text.

    A graph without its weights does not count beside safetensors, which are complete without it.
    """
    has_others = any(name.endswith(".safetensors") for name in names)
    return (
        OPENVINO_GRAPH in names
        and "modules.json" not in names
        and (OPENVINO_WEIGHTS in names or not has_others)
    )


def remedy_without_config(directory: Path, names: Sequence[str]) -> str:
    """Returns the remedy for a directory without config.json and without files of a known format."""
    if not names:
        return "the directory is empty. 'hf download' fetches a model of the Hub"
    cached = re.fullmatch(r"models--([\w.-]+?)--([\w.-]+)", directory.name)
    if cached and "snapshots/" in names:
        return f"it is a folder of the local Hub cache: serve {cached[1]}/{cached[2]!s} by that name"
    inner = [name for name in names if name.endswith("/") and (directory / name / "config.json").is_file()]
    if inner:
        more = " and others" if len(inner) > _MOST_LISTED else ""
        return f"the directory has no config.json, but its folders {', '.join(inner[:_MOST_LISTED])}{more} have one"
    return "the directory has no config.json"


# ---- quantization


# Maps the name of each method in config.json to its usual spelling.
_METHODS = {
    "aqlm": "AQLM", "auto-round": "AutoRound", "awq": "AWQ", "bitnet": "BitNet", "bitsandbytes": "bitsandbytes",
    "bitsandbytes_4bit": "bitsandbytes", "bitsandbytes_8bit": "bitsandbytes",
    "compressed-tensors": "compressed-tensors", "eetq": "EETQ", "exl2": "ExLlamaV2 (EXL2)",
    "exl3": "ExLlamaV3 (EXL3)", "fbgemm_fp8": "FBGEMM (FP8)", "fp8": "FP8", "fp_quant": "FP-Quant",
    "gguf": "GGUF", "gptq": "GPTQ", "higgs": "HIGGS", "hqq": "HQQ", "intel/auto-round": "AutoRound",
    "marlin": "GPTQ (Marlin)", "modelopt": "ModelOpt", "mxfp4": "MXFP4", "mxfp8": "MXFP8", "nvfp4": "NVFP4",
    "quanto": "Quanto", "quark": "Quark", "quip": "QuIP#", "sinq": "SINQ", "spqr": "SpQR", "torchao": "torchao",
    "vptq": "VPTQ",
}  # fmt: skip
MLX = "mlx"
_OF_MLX = "quantization"  # the key of its settings
# Methods whose checkpoints mlx-lm reads with any other settings of their configuration.
_READ_BY_MLX = ("awq", "bitnet", "mxfp4", "mxfp8")
# Files with which older exports describe a quantization beside a config.json that does not.
_DESCRIPTIONS = {
    "hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq",
    "quant_strategy.json": "exl2", "qmodel.pt": "hqq",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization of a checkpoint's weights, as its files declare it."""

    method: str  # in lower case; "" if the description names none
    variant: str = ""  # of a method that has several: its format, its bits

    @property
    def name(self) -> str:
        """Name of the method for people, with its variant."""
        name = "MLX" if self.method == MLX else _METHODS.get(self.method, shown(self.method))
        name = name if self.method else "a method that its files do not name"
        return f"{name} ({self.variant})" if self.variant else name

    def refusal(self, reason: str = "", *, by_mlx: bool = False) -> str:
        """Returns the reason for a refusal, and the remedy. `by_mlx`: the MLX runtime is the one that refuses."""
        because = f" ({reason})" if reason else ""
        other = ""
        if not by_mlx and (self.method == MLX or self.method in _READ_BY_MLX):
            other = "serve it with --runtime mlx (pip install 'rootstock[mlx]'), or "
        return (
            f"its weights are quantized by {self.name}, which the {'MLX' if by_mlx else 'torch'} runtime does not "
            f"read{because}: {other}serve the unquantized model, which --quantize int8 or int4 makes as small (on "
            "CPUs and Macs)"
        )


def quantization_of(config: Mapping[str, Any], names: Iterable[str] = ()) -> Quantization | None:
    """Returns the quantization that a configuration, or a separate file among `names`, declares. None: no
    quantization."""
    key, found = _declaration(config)
    if key:
        return Quantization(MLX, _variant(found)) if key == _OF_MLX else _described(found)
    given = set(names)
    return next((Quantization(method) for name, method in _DESCRIPTIONS.items() if name in given), None)


def quantization_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of the quantization that a configuration declares; empty if it declares none."""
    return _declaration(config)[1]


def _declaration(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns the key under which a configuration declares a quantization, and its settings; "" and none if it does
    not."""
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, dict) else {}):
        for key in (_OF_MLX, "quantization_config", "compression_config"):
            found = fields.get(key)
            if isinstance(found, dict) and (found or key == _OF_MLX):
                return key, found
    return "", {}


def _described(found: Mapping[str, Any]) -> Quantization:
    method = found.get("quant_method")
    if isinstance(method, str) and method:
        return Quantization(method.lower(), _variant(found))
    for field, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if found.get(field) is True:
            return Quantization("bitsandbytes", f"{bits} bits")
    if "group_size" in found and "bits" in found:  # mlx-lm repeats its own under this name
        return Quantization(MLX, _variant(found))
    return Quantization("", _variant(found))


def _variant(found: Mapping[str, Any]) -> str:
    """Returns the name of the variant of a method, if it is short and plain."""
    of_modelopt = found.get("quantization")
    algorithm = of_modelopt.get("quant_algo") if isinstance(of_modelopt, dict) else None
    for value in (algorithm, found.get("quant_algo"), found.get("format"), found.get("mode")):
        if isinstance(value, str) and re.fullmatch(r"[\w.-]{1,40}", value) and value != "affine":
            return value
    if found.get("load_in_4bit") is True or found.get("load_in_8bit") is True:
        return "4 bits" if found.get("load_in_4bit") is True else "8 bits"
    bits = found.get("bits", found.get("w_bit"))
    return f"{bits} bits" if type(bits) is int and 0 < bits < 33 else ""


# Ends of tensors' names that only quantized weights have, and the method that they tell.
_TENSORS = (
    (re.compile(r"\.(qweight|qzeros|g_idx)$"), "gptq"),
    (re.compile(r"\.weight\.(absmax|quant_map|nested_absmax|quant_state\..+)$|\.SCB$"), "bitsandbytes"),
    (re.compile(r"\.weight_(packed|shape|zero_point)$"), "compressed-tensors"),
    (re.compile(r"\.weight_scale(_inv)?$"), "fp8"),
    (re.compile(r"\.q_weight$"), "exl2"),
    (re.compile(r"_blocks$"), "mxfp4"),
)
_FLOATS = {"F64", "F32", "F16", "BF16"}


def quantization_of_tensors(stored: Iterable[tuple[str, str]]) -> Quantization | None:
    """Returns the quantization that tensors' names and dtypes show, where the configuration does not say it.

    A weight of integers, or of 8-bit floats, would be read as it is, without its scales.
    """
    for name, dtype in stored:
        for pattern, method in _TENSORS:
            if pattern.search(name):
                return Quantization(method)
        if name.endswith(".weight") and dtype not in _FLOATS:
            return Quantization("fp8" if dtype.startswith("F8") else "", dtype)
    return None
