"""Loader of the OpenVINO runtime: from a directory with an exported graph to a runtime that has passed its
self-check."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openvino as ov
import xxhash

from rootstock.config import ModelConfig
from rootstock.errors import (
    InvalidOption,
    ModelFileInvalid,
    ModelTooLarge,
    ModelUnsupported,
    ModelWeightsMissing,
    SelfCheckFailed,
)
from rootstock.runtime.base import DeviceMemory, ModelDescription
from rootstock.runtime.host_memory import free_host_bytes, refuse_host_tier
from rootstock.runtime.memory_fit import (
    Demands,
    refuse_beyond,
    refuse_beyond_limit,
    refuse_hopeless_budget,
    refuse_longer_context,
    refuse_options,
)
from rootstock.runtime.model_config import CONTEXT_NAMES, context_limit, declared_positions, eos_token_ids
from rootstock.runtime.model_files import (
    CONFIG,
    Progress,
    fingerprint,
    graph_files,
    in_one_line,
    locate,
    public_name,
    read_configs,
)
from rootstock.runtime.model_formats import OPENVINO_GRAPH
from rootstock.runtime.openvino.graph import (
    PAGE_TOKENS,
    GraphLayout,
    GraphUnsupported,
    count_weights,
    layout_of,
    make_paged,
    read_graph,
    shake_embeddings,
)
from rootstock.runtime.openvino.runner import OpenVinoExecution, OpenVinoRuntime, dtype_name
from rootstock.runtime.openvino.self_check import ExportedModel
from rootstock.runtime.trial import Disagreement, check

_TYPES = {"float32": "f32", "bfloat16": "bf16"}  # OpenVINO's names
_INT8 = "u8"
_FLOATS = ("f64", "f32", "f16", "bf16")  # types of weights that are computed in the dtype, and packed in it
_CHECKED_ROWS = 1750  # of logits that the self-check and the two graphs have at a time
# OpenVINO's words where an allocation fails, which it does not report as a MemoryError.
_NO_MEMORY = re.compile("Failed to allocate|Cannot allocate memory|bad.alloc|failed to map segment")
_QUANTIZED = {"i8": "int8", "u8": "int8", "i4": "int4", "u4": "int4", "nf4": "int4"}


@dataclass(frozen=True, slots=True)
class _Declared:
    """Declarations of config.json and generation_config.json."""

    architecture: str
    context_limit: int
    rope_regime: str
    eos_token_ids: tuple[int, ...]


@functools.cache
def _core() -> ov.Core:
    return ov.Core()


def device_memory(device: str) -> DeviceMemory:
    """Returns the memory in which the runtime makes its pools. Raises InvalidOption."""
    _refuse_device(device)
    return DeviceMemory("host", free_host_bytes())


def check_architecture(config: ModelConfig, directory: Path) -> None:
    """Checks that there are a graph, its weights and its configuration. Raises ModelFileInvalid or
    ModelWeightsMissing."""
    _declared(config.model, directory)
    graph_files(config.model, directory)


def load_model(
    config: ModelConfig,
    progress: Progress | None = None,
    demands: Demands | None = None,
    *,
    directory: Path | None = None,
) -> OpenVinoRuntime:
    """Loads an exported graph and self-checks it. The runtime is ready for `allocate`.

    `directory`: the result of `locate_model`, if it was already called. Raises InvalidOption or ModelError.
    """
    demands = demands or Demands()
    report = progress or (lambda stage, done: None)
    _refuse_options(config, demands)
    name = config.model
    directory = directory or locate(name, with_code=False, progress=report, takes_graph=lambda _: True)
    declared, files = _declared(name, directory), graph_files(name, directory)
    refuse_longer_context(demands.context_limit, declared.context_limit)
    native = native_dtype()
    dtype = config.dtype if config.dtype != "auto" else native
    if dtype == "bfloat16" != native:  # OpenVINO fails on such K and V, with a line of its source
        raise _not_computed(dtype, native)
    needed = 0
    try:
        graph = read_graph(_core(), files[0])
        needed = _load_bytes(graph, dtype)
        if config.memory_check:
            free = free_host_bytes()
            refuse_beyond(name, needed, dtype, "--kv-budget", demands.pool_bytes, free, "main memory")
            refuse_beyond_limit(name, needed, dtype, demands)
        report("hash", 0.0)
        hashed = fingerprint(directory, files, "openvino")
        report("hash", 1.0)
        report("load", 0.0)
        exact = replace(config, kv_dtype="auto")
        served = _loaded(exact, declared, hashed, graph, dtype)
        report("load", 1.0)
        # With exact K and V, because the loss of rounding is the user's choice and no error.
        own = exported_model(exact, directory, dtype)
        check(own, served.description, lambda: OpenVinoRuntime(served), lambda done: report("check", done))
        del own
        if config.kv_dtype == "int8":
            del served  # two graphs at most take memory at a time
            served = _loaded(config, declared, hashed, read_graph(_core(), files[0]), dtype)
        if demands.kv_budget is not None:
            refuse_hopeless_budget(served.layout.families, demands)
    except Disagreement as found:
        raise SelfCheckFailed(name, found.figure, found.allowed, found.quantity) from found
    except OSError as error:
        raise ModelWeightsMissing(name, f"{error.filename} cannot be read ({error.strerror})") from error
    except (GraphUnsupported, MemoryError, RuntimeError, LookupError, ValueError, TypeError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, MemoryError) or _NO_MEMORY.search(str(cause)):
            free, memory = free_host_bytes(), "main memory, which the system did not grant,"
            raise ModelTooLarge(name, needed, dtype, free, memory) from error
        is_ours = isinstance(error, GraphUnsupported)  # others come from a graph's odd parts
        reason = f"it {error}" if is_ours else f"OpenVINO refuses its graph: {in_one_line(error)}"
        raise ModelUnsupported(name, reason) from error
    return OpenVinoRuntime(served)


def _loaded(
    config: ModelConfig, declared: _Declared, hashed: str, graph: ov.Model, dtype: str
) -> OpenVinoExecution:
    """Compiles an exported graph over pools, and describes it. Raises GraphUnsupported or InvalidOption."""
    weights = count_weights(graph)
    widths = make_paged(_core(), graph)
    compiled = _compiled(graph, config, dtype)
    layout = layout_of(compiled, widths)
    description = ModelDescription(
        name=config.served_name or public_name(config.model),
        architecture=declared.architecture,
        vocab_size=layout.vocab_size,
        context_limit=declared.context_limit,
        families=layout.families,
        weights_fingerprint=hashed,
        dtype=dtype,
        kv_dtype="+".join(sorted({dtype_name(port.type) for ports in layout.ports for port in ports})),
        device="cpu",
        parameters=weights.total(),
        rope_regime=declared.rope_regime,
        eos_token_ids=declared.eos_token_ids,
        quantize=_QUANTIZED.get(weights.most_common(1)[0][0], "none") if weights else "none",
        layout=_layout_name(layout),
        runtime="openvino",
        block_size=PAGE_TOKENS,
    )
    return OpenVinoExecution(compiled, layout, description)


def exported_model(config: ModelConfig, directory: Path, dtype: str) -> ExportedModel:
    """Compiles the exported graph, with its own cache. Raises GraphUnsupported."""
    model = read_graph(_core(), directory / OPENVINO_GRAPH)
    width = shake_embeddings(model)
    return ExportedModel(_compiled(model, config, dtype), width, dtype)


def _compiled(graph: ov.Model, config: ModelConfig, dtype: str) -> ov.CompiledModel:
    """Raises InvalidOption for a dtype that OpenVINO does not compute on this processor."""
    compiled = _core().compile_model(graph, "CPU", _settings(config, dtype))
    taken = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    if taken != _TYPES[dtype]:
        raise _not_computed(dtype, dtype_name(taken))
    return compiled


def _not_computed(dtype: str, native: str) -> InvalidOption:
    return InvalidOption("--dtype", dtype, f"auto: OpenVINO computes in {native} on this processor")


def _load_bytes(graph: ov.Model, dtype: str) -> int:
    """Returns the main memory that a load takes: weights of the paged and of the exported graph, as OpenVINO packs
    them, and the logits of the self-check."""
    computed = ov.Type.bf16 if dtype == "bfloat16" else ov.Type.f32
    bits = 0
    for name, count in count_weights(graph).items():
        stored = getattr(ov.Type, name)
        bits += count * (computed if name in _FLOATS else stored).bitwidth
    vocab_size: int = graph.output("logits").get_partial_shape()[-1].get_length()
    return 2 * bits // 8 + _CHECKED_ROWS * vocab_size * 4


def _settings(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Returns the properties of a compiled graph."""
    settings: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": _TYPES[dtype],
        "KV_CACHE_PRECISION": _INT8 if config.kv_dtype == "int8" else _TYPES[dtype],
        # Scales of keys by token: a scale of a block's channels would change with the block's later tokens.
        "KEY_CACHE_QUANT_MODE": "BY_TOKEN",
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,  # replicas of one machine would share the first processors
    }
    if dtype == "float32":
        settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0  # activations stay exact beside compressed weights
    if config.threads is not None:
        settings["INFERENCE_NUM_THREADS"] = config.threads
    return settings


def native_dtype() -> str:
    """Returns the smallest dtype that the processor computes natively."""
    return "bfloat16" if "BF16" in _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "float32"


def _layout_name(layout: GraphLayout) -> str:
    """Returns a hash of the row layout. OpenVINO's version counts because it may store other contents in the same
    shapes."""
    kept = repr((layout.families, layout.ports, "openvino", ov.get_version()))
    return xxhash.xxh3_64_hexdigest(kept.encode())


# ---- files


def _declared(model: str, directory: Path) -> _Declared:
    """Raises ModelFileInvalid."""
    config, text, generation = read_configs(model, directory)
    try:
        limit, regime = context_limit({**text, CONTEXT_NAMES[0]: declared_positions(text)})
    except ValueError as error:
        raise ModelFileInvalid(model, CONFIG, str(error)) from error
    architectures = config.get("architectures")
    named = (
        architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    )
    return _Declared(str(named)[:100], limit, regime, eos_token_ids(generation, text, config))


# ---- options


def _refuse_options(config: ModelConfig, demands: Demands) -> None:
    """Raises InvalidOption for options that the OpenVINO runtime does not have."""
    _refuse_device(config.device)
    refuse_host_tier(demands.host_bytes, "host")
    if demands.block_size != PAGE_TOKENS:
        remedy = f"{PAGE_TOKENS}: the OpenVINO runtime has blocks of {PAGE_TOKENS} tokens"
        raise InvalidOption("--block-size", demands.block_size, remedy)
    adapter = config.adapters[0].name if config.adapters else None
    options = (
        ("--trust-remote-code", config.trust_remote_code, False, "it runs no code of a checkpoint"),
        ("--cuda-graphs", bool(config.cuda_graphs), False, "it computes on CPUs"),
        ("--attention", config.attention, "auto", "its attention is OpenVINO's"),
        ("--state-dtype", config.state_dtype, "auto", "it keeps states as the graph computes them"),
        ("--quantize", config.quantize, "none", "weights are quantized at the export, to int8 or int4"),
        ("--adapter", adapter, None, "its graphs take no adapters"),
    )  # fmt: skip
    refuse_options("OpenVINO", options)
    if config.dtype not in ("auto", *_TYPES):
        raise InvalidOption("--dtype", config.dtype, "auto, float32 or bfloat16 with the OpenVINO runtime")


def _refuse_device(device: str) -> None:
    if device not in ("auto", "cpu"):
        raise InvalidOption("--device", device, "auto or cpu: the OpenVINO runtime computes on CPUs")
