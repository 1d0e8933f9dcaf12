"""Runtime for transformers models on the paged pools, and its loader."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import xxhash
from numpy.typing import NDArray
from torch import nn

from rootstock.background import in_background
from rootstock.cache.families import token_families
from rootstock.cache.plan import HostBytes, Plan, RowPart
from rootstock.cache.types import Tokens
from rootstock.config import ModelConfig
from rootstock.errors import InvalidOption, ModelError, ModelUnsupported, ModelWeightsMissing
from rootstock.kernels.torch.sliced_attention import Tuning
from rootstock.runtime.adapter_files import AdapterSource
from rootstock.runtime.base import (
    Batch,
    DeviceMemory,
    DraftHeads,
    ImageReader,
    LoadedAdapter,
    Logits,
    ModelDescription,
    PoolMemory,
    Segment,
)
from rootstock.runtime.gguf_files import GgufTensor, tensors_in
from rootstock.runtime.host_memory import (
    free_host_bytes,
    large_blocks_apart,
    refuse_host_tier,
    reporting_growth,
)
from rootstock.runtime.memory_fit import Demands, refuse_hopeless_budget, refuse_longer_context
from rootstock.runtime.model_config import context_limit, eos_token_ids
from rootstock.runtime.model_files import (
    Progress,
    StoredTensor,
    fingerprint,
    locate,
    public_name,
    stored_tensors,
    weight_files,
)
from rootstock.runtime.torch.adapters.adapters import TorchAdapters
from rootstock.runtime.torch.adapters.rows import TorchAdapterRows
from rootstock.runtime.torch.attention_backends import (
    Compiled,
    compile_for,
    compile_for_parts,
    compiled_for,
)
from rootstock.runtime.torch.cuda_graphs import DecodeGraphs, record_decodes
from rootstock.runtime.torch.draft_heads import HeadedDecoder, StoredHead, attach_head, stored_head
from rootstock.runtime.torch.fallback import TorchExecution, choose_mode
from rootstock.runtime.torch.hooks import HookedCache, LayerUnsupported
from rootstock.runtime.torch.images.check import open_images
from rootstock.runtime.torch.images.step import StepImages
from rootstock.runtime.torch.inspect.config import refuse_unknown_kinds, text_config
from rootstock.runtime.torch.inspect.layout import TorchLayout, sequential_layout
from rootstock.runtime.torch.inspect.survey import survey
from rootstock.runtime.torch.kv_pool import TorchPool, block_dtypes
from rootstock.runtime.torch.mamba_time_steps import limit_time_steps
from rootstock.runtime.torch.memory_fit import refuse_large_adapter, refuse_too_large, weight_bytes
from rootstock.runtime.torch.packed_linears import Packing, pack_linears, use_packed, weight_nbytes
from rootstock.runtime.torch.passed_checks import LEAST_PARAMETERS, PassedChecks
from rootstock.runtime.torch.self_check import own_attention, rounding, trial_logits
from rootstock.runtime.torch.state_pool import state_dtypes
from rootstock.runtime.torch.step_cache import PackedCache, SequenceCache, context_slots
from rootstock.runtime.torch.stored.gguf_directory import directory_of
from rootstock.runtime.torch.stored.placement import codes_missing
from rootstock.runtime.torch.weights import (
    empty_model,
    quiet,
    read_config,
    read_weights,
    refuse_quantized_tensors,
    stored_in_words,
)
from rootstock.units import in_units

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Suffix of a fingerprint, because K and V differ with quantized weights. The number changes with the quantization
# method.
_QUANTIZED_SUFFIXES = {"none": "", "int8": "/int8.2", "int4": "/int4.2"}
# Suffix of a fingerprint if time steps are limited in another way than by transformers.
_TIME_STEPS = "/time_steps.1"
_STATE_DTYPES = {"auto": None, "bfloat16": torch.bfloat16}


def check_architecture(config: ModelConfig, directory: Path) -> None:
    """Checks that transformers knows the model. Raises ModelFileInvalid or ModelUnsupported."""
    read_config(config.model, directory, trust_remote_code=config.trust_remote_code)


def load_model(
    config: ModelConfig,
    progress: Progress | None = None,
    demands: Demands | None = None,
    *,
    directory: Path | None = None,
) -> TorchRuntime:
    """Loads a model from a directory or the Hub and self-checks it. The runtime is ready for `allocate`.

    `directory`: the result of `locate_model`, if it was already called. Raises InvalidOption or ModelError.
    """
    demands = demands or Demands()
    report = progress or (lambda stage, done: None)
    name, trusted = config.model, config.trust_remote_code
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    if config.cuda_graphs and device.type != "cuda":
        raise InvalidOption("--cuda-graphs", f"with --device {config.device}", "a CUDA device")
    dtype = resolve_dtype(config.dtype, device)
    _refuse_rounding(config.quantize, device, dtype)
    if config.kv_dtype == "int8" and device.type != "cpu":
        remedy = f"auto on {device.type}: K and V are quantized on CPUs only (--device cpu)"
        raise InvalidOption("--kv-dtype", config.kv_dtype, remedy)
    refuse_host_tier(demands.host_bytes, _memory_kind(device))
    directory = directory or locate(name, with_code=trusted, progress=report, open_gguf=directory_of)
    files = weight_files(name, directory)
    declared = read_config(name, directory, trust_remote_code=trusted)
    tensors = tensors_in(directory) or stored_tensors(name, files)
    refuse_quantized_tensors(name, directory, tensors)
    try:
        empty = empty_model(name, copy.deepcopy(declared), trust_remote_code=trusted)
        refuse_unknown_kinds(empty)
        refuse_longer_context(demands.context_limit, context_limit(text_config(empty))[0])
        head = _stored_head(tensors, declared, demands, device)
        if head is not None:
            try:
                empty = empty_model(name, head.with_layer(declared), trust_remote_code=trusted)
            except ModelError as refusal:
                _tell_of_unused_head(refusal)
                head = None
        needed = weight_bytes(tensors, empty, dtype, config.quantize, not codes_missing(device))
        if config.memory_check:
            needed = replace(needed, adapters=demands.adapter_weights * dtype.itemsize)
            refuse_too_large(name, needed, _name_of(dtype), config.quantize, device, demands)
        if demands.kv_budget is not None:
            _refuse_hopeless_budget(config, empty, dtype, demands)
        architecture = type(empty).__name__
        del empty
        report("load", 0.0)
        loops = in_background(functools.partial(_compiled, device, config.attention, dtype), "loops")
        # Beside the load, which leaves a processor idle, and of whose files these are the same pages.
        hashed = in_background(functools.partial(fingerprint, directory, files, architecture), "hash")
        pages = sum(file.stat().st_size for file in files)  # of files, beside the weights
        growing = reporting_growth(functools.partial(report, "load"), pages + needed.resident)
        with large_blocks_apart(), growing:
            model, decoder = _read(config, directory, files, declared, dtype, device, head)
        model.eval().requires_grad_(False)
        report("load", 1.0)
        with own_attention(model):
            found = survey(model, device)
        report("hash", 0.0)
        weights = hashed.result()
        report("hash", 1.0)
        if limit_time_steps(model, found):
            weights += _TIME_STEPS
    except LayerUnsupported as refusal:
        raise ModelUnsupported(name, str(refusal)) from refusal
    except OSError as error:
        raise ModelWeightsMissing(name, f"{error.filename} cannot be read ({error.strerror})") from error
    limit, regime = context_limit(text_config(model))
    compiles = device.type == "cpu" and config.attention != "torch"
    if compiles:
        report("compile", 0.0)
    compiled = loops.result()
    if compiles:
        report("compile", 1.0)

    def describe(layout: TorchLayout) -> ModelDescription:
        return ModelDescription(
            name=config.served_name or public_name(name),
            architecture=type(model).__name__,
            vocab_size=layout.vocab_size,
            context_limit=limit,
            families=layout.families,
            weights_fingerprint=weights + _QUANTIZED_SUFFIXES[config.quantize],
            dtype=_name_of(dtype),
            kv_dtype=_names_of(layout.dtypes),
            device=str(device),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            rope_regime=regime,
            eos_token_ids=eos_token_ids(getattr(model, "generation_config", None), text_config(model)),
            quantize=config.quantize,
            layout=_layout_name(layout),
            memory=_memory_kind(device),
        )

    served = choose_mode(
        model,
        found,
        limit,
        describe,
        lambda served, tuning: TorchRuntime(model, served, tuning),
        lambda done: report("check", done),
        compiled,
        _passed_checks(config, model, weights, str(dtype), str(device), compiled, limit, head is not None),
    )
    report("pack", 0.0)
    projections = served.fusion.projections
    exercise = functools.partial(
        trial_logits, served.description, lambda tuning: TorchRuntime(model, served, tuning)
    )
    allowed = functools.partial(rounding, model, served.description)
    with large_blocks_apart():
        packing = pack_linears(
            model,
            [projection.linears for projection in projections],
            exercise,
            allowed,
            lambda done: report("pack", done),
            config.quantize,
        )
    use_packed(projections, packing, exercise, allowed)
    _tell_what_was_not_rounded(packing, config.quantize)
    stored = _with_quantized_cache(served, _STATE_DTYPES[config.state_dtype], config.kv_dtype == "int8")
    if served.compiled == "numba":
        compile_for(stored.layout.dtypes)  # a layer may have another dtype than the model
    adapters = TorchAdapters(
        model,
        served,
        packing.kept,
        lambda source: refuse_large_adapter(source, dtype, device) if config.memory_check else None,
    )
    with_graphs = device.type == "cuda" if config.cuda_graphs is None else config.cuda_graphs
    words = f"{stored_in_words(name, directory, files, tensors)}; {in_units(weight_nbytes(model))} in memory"
    images, seen = open_images(
        model,
        directory,
        served.description,
        lambda images: TorchRuntime(model, served, images=images),
        trust_remote_code=trusted,
    )
    adapters.sees_images = images is not None
    stored = replace(stored, description=replace(stored.description, weights=words, images=seen))
    return TorchRuntime(
        model, stored, with_graphs=with_graphs, adapters=adapters, images=images, decoder=decoder
    )


def _compiled(device: torch.device, attention: str, dtype: torch.dtype) -> Compiled | None:
    """Compiles or loads the loops for a model of this dtype. Returns the compiled backend, as `compiled_for` does."""
    compiled = compiled_for(device, attention)
    if compiled == "numba":
        compile_for({dtype})
        compile_for_parts(dtype)
    return compiled


def _passed_checks(config: ModelConfig, model: nn.Module, *identity: object) -> PassedChecks | None:
    """Returns where the model's check is remembered. None: it is checked at each load, as small models are, and
    models whose code may read anything."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if config.recheck or config.trust_remote_code or parameters < LEAST_PARAMETERS:
        return None
    return PassedChecks(type(model).__name__, config.quantize, config.attention, *identity)


def _read(
    config: ModelConfig,
    directory: Path,
    files: Sequence[Path],
    declared: Any,
    dtype: torch.dtype,
    device: torch.device,
    head: StoredHead | None,
) -> tuple[nn.Module, HeadedDecoder | None]:
    """Reads the weights, with a draft head if that can be read. Raises ModelWeightsMissing or ModelUnsupported."""
    read = functools.partial(
        read_weights, config.model, directory, trust_remote_code=config.trust_remote_code
    )
    if head is not None:
        try:
            model = read(config=head.with_layer(declared), dtype=dtype, device=device, moved=head.moved).to(
                device
            )
            return model, attach_head(model, head, files, dtype)
        except (ModelError, KeyError, AttributeError, ValueError) as refusal:
            _tell_of_unused_head(refusal)
    return read(config=declared, dtype=dtype, device=device).to(device), None


def _tell_of_unused_head(refusal: Exception) -> None:
    _log.warning("the checkpoint's draft head is not used: %s", refusal)


def _stored_head(
    tensors: Sequence[StoredTensor] | Sequence[GgufTensor],
    declared: Any,
    demands: Demands,
    device: torch.device,
) -> StoredHead | None:
    """Returns the checkpoint's draft head, if it is to be loaded: on CPUs. A step with heads is in no CUDA graph."""
    if not demands.draft_heads or device.type != "cpu":
        return None
    return stored_head(((tensor.name, tensor.dtype) for tensor in tensors), declared)


def _refuse_hopeless_budget(
    config: ModelConfig, empty: nn.Module, dtype: torch.dtype, demands: Demands
) -> None:
    """Raises BudgetTooSmall for a KV cache that could not hold a short request. Changes the empty model.

    The tensors' shapes follow from a forward of the model without weights. Some architectures cannot run one: their
    budget is checked after the load.
    """
    try:
        with own_attention(empty), quiet():
            empty.set_experts_implementation("batched_mm")  # type: ignore[operator]  # others need data
            found = survey(empty.to(dtype), torch.device("meta"))
    except Exception:  # the architecture's own code may raise anything where there is no data
        return
    layout = _stored(sequential_layout(found), _STATE_DTYPES[config.state_dtype], config.kv_dtype == "int8")
    refuse_hopeless_budget(layout.families, demands)


def _stored(layout: TorchLayout, of_states: torch.dtype | None, rounds_rows: bool) -> TorchLayout:
    """Returns the layout with the dtypes that the options choose for the pools."""
    if of_states is not None:
        layout = layout.with_stored_states(of_states)
    return layout.with_quantized_rows() if rounds_rows else layout


def _refuse_rounding(quantize: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raises InvalidOption if weights cannot be quantized on this device or in this dtype."""
    if quantize != "none" and device.type != "cpu":
        remedy = f"none on {device.type}: weights are quantized on CPUs only (--device cpu)"
        raise InvalidOption("--quantize", quantize, remedy)
    if quantize != "none" and dtype not in (torch.bfloat16, torch.float32):
        remedy = f"none with --dtype {_name_of(dtype)}: use bfloat16 or float32"
        raise InvalidOption("--quantize", quantize, remedy)


def _tell_what_was_not_rounded(packing: Packing, quantize: str) -> None:
    if quantize == "none":
        return
    kept = packing.kept | packing.unrounded
    if kept:
        name, reason = next(iter(kept.items()))
        total = len(kept.keys() | packing.rounded.keys())
        _log.warning(
            "%d of %d linear layers and modules of experts are not %s: %s, because %s",
            len(kept),
            total,
            quantize,
            name,
            reason,
        )


def _with_quantized_cache(
    served: TorchExecution, of_states: torch.dtype | None, rounds_rows: bool
) -> TorchExecution:
    """Returns the same model with pools that round recurrent states or quantize K and V. The self-check has run with
    exact pools, because the loss of rounding is the user's choice and no error. Raises InvalidOption."""
    layout = _stored(served.layout, of_states, rounds_rows)
    if rounds_rows:
        kept = [layer for layer in layout.layers if not layer.is_quantized]
        if len(kept) == len(layout.layers):
            stored = "latents" if kept else "no K and V"
            raise InvalidOption("--kv-dtype", "int8", f"auto: {served.description.name} keeps {stored}")
        if kept:
            _log.warning(
                "%d of %d layers are not kept in int8: %s keeps latents",
                len(kept),
                len(layout.layers),
                kept[0].module,
            )
    if layout is served.layout:
        return served
    description = replace(
        served.description,
        families=layout.families,
        kv_dtype=_names_of(layout.dtypes),
        layout=_layout_name(layout),
    )
    return replace(served, layout=layout, description=description)


def _layout_name(layout: TorchLayout) -> str:
    """Returns a hash of the row layout: families, layers, states, and transformers' version. The version counts
    because transformers may store other contents in the same shapes (for example keys before or after rotation)."""
    kept = repr((layout.families, layout.layers, layout.states, transformers.__version__))
    return xxhash.xxh3_64_hexdigest(kept.encode())


class TorchRuntime:
    """Runtime of one model and its pools. Made by `load_model`, owned by one thread."""

    def __init__(
        self,
        model: nn.Module,
        served: TorchExecution,
        tuning: Tuning | None = None,
        *,
        with_graphs: bool = False,
        adapters: TorchAdapters | None = None,
        images: StepImages | None = None,
        decoder: HeadedDecoder | None = None,
    ) -> None:
        self._model = model
        self._decoder = decoder
        self._images = images
        self._adapters = adapters
        self._served = served
        self._description = served.description
        self._layout = served.layout
        self._tuning = tuning
        self._device = torch.device(served.description.device)
        self._pool: TorchPool | None = None
        self._with_graphs = with_graphs
        self._graphs: DecodeGraphs | None = None

    @property
    def description(self) -> ModelDescription:
        return self._description

    @property
    def images(self) -> ImageReader | None:
        return None if self._images is None else self._images.reader

    @property
    def draft_heads(self) -> DraftHeads | None:
        return None if self._decoder is None else self

    @property
    def computes_ahead(self) -> bool:
        return False  # on a CPU nothing is beside; CUDA waits for each forward

    @property
    def pool_copies(self) -> int | None:
        return None

    def free_bytes(self) -> int:
        return _free_bytes(self._device)

    def release_unused(self) -> None:
        if self._device.type == "mps":
            torch.mps.empty_cache()

    def allocate(self, rows: Sequence[int], block_size: int) -> None:
        assert self._pool is None, "the pools are made once"
        layout = self._layout
        with torch.inference_mode():
            self._pool = TorchPool(
                layout.families,
                layout.layers,
                layout.states,
                rows,
                block_size,
                self._device,
                self._tuning,
                self._served.compiled,
            )
            if self._with_graphs:
                self._graphs = record_decodes(
                    self._model,
                    self._served,
                    self._pool,
                    min(rows),
                    functools.partial(self._packed, self._pool, token_wise=False),
                )

    def apply(self, plan: Plan) -> None:
        assert self._pool is not None, "allocate comes first"
        with torch.inference_mode():
            self._pool.apply(plan)

    def read(self, part: RowPart) -> list[HostBytes]:
        assert self._pool is not None, "allocate comes first"
        with torch.inference_mode():
            return self._pool.read(part)

    def buffers(self, part: RowPart) -> list[HostBytes]:
        assert self._pool is not None, "allocate comes first"
        with torch.inference_mode():
            return self._pool.buffers(part)

    def place(self, part: RowPart, buffers: Sequence[HostBytes]) -> None:
        assert self._pool is not None, "allocate comes first"
        with torch.inference_mode():
            self._pool.place(part, buffers)

    def buffer_dtypes(self, family: int) -> list[str]:
        if family < len(token_families(self._layout.families)):
            return [_name_of(dtype) for dtype in block_dtypes(self._layout.layers, family)]
        return [_name_of(dtype) for dtype in state_dtypes(self._layout.states)]

    def load_adapter(self, source: AdapterSource) -> LoadedAdapter:
        adapters = self._adapters
        assert adapters is not None, "a runtime of load_model takes adapters"
        exact = adapters.served  # with exact pools, as for the self-check of the model
        with torch.inference_mode():
            return adapters.load(
                source, lambda tuning: TorchRuntime(self._model, exact, tuning, adapters=adapters)
            )

    def unload_adapter(self, fingerprint: str) -> None:
        assert self._adapters is not None, "a runtime of load_model takes adapters"
        self._adapters.unload(fingerprint)

    def forward(self, batch: Batch) -> Logits:
        pool, adapters, segments = self._pool, self._adapters, batch.segments
        assert pool is not None, "allocate comes first"
        with torch.inference_mode():
            if self._images is not None and any(segment.images for segment in segments):
                self._images.compute(segments)
            if adapters is None or not any(segment.adapter for segment in segments):
                return self._forward(pool, segments, None)
            groups = adapters.groups(segments)
            parts: dict[int, Logits] = {}
            for group in groups:
                of_group = [segments[number] for number in group]
                with adapters.rows.of(of_group):
                    logits = self._forward(pool, of_group, adapters.rows)
                ends = np.cumsum([segment.logits_to_keep for segment in of_group])[:-1]
                parts |= zip(group, np.split(logits, ends), strict=True)
            return np.concatenate([parts[number] for number in range(len(segments))])

    def draft(self, batch: Batch, most: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        pool, decoder, segments = self._pool, self._decoder, list(batch.segments)
        assert pool is not None, "allocate comes first"
        assert decoder is not None, "the model has no draft heads"
        hidden: torch.Tensor | None = None
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.inference_mode():
            for _ in range(most):
                ids, positions = (
                    torch.from_numpy(np.array(numbers, np.int64)).to(self._device)
                    for numbers in ([s.tokens[0] for s in segments], [s.past for s in segments])
                )
                cache = PackedCache(pool, segments)
                if hidden is None:
                    hidden = cache.kept_hidden(decoder.head.index)
                logits, hidden = decoder.draft(ids, positions, hidden, cache)
                found.append(logits.softmax(-1).max(-1))
                tokens = found[-1][1].cpu().numpy().astype(np.int32)
                segments = [
                    replace(segment, tokens=tokens[i : i + 1], past=segment.past + 1)
                    for i, segment in enumerate(segments)
                ]
            chances, drafted = (torch.stack(each, 1).cpu().numpy() for each in zip(*found, strict=True))
        return drafted.astype(np.int32), chances.astype(np.float32)

    def _forward(self, pool: TorchPool, segments: Sequence[Segment], rows: TorchAdapterRows | None) -> Logits:
        mode = self._description.execution_mode
        if mode == "one sequence per forward":
            return self._one_by_one(pool, segments)
        has_images = self._images is not None and any(segment.images for segment in segments)
        if self._graphs is not None and not has_images and self._graphs.fits(segments):
            return self._graphs.forward(segments)
        return self._packed(pool, segments, token_wise=mode == "packed, token-wise mixers", adapter_rows=rows)

    def _packed(
        self,
        pool: TorchPool,
        segments: Sequence[Segment],
        *,
        token_wise: bool,
        adapter_rows: TorchAdapterRows | None = None,
    ) -> Logits:
        cache = PackedCache(pool, segments, token_wise=token_wise, adapter_rows=adapter_rows)
        ends = np.cumsum([len(segment.tokens) for segment in segments])
        rows = [
            np.arange(end - segment.logits_to_keep, end) for segment, end in zip(segments, ends, strict=True)
        ]
        tokens = np.concatenate([segment.tokens for segment in segments])
        positions = np.concatenate([np.arange(s.past, s.past + len(s.tokens)) for s in segments])
        kept = np.concatenate(rows)
        if self._images is None or not any(segment.images for segment in segments):
            return self._call(tokens, positions, cache, kept)
        with self._images.arguments(segments, tokens, positions) as (tokens, positions, more):
            return self._call(tokens, positions, cache, kept, **more)

    def _one_by_one(self, pool: TorchPool, segments: Sequence[Segment]) -> Logits:
        scored = []
        for segment in segments:
            new, cache = len(segment.tokens), SequenceCache(pool, segment, context_slots(pool, segment))
            positions = np.arange(segment.past, segment.past + new)
            scored.append(
                self._call(segment.tokens, positions, cache, np.arange(new - segment.logits_to_keep, new))
            )
            cache.keep()
        return np.concatenate(scored)

    def _call(
        self,
        tokens: Tokens,
        positions: NDArray[np.int64],
        cache: HookedCache,
        rows: NDArray[np.int64],
        **more: Any,
    ) -> Logits:
        ids, places, kept = (
            torch.from_numpy(numbers.astype(np.int64)).to(self._device)
            for numbers in (tokens, positions, rows)
        )
        logits = self._layout.calling(self._model, ids, places, cache, kept, **more)
        scored: Logits = logits.float().cpu().numpy()
        return scored


def resolve_device(asked: str) -> torch.device:
    """Returns the device for --device; "auto" is the fastest available. Raises InvalidOption."""
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


def device_memory(asked: str) -> DeviceMemory:
    """Returns the memory of the device for --device. Raises InvalidOption."""
    device = resolve_device(asked)
    return DeviceMemory(_memory_kind(device), _free_bytes(device))


def _memory_kind(device: torch.device) -> PoolMemory:
    match device.type:
        case "cpu":
            return "host"
        case "mps":
            return "unified"
        case _:
            return "device"


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


def resolve_dtype(asked: str, device: torch.device) -> torch.dtype:
    """Returns the dtype for --dtype; "auto" is the smallest that the device computes natively."""
    if asked != "auto":
        return _DTYPES[asked]
    match device.type:
        case "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
            return torch.bfloat16 if native else torch.float16
        case "mps":
            return torch.float16
        case _:
            # Without native support bfloat16 is emulated, several times slower than float32.
            native = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
            return torch.bfloat16 if native else torch.float32


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names_of(dtypes: set[torch.dtype]) -> str:
    return "+".join(sorted(_name_of(dtype) for dtype in dtypes))
