"""`--models`: the models of a server from a YAML file, each with options of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rootstock.cli.config_file import entries_of, read_bounded, scalar_of
from rootstock.config import AdapterConfig, ModelConfig, ServedModelConfig, parse_bytes, parse_seconds
from rootstock.errors import ConfigFileInvalid, InvalidOption

OPTION = "--models"
MAX_FILE_BYTES = 1 << 20
MAX_TEMPLATE_BYTES = 1 << 20
MAX_MODELS = 64
MAX_ALIASES = 64
MAX_ADAPTERS = 256

Change = Callable[[ServedModelConfig, str], ServedModelConfig]


def read_models(path: Path, base: ModelConfig) -> tuple[ServedModelConfig, ...]:
    """Return the models of a file. Options that a model does not name have the values of `base`.

    Raises InvalidOption and ConfigFileInvalid."""
    found: list[ServedModelConfig] = []
    for key, node in entries_of(read_bounded(OPTION, path, MAX_FILE_BYTES), path):
        if len(found) == MAX_MODELS:
            raise ConfigFileInvalid(path, key.start_mark.line + 1, f"more than {MAX_MODELS} models.")
        found.append(_model(path, key, node, base))
    if not found:
        raise ConfigFileInvalid(path, 1, "no model: write 'NAME: {model: DIRECTORY}' for each.")
    names = [one.name for one in found]
    for twice in names:
        if names.count(twice) > 1:
            raise ConfigFileInvalid(path, 1, f"the name {twice!r} is given twice.")
    return tuple(found)


def _model(path: Path, key: Any, node: Any, base: ModelConfig) -> ServedModelConfig:
    line = key.start_mark.line + 1
    if node.id != "mapping" or node.tag != "tag:yaml.org,2002:map":
        raise ConfigFileInvalid(
            path, line, f"{key.value!r} must be a mapping of options, such as 'model: DIR'."
        )
    try:
        made = ServedModelConfig(key.value, replace(base, model="", served_name=key.value, adapters=()))
    except InvalidOption as error:
        raise ConfigFileInvalid(path, line, error.message) from None
    seen: set[str] = set()
    for option, value in node.value:
        at = option.start_mark.line + 1
        name = str(option.value).replace("_", "-")
        if name in seen:
            raise ConfigFileInvalid(path, at, f"{name!r} is set twice.")
        seen.add(name)
        try:
            made = _changed(path, made, name, value)
        except InvalidOption as error:
            raise ConfigFileInvalid(path, at, error.message) from None
    if not made.model.model:
        raise ConfigFileInvalid(
            path, line, f"{key.value!r} has no 'model', which is its directory or Hub name."
        )
    return made


def _changed(path: Path, made: ServedModelConfig, name: str, node: Any) -> ServedModelConfig:
    """Return a model with one more option."""
    if name == "alias":
        items = node.value if node.id == "sequence" else [node]
        if len(items) > MAX_ALIASES:
            raise InvalidOption(name, f"{len(items)} names", f"{MAX_ALIASES} names at most")
        return replace(made, aliases=tuple(scalar_of(path, name, item) for item in items))
    if name == "adapters":
        if node.id != "mapping" or len(node.value) > MAX_ADAPTERS:
            raise InvalidOption(name, node.id, f"a mapping of at most {MAX_ADAPTERS} names to directories")
        adapters = [
            AdapterConfig(str(key.value), Path(scalar_of(path, name, value))) for key, value in node.value
        ]
        return _with(made, {"adapters": tuple(adapters)})
    change = _OPTIONS.get(name)
    if change is None:
        close = get_close_matches(name, _OPTIONS, 1)
        hint = f" Did you mean {close[0]!r}?" if close else f" There are: {', '.join(_OPTIONS)}."
        raise ConfigFileInvalid(path, node.start_mark.line + 1, f"a model has no option {name!r}.{hint}")
    return change(made, scalar_of(path, name, node))


def _of_model(field: str) -> Change:
    return lambda made, text: _with(made, {field: text})


def _switch_of_model(field: str) -> Change:
    return lambda made, text: _with(made, {field: _is_on(field, text)})


def _with(made: ServedModelConfig, values: dict[str, Any]) -> ServedModelConfig:
    return replace(made, model=replace(made.model, **values))


def _is_on(option: str, text: str) -> bool:
    if text.lower() not in ("true", "false", "on", "off", "yes", "no"):
        raise InvalidOption(option.replace("_", "-"), text, "true or false")
    return text.lower() in ("true", "on", "yes")


def _whole(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise InvalidOption(option, text, "a whole number")
    return int(text)


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidOption("kv-share", text, "a number such as 2") from None


def _context_limit(text: str) -> int:
    limit = _whole("context-limit", text)
    if limit < 2:
        raise InvalidOption("context-limit", limit, "at least 2")
    return limit


def _template(text: str) -> str:
    return read_bounded("chat-template", Path(text), MAX_TEMPLATE_BYTES)


_OPTIONS: dict[str, Change] = {
    "model": _of_model("model"),
    "runtime": _of_model("runtime"),
    "device": _of_model("device"),
    "dtype": _of_model("dtype"),
    "quantize": _of_model("quantize"),
    "kv-dtype": _of_model("kv_dtype"),
    "state-dtype": _of_model("state_dtype"),
    "attention": _of_model("attention"),
    "cuda-graphs": _switch_of_model("cuda_graphs"),
    "trust-remote-code": _switch_of_model("trust_remote_code"),
    "memory-check": _switch_of_model("memory_check"),
    "chat-template": lambda made, text: replace(made, chat_template=_template(text)),
    "context-limit": lambda made, text: replace(made, context_limit=_context_limit(text)),
    "tool-parser": lambda made, text: replace(made, tool_parser=text),
    "media": lambda made, text: replace(made, media=text),
    "kv-budget": lambda made, text: replace(made, kv_budget_bytes=parse_bytes(text, "kv-budget")),
    "kv-share": lambda made, text: replace(made, kv_share=_share(text)),
    "load": lambda made, text: replace(made, load=text),
    "idle-unload": lambda made, text: replace(made, idle_unload_s=parse_seconds(text, "idle-unload")),
    "pin": lambda made, text: replace(made, pin=_is_on("pin", text)),
}
