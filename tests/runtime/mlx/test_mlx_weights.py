"""Weights: read as mlx-lm reads them, from exactly the files that were hashed, and refused if anything is missing."""

from __future__ import annotations

import json
import resource
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_by_mlx_lm

from mlx_checkpoints import KINDS, Quantization, logits_of, make_mlx_model, save_mlx_checkpoint
from rootstock.errors import ModelUnsupported, ModelWeightsMissing
from rootstock.runtime.mlx.checkpoint import read_checkpoint
from rootstock.runtime.mlx.self_check import own_logits
from rootstock.runtime.mlx.weights import (
    arrays_of,
    cast,
    evaluate_weights,
    is_quantized,
    lazy_model,
    quantize,
    stored_dtype,
)
from rootstock.runtime.model_files import weight_files

TOKENS = np.arange(3, 40, dtype=np.int32)


def read(directory: Path) -> nn.Module:
    return lazy_model("m", read_checkpoint("m", directory), weight_files("m", directory))


def weights(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def rewrite(directory: Path, change: Any) -> None:
    """Saves the weights of a checkpoint again after a change of their dictionary."""
    file = directory / "model.safetensors"
    tensors = dict(mx.load(str(file)))
    mx.eval(tensors)
    change(tensors)
    mx.save_safetensors(str(file), tensors)
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mlx_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return shutil.copytree(llama, tmp_path / "copy")


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit", "mixed", "mxfp4"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma3_text", "qwen3_next"])
def test_the_model_is_mlx_lms_own(tmp_path: Path, kind: str, quantization: Quantization | None) -> None:
    save_mlx_checkpoint(tmp_path, kind, quantization=quantization)
    ours, own = read(tmp_path), load_by_mlx_lm(tmp_path)[0]
    evaluate_weights("m", ours, lambda stage, done: None)
    assert is_quantized(ours) == (quantization is not None)
    assert np.array_equal(own_logits(ours, TOKENS), own_logits(own, TOKENS))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_were_saved_are_read(tmp_path: Path, kind: str) -> None:
    saved = weights(make_mlx_model(kind))
    found = weights(read(save_mlx_checkpoint(tmp_path, kind)))
    assert saved.keys() == found.keys()
    assert all(mx.array_equal(found[name], saved[name]) for name in saved)


def test_only_files_that_the_index_names_are_read(copy: Path) -> None:
    """mlx-lm itself reads every model*.safetensors, in any order."""
    wrong = {name: mx.zeros_like(weight) for name, weight in mx.load(str(copy / "model.safetensors")).items()}
    mx.save_safetensors(str(copy / "model-old.safetensors"), wrong)
    mx.save_safetensors(str(copy / "model-00001-of-00002.safetensors"), wrong)
    assert np.array_equal(own_logits(read(copy), TOKENS), own_logits(make_mlx_model("llama"), TOKENS))


def test_files_may_have_any_name_and_directory(llama: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(llama, tmp_path / "mo[d]el* ?")
    (directory / "model.safetensors").rename(directory / "weights.safetensors")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "weights.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert np.array_equal(own_logits(read(directory), TOKENS), own_logits(make_mlx_model("llama"), TOKENS))


def test_no_directory_of_links_is_left_behind(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = read(llama)
    assert list(tmp_path.iterdir()) == []
    evaluate_weights("m", model, lambda stage, done: None)  # its files stay open


# ---- damaged checkpoints


def test_a_tensor_in_two_files(copy: Path) -> None:
    shutil.copy(copy / "model.safetensors", copy / "other.safetensors")
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "other.safetensors"
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelWeightsMissing, match=r"two files hold a tensor '"):
        read(copy)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"Missing 1 parameters: model\.norm\.weight"),
        (lambda tensors: tensors.update(more=mx.zeros(2)), "Received 1 parameters not in model: more"),
        (
            lambda tensors: tensors.update({"model.norm.weight": mx.zeros(5)}),
            r"Expected shape \(64,\) but received shape \(5,\) for parameter model.norm.weight",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_weights_that_do_not_fit_the_configuration(copy: Path, change: Any, said: str) -> None:
    rewrite(copy, change)
    with pytest.raises(ModelWeightsMissing, match=said):
        read(copy)


def test_many_missing_weights_are_told_in_one_short_line(copy: Path) -> None:
    rewrite(copy, lambda tensors: [tensors.pop(name) for name in list(tensors)[1:]])
    with pytest.raises(ModelWeightsMissing) as refusal:
        read(copy)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 450


@pytest.mark.parametrize("length", [0, 7, 100, 5000])
def test_a_truncated_file(copy: Path, length: int) -> None:
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(length)
    with pytest.raises(ModelWeightsMissing, match=r"model.safetensors is damaged"):
        read(copy)


def test_the_wrong_number_of_bits(tmp_path: Path) -> None:
    save_mlx_checkpoint(tmp_path, "llama", quantization="4bit")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization"]["model.embed_tokens"] = {"bits": 8, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelWeightsMissing, match="Expected shape"):
        read(tmp_path)


def test_numbers_without_their_scales(copy: Path) -> None:
    """mlx-lm reads FP8 as unsigned integers, and nothing multiplies them."""
    file, name = copy / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = dict(mx.load(str(file)))
    shape = list(tensors.pop(name).shape)
    mx.save_safetensors(str(file), tensors)
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    size = shape[0] * shape[1]
    header[name] = {"dtype": "F8_E4M3", "shape": shape, "data_offsets": [len(data), len(data) + size]}
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data + bytes(size))
    with pytest.raises(ModelUnsupported, match=rf"mlx-lm reads {name} as uint8 without its scales"):
        read(copy)


# ---- dtypes and quantization


@pytest.mark.parametrize(
    ("quantization", "dtype", "expected"),
    [
        (None, mx.bfloat16, mx.bfloat16),
        (None, mx.float16, mx.float16),
        ("4bit", mx.bfloat16, mx.bfloat16),
        ("mxfp4", mx.float16, mx.float16),
    ],
)
def test_the_dtype_of_a_checkpoint(
    tmp_path: Path, quantization: Quantization | None, dtype: mx.Dtype, expected: mx.Dtype
) -> None:
    assert (
        stored_dtype(read(save_mlx_checkpoint(tmp_path, "llama", quantization=quantization, dtype=dtype)))
        == expected
    )


@pytest.mark.parametrize("quantization", [None, "4bit", "mxfp4"])
def test_weights_and_scales_are_cast_and_codes_are_not(
    tmp_path: Path, quantization: Quantization | None
) -> None:
    model = read(save_mlx_checkpoint(tmp_path, "llama", quantization=quantization))
    before = weights(model)
    cast(model, mx.bfloat16)
    for name, weight in weights(model).items():
        assert weight.dtype == (mx.bfloat16 if before[name].dtype == mx.float32 else before[name].dtype)


def test_weights_that_mlx_lm_never_casts(tmp_path: Path) -> None:
    model = read(save_mlx_checkpoint(tmp_path, "deepseek_v3"))
    cast(model, mx.bfloat16)
    kept = [name for name, weight in weights(model).items() if weight.dtype == mx.float32]
    assert kept
    assert all("e_score_correction_bias" in name for name in kept)


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 4)])
def test_weights_are_quantized_as_mlx_lm_converts_them(llama: Path, quantization: str, bits: int) -> None:
    model = read(llama)
    assert quantize(model, quantization) == []
    assert is_quantized(model)
    names = {name.rpartition(".")[0] for name in weights(model) if name.endswith("scales")}
    assert {"model.embed_tokens", "model.layers.1.self_attn.q_proj"} <= names
    own = make_mlx_model("llama")
    nn.quantize(own, 64, bits)
    assert np.array_equal(own_logits(model, TOKENS), own_logits(own, TOKENS))


def test_layers_whose_width_is_no_multiple_of_a_group_are_named(tmp_path: Path) -> None:
    model = read(save_mlx_checkpoint(tmp_path, "llama", config={"intermediate_size": 96}))
    assert quantize(model, "int8") == [f"model.layers.{layer}.mlp.down_proj" for layer in range(3)]
    assert own_logits(model, TOKENS).shape == (len(TOKENS), logits_of("llama"))


# ---- evaluation


def test_another_thread_can_compute_with_everything(tmp_path: Path) -> None:
    """RoPE's frequencies are no parameters, and lazy when mlx-lm has loaded a model."""
    scaling = {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64}
    model = read(save_mlx_checkpoint(tmp_path, "llama", config={"rope_scaling": scaling}))
    assert any(mx.array_equal(model.layers[0].self_attn.rope._freqs, array) for array in arrays_of(model))
    model = read(tmp_path)
    stages: list[tuple[str, float]] = []
    evaluate_weights("m", model, lambda stage, done: stages.append((stage, done)))
    assert stages[-1] == ("load", 1.0)
    computed: list[Any] = []

    def compute() -> None:
        try:
            computed.append(own_logits(model, TOKENS))
        except Exception as error:
            computed.append(error)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert isinstance(computed[0], np.ndarray), computed[0]
    assert np.isfinite(computed[0]).all()


def test_weights_are_evaluated_in_parts(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootstock.runtime.mlx.weights._EVALUATED_BYTES", 100_000)
    model = read(llama)
    shares: list[float] = []
    evaluate_weights("m", model, lambda stage, done: shares.append(done))
    assert len(shares) > 3
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_arrays_are_found_once_wherever_a_model_has_them() -> None:
    shared, hidden, listed = mx.zeros(1), mx.zeros(2), mx.zeros(3)
    model = nn.Module()
    model.one = shared
    model.inner = [nn.Linear(2, 2), {"key": (shared, listed)}]
    model._hidden = hidden
    model.itself = {"model": model}
    found = list(arrays_of(model))
    assert len(found) == 5
    assert {id(array) for array in found} >= {id(shared), id(hidden), id(listed)}


def test_importing_the_runtime_leaves_the_limit_of_open_files() -> None:
    """mlx-lm lowers it for the whole process, the hard limit as well."""
    code = (
        "import resource; before = resource.getrlimit(resource.RLIMIT_NOFILE); "
        "set_limit = resource.setrlimit; import rootstock.runtime.mlx.weights; "
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == before; assert resource.setrlimit is set_limit"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (500, {min(hard, 3000)})); "
    for before in ("", least):
        subprocess.run([sys.executable, "-c", before + code], check=True)
