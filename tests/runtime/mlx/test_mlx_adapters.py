"""LoRA adapters on MLX: a batch of several adapters and the base has the logits of weights that mlx-lm merged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from engine.helpers import Bench
from engine.tiered import Tiered
from mlx_checkpoints import Quantization, logits_of, save_mlx_checkpoint
from mlx_lora import (
    greedy,
    merged_by_mlx_lm,
    merged_from_peft,
    own_model,
    save_mlx_adapter,
    save_peft_adapter,
)
from rootstock import LLM, SamplingParams
from rootstock.cache.families import token_families
from rootstock.cache.types import SlotId, Tokens
from rootstock.config import ModelConfig
from rootstock.engine.request import StopParams
from rootstock.errors import AdapterUnusable
from rootstock.runtime.adapter_files import read_adapter
from rootstock.runtime.base import Batch, LoadedAdapter, Logits, Segment
from rootstock.runtime.mlx import adapted_modules, adapters
from rootstock.runtime.mlx import load as loader
from rootstock.runtime.mlx.checkpoint import read_checkpoint
from rootstock.runtime.mlx.load import load_model
from rootstock.runtime.mlx.runner import MlxRuntime
from rootstock.runtime.mlx.self_check import own_logits
from rootstock.runtime.mlx.weights import stored_modules

BLOCK, BLOCKS_EACH = 8, 4
LENGTHS = (17, 9, 21, 12, 5)
TOLERANCE = 1e-3  # of the standard deviation of the logits
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SIZE = 0.08  # of an adapter's weights: the answers differ from the base's, and the logits stay of its size


def prompt_of(length: int, seed: int = 0) -> Tokens:
    return np.random.default_rng((seed, length)).integers(3, 500, length).astype(np.int32)


PROMPTS = [prompt_of(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mlx_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def load(directory: Path, **options: Any) -> MlxRuntime:
    runtime = load_model(ModelConfig(str(directory), **options))
    rows = [len(LENGTHS) * BLOCKS_EACH] * len(runtime.description.families)
    runtime.allocate(rows, BLOCK)
    return runtime


def add(runtime: MlxRuntime, directory: Path) -> LoadedAdapter:
    return runtime.load_adapter(read_adapter(directory.name, directory))


def computed(
    runtime: MlxRuntime, chosen: Sequence[str], prompts: Sequence[Tokens] = PROMPTS
) -> list[list[Logits]]:
    """Computes prompts side by side: a first chunk of different lengths, two rows, and a decode of each. Returns the
    logits of each prompt's last four rows."""
    families = len(token_families(runtime.description.families))
    rows: list[list[Logits]] = [[] for _ in prompts]
    for first, last, kept in ((0, -3, 1), (-3, -1, 2), (-1, None, 1)):
        segments = []
        for number, (prompt, adapter) in enumerate(zip(prompts, chosen, strict=True)):
            table = np.arange(number * BLOCKS_EACH, (number + 1) * BLOCKS_EACH, dtype=np.int32)
            past = len(prompt) + first if first else 0
            segments.append(
                Segment(prompt[first:last], past, (table,) * families, kept, SlotId(number), adapter)
            )
        logits = runtime.forward(Batch(segments)).reshape(len(prompts), kept, -1)
        for row, its in zip(rows, logits, strict=True):
            row.extend(its)
    return rows


def assert_of(model: nn.Module, prompt: Tokens, rows: Sequence[Logits], tolerance: float = TOLERANCE) -> None:
    own = own_logits(model, prompt)
    for ours, expected in zip(rows, own[-len(rows) :], strict=True):
        assert float(np.abs(ours - expected).max()) <= tolerance * float(own.std())


# ---- the same logits as merged weights


@pytest.mark.parametrize(
    ("kind", "keys", "batching"),
    [
        ("llama", None, "mixed"),
        ("qwen3", ["model.embed_tokens", "self_attn.q_proj"], "mixed"),  # its embedding is the head, too
        ("gemma3_text", None, "mixed"),  # windows
        ("qwen3_moe", ["self_attn.q_proj", "mlp.gate"], "mixed"),  # beside experts
        ("qwen3_moe", None, "apart"),  # experts, which get the rows in an order of their own
        ("qwen3_next", ["linear_attn.in_proj_qkvz", "self_attn.v_proj"], "mixed"),  # recurrent states
        ("nemotron_h", None, "mixed"),
        ("deepseek_v3", None, "apart"),  # latents and experts
        ("llama4", None, "apart"),  # one sequence per forward
    ],
)
def test_a_batch_of_adapters_and_the_base(
    tmp_path: Path, kind: str, keys: list[str] | None, batching: str
) -> None:
    checkpoint = save_mlx_checkpoint(tmp_path / "m", kind)
    made = [
        save_mlx_adapter(tmp_path / "a", checkpoint, keys, seed=1, size=SIZE),
        save_mlx_adapter(tmp_path / "b", checkpoint, keys, seed=2, size=SIZE, rank=3, scale=1.5),
    ]
    runtime = load(checkpoint)
    loaded = [add(runtime, directory) for directory in made]
    assert [one.batching for one in loaded] == [batching] * 2
    assert [one.rank for one in loaded] == [4, 3]
    a, b = (one.fingerprint for one in loaded)
    chosen = ["", a, b, a, ""]
    models = {"": own_model(checkpoint)} | {
        one.fingerprint: merged_by_mlx_lm(checkpoint, directory)
        for one, directory in zip(loaded, made, strict=True)
    }
    for rows, prompt, adapter in zip(computed(runtime, chosen), PROMPTS, chosen, strict=True):
        assert_of(models[adapter], prompt, rows)
    assert runtime.pool_copies == 0


@pytest.mark.parametrize("quantization", ["4bit", "8bit", "mixed", "mxfp4"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_quantized_bases_stay_quantized(tmp_path: Path, kind: str, quantization: Quantization) -> None:
    """The reference has dequantized weights, with which mlx-lm merged the adapter."""
    checkpoint = save_mlx_checkpoint(tmp_path / "m", kind, quantization=quantization)
    made = save_mlx_adapter(tmp_path / "a", checkpoint, size=SIZE)
    runtime = load(checkpoint)
    quantized = [m for m in runtime._model.modules() if "scales" in m]
    loaded = add(runtime, made)
    chosen = ["", loaded.fingerprint, "", loaded.fingerprint, loaded.fingerprint]
    base, merged = own_model(checkpoint), merged_by_mlx_lm(checkpoint, made)
    for rows, prompt, adapter in zip(computed(runtime, chosen), PROMPTS, chosen, strict=True):
        assert_of(merged if adapter else base, prompt, rows)
    assert [m for m in runtime._model.modules() if "scales" in m] == quantized


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"quantize": "int8"}])
def test_dtypes(llama: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """The check at load compares within the model's own noise."""
    runtime = load(llama, **options)
    loaded = add(runtime, save_mlx_adapter(tmp_path / "a", llama, size=SIZE))
    assert loaded.batching == "mixed"
    assert loaded.nbytes == read_adapter("a", tmp_path / "a").weight_count * (2 if "dtype" in options else 4)
    prompts = [prompt_of(20)] * 5
    without, with_adapter, *_ = computed(runtime, ["", loaded.fingerprint, "", "", ""], prompts)
    assert float(np.abs(with_adapter[-1] - without[-1]).max()) > 0.05 * float(without[-1].std())


@pytest.mark.parametrize(("fields", "scaling"), [({}, 8 / 4), ({"use_rslora": True}, 8 / 2)])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_files_of_peft(tmp_path: Path, kind: str, fields: dict[str, Any], scaling: float) -> None:
    """The embedding of qwen3 is the head, too, and PEFT adapts the embedding alone."""
    checkpoint = save_mlx_checkpoint(tmp_path / "m", kind)
    names = ["model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj", "model.embed_tokens"]
    made = save_peft_adapter(tmp_path / "a", own_model(checkpoint), names, size=SIZE, **fields)
    runtime = load(checkpoint)
    loaded = add(runtime, made)
    assert (loaded.batching, loaded.modules) == ("mixed", 3)
    chosen = ["", loaded.fingerprint, "", loaded.fingerprint, loaded.fingerprint]
    base, merged = own_model(checkpoint), merged_from_peft(checkpoint, made, scaling)
    for rows, prompt, adapter in zip(computed(runtime, chosen), PROMPTS, chosen, strict=True):
        assert_of(merged if adapter else base, prompt, rows)


def test_modules_of_a_checkpoint_are_found_by_their_weights(tmp_path: Path) -> None:
    """Names of transformers: mlx-lm stacks the weights of experts."""
    checkpoint = save_mlx_checkpoint(tmp_path / "m", "qwen3_moe")
    described, files = read_checkpoint("m", checkpoint), [checkpoint / "model.safetensors"]
    own = stored_modules(described, files)
    assert own == {name: name for name in own}
    tensors: Any = mx.load(str(files[0]))
    mx.eval(tensors)
    for name in [name for name in tensors if ".switch_mlp." in name]:
        for number, weight in enumerate(tensors.pop(name)):
            tensors[name.replace("switch_mlp", f"experts.{number}")] = weight
    mx.save_safetensors(str(files[0]), tensors)
    found = stored_modules(described, files)
    assert found["model.layers.0.mlp.experts.1.up_proj"] is None
    assert found["model.layers.0.mlp.gate"] == "model.layers.0.mlp.gate"
    assert not any("switch_mlp" in name for name in found)


def test_a_model_that_drops_its_head_when_it_is_loaded(tmp_path: Path) -> None:
    """gemma3_text does so if the files have no head, and can do so only once."""
    checkpoint = save_mlx_checkpoint(tmp_path / "m", "gemma3_text")
    weights = checkpoint / "model.safetensors"
    tensors: Any = mx.load(str(weights))
    mx.eval(tensors)
    del tensors["lm_head.weight"]
    mx.save_safetensors(str(weights), tensors)
    query = "model.layers.0.self_attn.q_proj"
    add(load(checkpoint), save_peft_adapter(tmp_path / "a", own_model(checkpoint), [query]))


def test_a_weight_that_mlx_lm_changes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_mlx_checkpoint(tmp_path / "m", "qwen3_moe")
    made = save_peft_adapter(tmp_path / "a", own_model(checkpoint), ["model.layers.0.self_attn.q_proj"])
    runtime = load(checkpoint)
    monkeypatch.setattr(
        type(runtime._model),
        "sanitize",
        lambda self, given: {name: array + 0 for name, array in given.items()},
    )
    said = refusal(runtime, made)
    assert "model.layers.0.self_attn.q_proj has a weight that mlx-lm changes or leaves out" in said


def test_weights_that_mlx_lm_scales_take_no_files_of_peft(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_SCALED_WEIGHTS", ("llama",))
    runtime = load(llama)
    made = save_peft_adapter(tmp_path / "a", own_model(llama), ["model.layers.0.self_attn.q_proj"])
    assert "mlx-lm multiplies the weights of llama by constants" in refusal(runtime, made)
    add(runtime, save_mlx_adapter(tmp_path / "b", llama))


# ---- the base


def classes(runtime: MlxRuntime) -> dict[str, type[nn.Module]]:
    return {name: type(module) for name, module in runtime._model.named_modules()}


def test_the_base_is_computed_as_without_adapters(llama: Path, tmp_path: Path) -> None:
    runtime, alone = load(llama), load(llama)
    before = classes(runtime)
    loaded = [
        add(runtime, save_mlx_adapter(tmp_path / str(seed), llama, size=SIZE, seed=seed)) for seed in (1, 2)
    ]
    assert classes(runtime) != before
    expected = computed(alone, [""] * 5)
    assert np.array_equal(computed(runtime, [""] * 5), expected)
    mixed = computed(runtime, ["", loaded[0].fingerprint, "", loaded[1].fingerprint, ""])
    for row in (0, 2, 4):
        assert np.array_equal(mixed[row], expected[row]), "beside adapters"
    runtime.unload_adapter(loaded[0].fingerprint)
    assert classes(runtime) != before
    again = computed(runtime, ["", "", "", loaded[1].fingerprint, ""])
    assert np.array_equal(again[3], mixed[3])
    runtime.unload_adapter(loaded[1].fingerprint)
    assert classes(runtime) == before
    assert not any("lora_changes" in vars(module) for module in runtime._model.modules())
    assert np.array_equal(computed(runtime, [""] * 5), expected)


def test_an_adapter_that_is_loaded_twice_is_loaded_once(llama: Path, tmp_path: Path) -> None:
    runtime, made = load(llama), save_mlx_adapter(tmp_path / "a", llama)
    assert add(runtime, made) is add(runtime, made)


# ---- the engine


@pytest.mark.behaviour(9)
@pytest.mark.parametrize(
    ("kind", "quantization"),
    [("llama", None), ("llama", "4bit"), ("qwen3_moe", None), ("qwen3_next", None), ("gemma3_text", None)],
)
def test_answers_of_the_engine(tmp_path: Path, kind: str, quantization: Quantization | None) -> None:
    """All requests run at once, cold and then behind their cached prompts."""
    checkpoint = save_mlx_checkpoint(tmp_path / "m", kind, quantization=quantization)
    made = [save_mlx_adapter(tmp_path / name, checkpoint, seed=n, size=SIZE) for n, name in enumerate("ab")]
    bench = Bench(block_size=BLOCK, runtime=load_model(ModelConfig(str(checkpoint))))
    models = {"": own_model(checkpoint)}
    for directory in made:
        fingerprint = bench.engine.load_adapter(directory.name, directory).fingerprint
        models[fingerprint] = merged_by_mlx_lm(checkpoint, directory)
    prompts = PROMPTS[:3]
    answers = {
        (number, adapter): greedy(model, prompt, 6)
        for number, prompt in enumerate(prompts)
        for adapter, model in models.items()
    }
    for number in range(len(prompts)):
        assert len({tuple(answers[number, adapter]) for adapter in models}) == 3, "answers of their own"
    stop = StopParams(max_tokens=6, ignore_eos=True)  # as the reference does
    for turn in range(3):
        clients = {
            (number, adapter): bench.ask(prompts[number], stop=stop, adapter=adapter)
            for number, adapter in answers
        }
        bench.run()
        for key, client in clients.items():
            assert client.tokens == answers[key]
            cached = client.finished.usage.cached_tokens
            assert turn < 2 or cached > 0
            assert turn or cached == 0
    for name in "ab":
        bench.engine.unload_adapter(name)
    bench.run()
    running = bench.ask(prompts[0], 6)
    bench.run(3)
    assert 0 < len(running.tokens) < 6
    again = bench.engine.load_adapter("again", made[1]).fingerprint
    client = bench.answer(prompts[0], 6, adapter=again)
    assert running.tokens == answers[0, ""], "the check at load leaves other requests alone"
    assert client.tokens == answers[0, again]
    assert client.finished.usage.cached_tokens > 0, "its prefixes are found again"


@pytest.mark.behaviour(40)
@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_rows_of_an_adapter_are_never_anothers(tmp_path: Path, kind: str) -> None:
    checkpoint = save_mlx_checkpoint(tmp_path / "m", kind)
    made = [save_mlx_adapter(tmp_path / name, checkpoint, seed=n, size=SIZE) for n, name in enumerate("ab")]
    prompt = [*map(int, prompt_of(40))]
    # A prompt leaves its state where the same prompt resumes: before its last token.
    hit = len(prompt) - (kind == "qwen3_next")
    models = [own_model(checkpoint), *(merged_by_mlx_lm(checkpoint, directory) for directory in made)]
    answers = [greedy(model, [*prompt, 7], 4) for model in models]

    def runtime() -> MlxRuntime:
        return load_model(ModelConfig(str(checkpoint)))

    with Tiered(tmp_path / "tier", block_size=BLOCK, runtime=runtime()) as bench:
        for restart in (False, True):
            if restart:
                bench.restart(runtime=runtime())
            one, other = (bench.engine.load_adapter(path.name, path).fingerprint for path in made)
            if not restart:
                bench.ask(prompt, max_tokens=1, adapter=one)
                bench.run()
                bench.forget()
            for adapter in ("", other, one):
                client = bench.ask([*prompt, 7], max_tokens=4, adapter=adapter)
                bench.run()
                assert client.tokens == answers[("", one, other).index(adapter)]
                cached = client.finished.usage.cached_tokens
                assert restart or cached == (hit if adapter == one else 0), "from the disk"
            assert cached == (len(prompt) if restart else hit), "the longer prompt left one later"
            bench.forget()


# ---- refusals


def refusal(runtime: MlxRuntime, directory: Path) -> str:
    before = classes(runtime)
    with pytest.raises(AdapterUnusable) as caught:
        add(runtime, directory)
    assert classes(runtime) == before
    assert not any(
        {"lora_changes", "lora_merged"} & vars(module).keys() for module in runtime._model.modules()
    )
    return caught.value.message


def edit(directory: Path, **changed: mx.array) -> Path:
    """Adds or replaces tensors. A name has __ for each dot."""
    file = directory / "adapters.safetensors"
    tensors: Any = mx.load(str(file))
    mx.eval(tensors)
    mx.save_safetensors(
        str(file), tensors | {name.replace("__", "."): array for name, array in changed.items()}
    )
    return directory


QUERY = "model__layers__0__self_attn__q_proj"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({f"{QUERY}__lora_a": mx.zeros((65, 4))}, "has A of shape [65, 4] in the adapter, but needs [64, 4]"),
        ({f"{QUERY}__lora_a": mx.zeros((4, 64))}, "of shape [4, 64]"),
        ({f"{QUERY}__lora_a": mx.zeros((64, 5)), f"{QUERY}__lora_b": mx.zeros((5, 64))}, "of shape [64, 5]"),
        ({f"{QUERY}__lora_b": mx.array(float("nan")) * mx.zeros((4, 64))}, "numbers that are not finite"),
        ({f"{QUERY}__m": mx.zeros((64,))}, "has the adapter's magnitude"),
        ({"model__norm__lora_a": mx.zeros((64, 4))}, "model.norm is a RMSNorm"),
        ({"model__layers__9__mlp__up_proj__lora_a": mx.zeros((64, 4))}, "layers.9.mlp.up_proj is no module"),
        ({"model__layers__1__mlp__up_proj__lora_a": mx.zeros((64, 4))}, "has no B in the adapter"),
        ({f"{QUERY}__weight": mx.zeros((64, 64))}, "no tensor of a LoRA in mlx-lm's format"),
        ({f"{QUERY}__lora_a": mx.zeros((64, 4), mx.int32)}, "not floating-point numbers"),
    ],
)
def test_files_that_do_not_fit(llama: Path, tmp_path: Path, changed: dict[str, mx.array], said: str) -> None:
    made = save_mlx_adapter(tmp_path / "a", llama, ["self_attn.q_proj"])
    assert said in refusal(load(llama), edit(made, **changed))


def test_adapters_of_other_kinds(llama: Path, tmp_path: Path) -> None:
    runtime, base = load(llama), own_model(llama)
    dora = save_mlx_adapter(tmp_path / "dora", llama, ["self_attn.q_proj"], kind="dora")
    assert "it uses DoRA" in refusal(runtime, dora)
    peft = save_peft_adapter(tmp_path / "peft", base, ["lm_head"], use_dora=True)
    assert "it uses DoRA" in refusal(runtime, peft)
    biased = save_peft_adapter(tmp_path / "biased", base, ["lm_head"], lora_bias=True)
    tensors: Any = mx.load(str(biased / "adapter_model.safetensors"))
    tensors["base_model.model.lm_head.lora_B.bias"] = mx.zeros((logits_of("llama"),))
    mx.save_safetensors(str(biased / "adapter_model.safetensors"), tensors)
    assert "has the adapter's B.bias, but on the MLX runtime" in refusal(runtime, biased)


def test_experts_take_adapters_of_mlx_lm_alone(tmp_path: Path) -> None:
    checkpoint = save_mlx_checkpoint(tmp_path / "m", "qwen3_moe")
    experts = "model.layers.0.mlp.switch_mlp.up_proj"
    base = own_model(checkpoint)
    made = save_peft_adapter(tmp_path / "a", base, ["lm_head"])
    weights = made / "adapter_model.safetensors"
    tensors: Any = mx.load(str(weights))
    mx.eval(tensors)
    mx.save_safetensors(
        str(weights), {name.replace("lm_head", experts): array for name, array in tensors.items()}
    )
    assert "a SwitchLinear is changed by adapters of mlx-lm alone" in refusal(load(checkpoint), made)


def test_a_weight_that_other_code_reads(llama: Path, tmp_path: Path) -> None:
    """An adapter would not change what that code computes."""
    runtime = load(llama)
    own = type(runtime._model)

    class Reads(own):  # type: ignore[misc, valid-type]
        def __call__(self, *arguments: Any, **options: Any) -> mx.array:
            used = self.model.layers[0].self_attn.q_proj.weight.sum()
            return own.__call__(self, *arguments, **options) + 0 * used

    runtime._model.__class__ = Reads
    assert "reads itself, past the layer" in refusal(runtime, save_mlx_adapter(tmp_path / "a", llama))


def test_a_module_that_two_layers_share(llama: Path, tmp_path: Path) -> None:
    runtime = load(llama)
    assert runtime._adapters is not None
    named = runtime._adapters._named
    named["model.layers.1.self_attn.q_proj"] = named["model.layers.0.self_attn.q_proj"]
    made = save_mlx_adapter(tmp_path / "a", llama, ["self_attn.q_proj"])
    assert "layers.1.self_attn.q_proj is a module that the adapter changes twice" in refusal(runtime, made)


def test_code_that_is_compiled(llama: Path, tmp_path: Path) -> None:
    runtime = load(llama)
    block = runtime._model.layers[0]
    block.compiled = mx.compile(lambda x: block(x))
    assert "mlx-lm compiles the code of TransformerBlock" in refusal(
        runtime, save_mlx_adapter(tmp_path / "a", llama)
    )


def test_an_adapter_whose_rows_would_be_wrong(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, made = load(llama), save_mlx_adapter(tmp_path / "a", llama)
    own = adapted_modules._of_linear
    monkeypatch.setitem(adapted_modules._CHANGES, "linear", lambda delta, x: 1.01 * own(delta, x))
    with caplog.at_level(logging.WARNING):
        assert "its answers would not be those of the merged weights" in refusal(runtime, made)


def test_rows_of_other_sequences_are_found(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An adapter that is right for whole calls only has calls of its own."""
    runtime, made = load(llama), save_mlx_adapter(tmp_path / "a", llama)
    own = adapted_modules.MlxAdapterRows.of

    def reversed_rows(self: Any, segments: Sequence[Segment], tokens: int) -> Any:
        return own(self, segments[::-1], tokens)

    monkeypatch.setattr(adapted_modules.MlxAdapterRows, "of", reversed_rows)
    assert add(runtime, made).batching == "apart"
    assert "Requests of adapter a have forwards of their own" in caplog.text


def test_an_adapter_beyond_the_free_memory(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, made = load(llama), save_mlx_adapter(tmp_path / "a", llama)
    needed = 4 * read_adapter("a", made).weight_count
    monkeypatch.setattr(loader, "free_bytes", lambda: needed - 1)
    assert "of the unified memory is free" in refusal(runtime, made)
    monkeypatch.setattr(loader, "free_bytes", lambda: needed)
    assert add(runtime, made).nbytes == needed


def test_a_file_that_is_changed_while_it_is_read(llama: Path, tmp_path: Path) -> None:
    runtime, made = load(llama), save_mlx_adapter(tmp_path / "a", llama)
    source = read_adapter("a", made)
    edit(made, **{f"{QUERY}__lora_a": mx.ones((64, 4))})
    with pytest.raises(AdapterUnusable, match="changed while"):
        runtime.load_adapter(source)


# ---- the library


def test_a_call_of_the_library_chooses_an_adapter(llama: Path, tmp_path: Path) -> None:
    made = save_mlx_adapter(tmp_path / "a", llama, size=SIZE)
    prompt = prompt_of(24)
    with LLM(str(llama), runtime="mlx", budget_bytes="8MiB", adapters={"mine": made}) as llm:
        for adapter, model in ((None, own_model(llama)), ("mine", merged_by_mlx_lm(llama, made))):
            answer = llm.generate(prompt, GREEDY, adapter=adapter)[0]
            assert list(answer.outputs[0].token_ids) == greedy(model, prompt, 8)
