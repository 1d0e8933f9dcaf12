"""Checkpoints of the tests have padded rows, as most models have: more logits than their tokenizer has tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
from transformers import PreTrainedTokenizerFast

from checkpoints import CHAT_KINDS, save_chat, save_served
from mlx_checkpoints import KINDS, Quantization, save_mlx_checkpoint

# Each kind that has a tokenizer: `checkpoints.save` writes none.
WRITERS: dict[str, Callable[[Path], Path]] = {
    "served": save_served,
    **{f"chat {kind}": partial(save_chat, kind=kind) for kind in CHAT_KINDS},
    **{f"mlx {kind}": partial(save_mlx_checkpoint, kind=kind) for kind in KINDS},
    **{
        f"mlx llama {bits}": partial(save_mlx_checkpoint, kind="llama", quantization=bits)
        for bits in get_args(Quantization)
    },
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_checkpoint_has_more_logits_than_tokens(name: str, tmp_path: Path) -> None:
    directory = WRITERS[name](tmp_path)
    config = json.loads((directory / "config.json").read_text())
    logits = config.get("text_config", config)["vocab_size"]
    assert logits > len(PreTrainedTokenizerFast.from_pretrained(directory))
