"""Models in GGUF files: served with the numbers that the file holds, by every type of tensor and architecture."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from gguf_checkpoints import TOKENS, Kinds, mixed, save_gguf
from rootstock.config import ModelConfig
from rootstock.errors import ModelError, ModelFileInvalid, ModelUnsupported
from rootstock.kernels.torch.coded_linear import Coded, CodedLayers, Widened
from rootstock.kernels.torch.linear import has_coded_loops
from rootstock.runtime.select import locate_model
from rootstock.text.tokenizer import HFTokenizer
from runtime.torch.stored.test_stored_weights import (
    assert_served_as_near_as_bfloat16,
    coded_layers,
    packed_experts,
)
from twins.torch_models import load

KINDS: dict[str, Kinds] = {
    kind: lambda name, kind=kind: kind  # type: ignore[misc]
    for kind in (
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "Q3_K",
        "IQ4_NL",
        "F16",
        "BF16",
        "F32",
    )
} | {"Q4_K_M": mixed}
UNPACKED = ("Q3_K", "IQ4_NL", "F16", "BF16", "F32")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "qwen3_5_text"])
def test_a_file_is_served_as_it_is_stored(model_type: str, kinds: str, tmp_path: Path) -> None:
    file, plain = save_gguf(
        tmp_path, model_type, KINDS[kinds], seed=1
    )  # with others a router's choice is a tie
    for dtype in ("float32", "bfloat16"):
        runtime = assert_served_as_near_as_bfloat16(file, plain, dtype, TOKENS)
        layers = coded_layers(runtime._model)
        assert bool(layers) == (kinds not in UNPACKED)
        if has_coded_loops() and dtype == "bfloat16" and model_type != "qwen3_5_text":
            assert not any(isinstance(layer, Widened) for layer in layers)
        for form in packed_experts(runtime):
            assert isinstance(form._first, CodedLayers) == (kinds not in UNPACKED)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "phi3", "gemma3_text", "lfm2"])
def test_other_architectures_are_served(model_type: str, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        runtime = assert_served_as_near_as_bfloat16(*save_gguf(tmp_path, model_type, mixed), dtype, TOKENS)
        assert any(isinstance(layer, (Coded, Widened)) for layer in coded_layers(runtime._model))


# ---- metadata


def changed(directory: Path, change: dict[str, Any], model_type: str = "llama", **overrides: Any) -> Path:
    """Returns a file with other settings. None leaves a key out."""

    class Writer(gguf.GGUFWriter):
        def write_header_to_file(self, path: Path | None = None) -> None:
            for key, value in change.items():
                for data in self.kv_data:
                    data.pop(key, None)
                if isinstance(value, bool):
                    self.add_bool(key, value)
                elif isinstance(value, int):
                    self.add_uint32(key, value)
                elif isinstance(value, float):
                    self.add_float32(key, value)
                elif isinstance(value, str):
                    self.add_string(key, value)
            super().write_header_to_file(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Writer)
        return save_gguf(directory, model_type, KINDS["F16"], **overrides)[0]


@pytest.mark.parametrize(
    ("model_type", "change", "words"),
    [
        ("llama", {"llama.expert_count": 8}, "expert_count is 8"),
        ("llama", {"llama.attention.value_length": 32}, "keys of 16 and values of 32"),
        ("llama", {"llama.rope.dimension_count": 8}, "8 of 16 numbers"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ("llama", {"llama.attention.scale": 0.25}, "attention.scale is 0.25"),
        ("qwen2", {"qwen2.attention.causal": False}, "attention.causal is False"),
        ("llama", {"llama.logit_scale": 2.0}, "logit_scale is 2.0"),
        ("llama", {"llama.rope.scaling.attn_factor": 1.5}, "attn_factor is 1.5"),
        ("llama", {"llama.leading_dense_block_count": 1}, "leading_dense_block_count is 1"),
        ("llama", {"general.architecture": "no-such"}, "the architecture 'no-such'"),
        ("llama", {"tokenizer.ggml.model": "none"}, "its tokenizer cannot be read"),
    ],
)
def test_metadata_that_no_one_reads_is_refused(
    model_type: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words):
        load(changed(tmp_path, change, model_type), "float32")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"llama.attention.causal": True},
        {"llama.rope.scaling.type": "none"},
        {"llama.expert_count": 0},
        {"split.count": 0},
        {"llama.vision.block_count": 27, "llama.mm.tokens_per_image": 256},
        {"tokenizer.ggml.pre": "deepseek-coder"},
    ],
)
def test_metadata_that_changes_nothing_is_passed_over(change: dict[str, Any], tmp_path: Path) -> None:
    load(changed(tmp_path, change), "float32")


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ],
)
def test_scaled_rotations_are_served(scaling: dict[str, Any], tmp_path: Path) -> None:
    rope = {"rope_theta": 10000.0, **scaling}
    keys = {"llama.rope.scaling.type": scaling["rope_type"], "llama.rope.scaling.factor": scaling["factor"]}
    if original := scaling.get("original_max_position_embeddings"):
        keys["llama.rope.scaling.original_context_length"] = original
    file = changed(tmp_path, keys, rope_parameters=rope)
    assert_served_as_near_as_bfloat16(file, tmp_path / "plain", "float32", TOKENS)


def test_no_window_is_a_window_of_no_token_in_the_metadata(tmp_path: Path) -> None:
    file = changed(tmp_path, {"phi3.attention.sliding_window": 0}, "phi3", sliding_window=None)
    assert_served_as_near_as_bfloat16(file, tmp_path / "plain", "float32", TOKENS)


def test_ends_of_turns_are_found_by_their_text(tmp_path: Path) -> None:
    file = changed(tmp_path, {"tokenizer.ggml.eot_token_id": None})
    assert load(file, "float32").description.eos_token_ids == (256, 257)


def test_factors_of_frequencies_are_served(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    file, plain = save_gguf(tmp_path, "llama", KINDS["F16"], rope_parameters=rope)
    assert any(tensor.name == "rope_freqs.weight" for tensor in gguf.GGUFReader(file).tensors)
    assert_served_as_near_as_bfloat16(file, plain, "float32", TOKENS)


def test_a_tensor_that_the_architecture_does_not_have_is_refused(tmp_path: Path) -> None:
    for model_type, name in (("llama", "blk.0.attn_q_norm.weight"), ("qwen3_5_text", "blk.0.other.weight")):
        with pytest.MonkeyPatch.context() as patch:
            write = gguf.GGUFWriter.write_header_to_file

            def added(self: Any, path: Any = None, name: str = name, write: Any = write) -> None:
                self.add_tensor(name, np.ones(64, np.float32))
                write(self, path)

            patch.setattr(gguf.GGUFWriter, "write_header_to_file", added)
            file, _ = save_gguf(tmp_path / model_type, model_type, KINDS["F16"])
        with pytest.raises(ModelUnsupported, match=r"attn_q_norm\.weight|layers\.0\.other\.weight"):
            load(file, "float32")


# ---- tokenizer


def test_the_tokenizer_and_the_template_are_the_files_own(tmp_path: Path) -> None:
    file, _ = save_gguf(tmp_path, "llama", KINDS["F16"])
    directory = locate_model(ModelConfig(str(file)), lambda stage, done: None)
    tokenizer = HFTokenizer.load(str(directory))
    for text in ("hello, world", "Grüße  an\talle\n\n🌲", "a <think> b"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("<think>")) == 1
    assert max(tokenizer.encode("a <|endoftext|> b")) < TOKENS  # the file does not have this token
    assert len(tokenizer.encode("he")) == 1
    assert tokenizer.has_chat_template
    assert load(file, "float32").description.eos_token_ids == (256, 257)


# ---- broken files


def test_broken_files_are_refused_with_their_name(tmp_path: Path) -> None:
    file, _ = save_gguf(tmp_path, "llama", KINDS["F16"])
    whole = file.read_bytes()
    random = np.random.default_rng(0)
    cuts = [0, 3, 8, 23, 24, 100, 5000, len(whole) // 2, len(whole) - 1]
    for number, cut in enumerate(cuts):
        broken = tmp_path / f"broken{number}.gguf"
        broken.write_bytes(whole[:cut])
        with pytest.raises((ModelFileInvalid, ModelUnsupported), match="broken"):
            load(broken, "float32")
    for number in range(40):  # each bit of the counts, and of lengths and types behind them
        flipped = bytearray(whole)
        flipped[int(random.integers(4, 400))] ^= 1 << int(random.integers(8))
        broken = tmp_path / f"flipped{number}.gguf"
        broken.write_bytes(flipped)
        with contextlib.suppress(ModelError):
            load(broken, "float32")
