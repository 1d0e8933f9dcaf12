"""Files of LoRA adapters: what is read of them, and hostile or unsupported ones, which are refused by name."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import tiny_model
from lora import PREFIX, linears_of, save_adapter
from rootstock.errors import AdapterUnusable
from rootstock.runtime.adapter_files import (
    AdapterSource,
    allowed_directory,
    count_weights,
    read_adapter,
    stored_bytes,
)

MODEL = tiny_model("llama")
QUERIES = linears_of(MODEL, "q_proj")


def made(directory: Path, **fields: Any) -> Path:
    return save_adapter(directory, MODEL, QUERIES, **fields)


def edit_config(directory: Path, **fields: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(directory: Path, **tensors: torch.Tensor) -> None:
    path = directory / "adapter_model.safetensors"
    save_file(load_file(path) | tensors, path)


def refusal(directory: Path) -> str:
    with pytest.raises(AdapterUnusable) as caught:
        read_adapter("mine", directory)
    assert "'mine'" in caught.value.message
    return caught.value.message


def source_of(directory: Path) -> AdapterSource:
    return read_adapter("mine", directory)


def test_modules_and_their_tensors(tmp_path: Path) -> None:
    source = source_of(made(tmp_path))
    assert list(source.tensors) == QUERIES
    assert source.tensors[QUERIES[0]].shapes == {"A": (4, 64), "B": (64, 4)}
    assert source.nbytes == (tmp_path / "adapter_model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({}, 8 / 4),
        ({"use_rslora": True}, 8 / 2),
        ({"alpha_pattern": {"q_proj": 2}}, 2 / 4),
        ({"alpha_pattern": {"k_proj": 2}}, 8 / 4),
        ({"alpha_pattern": {r"layers\.[01]\.self_attn\.q_proj": 2}}, 2 / 4),
        ({"alpha_pattern": {"_proj": 2}}, 8 / 4),  # no whole part of the name
        ({"rank_pattern": {"q_proj": 16}}, 8 / 16),
        ({"rank_pattern": {"q_proj": 16}, "use_rslora": True}, 8 / 4),
    ],
)
def test_the_scaling_of_a_module(tmp_path: Path, fields: dict[str, Any], scaling: float) -> None:
    assert source_of(made(tmp_path, **fields)).scalings.scaling_of(QUERIES[0]) == scaling


def test_the_fingerprint_covers_weights_and_configuration(tmp_path: Path) -> None:
    first, same, other = (made(tmp_path / str(n), seed=n // 2) for n in (0, 1, 2))
    assert source_of(first).fingerprint == source_of(same).fingerprint
    assert source_of(first).fingerprint != source_of(other).fingerprint
    before = source_of(first).fingerprint
    edit_config(first, lora_alpha=9)
    assert source_of(first).fingerprint != before


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"peft_type": "IA3"}, "only LORA"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "experts"),
        ({"alora_invocation_tokens": [1, 2]}, "invocation"),
        ({"layer_replication": [[0, 4]]}, "repeats layers"),
        ({"trainable_token_indices": [1]}, "embedding"),
        ({"use_qalora": True}, "QALoRA"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow"),
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"r": 0}, "r has 0"),
        ({"r": 2.5}, "whole number"),
        ({"r": True}, "whole number"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"rank_pattern": {"(a+)+$": 4}}, "repeat"),
        ({"alpha_pattern": {"a*b*c*": 4}}, "repeat"),
        ({"alpha_pattern": {"(": 4}}, "regular expression"),
        ({"bias": "some"}, "bias"),
        ({"use_dora": "yes"}, "use_dora"),
        ({"modules_to_save": "lm_head"}, "modules_to_save"),
    ],
)
def test_unsupported_fields_are_refused(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    made(tmp_path)
    edit_config(tmp_path, **fields)
    assert reason in refusal(tmp_path)


def test_fields_that_describe_the_training_are_ignored(tmp_path: Path) -> None:
    made(tmp_path)
    edit_config(
        tmp_path, lora_dropout=0.1, task_type="CAUSAL_LM", target_modules="all-linear", layer_replication=None
    )
    assert list(source_of(tmp_path).tensors) == QUERIES


@pytest.mark.parametrize("file", ["adapter_model.bin", "adapter_model.pt", "adapter_model.safetensors"])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_pickle_is_refused_and_not_read(tmp_path: Path, file: str, zipped: bool) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    made(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(Trap(), tmp_path / file, _use_new_zipfile_serialization=zipped)
    said = refusal(tmp_path)
    assert ("header" in said or "damaged" in said) if file.endswith("safetensors") else "pickle" in said
    assert not (tmp_path / "sprung").exists()


def test_a_pickle_beside_the_weights_is_not_read(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"no pickle at all")
    assert list(source_of(tmp_path).tensors) == QUERIES


@pytest.mark.parametrize("rank", [4097, 2**31, 2**63, 10**400, 1e300, -1])
@pytest.mark.parametrize("field", ["r", "rank_pattern", "mlx-lm"])
def test_an_absurd_rank_is_refused(tmp_path: Path, rank: float, field: str) -> None:
    if field == "mlx-lm":
        made_by_mlx_lm(tmp_path, lora_parameters={"rank": rank, "scale": 1.0})
    else:
        made(tmp_path)
        edit_config(tmp_path, **{field: rank if field == "r" else {"q_proj": rank}})
    said = refusal(tmp_path)
    assert "4,096" in said
    assert len(said) < 400


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    made(tmp_path)
    (tmp_path / missing).unlink()
    assert missing in refusal(tmp_path)


def test_paths_to_nothing(tmp_path: Path) -> None:
    assert "not a directory" in refusal(tmp_path / "nothing")
    assert "not a directory" in refusal(Path("a\0b"))


def test_a_header_that_promises_too_much(tmp_path: Path) -> None:
    made(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(struct.pack("<Q", 1 << 60) + weights.read_bytes()[8:])
    assert "header" in refusal(tmp_path)
    weights.write_bytes(struct.pack("<Q", 1 << 16) + b"{}")
    assert "damaged" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.lora_A.weight",  # without PEFT's prefix
        f"{PREFIX}model.layers.0.self_attn.q_proj.lora_C.weight",
        f"{PREFIX}lm_head.weight",  # modules_to_save does not name it
        f"{PREFIX}model.layers.0.self_attn.q_proj.bias",
        PREFIX + "x" * 600 + ".lora_A.weight",
    ],
)
def test_tensors_that_are_none_of_an_adapter(tmp_path: Path, name: str) -> None:
    made(tmp_path)
    edit_tensors(tmp_path, **{name: torch.zeros(4, 64)})
    assert name[:20] in refusal(tmp_path)


def test_tensors_of_whole_numbers(tmp_path: Path) -> None:
    made(tmp_path)
    edit_tensors(tmp_path, **{f"{PREFIX}{QUERIES[0]}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int8)})
    assert "floating-point" in refusal(tmp_path)


# ---- mlx-lm's format


def made_by_mlx_lm(directory: Path, tensors: dict[str, torch.Tensor] | None = None, **fields: Any) -> Path:
    """Writes files as `mlx_lm.lora` does, whose configuration has all options of the training."""
    directory.mkdir(exist_ok=True)
    config = {
        "model": "a model",
        "fine_tune_type": "lora",
        "iters": 10,
        "num_layers": 16,
        "lora_parameters": {"rank": 4, "scale": 2.5, "dropout": 0.0},
    }
    (directory / "adapter_config.json").write_text(json.dumps(config | fields))
    if tensors is None:
        tensors = {f"{QUERIES[0]}.lora_a": torch.ones(64, 4), f"{QUERIES[0]}.lora_b": torch.ones(4, 64)}
    save_file(tensors, directory / "adapters.safetensors")
    return directory


def test_files_of_mlx_lm(tmp_path: Path) -> None:
    source = source_of(made_by_mlx_lm(tmp_path))
    assert source.format == "mlx-lm"
    assert source.tensors[QUERIES[0]].shapes == {"A": (64, 4), "B": (4, 64)}
    assert (source.scalings.rank_of(QUERIES[0]), source.scalings.scaling_of(QUERIES[0])) == (4, 2.5)
    assert source.weight_count == count_weights("mine", tmp_path) == 512
    assert stored_bytes(tmp_path) == source.nbytes
    (tmp_path / "adapters.safetensors").unlink()
    assert "has no adapters.safetensors" in refusal(tmp_path)
    assert stored_bytes(tmp_path) == 0


def test_both_formats_have_the_size_of_their_weights(tmp_path: Path) -> None:
    assert stored_bytes(made(tmp_path)) == source_of(tmp_path).nbytes


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type is 'full', and only lora and dora"),
        ({"fine_tune_type": ["lora"]}, "fine_tune_type"),
        ({"lora_parameters": [1]}, "lora_parameters is [1], but must be an object"),
        ({"lora_parameters": {"rank": 4}}, "scale has None"),
        ({"lora_parameters": {"rank": 4, "scale": float("nan")}}, "scale has nan"),
        ({"lora_parameters": {"rank": 4, "scale": 0}}, "scale has 0"),
        ({"lora_parameters": {"rank": 1e3, "scale": 1}}, "rank has 1000.0"),
        ({"lora_parameters": {"rank": 5_000, "scale": 1}}, "rank has 5000"),
        ({"lora_parameters": {"scale": 1}}, "rank has None"),
    ],
)
def test_configurations_of_mlx_lm_are_bounded(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    assert reason in refusal(made_by_mlx_lm(tmp_path, **fields))


@pytest.mark.parametrize("name", ["lora_a", ".lora_a", "x.lora_c", "x.weight", f"{PREFIX}x.lora_A.weight"])
def test_tensors_that_are_none_of_mlx_lms(tmp_path: Path, name: str) -> None:
    assert "no tensor of a LoRA in mlx-lm's format" in refusal(
        made_by_mlx_lm(tmp_path, {name: torch.zeros(1)})
    )


def test_patterns_take_little_time_on_any_name(tmp_path: Path) -> None:
    made(tmp_path, alpha_pattern={".*a.*b": 2})
    scalings = source_of(tmp_path).scalings
    began = time.process_time()
    scalings.scaling_of("a" * 400)
    assert time.process_time() - began < 5, "it is milliseconds; a repeated group would take years"


def test_a_directory_is_allowed_by_its_real_path(tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    (allowed / "one").mkdir(parents=True)
    other.mkdir()
    (allowed / "link").symlink_to(other)
    roots = (allowed,)
    assert allowed_directory(str(allowed / "one"), roots) == (allowed / "one").resolve()
    assert allowed_directory(str(allowed / "link"), roots) is None
    assert allowed_directory(str(allowed / ".." / "other"), roots) is None
    assert allowed_directory("a\0b", roots) is None
    assert allowed_directory(str(allowed / "one"), ()) is None


def test_files_that_change_while_they_are_read_are_refused(tmp_path: Path) -> None:
    source = source_of(made(tmp_path))
    source.refuse_changed()
    edit_config(tmp_path, lora_alpha=9, lora_dropout=0.25)
    with pytest.raises(AdapterUnusable, match="changed while"):
        source.refuse_changed()
