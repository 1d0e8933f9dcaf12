"""`rootstock serve` with two tiny checkpoints, one of which is loaded on demand, by the real loader."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from checkpoints import dense_greedy, save_chat
from cli.running import Process
from waiting import HANG_S

PROMPT = "<|user|>Say something.<|assistant|>"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> dict[str, Path]:
    return {"llama": checkpoint, "hybrid": save_chat(tmp_path_factory.mktemp("second"), "states")}


@pytest.fixture(scope="module")
def server(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("several")
    (folder / "models.yaml").write_text(
        f"llama: {{model: {models['llama']}}}\nhybrid: {{model: {models['hybrid']}, load: demand}}\n"
    )
    process = Process(
        *("-m", "rootstock", "serve", "--models", str(folder / "models.yaml")),
        *("--port", "0", "--dtype", "float32", "--device", "cpu", "--kv-budget", "2MiB"),
        *("--disk-dir", str(folder / "tier"), "--alias", "gpt-4o=hybrid"),
    )
    assert "llama (loaded), hybrid (unloaded)" in process.ready
    yield process.url
    process.stop_cleanly(signal.SIGTERM)
    assert len(list((folder / "tier").iterdir())) == 2, "each model has a folder of the disk tier"


def answer(server: str, model: str, **fields: Any) -> Any:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    response = httpx.post(f"{server}/v1/completions", json=body | fields, timeout=HANG_S)
    assert response.status_code == 200, response.text
    return response.json()


def test_each_model_gives_the_text_of_transformers_also_after_an_unload(
    server: str, models: dict[str, Path]
) -> None:
    expected = {name: dense_greedy(path, PROMPT, 12) for name, path in models.items()}
    assert expected["llama"] != expected["hybrid"]
    for _ in range(2):
        for name in ("llama", "hybrid", "llama"):
            assert answer(server, name)["choices"][0]["text"] == expected[name]
    httpx.post(f"{server}/v1/models/unload", json={"model": "hybrid"}, timeout=HANG_S).raise_for_status()
    assert answer(server, "gpt-4o")["choices"][0]["text"] == expected["hybrid"]
    stats = httpx.get(f"{server}/v1/cache/stats?model=hybrid", timeout=HANG_S).json()
    assert stats["tier"]["records"] > 0, "its cache was written to the disk when it was unloaded"
