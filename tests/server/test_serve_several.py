"""`rootstock serve` with two tiny checkpoints, one of which is loaded on demand, by the real loader."""

from __future__ import annotations

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
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from waiting import HANG_S

PROMPT = "<|user|>Say something.<|assistant|>"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> dict[str, Path]:
    from checkpoints import save_chat
    from embedding_models import save_embedding_model

    return {
        "llama": checkpoint,
        "hybrid": save_chat(tmp_path_factory.mktemp("second"), "states"),
        "small": save_embedding_model(tmp_path_factory.mktemp("third")),
    }


@pytest.fixture(scope="module")
def server(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("several")
    (folder / "models.yaml").write_text(
        f"llama: {{model: {models['llama']}}}\nhybrid: {{model: {models['hybrid']}, load: demand}}\n"
        f"small: {{model: {models['small']}, alias: text-embedding-3-small}}\n"
    )
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "rootstock", "serve", "--models", str(folder / "models.yaml")),
            *("--port", "0", "--dtype", "float32", "--device", "cpu", "--kv-budget", "2MiB"),
            *("--disk-dir", str(folder / "tier"), "--alias", "gpt-4o=hybrid"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    ready = process.stdout.readline()
    found = re.search(r"http://[\d.]+:\d+", ready)
    assert found, (ready, process.communicate())
    assert "llama (loaded), hybrid (unloaded), small (loaded, embeddings of 32 dimensions)" in ready
    yield found[0]
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, out) == (0, ""), err
    assert "Traceback" not in err
    assert len(list((folder / "tier").iterdir())) == 2, "each generation model has a folder of the disk tier"


def dense_greedy(checkpoint: Path, count: int) -> str:
    """Generates with transformers alone."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def answer(server: str, model: str, **fields: Any) -> Any:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    response = httpx.post(f"{server}/v1/completions", json=body | fields, timeout=HANG_S)
    assert response.status_code == 200, response.text
    return response.json()


def test_each_model_gives_the_text_of_transformers_also_after_an_unload(
    server: str, models: dict[str, Path]
) -> None:
    expected = {name: dense_greedy(path, 12) for name, path in models.items()}
    assert expected["llama"] != expected["hybrid"]
    for _ in range(2):
        for name in ("llama", "hybrid", "llama"):
            assert answer(server, name)["choices"][0]["text"] == expected[name]
    httpx.post(f"{server}/v1/models/unload", json={"model": "hybrid"}, timeout=HANG_S).raise_for_status()
    assert answer(server, "gpt-4o")["choices"][0]["text"] == expected["hybrid"]
    stats = httpx.get(f"{server}/v1/cache/stats?model=hybrid", timeout=HANG_S).json()
    assert stats["tier"]["records"] > 0, "its cache was written to the disk when it was unloaded"
