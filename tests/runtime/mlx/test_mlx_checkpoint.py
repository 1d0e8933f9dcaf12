"""Configurations of checkpoints: refused before a weight is read, with the field and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_checkpoints import KINDS, mlx_config
from rootstock.errors import ModelError, ModelFileInvalid, ModelUnsupported
from rootstock.runtime.mlx.checkpoint import read_checkpoint


def write(directory: Path, kind: str = "llama", **fields: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(mlx_config(kind) | fields))
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_known_architectures(tmp_path: Path, kind: str) -> None:
    assert read_checkpoint("m", write(tmp_path, kind)).architecture == kind


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("mistral", "llama"), ("kimi_k2", "deepseek_v3"), ("falcon_mamba", "mamba")],
)
def test_names_that_mlx_lm_maps_to_another(tmp_path: Path, model_type: str, architecture: str) -> None:
    write(tmp_path, architecture, model_type=model_type)
    assert read_checkpoint("m", tmp_path).architecture == architecture


@pytest.mark.parametrize("model_type", ["bert", "cache", "base", "__init__"])
def test_an_architecture_that_mlx_lm_does_not_have(tmp_path: Path, model_type: str) -> None:
    with pytest.raises(ModelUnsupported, match=f"mlx-lm [0-9.]+ has no model of type '{model_type}'"):
        read_checkpoint("m", write(tmp_path, model_type=model_type))


@pytest.mark.parametrize("model_type", [None, 5, [], {}, "", "../llama", "llama.Model", "a" * 101, "llama\n"])
def test_a_model_type_that_is_no_name(tmp_path: Path, model_type: object) -> None:
    with pytest.raises(ModelFileInvalid, match=r"model_type is .*, but must be the name of an architecture"):
        read_checkpoint("m", write(tmp_path, model_type=model_type))


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelUnsupported, match=r"'evil.py' as its code .* runs no code of a checkpoint"):
        read_checkpoint("m", write(tmp_path, model_file="evil.py"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architectures": [["a"]]}, "architectures is .*, but must be a list of names"),
        ({"architectures": 5}, "architectures is 5, but must be a list of names"),
        ({"hidden_size": None}, "mlx-lm cannot build it: unsupported operand"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but must be from 0 to 10,000"),
        ({"layer_types": ["full_attention"] * 10_001}, "'layer_types' has 10,001 entries, at most 10,000"),
        ({"hybrid_override_pattern": "M" * 10_001}, "'hybrid_override_pattern' has 10,001 entries"),
        ({"text_config": {"block_types": ["a"] * 10_001}}, "'block_types' has 10,001 entries"),
        ({f"f{number}": 0 for number in range(10_001)}, "fields, at most 10,000 are allowed"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings is 'many', but must be a number"),
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5, but must be a number"),
    ],
)
def test_values_of_a_configuration(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read_checkpoint("m", write(tmp_path, **fields))


@pytest.mark.parametrize("heads", [0, -1, "four", 10**30])
def test_dimensions_that_make_no_model_are_an_error_of_the_file(tmp_path: Path, heads: object) -> None:
    with pytest.raises(ModelError):
        read_checkpoint("m", write(tmp_path, num_attention_heads=heads, head_dim=None))


# ---- quantization


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        (4, "quantization is 4, but must be an object"),
        ({}, "bits of quantization is None, but must be 1 or 2 or 3"),
        ({"bits": 4}, "group_size of quantization is None, but must be 32 or 64 or 128"),
        ({"bits": 7, "group_size": 64}, "bits of quantization is 7, but must be"),
        ({"bits": True, "group_size": 64}, "bits of quantization is True, but must be"),
        ({"bits": 4, "group_size": 1 << 40}, "group_size of quantization is 1099511627776, but must be"),
        ({"bits": 4, "group_size": 0}, "group_size of quantization is 0, but must be"),
        (
            {"bits": 4, "group_size": 64, "mode": "q4_k"},
            "mode of quantization is 'q4_k', but must be one of affine",
        ),
        ({"bits": 4, "group_size": 64, "mode": []}, r"mode of quantization is \[\], but must be one of"),
        ({"bits": 8, "group_size": 32, "mode": "mxfp4"}, "bits of quantization is 8, but must be 4"),
        (
            {"bits": 4, "group_size": 64, "model.layers.0": {"bits": 9}},
            "bits of quantization of 'model.layers.0' is 9, but must be",
        ),
    ],
)
def test_a_quantization_that_mlx_does_not_have(tmp_path: Path, quantization: Any, said: str) -> None:
    with pytest.raises(ModelFileInvalid, match=said):
        read_checkpoint("m", write(tmp_path, quantization=quantization))


@pytest.mark.parametrize("where", ["root", "text"])
def test_a_quantization_of_another_library_that_mlx_lm_does_not_read(tmp_path: Path, where: str) -> None:
    found = {"quantization_config": {"quant_method": "bitsandbytes"}}
    write(tmp_path, **(found if where == "root" else {"text_config": mlx_config("llama") | found}))
    with pytest.raises(ModelUnsupported, match=r"quantized by bitsandbytes, .* serve the unquantized model"):
        read_checkpoint("m", tmp_path)


@pytest.mark.parametrize("found", ["awq", [], {}, {"quant_method": 5}])
def test_a_quantization_without_a_method(tmp_path: Path, found: object) -> None:
    with pytest.raises(ModelFileInvalid, match="quantization_config names no quant_method"):
        read_checkpoint("m", write(tmp_path, quantization_config=found))


def test_a_description_of_the_quantization_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    config = read_checkpoint("m", write(tmp_path)).config
    assert config["quantization_config"] == {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "NVFP4"},
    }
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(ModelFileInvalid, match=r"hf_quant_config.json .* is not JSON"):
        read_checkpoint("m", tmp_path)


def test_null_is_no_quantization(tmp_path: Path) -> None:
    config = read_checkpoint("m", write(tmp_path, quantization=None, quantization_config=None)).config
    assert not {"quantization", "quantization_config"} & config.keys()


# ---- limits and tokens


@pytest.mark.parametrize(
    ("kind", "fields", "limit"),
    [
        ("llama", {}, 16_384),
        ("llama", {"max_position_embeddings": None}, 1 << 20),
        ("qwen3_moe", {"max_position_embeddings": None, "max_seq_len": 99}, 99),
        ("mamba2", {"max_position_embeddings": None}, 1 << 20),
        ("llama4", {"max_position_embeddings": 77}, 16_384),  # that of the text model counts
    ],
)
def test_the_context_limit(tmp_path: Path, kind: str, fields: dict[str, Any], limit: int) -> None:
    assert read_checkpoint("m", write(tmp_path, kind, **fields)).context_limit == limit


def test_mlx_lms_default_is_the_limit_of_a_configuration_without_one(tmp_path: Path) -> None:
    config = mlx_config("gemma3_text")
    del config["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_checkpoint("m", tmp_path).context_limit == 32_768


@pytest.mark.parametrize(("kind", "regime"), [("dynamic", "dynamic<=16384"), ("linear", ""), ("yarn", "")])
def test_the_regime_of_rope(tmp_path: Path, kind: str, regime: str) -> None:
    scaling = {"rope_type": kind, "type": kind, "factor": 2.0}
    assert read_checkpoint("m", write(tmp_path, rope_scaling=scaling)).rope_regime == regime


def test_longrope_has_fixed_frequencies_in_mlx_lm(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    found = read_checkpoint("m", write(tmp_path, rope_scaling=scaling))
    assert (found.context_limit, found.rope_regime) == (16_384, "")


def test_end_of_sequence_tokens(tmp_path: Path) -> None:
    assert read_checkpoint("m", write(tmp_path)).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert read_checkpoint("m", tmp_path).eos_token_ids == (2, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ModelFileInvalid, match="eos_token_id is '</s>'"):
        read_checkpoint("m", tmp_path)
