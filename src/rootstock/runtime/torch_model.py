"""A transformers model on the paged pool: the loader, and the runtime that the engine drives."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rootstock.cache.families import FullAttention
from rootstock.cache.plan import Plan
from rootstock.config import ModelConfig
from rootstock.errors import InvalidOption, ModelUnsupported
from rootstock.kernels.spans import Span, slots_of
from rootstock.kernels.torch_paged import Tuning
from rootstock.runtime.base import Batch, Logits, ModelDescription
from rootstock.runtime.torch_check import self_check
from rootstock.runtime.torch_files import (
    Progress,
    empty_model,
    fingerprint,
    locate,
    read_config,
    read_weights,
    weight_files,
)
from rootstock.runtime.torch_hooks import IMPLEMENTATION, LayerUnsupported, PagedCache
from rootstock.runtime.torch_pool import LayerShape, TorchPool
from rootstock.runtime.torch_probe import context_limit, probe, refuse_unless_packable, text_config

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(config: ModelConfig, progress: Progress | None = None) -> TorchRuntime:
    """A model from a directory or the Hub, ready for `allocate`: probed, and checked against itself.

    Raises InvalidOption, ModelPathNotFound, ModelWeightsMissing, ModelUnsupported or SelfCheckFailed.
    """
    report = progress or (lambda stage, done: None)
    name, trusted = config.model, config.trust_remote_code
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    directory = locate(name, with_code=trusted, progress=report)
    declared = read_config(name, directory, trust_remote_code=trusted)
    try:
        refuse_unless_packable(empty_model(name, declared, trust_remote_code=trusted))
        files = weight_files(name, directory)
        report("load", 0.0)
        model = read_weights(name, directory, declared, dtype, trust_remote_code=trusted).to(device)
        weights = fingerprint(directory, files, type(model).__name__, report)
        model.eval().requires_grad_(False)
        model.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]
        report("load", 1.0)
        probed = probe(model, device)
    except LayerUnsupported as refusal:
        raise ModelUnsupported(name, str(refusal)) from refusal
    limit, regime = context_limit(text_config(model))
    description = ModelDescription(
        name=config.served_name or _public_name(name),
        architecture=type(model).__name__,
        vocab_size=probed.vocab_size,
        context_limit=limit,
        families=(
            FullAttention(
                layers=len(probed.layers),
                bytes_per_token=sum(layer.bytes_per_token for layer in probed.layers),
            ),
        ),
        weights_fingerprint=weights,
        dtype=_name_of(dtype),
        kv_dtype="+".join(sorted({_name_of(layer.dtype) for layer in probed.layers})),
        device=str(device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        rope_regime=regime,
        eos_token_ids=_eos_token_ids(model),
    )
    self_check(
        model,
        description,
        lambda tuning: TorchRuntime(model, description, probed.layers, tuning),
        lambda done: report("check", done),
    )
    return TorchRuntime(model, description, probed.layers)


class TorchRuntime:
    """The packed forward over one model and one pool. Made by `load_model`, owned by one thread."""

    def __init__(
        self,
        model: nn.Module,
        description: ModelDescription,
        layers: Sequence[LayerShape],
        tuning: Tuning | None = None,
    ) -> None:
        self._model = model
        self._description = description
        self._layers = layers
        self._tuning = tuning
        self._device = torch.device(description.device)
        self._pool: TorchPool | None = None
        # An index tensor keeps the LM head to the rows that are wanted; few models cannot do that.
        self._keeps_rows = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    @property
    def description(self) -> ModelDescription:
        return self._description

    def allocate(self, rows: Sequence[int], block_size: int) -> None:
        assert self._pool is None, "the pool is made once"
        with torch.inference_mode():
            self._pool = TorchPool(self._layers, rows[0], block_size, self._device, self._tuning)

    def apply(self, plan: Plan) -> None:
        assert self._pool is not None, "allocate comes first"
        with torch.inference_mode():
            self._pool.copy(plan.copies)

    def forward(self, batch: Batch) -> Logits:
        pool = self._pool
        assert pool is not None, "allocate comes first"
        spans = _spans(batch)
        size = pool.block_size
        ids = np.concatenate([segment.tokens for segment in batch.segments])
        positions = np.concatenate([np.arange(span.past, span.end) for span in spans])
        slots = np.concatenate([slots_of(span.blocks, span.past, span.end, size) for span in spans])
        rows = np.concatenate(
            [
                np.arange(span.row + span.new - segment.score_last, span.row + span.new)
                for span, segment in zip(spans, batch.segments, strict=True)
            ]
        )
        with torch.inference_mode():
            cache = PagedCache(pool, self._tensor(slots), [kernel.prepare(spans) for kernel in pool.kernels])
            kept = self._tensor(rows)
            output: Any = self._model(
                input_ids=self._tensor(ids)[None],  # [1, tokens]
                position_ids=self._tensor(positions)[None],
                past_key_values=cache,
                use_cache=False,  # the cache that is given is used; none is to be made
                **({"logits_to_keep": kept} if self._keeps_rows else {}),
            )
            logits = output.logits[0]  # [rows or tokens, vocab]
            if not self._keeps_rows:
                logits = logits[kept]
            scored: Logits = logits.float().cpu().numpy()
        return scored

    def _tensor(self, numbers: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(numbers.astype(np.int64, copy=False)).to(self._device)


def _spans(batch: Batch) -> list[Span]:
    spans, row = [], 0
    for segment in batch.segments:
        new = len(segment.tokens)
        assert 0 <= segment.score_last <= new
        assert new > 0, "a segment without tokens"
        spans.append(Span(row, new, segment.past, segment.tables[0]))
        row += new
    return spans


def resolve_device(asked: str) -> torch.device:
    """The device for --device; "auto" is the fastest there is. Raises InvalidOption."""
    if asked == "auto":
        if torch.cuda.is_available():
            asked = "cuda"
        else:
            asked = "mps" if torch.backends.mps.is_available() else "cpu"
    if asked == "cuda":
        if not torch.cuda.is_available():
            raise InvalidOption("--device", asked, "auto or cpu: torch finds no CUDA device here")
        return torch.device("cuda", torch.cuda.current_device())
    if asked == "mps" and not torch.backends.mps.is_available():
        raise InvalidOption("--device", asked, "auto or cpu: torch finds no Apple GPU here")
    return torch.device(asked)


def resolve_dtype(asked: str, device: torch.device) -> torch.dtype:
    """The dtype for --dtype; "auto" is the smallest that the device computes with natively."""
    if asked != "auto":
        return _DTYPES[asked]
    match device.type:
        case "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
            return torch.bfloat16 if native else torch.float16
        case "mps":
            return torch.float16
        case _:
            # Without such units bfloat16 is emulated, several times slower than float32.
            native = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
            return torch.bfloat16 if native else torch.float32


def _public_name(model: str) -> str:
    """What clients call a model: a directory's own name, and nothing of where it lies."""
    directory = Path(model)
    return directory.resolve().name if directory.is_dir() else model


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _eos_token_ids(model: nn.Module) -> tuple[int, ...]:
    """What ends an answer: generation_config.json's word, else config.json's."""
    for source in (getattr(model, "generation_config", None), text_config(model)):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            ids: Iterable[int] = found if isinstance(found, (list, tuple)) else [found]
            return tuple(int(i) for i in ids)
    return ()
