"""Loader of the MLX runtime: description, options, memory, and names that keep unlike caches apart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model as load_by_mlx_lm

from kernels.metal.emulation import COMPILER, Emulation
from mlx_checkpoints import KINDS, Quantization, logits_of, make_mlx_model, save_mlx_checkpoint
from rootstock.cache import KVCache
from rootstock.cache.families import FullAttention
from rootstock.config import CacheConfig, ModelConfig
from rootstock.errors import (
    BudgetTooSmall,
    InvalidOption,
    MemoryLacks,
    ModelFileInvalid,
    ModelPathNotFound,
    ModelTooLarge,
    ModelUnsupported,
    ModelWeightsMissing,
)
from rootstock.kernels.metal.launch import Occupancy
from rootstock.kernels.metal.paged_attention import LayerUse, PagedKernel
from rootstock.runtime import select
from rootstock.runtime.base import Batch, Segment
from rootstock.runtime.memory_fit import Demands
from rootstock.runtime.mlx import load as loader
from rootstock.runtime.mlx.load import load_model
from rootstock.runtime.mlx.runner import MlxRuntime
from rootstock.runtime.mlx.self_check import own_logits
from rootstock.runtime.torch.runner import load_model as load_by_torch
from rootstock.runtime.trial import BLOCK_SIZE
from rootstock.units import GIB, MIB


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mlx_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return shutil.copytree(llama, tmp_path / "copy")


def load(directory: Path, **options: Any) -> MlxRuntime:
    return load_model(ModelConfig(str(directory), **options))


def scored(runtime: MlxRuntime, tokens: np.ndarray[Any, Any]) -> Any:
    families = runtime.description.families
    runtime.allocate([8] * len(families), 8)
    blocks = np.arange(8, dtype=np.int32)
    tables = tuple(blocks for _ in families if not hasattr(_, "bytes_per_state"))
    return runtime.forward(Batch([Segment(tokens, 0, tables, len(tokens), 0)]))  # type: ignore[arg-type]


# ---- a hopeless budget


class WeightsRead(Exception):
    """Error of a loader that got as far as the weights."""


@pytest.mark.parametrize("block_size", [1, 32])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"kv_dtype": "int8"}),
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
        ("mamba2", {}),
        ("qwen3_next", {}),
    ],
)
def test_a_hopeless_budget_is_refused_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, options: dict[str, Any], block_size: int
) -> None:
    config = ModelConfig(str(save_mlx_checkpoint(tmp_path, kind)), **options)
    with pytest.raises(BudgetTooSmall) as late:
        KVCache(load_model(config).description.families, 1, block_size)
    needed = late.value.needed_bytes

    def evaluate_weights(*_: Any, **__: Any) -> None:
        raise WeightsRead

    monkeypatch.setattr(loader, "evaluate_weights", evaluate_weights)
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


# ---- description


def test_the_description_of_a_loaded_model(llama: Path) -> None:
    described = load(llama).description
    assert (described.name, described.architecture) == (llama.name, "llama")
    assert (described.vocab_size, described.context_limit) == (logits_of("llama"), 16_384)
    assert described.eos_token_ids == (2,)
    assert (described.dtype, described.kv_dtype, described.device) == ("float32", "float32", "cpu")
    assert (described.runtime, described.memory, described.quantize) == ("mlx", "unified", "none")
    assert described.parameters == sum(_sizes(make_mlx_model("llama").parameters()))
    # K and V of 3 layers with 4 heads of 16 floats
    assert described.families == (FullAttention(layers=3, bytes_per_token=2 * 3 * 4 * 16 * 4),)
    assert load(llama, served_name="mine").description.name == "mine"


def _sizes(tree: Any) -> list[int]:
    if isinstance(tree, mx.array):
        return [tree.size]
    return [size for child in (tree.values() if isinstance(tree, dict) else tree) for size in _sizes(child)]


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit", "mixed"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "mamba2", "deepseek_v3", "llama4"])
def test_logits_are_those_of_mlx_lm(tmp_path: Path, kind: str, quantization: Quantization | None) -> None:
    save_mlx_checkpoint(tmp_path, kind, quantization=quantization)
    tokens = np.arange(3, 40, dtype=np.int32)
    ours, own = scored(load(tmp_path), tokens), own_logits(load_by_mlx_lm(tmp_path)[0], tokens)
    assert np.abs(ours - own).max() / own.std() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_the_selected_runtime_loads_each_kind(tmp_path: Path, kind: str) -> None:
    config = ModelConfig(str(save_mlx_checkpoint(tmp_path, kind)), runtime="mlx")
    select.check_architecture(config, tmp_path)
    assert select.load_model(config).description.runtime == "mlx"


def test_progress_ends_every_stage(llama: Path) -> None:
    stages: dict[str, float] = {}
    load_model(ModelConfig(str(llama)), lambda stage, done: stages.update({stage: done}))
    assert stages == {"load": 1.0, "hash": 1.0, "check": 1.0}


# ---- dtypes and quantization


@pytest.mark.parametrize(
    ("stored", "asked", "found"),
    [
        (mx.float32, "auto", "float32"),
        (mx.bfloat16, "auto", "float32"),  # a CPU emulates bfloat16
        (mx.bfloat16, "bfloat16", "bfloat16"),
        (mx.bfloat16, "float16", "float16"),
        (mx.float32, "bfloat16", "bfloat16"),
    ],
)
@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_the_dtype(
    tmp_path: Path, quantization: Quantization | None, stored: mx.Dtype, asked: str, found: str
) -> None:
    save_mlx_checkpoint(tmp_path, "llama", quantization=quantization, dtype=stored)
    described = load(tmp_path, dtype=asked).description
    assert (described.dtype, described.kv_dtype) == (found, found)


def test_a_gpu_computes_in_the_dtype_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_by_mlx_lm(save_mlx_checkpoint(tmp_path, "llama", dtype=mx.bfloat16))[0]
    assert loader._resolve_dtype("auto", model) == mx.float32
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert loader._resolve_dtype("auto", model) == mx.bfloat16
    assert loader._resolve_dtype("float16", model) == mx.float16


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_weights_are_quantized_at_load(llama: Path, quantize: str) -> None:
    plain, rounded = load(llama), load(llama, quantize=quantize)
    assert rounded.description.quantize == quantize
    assert rounded.description.execution_mode == "batched"
    assert rounded.description.namespace() != plain.description.namespace()
    tokens = np.arange(3, 40, dtype=np.int32)
    apart = np.abs(scored(rounded, tokens) - scored(plain, tokens)).max()
    assert apart > 1e-3


def test_weights_that_are_quantized_already(tmp_path: Path) -> None:
    save_mlx_checkpoint(tmp_path, "llama", quantization="4bit")
    with pytest.raises(
        InvalidOption, match=r"--quantize is 'int8', but must be none: .* are quantized already"
    ):
        load(tmp_path, quantize="int8")


def test_rows_in_int8(llama: Path) -> None:
    plain, rounded = load(llama).description, load(llama, kv_dtype="int8").description
    assert rounded.kv_dtype == "int8"
    assert rounded.layout != plain.layout
    assert rounded.families[0] != plain.families[0]


@pytest.mark.parametrize(("kind", "kept"), [("mamba2", "no K and V"), ("deepseek_v3", "latents")])
def test_rows_in_int8_of_a_model_without_k_and_v(tmp_path: Path, kind: str, kept: str) -> None:
    with pytest.raises(InvalidOption, match=rf"--kv-dtype is 'int8', but must be auto: .* keeps {kept}"):
        load(save_mlx_checkpoint(tmp_path, kind), kv_dtype="int8")


# ---- names


def test_rows_of_unlike_models_and_runtimes_never_share_a_name(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = load(llama).description.namespace()
    assert load(llama).description.namespace() == namespace
    assert load_by_torch(ModelConfig(str(llama), dtype="float32")).description.namespace() != namespace
    assert load(llama, dtype="bfloat16").description.namespace() != namespace
    other = save_mlx_checkpoint(tmp_path / "other", "llama", seed=1)
    assert load(other).description.namespace() != namespace
    monkeypatch.setattr(loader, "version", lambda package: "0.99")
    assert load(llama).description.namespace() != namespace


# ---- options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cuda"}, "--device is 'cuda', but must be auto or cpu"),
        ({"device": "mps"}, "--device is 'mps', but must be auto or cpu"),
        ({"threads": 4}, "--threads is 4, but must be omitted"),
        ({"trust_remote_code": True}, "--trust-remote-code is True, but must be omitted"),
        ({"cuda_graphs": True}, "--cuda-graphs is True, but must be omitted"),
        ({"attention": "torch"}, "--attention is 'torch', but must be auto"),
        ({"state_dtype": "bfloat16"}, "--state-dtype is 'bfloat16', but must be auto"),
    ],
)
def test_options_that_mlx_does_not_have(llama: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        load(llama, **options)


def test_a_host_tier_in_the_memory_of_the_pools(llama: Path) -> None:
    with pytest.raises(InvalidOption, match=r"--host-budget is .*unified memory"):
        load_model(ModelConfig(str(llama)), demands=Demands(host_bytes=GIB))


def test_more_context_than_the_model_was_made_for(llama: Path) -> None:
    with pytest.raises(InvalidOption, match="--context-limit is '16,385', but must be at most 16,384"):
        load_model(ModelConfig(str(llama)), demands=Demands(context_limit=16_385))


def test_the_cpu_can_be_asked_for(llama: Path) -> None:
    assert load(llama, device="cpu").description.device == "cpu"


# ---- memory


@pytest.mark.parametrize(
    ("options", "weights"),
    [({}, 188_864 * 4), ({"dtype": "bfloat16"}, 188_864 * 2), ({"quantize": "int8"}, 188_864 * 9 // 8)],
)
def test_weights_beyond_the_free_memory_are_refused_before_they_are_read(
    llama: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], weights: int
) -> None:
    monkeypatch.setattr(loader, "evaluate_weights", lambda *args: pytest.fail("read"))
    monkeypatch.setattr(loader, "free_bytes", lambda: 100_000)
    with pytest.raises(ModelTooLarge, match="of the unified memory is free") as refusal:
        load(llama, **options)
    assert refusal.value.weights_bytes == pytest.approx(weights, rel=0.02)


def test_a_kv_cache_beyond_the_free_memory(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "free_bytes", lambda: 10 * MIB)
    with pytest.raises(MemoryLacks, match=r"--kv-budget is '10.0 MiB', but must be at most"):
        load_model(ModelConfig(str(llama)), demands=Demands(pool_bytes=10 * MIB))


def test_adapters_count_with_the_weights(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "free_bytes", lambda: 10 * MIB)
    with pytest.raises(ModelTooLarge, match=r"with 12.0 MiB of LoRA adapters"):
        load_model(ModelConfig(str(llama)), demands=Demands(adapter_weights=3 * MIB))


def test_the_check_of_memory_can_be_left_out(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "free_bytes", lambda: 0)
    load(llama, memory_check=False)


# ---- checkpoints that cannot be served


def test_nothing_at_the_path(tmp_path: Path) -> None:
    with pytest.raises(ModelPathNotFound):
        load(tmp_path / "missing")


def test_a_checkpoint_without_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelWeightsMissing):
        load(copy)


def test_a_configuration_that_is_no_json(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelFileInvalid, match="it is not JSON"):
        load(copy)


def test_a_forward_that_fails_is_told_by_its_error(tmp_path: Path) -> None:
    """MLX has no experts in bfloat16 on a CPU."""
    save_mlx_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(ModelUnsupported, match=r"a forward fails: .*GatherMM.* only supports float32"):
        load(tmp_path, dtype="bfloat16")


def test_a_cache_that_this_version_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models import llama as architecture
    from mlx_lm.models.cache import RotatingKVCache

    monkeypatch.setattr(
        architecture.Model,
        "make_cache",
        lambda self: [RotatingKVCache(8, keep=4) for _ in self.layers],
        raising=False,
    )
    with pytest.raises(ModelUnsupported, match="it keeps the first 4 positions beside a window"):
        load(save_mlx_checkpoint(tmp_path, "llama"))


def test_the_configuration_itself_is_part_of_the_fingerprint(copy: Path) -> None:
    before = load(copy).description.weights_fingerprint
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 20_000.0}))
    assert load(copy).description.weights_fingerprint != before


# ---- the kernel


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
def test_a_model_on_the_kernel(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = PagedKernel(Emulation(tmp_path), Occupancy(threadgroups=100, least_split=16))
    monkeypatch.setattr(loader, "_metal_kernel", lambda: kernel)
    tried: list[LayerUse] = []
    monkeypatch.setattr(loader, "why_not", lambda kernel, uses: tried.extend(uses))
    runtime = load(llama)
    assert {use.block_size for use in tried} == {BLOCK_SIZE, CacheConfig().block_size}
    assert runtime.description.mode_reason == ""
    tokens = np.arange(3, 15, dtype=np.int32)
    ours, own = scored(runtime, tokens), own_logits(load_by_mlx_lm(llama)[0], tokens)
    assert runtime.stats.attentions_by_kernel > 0
    assert np.abs(ours - own).max() / own.std() < 1e-4


def test_a_kernel_that_fails_its_trial_is_left_out(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cannot_compile(*source: Any) -> Any:
        def call(**arguments: Any) -> Any:
            raise RuntimeError("[metal::Device] Unable to build metal library from source")

        return call

    monkeypatch.setattr(loader, "_metal_kernel", lambda: PagedKernel(cannot_compile))
    described = load(llama).description
    assert described.execution_mode == "batched"
    assert "Unable to build metal library" in described.mode_reason
    assert "without the Metal kernel" in caplog.text


def test_no_kernel_without_metal() -> None:
    assert (loader._metal_kernel() is None) is not mx.metal.is_available()
