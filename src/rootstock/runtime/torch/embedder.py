"""Embeddings by a transformers model: hidden states of one pass, pooled as its sentence-transformers files say.

Encoders and decoders alike run by plain transformers, without a cache: inputs of similar length together, padded on
the right. The engine (`engine/embedding.py`) divides inputs among forwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from rootstock.cache.types import Tokens
from rootstock.config import ModelConfig
from rootstock.errors import (
    InputTooLong,
    InvalidOption,
    ModelUnsupported,
    ModelWeightsMissing,
    TokenizerUnusable,
)
from rootstock.kernels.cpu.threads import end_team
from rootstock.runtime.base import EmbedderDescription
from rootstock.runtime.embedding_files import EmbeddingFiles, Pooling, read_embedding_files
from rootstock.runtime.memory_fit import Demands
from rootstock.runtime.model_files import first_line, public_name, stored_tensors, weight_files
from rootstock.runtime.torch.inspect.config import text_config
from rootstock.runtime.torch.memory_fit import refuse_too_large, weight_bytes
from rootstock.runtime.torch.runner import resolve_device, resolve_dtype
from rootstock.runtime.torch.weights import empty_model, quiet, read_config, refuse_quantized_tensors

_LEAST_POSITIONS = 16_384  # of a model that declares no limit
_WORD_CHARS = 128  # WordPiece reads a longer word as one unknown token


class TorchEmbedder:
    """An embedding model of transformers."""

    def __init__(self, name: str, model: nn.Module, tokenizer: Any, files: EmbeddingFiles) -> None:
        config = text_config(model)
        first = next(model.parameters())
        # Lengths to which an embedding may be cut, from Matryoshka training. None: any.
        declared = getattr(config, "matryoshka_dimensions", None)
        is_nested = bool(getattr(config, "is_matryoshka", False))
        self.description = EmbedderDescription(
            name,
            type(model).__name__,
            int(config.vocab_size),
            int(config.hidden_size) * len(files.pooling),
            tuple(declared or ()) if declared or not is_nested else None,
            _most_tokens(config, files),
            files.pooling,
            str(first.dtype).removeprefix("torch."),
            str(first.device),
            sum(parameter.numel() for parameter in model.parameters()),
        )
        self._model = model
        self._tokenizer = tokenizer
        self._files = files
        self._device = first.device
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._most_chars = self.description.most_tokens * max(longest, _WORD_CHARS)
        self._lock = threading.Lock()  # of the tokenizer, which is not thread-safe
        self._between_layers: Callable[[float], None] | None = None  # during a forward
        self._follow_layers()

    def tokens_of(self, text: str) -> Tokens:
        """Tokenizes a text, with the model's special tokens around it. Raises InputTooLong."""
        text = self._files.prompt + text.strip()
        if len(text) > self._most_chars:
            raise InputTooLong(len(text), "characters", self.description.most_tokens)
        if self._files.lowercase:
            text = text.lower()
        with self._lock:
            ids = self._tokenizer(text, truncation=False, verbose=False)["input_ids"]
        return np.array(ids, np.int32)

    def embed(
        self, inputs: Sequence[Tokens], between_layers: Callable[[float], None] = lambda done: None
    ) -> NDArray[np.float32]:
        """Computes the embeddings [inputs, dimensions] of inputs of 1 to `most_tokens` tokens, in one forward.

        Calls `between_layers` with the done share of the forward before each layer but the first.
        """
        self._between_layers = between_layers
        try:
            with torch.inference_mode():
                found: NDArray[np.float32] = self._forward(inputs).cpu().numpy()
        finally:
            self._between_layers = None
        return found

    def _follow_layers(self) -> None:
        """Makes the model's forward call `between_layers`."""
        lists = [module for module in self._model.modules() if isinstance(module, nn.ModuleList)]
        declared = getattr(text_config(self._model), "num_hidden_layers", None)
        # The longest list may hold one layer's experts. An outer list precedes the lists that it holds.
        layers = next(
            (each for each in lists if len(each) == declared), max(lists, key=len, default=nn.ModuleList())
        )
        for number, layer in enumerate(layers):
            if number:
                layer.register_forward_pre_hook(partial(self._before_layer, number / len(layers)))

    def _before_layer(self, done: float, *_: Any) -> None:
        if self._between_layers is not None:
            self._between_layers(done)

    def _forward(self, inputs: Sequence[Tokens]) -> Tensor:
        width = max(map(len, inputs))
        ids = torch.full((len(inputs), width), self._tokenizer.pad_token_id or 0, dtype=torch.int64)
        mask = torch.zeros((len(inputs), width), dtype=torch.int64)
        for row, tokens in enumerate(inputs):
            ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            mask[row, : len(tokens)] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        hidden: Tensor = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        pooled = torch.cat([pool(hidden.float(), mask, how) for how in self._files.pooling], -1)
        return nn.functional.normalize(pooled, dim=-1) if self._files.normalizes else pooled


def pool(hidden: Tensor, mask: Tensor, how: Pooling) -> Tensor:
    """Pools hidden states [rows, tokens, width] of inputs that are padded on the right: [rows, width]."""
    kept = mask[..., None].to(hidden.dtype)  # [rows, tokens, 1]
    lengths = kept.sum(1)  # [rows, 1]
    match how:
        case "cls":
            return hidden[:, 0]
        case "lasttoken":
            return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
        case "max":
            return hidden.masked_fill(kept == 0, float("-inf")).amax(1)
        case "mean":
            return (hidden * kept).sum(1) / lengths
        case "mean_sqrt_len_tokens":
            return (hidden * kept).sum(1) / lengths.sqrt()
        case "weightedmean":
            weights = kept * torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[None, :, None]
            return (hidden * weights).sum(1) / weights.sum(1)


def load_embedder(config: ModelConfig, directory: Path, demands: Demands | None = None) -> TorchEmbedder:
    """Loads an embedding model from its directory, if it fits into the free memory beside `demands`.

    Its weights keep their format: `config.quantize` and the options of a KV cache are for generation models. Raises
    InvalidOption or ModelError.
    """
    name = config.model
    if config.adapters:
        raise InvalidOption("--adapter", config.adapters[0].name, "left out with an embedding model")
    files = read_embedding_files(name, directory)
    stored = weight_files(name, directory)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    declared = read_config(name, directory, trust_remote_code=config.trust_remote_code)
    refuse_quantized_tensors(name, directory, stored_tensors(name, stored))
    if config.memory_check:
        empty = empty_model(name, declared, trust_remote_code=config.trust_remote_code, kind=AutoModel)
        needed = weight_bytes(stored_tensors(name, stored), empty, dtype, "none")
        words = str(dtype).removeprefix("torch.")
        refuse_too_large(name, needed, words, "none", device, demands or Demands())
        del empty
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # the tokenizer's own code may raise anything
        raise TokenizerUnusable(name, first_line(error)) from error
    try:
        with quiet():
            model, info = AutoModel.from_pretrained(
                directory,
                config=declared,
                dtype=dtype,
                trust_remote_code=config.trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:  # RuntimeError, ValueError, OSError and others for bad weights
        raise ModelWeightsMissing(name, first_line(error)) from error
    # Hidden states are pooled: the pooler of BERT, which many files leave out, is not used.
    missing = sorted(key for key in info["missing_keys"] if "pooler." not in key)
    if missing:
        raise ModelWeightsMissing(name, f"{len(missing)} parameters are missing, among them {missing[0]}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelUnsupported(
            name, "it is an encoder with a decoder, and embeddings come from one of them alone"
        )
    model = model.to(device).eval().requires_grad_(False)
    end_team()  # from here on only the engine's thread computes
    return TorchEmbedder(config.served_name or public_name(name), model, tokenizer, files)


def _most_tokens(config: Any, files: EmbeddingFiles) -> int:
    positions = getattr(config, "max_position_embeddings", None) or _LEAST_POSITIONS
    if str(getattr(config, "model_type", "")) in _OFFSET_POSITIONS:
        positions -= 1 + (getattr(config, "pad_token_id", None) or 0)  # its first positions are not used
    return min(positions, files.most_tokens or positions)


_OFFSET_POSITIONS = {"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet", "roberta-prelayernorm"}
