"""LoRA adapters of a loaded model: requests of several adapters and of the base share a forward.

An adapter's tensors are kept beside the base's weights, which are shared. The modules that it changes get a forward
of their own, and each forward's rows are attributed to adapters (rows.py). Every load is checked: for a batch
that mixes the adapter with the base, the runtime's logits must equal the model's own code with merged weights.
Where a model's rows cannot be attributed, the adapter gets forwards of its own, and is checked in these.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rootstock.errors import AdapterUnusable
from rootstock.kernels.torch.sliced_attention import Tuning
from rootstock.runtime.adapter_errors import UnfitModule
from rootstock.runtime.adapter_files import AdapterSource, ModuleTensors, Role
from rootstock.runtime.base import LoadedAdapter, Runtime, Segment
from rootstock.runtime.model_files import first_line
from rootstock.runtime.torch.adapters.deltas import LoraTensors, MergedForward, delta_of, refuse_misfit
from rootstock.runtime.torch.adapters.rows import AdaptedModule, AdaptedProjection, TorchAdapterRows
from rootstock.runtime.torch.fallback import TorchExecution
from rootstock.runtime.torch.hooks import keeps_latents
from rootstock.runtime.torch.lazy_rows import OutOfMemory
from rootstock.runtime.torch.packed_linears import weight_of
from rootstock.runtime.torch.self_check import self_check
from rootstock.runtime.trial import Variant

_log = logging.getLogger(__name__)


class TorchAdapters:
    """The adapters of one model. Owned by the thread that owns the runtime."""

    def __init__(
        self,
        model: nn.Module,
        served: TorchExecution,
        read_elsewhere: Mapping[str, str],
        refuse_large: Callable[[AdapterSource], None],
    ) -> None:
        """`served`: the model in its execution mode. `read_elsewhere`: linear layers that are not packed, by name,
        and the reason. `refuse_large` raises AdapterUnusable for an adapter that does not fit in the memory."""
        self._model = model
        self._refuse_large = refuse_large
        self.served = served
        self._read_elsewhere = {name for name, why in read_elsewhere.items() if "read by other code" in why}
        self._named = dict(model.named_modules())
        self.sees_images = False  # features of images are computed without adapters, for all requests
        self._dtype: torch.dtype = getattr(torch, served.description.dtype)
        find_head = getattr(model, "get_output_embeddings", None)
        self._head = find_head() if callable(find_head) else None
        self._loaded: dict[str, LoadedAdapter] = {}
        self.rows = TorchAdapterRows(torch.device(served.description.device))

    def groups(self, segments: Sequence[Segment]) -> list[list[int]]:
        """Divides a step's segments into forwards: those that share one, and one for each adapter that runs apart."""
        shared: list[int] = []
        apart: dict[str, list[int]] = {}
        for number, segment in enumerate(segments):
            if segment.adapter and self._loaded[segment.adapter].batching == "apart":
                apart.setdefault(segment.adapter, []).append(number)
            else:
                shared.append(number)
        return [group for group in (shared, *apart.values()) if group]

    def load(self, source: AdapterSource, make_runtime: Callable[[Tuning], Runtime]) -> LoadedAdapter:
        """Loads and checks an adapter. `make_runtime` makes a runtime with these adapters. Raises AdapterUnusable."""
        if source.fingerprint in self._loaded:
            return self._loaded[source.fingerprint]
        if source.format != "peft":
            raise AdapterUnusable(
                source.name,
                f"its files are in {source.format}'s format, which only the MLX runtime reads: mlx-lm may name and "
                "store a model's weights otherwise than transformers does",
            )
        self._refuse_large(source)
        given = self._read(source)
        nbytes = 0
        try:
            for name, tensors in given.items():
                module = self._named[name]
                adapted = self._adapted(module)
                delta = delta_of(module, tensors, functools.partial(_weight, module, adapted), self._dtype)
                adapted.deltas[source.fingerprint] = delta
                nbytes += delta.nbytes
            self._adapt_projections()
            rank = max(
                (len(t.tensors[role]) for t in given.values() for role in _RANKED if role in t.tensors),
                default=0,
            )
            loaded = LoadedAdapter(source.fingerprint, len(given), rank, nbytes)
            self._loaded[source.fingerprint] = loaded
            return self._checked(source, given, make_runtime)
        except BaseException:
            self.unload(source.fingerprint)
            raise

    def unload(self, fingerprint: str) -> None:
        """Drops an adapter, and the replacements of modules that no other adapter changes."""
        self._loaded.pop(fingerprint, None)
        for module in self._named.values():
            adapted = vars(module).get("forward")
            if not isinstance(adapted, AdaptedModule):
                continue
            adapted.deltas.pop(fingerprint, None)
            if not adapted.deltas:
                self._restore(module, adapted)
        for projection in self.served.fusion.projections:
            packed = projection.multiply
            if isinstance(packed, AdaptedProjection) and not any(map(_is_adapted, projection.linears)):
                projection.use(packed.own)

    # ------------------------------------------------------------------------------------------- reading

    def _read(self, source: AdapterSource) -> dict[str, LoraTensors]:
        """Reads the tensors, and checks them against the modules that they change."""
        given: dict[str, LoraTensors] = {}
        try:
            with safe_open(source.weights, framework="pt") as opened:
                for name, files in source.tensors.items():
                    try:
                        given[self._found(name)] = self._of_module(source, name, files, opened)
                    except UnfitModule as refusal:
                        raise AdapterUnusable(source.name, f"{name} {refusal}") from refusal
            source.refuse_changed()
        except (SafetensorError, OSError) as error:
            raise AdapterUnusable(source.name, f"its weights cannot be read ({first_line(error)})") from error
        return given

    def _of_module(self, source: AdapterSource, name: str, files: ModuleTensors, opened: Any) -> LoraTensors:
        found = self._found(name)
        module = self._named.get(found)
        if module is None:
            raise UnfitModule("is no module of the base model: the adapter was made for another one")
        if self.sees_images and not self._is_of_text(module):
            raise UnfitModule("changes how images are seen, which no adapter does here: merge it instead")
        parent = self._named.get(found.rpartition(".")[0])
        expands = parent is not None and keeps_latents(parent) and name.endswith(".kv_b_proj")
        if name in self._read_elsewhere and not expands:
            raise UnfitModule(
                "has a weight that the model's code reads itself, past the layer: merge the adapter instead"
            )
        scalings = source.scalings
        # By the shapes of the file's header: a tensor that fits no module is never read.
        refuse_misfit(module, files.shapes, scalings.rank_of(name), dora=scalings.with_magnitudes)
        tensors: dict[Role, Tensor] = {role: opened.get_tensor(key) for role, key in files.names.items()}
        for role, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise UnfitModule(f"has {role} with numbers that are not finite")
        dora = scalings.with_magnitudes and "magnitude" in tensors
        return LoraTensors(tensors, scalings.scaling_of(name), dora)

    def _found(self, name: str) -> str:
        """Returns the name of an adapter's module in this model: a model of text and images has the modules of its
        model of text within another one."""
        inner = name.removeprefix("model.")
        names = (name, f"model.language_model.{inner}", f"language_model.{name}")
        return next((each for each in names if each in self._named), name)

    def _is_of_text(self, module: nn.Module) -> bool:
        decoder: Any = self._model
        return module is self._head or any(module is each for each in decoder.get_decoder().modules())

    # -------------------------------------------------------------------------------------- the modules

    def _adapted(self, module: nn.Module) -> AdaptedModule:
        adapted = vars(module).get("forward")
        if not isinstance(adapted, AdaptedModule):
            is_head = module is self._head and self.served.layout.calling.keeps_rows
            adapted = AdaptedModule(module, self.rows, has_kept_rows=is_head)
            module.forward = adapted
        return adapted

    def _adapt_projections(self) -> None:
        """Adapts the products of several layers, which fused code calls instead of the layers."""
        for projection in self.served.fusion.projections:
            packed = projection.multiply
            if not projection.is_packed or isinstance(packed, AdaptedProjection):
                continue
            if any(map(_is_adapted, projection.linears)):
                projection.use(AdaptedProjection(packed, self.rows, projection.linears))

    @staticmethod
    def _restore(module: nn.Module, adapted: AdaptedModule) -> None:
        if adapted.is_replaced:
            module.forward = adapted.own
        else:
            del module.forward

    # --------------------------------------------------------------------------------------- the check

    def _checked(
        self,
        source: AdapterSource,
        given: Mapping[str, LoraTensors],
        make_runtime: Callable[[Tuning], Runtime],
    ) -> LoadedAdapter:
        """Returns the adapter as it is served. Raises AdapterUnusable if its logits differ from merged weights'."""
        variant = Variant(source.fingerprint, functools.partial(self._merged, given))
        alone = self.served.description.execution_mode == "one sequence per forward"
        reasons = []
        batchings: tuple[Literal["mixed", "apart"], ...] = ("apart",) if alone else ("mixed", "apart")
        for batching in batchings:
            loaded = replace(self._loaded[source.fingerprint], batching=batching)
            self._loaded[source.fingerprint] = loaded
            try:
                self_check(
                    self._model,
                    self.served.layout.calling,
                    self.served.description,
                    make_runtime,
                    lambda done: None,
                    variant,
                )
            except OutOfMemory:
                raise
            except Exception as failure:  # the model's own code may raise anything
                reasons.append(first_line(failure))
                continue
            if reasons and not alone:
                _log.warning("Requests of adapter %s have forwards of their own: %s", source.name, reasons[0])
            return loaded
        wrong = reasons[-1]
        raise AdapterUnusable(source.name, f"its answers would not be those of the merged weights: {wrong}")

    @contextlib.contextmanager
    def _merged(self, given: Mapping[str, LoraTensors]) -> Iterator[None]:
        """Runs the model with merged weights, which are computed at each call of a module: one at a time is in
        memory."""
        adapted = {name: self._named[name].forward for name in given}
        try:
            for name, tensors in given.items():
                module = self._named[name]
                module.forward = MergedForward(
                    module, tensors, functools.partial(_weight, module, adapted[name])
                )
            yield
        finally:
            for name, forward in adapted.items():
                self._named[name].forward = forward


_RANKED: tuple[Role, ...] = ("A", "embedding_A")


def _is_adapted(linear: nn.Linear) -> bool:
    return isinstance(vars(linear).get("forward"), AdaptedModule)


def _weight(module: nn.Module, adapted: AdaptedModule) -> Tensor:
    """Returns the base's weight [out, in] of a linear layer."""
    if isinstance(module, nn.Linear):
        return weight_of(module, adapted.own)
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.T
