"""Measurements of the report of a Mac (`mlx_report.py`), one case in each process (`isolated.py`).

MLX is lazy: a timed function evaluates all that it computes, and waits until the device has done it. `time_of` runs
it a few times before it counts, because the first runs compile kernels and take memory from the system.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from isolated import Figures, Job, Measure, Skipped, error_text, serve_case
from numpy.typing import NDArray

from rootstock.kernels.metal.launch import AttentionHeads, Occupancy, StepRows
from rootstock.kernels.metal.paged_attention import LayerUse, PagedKernel
from rootstock.kernels.metal.trial import STEPS, TOLERANCES, WINDOW, error_of
from rootstock.runtime.host_memory import footprint_bytes, free_host_bytes, total_host_bytes
from rootstock.units import MIB, in_units

BLOCK = 32  # positions of a block, as a server has by default
WARM_UP, MOST_RUNS, LEAST_RUNS, RUNS_S = 2, 20, 3, 1.0

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_HEADS = AttentionHeads(q_heads=32, kv_heads=8, key_dim=128, value_dim=128)  # as in models of 8 B parameters
_MOST_LAYERS = 8  # of a timed call of attention
_STEPS_AHEAD = 64  # positions after a context, for the tokens of warm-ups and runs
_SUFFIX = 48
_NO_METAL = "MLX computes without Metal here"


def time_of(run: Callable[[], object], per: int = 1) -> Figures:
    """Times a function that evaluates all that it computes. `per`: equal computations in a call."""
    for _ in range(WARM_UP):
        run()
    mx.synchronize()
    times: list[float] = []
    until = time.perf_counter() + RUNS_S
    while len(times) < LEAST_RUNS or (len(times) < MOST_RUNS and time.perf_counter() < until):
        began = time.perf_counter()
        run()
        mx.synchronize()
        times.append((time.perf_counter() - began) * 1e3 / per)
    return {"min_ms": min(times), "median_ms": statistics.median(times), "runs": len(times)}


def has_metal() -> bool:
    return bool(mx.metal.is_available()) and mx.default_device() == mx.gpu


def _need(job: Job, nbytes: int) -> None:
    """Raises Skipped if a case needs more memory than it may take."""
    if nbytes > 0.8 * job.memory_bytes:
        needed, limit = in_units(nbytes), in_units(job.memory_bytes)
        raise Skipped(f"it needs about {needed} of memory, and this report takes at most {limit}")


def _or_error(measure: Callable[..., Figures], *arguments: Any) -> Figures:
    """Measures one way of several. An exception of it becomes its figure."""
    try:
        return measure(*arguments)
    except Exception as error:  # MLX and the code of models may raise anything
        return {"error": error_text(error)}


# ---- device and memory


def device(job: Job) -> Iterator[Figures]:
    """Reads the device's properties from MLX, and computes one sum on it."""
    yield {"metal": has_metal(), "device": str(mx.default_device())}
    yield {"info": dict(mx.device_info())}
    yield {"sum": np.array(mx.sum(mx.arange(1000))).item()}


def memory(job: Job) -> Iterator[Figures]:
    """Reads the limits that Rootstock derives, and whether they follow an array that is made and dropped."""
    from rootstock.engine.memory_watch import memory_limit
    from rootstock.runtime.mlx import memory as of_mlx

    def now() -> Figures:
        return {
            "footprint_bytes": footprint_bytes(),
            "free_host_bytes": free_host_bytes(),
            "free_array_bytes": of_mlx.free_bytes(),
            "active_bytes": mx.get_active_memory(),
            "cached_bytes": mx.get_cache_memory(),
        }

    yield {"total_host_bytes": total_host_bytes(), "memory_limit_bytes": memory_limit(None, "unified")}
    yield {"wired_limit": _or_error(_wired_limit)}
    of_mlx.limit_memory()
    yield {"cache_limit_bytes": of_mlx.cache_limit_bytes(), "mlx_limit_bytes": mx.get_memory_limit()}
    mx.clear_cache()
    yield {"before": now()}
    nbytes = int(job.case["array_mib"]) * MIB
    _need(job, nbytes)
    array = mx.ones((nbytes // 4,), mx.float32)
    mx.eval(array)
    mx.synchronize()
    yield {"with_array": now()}
    del array
    yield {"dropped": now()}
    mx.clear_cache()
    yield {"cache_cleared": now()}


def _wired_limit() -> Figures:
    """Sets the limit that the product sets, and returns it with the one before."""
    if not has_metal():
        return {"skipped": _NO_METAL}
    granted = int(mx.device_info()["max_recommended_working_set_size"])
    return {"before_bytes": mx.set_wired_limit(granted), "set_bytes": granted}


# ---- writes to pools


def pool_writes(job: Job) -> Iterator[Figures]:
    """Writes rows to a layer's pool, attends over a view of it, and counts the writes that copied the pool."""
    from rootstock.runtime.mlx.kv_pool import LayerPool, address_of
    from rootstock.runtime.mlx.survey import MlxLayerShape

    case = job.case
    heads = _HEADS
    shape = MlxLayerShape(0, heads.kv_heads, heads.key_dim, heads.value_dim, mx.bfloat16, shares_values=False)
    slots = int(case["pool_mib"]) * MIB // shape.bytes_per_token
    _need(job, 3 * slots * shape.bytes_per_token)
    pool = LayerPool(shape, slots)
    seen = min(1024, slots // 64)  # attention must not take as much as a copy
    rows = mx.ones((1, heads.kv_heads, 2, heads.key_dim), mx.bfloat16)
    query = mx.ones((1, heads.q_heads, 1, heads.key_dim), mx.bfloat16)
    mx.eval(rows, query, *pool.arrays)
    mx.synchronize()
    moved, copied, times = 0, 0, []
    addresses = [address_of(array) for array in pool.arrays]
    for number in range(int(case["writes"])):
        held = [array[:8] for array in pool.arrays] if case["slice_held"] else []
        mx.eval(held)
        mx.reset_peak_memory()
        before, began = mx.get_active_memory(), time.perf_counter()
        first = number % (slots - 7)
        at = mx.array([first, first + 7]) if case["scattered"] else (first, first + 2)
        pool.write(at, rows * number, rows)
        keys, values = (
            visible[None].transpose(0, 2, 1, 3)
            for visible in (pool.keys_at((0, seen)), pool.values_at((0, seen)))
        )
        out = mx.fast.scaled_dot_product_attention(query, keys, values, scale=0.1)
        del keys, values
        mx.eval(out, *pool.arrays)
        del out
        if case["synchronize"]:
            mx.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
        copied += mx.get_peak_memory() - before > pool.arrays[0].nbytes // 2
        now = [address_of(array) for array in pool.arrays]
        moved += now != addresses
        addresses = now
    yield {
        "writes": len(times),
        "copied_by_peak_memory": int(copied),
        "copied_by_address": None if None in addresses else int(moved),
        "min_ms": min(times),
        "median_ms": statistics.median(times),
    }


# ---- the kernel


def kernel(job: Job) -> Iterator[Figures]:
    """Compiles the Metal kernel for one kind of layer, and compares it with plain sums in float64."""
    if not has_metal():
        raise Skipped(_NO_METAL)
    case = job.case
    use = LayerUse(
        AttentionHeads(case["q_heads"], case["kv_heads"], case["key_dim"], case["value_dim"]),
        _DTYPES[case["dtype"]],
        case["block_size"],
        case["shares_values"],
        case["sinks"],
        case["softcap"],
        case["int8"],
    )
    made = PagedKernel()
    allowed = TOLERANCES[use.dtype]
    yield {"allowed_error": allowed}
    errors: dict[str, float] = {}
    for number, lengths in enumerate(STEPS):
        for window in (None, WINDOW):
            began = time.perf_counter()
            name = f"step {number}{'' if window is None else ', window'}"
            errors[name] = error_of(made, use, lengths, window, seed=number)
            if len(errors) == 1:
                yield {"first_s": time.perf_counter() - began}
            yield {"errors": errors}
    yield {"agrees": max(errors.values()) <= allowed}


# ---- attention of one layer


@dataclasses.dataclass(frozen=True, slots=True)
class FixedSplits(Occupancy):
    """Occupancy that always cuts a context into the same number of splits."""

    number: int = 1

    def splits(self, threadgroups: int, longest: int) -> int:
        return max(1, min(self.number, longest))


class _Layers:
    """K and V of equal layers for `rows` sequences of `context` positions, in one pool per layer."""

    def __init__(self, job: Job) -> None:
        self.rows, self.context = int(job.case["rows"]), int(job.case["context"])
        self.heads = _HEADS
        self.dtype = _DTYPES[job.case["dtype"]]
        self.scale = self.heads.key_dim**-0.5
        slots = self.rows * self.context
        numbers = self.heads.kv_heads * (self.heads.key_dim + self.heads.value_dim)
        nbytes = slots * numbers * int(self.dtype.size)
        # Several layers in a call, as in a model: K and V of a lone one would stay in the processor's cache.
        self.layers = max(1, min(_MOST_LAYERS, int(0.2 * job.memory_bytes) // nbytes))
        _need(job, (2 * self.layers + 1) * nbytes)  # a gather copies them
        self.nbytes = nbytes
        mx.random.seed(0)
        self.pools = []
        for _ in range(self.layers):
            pair = [
                mx.random.normal((slots, self.heads.kv_heads, dim), self.dtype)
                for dim in (self.heads.key_dim, self.heads.value_dim)
            ]
            mx.eval(pair)
            self.pools.append(pair)
        self.query = mx.random.normal((self.rows, self.heads.q_heads, 1, self.heads.key_dim), self.dtype)
        mx.eval(self.query)
        order = np.random.default_rng(0).permutation(slots // BLOCK)
        self.table: NDArray[np.int32] = order.reshape(self.rows, -1).astype(np.int32)

    def sdpa(self, rows: slice, keys: mx.array, values: mx.array) -> mx.array:
        """Attends for queries of `rows`, with K and V [rows, positions, heads, dim]."""
        k, v = (array.transpose(0, 2, 1, 3) for array in (keys, values))
        return mx.fast.scaled_dot_product_attention(self.query[rows], k, v, scale=self.scale)

    def slots(self) -> mx.array:
        """Returns the slots [rows, context] of the positions, as a step computes them on the device."""
        at = mx.arange(self.context, dtype=mx.int32)
        return mx.array(self.table)[:, at // BLOCK] * BLOCK + at % BLOCK


def attention(job: Job) -> Iterator[Figures]:
    """Times one decode's attention of a layer: from one contiguous array, views of runs, and gathers."""
    its = _Layers(job)
    yield {"layers": its.layers, "kv_mib": its.nbytes / MIB}
    shape = (its.rows, its.context)

    def contiguous() -> None:
        mx.eval([its.sdpa(slice(None), *(a.reshape(*shape, *a.shape[1:]) for a in kv)) for kv in its.pools])

    def views() -> None:
        runs = [slice(row * its.context, (row + 1) * its.context) for row in range(its.rows)]
        mx.eval(
            [
                mx.concatenate(
                    [
                        its.sdpa(slice(row, row + 1), k[run][None], v[run][None])
                        for row, run in enumerate(runs)
                    ]
                )
                for k, v in its.pools
            ]
        )

    def gather_by_row() -> None:
        slots = its.slots()
        mx.eval(
            [
                mx.concatenate(
                    [
                        its.sdpa(slice(row, row + 1), *(mx.take(a, slots[row : row + 1], axis=0) for a in kv))
                        for row in range(its.rows)
                    ]
                )
                for kv in its.pools
            ]
        )

    def gather() -> None:
        slots = its.slots()
        mx.eval([its.sdpa(slice(None), *(mx.take(a, slots, axis=0) for a in kv)) for kv in its.pools])

    for way in (contiguous, views, gather_by_row, gather):
        yield {way.__name__: _or_error(time_of, way, its.layers)}


def attention_by_kernel(job: Job) -> Iterator[Figures]:
    """Times the same attention by the Metal kernel, for several numbers of splits and for its own choice."""
    if not has_metal():
        raise Skipped(_NO_METAL)
    its = _Layers(job)
    yield {"layers": its.layers, "kv_mib": its.nbytes / MIB}
    query = its.query[:, :, 0]
    mx.eval(query)

    def timed(occupancy: Occupancy) -> Figures:
        made, count = PagedKernel(occupancy=occupancy), its.rows
        zeros, numbers = np.zeros(count, np.int32), np.arange(count, dtype=np.int32)

        def run() -> None:
            rows = StepRows(its.table, numbers, zeros, zeros + np.int32(its.context), BLOCK)
            mx.eval([made.attend(query, k, v, rows, scale=its.scale) for k, v in its.pools])

        return time_of(run, its.layers)

    yield {"chosen": _or_error(timed, Occupancy())}
    for splits in job.case["splits"]:
        yield {f"{splits} splits": _or_error(timed, FixedSplits(number=int(splits)))}


# ---- whole models


def make_model(job: Job) -> Iterator[Figures]:
    """Makes a llama of random weights in 4 bits, module by module, and saves it."""
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama
    from mlx_lm.utils import save_config, save_model

    assert job.model is not None
    config = dict(job.case["config"])
    made = llama.Model(llama.ModelArgs.from_dict(config))
    mx.random.seed(0)
    made.set_dtype(mx.bfloat16)
    quantization = {"group_size": 64, "bits": 4}
    leaves: Any = tree_flatten(made.leaf_modules(), is_leaf=nn.Module.is_module)
    for _, module in leaves:
        mx.eval(module.parameters())  # one after another, so that the weights in 16 bits are never all there
    nn.quantize(made, group_size=quantization["group_size"], bits=quantization["bits"])
    mx.eval(made.parameters())
    directory = Path(job.model)
    directory.mkdir(exist_ok=True)
    save_model(directory, made)
    save_config({**config, "quantization": quantization, "eos_token_id": 0}, directory / "config.json")
    yield _sizes_of(made)


def load(job: Job) -> Iterator[Figures]:
    """Loads the model as a server does, with its self-check, and runs a few steps of it."""
    from rootstock.config import ModelConfig
    from rootstock.runtime.mlx.load import load_model

    assert job.model is not None
    yield _public_config(Path(job.model))
    runtime = load_model(ModelConfig(job.model, runtime="mlx", served_name="model"))
    described = runtime.description
    yield {
        "execution_mode": described.execution_mode,
        "mode_reason": described.mode_reason,
        "dtype": described.dtype,
        "kv_dtype": described.kv_dtype,
        "parameters": described.parameters,
        "families": [type(family).__name__ for family in described.families],
        "footprint_bytes": footprint_bytes(),
        "active_bytes": mx.get_active_memory(),
        "free_array_bytes": runtime.free_bytes(),
    }
    its = _Sequences(runtime, described.families, 2, 64, scattered=True)
    for _ in range(4):
        its.decode()
    yield {"counters": dataclasses.asdict(runtime.stats)}


def _public_config(directory: Path) -> Figures:
    """Returns the fields of config.json that say how large a model is. They name no person."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    known = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    quantization = config.get("quantization") or {}
    bits = {name: quantization.get(name) for name in ("bits", "group_size", "mode") if name in quantization}
    return {"model_type": config.get("model_type"), "quantization": bits} | {
        name: text[name] for name in known if isinstance(text.get(name), int)
    }


def _sizes_of(model: Any) -> Figures:
    from mlx_lm.utils import get_total_parameters

    from rootstock.runtime.mlx.weights import arrays_of

    nbytes = sum(int(array.nbytes) for array in arrays_of(model))
    return {"parameters": int(get_total_parameters(model)), "weights_mib": nbytes / MIB}


class _Model:
    """A model of mlx-lm with evaluated weights, and runtimes of it in the execution modes to be measured."""

    def __init__(self, job: Job) -> None:
        from rootstock.runtime.mlx.checkpoint import read_checkpoint
        from rootstock.runtime.mlx.memory import limit_memory
        from rootstock.runtime.mlx.survey import survey
        from rootstock.runtime.mlx.weights import cast, evaluate_weights, lazy_model
        from rootstock.runtime.model_files import weight_files

        assert job.model is not None
        directory = Path(job.model)
        files = weight_files(job.model, directory)
        _need(job, sum(file.stat().st_size for file in files))
        limit_memory()
        self.job = job
        self.model: Any = lazy_model(job.model, read_checkpoint(job.model, directory), files)
        if not has_metal():
            cast(self.model, mx.float32)  # as the product does on a CPU
        evaluate_weights(job.model, self.model, lambda stage, done: None)
        self.layout = survey(self.model)

    def sequences(
        self, way: str, count: int, context: int, tokens: int = _STEPS_AHEAD, *, scattered: bool = True
    ) -> _Sequences:
        """Returns sequences of a new runtime. `way`: an execution mode, or "kernel"."""
        from rootstock.runtime.base import ModelDescription
        from rootstock.runtime.mlx.runner import MlxExecution, MlxRuntime

        families = self.layout.families
        self._check_memory(count, context + tokens)
        description = ModelDescription(
            name="model",
            architecture=type(self.model).__module__,
            vocab_size=self.layout.vocab_size,
            context_limit=context + tokens,
            families=families,
            weights_fingerprint="",
            dtype="",
            kv_dtype="",
            device="gpu" if has_metal() else "cpu",
            parameters=0,
            execution_mode="batched, gathered K and V" if way == "gathered" else "batched",
            runtime="mlx",
            memory="unified",
        )
        runtime = MlxRuntime(
            self.model, MlxExecution(self.layout, description, PagedKernel() if way == "kernel" else None)
        )
        return _Sequences(runtime, families, count, context, tokens, scattered=scattered)

    def _check_memory(self, count: int, tokens: int) -> None:
        from rootstock.cache.families import token_families

        per_token = sum(family.bytes_per_token for family in token_families(self.layout.families))
        weights = int(float(_sizes_of(self.model)["weights_mib"]) * MIB)
        _need(self.job, weights + 2 * count * tokens * per_token)

    def own_caches(self, count: int, context: int) -> list[Any]:
        """Returns mlx-lm's caches of a batch whose sequences have `context` positions of zeros."""
        from mlx_lm.models import cache as mlx_cache

        from rootstock.runtime.mlx.survey import caches_of

        self._check_memory(count, context)
        caches: list[Any] = mlx_cache.make_prompt_cache(self.model)
        mx.eval(self.model(mx.array([[1]]), cache=caches))
        for path, cache in caches_of(caches):
            if path in self.layout.layers:
                shape = self.layout.layers[path]
                keys, values = (
                    mx.zeros((1, shape.heads, context - 1, dim), shape.dtype)
                    for dim in (shape.key_dim, shape.value_dim)
                )
                cache.update_and_fetch(keys, values)
        if count > 1:
            caches = [cache.merge([cache] * count) for cache in caches]
        mx.eval([cache.state for cache in caches])
        mx.synchronize()
        return caches


class _Sequences:
    """Sequences of equal contexts in a runtime's pools. Content of K and V does not matter for times: it is zero."""

    def __init__(
        self,
        runtime: Any,
        families: Sequence[Any],
        count: int,
        context: int,
        tokens: int = _STEPS_AHEAD,
        *,
        scattered: bool,
    ) -> None:
        from rootstock.cache.families import RecurrentState, token_families
        from rootstock.cache.types import SlotId
        from rootstock.runtime.base import Batch, Segment

        self.runtime, self.count, self.past = runtime, count, context
        self.vocab_size = np.int32(runtime.description.vocab_size)
        self._make_batch, self._make_segment, self._slot = Batch, Segment, SlotId
        blocks = -(-(context + tokens) // BLOCK)
        rows = [count if isinstance(family, RecurrentState) else count * blocks for family in families]
        runtime.allocate(rows, BLOCK)
        order = np.arange(count * blocks, dtype=np.int32)
        if scattered:
            order = np.random.default_rng(0).permutation(order).astype(np.int32)
        self.tables = order.reshape(count, blocks)
        self.families = len(token_families(families))
        # The first token makes the recurrent states.
        self.forward([(row, 0, 1) for row in range(count)])

    def forward(self, parts: Sequence[tuple[int, int, int]]) -> NDArray[np.float32]:
        """Runs a forward of parts (sequence, past, new tokens), and returns the logits of each part's last token."""
        logits: NDArray[np.float32] = self.runtime.forward(
            self._make_batch(
                [
                    self._make_segment(
                        (7 * np.arange(past, past + new, dtype=np.int32) + 1) % self.vocab_size,
                        past,
                        (self.tables[row],) * self.families,
                        1,
                        self._slot(row),
                    )
                    for row, past, new in parts
                ]
            )
        )
        return logits

    def decode(self) -> NDArray[np.float32]:
        """Computes a token of each sequence."""
        logits = self.forward([(row, self.past, 1) for row in range(self.count)])
        self.past += 1
        return logits


def _ways(job: Job) -> list[tuple[str, str, bool]]:
    """Returns (name, way, whether blocks are scattered) of the runtime's ways to attend."""
    ways = [
        ("views", "batched", False),
        ("gathers", "batched", True),
        ("dense gather", "gathered", True),
    ]
    return [*ways, ("kernel", "kernel", True)] if job.case.get("kernel") and has_metal() else ways


def step(job: Job) -> Iterator[Figures]:
    """Times a decode step of a whole model, by mlx-lm with its own batch and by the runtime on its pools."""
    its = _Model(job)
    count, context = int(job.case["rows"]), int(job.case["context"])
    yield _sizes_of(its.model)

    def own() -> Figures:
        caches, token = its.own_caches(count, context), mx.ones((count, 1), mx.int32)

        def run() -> None:
            mx.eval(
                its.model(token, cache=caches)
            )  # as mlx-lm does: the caches follow from what attention reads

        return time_of(run)

    def own_ahead() -> Figures:
        """Times mlx-lm's loop, which builds a step while the device computes the one before."""
        caches = its.own_caches(count, context)
        steps = WARM_UP + MOST_RUNS
        token, times = mx.ones((count,), mx.int32), []
        for _ in range(steps):
            began = time.perf_counter()
            following = mx.argmax(its.model(token[:, None], cache=caches)[:, -1], axis=-1)
            mx.async_eval(following)  # type: ignore[no-untyped-call]
            mx.eval(token)
            token = following
            times.append((time.perf_counter() - began) * 1e3)
        mx.eval(token)
        times = times[WARM_UP:]
        return {"min_ms": min(times), "median_ms": statistics.median(times), "runs": len(times)}

    yield {"mlx-lm": _or_error(own)}
    yield {"mlx-lm, a step ahead": _or_error(own_ahead)}

    def ours(way: str, scattered: bool) -> Figures:
        sequences = its.sequences(way, count, context, scattered=scattered)
        return {**time_of(sequences.decode), **_counters(sequences)}

    for name, *way in _ways(job):
        yield {name: _or_error(ours, *way)}
        mx.clear_cache()


def _counters(sequences: _Sequences) -> Figures:
    runtime = sequences.runtime
    return {"pool_copies": runtime.pool_copies, "by_kernel": runtime.stats.attentions_by_kernel}


def prefill(job: Job) -> Iterator[Figures]:
    """Times a prompt in chunks, by mlx-lm with its own cache and by the runtime."""
    from mlx_lm.models import cache as mlx_cache

    its = _Model(job)
    tokens, chunk = int(job.case["tokens"]), int(job.case["chunk"])
    starts = range(0, tokens, chunk)

    def per_second(run: Callable[[], None]) -> Figures:
        run()  # a warm-up of the same shapes
        mx.synchronize()
        began = time.perf_counter()
        run()
        mx.synchronize()
        return {"tokens_per_s": tokens / (time.perf_counter() - began)}

    def own() -> None:
        caches = mlx_cache.make_prompt_cache(its.model)
        for _ in starts:
            its.model(mx.ones((1, chunk), mx.int32), cache=caches)
            mx.eval([cache.state for cache in caches])

    yield {"mlx-lm": _or_error(per_second, own)}

    def ours(way: str, scattered: bool) -> Figures:
        sequences = its.sequences(way, 1, tokens, scattered=scattered)

        def run() -> None:
            for start in starts:
                sequences.forward([(0, start, chunk)])

        return {**per_second(run), **_counters(sequences)}

    for name, *way in _ways(job):
        yield {name: _or_error(ours, *way)}


def suffix(job: Job) -> Iterator[Figures]:
    """Times decodes beside a suffix of 48 tokens: in two calls, and packed as 48 rows of one token in one call."""
    its = _Model(job)
    if its.layout.has_states:
        raise Skipped("the model has recurrent states, which take no packed rows")
    decodes, context = int(job.case["decodes"]), int(job.case["context"])
    start = context - _SUFFIX

    def ours(way: str, scattered: bool) -> Figures:
        sequences = its.sequences(way, decodes + 1, context, scattered=scattered)
        others = [(row + 1, context, 1) for row in range(decodes)]
        packed = [(0, start + i, 1) for i in range(_SUFFIX)]
        in_two = sequences.forward([(0, start, _SUFFIX), *others])
        in_one = sequences.forward([*packed, *others])[_SUFFIX - 1 :]
        difference = float(np.abs(in_two - in_one).max() / max(float(in_two.std()), 1e-30))
        return {
            "difference": difference,  # in standard deviations of a logit
            "two_calls": time_of(lambda: sequences.forward([(0, start, _SUFFIX), *others])),
            "packed": time_of(lambda: sequences.forward([*packed, *others])),
        }

    for name, *way in _ways(job):
        yield {name: _or_error(ours, *way)}


def rows(job: Job) -> Iterator[Figures]:
    """Times the reads and writes of rows by which tiers keep and restore them."""
    from rootstock.cache.families import RecurrentState
    from rootstock.cache.plan import RowPart

    its = _Model(job)
    blocks = int(job.case["blocks"])
    sequences = its.sequences("batched", 1, blocks * BLOCK)
    runtime = sequences.runtime
    for number, family in enumerate(its.layout.families):
        is_state = isinstance(family, RecurrentState)
        parts = [RowPart(number, row, 0 if is_state else BLOCK) for row in range(1 if is_state else blocks)]
        buffers = [runtime.read(part) for part in parts]
        nbytes = sum(int(buffer.nbytes) for buffer in buffers[0])

        def read(parts: Sequence[RowPart] = parts) -> None:
            for part in parts:
                runtime.read(part)

        def place(parts: Sequence[RowPart] = parts, buffers: Sequence[Any] = buffers) -> None:
            for part, its_buffers in zip(parts, buffers, strict=True):
                runtime.place(part, its_buffers)

        yield {
            f"{number} {type(family).__name__}": {
                "row_bytes": nbytes,
                "read": _or_error(_speed, read, len(parts), nbytes),
                "place": _or_error(_speed, place, len(parts), nbytes),
            }
        }
    sequences.decode()
    yield _counters(sequences)


def _speed(run: Callable[[], None], rows: int, nbytes: int) -> Figures:
    figures = time_of(run, rows)
    return {**figures, "gb_per_s": nbytes / float(figures["min_ms"]) / 1e6}


MEASUREMENTS: Mapping[str, Measure] = {
    "device": device,
    "memory": memory,
    "pool writes": pool_writes,
    "kernel": kernel,
    "attention": attention,
    "attention by kernel": attention_by_kernel,
    "model": make_model,
    "load": load,
    "step": step,
    "prefill": prefill,
    "suffix": suffix,
    "rows": rows,
}


def main() -> None:
    if not has_metal():
        mx.disable_compile()  # on a CPU it calls a C++ compiler for each function
    serve_case(MEASUREMENTS)


if __name__ == "__main__":
    main()
