"""SamplingParams and the options of an LLM refuse wrong values by name, before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from rootstock import SamplingParams
from rootstock.config import CacheConfig, EngineConfig, ModelConfig, ServerConfig, TierConfig
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.errors import InvalidParameter
from rootstock.llm.options import Options, configuration
from rootstock.llm.params import DEFAULT_MAX_TOKENS
from rootstock.option_table import KEYWORDS, OPTIONS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -1),
        ("repetition_penalty", 0),
        ("presence_penalty", math.inf),
        ("presence_penalty", None),
        ("frequency_penalty", True),
        ("frequency_penalty", None),
        ("n", 0),
        ("n", None),
        ("max_tokens", -1),
        ("min_tokens", None),
        ("seed", 2**64),
        ("logprobs", -1),
        ("stop", ["fine", ""]),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("logit_bias", [7]),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: None}),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=name):
        SamplingParams(**{name: value})


def test_contradictions_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(InvalidParameter, match=r"logit_bias\[7\]"):
        SamplingParams(logit_bias={7: 101.0})


def test_none_is_the_models_own_value_and_zero_is_not() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    filled = SamplingParams(max_tokens=3).sampling(defaults)
    assert (filled.temperature, filled.top_p, filled.top_k) == (0.6, 0.9, 20)
    assert (filled.min_p, filled.repetition_penalty) == (0.1, 1.1)
    asked = SamplingParams(temperature=0, top_k=-1, stop="END", stop_token_ids=[3])
    assert (asked.sampling(defaults).temperature, asked.sampling(defaults).top_k) == (0.0, 0)
    stop = asked.stopping()
    assert (stop.stop_strings, stop.stop_tokens, stop.max_tokens) == (("END",), (3,), DEFAULT_MAX_TOKENS)


def test_every_option_of_the_library_has_a_type() -> None:
    hints = get_type_hints(Options)
    assert set(hints) == set(KEYWORDS)
    for keyword, field in KEYWORDS.items():
        assert hints[keyword] == hints[field], keyword


def test_every_field_of_the_configuration_is_an_option() -> None:
    configs = (ModelConfig, CacheConfig, EngineConfig, TierConfig, ServerConfig)
    names = {field.name for config in configs for field in fields(config)}
    of_fleets = {"response_id_prefix", "sealing_key"}
    assert names == {*OPTIONS, *of_fleets, "model", "device_share", "tenant_keys"}


def test_options_become_the_configuration() -> None:
    made = configuration(
        "model",
        {"max_model_len": 512, "budget_bytes": "2GiB", "disk_dir": "below", "dtype": "float32", "seed": 3},
    )
    assert made.engine == EngineConfig(context_limit=512, seed=3)
    assert made.cache.budget_bytes == 2 * 1024**3
    assert made.tier.disk_dir == Path("below")
    assert (made.model.model, made.model.dtype) == ("model", "float32")
