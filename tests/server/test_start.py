"""Errors that stop the start of a server: one line with the fault and the remedy, before weights are read."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import tiny_model
from lora import linears_of, save_adapter
from rootstock.cli import main as command
from rootstock.config import AdapterConfig, CacheConfig, ModelConfig
from rootstock.engine.build import build_engine
from rootstock.errors import InvalidOption, ModelTooLarge, ModelWeightsMissing
from rootstock.runtime.adapter_files import count_weights
from rootstock.runtime.model_files import StoredTensor, stored_tensors, weight_files
from rootstock.runtime.torch import memory_fit, runner
from rootstock.units import in_units

Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Serves a model, and returns the line of the refusal. Fails if weights were read before."""

    def read_weights(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are read")

    def serve(model: Path | str, *options: str, reads_weights: bool = False) -> str:
        if not reads_weights:
            monkeypatch.setattr(runner, "read_weights", read_weights)
        monkeypatch.setattr(sys, "argv", ["rootstock", "serve", str(model), "--port", "0", *options])
        with pytest.raises(SystemExit) as ended:
            command.main()
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, ""), err
        stages = {f"rootstock: {words}" for words in command.LoadProgress.STAGES.values()}
        [line] = [line for line in err.splitlines() if line not in stages]
        assert line.startswith("rootstock: ")
        return line

    return serve


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# ---- paths


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "the name is empty"),
        ("/no/such/model", "no such directory"),
        ("~nobody-of-that-name/model", "no such directory"),
        ("a" * 300, "File name too long"),
        ("{tmp}/loop", "Too many levels of symbolic links"),
        ("{tmp}/dangling", "no such directory"),
        ("{tmp}/file", "it is a file"),
        ("{tmp}/file/below", "no such directory"),
        ("{tmp}/empty", r"the directory is empty"),
        ("{tmp}/looped", "Too many levels of symbolic links"),
    ],
)
def test_a_path_without_a_model_is_refused(refused: Refused, tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "looped").mkdir()
    (tmp_path / "looped/config.json").symlink_to(tmp_path / "looped/config.json")
    assert said in refused(name.replace("{tmp}", str(tmp_path)))


def spoil_nothing(directory: Path) -> None:
    shutil.rmtree(directory)


def spoil_config(directory: Path) -> None:
    (directory / "config.json").write_text('{\n "model_type": "llama",,\n}')


def spoil_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("spoil", [spoil_nothing, spoil_config, spoil_weights])
def test_broken_files_are_reported_before_torch_is_imported(
    copy: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(copy)
    code = (
        "import sys; from rootstock.__main__ import main\n"
        "try: main()\n"
        "finally: print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", str(copy), "--port", "0"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "[]\n"), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json", "."])
def test_an_unreadable_file_is_reported(refused: Refused, copy: Path, name: str) -> None:
    (copy / name).chmod(0)
    try:
        assert re.search("Permission denied", refused(copy))
    finally:
        (copy / name).chmod(0o700)


# ---- files


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("config.json", "No model at"),
        ("model.safetensors", "has no usable weights"),
        ("tokenizer.json", "has no usable tokenizer"),
    ],
)
def test_a_missing_file_is_reported(refused: Refused, copy: Path, name: str, said: str) -> None:
    (copy / name).unlink()
    assert said in refused(copy)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n "model_type": "llama",,\n}', "config.json of the model at"),
        ('{\n "model_type": "llama",,\n}', "it is not JSON at line 2, column 24"),
        ("[]", "it holds a list, not an object"),
        ("", "it is not JSON at line 1, column 1"),
        ("[" * 100_000, "its values are nested too deeply"),
        ('{"a":' * 900 + "1" + "}" * 900, "config.json"),
        (" " * (16 << 20) + "{}", "it is larger than 16.0 MiB"),
        (f'{{"vocab_size": {"1" * 5000}}}', "it is not JSON"),
        ("\udcff{}", "it is not UTF-8 at byte 0"),
        ('{"model_type": "unheard_of"}', "has model type `unheard_of`"),
        ('{"model_type": ["llama"]}', "config.json"),
        ('{"hidden_size": 64}', "Should have a `model_type` key"),
        ('{"model_type": "llama", "vocab_size": "many"}', "'vocab_size' expected int, got str"),
        ('{"model_type": "llama", "num_hidden_layers": 100000000}', "num_hidden_layers is 100000000"),
        ('{"model_type": "llama", "num_hidden_layers": -1}', "num_hidden_layers is -1"),
        ('{"model_type": "llama", "eos_token_id": "the end"}', "eos_token_id is 'the end'"),
    ],
)
def test_a_broken_config_is_reported_with_the_place(
    refused: Refused, copy: Path, text: str, said: str
) -> None:
    (copy / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert said in refused(copy)


def test_links_and_folders_in_the_place_of_files_are_refused_or_skipped(refused: Refused, copy: Path) -> None:
    (copy / "loop.py").symlink_to(copy / "loop.py")
    (copy / "folder.py").mkdir()
    files = weight_files("m", copy)
    from rootstock.runtime.model_files import fingerprint

    assert fingerprint(copy, files, "LlamaForCausalLM")
    for make in (Path.mkdir, os.mkfifo):
        shutil.rmtree(copy / "config.json", ignore_errors=True)
        (copy / "config.json").unlink(missing_ok=True)
        make(copy / "config.json")
        assert "The config.json of" in (line := refused(copy))
        assert "it is not a regular file" in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "generation_config.json of the model at"),
        ('{"temperature": "hot"}', "temperature is 'hot', but must be a number, 0 or more"),
        ('{"temperature": "hot"}', "serve with --sampling-defaults openai"),
        ('{"max_new_tokens": "many"}', "generation_config.json"),
        ('{"eos_token_id": ["the end"]}', "eos_token_id is ['the end'], but must be a token id or a list"),
        (json.dumps({"eos_token_id": list(range(2000))}), "eos_token_id is [0, 1,"),
    ],
)
def test_a_broken_generation_config_is_reported(refused: Refused, copy: Path, text: str, said: str) -> None:
    (copy / "generation_config.json").write_text(text)
    assert said in refused(copy)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "it is not JSON at line 1"),
        ("{}", "it has no weight_map"),
        ('{"weight_map": {}}', "it has no weight_map"),
        ('{"weight_map": {"a": 7}}', "does not name a safetensors file"),
        ('{"weight_map": {"a": "../outside.safetensors"}}', "does not name a safetensors file"),
        ('{"weight_map": {"a": "/tmp/outside.safetensors"}}', "does not name a safetensors file"),
        (f'{{"weight_map": {{"a": "{"a" * 300}.safetensors"}}}}', "of 1 weight files do not exist"),
        (
            '{"weight_map": {"a": "model-1.safetensors"}}',
            "model-1.safetensors of 1 weight files do not exist",
        ),
    ],
)
def test_a_broken_index_of_weights_is_reported(refused: Refused, copy: Path, index: str, said: str) -> None:
    (copy / "model.safetensors.index.json").write_text(index)
    assert said in refused(copy)


def test_empty_and_truncated_weights_are_reported(refused: Refused, copy: Path) -> None:
    path = copy / "model.safetensors"
    raw = path.read_bytes()
    for broken in (b"", raw[:5], raw[:100], raw[:-1], b"\xff" * 8 + raw[8:]):
        path.write_bytes(broken)
        assert "model.safetensors is damaged" in refused(copy)
    save_file({}, path)
    assert "model.safetensors holds no tensor" in refused(copy)


def test_a_wrong_shape_is_reported_with_the_parameters_and_both_shapes(refused: Refused, copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    for layer in (0, 1):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.zeros(120, 64)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    line = refused(copy, reads_weights=True)
    assert "2 parameters have another shape" in line
    for layer in (0, 1):
        shapes = "([120, 64] in the files, [128, 64] by config.json)"
        assert f"model.layers.{layer}.mlp.up_proj.weight {shapes}" in line


# ---- tokenizer, chat


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


# For these model types transformers silently makes a tokenizer of special tokens only.
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2", "mamba", "gemma3_text", "t5", "opt"])
def test_a_directory_without_a_tokenizer_does_not_start(
    refused: Refused, copy: Path, model_type: str
) -> None:
    for name in TOKENIZER_FILES:
        (copy / name).unlink()
    (copy / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert "has no usable tokenizer: the directory has no" in refused(copy)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_does_not_start(refused: Refused, copy: Path, text: str) -> None:
    (copy / "tokenizer.json").write_text(text)
    assert "has no usable tokenizer" in refused(copy)


def test_a_syntax_error_in_a_chat_template_is_reported_with_its_line(
    refused: Refused, copy: Path, tmp_path: Path
) -> None:
    broken = "{% for m in messages %}\n{{ m.content }"
    given = tmp_path / "given.jinja"
    given.write_text(broken)
    line = refused(copy, "--chat-template", str(given))
    assert "The chat template of --chat-template cannot be used: line 2: unexpected '}'" in line
    (copy / "chat_template.jinja").write_text(broken)
    line = refused(copy)
    assert f"The chat template of {str(copy)!r} cannot be used: line 2: unexpected '}}'" in line
    assert "--chat-template FILE" in line


@pytest.mark.parametrize("template", [7, {"default": 7}, [{"name": "default", "template": "{% if"}]])
def test_a_chat_template_of_another_type_is_refused(refused: Refused, copy: Path, template: object) -> None:
    (copy / "chat_template.jinja").unlink()
    edit(copy / "tokenizer_config.json", chat_template=template)
    assert "chat template" in refused(copy) or "tokenizer" in refused(copy)


def test_the_ready_line_says_that_only_completions_work_without_a_chat_template(
    checkpoint: Path, copy: Path
) -> None:
    (copy / "chat_template.jinja").unlink()
    budget = CacheConfig(budget_bytes=1 << 20)
    config = ModelConfig(str(copy), dtype="float32", device="cpu", threads=1)
    said = "no chat template: only /v1/completions serves, or start it with --chat-template FILE"
    assert said in command.ready_line(build_engine(config, budget), "http://x")
    with_one = build_engine(config, budget, chat_template="{{ messages }}")
    assert said not in command.ready_line(with_one, "http://x")


# ---- memory, context


def test_a_cache_beyond_the_memory_is_refused_before_weights_are_read(refused: Refused, copy: Path) -> None:
    line = refused(copy, "--device", "cpu", "--kv-budget", "900TiB")
    assert "--kv-budget is '900.0 TiB', but must be at most" in line
    assert "iB of the main memory is free" in line


def test_a_model_beyond_the_memory_is_refused_before_weights_are_read(
    refused: Refused, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_fit, "free_host_bytes", lambda: 100 * 1024)
    line = refused(copy, "--device", "cpu", "--dtype", "float32")
    assert "need at least 423.2 KiB in float32, but 100.0 KiB of the main memory is free" in line
    assert "--quantize int8 or int4" in line
    assert "--no-memory-check" in line
    config = ModelConfig(str(copy), device="cpu", dtype="float32", threads=1, memory_check=False)
    with pytest.raises(AssertionError, match="weights are read"):
        build_engine(config)


def test_adapters_beyond_the_memory_are_refused_before_weights_are_read(
    refused: Refused, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter is counted in the model's dtype, once for all its names."""
    model = tiny_model("llama")
    adapter = save_adapter(tmp_path / "adapter", model, linears_of(model), rank=8)
    elements = sum(tensor.numel() for tensor in load_file(adapter / "adapter_model.safetensors").values())
    assert count_weights("a", adapter) == elements
    added = 4 * elements
    names = ("--adapter", f"a={adapter}", "--adapter", f"b={adapter}/../adapter")
    fits = 4 * sum(tensor.elements for tensor in stored_tensors("m", weight_files("m", copy))) + added
    monkeypatch.setattr(memory_fit, "free_host_bytes", lambda: fits - 1)
    line = refused(copy, "--device", "cpu", "--dtype", "float32", *names)
    assert f"need at least {in_units(fits)} in float32, with {in_units(added)} of LoRA adapters" in line
    config = ModelConfig(str(copy), device="cpu", dtype="float32", threads=1)
    adapters = tuple(AdapterConfig(name, adapter) for name in "ab")
    with pytest.raises(ModelTooLarge):
        build_engine(replace(config, adapters=adapters))
    with pytest.raises(AssertionError, match="weights are read"):
        build_engine(config)
    monkeypatch.setattr(memory_fit, "free_host_bytes", lambda: fits)
    with pytest.raises(AssertionError, match="weights are read"):
        build_engine(replace(config, adapters=adapters))


def test_a_damaged_adapter_is_refused_before_weights_are_read(
    refused: Refused, copy: Path, tmp_path: Path
) -> None:
    line = refused(copy, "--device", "cpu", "--adapter", f"a={tmp_path}")
    assert "The LoRA adapter 'a' cannot be used" in line


def test_a_context_beyond_the_models_is_refused_with_both_numbers(refused: Refused, copy: Path) -> None:
    line = refused(copy, "--context-limit", "513")
    assert "--context-limit is '513', but must be at most 512" in line
    assert "rope_parameters" in line


def test_a_tier_in_main_memory_is_refused_on_a_cpu_before_weights_are_read(
    refused: Refused, copy: Path
) -> None:
    line = refused(copy, "--device", "cpu", "--host-budget", "2GiB")
    assert "--host-budget is '2.0 GiB', but must be omitted on a CPU" in line


def test_weights_are_counted_in_the_dtype_that_they_are_loaded_in(checkpoint: Path) -> None:
    stored = stored_tensors("m", weight_files("m", checkpoint))
    with torch.device("meta"):
        from transformers import AutoConfig, AutoModelForCausalLM

        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    parameters = sum(parameter.numel() for parameter in empty.parameters())
    linears = sum(m.weight.numel() for m in empty.modules() if isinstance(m, torch.nn.Linear))
    count = memory_fit.weight_bytes

    # The files have float32: nothing is converted, and the mapped file is the weights.
    as_stored = count(stored, empty, torch.float32, "none")
    assert (as_stored.resident, as_stored.converted) == (4 * parameters, 0)
    halved = count(stored, empty, torch.bfloat16, "none")
    assert (halved.resident, halved.converted) == (2 * parameters, 2 * parameters)
    # Rounding comes after conversion, which has all of them in memory.
    int8 = count(stored, empty, torch.bfloat16, "int8")
    assert (int8.resident, int8.converted) == (2 * parameters - linears, 2 * parameters)
    int4 = count(stored, empty, torch.float32, "int4")
    assert (int4.resident, int4.converted) == (4 * parameters - linears * 7 // 2, 0)

    # Tensors that the architecture does not have are not counted, and quantized ones count by their own dtype.
    vision = [*stored, StoredTensor("vision_tower.weight", "F32", 10**9)]
    assert count(vision, empty, torch.float32, "none") == as_stored
    packed = [StoredTensor("a", "I32", 100), StoredTensor("b", "F8_E4M3", 100), StoredTensor("c", "F16", 10)]
    assert count(packed, empty, torch.bfloat16, "none") == memory_fit.WeightBytes(520, 20)
    # A device without a kernel for codes gets them unpacked.
    unpacked = count(packed, empty, torch.bfloat16, "none", keeps_codes=False)
    assert unpacked == memory_fit.WeightBytes(2 * parameters, 20)


def test_the_memories_of_accelerator_and_host_are_checked_for_their_own_demands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(memory_fit, "free_host_bytes", lambda: 500)
    demands, weights = memory_fit.Demands, memory_fit.WeightBytes

    def check(needed: memory_fit.WeightBytes, asked: memory_fit.Demands) -> None:
        memory_fit.refuse_too_large("m", needed, "bfloat16", "none", torch.device("cuda:0"), asked)

    check(weights(900, converted=0), demands(pool_bytes=100, host_bytes=500))  # mapped files take nothing
    with pytest.raises(ModelTooLarge, match=r"1,000 bytes of the memory of cuda:0 is free"):
        check(weights(1001, converted=0), demands())
    with pytest.raises(InvalidOption, match="--kv-budget is '101 bytes', but must be at most 100 bytes"):
        check(weights(900, converted=0), demands(pool_bytes=101))
    with pytest.raises(ModelTooLarge, match=r"501 bytes in bfloat16, but 500 bytes of the main memory"):
        check(weights(900, converted=501), demands())
    with pytest.raises(InvalidOption, match="--host-budget is '101 bytes', but must be at most 100 bytes"):
        check(weights(900, converted=400), demands(host_bytes=101))


def test_shards_are_counted_together_and_each_is_checked(tmp_path: Path) -> None:
    weights = {f"layer.{i}": torch.zeros(10, 10) for i in range(3)}
    index = {}
    for number, (name, tensor) in enumerate(weights.items()):
        save_file({name: tensor}, tmp_path / f"model-{number}.safetensors")
        index[name] = f"model-{number}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    stored = stored_tensors("m", weight_files("m", tmp_path))
    assert sorted((tensor.name, tensor.dtype, tensor.elements) for tensor in stored) == [
        ("layer.0", "F32", 100),
        ("layer.1", "F32", 100),
        ("layer.2", "F32", 100),
    ]
    (tmp_path / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(ModelWeightsMissing, match=r"model-1\.safetensors is damaged"):
        weight_files("m", tmp_path)
