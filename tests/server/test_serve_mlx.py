"""`rootstock serve --runtime mlx` on a tiny checkpoint of mlx-lm: cold, warm, and from the disk after a restart.

`bench/show/i2_mlx_checkpoints.py` does the same with many checkpoints.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model as load_by_mlx_lm

from cli.running import Process
from twins import mlx_models
from twins.mlx_served import own_greedy
from waiting import HANG_S

MESSAGES = [
    {"role": "system", "content": "You keep the records of a library. Answer briefly, and name the shelf."},
    {"role": "user", "content": "Which books on winter gardens do we have?"},
]
ANSWER_TOKENS = 24


@pytest.fixture
def _without_compiled_functions() -> Iterator[None]:
    mx.disable_compile()  # on a CPU it calls a C++ compiler for each function
    yield
    mx.enable_compile()


def ask(server: Process) -> tuple[str, int]:
    body: dict[str, Any] = {"model": "any", "messages": MESSAGES, "temperature": 0}
    body |= {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.json()["choices"][0]["message"]["content"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.usefixtures("_without_compiled_functions")
def test_answers_of_a_hybrid_are_mlx_lms_cold_warm_and_after_a_restart(tmp_path: Path) -> None:
    model, tokenizer = mlx_models.save(tmp_path / "model", "gemma3_text"), mlx_models.byte_tokenizer()
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    prompt = np.array(tokenizer(text, add_special_tokens=False).input_ids, np.int32)
    expected = tokenizer.decode(
        own_greedy(load_by_mlx_lm(model)[0], prompt, ANSWER_TOKENS), skip_special_tokens=True
    )
    options = [
        "--runtime",
        "mlx",
        "--port",
        "0",
        "--dtype",
        "float32",
        "--kv-budget",
        "16MiB",
        "--block-size",
        "8",
    ]
    options += ["--disk-dir", str(tmp_path / "disk"), "--disk-budget", "64MiB"]

    def serve() -> Process:
        return Process("-m", "rootstock", "serve", str(model), *options, env={"MLX_DISABLE_COMPILE": "1"})

    server = serve()
    assert "by mlx" in server.ready
    assert ask(server) == (expected, 0)
    answer, cached = ask(server)
    assert answer == expected
    assert cached > 100
    server.stop_cleanly(signal.SIGTERM)
    server = serve()
    answer, cached = ask(server)
    assert answer == expected
    assert cached > 100
    server.stop_cleanly(signal.SIGTERM)
