"""Loader of the MLX runtime: from a directory or the Hub to a runtime that has passed its self-check."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import xxhash
from mlx_lm.utils import get_total_parameters

from rootstock.background import in_background
from rootstock.config import CacheConfig, ModelConfig
from rootstock.errors import InvalidOption, ModelUnsupported, ModelWeightsMissing
from rootstock.kernels.metal.paged_attention import PagedKernel
from rootstock.kernels.metal.trial import why_not
from rootstock.runtime.adapter_files import AdapterSource
from rootstock.runtime.base import ModelDescription
from rootstock.runtime.host_memory import refuse_host_tier
from rootstock.runtime.memory_fit import (
    Demands,
    refuse_adapter_beyond,
    refuse_beyond,
    refuse_beyond_limit,
    refuse_hopeless_budget,
    refuse_longer_context,
    refuse_options,
)
from rootstock.runtime.mlx.adapters import MlxAdapters
from rootstock.runtime.mlx.checkpoint import MODELOPT_CONFIG, MlxCheckpoint, read_checkpoint
from rootstock.runtime.mlx.memory import device_memory as device_memory
from rootstock.runtime.mlx.memory import free_bytes, limit_memory
from rootstock.runtime.mlx.modes import choose_mode
from rootstock.runtime.mlx.runner import MlxExecution, MlxRuntime, dtype_name
from rootstock.runtime.mlx.survey import MlxLayout, UnsupportedModel, survey
from rootstock.runtime.mlx.weights import (
    arrays_of,
    cast,
    evaluate_weights,
    is_quantized,
    lazy_model,
    quantize,
    stored_dtype,
    stored_modules,
)
from rootstock.runtime.model_files import (
    Progress,
    fingerprint,
    in_one_line,
    locate,
    public_name,
    weight_files,
)
from rootstock.units import in_units

_log = logging.getLogger(__name__)

_BLOCK_SIZE = CacheConfig().block_size  # a server's, unless an option says another
_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
# Suffix of a fingerprint, because K and V differ with quantized weights. The number changes with the quantization
# method.
_QUANTIZED_SUFFIXES = {"none": "", "int8": "/mlx.int8.1", "int4": "/mlx.int4.1"}


def check_architecture(config: ModelConfig, directory: Path) -> None:
    """Checks that mlx-lm knows the model. Raises ModelFileInvalid or ModelUnsupported."""
    read_checkpoint(config.model, directory)


def load_model(
    config: ModelConfig,
    progress: Progress | None = None,
    demands: Demands | None = None,
    *,
    directory: Path | None = None,
) -> MlxRuntime:
    """Loads a model from a directory or the Hub and self-checks it. The runtime is ready for `allocate`.

    `directory`: the result of `locate_model`, if it was already called. Raises InvalidOption or ModelError.
    """
    demands = demands or Demands()
    report = progress or (lambda stage, done: None)
    _refuse_options(config)
    refuse_host_tier(demands.host_bytes, "unified")
    limit_memory()
    directory = directory or locate(config.model, with_code=False, progress=report)
    with _on_device(config.device):
        return _load(config, report, demands, directory)


def _load(config: ModelConfig, report: Progress, demands: Demands, directory: Path) -> MlxRuntime:
    name = config.model
    files = weight_files(name, directory)
    checkpoint = read_checkpoint(name, directory)
    refuse_longer_context(demands.context_limit, checkpoint.context_limit)
    report("load", 0.0)
    model = lazy_model(name, checkpoint, files)
    dtype = _resolve_dtype(config.dtype, model)
    if config.dtype != "auto" or dtype != stored_dtype(model):
        cast(model, dtype)
    if config.quantize != "none":
        _quantize(model, config)
    if config.memory_check:
        _refuse_too_large(name, model, dtype, config.quantize, demands)
    if demands.kv_budget is not None:
        _refuse_hopeless_budget(model, config, demands)
    # With every file that has a part in the configuration.
    named = [*files, *(path for path in [directory / MODELOPT_CONFIG] if path.exists())]
    architecture = type(model).__module__
    hashed = in_background(functools.partial(fingerprint, directory, named, architecture), "hash")
    evaluate_weights(name, model, report)
    report("hash", 0.0)
    try:
        weights = hashed.result() + _QUANTIZED_SUFFIXES[config.quantize]
    except OSError as error:
        raise ModelWeightsMissing(name, f"{error.filename} cannot be read ({error.strerror})") from error
    report("hash", 1.0)
    try:
        layout = survey(model)
    except UnsupportedModel as refusal:
        raise ModelUnsupported(name, f"it {refusal}") from refusal
    except Exception as error:  # the model's own code may raise anything
        raise ModelUnsupported(name, f"a forward fails: {in_one_line(error)}") from error
    served = choose_mode(
        model,
        layout,
        _describe(config, checkpoint, model, layout, dtype, weights),
        lambda served: MlxRuntime(model, served),
        lambda done: report("check", done),
        _metal_kernel(),
        functools.partial(_why_not, int8_pools=config.kv_dtype == "int8"),
    )
    stored = _with_quantized_cache(served) if config.kv_dtype == "int8" else served
    adapters = MlxAdapters(
        model,
        served.description,
        lambda adapters: MlxRuntime(
            model, served, adapters
        ),  # with exact pools, as for the check of the model
        lambda: stored_modules(checkpoint, files),
        lambda source: _refuse_large_adapter(source, dtype) if config.memory_check else None,
    )
    return MlxRuntime(model, stored, adapters)


def _metal_kernel() -> PagedKernel | None:
    """Returns the kernel of paged attention; None: MLX computes without Metal."""
    return PagedKernel() if mx.metal.is_available() and mx.default_device() == mx.gpu else None


def _why_not(kernel: PagedKernel, int8_pools: bool) -> str | None:
    """Tries the kernel for the layers that it has served in the self-check, also with blocks of a server's size, and
    on pools that are quantized if the server's will be."""
    served = {replace(use, block_size=size) for use in kernel.uses for size in (use.block_size, _BLOCK_SIZE)}
    if int8_pools:
        served |= {replace(use, is_quantized=True) for use in served}
    return why_not(kernel, served)


def _describe(
    config: ModelConfig,
    checkpoint: MlxCheckpoint,
    model: nn.Module,
    layout: MlxLayout,
    dtype: mx.Dtype,
    weights: str,
) -> ModelDescription:
    return ModelDescription(
        name=config.served_name or public_name(config.model),
        architecture=checkpoint.architecture,
        vocab_size=layout.vocab_size,
        context_limit=checkpoint.context_limit,
        families=layout.families,
        weights_fingerprint=weights,
        dtype=dtype_name(dtype),
        kv_dtype=_kept_dtypes(layout),
        device="gpu" if mx.default_device() == mx.gpu else "cpu",
        parameters=int(get_total_parameters(model)),
        rope_regime=checkpoint.rope_regime,
        eos_token_ids=checkpoint.eos_token_ids,
        quantize=config.quantize,
        layout=_layout_name(layout),
        runtime="mlx",
        memory="unified",
        lazy_states=True,
    )


# ---- options


def _refuse_options(config: ModelConfig) -> None:
    """Raises InvalidOption for options that the MLX runtime does not have."""
    options = (
        ("--trust-remote-code", config.trust_remote_code, False, "it runs no code of a checkpoint"),
        ("--threads", config.threads, None, "MLX chooses its threads itself"),
        ("--cuda-graphs", bool(config.cuda_graphs), False, "it has no CUDA graphs"),
        ("--attention", config.attention, "auto", "it chooses its kernel itself"),
        ("--state-dtype", config.state_dtype, "auto", "it keeps recurrent states as the model computes them"),
    )  # fmt: skip
    refuse_options("MLX", options)


@contextlib.contextmanager
def _on_device(asked: str) -> Iterator[None]:
    """Computes on the device for --device; "auto" is MLX's own choice. Raises InvalidOption."""
    if asked not in ("auto", "cpu"):
        remedy = "auto or cpu: the MLX runtime computes on the Mac's GPU, or on a CPU"
        raise InvalidOption("--device", asked, remedy)
    with mx.stream(mx.cpu if asked == "cpu" else mx.default_device()):
        yield


def _resolve_dtype(asked: str, model: nn.Module) -> mx.Dtype:
    """Returns the dtype for --dtype; "auto" is the checkpoint's on a GPU, float32 on a CPU, which emulates others."""
    if asked != "auto":
        return _DTYPES[asked]
    stored = stored_dtype(model)
    return stored if mx.default_device() == mx.gpu and stored in _DTYPES.values() else mx.float32


def _quantize(model: nn.Module, config: ModelConfig) -> None:
    """Quantizes the weights. Raises InvalidOption if they are quantized already."""
    if is_quantized(model):
        remedy = f"none: the weights of {config.model!r} are quantized already"
        raise InvalidOption("--quantize", config.quantize, remedy)
    kept = quantize(model, config.quantize)
    if kept:
        _log.warning(
            "%d layers are not %s: %s, because its width is no multiple of the group size",
            len(kept),
            config.quantize,
            kept[0],
        )


def _refuse_too_large(
    name: str, model: nn.Module, dtype: mx.Dtype, quantization: str, demands: Demands
) -> None:
    """Raises ModelTooLarge if the weights do not fit in the free memory, MemoryLacks if only the KV cache does not.

    The arrays are lazy: their sizes are known, and nothing is read yet.
    """
    words = (
        dtype_name(dtype) if quantization == "none" else f"{dtype_name(dtype)} with {quantization} weights"
    )
    adapters = demands.adapter_weights * int(dtype.size)
    if adapters:
        words = f"{words}, with {in_units(adapters)} of LoRA adapters"
    weights = sum(int(array.nbytes) for array in arrays_of(model)) + adapters
    refuse_beyond(name, weights, words, "--kv-budget", demands.pool_bytes, free_bytes(), "unified memory")
    refuse_beyond_limit(name, weights, words, demands)


def _refuse_hopeless_budget(model: nn.Module, config: ModelConfig, demands: Demands) -> None:
    """Raises BudgetTooSmall for a KV cache that could not hold a short request. The model is not evaluated for it."""
    try:
        layout = survey(model, evaluates=False)
    except Exception:  # the model's own code may raise anything; it is surveyed again, with its weights
        return
    refuse_hopeless_budget(
        (layout.with_quantized_rows() if config.kv_dtype == "int8" else layout).families, demands
    )


def _refuse_large_adapter(source: AdapterSource, dtype: mx.Dtype) -> None:
    """Raises AdapterUnusable if an adapter's weights do not fit in the memory that is free beside the model's."""
    refuse_adapter_beyond(source, int(dtype.size), free_bytes(), "unified memory")


# ---- rows


def _with_quantized_cache(served: MlxExecution) -> MlxExecution:
    """Returns the same model with pools that quantize K and V. The self-check has run with exact pools, because the
    loss of rounding is the user's choice and no error. Raises InvalidOption."""
    layout = served.layout.with_quantized_rows()
    kept = [shape for shape in layout.layers.values() if not shape.is_quantized]
    if len(kept) == len(layout.layers):
        stored = "latents" if kept else "no K and V"
        raise InvalidOption("--kv-dtype", "int8", f"auto: {served.description.name} keeps {stored}")
    if kept:
        _log.warning(
            "%d of %d layers are not kept in int8: they keep latents or an indexer's keys",
            len(kept),
            len(layout.layers),
        )
    description = replace(
        served.description,
        families=layout.families,
        kv_dtype=_kept_dtypes(layout),
        layout=_layout_name(layout),
    )
    return replace(served, layout=layout, description=description)


def _kept_dtypes(layout: MlxLayout) -> str:
    dtypes = {shape.kept_dtype for shape in layout.layers.values()}
    dtypes |= {shape.dtype for shapes in layout.states.values() for shape in shapes if shape is not None}
    return "+".join(sorted(map(dtype_name, dtypes)))


def _layout_name(layout: MlxLayout) -> str:
    """Returns a hash of the row layout: families, layers, states, and the versions of MLX and mlx-lm. The versions
    count because mlx-lm may store other contents in the same shapes."""
    kept = repr((layout.families, layout.layers, layout.states, "mlx", version("mlx"), version("mlx-lm")))
    return xxhash.xxh3_64_hexdigest(kept.encode())
