"""Graphs of models: one that attends to blocks of pools, and the exported one, which keeps its own cache.

OpenVINO replaces each attention of an exported graph by its paged operation, which reads and writes blocks of tensors
of the caller through block tables, and each gated delta net and short convolution by one that has its states in slots
of the caller's tensors. All that Rootstock knows of a model comes from the inputs of these operations, never from
the model's name.

Two things are added to the paged graph: a block table for each width of window, so that blocks that a window has left
can be released, and the choice of the rows that the head computes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openvino as ov
from openvino import opset13 as ops
from openvino._offline_transformations import paged_attention_transformation

from rootstock.cache.families import Family, FullAttention, RecurrentState, SlidingWindow

PAGE_TOKENS = 32  # of a block of the paged operation on CPUs
KEPT_ROWS = "kept_rows"  # input: the rows whose logits are computed
NOISE = "noise"  # input of the exported graph: factors of the embedded tokens

_ATTENTION = "PagedAttentionExtension"
_KEYS, _TABLE, _WINDOW = 3, 7, 10  # its inputs
_POOL = re.compile(r"(key_cache|value_cache|\w+_state_table)\.\d{1,6}")
_EXPORTED_INPUTS = {"input_ids", "attention_mask", "position_ids", "beam_idx"}
_PAGED_INPUTS = {
    "input_ids", "position_ids", "max_context_len", "past_lens", "subsequence_begins", "block_indices",
    "block_indices_begins", "la.block_indices", "la.block_indices_begins", "la.past_lens", "la.cache_interval",
}  # fmt: skip
_INDEX_TYPES = ("i64", "i32", "boolean")
# Operations between a head's product and the logits, as of a softcap or a scale.
_BEHIND_A_HEAD = {"Convert", "Multiply", "Divide", "Tanh", "Add", "Reshape", "Clamp"}


class GraphUnsupported(Exception):
    """Error: a graph that cannot run on pools. The message continues a sentence about the model."""


@dataclass(frozen=True, slots=True)
class PoolPort:
    """Input of the paged graph for a tensor of a pool: [rows, *shape]."""

    name: str
    shape: tuple[int, ...]  # of one row: of a block [kv_heads, tokens, width], or of a state
    type: str  # OpenVINO's name of the element type

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * int(self.element_type.size)

    @property
    def element_type(self) -> ov.Type:
        found: ov.Type = getattr(ov.Type, self.type)
        return found


@dataclass(frozen=True, slots=True)
class GraphLayout:
    """Pools of a paged graph: for each family the ports of its layers, in the byte order of a row."""

    families: tuple[Family, ...]
    ports: tuple[tuple[PoolPort, ...], ...]
    vocab_size: int
    position_axes: int  # of the input `position_ids`; 0: the graph has no such input
    is_stateful: bool


def table_name(family: int) -> str:
    """Returns the name of the input for a token family's block tables."""
    return "block_indices" if family == 0 else f"block_indices.{family}"


def read_graph(core: ov.Core, file: Path) -> ov.Model:
    """Reads an exported graph. Raises GraphUnsupported for one that does not take tokens and keep its own cache."""
    model = core.read_model(file)
    names = {name for port in model.inputs for name in (*port.get_names(), _name_of(port))}
    if "input_ids" not in names or "beam_idx" not in names:
        raise GraphUnsupported(
            "is a graph without input_ids and beam_idx: export it with the task text-generation-with-past"
        )
    if foreign := sorted(names - _EXPORTED_INPUTS):
        raise GraphUnsupported(f"has an input {foreign[0]!r}, and Rootstock gives tokens only")
    return model


def count_weights(model: ov.Model) -> Counter[str]:
    """Counts the numbers in the graph's tables of weights by their type, with the few scales of quantized ones."""
    counts: Counter[str] = Counter()
    for op in model.get_ops():
        port = op.output(0) if op.get_type_name() == "Constant" else None
        if port is not None and len(port.get_shape()) > 1:
            counts[port.get_element_type().to_string()] += math.prod(port.get_shape())
    return Counter({type: count for type, count in counts.items() if type not in _INDEX_TYPES})


# ---- the paged graph


def make_paged(core: ov.Core, model: ov.Model) -> dict[str, int]:
    """Changes an exported graph into a paged one. Returns the width of the window of each layer's attention, 0 for
    all positions, by the number in its pools' names. Raises GraphUnsupported."""
    try:
        paged_attention_transformation(model)
    except RuntimeError as error:
        raise GraphUnsupported(f"has an attention that OpenVINO cannot page ({error})") from error
    left = {op.get_type_name() for op in model.get_ops()} & {"ReadValue", "ScaledDotProductAttention"}
    if left:
        raise GraphUnsupported("keeps states or an attention that OpenVINO does not read from pools")
    names = {_name_of(port) for port in model.inputs}
    if unknown := {name for name in names if not _POOL.fullmatch(name)} - _PAGED_INPUTS:
        raise GraphUnsupported(
            f"becomes a graph with an input {min(unknown)!r}, which Rootstock does not know"
        )
    attentions = {_layer_of(op): op for op in model.get_ops() if op.get_type_name() == _ATTENTION}
    widths = {layer: _window_of(core, op) for layer, op in attentions.items()}
    _give_windows_tables(model, attentions, widths)
    _give_positions(model)
    _choose_rows(model)
    model.validate_nodes_and_infer_types()
    return widths


def _source(op: Any, number: int) -> Any:
    return op.input(number).get_source_output().get_node()


def _layer_of(attention: Any) -> str:
    return _name_of(_source(attention, _KEYS).output(0)).partition(".")[2]


def _name_of(port: Any) -> str:
    """Returns the input's own name: OpenVINO may give it further ones."""
    name: str = port.get_node().get_friendly_name()
    return name


def _window_of(core: ov.Core, attention: Any) -> int:
    """Returns the window of an attention, which the graph may derive from its constants. Raises GraphUnsupported."""
    window = attention.input(_WINDOW).get_source_output()
    try:
        found = core.compile_model(ov.Model([window], []), "CPU")([])[0]
    except RuntimeError as error:
        raise GraphUnsupported("computes the width of its window from its inputs") from error
    return max(0, int(found.reshape(-1)[0]))


def _give_windows_tables(model: ov.Model, attentions: Mapping[str, Any], widths: Mapping[str, int]) -> None:
    """Gives the attentions of each further width of window a block table of their own."""
    for number, width in enumerate(sorted(set(widths.values()))):
        if number:
            table = _new_input(model, table_name(number))
            for layer, op in attentions.items():
                if widths[layer] == width:
                    op.input(_TABLE).replace_source_output(table.output(0))


def _give_positions(model: ov.Model) -> None:
    """Gives a graph the positions that it counts itself, from the length of its cache to the end of its input.

    In a paged graph that is one position. An export whose code makes positions has such ranges of shape [tokens]. The
    cosines of their one sequence, [1, tokens, width], become [tokens, 1, width], as all else in the graph.
    """
    given = next((port for port in model.inputs if _name_of(port) == "position_ids"), None)
    ranges = [op for op in model.get_ops() if op.get_type_name() == "Range" and _counts_the_cache(op)]
    if given is None or given.get_target_inputs() or not ranges:
        return
    for op in ranges:
        users = op.output(0).get_target_inputs()
        positions = ops.convert(given.get_node(), op.output(0).get_element_type().to_string())
        for user in users:
            user.replace_source_output(positions.output(0))
    model.validate_nodes_and_infer_types()
    for op in [op for op in model.get_ops() if op.get_type_name() in ("Cos", "Sin")]:
        users, width = op.output(0).get_target_inputs(), op.output(0).get_partial_shape()[-1].get_length()
        turned = ops.reshape(op.output(0), ops.constant([-1, 1, width], ov.Type.i64), special_zero=False)
        for user in users:
            user.replace_source_output(turned.output(0))


def _counts_the_cache(counting: Any) -> bool:
    """Returns whether a range begins at a length of the cache, which is `max_context_len` less the input's length."""
    op = _source(counting, 0)
    while op.get_type_name() in ("Convert", "Subtract", "Squeeze", "Reshape"):
        op = _source(op, 0)
    return _name_of(op.output(0)) == "max_context_len"


def _choose_rows(model: ov.Model) -> None:
    """Lets the head compute the rows that the input `kept_rows` names. Raises GraphUnsupported."""
    op = _source(model.output("logits").get_node(), 0)
    while op.get_type_name() in _BEHIND_A_HEAD:
        op = _source(op, 0)
    if op.get_type_name() != "MatMul":
        raise GraphUnsupported(
            f"ends in an operation {op.get_type_name()}, where a head's product is expected"
        )
    hidden = op.input(0).get_source_output()  # [tokens, 1, width]
    op.input(0).replace_source_output(ops.gather(hidden, _new_input(model, KEPT_ROWS), 0).output(0))


def _new_input(model: ov.Model, name: str) -> Any:
    """Adds an input [any] int32."""
    added = ops.parameter([-1], ov.Type.i32, name=name)
    added.output(0).get_tensor().set_names({name})
    model.add_parameters([added])
    return added


def layout_of(compiled: ov.CompiledModel, widths: Mapping[str, int]) -> GraphLayout:
    """Reads the pools of a compiled paged graph from its inputs. `widths`: as `make_paged` returns them. Raises
    GraphUnsupported."""
    by_name = {_name_of(port): port for port in compiled.inputs}
    pools = sorted((name for name in by_name if _POOL.fullmatch(name)), key=_place)
    blocks = [name for name in pools if "_state_table" not in name]
    families: list[Family] = []
    ports: list[tuple[PoolPort, ...]] = []
    for width in sorted(set(widths.values())):
        its = [_pool_port(by_name[name]) for name in blocks if widths[name.partition(".")[2]] == width]
        if any(port.shape[1] != PAGE_TOKENS for port in its):
            raise GraphUnsupported(
                f"has blocks of {its[0].shape[1]} positions, where {PAGE_TOKENS} are expected"
            )
        layers, token_bytes = len(its) // 2, sum(port.row_bytes for port in its) // PAGE_TOKENS
        full = FullAttention(layers, token_bytes)
        families.append(SlidingWindow(layers, token_bytes, width) if width else full)
        ports.append(tuple(its))
    states = [_pool_port(by_name[name]) for name in pools if "_state_table" in name]
    if states:
        layers = len({port.name.partition(".")[2] for port in states})
        families.append(RecurrentState(layers, sum(port.row_bytes for port in states)))
        ports.append(tuple(states))
    positions = by_name.get("position_ids")
    return GraphLayout(
        tuple(families),
        tuple(ports),
        vocab_size=int(compiled.output("logits").partial_shape[-1].get_length()),
        position_axes=0 if positions is None else 3 if len(positions.partial_shape) > 1 else 1,
        is_stateful=bool(states),
    )


def _place(name: str) -> tuple[int, str]:
    kind, _, number = name.partition(".")
    return int(number), kind


def _pool_port(port: Any) -> PoolPort:
    shape = tuple(int(length.get_length()) for length in list(port.partial_shape)[1:])
    return PoolPort(_name_of(port), shape, port.element_type.to_string())


# ---- the exported graph


def shake_embeddings(model: ov.Model) -> int:
    """Multiplies the embedded tokens [1, tokens, width] of an exported graph by the input `noise`. Returns the width.
    Raises GraphUnsupported."""
    for op in model.get_ordered_ops():
        if op.get_type_name() == "Gather" and _reads_tokens(_source(op, 1)):
            break
    else:
        raise GraphUnsupported("embeds its tokens by no table")
    embedded = op.output(0)
    while len(users := list(embedded.get_target_inputs())) == 1 and _dequantizes(users[0]):
        embedded = users[0].get_node().output(0)
    if embedded.get_element_type() != ov.Type.f32:
        raise GraphUnsupported(f"embeds its tokens as {embedded.get_element_type().to_string()}")
    noise = ops.parameter([1, -1, -1], embedded.get_element_type(), name=NOISE)
    noise.output(0).get_tensor().set_names({NOISE})
    model.add_parameters([noise])
    shaken = ops.multiply(embedded, noise)
    for user in users:
        user.replace_source_output(shaken.output(0))
    model.validate_nodes_and_infer_types()
    return int(embedded.get_partial_shape()[-1].get_length())


def _reads_tokens(op: Any) -> bool:
    while op.get_type_name() in ("Convert", "Reshape", "Unsqueeze"):
        op = _source(op, 0)
    return op.get_type_name() == "Parameter" and "input_ids" in op.output(0).get_names()


def _dequantizes(user: Any) -> bool:
    """Returns whether an operation changes the type of an embedding or scales it by a table of its own."""
    return user.get_node().get_type_name() in ("Convert", "Subtract", "Multiply", "Reshape")
