"""Search for the common parts of a decoder layer: candidates by structure, accepted by comparing numbers.

A module with the children of a gated MLP may compute anything. The model is therefore run once on a few tokens at
near and far positions, and the inputs of each candidate are recorded. The candidate and its fused form are both run
on these inputs, and on the same inputs scaled up (which shows clipping) and scaled down (which shows the layer's own
part where hidden states are large). A form whose result differs by more than rounding is dropped: that module, and
any module that contains it, keeps its own forward. No architecture is named.

The self-check at load judges the model with its fused parts, like everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rootstock.kernels.api import Scores
from rootstock.kernels.torch.gathered_attention import attend_dense
from rootstock.runtime.torch.fusion.base import (
    NOTHING_FUSED,
    Fused,
    FusedStep,
    Fusion,
    Projection,
    is_fused,
)
from rootstock.runtime.torch.fusion.delta_nets import channel_delta_nets, delta_nets
from rootstock.runtime.torch.fusion.gated_convolutions import gated_convolutions
from rootstock.runtime.torch.fusion.modules import (
    FusedAttention,
    FusedLayer,
    FusedLoops,
    FusedMixer,
    FusedMLP,
    FusedNorm,
    Gate,
    Norms,
    ProjectionHeads,
)
from rootstock.runtime.torch.fusion.recurrences import FindParts, FusedRecurrence, agreeing
from rootstock.runtime.torch.fusion.selective_scans import selective_scans
from rootstock.runtime.torch.fusion.state_spaces import state_spaces
from rootstock.runtime.torch.hooks import AttentionCall, LayerUnsupported, mark, runs_alone
from rootstock.runtime.torch.inspect.attention_probe import ProbeCache
from rootstock.runtime.torch.inspect.survey import Surveyed
from rootstock.runtime.torch.module_parts import PartByPart
from rootstock.runtime.torch.state_pool import LayerStates, TorchStatePool

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative root mean square
_ACTIVATION_TOLERANCE = 1e-3  # relative to 1 + |x|: two forms of GELU differ by 2e-4, others by 1e-2
_LARGER = 16.0  # large enough to show clipping and saturation
# Small enough that a layer's part of the hidden states is not lost in the rounding of their sum.
_SMALLER = 1 / 256

_RECURRENCES: tuple[FindParts, ...] = (
    delta_nets,
    channel_delta_nets,
    state_spaces,
    selective_scans,
    gated_convolutions,
)

Activation = Callable[[Tensor], Tensor]


def fuse(
    model: nn.Module,
    found: Surveyed,
    device: torch.device,
    context_limit: int,
    known: Mapping[str, str] | None = None,
) -> Fusion:
    """Installs the fused forms of all parts that have one. Call `probe_packed` before; `undo_fusion` removes them.
    Fuses on a CPU in float32 or bfloat16 only. `known`: the forms that agreed in an earlier process (`Fusion.forms`);
    those of recurrent mixers are compared again."""
    # Some models keep decays or routers in float32. Norms are compared with their own result's dtype.
    dtypes = {module.weight.dtype for module in model.modules() if type(module) is nn.Linear}
    if device.type != "cpu" or len(dtypes) != 1 or not dtypes <= _TOLERANCE.keys():
        return NOTHING_FUSED
    return _Fuser(model, found, context_limit, dtypes.pop(), known).run()


class _Fuser:
    def __init__(
        self,
        model: nn.Module,
        found: Surveyed,
        context_limit: int,
        dtype: torch.dtype,
        known: Mapping[str, str] | None,
    ) -> None:
        self._known = known
        self._forms: dict[str, str] = {}
        self._model = model
        self._found = found
        last = context_limit - 1
        self._places = sorted({0, min(1, last), min(7, last), last // 2, last})
        self._dtype = dtype
        self._loops = FusedLoops(dtype)
        self._index_of = {module: index for index, module in found.attention.items()}
        self._mixer_index = {
            module: index
            for index, mixers in found.mixers.items()
            for module in mixers
            if isinstance(vars(module).get("forward"), PartByPart) and not runs_alone(module)
        }
        self._states = TorchStatePool(found.states, 1, torch.device("cpu"))
        self._parts: dict[str, Fused] = {}
        self._calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def run(self) -> Fusion:
        named = dict(self._model.named_modules())
        plain = [name for name, module in named.items() if "forward" not in vars(module)]
        mixers = [name for name, module in named.items() if module in self._mixer_index]
        with torch.inference_mode():
            self._write_down([named[name] for name in (*plain, *mixers)])
            for name in mixers:
                self._try_mixer(name, named[name])
            # From the inside out, because a fused layer is made of its fused parts.
            for kind in (self._norm, self._mlp, self._attention, self._layer):
                for name in plain:
                    module = named[name]
                    if module in self._calls and not is_fused(module):
                        self._try(name, module, kind)
        return Fusion(self._parts, tuple(self._projections()), self._forms)

    def _projections(self) -> Iterator[Projection]:
        """Yields the projections whose linear layers are in no other: of two that share a layer, only the first."""
        taken: set[nn.Linear] = set()
        for part in self._parts.values():
            of_part: tuple[Projection, ...] = ()
            if isinstance(part, FusedRecurrence):
                of_part = part.inputs, *part.inside, part.output
            elif isinstance(part, FusedAttention):
                of_part = part.inputs, part.output
            elif isinstance(part, FusedMLP):
                of_part = part.gate_up, part.down
            for projection in of_part:
                if taken.isdisjoint(projection.linears):
                    taken.update(projection.linears)
                    yield projection

    def _write_down(self, modules: list[nn.Module]) -> None:
        """Records each module's inputs in a forward of the whole model."""

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._calls.setdefault(module, (args, kwargs))

        hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
        positions = torch.tensor(self._places)
        ids = torch.arange(len(positions)) * 7 % self._found.vocab_size
        try:
            cache = ProbeCache(torch.device("cpu"), len(positions))
            with cache.watching(self._model):
                last = torch.tensor([len(positions) - 1])
                self._found.calling(self._model, ids, positions, cache, last)
        finally:
            for hook in hooks:
                hook.remove()

    def _try(self, name: str, module: nn.Module, kind: Callable[[nn.Module], Iterator[Fused]]) -> None:
        """Replaces the module's forward by the first form of this kind that agrees with it."""
        try:
            for number, form in enumerate(kind(module)):
                told = f"{type(form).__name__} {number}"
                if self._known is not None and self._known.get(name) != told:
                    continue
                agrees = self._agrees if self._known is None else self._is_prepared
                if agrees(module, form):
                    module.forward = form
                    self._parts[name], self._forms[name] = form, told
                    return
        except LayerUnsupported:
            return

    def _try_mixer(self, name: str, module: nn.Module) -> None:
        if module not in self._calls:
            return
        index = self._mixer_index[module]
        shapes = [shape for shape in self._found.states if shape.key.layer == index]
        for find in _RECURRENCES:
            form = agreeing(find, module, self._calls[module], index, shapes, self._loops)
            if form is not None:
                module.forward = form
                self._parts[name] = form
                return

    def _is_prepared(self, module: nn.Module, form: Fused) -> bool:
        """Gives a form of attention the scores that the module asks for. Returns whether it asks for any."""
        if not isinstance(form, FusedAttention):
            return True
        args, kwargs = self._calls[module]
        own = _Recorder(len(self._places), self._states)
        module.forward(*args, **_given(kwargs, 1.0, own))
        if form.index not in own.scores:
            return False
        form.scores = own.scores[form.index]
        return True

    def _agrees(self, module: nn.Module, form: Fused) -> bool:
        args, kwargs = self._calls[module]
        for times in (1.0, _LARGER, _SMALLER):
            own = _Recorder(len(self._places), self._states)
            ours = _Recorder(len(self._places), self._states, own.attended)
            try:
                expected = module.forward(*_scaled(args, times), **_given(kwargs, times, own))
                if isinstance(form, FusedAttention):
                    form.scores = own.scores[form.index]
                got = form(*_scaled(args, times), **_given(kwargs, times, ours))
            except Exception:  # the module's own code, or a shape that does not fit: the form does not apply
                return False
            if _given_beside(expected) != _given_beside(got) or not self._alike(
                _first(expected), _first(got)
            ):
                return False
            if own.given.keys() != ours.given.keys():
                return False
            if not all(
                all(map(self._alike, tensors, ours.given[index])) for index, tensors in own.given.items()
            ):
                return False
        return True

    def _alike(self, expected: Tensor, got: Tensor) -> bool:
        if expected.shape != got.shape or expected.dtype != got.dtype:
            return False
        exact, difference = expected.double(), (expected.double() - got.double())
        # Row by row, so that near rows do not hide an error in far ones.
        rows = exact.reshape(-1, exact.shape[-1])
        error = difference.reshape(rows.shape).square().mean(-1).sqrt()
        return bool((error <= _TOLERANCE[self._dtype] * rows.square().mean(-1).sqrt() + 1e-30).all())

    # ---- forms

    def _norm(self, module: nn.Module) -> Iterator[Fused]:
        parameters = dict(module.named_parameters())
        eps = next(
            (getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), None
        )
        if set(parameters) != {"weight"} or list(module.children()) or not isinstance(eps, float):
            return
        weight = parameters["weight"]
        if weight.dim() != 1:
            return
        for shift in (0.0, 1.0):  # some models store the weight's difference from 1
            yield FusedNorm(module.forward, (weight.float() + shift).contiguous(), eps, self._loops)

    def _mlp(self, module: nn.Module) -> Iterator[Fused]:
        linears = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
        others = [child for child in module.children() if type(child) is not nn.Linear]
        if len(others) > 1 or any(True for other in others for _ in other.parameters()):
            return
        if set(linears) == {"gate_proj", "up_proj", "down_proj"}:
            inputs = [linears["gate_proj"], linears["up_proj"]]
        elif set(linears) == {"gate_up_proj", "down_proj"}:
            inputs = [linears["gate_up_proj"]]
        elif set(linears) == {"w1", "w2", "w3"}:
            inputs = [linears["w1"], linears["w3"]]
        else:
            return
        down = linears["w2" if "w2" in linears else "down_proj"]
        gates: tuple[tuple[Gate, Activation], ...] = (
            (self._loops.rows.silu_and_mul, nn.functional.silu),
            (self._loops.rows.gelu_tanh_and_mul, partial(nn.functional.gelu, approximate="tanh")),
        )
        for gate, activation in gates:
            if others and not _are_alike(others[0], activation):
                continue
            yield FusedMLP(
                module.forward, Projection(inputs), Projection([down]), gate, down.in_features, self._loops
            )

    def _attention(self, module: nn.Module) -> Iterator[Fused]:
        index = self._index_of.get(module)
        if index is None:
            return
        children = dict(module.named_children())
        linears = {name: child for name, child in children.items() if type(child) is nn.Linear}
        key = self._found.keys[index]  # [1, kv_heads, tokens, head_dim]
        kv_heads, head_dim = key.shape[1], key.shape[3]
        norms = {_NORMS_OF_HEADS[name]: child for name, child in children.items() if name in _NORMS_OF_HEADS}
        names = set(linears) - {"o_proj", "out_proj"}
        if names == {"q_proj", "k_proj", "v_proj"}:
            inputs = [linears["q_proj"], linears["k_proj"], linears["v_proj"]]
        elif names == {"qkv_proj"}:
            inputs = [linears["qkv_proj"]]
        else:
            return
        if len(linears) != len(names) + 1:
            return
        output = linears["o_proj" if "o_proj" in linears else "out_proj"]
        if self._found.values[index].shape != key.shape or any(
            True
            for name in children.keys() - linears.keys() - _NORMS_OF_HEADS.keys()
            for _ in children[name].parameters()
        ):
            return
        of_queries = sum(linear.out_features for linear in inputs) - 2 * kv_heads * head_dim
        attended = output.in_features
        q_heads, rest = divmod(attended, head_dim)
        forms = {name: vars(norm).get("forward") for name, norm in norms.items()}
        of_heads = {
            name: form
            for name, form in forms.items()
            if isinstance(form, FusedNorm) and form.weight.shape == (head_dim,)
        }
        eps = {form.eps for form in of_heads.values()} or {0.0}
        if rest or of_queries not in (attended, 2 * attended) or len(eps) != 1 or len(of_heads) != len(norms):
            return
        query_norm, key_norm = (
            of_heads[name].weight if name in of_heads else None for name in ("q_norm", "k_norm")
        )
        for rotated in (True, False):
            yield FusedAttention(
                module.forward,
                index,
                Projection(inputs),
                Projection([output]),
                ProjectionHeads(q_heads, kv_heads, head_dim),
                query_norm,
                key_norm,
                next(iter(eps)),
                rotated,
                of_queries > attended,
                self._loops,
            )

    def _layer(self, module: nn.Module) -> Iterator[Fused]:
        mixers: list[FusedMixer] = []
        norms: dict[str, FusedNorm] = {}
        others: list[nn.Module | FusedMLP] = []
        for name, child in module.named_children():
            match vars(child).get("forward"):
                case FusedMixer() as form:
                    mixers.append(form)
                case FusedNorm() as form:
                    norms[name] = form
                case FusedMLP() as form:
                    others.append(form)
                case _:
                    others.append(child)
        if len(mixers) != 1 or len(others) != 1:
            return
        for order in _ORDERS:
            if set(order) == set(norms):
                for outputs in range(3):
                    yield FusedLayer(
                        module.forward,
                        mixers[0],
                        others[0],
                        Norms(*(norms[name] for name in order)),
                        outputs,
                        self._loops,
                    )


def _are_alike(one: Activation, other: Activation) -> bool:
    """Compares two activations more closely than an MLP's output can: there, rounding to bfloat16 may hide the
    difference between a sigmoid and a Gaussian form."""
    x = torch.linspace(-8, 8, 1025)
    try:
        return bool(((one(x) - other(x)).abs() <= _ACTIVATION_TOLERANCE * (1 + x.abs())).all())
    except Exception:  # from the module's own code
        return False


_NORMS_OF_HEADS = {"q_norm": "q_norm", "k_norm": "k_norm", "q_layernorm": "q_norm", "k_layernorm": "k_norm"}
# Names of a layer's norms, in the order of `Norms`.
_ORDERS = (
    ("operator_norm", "ffn_norm"),
    ("input_layernorm", "post_attention_layernorm"),
    ("input_layernorm", "pre_ff_layernorm"),
    (
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    ),
)


def _scaled(args: tuple[Any, ...], times: float) -> tuple[Any, ...]:
    """Scales the first argument, the hidden states, if it is a tensor of floating-point numbers."""
    return tuple(
        given * times if i == 0 and isinstance(given, Tensor) and given.is_floating_point() else given
        for i, given in enumerate(args)
    )


def _given(kwargs: dict[str, Any], times: float, recorder: _Recorder) -> dict[str, Any]:
    given = dict(kwargs)
    if isinstance(given.get("hidden_states"), Tensor):
        given["hidden_states"] = given["hidden_states"] * times
    if "past_key_values" in given:
        given["past_key_values"] = recorder
    return given


def _first(output: Any) -> Tensor:
    first = output[0] if isinstance(output, tuple) else output
    assert isinstance(first, Tensor), "a module that returns something else has no fused form"
    return first


def _given_beside(output: Any) -> list[bool] | None:
    """Returns for each output beside the first whether it is one; None: the module returns no tuple."""
    return [other is not None for other in output[1:]] if isinstance(output, tuple) else None


class _Recorder(ProbeCache, FusedStep):
    """Packed step of one new sequence, for a module or its fused form: records the tensors that reach attention.

    `attended`: results of another recorder, returned again. The effect of a key's rounding on attention is then not
    counted as a difference between the two forms.
    """

    def __init__(
        self, tokens: int, states: TorchStatePool, attended: dict[int, Tensor] | None = None
    ) -> None:
        super().__init__(torch.device("cpu"), tokens)
        self._states = states
        self._sequences = torch.tensor([[0, tokens, 0, 0]])
        self.running = []
        self.given: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # query, key, value [heads, tokens, …]
        self.scores: dict[int, Scores] = {}
        self.attended: dict[int, Tensor] = {}  # [q_heads, tokens, value_dim]
        self._replayed = attended

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key, value = super().update(key_states, value_states, layer_idx)
        mark(key, value, _Recorded(self, layer_idx))
        return key, value

    def states_of(self, index: int, dtype: torch.dtype) -> LayerStates | None:
        return self._states.of_mixer(index, dtype, self._sequences)

    def attend(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores, *, is_kept: bool
    ) -> Tensor:
        q, k, v = (rows.transpose(0, 1) for rows in (query, key, value))
        return self.record(index, q, k, v, scores).transpose(0, 1)

    def record(self, index: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Records query, key and value [heads, tokens, …], and attends them. Returns [q_heads, tokens, value_dim]."""
        self.given[index] = (query.clone(), key.clone(), value.clone())
        self.scores[index] = scores
        replayed = self._replayed
        attended = attend_dense(query, key, value, 0, scores) if replayed is None else replayed[index]
        self.attended[index] = attended
        return attended


class _Recorded:
    def __init__(self, recorder: _Recorder, index: int) -> None:
        self._recorder = recorder
        self._index = index

    def attend(self, call: AttentionCall) -> Tensor:
        out = self._recorder.record(self._index, call.query[0], call.key[0], call.value[0], call.scores)
        return out.transpose(0, 1)[None].contiguous()
