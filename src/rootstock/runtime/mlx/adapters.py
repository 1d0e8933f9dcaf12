"""LoRA adapters of a loaded mlx-lm model: requests of several adapters and of the base share a call.

An adapter's tensors are kept beside the base's weights, which are shared and never dequantized. Every load is
checked: for a batch that mixes the adapter with the base, the runtime's logits must equal the logits of the model's
own code with merged weights. Where a model's rows cannot be attributed, the adapter gets calls of its own.

Files of PEFT name modules as transformers does, and belong to the weights that transformers has. mlx-lm may rename,
transpose, split or stack weights when it reads a checkpoint. A module of PEFT's is therefore found by its weight: it
is the one that has exactly the stored array (`stored_modules`). Files of mlx-lm name mlx-lm's modules.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from rootstock.errors import AdapterUnusable
from rootstock.runtime.adapter_errors import UnfitModule
from rootstock.runtime.adapter_files import AdapterSource
from rootstock.runtime.base import LoadedAdapter, ModelDescription, Runtime, Segment
from rootstock.runtime.mlx.adapted_modules import (
    Lora,
    MergedWeights,
    MlxAdapterRows,
    add_delta,
    lora_of,
    remove_delta,
)
from rootstock.runtime.mlx.self_check import self_check
from rootstock.runtime.model_files import first_line
from rootstock.runtime.trial import Variant

_log = logging.getLogger(__name__)

# Architectures whose weights mlx-lm multiplies by constants of the configuration. Checkpoints that mlx-lm has written
# do not show it.
_SCALED_WEIGHTS = ("falcon_h1",)
_COMPILED = type(mx.compile(lambda: None))


class MlxAdapters:
    """The adapters of one model. Owned by the thread that owns the runtime."""

    def __init__(
        self,
        model: nn.Module,
        description: ModelDescription,
        make_runtime: Callable[[MlxAdapters], Runtime],
        stored_modules: Callable[[], Mapping[str, str | None]],
        refuse_large: Callable[[AdapterSource], None],
    ) -> None:
        """`make_runtime` makes a runtime with these adapters, for a check. `stored_modules` returns the name that the
        model has for each module of the checkpoint's, None for those whose weights mlx-lm changes. `refuse_large`
        raises AdapterUnusable for an adapter that does not fit in the memory."""
        self._model = model
        self._description = description
        self._make_runtime = make_runtime
        self._stored_modules = stored_modules
        self._refuse_large = refuse_large
        self._named: dict[str, Any] = dict(model.named_modules())  # type: ignore[no-untyped-call]
        self._loaded: dict[str, LoadedAdapter] = {}
        self.rows = MlxAdapterRows()

    def call_of(self, segment: Segment) -> str:
        """Returns the adapter whose calls a segment joins; empty: it joins the base's calls."""
        apart = segment.adapter and self._loaded[segment.adapter].batching == "apart"
        return segment.adapter if apart else ""

    def load(self, source: AdapterSource) -> LoadedAdapter:
        """Loads and checks an adapter. Raises AdapterUnusable."""
        if source.fingerprint in self._loaded:
            return self._loaded[source.fingerprint]
        self._refuse_large(source)
        self._refuse_compiled(source)
        given = self._read(source)
        dtype: mx.Dtype = getattr(mx, self._description.dtype)
        try:
            deltas = {name: lora.delta(dtype) for name, lora in given.items()}
            # Another thread cannot evaluate lazy arrays of this one.
            mx.eval([array for delta in deltas.values() for array in (delta.a, delta.b)])
            for name, delta in deltas.items():
                add_delta(self._named[name], self.rows, source.fingerprint, delta)
            loaded = LoadedAdapter(
                source.fingerprint,
                len(given),
                max(lora.rank for lora in given.values()),
                sum(delta.nbytes for delta in deltas.values()),
            )
            return self._checked(source, loaded, given)
        except BaseException:
            self.unload(source.fingerprint)
            raise

    def unload(self, fingerprint: str) -> None:
        """Drops an adapter, and the classes of modules that no other adapter changes."""
        self._loaded.pop(fingerprint, None)
        for module in self._named.values():
            remove_delta(module, fingerprint)

    # ------------------------------------------------------------------------------------------- reading

    def _refuse_compiled(self, source: AdapterSource) -> None:
        """Raises AdapterUnusable if the model has compiled its layers' code: no adapter would reach it."""
        for module in self._named.values():
            if any(isinstance(value, _COMPILED) for value in vars(module).values()):
                raise AdapterUnusable(
                    source.name,
                    f"mlx-lm compiles the code of {type(module).__name__}, which no adapter reaches: merge the "
                    "adapter instead",
                )

    def _read(self, source: AdapterSource) -> dict[str, Lora]:
        """Reads the tensors, and checks them against the modules that they change. Returns them by the model's names
        of these modules."""
        if source.scalings.with_magnitudes:
            raise AdapterUnusable(
                source.name, "it uses DoRA, which the MLX runtime does not have: merge the adapter instead"
            )
        given: dict[str, Lora] = {}
        try:
            arrays: Any = mx.load(str(source.weights))
            places = self._places(source)
            for name, files in source.tensors.items():
                try:
                    place = self._place(name, places)
                    tensors = {role: arrays[key] for role, key in files.names.items()}
                    scalings = source.scalings
                    lora = lora_of(
                        self._named[place],
                        source.format,
                        tensors,
                        scalings.scaling_of(name),
                        scalings.rank_of(name),
                    )
                except UnfitModule as refusal:
                    raise AdapterUnusable(source.name, f"{name} {refusal}") from refusal
                if any(self._named[place] is self._named[other] for other in given):
                    raise AdapterUnusable(source.name, f"{name} is a module that the adapter changes twice")
                given[place] = lora
            source.refuse_changed()
        except (KeyError, OSError, RuntimeError) as error:  # of MLX, or of a file that was changed meanwhile
            raise AdapterUnusable(source.name, f"its weights cannot be read ({first_line(error)})") from error
        return given

    def _places(self, source: AdapterSource) -> Mapping[str, str | None]:
        """Returns the model's names of modules by the adapter's. Raises AdapterUnusable."""
        if source.format == "mlx-lm":
            return {name: name for name in self._named}
        architecture = self._description.architecture
        if architecture in _SCALED_WEIGHTS:
            raise AdapterUnusable(
                source.name,
                f"mlx-lm multiplies the weights of {architecture} by constants, which PEFT's files do not know: "
                "merge the adapter instead",
            )
        try:
            return self._stored_modules()
        except Exception as error:  # the model's own code may raise anything
            raise AdapterUnusable(
                source.name,
                f"the model's files cannot be read, which name its modules ({first_line(error)})",
            ) from error

    def _place(self, name: str, places: Mapping[str, str | None]) -> str:
        if name not in places:
            raise UnfitModule("is no module of the base model: the adapter was made for another one")
        place = places[name]
        if place is None:
            raise UnfitModule(
                "has a weight that mlx-lm changes or leaves out when it reads a checkpoint: merge the adapter "
                "instead, or train it with mlx-lm"
            )
        assert place in self._named, "mlx-lm has loaded the weight into a module"
        return place

    # --------------------------------------------------------------------------------------- the check

    def _checked(
        self, source: AdapterSource, loaded: LoadedAdapter, given: Mapping[str, Lora]
    ) -> LoadedAdapter:
        """Returns the adapter as it is served. Raises AdapterUnusable if its logits differ from merged weights'."""
        alone = self._description.execution_mode == "one sequence per forward"
        reasons: list[str] = []
        batchings: tuple[Literal["mixed", "apart"], ...] = ("apart",) if alone else ("mixed", "apart")
        variant = Variant(source.fingerprint, lambda: self._merged(source, given))
        for batching in batchings:
            self._loaded[source.fingerprint] = replace(loaded, batching=batching)
            try:
                self_check(
                    self._model,
                    self._description,
                    lambda: self._make_runtime(self),
                    lambda done: None,
                    variant,
                )
            except (AdapterUnusable, MemoryError):
                raise
            except Exception as failure:  # the model's own code may raise anything
                reasons.append(first_line(failure))
                continue
            if reasons:
                _log.warning("Requests of adapter %s have forwards of their own: %s", source.name, reasons[0])
            return self._loaded[source.fingerprint]
        raise AdapterUnusable(
            source.name, f"its answers would not be those of the merged weights: {reasons[-1]}"
        )

    @contextlib.contextmanager
    def _merged(self, source: AdapterSource, given: Mapping[str, Lora]) -> Iterator[None]:
        """Runs the model with merged weights. Raises AdapterUnusable if the model's code reads one past its layer."""
        merged = {name: MergedWeights(self._named[name], lora) for name, lora in given.items()}
        with contextlib.ExitStack() as stack:
            for each in merged.values():
                stack.enter_context(each.in_place())
            yield
        for name, each in merged.items():
            if each.is_read_elsewhere:
                raise AdapterUnusable(
                    source.name,
                    f"{name} has a weight that the model's code reads itself, past the layer: merge the adapter "
                    "instead",
                )
