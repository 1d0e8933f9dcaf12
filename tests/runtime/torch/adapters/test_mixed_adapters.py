"""LoRA adapters of a loaded model: a batch of several adapters and the base has the logits of merged weights."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoints import VOCAB, save, saved
from lora import PREFIX, linears_of, merge, save_adapter
from rootstock.cache.types import SlotId, Tokens
from rootstock.errors import AdapterUnusable
from rootstock.runtime.adapter_files import read_adapter
from rootstock.runtime.base import Batch, LoadedAdapter, Logits, Segment
from rootstock.runtime.torch import memory_fit
from rootstock.runtime.torch.adapters import adapters
from rootstock.runtime.torch.runner import TorchRuntime
from twins.driving import allocate, random_tokens
from twins.torch_models import load

BLOCKS_EACH = 4
LENGTHS = (17, 9, 21, 12, 5)
TOLERANCE = 1e-3  # of the standard deviation of the logits


def own_model(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def add(runtime: TorchRuntime, directory: Path) -> LoadedAdapter:
    return runtime.load_adapter(read_adapter(directory.name, directory))


def mixed(runtime: TorchRuntime, prompts: Sequence[Tokens], adapters: Sequence[str]) -> list[list[Logits]]:
    """Computes prompts side by side: a first chunk of different lengths, then a decode of each. Returns the logits of
    each prompt's last two rows: of the chunk the last row alone has logits."""
    families = len(runtime.description.families)
    steps: list[list[Logits]] = [[] for _ in prompts]
    for begin, end in ((0, -1), (-1, None)):
        segments = []
        for number, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
            table = np.arange(number * BLOCKS_EACH, (number + 1) * BLOCKS_EACH, dtype=np.int32)
            past = 0 if begin == 0 else len(prompt) - 1
            tables = (table,) * families
            segments.append(Segment(prompt[begin:end], past, tables, 1, SlotId(number), adapter))
        for row, logits in enumerate(runtime.forward(Batch(segments))):
            steps[row].append(logits)
    return steps


def assert_own(steps: list[Logits], model: Any, prompt: Tokens) -> None:
    with torch.inference_mode():
        own = (
            model(torch.from_numpy(prompt.astype(np.int64))[None], use_cache=False).logits[0].float().numpy()
        )
    for logits, expected in zip(steps, own[-2:], strict=True):
        assert float(np.abs(logits - expected).max()) <= TOLERANCE * float(own.std())


@pytest.mark.parametrize(
    ("model_type", "batching"),
    [
        ("llama", "mixed"),  # fused layers, products of several linear layers
        ("gpt2", "mixed"),  # Conv1D
        ("qwen3_next", "mixed"),  # recurrent mixers, which run parts of the step, and experts
        ("gemma2", "mixed"),  # windows
        ("deepseek_v3", "apart"),  # latents, which attention expands with a weight that it reads itself
        ("bloom", "apart"),  # one sequence per forward
        ("falcon", "apart"),  # the same, and a linear layer of a class of its own
    ],
)
@pytest.mark.behaviour(9)
def test_a_batch_of_adapters_and_the_base(tmp_path: Path, model_type: str, batching: str) -> None:
    runtime = load(saved(model_type))
    allocate(runtime)
    base = own_model(saved(model_type))
    names = linears_of(base)
    made = [
        save_adapter(tmp_path / "a", base, names, seed=1, size=0.08),
        save_adapter(tmp_path / "b", base, names[::2], seed=2, rank=3, size=0.08, use_rslora=True),
    ]
    loaded = [add(runtime, directory) for directory in made]
    assert loaded[0].batching == batching
    assert [one.modules for one in loaded] == [len(names), len(names[::2])]
    a, b = (one.fingerprint for one in loaded)
    order = ["", a, b, a, ""]
    prompts = [random_tokens(VOCAB, length, length) for length in LENGTHS]
    computed = mixed(runtime, prompts, order)
    models = {"": base} | {
        one.fingerprint: merge(own_model(saved(model_type)), directory)
        for one, directory in zip(loaded, made, strict=True)
    }
    for steps, prompt, adapter in zip(computed, prompts, order, strict=True):
        assert_own(steps, models[adapter], prompt)
    runtime.unload_adapter(a)
    runtime.unload_adapter(b)
    for steps, prompt in zip(mixed(runtime, prompts, [""] * len(prompts)), prompts, strict=True):
        assert_own(steps, base, prompt)


@pytest.mark.parametrize("how", ["dora", "embedding", "saved head", "bias", "bias of B", "patterns"])
def test_ways_to_change_a_module(tmp_path: Path, how: str) -> None:
    base = own_model(saved("qwen2"))
    names, fields, extra = linears_of(base), dict[str, Any](), dict[str, torch.Tensor]()
    random = torch.Generator().manual_seed(5)
    query = "model.layers.1.self_attn.q_proj"
    match how:
        case "dora":
            fields["use_dora"] = True
        case "embedding":
            names = ["model.embed_tokens", *names]
        case "saved head":
            fields["modules_to_save"] = ["lm_head"]
            extra[f"{PREFIX}lm_head.weight"] = torch.randn(VOCAB, 64, generator=random) * 0.3
        case "bias":
            fields["bias"] = "lora_only"
            extra[f"{PREFIX}{query}.base_layer.bias"] = torch.randn(64, generator=random)
        case "bias of B":
            fields["lora_bias"] = True
            extra[f"{PREFIX}{query}.lora_B.bias"] = torch.randn(64, generator=random)
        case "patterns":
            fields |= {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"down_proj": 3}}
    made = save_adapter(tmp_path / "a", base, names, size=0.08, extra=extra, **fields)
    runtime = load(saved("qwen2"))
    allocate(runtime)
    adapter = add(runtime, made)
    assert adapter.batching == "mixed"
    prompts = [random_tokens(VOCAB, length, length) for length in LENGTHS]
    order = ["", adapter.fingerprint, adapter.fingerprint, "", adapter.fingerprint]
    merged = merge(own_model(saved("qwen2")), made)
    for steps, prompt, chosen in zip(mixed(runtime, prompts, order), prompts, order, strict=True):
        assert_own(steps, merged if chosen else base, prompt)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"quantize": "int8"},
        {"quantize": "int4"},
        {"quantize": "int8", "dtype": "bfloat16"},
    ],
)
def test_packed_and_quantized_bases(tmp_path: Path, options: dict[str, Any]) -> None:
    """The check at load compares with the weights that the base multiplies with, unpacked and dequantized."""
    save(tmp_path / "m", "llama", hidden_size=128, intermediate_size=192)
    base = own_model(tmp_path / "m")
    runtime = load(tmp_path / "m", **options)
    allocate(runtime)
    plain = add(runtime, save_adapter(tmp_path / "a", base, linears_of(base), size=0.05))
    dora = add(runtime, save_adapter(tmp_path / "b", base, linears_of(base), size=0.05, use_dora=True))
    assert plain.batching == dora.batching == "mixed"
    prompts = [random_tokens(VOCAB, 20, 3)] * 3
    without, with_plain, with_dora = mixed(runtime, prompts, ["", plain.fingerprint, dora.fingerprint])
    for changed in (with_plain, with_dora):
        assert float(np.abs(changed[1] - without[1]).max()) > 0.05 * float(without[1].std())


def test_the_base_is_computed_by_its_own_code_without_adapters(tmp_path: Path) -> None:
    base = own_model(saved("llama"))
    runtime = load(saved("llama"))
    model = runtime._model
    before = {name: vars(module).get("forward") for name, module in model.named_modules()}
    adapter = add(runtime, save_adapter(tmp_path / "a", base, linears_of(base)))
    assert {name: vars(module).get("forward") for name, module in model.named_modules()} != before
    runtime.unload_adapter(adapter.fingerprint)
    assert {name: vars(module).get("forward") for name, module in model.named_modules()} == before


def refusal(runtime: TorchRuntime, directory: Path) -> str:
    with pytest.raises(AdapterUnusable) as caught:
        add(runtime, directory)
    assert not any("AdaptedModule" in repr(vars(m).get("forward")) for m in runtime._model.modules())
    return caught.value.message


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    runtime, base = load(saved("llama")), own_model(saved("llama"))
    queries = linears_of(base, "q_proj")
    made = save_adapter(tmp_path / "a", base, queries)
    weights = made / "adapter_model.safetensors"
    tensors = load_file(weights)

    def changed(**more: torch.Tensor) -> Path:
        save_file(tensors | more, weights)
        return made

    a, b = (f"{PREFIX}{queries[0]}.lora_{letter}.weight" for letter in "AB")
    assert "of shape [4, 65]" in refusal(runtime, changed(**{a: torch.zeros(4, 65)}))
    assert "of shape [5, 64]" in refusal(runtime, changed(**{a: torch.zeros(5, 64), b: torch.zeros(64, 5)}))
    assert "not finite" in refusal(runtime, changed(**{a: torch.full((4, 64), float("inf"))}))
    elsewhere = f"{PREFIX}model.layers.9.self_attn.q_proj"
    more = {
        f"{elsewhere}.lora_A.weight": tensors[a].clone(),
        f"{elsewhere}.lora_B.weight": tensors[b].clone(),
    }
    assert "layers.9" in refusal(runtime, changed(**more))
    norm = f"{PREFIX}model.norm"
    more = {f"{norm}.lora_A.weight": torch.zeros(4, 64), f"{norm}.lora_B.weight": torch.zeros(64, 4)}
    assert "LlamaRMSNorm" in refusal(runtime, changed(**more))
    del tensors[b]
    assert "no B" in refusal(runtime, changed())


@pytest.mark.parametrize("shape", [(4, 2**20), (2**20, 4), (4, 2**10, 2**10), (2**22,), (4096, 64), (0, 64)])
def test_a_tensor_of_an_absurd_shape_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    runtime, base = load(saved("llama")), own_model(saved("llama"))
    [query, *_] = linears_of(base, "q_proj")
    made = save_adapter(tmp_path / "a", base, [query])
    name, end = f"{PREFIX}{query}.lora_A.weight", 4 * math.prod(shape)
    header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
    with (made / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)  # a file with a hole: it takes no place on the disk

    def read(*_: object) -> None:
        raise AssertionError("a tensor was read")

    opened = adapters.safe_open

    class WithoutTensors:
        def __init__(self, *given: Any, **options: Any) -> None:
            self._file = opened(*given, **options)

        def __enter__(self) -> WithoutTensors:
            return self

        def __exit__(self, *_: object) -> None: ...

        get_tensor = read

    monkeypatch.setattr(adapters, "safe_open", WithoutTensors)
    assert "of shape" in refusal(runtime, made)


def test_an_adapter_whose_rows_would_be_wrong_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rootstock.runtime.torch.adapters.deltas import LinearDelta

    runtime, base = load(saved("llama")), own_model(saved("llama"))
    monkeypatch.setattr(LinearDelta, "apply", lambda self, x, y: y.mul_(1.01))
    with caplog.at_level(logging.WARNING):
        assert "merged weights" in refusal(runtime, save_adapter(tmp_path / "a", base, linears_of(base)))


def test_files_of_mlx_lm_are_refused(tmp_path: Path) -> None:
    made = tmp_path / "a"
    made.mkdir()
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 2.0}}
    (made / "adapter_config.json").write_text(json.dumps(config))
    query = "model.layers.0.self_attn.q_proj"
    save_file(
        {f"{query}.lora_a": torch.zeros(64, 4), f"{query}.lora_b": torch.zeros(4, 64)},
        made / "adapters.safetensors",
    )
    assert "mlx-lm's format, which only the MLX runtime reads" in refusal(load(saved("llama")), made)


def test_a_router_is_refused_by_its_name(tmp_path: Path) -> None:
    """It is a linear layer by its class, and returns the choice of experts as well."""
    runtime, base = load(saved("phimoe")), own_model(saved("phimoe"))
    routers = [name for name, module in base.named_modules() if "Router" in type(module).__name__]
    message = refusal(runtime, save_adapter(tmp_path / "a", base, routers))
    assert f"{routers[0]} is a PhimoeTopKRouter" in message
    assert "leave it out of target_modules" in message


def test_an_adapter_beyond_the_free_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, base = load(saved("llama")), own_model(saved("llama"))
    made = save_adapter(tmp_path / "a", base, linears_of(base))
    needed = 4 * read_adapter("a", made).weight_count
    monkeypatch.setattr(memory_fit, "free_host_bytes", lambda: needed - 1)
    message = refusal(runtime, made)
    assert "of the main memory is free" in message
    assert "--no-memory-check" in message
    monkeypatch.setattr(memory_fit, "free_host_bytes", lambda: needed)
    add(runtime, made)
