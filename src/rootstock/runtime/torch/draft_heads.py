"""Draft heads: the layer of multi-token prediction that some checkpoints have behind their last layer.

A head predicts the token after the next one (Gloeckle et al. 2024; DeepSeek-V3 technical report, 2.2). Its row at a
position is computed from the position's token and the model's last hidden state at the position before: a projection
of both, and one decoder layer, whose K and V are one more layer of the full-attention family. The hidden state is
kept beside them, so that a cached prefix is continued exactly: hits, tiers and restarts need no code for heads. The
first position has no hidden state before it, and takes zeros.

transformers drops heads. Here the checkpoint's layer is loaded as a further layer of the model, by the same code as
all others, and taken out behind it. The K and V of a step's rows are computed in its forward, by a hook on the
decoder, and nothing behind them. A draft is computed between two steps: token after token from the head's own hidden
state, which is not exact, so that the next step writes these rows again.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask

from rootstock.runtime.torch.hooks import HookedCache, RowsWritten
from rootstock.runtime.torch.inspect.config import text_config

# Lists by layer, and the head's kind in each. None: as the last layer.
_KINDS = {"layer_types": "full_attention", "mlp_layer_types": None, "indexer_types": "full"}
_FLOATS = {"F32", "BF16", "F16"}


@dataclass(frozen=True, slots=True)
class HeadNames:
    """Names of a head's tensors in a checkpoint. The `layer` is the number behind the model's last one."""

    own: str  # prefix of the head
    block: str  # prefix of its decoder layer, behind `own`
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    is_hidden_first: bool = False  # the order in which the projection takes its two inputs

    @property
    def parts(self) -> tuple[str, str, str, str]:
        return self.embedding_norm, self.hidden_norm, self.projection, self.norm


DIALECTS = (
    # DeepSeek V3, GLM 4.5 and later, Bailing
    HeadNames("model.layers.{layer}.", "", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    # Qwen3-Next, Qwen3.5
    HeadNames("mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    # MiMo
    HeadNames(
        "model.mtp_layers.0.",
        "",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        is_hidden_first=True,
    ),
)


@dataclass(frozen=True, slots=True)
class StoredHead:
    """A head that a checkpoint has."""

    names: HeadNames
    layer: int  # its number, behind the model's last layer
    layers: str = "model.layers."  # prefix of the model's layers in the checkpoint

    @property
    def own(self) -> str:
        return self.names.own.format(layer=self.layer)

    def with_layer(self, config: Any) -> Any:
        """Returns a copy of a model's configuration with one more layer."""
        extended = copy.deepcopy(config)
        _set_layers(extended.get_text_config(decoder=True), self.layer + 1)
        return extended

    @property
    def moved(self) -> Mapping[str, str]:
        """Patterns of the layer's names in the files, and the names by which the model loads them."""
        stored, loaded = self.own + self.names.block, f"{self.layers}{self.layer}."
        return {} if stored == loaded else {"^" + stored.replace(".", r"\."): loaded}


def stored_head(names: Iterable[tuple[str, str]], config: Any) -> StoredHead | None:
    """Finds the head among the names and dtypes of a checkpoint's tensors. None: there is none, or in a form that is
    not known."""
    dtypes = dict(names)
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    last = re.compile(rf"^(model\.(?:language_model\.)?layers\.){layers - 1}\.")
    prefix = next((match[1] for name in dtypes if (match := last.match(name))), None)
    if prefix is None:
        return None
    for dialect in DIALECTS:
        found = StoredHead(dialect, layers, prefix)
        if all(dtypes.get(f"{found.own}{part}.weight") in _FLOATS for part in dialect.parts):
            return found
    return None


class DraftHead(nn.Module):
    """A head of a loaded model, which attends to its own layer of the cache."""

    def __init__(self, names: HeadNames, index: int, block: nn.Module, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.index = index  # of its layer of the cache
        self._is_hidden_first = names.is_hidden_first
        self.block = block
        self.embedding_norm, self.hidden_norm, self.projection, self.norm = parts

    def forward(self, embedded: Tensor, hidden: Tensor, **given: Any) -> Tensor:
        """Computes rows [1, rows, hidden] of embedded tokens and of the hidden states before them."""
        both = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        mixed = self.projection(torch.cat(both[::-1] if self._is_hidden_first else both, -1))
        result = self.block(mixed, **given)
        out: Tensor = self.norm(result[0] if isinstance(result, tuple) else result)
        return out


class HeadedDecoder:
    """A decoder of text with a draft head. Its hook computes the head's rows in each forward."""

    def __init__(self, model: nn.Module, head: DraftHead) -> None:
        self._model: Any = model
        self._decoder: Any = model.get_decoder()  # type: ignore[operator]
        self.head = head
        self._decoder.draft_head = head
        self._decoder.register_forward_hook(self._hook, with_kwargs=True)

    def _hook(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = next((given for given in kwargs.values() if isinstance(given, HookedCache)), None)
        hidden = output[0]
        previous = None if cache is None else cache.previous_hidden(self.head.index, hidden)
        if previous is None:
            return
        embedded = kwargs.get("inputs_embeds")
        if embedded is None:
            embedded = self._embedded(kwargs.get("input_ids", args[0] if args else None))
        with contextlib.suppress(RowsWritten):  # nothing reads what follows them
            self._rows(embedded, previous, kwargs["position_ids"], cache)

    def draft(
        self, ids: Tensor, positions: Tensor, hidden: Tensor, cache: HookedCache
    ) -> tuple[Tensor, Tensor]:
        """Computes rows of tokens [rows] at positions [rows], of the hidden states [1, rows, hidden] before them.
        Returns logits [rows, vocab] and the rows' own hidden states."""
        out = self._rows(self._embedded(ids[None]), hidden, positions[None], cache)
        logits: Tensor = self._model.get_output_embeddings()(out)[0].float()
        return logits, out

    def _embedded(self, ids: Any) -> Tensor:
        embedded: Tensor = self._model.get_input_embeddings()(ids)
        return embedded

    def _rows(self, embedded: Tensor, hidden: Tensor, positions: Tensor, cache: HookedCache | None) -> Tensor:
        axes = (
            positions[-3:] if positions.dim() == 3 else positions
        )  # some decoders count text beside the axes
        mask = create_causal_mask(
            config=text_config(self._model),
            inputs_embeds=embedded,
            attention_mask=None,
            past_key_values=cache,
            position_ids=axes if axes.dim() == 2 else axes[0],
        )
        rows: Tensor = self.head(
            embedded,
            hidden,
            attention_mask=mask,
            position_ids=axes,
            position_embeddings=self._decoder.rotary_emb(embedded, position_ids=axes),
            past_key_values=cache,
            use_cache=True,
        )
        return rows


def attach_head(
    model: nn.Module, stored: StoredHead, files: Sequence[Path], dtype: torch.dtype
) -> HeadedDecoder:
    """Takes the last layer out of a loaded model, and makes a head of it. Raises KeyError, AttributeError or OSError
    for what is not there, and ValueError for tensors of another shape."""
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    if not hasattr(decoder, "rotary_emb"):
        raise AttributeError(f"{type(decoder).__name__} has no rotary positions")
    block = decoder.layers[stored.layer]
    named = {part: f"{stored.own}{part}.weight" for part in stored.names.parts}
    found = _read(files, set(named.values()))
    weights = {part: found[name] for part, name in named.items()}
    width = len(block.input_layernorm.weight)
    for part, weight in weights.items():
        shape = tuple(weight.shape)
        wanted = (width, 2 * width) if part == stored.names.projection else (width,)
        if shape != wanted:
            raise ValueError(f"its {part} has the shape {shape}, not {wanted}")
    decoder.layers = decoder.layers[: stored.layer]
    _set_layers(text_config(model), stored.layer)
    device = next(model.parameters()).device
    parts: list[nn.Module] = []
    for part, stored_weight in weights.items():
        weight = stored_weight.to(device, dtype)
        if part == stored.names.projection:
            made: nn.Module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        else:
            made = copy.deepcopy(block.input_layernorm)
        made.weight = nn.Parameter(weight, requires_grad=False)
        parts.append(made)
    head = DraftHead(stored.names, stored.layer, block, parts).eval()
    return HeadedDecoder(model, head)


def _set_layers(text: Any, layers: int) -> None:
    """Makes a configuration one of so many layers, at most one more than it has."""
    text.num_hidden_layers = layers
    for name, kind in _KINDS.items():
        kinds = getattr(text, name, None)
        if isinstance(kinds, list):
            setattr(text, name, [*kinds, kind or kinds[-1]][:layers])


def _read(files: Sequence[Path], names: set[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in names & set(opened.keys()):
                found[name] = opened.get_tensor(name)
    return found
