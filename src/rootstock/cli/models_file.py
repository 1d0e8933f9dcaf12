"""`--models`: the models of a server from a YAML file, each with options of its own."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rootstock.cli.config_file import entries_of, scalar_of
from rootstock.config import AdapterConfig, ModelConfig, ServedModelConfig
from rootstock.errors import ConfigFileInvalid, InvalidOption
from rootstock.option_table import MODEL_KEYS, our_name
from rootstock.options import declared_options, read_bounded

OPTION = "--models"
MAX_FILE_BYTES = 1 << 20
MAX_MODELS = 64
MAX_ALIASES = 64
MAX_ADAPTERS = 256

_KEYS = ("model", "adapters", *MODEL_KEYS)


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
        name = our_name(str(option.value).replace("_", "-"))
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
    if name == "model":
        return _with(made, {"model": scalar_of(path, name, node)})
    if name not in MODEL_KEYS:
        close = get_close_matches(name, _KEYS, 1)
        hint = f" Did you mean {close[0]!r}?" if close else f" There are: {', '.join(_KEYS)}."
        raise ConfigFileInvalid(path, node.start_mark.line + 1, f"a model has no option {name!r}.{hint}")
    field, option = MODEL_KEYS[name]
    value = option.form.parse(option.form.of_text(scalar_of(path, name, node), name), name)
    option.check(value, name)
    if field in declared_options(ModelConfig):
        return _with(made, {field: value})
    return replace(made, **{field: value})


def _with(made: ServedModelConfig, values: dict[str, Any]) -> ServedModelConfig:
    return replace(made, model=replace(made.model, **values))
