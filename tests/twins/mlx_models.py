"""Small mlx-lm models of random weights, in memory or saved by mlx-lm's own functions.

Their weights are drawn wide, and norms, biases, sinks and time constants are shaken too: as mlx-lm makes them, some
are all zeros or ones and attention is almost uniform, and hardly any mistake in it would show.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import quantize_model, save_config, save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from twins.mlx_architectures import ARCHITECTURES, COMMON, UNTESTED, VOCAB

__all__ = ["ARCHITECTURES", "UNTESTED", "VOCAB", "build", "byte_tokenizer", "config_of", "save"]

SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def module_of(name: str) -> str:
    """Returns the module of mlx_lm.models of a model of `ARCHITECTURES` or `UNTESTED`."""
    return name.partition(",")[0]


def config_of(name: str, sizes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the configuration with the fields that the architecture knows. `sizes`: fields to use instead."""
    kind = module_of(name)
    arguments = importlib.import_module(f"mlx_lm.models.{kind}").ModelArgs
    known = inspect.signature(arguments).parameters
    fields = {"model_type": kind} | COMMON | copy.deepcopy((ARCHITECTURES | UNTESTED)[name])
    fields.get("text_config", fields).update(sizes or {})
    return {field: value for field, value in fields.items() if field in known or field == "model_type"}


def build(
    name: str, seed: int = 0, dtype: mx.Dtype = mx.float32, *, sizes: Mapping[str, Any] | None = None
) -> nn.Module:
    """Builds a model of `ARCHITECTURES` or `UNTESTED`. `sizes`: fields of the configuration to use instead."""
    module = importlib.import_module(f"mlx_lm.models.{module_of(name)}")
    mx.random.seed(seed)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config_of(name, sizes)))
    weights = [
        (key, (1.5 * weight + 0.2 * mx.random.normal(weight.shape)).astype(dtype))
        for key, weight in tree_flatten(model.parameters())
        if mx.issubdtype(weight.dtype, mx.floating) and not key.endswith("signs")  # of a rotation: 1 or -1
    ]
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def save(
    directory: Path,
    name: str,
    seed: int = 0,
    *,
    dtype: mx.Dtype = mx.float32,
    bits: int | None = None,
    mode: str = "affine",
    predicate: Callable[[str, nn.Module], bool | dict[str, Any]] | None = None,
    sizes: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Saves a model with a tokenizer, `byte_tokenizer` by default.

    `bits` and `mode` quantize its weights, `predicate` says which of them and how.
    """
    tokenizer = tokenizer or byte_tokenizer()
    config = config_of(name, sizes) | {"eos_token_id": tokenizer.eos_token_id}
    model = build(name, seed, dtype, sizes=sizes)
    if bits is not None:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the bits per weight
            model, config = quantize_model(model, config, 32, bits, mode=mode, quant_predicate=predicate)
    save_model(directory, model)
    save_config(config, directory / "config.json")
    tokenizer.save_pretrained(directory)
    return directory


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a token for each byte, four special tokens and a chat template."""
    alphabet = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    assert len(alphabet) == VOCAB
    tokenizer = Tokenizer(models.BPE({piece: id for id, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0])
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
