"""Runtime that computes a model's paged graph over the pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from rootstock.cache.plan import HostBytes, Plan, RowPart
from rootstock.cache.types import NO_BLOCK
from rootstock.errors import AdapterUnusable
from rootstock.runtime.adapter_files import AdapterSource
from rootstock.runtime.base import Batch, LoadedAdapter, Logits, ModelDescription, Segment
from rootstock.runtime.host_memory import free_host_bytes
from rootstock.runtime.openvino.graph import KEPT_ROWS, PAGE_TOKENS, GraphLayout, table_name
from rootstock.runtime.openvino.pools import GraphPools

_NEVER = 1 << 30  # tokens after which a forward keeps a further state
# Names of element types as torch has them, where OpenVINO's name is another one.
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "u8": "uint8", "i8": "int8"}


def dtype_name(type: str) -> str:
    return _DTYPES.get(type, type)


@dataclass(frozen=True, slots=True)
class OpenVinoExecution:
    """Compiled graph and its pools' layout."""

    compiled: ov.CompiledModel
    layout: GraphLayout
    description: ModelDescription


class OpenVinoRuntime:
    """Runtime of one model and its pools. Made by `load_model`, owned by one thread."""

    def __init__(self, served: OpenVinoExecution) -> None:
        self._served = served
        self._layout = served.layout
        self._token_families = len(served.layout.families) - served.layout.is_stateful
        self._request = served.compiled.create_infer_request()
        self._pools: GraphPools | None = None
        self._inputs: dict[str, NDArray[np.generic]] = {}  # of the last forward: the request refers to them

    images = None
    draft_heads = None
    computes_ahead = False

    @property
    def description(self) -> ModelDescription:
        return self._served.description

    def free_bytes(self) -> int:
        return free_host_bytes()

    @property
    def pool_copies(self) -> int | None:
        return None

    def release_unused(self) -> None:
        """Does nothing: the graph keeps the memory of its largest forward."""

    def allocate(self, rows: Sequence[int], block_size: int) -> None:
        assert self._pools is None, "the pools are made once"
        assert block_size == PAGE_TOKENS, "the loader refuses other sizes"
        self._pools = GraphPools(self._layout, rows)
        for memories in self._pools.memories:
            for memory in memories:
                self._request.set_tensor(memory.port.name, memory.tensor)

    def apply(self, plan: Plan) -> None:
        self._made.apply(plan)

    def read(self, part: RowPart) -> list[HostBytes]:
        return self._made.read(part)

    def buffers(self, part: RowPart) -> list[HostBytes]:
        return self._made.buffers(part)

    def place(self, part: RowPart, buffers: Sequence[HostBytes]) -> None:
        self._made.place(part, buffers)

    def buffer_dtypes(self, family: int) -> list[str]:
        return [dtype_name(port.type) for port in self._layout.ports[family]]

    def load_adapter(self, source: AdapterSource) -> LoadedAdapter:
        raise AdapterUnusable(
            source.name, "a graph of OpenVINO takes no adapters: merge it into the model before its export"
        )

    def unload_adapter(self, fingerprint: str) -> None:
        raise AssertionError("no adapter is loaded")

    def forward(self, batch: Batch) -> Logits:
        segments = batch.segments
        self._inputs = self._inputs_of(segments)
        for name, array in self._inputs.items():
            self._request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        self._request.infer(share_outputs=True)  # they are copied below
        count = sum(segment.logits_to_keep for segment in segments)
        computed = self._request.get_output_tensor(0).data
        logits: Logits = computed.reshape(-1, self._layout.vocab_size)[:count].astype(np.float32)  # a copy
        return logits

    def _inputs_of(self, segments: Sequence[Segment]) -> dict[str, NDArray[np.generic]]:
        new = [len(segment.tokens) for segment in segments]
        past = np.array([segment.past for segment in segments], np.int32)
        ends = np.cumsum([0, *new])
        kept = [np.arange(end - s.logits_to_keep, end) for s, end in zip(segments, ends[1:], strict=True)]
        rows = np.concatenate(kept).astype(np.int32)
        inputs: dict[str, NDArray[np.generic]] = {
            "input_ids": np.concatenate([segment.tokens for segment in segments]).astype(np.int64),
            "past_lens": past,
            "subsequence_begins": ends.astype(np.int32),
            "max_context_len": np.array(
                max(s.past + n for s, n in zip(segments, new, strict=True)), np.int32
            ),
            KEPT_ROWS: rows if len(rows) else np.zeros(1, np.int32),  # a product of no rows is not defined
        }
        if axes := self._layout.position_axes:
            positions = np.concatenate([np.arange(s.past, s.past + len(s.tokens)) for s in segments])
            inputs["position_ids"] = positions if axes == 1 else np.tile(positions, (axes, 1))
        for family in range(self._token_families):
            tables = [self._table_of(segment, family) for segment in segments]
            inputs[table_name(family)] = np.concatenate(tables)
            if family == 0:
                inputs["block_indices_begins"] = _begins(tables)
        if self._layout.is_stateful:
            # A sequence reads its working state, or zeros at its beginning, and writes it; none is kept between.
            zeros = self._made.spare_row(self._token_families)
            slots = np.array([[s.state if s.past else zeros, s.state] for s in segments], np.int32)
            inputs["la.block_indices"] = slots.reshape(-1)
            inputs["la.block_indices_begins"] = np.arange(0, 2 * len(segments) + 1, 2, dtype=np.int32)
            inputs["la.past_lens"] = past
            inputs["la.cache_interval"] = np.full(len(segments), _NEVER, np.int32)
        return inputs

    def _table_of(self, segment: Segment, family: int) -> NDArray[np.int32]:
        table = segment.tables[family][: -(-(segment.past + len(segment.tokens)) // PAGE_TOKENS)]
        return np.where(table == NO_BLOCK, self._made.spare_row(family), table).astype(np.int32)

    @property
    def _made(self) -> GraphPools:
        assert self._pools is not None, "allocate comes first"
        return self._pools


def _begins(tables: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.cumsum([0, *map(len, tables)]).astype(np.int32)
