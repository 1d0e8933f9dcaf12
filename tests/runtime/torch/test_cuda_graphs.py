"""Decodes as CUDA graphs: their inputs, recorded steps, and models that are refused.

On a CPU a recorded step is called again, which tests everything but the recording.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoints import VOCAB, saved
from rootstock.cache.families import TokenFamily
from rootstock.config import ModelConfig
from rootstock.errors import InvalidOption
from rootstock.kernels.api import Scores, StepAttention
from rootstock.kernels.spans import Span
from rootstock.kernels.torch.gathered_attention import GatherAttention
from rootstock.runtime.base import Batch, Logits, Segment
from rootstock.runtime.torch import cuda_graphs, runner
from rootstock.runtime.torch.cuda_graphs import batch_sizes, decode_inputs, filled_up, size_for
from rootstock.runtime.torch.runner import TorchRuntime
from twins.torch_models import load

BLOCK_SIZE, BLOCKS = 4, 60


class FromTensors(GatherAttention):
    """Replacement of Triton's backend: reads block tables and records when a step is called."""

    def __init__(self, block_size: int, device: torch.device, least_split: int) -> None:
        super().__init__(block_size, device)

    def decodes(
        self, tables: Tensor, records: Tensor, rows: Tensor, longest: int, family: TokenFamily
    ) -> StepAttention:
        def step(
            query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, scores: Scores
        ) -> Tensor:
            assert rows.tolist() == list(range(len(tables)))
            spans = []
            for number, row, position, new, before in records.tolist():
                assert (new, before, position < longest) == (1, row, True)
                spans.append(Span(row, new, position, tables[number].numpy()))
            return self.prepare(spans, family)(query, key, value, keys, values, scores)

        return step


def call_again(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    out = step()

    def replay() -> None:
        out.copy_(step())

    return replay, out


def never_again(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    return lambda: None, step()


def refuse(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


@pytest.fixture(params=["from tensors", "triton"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "compiled_for", lambda *asked: "triton")
    if request.param == "from tensors":
        monkeypatch.setitem(
            sys.modules,
            "rootstock.kernels.cuda.triton_attention",
            SimpleNamespace(TritonAttention=FromTensors),
        )
    elif importlib.util.find_spec("triton") is None or torch.cuda.is_available():
        pytest.skip("triton's interpreter is needed")


def recorded(model_type: str, capture: Any, monkeypatch: pytest.MonkeyPatch) -> TorchRuntime:
    monkeypatch.setattr(cuda_graphs, "cuda_capture", lambda device: capture)
    monkeypatch.setattr(cuda_graphs, "_MOST_DECODES", 4)
    plain = load(saved(model_type))
    runtime = TorchRuntime(plain._model, plain._served, with_graphs=True)
    runtime.allocate([BLOCKS for _ in runtime.description.families], BLOCK_SIZE)
    return runtime


def decodes_and_plain(runtime: TorchRuntime, batch: int) -> tuple[Logits, Logits]:
    """Runs a prefill, then a step of decodes twice: replayed, and plainly. Each sequence has tables of its own."""
    random = np.random.default_rng(batch)
    families = len(runtime.description.families)
    tables = [random.permutation(BLOCKS).astype(np.int32) for _ in range(families)]
    lengths = random.integers(1, 14, batch)
    prefills, decodes = [], []
    for i, length in enumerate(lengths.tolist()):
        tokens = random.integers(0, VOCAB, length + 1, np.int32)
        own = tuple(table[i * 4 : i * 4 + 4] for table in tables)
        prefills.append(Segment(tokens[:length], 0, own, 0))
        decodes.append(Segment(tokens[length:], length, own, 1))
    runtime.forward(Batch(prefills))
    graphs, runtime._graphs = runtime._graphs, None
    plain = runtime.forward(Batch(decodes))
    runtime._graphs = graphs
    return runtime.forward(Batch(decodes)), plain


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("model_type", ["gemma3_text", "llama4_text"])
def test_replayed_decodes_equal_plain_ones(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Families with windows and chunks; batches that fit a graph, that are filled up, and one that is too large."""
    runtime = recorded(model_type, call_again, monkeypatch)
    assert runtime._graphs is not None
    replayed = []
    forward = runtime._graphs.forward
    monkeypatch.setattr(
        runtime._graphs, "forward", lambda batch: replayed.append(len(batch)) or forward(batch)
    )
    for batch in (1, 2, 3, 4, 5, 2):
        ours, plain = decodes_and_plain(runtime, batch)
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)
    assert replayed == [1, 2, 3, 4, 2]


@pytest.mark.parametrize(
    ("capture", "said"),
    [(never_again, "decodes differ by"), (refuse, "not permitted when stream is capturing")],
)
def test_steps_that_cannot_be_recorded_run_plainly_with_one_warning(
    capture: Any, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "compiled_for", lambda *asked: "triton")
    monkeypatch.setitem(
        sys.modules, "rootstock.kernels.cuda.triton_attention", SimpleNamespace(TritonAttention=FromTensors)
    )
    with caplog.at_level(logging.WARNING):
        runtime = recorded("llama", capture, monkeypatch)
    assert runtime._graphs is None
    (warning,) = [record.getMessage() for record in caplog.records]
    assert said in warning
    assert "and more" not in warning
    ours, plain = decodes_and_plain(runtime, 3)
    np.testing.assert_array_equal(ours, plain)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("llama", "not all layers are attended by Triton"), ("qwen3_next", "the model has recurrent states")],
)
def test_models_whose_steps_depend_on_the_host_are_not_recorded(
    model_type: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runtime = recorded(model_type, refuse, monkeypatch)
    assert runtime._graphs is None
    (said,) = [record.getMessage() for record in caplog.records if record.name == cuda_graphs.__name__]
    assert why in said


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kernel", ["from tensors"], indirect=True)
def test_only_steps_of_scored_decodes_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = recorded("llama", call_again, monkeypatch)
    graphs = runtime._graphs
    assert graphs is not None
    table = (np.arange(BLOCKS, dtype=np.int32),)
    decode = Segment(np.array([5], np.int32), 7, table, 1)
    assert graphs.fits([decode])
    assert graphs.fits([decode] * 4)
    assert not graphs.fits([decode] * 5)
    assert not graphs.fits([decode, Segment(np.array([5], np.int32), 7, table, 0)])
    assert not graphs.fits([decode, Segment(np.array([5, 6], np.int32), 7, table, 1)])
    assert not graphs.fits([Segment(decode.tokens, runtime.description.context_limit, table, 1)])


def test_batches_are_filled_up_to_the_next_size() -> None:
    assert batch_sizes(64) == [64, 32, 16, 8, 4, 2, 1]
    assert batch_sizes(7) == [4, 2, 1]
    assert batch_sizes(0) == []
    assert [size_for(n, batch_sizes(8)) for n in (1, 2, 3, 5, 8)] == [1, 2, 4, 8, 8]
    first, last = (Segment(np.array([n], np.int32), n, (), 1) for n in (1, 2))
    assert filled_up([first, last], 4) == [first, last, last, last]
    assert filled_up([first, last], 2) == [first, last]


def test_the_inputs_of_a_replay() -> None:
    tables = np.array([3, 9, 4, 8], np.int32), np.array([-1, 6, 5, 7], np.int32)
    segments = [
        Segment(np.array([11], np.int32), 6, tables, 1),
        Segment(np.array([12], np.int32), 0, (np.array([2], np.int32), np.array([1], np.int32)), 1),
    ]
    numbers, blocks = decode_inputs(segments, 2, block_size=4)
    assert numbers.tolist() == [[11, 12], [6, 0], [9 * 4 + 2, 2 * 4], [6 * 4 + 2, 1 * 4]]
    assert blocks.tolist() == [[[3, 9], [2, 0]], [[-1, 6], [1, 0]]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_graphs_without_a_cuda_device_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="--cuda-graphs"):
        runner.load_model(ModelConfig(str(tmp_path), device="cpu", cuda_graphs=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_on_a_device_equal_plain_decodes(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_MOST_DECODES", 4)
    config = ModelConfig(str(saved("gemma3_text")), device="cuda", dtype=dtype, cuda_graphs=True)
    runtime = runner.load_model(config)
    runtime.allocate([BLOCKS for _ in runtime.description.families], BLOCK_SIZE)
    assert runtime._graphs is not None
    for batch in (1, 2, 3, 4, 2):
        ours, plain = decodes_and_plain(runtime, batch)
        tolerance = 1e-3 if dtype == "float32" else 0.2
        np.testing.assert_allclose(ours, plain, rtol=tolerance, atol=tolerance * float(plain.std()))
