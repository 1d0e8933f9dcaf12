"""Models of text and images: their text is served, or the reason says why it is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rootstock.errors import ModelUnsupported
from twins.architectures import VOCAB
from twins.driving import allocate, packed_logits, random_tokens
from twins.torch_models import load
from twins.wrappers import tiny_wrapper

FIRST = 20  # token, behind the special ones


SERVED = ("gemma3", "glm4v", "idefics3", "internvl", "llama4", "llava", "mistral3", "qwen2_5_vl", "qwen3_vl")


@pytest.mark.parametrize("model_type", [*SERVED, "qwen3_vl_moe"])
def test_text_is_served_as_the_model_computes_it(model_type: str, tmp_path: Path) -> None:
    model = tiny_wrapper(model_type)
    model.save_pretrained(tmp_path)
    runtime = load(tmp_path, "float32")
    assert runtime.description.execution_mode == "packed"
    allocate(runtime)
    own = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    sequences = [random_tokens(VOCAB - FIRST, length, length) + FIRST for length in (40, 21)]
    got = np.concatenate(packed_logits(runtime, sequences, [{0: 17, 1: 20}, {1: 1, 0: 22}, {0: 1}]))
    with torch.inference_mode():
        ids = [torch.from_numpy(np.array(tokens)).long()[None] for tokens in sequences]
        expected = np.concatenate([own(input_ids=each, use_cache=False).logits[0].numpy() for each in ids])
    assert np.abs(got - expected).max() <= 1e-3 * expected.std()


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("blip", "takes no cache"),
        ("florence2", "has an encoder"),
        ("idefics", "does not run on text alone"),
        ("kosmos-2.5", "counts positions in a way of its own"),
        ("paligemma", "attends to later positions"),
        ("diffusion_gemma", "does not write text token by token"),
        ("evolla", "no decoder of text"),
        ("pi0", "does not write text token by token"),
        ("shieldgemma2", "classifies and writes no text"),
        ("vision-encoder-decoder", "has an encoder"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    tiny_wrapper(model_type).save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match=reason):
        load(tmp_path, "float32")
