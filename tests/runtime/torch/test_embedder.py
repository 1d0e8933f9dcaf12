"""Embeddings of tiny models: equal to transformers' own of each text alone, and files that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from embedding_models import own_embedding, save_embedding_model
from rootstock.config import AdapterConfig, ModelConfig
from rootstock.errors import (
    InputTooLong,
    InvalidOption,
    MemoryLacks,
    ModelFileInvalid,
    ModelTooLarge,
    ModelUnsupported,
)
from rootstock.runtime.embedding_files import Pooling, is_embedding_model, read_embedding_files
from rootstock.runtime.memory_fit import Demands
from rootstock.runtime.torch import memory_fit
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
    assert found.shape == (len(TEXTS), embedder.description.dimensions) == (len(TEXTS), 32)
    for text, row in zip(TEXTS, found, strict=True):
        expected = own_embedding(tmp_path, text, pooling, normalized=pooling != "max").numpy()
        np.testing.assert_allclose(row, expected, atol=2e-5 * max(1.0, float(np.abs(expected).max())))


@pytest.mark.parametrize("model_type", ["bert", "qwen3", "modernbert"])
def test_a_forward_can_be_interrupted_between_layers(tmp_path: Path, model_type: str) -> None:
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2)
    fields = special if model_type == "modernbert" else {}
    save_embedding_model(tmp_path, model_type, num_hidden_layers=4, **fields)
    embedder = load(tmp_path)
    inputs = [embedder.tokens_of(text) for text in TEXTS]
    seen: list[float] = []
    found = embedder.embed(inputs, seen.append)
    assert seen == [0.25, 0.5, 0.75]
    np.testing.assert_array_equal(embedder.embed(inputs), found)


def test_a_forward_is_interrupted_between_layers_and_not_between_experts(tmp_path: Path) -> None:
    save_embedding_model(tmp_path)
    model = AutoModel.from_pretrained(tmp_path)
    for layer in model.encoder.layer:
        layer.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(8))
        layer.register_forward_hook(lambda layer, _, hidden: sum(each(hidden) for each in layer.experts))
    embedder = TorchEmbedder(
        "m", model, AutoTokenizer.from_pretrained(tmp_path), read_embedding_files("m", tmp_path)
    )
    seen: list[float] = []
    embedder.embed([embedder.tokens_of("abc")], seen.append)
    assert seen == [0.5]


def test_poolings_are_concatenated(tmp_path: Path) -> None:
    embedder = load(save_embedding_model(tmp_path, "bert", ["cls", "mean"], normalized=False))
    assert embedder.description.dimensions == 64
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
    assert embedder.description.most_tokens == 48
    with pytest.raises(InputTooLong):
        embedder.tokens_of("a" * 1_000_000)
    (tmp_path / "sentence_bert_config.json").unlink()
    assert load(tmp_path).description.most_tokens == 64, "the model's positions"


def save_like_qwen3_embedding(directory: Path, *, with_head: bool) -> Path:
    """Saves a decoder with the files of Qwen3-Embedding: a last token that the tokenizer adds, prompts by name.

    `with_head` saves the weights by their names in the model that generates.
    """
    save_embedding_model(directory, "qwen3", "unused")
    config = AutoConfig.from_pretrained(directory)
    if with_head:
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    else:
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing("$A [SEP]", None, [("[SEP]", 3)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "sentence_bert_config.json").unlink()
    (directory / "1_Pooling" / "config.json").write_text(
        json.dumps(
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}
        )
    )
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    (directory / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"})
    )
    return directory


@pytest.mark.parametrize("with_head", [False, True])
def test_embeddings_of_qwen3_embedding_are_those_of_the_last_token(tmp_path: Path, with_head: bool) -> None:
    save_like_qwen3_embedding(tmp_path, with_head=with_head)
    embedder = load(tmp_path)
    assert (embedder.description.most_tokens, embedder.description.pooling) == (64, ("lasttoken",))
    inputs = [embedder.tokens_of(text) for text in TEXTS]
    assert [tokens[-1] for tokens in inputs] == [3] * len(TEXTS), "the token that ends a text"
    found = embedder.embed(inputs)

    # The authors' computation: padding on the left, and the last position of each row.
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    width = max(map(len, inputs))
    ids = torch.zeros((len(inputs), width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(inputs):
        ids[row, width - len(tokens) :] = torch.from_numpy(tokens.astype(np.int64))
        mask[row, width - len(tokens) :] = 1
    with torch.inference_mode():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state[:, -1]
    expected = torch.nn.functional.normalize(hidden, dim=-1).numpy()
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_weights_beyond_the_free_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_embedding_model(tmp_path)
    weights = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    config = ModelConfig(str(tmp_path), device="cpu", dtype="float32", threads=1)
    monkeypatch.setattr(memory_fit, "free_host_bytes", lambda: weights // 2)
    with pytest.raises(ModelTooLarge):
        load_embedder(config, tmp_path)
    monkeypatch.setattr(memory_fit, "free_host_bytes", lambda: 2 * weights)
    with pytest.raises(MemoryLacks, match="--kv-budget"):
        load_embedder(config, tmp_path, Demands(pool_bytes=2 * weights))
    load_embedder(config, tmp_path, Demands(pool_bytes=weights // 2))
    load_embedder(replace(config, memory_check=False), tmp_path, Demands(pool_bytes=2 * weights))


def test_adapters_are_refused(tmp_path: Path) -> None:
    config = ModelConfig(str(save_embedding_model(tmp_path)), adapters=(AdapterConfig("one", tmp_path),))
    with pytest.raises(InvalidOption, match="--adapter"):
        load_embedder(config, tmp_path)


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
