"""K and V in 8 bits: half the bytes, nearly the same logits, and the same logits for every way to compute them."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import VOCAB, saved
from rootstock.cache.families import RecurrentState
from rootstock.cache.plan import BlockCopy, Plan, RowPart
from rootstock.cache.types import BlockId
from rootstock.config import ModelConfig
from rootstock.engine.tiers.hit_verifier import HitVerifier
from rootstock.errors import InvalidOption
from rootstock.kernels.quantized_rows import RoundedRows
from rootstock.runtime.torch.runner import TorchRuntime
from rootstock.runtime.trial import relative_error
from runtime.torch.helpers import pool_of
from twins.driving import BLOCK_SIZE, ByHand, allocate, mixed_steps, packed_logits, random_tokens
from twins.torch_models import load, loaded

# Plain, softcaps and windows, windows and normalised heads, sinks, states beside, modules that run alone.
MODELS = ["llama", "gemma2", "gemma3_text", "gpt_oss", "qwen3_next", "falcon"]
LENGTHS = (61, 90, 33)


def rounded(model_type: str = "llama", dtype: str = "float32", kv_dtype: str = "int8") -> TorchRuntime:
    runtime = loaded(model_type, dtype, kv_dtype=kv_dtype)
    allocate(runtime)
    return runtime


def exact(model_type: str = "llama", dtype: str = "float32") -> TorchRuntime:
    return rounded(model_type, dtype, "auto")


@pytest.mark.parametrize("model_type", MODELS)
def test_logits_depend_neither_on_chunks_nor_on_batch_mates_nor_on_decodes(model_type: str) -> None:
    """A step attends to its own new positions as the pool holds them: rounded."""
    sequences = [random_tokens(VOCAB, length, seed) for seed, length in enumerate(LENGTHS)]
    alone = [packed_logits(rounded(model_type), [tokens], [{0: len(tokens)}])[0] for tokens in sequences]
    for seed in range(2):
        mixed = packed_logits(rounded(model_type), sequences, mixed_steps(LENGTHS, seed))
        for got, expected in zip(mixed, alone, strict=True):
            # The last bit of a number may turn a code: seldom, and by one.
            assert relative_error(got, expected) < 1e-3
            np.testing.assert_array_equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("model_type", MODELS)
def test_rounding_costs_little_of_the_logits_but_is_there(model_type: str) -> None:
    tokens = random_tokens(VOCAB, 90, 5)
    steps = [{0: 60}, *[{0: 1}] * 30]
    coarse, fine = (packed_logits(make(model_type), [tokens], steps)[0] for make in (rounded, exact))
    assert 1e-4 < relative_error(coarse, fine) < 0.1  # measured 0.0003 to 0.08


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.32), ("bfloat16", 0.63)])
def test_a_token_takes_a_byte_per_number_and_a_scale_per_head(dtype: str, share: float) -> None:
    """Heads of 16 numbers: 20 bytes instead of 64 or 32."""
    sizes = []
    for runtime in (rounded(dtype=dtype), exact(dtype=dtype)):
        (family,) = runtime.description.families
        assert not isinstance(family, RecurrentState)
        pool = pool_of(runtime)
        held = sum(tensor.nbytes for layer in pool.layers.values() for tensor in layer.tensors)
        slots = len(next(iter(pool.layers.values())).tensors[0])
        assert held == family.bytes_per_token * slots
        sizes.append(family.bytes_per_token)
    assert sizes[0] <= share * sizes[1]


def test_rounded_rows_are_never_exchanged_with_exact_ones() -> None:
    """The dtype of stored rows is a part of the namespace, and of the layout in records' identities."""
    coarse, fine = rounded("qwen3_next").description, exact("qwen3_next").description
    assert (coarse.kv_dtype, fine.kv_dtype) == ("float32+int8", "float32")  # states are as they were
    assert coarse.layout != fine.layout
    assert coarse.families[-1] == fine.families[-1]
    assert rounded().description.kv_dtype == "int8"


def test_the_dtypes_of_buffers_tell_codes_from_scales() -> None:
    runtime = rounded()
    dtypes = runtime.buffer_dtypes(0)
    assert dtypes == ["int8", "int8", "float32", "float32"] * len(runtime._layout.layers)


def test_models_without_k_and_v_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidOption, match=r"--kv-dtype.*latents"):
        load(saved("deepseek_v3"), kv_dtype="int8")
    with pytest.raises(InvalidOption, match=r"--kv-dtype.*no K and V"):
        load(saved("mamba"), kv_dtype="int8")
    with caplog.at_level(logging.WARNING):
        load(saved("llama"), kv_dtype="int8")
    assert "int8" not in caplog.text


def test_an_unknown_kv_dtype_stops_the_start() -> None:
    with pytest.raises(InvalidOption, match="--kv-dtype"):
        ModelConfig("any", kv_dtype="int4")


def test_rows_are_rounded_without_a_compiler_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, steps = random_tokens(VOCAB, 40, 1), [{0: 30}, *[{0: 1}] * 10]
    expected = packed_logits(rounded(), [tokens], steps)[0]
    monkeypatch.setenv("ROOTSTOCK_TEST_ATTENTION", "torch")
    runtime = rounded()
    assert all(isinstance(layer.keys, RoundedRows) for layer in pool_of(runtime).layers.values())
    assert relative_error(packed_logits(runtime, [tokens], steps)[0], expected) < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hit_computed_again_in_other_chunks_agrees_and_other_tokens_do_not(dtype: str) -> None:
    runtime = rounded(dtype=dtype)
    hand = ByHand(runtime)
    tokens = random_tokens(VOCAB, 40, 1)
    whole, pieces, other = (hand.start(t) for t in (tokens, tokens, random_tokens(VOCAB, 40, 2)))
    hand.step({whole: 40, other: 40})
    for new in (7, 1, 32):
        hand.step({pieces: new})
    verifier: Any = HitVerifier(runtime, None, 0.0, 1, None, None)  # type: ignore[arg-type]
    for index in range(5):
        ours, anew, wrong = (RowPart(0, int(r.tables[0][index]), BLOCK_SIZE) for r in (whole, pieces, other))
        assert not verifier._rows_differ(ours, anew)
        assert verifier._rows_differ(ours, wrong)


def test_a_copied_block_takes_its_scales_along() -> None:
    runtime = rounded()
    pool = pool_of(runtime)
    with torch.inference_mode():
        for layer in pool.layers.values():
            for tensor in layer.tensors:
                tensor[:8] = 3
    runtime.apply(Plan((BlockCopy(BlockId(0), BlockId(2), 5, 0),)))
    for layer in pool.layers.values():
        for tensor in layer.tensors:
            assert tensor[16:21].float().mean() == 3
            assert not tensor[21:24].any()
