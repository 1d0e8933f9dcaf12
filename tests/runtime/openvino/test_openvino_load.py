"""Loads of exported graphs: options, dtypes, damaged and foreign files, and the choice of the runtime."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asking import greedy
from rootstock.config import AdapterConfig, CacheConfig, EngineConfig, ModelConfig, TierConfig
from rootstock.engine.build import assemble
from rootstock.engine.request import Event, Finished, TokenEvent
from rootstock.errors import (
    AdapterUnusable,
    BudgetTooSmall,
    InvalidOption,
    ModelError,
    ModelFileInvalid,
    ModelTooLarge,
    ModelUnsupported,
    ModelWeightsMissing,
    SelfCheckFailed,
)
from rootstock.runtime import select, trial
from rootstock.runtime.memory_fit import Demands
from rootstock.runtime.model_files import names_here
from rootstock.runtime.openvino import load
from rootstock.runtime.select import choose_runtime
from rootstock.testing.byte_tokenizer import ByteTokenizer

Unpack = Callable[[str], Path]

needs_bfloat16 = pytest.mark.skipif(
    load.native_dtype() != "bfloat16", reason="OpenVINO computes in float32 on this processor"
)


@pytest.fixture
def copied(exported: Unpack, tmp_path: Path) -> Path:
    """An export that a test may damage."""
    return shutil.copytree(exported("llama"), tmp_path / "llama")


def config(directory: Path, **options: Any) -> ModelConfig:
    return ModelConfig(str(directory), **{"runtime": "openvino", "dtype": "float32"} | options)


@pytest.mark.parametrize(("kv_dtype", "stored"), [("auto", "float32"), ("int8", "uint8")])
def test_the_description_comes_from_the_graph_and_its_configuration(
    exported: Unpack, kv_dtype: str, stored: str
) -> None:
    described = load.load_model(config(exported("llama"), kv_dtype=kv_dtype)).description
    assert described.architecture == "LlamaForCausalLM"
    assert (described.vocab_size, described.context_limit, described.eos_token_ids) == (96, 256, (2,))
    assert (described.runtime, described.block_size, described.memory) == ("openvino", 32, "host")
    assert (described.dtype, described.kv_dtype) == ("float32", stored)
    assert 15_000 < described.parameters < 25_000


def test_the_context_limit_is_found_under_other_names(copied: Path) -> None:
    """GPT-2 calls it n_positions. Without it a prompt would reach positions that the graph's table does not have."""
    file = copied / "config.json"
    fields = json.loads(file.read_text())
    fields["n_positions"] = fields.pop("max_position_embeddings") // 2
    file.write_text(json.dumps(fields))
    assert load.load_model(config(copied)).description.context_limit == 128


@needs_bfloat16
def test_bfloat16_passes_its_self_check(exported: Unpack) -> None:
    described = load.load_model(config(exported("llama"), dtype="bfloat16")).description
    assert described.kv_dtype == "bfloat16"


def test_namespaces_differ_by_dtype_and_by_the_pools_layout(exported: Unpack) -> None:
    options: list[dict[str, str]] = [{}, {"kv_dtype": "int8"}]
    if load.native_dtype() == "bfloat16":
        options.append({"dtype": "bfloat16"})
    spaces = {load.load_model(config(exported("llama"), **one)).description.namespace() for one in options}
    assert len(spaces) == len(options)


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("--device", {"device": "cuda"}),
        ("--dtype", {"dtype": "float16"}),
        ("--quantize", {"quantize": "int4"}),
        ("--attention", {"attention": "torch"}),
        ("--state-dtype", {"state_dtype": "bfloat16"}),
        ("--cuda-graphs", {"cuda_graphs": True}),
        ("--trust-remote-code", {"trust_remote_code": True}),
        ("--adapter", {"adapters": (AdapterConfig("a", Path("b")),)}),
    ],
)
def test_options_of_other_runtimes_are_refused(
    exported: Unpack, option: str, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidOption) as refused:
        load.load_model(config(exported("llama"), **options))
    assert refused.value.option == option


@pytest.mark.parametrize(
    ("error", "demands"),
    [
        (InvalidOption, Demands(block_size=16)),
        (InvalidOption, Demands(context_limit=257)),
        (BudgetTooSmall, Demands(kv_budget=1000)),
    ],
)
def test_demands_that_cannot_be_met_are_refused(
    exported: Unpack, error: type[Exception], demands: Demands
) -> None:
    with pytest.raises(error):
        load.load_model(config(exported("llama")), demands=demands)


def _without_weights(folder: Path) -> None:
    (folder / "openvino_model.bin").unlink()


def _with_half_of_its_weights(folder: Path) -> None:
    weights = folder / "openvino_model.bin"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def _with_a_pointer_as_weights(folder: Path) -> None:
    (folder / "openvino_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def _with_a_pointer_as_graph(folder: Path) -> None:
    (folder / "openvino_model.xml").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def _with_a_huge_graph(folder: Path) -> None:
    with (folder / "openvino_model.xml").open("r+b") as file:
        file.truncate((64 << 20) + 1)


def _with_half_of_its_graph(folder: Path) -> None:
    graph = folder / "openvino_model.xml"
    graph.write_text(graph.read_text()[: graph.stat().st_size // 2])


def _with_no_graph_inside(folder: Path) -> None:
    (folder / "openvino_model.xml").write_text("<net></net>")


def _with_an_input_named_as_a_pool(folder: Path) -> None:
    graph = folder / "openvino_model.xml"
    graph.write_text(graph.read_text().replace('name="position_ids" type', 'name="key_cache.99" type'))


def _with_embeddings_as_input(folder: Path) -> None:
    graph = folder / "openvino_model.xml"
    graph.write_text(graph.read_text().replace("beam_idx", "inputs_embeds"))


def _with_a_second_input(folder: Path) -> None:
    graph = folder / "openvino_model.xml"
    graph.write_text(graph.read_text().replace("position_ids", "token_type_ids"))


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (_without_weights, ModelWeightsMissing, "there is no openvino_model.bin"),
        (
            _with_a_pointer_as_weights,
            ModelWeightsMissing,
            "model.bin is a pointer of Git LFS .* 'git lfs pull'",
        ),
        (_with_a_pointer_as_graph, ModelWeightsMissing, "model.xml is a pointer of Git LFS"),
        (_with_a_huge_graph, ModelFileInvalid, "it is larger than 64.0 MiB"),
        (_with_half_of_its_weights, ModelError, "OpenVINO"),
        (_with_half_of_its_graph, ModelUnsupported, "OpenVINO refuses its graph"),
        (_with_no_graph_inside, ModelUnsupported, "OpenVINO|graph"),
        (_with_embeddings_as_input, ModelUnsupported, "text-generation-with-past"),
        (_with_an_input_named_as_a_pool, ModelUnsupported, "key_cache.99"),
        (_with_a_second_input, ModelUnsupported, "token_type_ids"),
    ],
)
def test_files_that_are_no_whole_graph_are_refused(
    copied: Path, damage: Callable[[Path], None], error: type[ModelError], said: str
) -> None:
    damage(copied)
    with pytest.raises(error, match=said):
        load.load_model(config(copied))


def test_a_paged_graph_that_computes_something_else_is_refused(
    exported: Unpack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the runtime reads blocks of another sequence."""
    monkeypatch.setattr(
        "rootstock.runtime.openvino.runner.OpenVinoRuntime._table_of",
        lambda self, segment, family: segment.tables[family][::-1].astype(np.int32),
    )
    with pytest.raises(SelfCheckFailed):
        load.load_model(config(exported("llama")))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_bfloat16)])
def test_a_model_whose_load_does_not_fit_is_refused(
    exported: Unpack, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Two graphs with weights in the dtype, and the logits of the self-check."""
    parameters = load.load_model(config(exported("llama"), dtype=dtype)).description.parameters
    logits = load._CHECKED_ROWS * 96 * 4
    needed = 2 * parameters * (4 if dtype == "float32" else 2) + logits
    monkeypatch.setattr(load, "free_host_bytes", lambda: needed - 1)
    with pytest.raises(ModelTooLarge):
        load.load_model(config(exported("llama"), dtype=dtype))
    load.load_model(config(exported("llama"), dtype=dtype, memory_check=False))
    monkeypatch.setattr(load, "free_host_bytes", lambda: needed)
    load.load_model(config(exported("llama"), dtype=dtype))


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError(),
        RuntimeError("Check 'ptr' failed at cpu_memory.cpp:\nFailed to allocate 308480 bytes of memory"),
        RuntimeError("Can not create file mapping for 5, err=Cannot allocate memory"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_memory_that_the_system_does_not_grant_is_an_error_of_the_model(
    exported: Unpack, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def without_memory(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(load, "check", without_memory)
    with pytest.raises(ModelTooLarge, match="which the system did not grant"):
        load.load_model(config(exported("llama")))


def test_the_noise_has_two_samples_at_a_time(exported: Unpack) -> None:
    """And what their comparison needs: a vocabulary of 262,144 takes 253 MB for each."""
    own = load.exported_model(config(exported("llama")), exported("llama"), load.native_dtype())
    tokens = 3 + np.arange(241, dtype=np.int32) % 93
    for measure in (trial.largest_difference, trial.relative_error):
        tracemalloc.start()
        own.noise(tokens, measure)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5.5 * 241 * 96 * 4


def test_bfloat16_is_refused_on_a_processor_without_it(
    exported: Unpack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "native_dtype", lambda: "float32")
    with pytest.raises(InvalidOption, match=r"--dtype .* OpenVINO computes in float32 on this processor"):
        load.load_model(config(exported("llama"), dtype="bfloat16"))


@needs_bfloat16
def test_a_dtype_that_the_device_does_not_take_is_refused(
    exported: Unpack, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load._settings
    monkeypatch.setattr(
        load,
        "_settings",
        lambda *given: settings(*given) | {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    )
    with pytest.raises(InvalidOption, match=r"--dtype .* OpenVINO computes in float32 on this processor"):
        load.load_model(config(exported("llama"), dtype="bfloat16"))


def test_adapters_are_refused(exported: Unpack) -> None:
    class Source:
        name = "mine"

    with pytest.raises(AdapterUnusable, match="merge it into the model"):
        load.load_model(config(exported("llama"))).load_adapter(Source())  # type: ignore[arg-type]


def test_auto_takes_the_runtime_for_a_directory_with_a_graph(
    exported: Unpack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = names_here(str(exported("llama")))
    assert choose_runtime("auto", names=names).runtime == "openvino"
    assert choose_runtime("auto", "cuda", names).runtime != "openvino"
    assert choose_runtime("torch", names=names).runtime == "torch"
    assert choose_runtime("auto", names=names_here(str(tmp_path))).runtime != "openvino"
    monkeypatch.setattr(select, "is_installed", lambda runtime: runtime != "openvino")
    assert choose_runtime("auto", names=names).runtime != "openvino"
    with pytest.raises(InvalidOption, match=r"rootstock\[openvino\]"):
        choose_runtime("openvino", names=names)


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "qwen3_next"])
def test_an_engine_answers_as_without_a_cache_and_restores_from_disk(
    exported: Unpack, tmp_path: Path, architecture: str
) -> None:
    random = np.random.default_rng(0)
    system = random.integers(3, 96, 70)
    prompts = [np.concatenate((system, random.integers(3, 96, 30))).astype(np.int32) for _ in range(3)]
    tier = TierConfig(disk_dir=tmp_path)
    cold, _ = _answers(exported(architecture), prompts, CacheConfig(enabled=False), TierConfig())
    first, found = _answers(exported(architecture), prompts, CacheConfig(), tier)
    again, restored = _answers(exported(architecture), prompts, CacheConfig(), tier)
    assert first == again == cold
    assert found > 0
    assert restored > found


def _answers(
    directory: Path, prompts: list[Any], cache: CacheConfig, tier: TierConfig
) -> tuple[list[list[int]], int]:
    """Returns the answers of an engine to prompts one after the other, and how many tokens it found."""
    options = EngineConfig(idle_work=False, memory_limit_bytes=0)
    cache = CacheConfig(enabled=cache.enabled, budget_bytes=1 << 24)
    made = assemble(load.load_model(config(directory)), ByteTokenizer(), cache, options, tier)
    answers, found = [], 0
    for prompt in prompts:
        events: list[Event] = []
        made.engine.submit(greedy(prompt, 12), events.append)
        while made.engine.step():
            pass
        assert isinstance(events[-1], Finished), events[-1]
        answers.append([event.token for event in events if isinstance(event, TokenEvent)])
        found += events[-1].usage.cached_tokens
    made.engine.stop()
    return answers, found
