"""`rootstock serve` on a tiny checkpoint, loaded and checked by the real loader."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from checkpoints import dense_greedy
from cli.running import Process
from waiting import HANG_S


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[str]:
    arguments = ["serve", str(checkpoint), "--port", "0", "--dtype", "float32", "--served-model-name", "tiny"]
    process = Process("-m", "rootstock.cli.main", *arguments, "--device", "cpu", "--kv-budget", "8MiB")
    assert "tiny at" in process.ready
    assert "LlamaForCausalLM, full × 2 layers, float32 on cpu by torch, packed" in process.ready
    assert "8.0 MiB" in process.ready
    yield process.url
    process.stop_cleanly(signal.SIGINT)


def test_a_served_checkpoint_gives_the_text_of_transformers_cold_and_warm(
    server: str, checkpoint: Path
) -> None:
    body: dict[str, Any] = {
        "model": "tiny", "temperature": 0, "max_tokens": 24, "ignore_eos": True,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something."}],
    }  # fmt: skip
    expected = dense_greedy(checkpoint, "<|system|>Be brief.<|user|>Say something.<|assistant|>", 24)
    for cached in (False, True):
        answer = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=HANG_S).json()
        assert answer["choices"][0]["message"]["content"] == expected
        usage = answer["usage"]
        found = usage["prompt_tokens_details"]["cached_tokens"]
        assert found == (usage["prompt_tokens"] - 1 if cached else 0)


def test_a_streamed_answer_of_a_checkpoint_gives_the_text_of_transformers(
    server: str, checkpoint: Path
) -> None:
    body = {"prompt": "one two", "temperature": 0, "max_tokens": 16, "ignore_eos": True, "stream": True}
    text = ""
    with httpx.stream("POST", f"{server}/v1/completions", json=body, timeout=HANG_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert text == dense_greedy(checkpoint, "one two", 16)
