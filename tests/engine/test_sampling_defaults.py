"""Default sampling parameters from a model's generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.errors import ModelFileInvalid


def test_a_models_sampling_defaults_are_read_from_its_directory(tmp_path: Path) -> None:
    assert SamplingDefaults.of_model("m", tmp_path) == SamplingDefaults()
    config = {"temperature": 0.6, "top_k": 20.0, "eos_token_id": 1, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert SamplingDefaults.of_model("m", tmp_path) == SamplingDefaults(temperature=0.6, top_k=20)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON at line 1, column 2"),
        ("[]", "holds a list"),
        ('{"temperature": "hot"}', "temperature is 'hot', but must be a number, 0 or more"),
        ('{"temperature": NaN}', "temperature is 'nan'"),
        ('{"top_p": 7}', "top_p is '7', but must be a number from 0 to 1"),
        ('{"top_k": 1.5}', "top_k is '1.5', but must be an integer"),
        ('{"top_k": -5}', "top_k is '-5'"),
        ('{"min_p": true}', "min_p is 'True'"),
        ('{"repetition_penalty": 0}', "repetition_penalty is '0', but must be a number above 0"),
        (f'{{"top_k": 1{"0" * 400}}}', "top_k is '1000"),
    ],
)
def test_sampling_defaults_that_a_request_could_not_have_stop_the_start(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelFileInvalid) as refused:
        SamplingDefaults.of_model("m", tmp_path)
    assert said in refused.value.message
