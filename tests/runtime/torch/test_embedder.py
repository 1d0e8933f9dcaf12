"""Embeddings of tiny models: equal to transformers' own of each text alone, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from embedding_models import own_embedding, save_embedding_model
from rootstock.config import ModelConfig
from rootstock.errors import EngineStopped, InputTooLong, ModelFileInvalid, ModelUnsupported
from rootstock.runtime.embedding_files import Pooling, is_embedding_model, read_embedding_files
from rootstock.runtime.torch.embedder import TorchEmbedder, load_embedder

TEXTS = ["abc", "a", "the quick brown fox jumps", "xyz." * 9, "b c d", "a" * 40]


def load(directory: Path) -> TorchEmbedder:
    return load_embedder(ModelConfig(str(directory), device="cpu", dtype="float32", threads=1), directory)


@pytest.mark.parametrize("model_type", ["bert", "qwen3"])
@pytest.mark.parametrize("pooling", get_args(Pooling))
def test_embeddings_are_those_of_transformers(tmp_path: Path, model_type: str, pooling: str) -> None:
    save_embedding_model(tmp_path, model_type, pooling, normalized=pooling != "max")
    embedder = load(tmp_path)
    found = embedder.embed([embedder.tokens_of(text) for text in TEXTS])
    assert found.shape == (len(TEXTS), embedder.dimensions) == (len(TEXTS), 32)
    for text, row in zip(TEXTS, found, strict=True):
        expected = own_embedding(tmp_path, text, pooling, normalized=pooling != "max").numpy()
        np.testing.assert_allclose(row, expected, atol=2e-5 * max(1.0, float(np.abs(expected).max())))


def test_poolings_are_concatenated(tmp_path: Path) -> None:
    embedder = load(save_embedding_model(tmp_path, "bert", ["cls", "mean"], normalized=False))
    assert embedder.dimensions == 64
    found = embedder.embed([embedder.tokens_of("abc")])[0]
    for part, pooling in ((found[:32], "cls"), (found[32:], "mean")):
        expected = own_embedding(tmp_path, "abc", pooling, normalized=False).numpy()
        np.testing.assert_allclose(part, expected, atol=1e-4)


def test_older_files_have_switches(tmp_path: Path) -> None:
    save_embedding_model(tmp_path)
    switches = {
        "word_embedding_dimension": 32,
        "pooling_mode_cls_token": False,
        "pooling_mode_lasttoken": True,
    }
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(switches))
    assert read_embedding_files("m", tmp_path).pooling == ("lasttoken",)


def test_a_prompt_and_lower_case_of_the_files(tmp_path: Path) -> None:
    save_embedding_model(tmp_path)
    plain = load(tmp_path)
    expected = plain.tokens_of("query: abc")
    prompts = {"prompts": {"q": "Query: "}, "default_prompt_name": "q"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    np.testing.assert_array_equal(load(tmp_path).tokens_of(" ABC "), expected)


def test_limits_of_an_input(tmp_path: Path) -> None:
    embedder = load(save_embedding_model(tmp_path))
    assert embedder.most_tokens == 48
    with pytest.raises(InputTooLong):
        embedder.tokens_of("a" * 1_000_000)
    (tmp_path / "sentence_bert_config.json").unlink()
    assert load(tmp_path).most_tokens == 64, "the model's positions"


def test_a_stopped_embedder_begins_no_forward(tmp_path: Path) -> None:
    embedder = load(save_embedding_model(tmp_path))
    embedder.stop()
    with pytest.raises(EngineStopped):
        embedder.embed([embedder.tokens_of("abc")])


@pytest.mark.parametrize(
    ("modules", "error"),
    [
        ({}, ModelFileInvalid),
        ([], ModelFileInvalid),
        ([1], ModelFileInvalid),
        ([{"type": "Transformer", "path": ""}], ModelUnsupported),
        ([{"type": "Transformer", "path": "../x"}], ModelUnsupported),
        ([{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "../x"}], ModelFileInvalid),
        (
            [
                {"type": "Transformer", "path": ""},
                {"type": "Pooling", "path": "1_Pooling"},
                {"type": "sentence_transformers.models.Dense", "path": "2_Dense"},
            ],
            ModelUnsupported,
        ),
    ],
)
def test_modules_that_are_refused(tmp_path: Path, modules: Any, error: type[Exception]) -> None:
    save_embedding_model(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert is_embedding_model(tmp_path)
    with pytest.raises(error):
        read_embedding_files("m", tmp_path)


@pytest.mark.parametrize(
    "fields", [{"pooling_mode": "sum"}, {}, {"pooling_mode": "mean", "include_prompt": False}]
)
def test_poolings_that_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    save_embedding_model(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelUnsupported):
        read_embedding_files("m", tmp_path)
