"""Options of an `LLM`: the fields of the configuration's classes by their names, or by vLLM's."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, TypedDict, get_args, get_origin, get_type_hints

import numpy as np

from rootstock.config import AdapterConfig, Configuration
from rootstock.errors import InvalidOption
from rootstock.fleet_config import REMOTE
from rootstock.option_table import KEYWORDS, OPTIONS, configuration_of, keyword_of
from rootstock.options import SIZES


class Options(TypedDict, total=False):
    """Options of an `LLM`. `rootstock.config` explains each and has the defaults.

    Sizes are bytes, or text such as "4GiB".
    """

    # ModelConfig
    runtime: str
    device: str
    dtype: str
    served_name: str | None
    trust_remote_code: bool
    threads: int | None
    state_dtype: str
    quantize: str
    kv_dtype: str
    cuda_graphs: bool | None
    attention: str
    memory_check: bool
    recheck: bool
    adapters: Mapping[str, str | Path]  # name → directory of a LoRA adapter
    # CacheConfig
    block_size: int
    budget_bytes: int | str | None
    enabled: bool
    eviction: str
    retained_share: float
    pinned_share: float
    # TierConfig
    disk_dir: str | Path | None
    disk_budget_bytes: int | str
    disk_write: str
    host_budget_bytes: int | str
    remote: str | None  # address of a shared Valkey server
    remote_key_file: str | Path | None
    verify_hits: float
    queue_bytes: int | str
    # EngineConfig
    max_batch: int
    chunk_tokens: int
    max_queue: int
    max_session_wait_s: float
    max_held: int
    context_limit: int | None
    seed: int | None
    itl_target_s: float | None
    idle_chunk_tokens: int | None
    draft_tokens: int | None
    answer_memory_bytes: int | str
    memory_limit_bytes: int | str | None
    # vLLM's names of some of them
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str
    kv_cache_memory_bytes: int | str | None
    enable_prefix_caching: bool
    served_model_name: str | None


def configuration(model: str, options: Mapping[str, Any]) -> Configuration:
    """Resolves the options of an `LLM`. Raises InvalidOption, which names an option as the caller did."""
    if not isinstance(model, str):
        raise InvalidOption("model", model, "the path of a directory, or a name on the Hub")
    given: dict[str, Any] = {}
    spelled: dict[str, str] = {}  # field → as the caller wrote it
    for name, value in options.items():
        field = KEYWORDS.get(name)
        if field is None:
            near = difflib.get_close_matches(keyword_of(name.replace("_", "-")), KEYWORDS, n=1)
            shown = "***" if isinstance(value, str) and "@" in value else value  # it may have a password
            raise InvalidOption(name, shown, f"left out: there is no such option{_did_you_mean(near)}")
        if field in given:
            raise InvalidOption(name, value, f"left out where {spelled[field]} is given")
        spelled[field] = name
        value = _of_its_type(name, value)
        if OPTIONS[field].form in (*SIZES, REMOTE) and isinstance(value, str):
            value = OPTIONS[field].form.parse(value, name)
        if field in ("disk_dir", "remote_key_file") and value is not None:
            value = Path(value)
        given[field] = value

    try:
        if "adapters" in given:
            given["adapters"] = tuple(
                AdapterConfig(name, Path(path)) for name, path in given["adapters"].items()
            )
        return configuration_of(model, given)
    except InvalidOption as error:
        field = keyword_of(error.option)
        raise InvalidOption(spelled.get(field, field), error.value, error.allowed) from None


_TYPES = get_type_hints(Options)
_WORDS = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a Path",
    NoneType: "None",
}


def _of_its_type(name: str, value: Any) -> Any:
    """Returns the value of an option, as Python's where it is NumPy's. Raises InvalidOption for a wrong type."""
    if isinstance(value, np.generic):
        value = value.item()
    hint = _TYPES[name]
    if get_origin(hint) is Mapping:
        fits = isinstance(value, Mapping) and all(
            isinstance(key, str) and isinstance(path, str | Path) for key, path in value.items()
        )
        if not fits:
            raise InvalidOption(name, value, "a mapping of names to directories")
        return value
    types = get_args(hint) or (hint,)
    if isinstance(value, bool | int | float):
        fits = type(value) in types or (type(value) is int and float in types)
        fits = fits and math.isfinite(value)
    else:
        fits = isinstance(value, types)
    if not fits:
        raise InvalidOption(name, value, " or ".join(_WORDS[each] for each in types))
    return value


def _did_you_mean(near: list[str]) -> str:
    return f" (did you mean {near[0]}?)" if near else ""
