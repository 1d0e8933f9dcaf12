"""`rootstock serve` with two tiny checkpoints, one of which is loaded on demand, by the real loader."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from checkpoints import dense_greedy, save_chat
from cli.running import Process
from embedding_models import own_embedding, save_embedding_model
from waiting import HANG_S

PROMPT = "<|user|>Say something.<|assistant|>"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> dict[str, Path]:
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
    process = Process(
        *("-m", "rootstock", "serve", "--models", str(folder / "models.yaml")),
        *("--port", "0", "--dtype", "float32", "--device", "cpu", "--kv-budget", "2MiB"),
        *("--disk-dir", str(folder / "tier"), "--alias", "gpt-4o=hybrid", "--chunk-tokens", "16"),
    )
    assert "llama (loaded), hybrid (unloaded), small (loaded, embeddings of 32 dimensions)" in process.ready
    yield process.url
    answer(process.url, "hybrid")  # the tests of this process may have asked no other model
    process.stop_cleanly(signal.SIGTERM)
    assert len(list((folder / "tier").iterdir())) == 2, "each generation model has a folder of the disk tier"


def answer(server: str, model: str, **fields: Any) -> Any:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    response = httpx.post(f"{server}/v1/completions", json=body | fields, timeout=HANG_S)
    assert response.status_code == 200, response.text
    return response.json()


def test_each_model_gives_the_text_of_transformers_also_after_an_unload(
    server: str, models: dict[str, Path]
) -> None:
    expected = {name: dense_greedy(models[name], PROMPT, 12) for name in ("llama", "hybrid")}
    assert expected["llama"] != expected["hybrid"]
    for _ in range(2):
        for name in ("llama", "hybrid", "llama"):
            assert answer(server, name)["choices"][0]["text"] == expected[name]
    httpx.post(f"{server}/v1/models/unload", json={"model": "hybrid"}, timeout=HANG_S).raise_for_status()
    assert answer(server, "gpt-4o")["choices"][0]["text"] == expected["hybrid"]
    stats = httpx.get(f"{server}/v1/cache/stats?model=hybrid", timeout=HANG_S).json()
    assert stats["tier"]["records"] > 0, "its cache was written to the disk when it was unloaded"


def embedded(server: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server}/v1/embeddings", json={"input": ["abc", "a b"], **fields}, timeout=HANG_S)


def expect_embeddings(response: httpx.Response, directory: Path) -> None:
    assert response.status_code == 200, response.text
    for text, found in zip(["abc", "a b"], response.json()["data"], strict=True):
        expected = own_embedding(directory, text, "mean").numpy()
        np.testing.assert_allclose(found["embedding"], expected, atol=2e-5)


def test_an_embedding_model_is_served_beside_them(server: str, models: dict[str, Path]) -> None:
    for name in ("small", "text-embedding-3-small"):
        expect_embeddings(embedded(server, model=name), models["small"])
    assert embedded(server, model="llama").json()["error"]["code"] == "unsupported_parameter"
    answer(server, "llama")


def test_both_kinds_compute_in_turns_with_the_numbers_of_each_alone(
    server: str, models: dict[str, Path]
) -> None:
    expected = dense_greedy(models["llama"], PROMPT, 60)
    # Longer than a chunk: the other model decodes between the layers of a forward, too.
    texts = ["the quick brown fox jumps over a lazy dog then"[at % 8 :].strip() for at in range(400)]
    with ThreadPoolExecutor(2) as pool:
        embeddings = pool.submit(embedded, server, model="small", input=texts)
        answers = [pool.submit(answer, server, "llama", max_tokens=60) for _ in range(3)]
        assert {one.result(HANG_S)["choices"][0]["text"] for one in answers} == {expected}
        response = embeddings.result(HANG_S)
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    alone = [own_embedding(models["small"], text, "mean").numpy() for text in texts[:8]]
    for at, found in enumerate(data):
        np.testing.assert_allclose(found["embedding"], alone[at % 8], atol=2e-5)


def test_an_embedding_model_alone_has_ids_log_lines_and_metrics(models: dict[str, Path]) -> None:
    process = Process(
        *("-m", "rootstock", "serve", str(models["small"]), "--port", "0"),
        *("--dtype", "float32", "--device", "cpu", "--log-format", "json", "--access-log"),
    )
    assert f"{models['small'].name} (loaded, embeddings of 32 dimensions)" in process.ready
    assert "KV" not in process.ready
    response = embedded(process.url, model="any-name")
    expect_embeddings(response, models["small"])
    metrics = httpx.get(f"{process.url}/metrics", timeout=HANG_S).text
    assert f'rootstock_request_seconds_count{{model_name="{models["small"].name}",tenant=""}} 1.0' in metrics
    status, out, err = process.stop(signal.SIGTERM)
    assert (status, out) == (0, ""), err
    lines = [json.loads(line) for line in err.splitlines()]
    [access] = [line for line in lines if line.get("route") == "/v1/embeddings"]
    assert access["request_id"] == response.headers["X-Request-Id"]
    assert access["prompt_tokens"] == 5 + 5
