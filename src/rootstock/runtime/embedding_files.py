"""Files with which a model declares embeddings: sentence-transformers' `modules.json` and the files that it names.

Imports no torch, so that a file that cannot be used is reported at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rootstock.errors import ModelFileInvalid, ModelUnsupported, shown
from rootstock.runtime.model_files import CONFIG, read_json, read_json_list

MODULES = "modules.json"
_TRANSFORMER = "sentence_bert_config.json"
_PROMPTS = "config_sentence_transformers.json"
_MAX_MODULES = 16
_MAX_TOKENS = 1 << 24
_MAX_PROMPT_CHARS = 16_384

Pooling = Literal["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"]
# Older files have a switch for each way.
_SWITCHES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class EmbeddingFiles:
    """The way from a model's hidden states to an embedding."""

    pooling: tuple[Pooling, ...]  # their results are concatenated
    normalizes: bool  # to length 1
    most_tokens: int | None  # of an input; None: as many as the model has positions
    lowercase: bool
    prompt: str  # that precedes each text


def is_embedding_model(directory: Path) -> bool:
    return (directory / MODULES).is_file()


def read_embedding_files(model: str, directory: Path) -> EmbeddingFiles:
    """Reads and checks the files. Raises ModelFileInvalid or ModelUnsupported."""
    modules = read_json_list(model, directory, MODULES)
    if not 1 <= len(modules) <= _MAX_MODULES or not all(isinstance(each, dict) for each in modules):
        raise ModelFileInvalid(model, MODULES, f"it is no list of 1 to {_MAX_MODULES} modules")
    pooling: tuple[Pooling, ...] = ()
    normalizes = False
    for number, module in enumerate(modules):
        kind, path = str(module.get("type", "")).rpartition(".")[2], module.get("path", "")
        if kind == "Transformer" and number == 0 and path == "":
            continue
        if kind == "Pooling" and number == 1:
            pooling = _pooling(model, directory, path)
        elif kind == "Normalize" and pooling:
            normalizes = True
        else:
            raise ModelUnsupported(
                model, f"module {number} of {MODULES} is {shown(module.get('type'))}, which is not known"
            )
    if not pooling:
        raise ModelUnsupported(model, f"{MODULES} names no pooling after its transformer")
    fields = _optional(model, directory, _TRANSFORMER)
    most = fields.get("max_seq_length")
    if most is not None and not (type(most) is int and 1 <= most <= _MAX_TOKENS):
        raise ModelFileInvalid(
            model, _TRANSFORMER, f"max_seq_length is {shown(most)}, but must be a number of tokens"
        )
    return EmbeddingFiles(
        pooling, normalizes, most, bool(fields.get("do_lower_case")), _prompt(model, directory)
    )


def _pooling(model: str, directory: Path, path: Any) -> tuple[Pooling, ...]:
    if not isinstance(path, str) or not path or len(Path(path).parts) != 1 or path in (".", ".."):
        raise ModelFileInvalid(model, MODULES, f"{shown(path)} does not name a directory of the model")
    name = f"{path}/{CONFIG}"
    fields = read_json(model, directory, name)
    given = fields.get("pooling_mode")
    if given is None:
        given = [mode for switch, mode in _SWITCHES.items() if fields.get(switch) is True]
    modes = tuple(given) if isinstance(given, list) else (given,)
    if not modes or not all(mode in get_args(Pooling) for mode in modes):
        raise ModelUnsupported(
            model, f"{name} has the pooling {shown(given)}. Known are {', '.join(get_args(Pooling))}"
        )
    if fields.get("include_prompt", True) is not True:
        raise ModelUnsupported(model, f"{name} leaves a prompt out of the pooling (include_prompt)")
    return modes


def _prompt(model: str, directory: Path) -> str:
    fields = _optional(model, directory, _PROMPTS)
    name, prompts = fields.get("default_prompt_name"), fields.get("prompts")
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(prompt, str) or len(prompt) > _MAX_PROMPT_CHARS:
        raise ModelFileInvalid(model, _PROMPTS, f"its prompts have no text {shown(name)}")
    return prompt


def _optional(model: str, directory: Path, name: str) -> dict[str, Any]:
    return read_json(model, directory, name) if (directory / name).exists() else {}
