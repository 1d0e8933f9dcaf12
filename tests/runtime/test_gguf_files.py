"""GGUF files of a model: chosen by name among several, complete, and written once as a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from gguf_checkpoints import save_gguf
from rootstock.config import ModelConfig
from rootstock.errors import ModelFileInvalid, ModelPathNotFound, ModelUnsupported
from rootstock.runtime.gguf_files import has_gguf, model_of, parts_of, stands_for_gguf, variant_of
from rootstock.runtime.model_files import locate, names_here, public_name, weight_files
from rootstock.runtime.select import choose_runtime, locate_model

ONE = ["a-Q4_K_M.gguf"]
SEVERAL = ["a-Q4_K_M.gguf", "a-Q8_0.gguf", "a.Q6_K.gguf", "mmproj-a-F16.gguf", "README.md"]
SHARDS = [f"a-Q8_0-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
FOLDERS = ["Q4_K_M/a-00001-of-00002.gguf", "Q4_K_M/a-00002-of-00002.gguf", "Q8_0/a.gguf"]


@pytest.mark.parametrize(
    ("names", "variant", "files"),
    [
        (ONE, "", ONE),
        (["mmproj-f16.gguf", "model.GGUF"], "", ["model.GGUF"]),
        (SEVERAL, "", ONE),
        (SEVERAL, "Q8_0", ["a-Q8_0.gguf"]),
        (SEVERAL, "q6_k", ["a.Q6_K.gguf"]),
        (SHARDS, "", SHARDS),
        (SHARDS, "Q8_0", SHARDS),
        (FOLDERS, "", FOLDERS[:2]),
        (FOLDERS, "Q8_0", FOLDERS[2:]),
        (["README.md", "model.safetensors"], "", []),
        (["a.Q8_0.gguf", "a.mmproj-Q8_0.gguf", "a.imatrix.gguf"], "Q8_0", ["a.Q8_0.gguf"]),
        (["model.gguf", "A-mmproj-f16.gguf", "A-imatrix.gguf"], "", ["model.gguf"]),
        (["a-UD-Q4_K_M.gguf", "a-Q4_K_M.gguf"], "", ["a-Q4_K_M.gguf"]),
        (["a-UD-Q4_K_M.gguf"], "Q4_K_M", ["a-UD-Q4_K_M.gguf"]),
    ],
)
def test_the_files_of_a_model_are_found(names: list[str], variant: str, files: list[str]) -> None:
    assert model_of("dir", names, variant) == files


@pytest.mark.parametrize(
    ("names", "variant", "words"),
    [
        (SEVERAL[1:], "", "several GGUF files .*Name one: dir:Q4_K_M"),
        (SEVERAL, "Q2_K", "not one is Q2_K"),
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], "", "several GGUF files"),
        (SHARDS[:2], "", "2 of 3 parts of a-Q8_0 are there"),
        (["README.md"], "Q4_K_M", "no GGUF file"),
    ],
)
def test_what_is_not_clear_is_refused_with_the_names(names: list[str], variant: str, words: str) -> None:
    with pytest.raises(ModelPathNotFound, match=words):
        model_of("dir", names, variant)


def test_a_variant_is_named_behind_a_colon(tmp_path: Path) -> None:
    assert variant_of("maker/model-GGUF:Q4_K_M") == ("maker/model-GGUF", "Q4_K_M")
    assert variant_of("maker/model") == ("maker/model", "")
    assert variant_of(f"{tmp_path}:Q8_0") == (str(tmp_path), "Q8_0")
    (tmp_path / "with:colon").mkdir()
    assert variant_of(f"{tmp_path}/with:colon") == (f"{tmp_path}/with:colon", "")


def test_safetensors_and_graphs_come_first() -> None:
    assert has_gguf(ONE)
    assert not has_gguf([*ONE, "model.safetensors"])
    assert not has_gguf([*ONE, "openvino_model.xml"])
    assert choose_runtime("auto", "auto", ONE).runtime == "torch"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def located(model: object) -> Path:
    return locate_model(ModelConfig(str(model)), lambda stage, done: None)


def test_a_directory_is_written_once_for_a_file(cache: Path, tmp_path: Path) -> None:
    file, _ = save_gguf(tmp_path / "m", "llama", lambda name: "F16")
    directory = located(file)
    assert stands_for_gguf(directory)
    assert directory.is_relative_to(cache)
    written = (directory / "config.json").stat().st_mtime_ns
    assert located(file) == located(tmp_path / "m") == directory
    assert (directory / "config.json").stat().st_mtime_ns == written
    assert weight_files("m", directory) == [file]
    with pytest.raises(ModelUnsupported, match="--runtime torch"):
        locate(str(file), with_code=False, progress=lambda stage, done: None)
    with pytest.raises(ModelUnsupported, match="--runtime torch"):
        locate_model(ModelConfig(str(file), runtime="mlx"), lambda stage, done: None)
    assert public_name(str(file)) == "llama"
    assert public_name(str(tmp_path / "m")) == "m"
    assert public_name(f"{tmp_path / 'm'}:F16") == "m:F16"
    assert names_here(str(file)) == ["llama.gguf"]
    save_gguf(tmp_path / "m", "llama", lambda name: "F16", seed=1)
    assert located(file) != directory
    with pytest.raises(ModelFileInvalid, match=r"llama\.gguf .*has changed"):
        weight_files("m", directory)
    assert names_here(f"{tmp_path / 'm'}:F16") == ["llama.gguf"]
    assert not list(cache.rglob(".*"))


def test_parts_of_a_file_are_one_model(cache: Path, tmp_path: Path) -> None:
    first, _ = save_gguf(tmp_path / "m", "llama", lambda name: "F16", shards=8)
    parts = parts_of(first)
    assert len(parts) > 2
    assert weight_files("m", located(first)) == parts
    assert located(parts[1]) == located(first)
    parts[1].unlink()
    with pytest.raises(ModelPathNotFound, match=f"there is no {parts[1].name}"):
        located(first)
