"""Tiny embedding models of random weights with sentence-transformers' files, and their embeddings by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerFast

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz", *"ABC", ".", "query", ":"]
_SIZES = {
    "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def save_embedding_model(
    directory: Path,
    model_type: str = "bert",
    pooling: Any = "mean",
    *,
    normalized: bool = True,
    **fields: Any,
) -> Path:
    """Saves a model. `fields` are those of its configuration."""
    known = AutoConfig.for_model(model_type).to_dict()
    sizes = _SIZES | ({"num_key_value_heads": 2, "head_dim": 8} if "num_key_value_heads" in known else {})
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, initializer_range=0.3, **{**sizes, **fields})
    AutoModel.from_config(config).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        directory
    )
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalized else [])]
    modules = [
        {"idx": number, "name": str(number), "type": f"sentence_transformers.models.{kind}",
         "path": "" if number == 0 else f"{number}_{kind}"}
        for number, kind in enumerate(kinds)
    ]  # fmt: skip
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 48, "do_lower_case": False})
    )
    (directory / "1_Pooling").mkdir()
    config_of_pooling = {"word_embedding_dimension": 32, "pooling_mode": pooling}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config_of_pooling))
    return directory


def own_embedding(
    directory: Path, text: str | list[int], pooling: str, *, normalized: bool = True
) -> torch.Tensor:
    """Computes one embedding without padding: [dimensions]."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(directory)(text)["input_ids"] if isinstance(text, str) else text
    with torch.inference_mode():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    places = torch.arange(1, len(hidden) + 1)[:, None]
    pooled: torch.Tensor = {
        "cls": lambda: hidden[0],
        "lasttoken": lambda: hidden[-1],
        "max": lambda: hidden.max(0).values,
        "mean": lambda: hidden.mean(0),
        "mean_sqrt_len_tokens": lambda: hidden.sum(0) / len(hidden) ** 0.5,
        "weightedmean": lambda: (hidden * places).sum(0) / places.sum(),
    }[pooling]()
    embedding: torch.Tensor = pooled / pooled.norm() if normalized else pooled
    return embedding
