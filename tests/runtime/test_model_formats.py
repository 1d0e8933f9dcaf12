"""Formats that are not read: each is refused by its name and with a remedy, before weights are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rootstock.errors import ModelError, ModelPathNotFound, ModelUnsupported, ModelWeightsMissing
from rootstock.runtime.model_files import locate, weight_files
from rootstock.runtime.model_formats import (
    Quantization,
    foreign_format,
    has_graph,
    quantization_of,
    quantization_of_tensors,
)

ORIGINAL = "serve the model from which it was made"
UNQUANTIZED = "serve the unquantized model"

# Files of a directory, the name of their format, and a part of the remedy.
DIRECTORIES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "projector": (("mmproj-f16.gguf", "README.md"), "GGUF", "the model's own GGUF file"),
    "ggml": (("model.ggml",), "before GGUF", ORIGINAL),
    "gptq of autogptq": (("gptq_model-4bit-128g.safetensors", "quantize_config.json"), "GPTQ", ORIGINAL),
    "early mlx": (("weights.npz", "tokenizer.model"), "MLX", ORIGINAL),
    "early mlx shards": (("weights.00.safetensors", "weights.01.safetensors"), "MLX", ORIGINAL),
    "meta in a folder": (("original/consolidated.00.pth", "original/params.json"), "PyTorch", ORIGINAL),
    "llamafile": (("model.llamafile",), "GGUF", ORIGINAL),
    "pytorch": (("pytorch_model.bin",), "PyTorch", "save_pretrained"),
    "pytorch shards": (("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"), "PyTorch", "convert"),
    "meta": (("consolidated.00.pth", "params.json"), "PyTorch", ORIGINAL),
    "onnx": (("model.onnx", "model.onnx_data"), "ONNX", ORIGINAL),
    "onnx folder": (("onnx/model.onnx",), "ONNX", ORIGINAL),
    "openvino": (("openvino_model.xml", "openvino_model.bin"), "OpenVINO", "openvino"),
    "openvino of several": (("openvino_language_model.xml",), "in several graphs", ORIGINAL),
    "core ml": (("Model.mlpackage/Manifest.json",), "Core ML", ORIGINAL),
    "mlc": (("mlc-chat-config.json", "params_shard_0.bin"), "MLC", ORIGINAL),
    "tensorrt": (("rank0.engine",), "TensorRT", ORIGINAL),
    "nemo": (("model.nemo",), "NeMo", ORIGINAL),
    "tensorflow": (("tf_model.h5",), "TensorFlow", ORIGINAL),
    "flax": (("flax_model.msgpack",), "Flax", ORIGINAL),
    "litert": (("model.task",), "LiteRT", ORIGINAL),
    "ctranslate2": (("model.bin", "vocabulary.json"), "CTranslate2", ORIGINAL),
    "mistral": (("consolidated.safetensors", "params.json"), "Mistral", ORIGINAL),
    "diffusers": (("model_index.json", "unet/config.json"), "diffusers", "serve a language model"),
    "adapter": (("adapter_config.json", "adapter_model.safetensors"), "LoRA", "--adapter NAME=DIRECTORY"),
    "mlx-lm adapter": (("adapter_config.json", "adapters.safetensors"), "LoRA", "--adapter"),
    "adapter of training": (("adapter_config.json", "training_args.bin", "optimizer.pt"), "LoRA", "--adapter"),
}  # fmt: skip


def write(directory: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}" if name.endswith(".json") else "")
    return directory


def find(model: object) -> Path:
    """Does what every start does before it imports a runtime."""
    directory = locate(str(model), with_code=False, progress=lambda stage, done: None)
    weight_files(str(model), directory)
    return directory


@pytest.mark.parametrize("has_config", [False, True], ids=["without config", "with config"])
@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_directory_of_another_format(tmp_path: Path, kind: str, has_config: bool) -> None:
    names, named, remedy = DIRECTORIES[kind]
    write(tmp_path, (*names, *(("config.json",) if has_config else ())))
    with pytest.raises(ModelUnsupported) as refused:
        find(tmp_path)
    assert named in refused.value.message
    assert remedy in refused.value.message


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_repository_of_another_format_in_the_local_hub_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    names, named, remedy = DIRECTORIES[kind]
    cached = tmp_path / "models--some--model"
    write(cached / "snapshots/abc", names)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    with pytest.raises(ModelUnsupported) as refused:
        find("some/model")
    assert named in refused.value.message
    assert remedy in refused.value.message
    with pytest.raises(ModelPathNotFound, match="serve some/model by that name"):
        find(cached)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("pytorch_model.bin", "PyTorch"),
        ("a.onnx", "ONNX"),
        ("adapter_config.json", "LoRA"),
    ],
)
def test_a_path_to_a_file_of_another_format(tmp_path: Path, name: str, named: str) -> None:
    with pytest.raises(ModelUnsupported, match=named):
        find(write(tmp_path, (name,)) / name)


def test_files_of_a_model_that_is_read(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json", "README.md"):
        with pytest.raises(ModelPathNotFound, match="it is a file"):
            find(write(tmp_path, (name,)) / name)
    assert foreign_format(["config.json", "model.safetensors", "modules.json", "training_args.bin"]) is None


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelPathNotFound, match=r"the directory is empty. 'hf download'"):
        find(tmp_path)
    write(tmp_path, ("notes.txt",))
    with pytest.raises(ModelPathNotFound, match=r"the directory has no config.json"):
        find(tmp_path)
    write(tmp_path, tuple(f"model{number}/config.json" for number in range(5)))
    with pytest.raises(ModelPathNotFound, match="its folders model0/, model1/, model2/ and others have one"):
        find(tmp_path)


def test_a_graph_without_its_configuration_lacks_only_that(tmp_path: Path) -> None:
    write(tmp_path, ("openvino_model.xml", "openvino_model.bin"))
    with pytest.raises(ModelUnsupported, match=r"without its model's config.json: put that .* beside it"):
        find(tmp_path)
    write(tmp_path, ("config.json",))
    with pytest.raises(ModelUnsupported, match=r"serve it with --runtime openvino \(pip install"):
        find(tmp_path)


@pytest.mark.parametrize("bin", [False, True])
@pytest.mark.parametrize("others", [(), ("model.safetensors",), ("a-00001-of-00002.safetensors",)])
@pytest.mark.parametrize("beside", [(), ("modules.json",), ("README.md", "onnx/model.onnx")])
def test_a_graph_that_makes_text(bin: bool, others: tuple[str, ...], beside: tuple[str, ...]) -> None:
    names = ("openvino_model.xml", *(["openvino_model.bin"] if bin else []), *others, *beside)
    assert has_graph(names) == ((bin or not others) and "modules.json" not in beside)
    assert not has_graph(names[1:])


def test_the_base_model_of_an_adapter_is_named_and_bounded(tmp_path: Path) -> None:
    for field in ("base_model_name_or_path", "model"):
        (tmp_path / "adapter_config.json").write_text(json.dumps({field: "maker/base"}))
        with pytest.raises(ModelUnsupported, match="serve its base model 'maker/base', with --adapter"):
            find(tmp_path)
    for content in (json.dumps({"base_model_name_or_path": "x" * 100_000}), "{", "[]", "[" * 100_000):
        (tmp_path / "adapter_config.json").write_text(content)
        with pytest.raises(ModelUnsupported, match="LoRA") as refused:
            find(tmp_path)
        assert len(refused.value.message) < 1000


def test_sentence_transformers_with_the_transformer_in_a_folder(tmp_path: Path) -> None:
    write(tmp_path, ("modules.json", "0_Transformer/config.json", "1_Pooling/config.json"))
    with pytest.raises(ModelUnsupported, match=r"sentence-transformers .* save it again"):
        find(tmp_path)


def test_shards_without_their_index_and_pointers_of_git_lfs(tmp_path: Path) -> None:
    write(tmp_path, ("config.json", "model-00001-of-00002.safetensors", "optimizer.pt"))
    with pytest.raises(ModelWeightsMissing, match=r"model-00001-of-00002\.safetensors: fetch the index"):
        find(tmp_path)
    (tmp_path / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    )
    with pytest.raises(ModelWeightsMissing, match="'git lfs pull' in its directory"):
        find(tmp_path)


def test_a_directory_of_many_files_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootstock.runtime.model_formats._MOST_NAMES", 3)
    write(tmp_path, tuple(f"{number}.txt" for number in range(9)))
    with pytest.raises(ModelPathNotFound, match=r"no config.json"):
        find(tmp_path)


def test_an_embedding_model_is_no_model_for_text(tmp_path: Path) -> None:
    from embedding_models import save_embedding_model
    from rootstock.llm.llm import LLM

    with pytest.raises(ModelUnsupported, match=r"it makes embeddings .* /v1/embeddings"):
        LLM(str(save_embedding_model(tmp_path / "m")))


# ---- quantization


# Fields of config.json, and the method by its name.
DECLARED: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, "GPTQ (4 bits)"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, "AWQ (4 bits)"),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8"),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "FBGEMM (FP8)"),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
        "compressed-tensors (float-quantized)",
    ),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes (4 bits)"),
    "old bitsandbytes": ({"load_in_8bit": True}, "bitsandbytes (8 bits)"),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": []}, "MXFP4"),
    "quanto": ({"quant_method": "quanto", "weights": "int4"}, "Quanto"),
    "hqq": ({"quant_method": "hqq", "quant_config": {}}, "HQQ"),
    "aqlm": ({"quant_method": "aqlm"}, "AQLM"),
    "torchao": ({"quant_method": "torchao", "quant_type": {"default": "int4_weight_only"}}, "torchao"),
    "eetq": ({"quant_method": "eetq", "weights": "int8"}, "EETQ"),
    "higgs": ({"quant_method": "higgs", "bits": 4}, "HIGGS (4 bits)"),
    "spqr": ({"quant_method": "spqr", "bits": 3}, "SpQR (3 bits)"),
    "vptq": ({"quant_method": "vptq"}, "VPTQ"),
    "auto-round": ({"quant_method": "auto-round", "bits": 4}, "AutoRound (4 bits)"),
    "old auto-round": ({"quant_method": "intel/auto-round", "bits": 4}, "AutoRound (4 bits)"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt (NVFP4)"),
    "exl2": ({"quant_method": "exl2", "bits": 4.65}, "ExLlamaV2 (EXL2)"),
    "unheard of": ({"quant_method": "unheard-of", "bits": 3}, "'unheard-of' (3 bits)"),
    "no method": ({"something": 1}, "a method that its files do not name"),
}


@pytest.mark.parametrize("place", ["root", "text_config", "compression_config"])
@pytest.mark.parametrize("kind", DECLARED)
def test_a_declared_quantization_has_a_name(kind: str, place: str) -> None:
    fields, name = DECLARED[kind]
    config: dict[str, Any] = {"model_type": "llama"}
    if place == "text_config":
        config["text_config"] = {"quantization_config": fields}
    else:
        config["quantization_config" if place == "root" else place] = fields
    found = quantization_of(config)
    assert found is not None
    assert found.name == name
    assert UNQUANTIZED in found.refusal()


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_an_mlx_repository_is_recognised_by_either_key(key: str) -> None:
    found = quantization_of({key: {"group_size": 64, "bits": 4, "mode": "affine"}})
    assert found is not None
    assert found == Quantization("mlx", "4 bits")
    assert "--runtime mlx (pip install 'rootstock[mlx]')" in found.refusal()


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": None},
        {"quantization_config": {}},
        {"text_config": None},
        {"text_config": {"quantization_config": None}},
        {"quantization": None},
    ],
)
def test_a_plain_configuration_declares_none(config: dict[str, Any]) -> None:
    assert quantization_of(config) is None


def test_values_of_any_kind_are_shown_bounded() -> None:
    for fields in (
        {"quant_method": "x" * 10_000},
        {"quant_method": "gptq", "bits": 10**400},
        {"quant_method": "gptq", "format": "y" * 10_000},
        {"quant_method": ["gptq"]},
        {"quant_method": "gptq", "quantization": []},
    ):
        found = quantization_of({"quantization_config": fields})
        assert found is not None
        assert len(found.refusal()) < 1000


@pytest.mark.parametrize(
    ("name", "dtype", "method"),
    [
        ("model.layers.0.mlp.up_proj.qweight", "I32", "gptq"),
        ("model.layers.0.mlp.up_proj.g_idx", "I32", "gptq"),
        ("model.layers.0.mlp.up_proj.weight.absmax", "F32", "bitsandbytes"),
        ("model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4", "U8", "bitsandbytes"),
        ("model.layers.0.mlp.up_proj.SCB", "F32", "bitsandbytes"),
        ("model.layers.0.mlp.up_proj.weight_packed", "I32", "compressed-tensors"),
        ("model.layers.0.mlp.up_proj.weight_scale", "F32", "fp8"),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", "F32", "fp8"),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", "U8", "mxfp4"),
        ("model.layers.0.mlp.up_proj.weight", "F8_E4M3", "fp8"),
        ("model.layers.0.mlp.up_proj.weight", "I8", ""),
        ("model.layers.0.mlp.up_proj.weight", "U32", ""),
    ],
)
def test_quantized_tensors_are_recognised(name: str, dtype: str, method: str) -> None:
    plain = [("model.norm.weight", "BF16"), ("model.layers.0.position_ids", "I64")]
    found = quantization_of_tensors([*plain, (name, dtype)])
    assert found is not None
    assert found.method == method
    assert quantization_of_tensors(plain) is None


# ---- the torch runtime


@pytest.fixture
def copy(small_model: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint that can be served, to be changed."""
    return Path(shutil.copytree(small_model, tmp_path / "copy"))


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Builds an engine, and returns the message of the refusal. Fails if weights were read before."""
    from rootstock.config import ModelConfig
    from rootstock.engine.build import build_engine
    from rootstock.runtime.torch import runner

    def read_weights(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are read")

    def build(directory: Path, runtime: str = "torch") -> str:
        monkeypatch.setattr(runner, "read_weights", read_weights)
        with pytest.raises(ModelError) as refusal:
            build_engine(ModelConfig(str(directory), runtime=runtime))
        return refusal.value.message

    return build


READ = {"compressed-tensors", "gptq", "awq", "fp8", "mxfp4", "bitsandbytes", "old bitsandbytes"}
NOT_READ: dict[str, tuple[dict[str, Any], str]] = {
    "3 bits of gptq": ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "GPTQ (3 bits)"),
    "gemv of awq": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ (4 bits)"),
    "nvfp4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}},
        "compressed-tensors (nvfp4-pack-quantized)",
    ),
    "one nvfp4": (
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {"a": {"format": "pack-quantized"}, "b": {"format": "nvfp4-pack-quantized"}},
        },
        "compressed-tensors (mixed-precision)",
    ),
    "sparse": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "sparsity_config": {"format": "sparse-24-bitmask"},
        },
        "compressed-tensors (pack-quantized)",
    ),
} | {kind: declared for kind, declared in DECLARED.items() if kind not in READ}


@pytest.mark.parametrize("kind", NOT_READ)
def test_the_torch_runtime_refuses_before_it_reads(
    copy: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    fields, name = NOT_READ[kind]
    edit(copy / "config.json", quantization_config=fields)
    # A machine of developers may have the packages of some.
    monkeypatch.setattr(
        "transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: False
    )
    monkeypatch.setattr("transformers.quantizers.quantizer_mxfp4.is_accelerate_available", lambda: False)
    monkeypatch.setattr(
        "transformers.quantizers.quantizer_compressed_tensors.is_compressed_tensors_available", lambda: False
    )
    message = refused(copy)
    assert f"quantized by {name}" in message
    assert UNQUANTIZED in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "fields", [{"mode": "mxfp4"}, {"bits": 7}, {"model.embed_tokens": {"group_size": 16}}]
)
def test_the_torch_runtime_refuses_an_mlx_repository(
    copy: Path, refused: Callable[..., str], fields: dict[str, Any]
) -> None:
    fields = {"group_size": 64, "bits": 4} | fields
    edit(copy / "config.json", quantization=fields, quantization_config=fields)
    assert "which the torch runtime does not read: serve it with --runtime mlx" in (refused(copy))


@pytest.mark.parametrize("described", [False, True])
def test_quantized_weights_of_a_plain_configuration_are_refused(
    copy: Path, refused: Callable[..., str], described: bool
) -> None:
    tensors = load_file(copy / "model.safetensors")
    name = next(name for name in tensors if name.endswith("up_proj.weight"))
    tensors[name] = np.ones(tensors[name].shape, np.int8)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    if described:
        write(copy, ("quantize_config.json",))
    message = refused(copy)
    assert ("quantized by GPTQ" if described else "a method that its files do not name (I8)") in message
    assert "config.json does not say so" in message


@pytest.mark.parametrize("kind", sorted(DECLARED))
def test_the_mlx_runtime_refuses_by_name(copy: Path, refused: Callable[..., str], kind: str) -> None:
    pytest.importorskip("mlx_lm")
    fields, name = DECLARED[kind]
    edit(copy / "config.json", quantization_config=fields)
    tensors = load_file(copy / "model.safetensors")
    for each in [name for name in tensors if name.endswith("up_proj.weight")]:
        tensors[each] = np.ones(tensors[each].shape, np.uint8)
        tensors[f"{each}_scale"] = np.ones(1, np.float32)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    message = refused(copy, "mlx")
    assert name in message or "names no quant_method" in message
    assert UNQUANTIZED in message or "names no quant_method" in message


def test_the_remedy_for_pytorch_checkpoints_works(copy: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tensors = {name: torch.from_numpy(array) for name, array in load_file(copy / "model.safetensors").items()}
    (copy / "model.safetensors").unlink()
    torch.save(tensors, copy / "pytorch_model.bin")
    with pytest.raises(ModelUnsupported, match="PyTorch"):
        find(copy)
    other = copy.parent / "other"
    AutoModelForCausalLM.from_pretrained(copy).save_pretrained(other)
    assert find(other) == other
