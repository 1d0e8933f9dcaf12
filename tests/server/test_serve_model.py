"""`rootstock serve` on a tiny checkpoint, loaded and checked by the real loader."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from waiting import HANG_S


def dense_greedy(checkpoint: Path, prompt: str, count: int) -> str:
    """Generates with transformers alone."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[str]:
    arguments = ["serve", str(checkpoint), "--port", "0", "--dtype", "float32", "--served-model-name", "tiny"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rootstock.cli.main", *arguments, "--device", "cpu", "--kv-budget", "8MiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    ready = process.stdout.readline()
    found = re.search(r"http://[\d.]+:\d+", ready)
    assert found, (ready, process.communicate())
    assert "tiny at" in ready
    assert "LlamaForCausalLM, full × 2 layers, float32 on cpu" in ready
    assert "8.0 MiB" in ready
    yield found[0]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, out) == (0, ""), err
    assert "Traceback" not in err


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
