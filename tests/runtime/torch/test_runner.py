"""Loader: the description of a model, and the errors for models and files that cannot be served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB, save, saved, tiny_model
from rootstock.cache import KVCache
from rootstock.cache.families import FullAttention
from rootstock.cache.plan import BlockCopy, Plan
from rootstock.cache.types import BlockId
from rootstock.config import ModelConfig
from rootstock.errors import (
    BudgetTooSmall,
    InvalidOption,
    ModelFileInvalid,
    ModelPathNotFound,
    ModelUnsupported,
    ModelWeightsMissing,
    SelfCheckFailed,
)
from rootstock.runtime.base import Batch, Segment
from rootstock.runtime.memory_fit import Demands
from rootstock.runtime.torch import runner
from rootstock.runtime.torch.runner import load_model, resolve_device, resolve_dtype
from runtime.torch.helpers import assert_agrees, pool_of
from twins.driving import BLOCK_SIZE, BLOCKS, random_tokens
from twins.torch_models import load, loaded


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copies the checkpoint, to be damaged."""
    return Path(shutil.copytree(saved("llama"), tmp_path / "copy"))


def edit_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# ------------------------------------------------------------------------------------------- description


def test_the_description_of_a_loaded_model() -> None:
    described = loaded("llama").description
    assert described.architecture == "LlamaForCausalLM"
    assert described.name == saved("llama").name, "clients do not learn its path"
    assert described.vocab_size == VOCAB
    assert described.context_limit == 512
    assert described.eos_token_ids == (2,)
    assert (described.dtype, described.kv_dtype, described.device) == ("float32", "float32", "cpu")
    assert described.parameters == sum(p.numel() for p in tiny_model("llama").parameters())
    # K and V of 3 layers with 2 heads of 16 floats
    assert described.families == (FullAttention(layers=3, bytes_per_token=2 * 3 * 2 * 16 * 4),)
    assert described.rope_regime == ""


def test_bfloat16_halves_the_bytes_of_a_token() -> None:
    described = loaded("llama", "bfloat16").description
    assert described.families == (FullAttention(layers=3, bytes_per_token=2 * 3 * 2 * 16 * 2),)
    assert (described.dtype, described.kv_dtype) == ("bfloat16", "bfloat16")


def test_the_pool_takes_the_bytes_of_the_description() -> None:
    runtime = loaded("llama")
    runtime.allocate((10,), 4)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in pool_of(runtime).layers.values())
    assert held == 10 * 4 * runtime.description.families[0].bytes_per_token


def test_the_served_name_replaces_the_path() -> None:
    config = ModelConfig(str(saved("llama")), dtype="float32", device="cpu", served_name="twin")
    assert load_model(config).description.name == "twin"


def test_several_end_tokens_come_from_the_generation_config(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load(copy).description.eos_token_ids == (2, 7)


def test_the_fingerprint_depends_on_every_weight_and_on_the_configuration(copy: Path) -> None:
    original = loaded("llama").description.weights_fingerprint
    assert load(copy).description.weights_fingerprint == original
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][-1] += 1e-3
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    changed = load(copy).description.weights_fingerprint
    edit_config(copy, rms_norm_eps=1e-4)
    assert len({original, changed, load(copy).description.weights_fingerprint}) == 3


def test_progress_goes_through_every_stage_to_its_end() -> None:
    seen: dict[str, list[float]] = {}
    config = ModelConfig(str(saved("llama")), dtype="float32", device="cpu")
    load_model(config, lambda stage, done: seen.setdefault(stage, []).append(done))
    assert list(seen) == ["load", "hash", "compile", "check", "pack"]
    for reported in seen.values():
        assert reported == sorted(reported)
        assert reported[-1] == 1.0


def test_dtype_auto_is_the_devices_native_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert resolve_dtype("auto", cpu) == torch.bfloat16
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert resolve_dtype("auto", cpu) == torch.float32
    assert resolve_dtype("float16", cpu) == torch.float16
    assert resolve_dtype("auto", torch.device("mps")) == torch.float16


def test_a_missing_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    for device in ("cuda", "mps"):
        with pytest.raises(InvalidOption, match="auto or cpu"):
            resolve_device(device)


# ------------------------------------------------------------------------------------- budgets that are hopeless


class WeightsRead(Exception):
    """Error of a loader that got as far as the weights."""


# An architecture of each kind of memory, and options that change the bytes of a position or a state.
@pytest.mark.parametrize("block_size", [1, 32])
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {}),
        ("llama", {"kv_dtype": "int8"}),
        ("llama", {"dtype": "bfloat16"}),
        ("gemma3_text", {}),
        ("llama4_text", {}),
        ("deepseek_v32", {}),
        ("mamba2", {}),
        ("qwen3_next", {}),
        ("qwen3_next", {"kv_dtype": "int8"}),
        ("qwen3_next", {"state_dtype": "bfloat16"}),
    ],
)
def test_a_hopeless_budget_is_refused_before_the_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, model_type: str, options: dict[str, Any], block_size: int
) -> None:
    config = ModelConfig(str(saved(model_type)), **({"device": "cpu", "dtype": "float32"} | options))
    families = loaded(model_type, **options).description.families
    with pytest.raises(BudgetTooSmall) as late:
        KVCache(families, 1, block_size)
    needed = late.value.needed_bytes

    def read_weights(*_: Any, **__: Any) -> None:
        raise WeightsRead

    monkeypatch.setattr(runner, "read_weights", read_weights)
    for budget, error in (
        (1, BudgetTooSmall),
        (needed - 1, BudgetTooSmall),
        (needed, WeightsRead),
        (None, WeightsRead),
    ):
        with pytest.raises(error) as refused:
            load_model(config, demands=Demands(kv_budget=budget, block_size=block_size))
        if isinstance(refused.value, BudgetTooSmall):
            assert refused.value.needed_bytes == needed


# ------------------------------------------------------------------------------------- files that are wrong


@pytest.mark.parametrize("name", ["/no/such/model", "./no-such-model", "a/b/c/d", "~/no-such-model"])
def test_a_missing_path(name: str) -> None:
    with pytest.raises(ModelPathNotFound, match="no such directory"):
        load_model(ModelConfig(name))


def test_a_missing_hub_name_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelPathNotFound, match="the Hub cannot be reached"):
        load_model(ModelConfig("nobody/nothing"))


def test_a_file_in_place_of_a_directory() -> None:
    with pytest.raises(ModelPathNotFound, match="it is a file"):
        load_model(ModelConfig(str(saved("llama") / "config.json")))


def test_a_directory_without_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelPathNotFound, match=r"no config\.json"):
        load_model(ModelConfig(str(tmp_path)))


def test_a_configuration_that_is_not_json(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelFileInvalid, match=r"config\.json .* not JSON at line 1, column 2"):
        load(copy)


def test_an_unknown_architecture(copy: Path) -> None:
    edit_config(copy, model_type="nothing_like_it")
    with pytest.raises(ModelUnsupported, match="nothing_like_it"):
        load(copy)


def test_a_directory_without_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelWeightsMissing, match=r"no model\.safetensors"):
        load(copy)


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, 0.999])
def test_truncated_weights(copy: Path, keep: float) -> None:
    path = copy / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[: int(keep if keep > 1 else len(raw) * keep)])
    with pytest.raises(ModelWeightsMissing, match="damaged"):
        load(copy)


def test_a_missing_parameter_is_refused(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelWeightsMissing, match=r"1 parameters are missing.*layers\.1\.self_attn\.k_proj"):
        load(copy)


def test_a_parameter_of_another_shape_is_refused(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelWeightsMissing, match=r"model\.norm\.weight \(\[65\] in the files, \[64\] by config\.json\)"
    ):
        load(copy)


def test_a_missing_shard(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert load(tmp_path).description.parameters > 0
    shards[1].unlink()
    with pytest.raises(ModelWeightsMissing, match=shards[1].name):
        load(tmp_path)


# ------------------------------------------------------------------------------- models that are not served


@pytest.mark.behaviour(22)
@pytest.mark.parametrize(
    ("model_type", "says"),
    [
        ("recurrent_gemma", r"layer 0 \(RecurrentGemmaDecoderLayer\).*outside the cache"),
        ("rwkv", r"RwkvBlock.*takes no cache"),
        ("xlstm", r"xLSTMBlock.*cannot use a cache from outside"),
        ("deepseek_v4", r"layer 0 \(DeepseekV4DecoderLayer\).*'heavily_compressed_attention'"),
    ],
)
def test_layers_whose_memory_the_cache_cannot_keep_are_refused_with_their_class(
    model_type: str, says: str
) -> None:
    with pytest.raises(ModelUnsupported, match=says):
        load(saved(model_type))


@pytest.mark.behaviour(22)
def test_a_model_whose_chunks_differ_from_one_pass_is_refused() -> None:
    with pytest.raises(SelfCheckFailed, match=r"a later chunk.*at most 0\.001 is allowed"):
        load(saved("hrm_text"))


@pytest.mark.behaviour(22)
def test_an_unknown_layer_kind_is_refused_with_the_layers_class(copy: Path) -> None:
    edit_config(copy, layer_types=["full_attention", "compressed_sparse_attention", "full_attention"])
    with pytest.raises(
        ModelUnsupported, match=r"layer 1 \(LlamaDecoderLayer\).*'compressed_sparse_attention'"
    ):
        load(copy)


# ----------------------------------------------------------------------------- special, but full attention


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gemma2", {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24, "sliding_window": None}),
        (
            "gpt_oss",
            {
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": None,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 4, "head_dim": 20}),
    ],
    ids=["softcap", "sinks", "one KV head", "odd heads"],
)
def test_softcaps_sinks_and_odd_heads(tmp_path: Path, model_type: str, fields: dict[str, Any]) -> None:
    save(tmp_path, model_type, **fields | {"layer_types": ["full_attention"] * 3})
    assert_agrees(load(tmp_path), tmp_path)


# ------------------------------------------------------------------------------------------------- RoPE


@pytest.mark.parametrize(
    ("parameters", "limit", "regime"),
    [
        ({"rope_type": "default"}, 512, ""),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512, ""),
        ({"rope_type": "dynamic", "factor": 4.0}, 512, "dynamic<=512"),
        (
            {
                "rope_type": "longrope",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "short_factor": [1.0] * 8,
                "long_factor": [3.0] * 8,
            },
            128,
            "longrope<=128",
        ),
    ],
    ids=["default", "yarn", "dynamic", "longrope"],
)
def test_frequencies_that_depend_on_the_batch_cap_the_context(
    tmp_path: Path, parameters: dict[str, Any], limit: int, regime: str
) -> None:
    save(tmp_path, "llama", rope_parameters=parameters | {"rope_theta": 10000.0})
    runtime = load(tmp_path)
    described = runtime.description
    assert (described.context_limit, described.rope_regime) == (limit, regime)
    # Up to the limit, a short sequence packed with the longest one gets its own frequencies.
    longest = min(limit, 300)
    assert_agrees(runtime, tmp_path, (longest, 30), [{0: longest, 1: 30}])


# ---------------------------------------------------------------------------------------------- forward


def test_only_requested_rows_are_scored() -> None:
    runtime = loaded("llama")
    runtime.allocate((BLOCKS,), BLOCK_SIZE)
    tokens = random_tokens(VOCAB, 20, 0)
    tables = np.arange(9, dtype=np.int32).reshape(3, 3)
    every = [runtime.forward(Batch([Segment(tokens, 0, (table,), 20)])) for table in tables]
    some = runtime.forward(
        Batch(
            [
                Segment(tokens, 0, (tables[0],), 0),
                Segment(tokens, 0, (tables[1],), 3),
                Segment(tokens, 0, (tables[2],), 1),
            ]
        )
    )
    assert some.dtype == np.float32
    assert some.shape == (4, VOCAB)
    np.testing.assert_allclose(some[:3], every[1][-3:], atol=1e-4)
    np.testing.assert_allclose(some[3], every[2][-1], atol=1e-4)
    none = runtime.forward(Batch([Segment(tokens, 0, (tables[0],), 0)]))
    assert none.shape == (0, VOCAB)
    assert none.dtype == np.float32


def test_copies_are_executed_in_order_and_only_their_tokens() -> None:
    runtime = loaded("llama")
    runtime.allocate((6,), 4)
    pool = pool_of(runtime)
    with torch.inference_mode():
        for layer in pool.layers.values():
            for memory in (layer.keys, layer.values):
                memory.copy_(torch.arange(24.0)[:, None, None].expand_as(memory))
    copies = [(0, 3, 4), (3, 4, 2), (1, 5, 3), (4, 1, 4)]
    runtime.apply(Plan(tuple(BlockCopy(BlockId(s), BlockId(t), n) for s, t, n in copies)))
    expected = np.arange(24).reshape(6, 4)
    for source, target, tokens in copies:
        expected[target, :tokens] = expected[source, :tokens].copy()
    for layer in pool.layers.values():
        for memory in (layer.keys, layer.values):
            assert memory[:, 0, 0].tolist() == expected.flatten().tolist()


def test_a_pool_larger_than_the_memory_is_refused_with_the_option() -> None:
    with pytest.raises(InvalidOption, match="--kv-budget"):
        loaded("llama").allocate((1 << 40,), 32)
