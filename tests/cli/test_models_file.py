"""`--models FILE` and several models on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli.running import Run
from rootstock.cli import main, several
from rootstock.cli.models_file import MAX_FILE_BYTES, MAX_MODELS, read_models
from rootstock.config import (
    AdapterConfig,
    CacheConfig,
    Configuration,
    EngineConfig,
    ModelConfig,
    ServedModelConfig,
    ServerConfig,
    TierConfig,
)
from rootstock.errors import ConfigFileInvalid, InvalidOption
from rootstock.units import GIB

BASE = ModelConfig("", device="cpu", dtype="bfloat16")


def read(folder: Path, text: str) -> dict[str, ServedModelConfig]:
    file = folder / "models.yaml"
    file.write_text(text, encoding="utf-8")
    return {one.name: one for one in read_models(file, BASE)}


def test_a_model_has_options_of_its_own_and_else_those_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{{ messages }}")
    found = read(
        tmp_path,
        f"""
        small:
          model: /models/small
        large:
          model: org/large
          dtype: float32
          quantize: int8
          kv_dtype: int8
          memory-check: off
          chat-template: {tmp_path / "template"}
          context-limit: 4096
          tool-parser: hermes
          media: refuse
          kv-share: 2
          load: demand
          idle-unload: 10m
          pin: yes
          alias: [gpt-4o, claude]
          adapters: {{law: /adapters/law}}
        own: {{model: /models/own, runtime: mlx, kv-budget: 2GiB, alias: x}}
        """,
    )
    assert found["small"] == ServedModelConfig(
        "small", ModelConfig("/models/small", device="cpu", dtype="bfloat16", served_name="small")
    )
    large = found["large"]
    assert (large.model.model, large.model.dtype, large.model.quantize) == ("org/large", "float32", "int8")
    assert (large.model.kv_dtype, large.model.memory_check, large.model.device) == ("int8", False, "cpu")
    assert (large.chat_template, large.context_limit, large.tool_parser) == ("{{ messages }}", 4096, "hermes")
    assert (large.media, found["small"].media) == ("refuse", None)
    assert (large.kv_share, large.load, large.idle_unload_s, large.pin) == (2.0, "demand", 600.0, True)
    assert large.aliases == ("gpt-4o", "claude")
    assert large.model.adapters == (AdapterConfig("law", Path("/adapters/law")),)
    assert (found["own"].model.runtime, large.model.runtime) == ("mlx", "auto")
    assert (found["own"].budget_bytes, found["own"].aliases) == (2 * GIB, ("x",))


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", 1, "no model"),
        ("a: b", 1, "mapping of options"),
        ("a: [b]", 1, "mapping of options"),
        ("a: {dtype: auto}", 1, "has no 'model'"),
        ("a:\n  model: x\n  loda: demand", 3, "Did you mean 'load'?"),
        ("a:\n  model: x\n  load: later", 3, "start | demand"),
        ("a:\n  model: x\n  dtype: float8", 3, "bfloat16"),
        ("a:\n  model: x\n  runtime: jax", 3, "auto | torch | mlx"),
        ("a:\n  model: x\n  idle-unload: 10", 3, "a time with its unit"),
        ("a:\n  model: x\n  idle-unload: 1ms", 3, "at least 1s"),
        ("a:\n  model: x\n  pin: maybe", 3, "true or false"),
        ("a:\n  model: x\n  media: see", 3, "mention | refuse"),
        ("a:\n  model: x\n  kv-share: -1", 3, "more than 0"),
        ("a:\n  model: x\n  kv-share: nan", 3, "more than 0"),
        ("a:\n  model: x\n  kv-share: half", 3, "a number"),
        ("a:\n  model: x\n  context-limit: 1", 3, "at least 2"),
        ("a:\n  model: x\n  context-limit: 1e9", 3, "a whole number"),
        ("a:\n  model: x\n  model: y", 3, "set twice"),
        ("a:\n  model: x\n  alias: [[y]]", 3, "not a list"),
        ("a:\n  model: x\n  adapters: [y]", 3, "a mapping"),
        ("a:\n  model: x\n  chat-template: /no/such/file", 3, "can be read"),
        ("a: {model: x}\na: {model: y}", 1, "given twice"),
        ("a: &x {model: y}\nb: !x {model: y}", 2, "mapping of options"),
        ("\n".join(f"m{i}: {{model: x}}" for i in range(MAX_MODELS + 1)), MAX_MODELS + 1, "more than"),
    ],
)
def test_a_wrong_file_is_refused_with_the_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    with pytest.raises(ConfigFileInvalid) as refused:
        read(tmp_path, text)
    assert said in refused.value.message
    assert refused.value.line == line


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="at most"):
        read(tmp_path, "#" * (MAX_FILE_BYTES + 1))


# ---- the command line


@pytest.fixture
def configured(rootstock: Run, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `serve` up to the point where the configuration is complete, and returns it."""

    def run(*arguments: object) -> tuple[Any, ...]:
        seen: list[tuple[Any, ...]] = []
        monkeypatch.setattr(several, "serve_models", lambda *given: seen.append(given))
        monkeypatch.setattr(main, "prepare", lambda config: None)
        done = rootstock("serve", *arguments)
        assert done.status == 0, done.err
        [configuration] = seen
        return configuration

    return run


def test_models_of_the_command_line_and_of_a_file_are_served_together(
    configured: Any, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "models.yaml").write_text("three: {model: x, load: demand}")
    models, config, _ = configured(
        tmp_path / "one", "org/two", "--models", tmp_path / "models.yaml", "--dtype", "float16",
        "--alias", "gpt-4o=one",
    )  # fmt: skip
    assert [one.name for one in models] == ["one", "org/two", "three"]
    assert {one.model.dtype for one in models} == {"float16"}
    assert [one.load for one in models] == ["start", "start", "demand"]
    assert config.server.aliases == ("gpt-4o=one",)


def test_a_server_with_several_models_answers_to_no_other_name(configured: Any) -> None:
    _, config, _ = configured("a", "b")
    assert config.server.aliases is None


def test_a_server_without_a_model_is_refused(rootstock: Run) -> None:
    done = rootstock("serve")
    assert done.status == 2
    assert "--models FILE" in done.err


def test_one_name_for_several_models_is_refused(rootstock: Run) -> None:
    done = rootstock("serve", "a", "b", "--served-model-name", "c")
    assert done.status == 2
    assert "--alias" in done.err


# ---- options of each model


def test_each_model_has_a_part_of_the_tiers_and_of_a_device_that_divides_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[Any, ...]] = []

    class Stop(Exception):
        pass

    def build(*given: Any, **_more: Any) -> Any:
        seen.append(given)
        raise Stop

    monkeypatch.setattr(several, "build_engine", build)
    monkeypatch.setattr(several, "locate_model", lambda *_: tmp_path)
    models = [
        ServedModelConfig("org/a b", ModelConfig("a"), kv_share=3.0, context_limit=64),
        ServedModelConfig("c", ModelConfig("c")),
        ServedModelConfig("d", ModelConfig("d"), budget_bytes=GIB),
    ]
    tier = TierConfig(tmp_path / "tier", 30 * GIB, host_budget_bytes=6 * GIB)
    load = several.loader(
        models,
        Configuration(
            ModelConfig(""),
            CacheConfig(),
            EngineConfig(context_limit=128),
            tier,
            ServerConfig(sampling_defaults="openai"),
        ),
        several.SharedBudget(GIB),
        lambda stage, done: None,
    )
    for one in models:
        with pytest.raises(Stop):
            load(one)
    assert [cache.device_share for _, cache, _, _ in seen] == [0.75, 0.25, 0.25]
    assert [cache.budget_bytes for _, cache, _, _ in seen] == [None, None, GIB]
    assert [engine.context_limit for _, _, engine, _ in seen] == [64, 128, 128]
    folders = [part.disk_dir for *_, part in seen]
    assert len(set(folders)) == 3
    assert {folder.parent for folder in folders} == {tmp_path / "tier"}
    assert folders[0].name.startswith("org-a-b-")
    assert {part.disk_budget_bytes for *_, part in seen} == {10 * GIB}
    assert {part.host_budget_bytes for *_, part in seen} == {2 * GIB}
