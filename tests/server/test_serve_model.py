"""`rootstock serve` on a real checkpoint: a tiny one, made here, loaded and checked by the real loader."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rootstock.cli import main as command
from waiting import HANG_S


def dense_greedy(checkpoint: Path, prompt: str, count: int) -> str:
    """What transformers itself says, without any cache of ours."""
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


def test_a_served_checkpoint_says_what_transformers_says_cold_and_warm(server: str, checkpoint: Path) -> None:
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


def test_a_streamed_answer_of_a_checkpoint_is_the_whole_one(server: str, checkpoint: Path) -> None:
    body = {"prompt": "one two", "temperature": 0, "max_tokens": 16, "ignore_eos": True, "stream": True}
    text = ""
    with httpx.stream("POST", f"{server}/v1/completions", json=body, timeout=HANG_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert text == dense_greedy(checkpoint, "one two", 16)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda directory: (directory / "config.json").unlink(), "No model at"),
        (lambda directory: (directory / "model.safetensors").unlink(), "no usable weights"),
        (lambda directory: (directory / "tokenizer.json").unlink(), "no usable tokenizer"),
    ],
)
def test_a_model_that_lacks_something_is_one_clear_line_and_exit_status_2(
    checkpoint: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spoil(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rootstock", "serve", str(tmp_path), "--port", "0"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    stages = {f"rootstock: {words}" for words in command.LoadProgress.STAGES.values()}
    [line] = [line for line in err.splitlines() if line not in stages]
    assert line.startswith("rootstock: ")
    assert said in line
