"""The table of all options, from the declarations in `rootstock.config`: by field, by name and by keyword."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, get_origin

from rootstock.config import (
    CacheConfig,
    Configuration,
    EngineConfig,
    ModelConfig,
    ServedModelConfig,
    ServerConfig,
    TierConfig,
)
from rootstock.errors import InvalidOption, RootstockError
from rootstock.options import PANELS, declared_options

E = TypeVar("E", bound=RootstockError)

_LIBRARY = (ModelConfig, CacheConfig, TierConfig, EngineConfig)

# Field → option, of the configuration of a server. No two classes have a field of the same name.
OPTIONS = {
    field: option
    for config in (*_LIBRARY, ServerConfig)
    for field, option in declared_options(config).items()
}
# The options of the command line, in the order of its panels: parameter → field.
FIELDS = {
    option.name.replace("-", "_"): field
    for panel in PANELS
    for field, option in OPTIONS.items()
    if option.panel == panel
}
# Keyword of `LLM` → field: our names, and vLLM's of options with one value.
KEYWORDS = {
    keyword: field
    for config in _LIBRARY
    for field, option in declared_options(config).items()
    for keyword in (field, option.vllm.replace("-", "_"))
    if keyword and option.library and (keyword == field or get_origin(option.form.type) is not list)
}
# Key of a model in the file of --models → option and the field that it sets.
MODEL_KEYS = {
    option.name: (field, option)
    for field, option in (*OPTIONS.items(), *declared_options(ServedModelConfig).items())
    if option.per_model
}
# A name that the command line and files accept, too → ours.
VLLM_NAMES = {
    theirs: ours
    for option in OPTIONS.values()
    for theirs, ours in ((option.vllm, option.name), (option.vllm_off, option.negative))
    if theirs and theirs != ours
}
EARLIER_NAMES = {earlier: option.name for option in OPTIONS.values() for earlier in option.earlier}
_BY_NAME = {option.name: (field, option) for field, option in OPTIONS.items()}
_MENTIONED = re.compile(r"(?<![\w-])--(no-)?([a-z][a-z-]*[a-z])( FILE)?(?![\w-])")


def our_name(name: str) -> str:
    """Maps a current, old or vLLM name of an option to ours. All names are without leading dashes."""
    return VLLM_NAMES.get(name) or EARLIER_NAMES.get(name, name)


def configuration_of(model: str, values: Mapping[str, Any]) -> Configuration:
    """Makes the configuration from values by field. Raises InvalidOption."""

    def of(config: type) -> dict[str, Any]:
        return {field: values[field] for field in declared_options(config) if field in values}

    return Configuration(
        ModelConfig(model, **of(ModelConfig)),
        CacheConfig(**of(CacheConfig)),
        EngineConfig(**of(EngineConfig)),
        TierConfig(**of(TierConfig)),
        ServerConfig(**of(ServerConfig)),
    )


def values_of(texts: Mapping[str, str]) -> dict[str, Any]:
    """Returns values by field, from the texts of options by name, as `configuration_of` takes them.

    Raises InvalidOption."""
    values = dict[str, Any]()
    for name, text in texts.items():
        ours = our_name(name)
        if ours not in _BY_NAME:
            close = get_close_matches(ours, _BY_NAME, 1)
            raise InvalidOption(name, text, f"the option {close[0]!r}" if close else "an option of `serve`")
        field, option = _BY_NAME[ours]
        values[field] = option.form.parse(option.form.of_text(text, ours), option.flag)
    return values


def keyword_of(option: str) -> str:
    """Returns the library's name of an option of the command line."""
    name = option.removeprefix("--")
    field, _ = _BY_NAME.get(name, ("", None))
    return field if KEYWORDS.get(field) == field else name.replace("-", "_")


def in_library_words(error: E) -> E:
    """Makes the message of an error name the library's parameters. Returns the error itself."""

    def keyword(found: re.Match[str]) -> str:
        return keyword_of(found[2]) + ("=False" if found[1] else "")

    error.message = _MENTIONED.sub(keyword, error.message)
    error.args = (error.message,)
    if isinstance(error, InvalidOption):
        error.option = keyword_of(error.option) if error.option.startswith("--") else error.option
        error.allowed = _MENTIONED.sub(keyword, error.allowed)
    return error
