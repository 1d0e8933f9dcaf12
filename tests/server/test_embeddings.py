"""OpenAI's embeddings over HTTP: a served embedding model, its limits, and models that have none."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from embedding_models import own_embedding, save_embedding_model
from rootstock.config import EngineConfig, ModelConfig, ServerConfig
from rootstock.runtime.torch.embedder import load_embedder
from rootstock.server.embedding_app import create_embedding_app
from rootstock.server.listen import running
from server.conftest import Served, assert_error
from waiting import HANG_S


@contextlib.contextmanager
def serving(directory: Path, **fields: Any) -> Iterator[httpx.Client]:
    config = ModelConfig(str(directory), device="cpu", dtype="float32", served_name="tiny", threads=1)
    embedder = load_embedder(config, directory)
    app = create_embedding_app(embedder, ServerConfig(**fields), EngineConfig())
    with running(app, embedder) as url, httpx.Client(base_url=url, timeout=HANG_S) as client:
        yield client


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedding_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def client(directory: Path) -> Iterator[httpx.Client]:
    with serving(directory, aliases=("other",)) as one:
        yield one


def embed(client: httpx.Client, input: Any, **fields: Any) -> httpx.Response:
    return client.post("/v1/embeddings", json={"input": input, **fields})


def test_every_form_of_an_input(client: httpx.Client, directory: Path) -> None:
    ids = [2, 4, 5, 3]
    forms: list[tuple[Any, list[Any]]] = [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        (ids, [ids]),
        ([ids, [7]], [ids, [7]]),
    ]
    for given, each in forms:
        answer = embed(client, given, model="tiny").json()
        assert (answer["object"], answer["model"]) == ("list", "tiny")
        assert [one["index"] for one in answer["data"]] == list(range(len(each)))
        for one, text in zip(answer["data"], each, strict=True):
            expected = own_embedding(directory, text, "mean").numpy()
            np.testing.assert_allclose(one["embedding"], expected, atol=2e-5)
        tokens = sum(len(text) + 2 if isinstance(text, str) else len(text) for text in each)
        assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_base64_has_the_same_numbers(client: httpx.Client) -> None:
    numbers = embed(client, "abc").json()["data"][0]["embedding"]
    encoded = embed(client, "abc", encoding_format="base64").json()["data"][0]["embedding"]
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(encoded), "<f4"), np.array(numbers, np.float32)
    )


def test_inputs_that_are_refused(client: httpx.Client) -> None:
    for given, code, param in (
        ("", "empty_prompt", "input[0]"),
        ([], "empty_prompt", "input"),
        (["a", " "], "empty_prompt", "input[1]"),
        ([[]], "invalid_parameter", "input[0]"),
        (["a", [4]], None, None),
        ({"a": 1}, "invalid_parameter", "input"),
        ([4, "a"], "invalid_parameter", "input[0]"),
        ([True], "invalid_parameter", "input[0]"),
        ([[4, 999]], "invalid_parameter", "input[0]"),
        ([-1], "invalid_parameter", "input[0]"),
        (["a"] * 3000, "invalid_parameter", "input"),
        (["a", "b" * 47], "context_length_exceeded", "input[1]"),
        ("\ud800", "invalid_parameter", "input[0]"),
    ):
        if code is None:
            assert embed(client, given).status_code == 200, "texts and ids may be mixed"
        else:
            body: dict[str, Any] = {"input": given}
            response = (
                client.post("/v1/embeddings", json=body)
                if given != "\ud800"
                else client.post(
                    "/v1/embeddings",
                    content=b'{"input": "\\ud800"}',
                    headers={"Content-Type": "application/json"},
                )
            )
            assert_error(response, 400, code, param=param)
    assert_error(embed(client, "a", encoding_format="hex"), 400, "invalid_parameter", param="encoding_format")
    assert_error(embed(client, "a", dimensions=8), 400, "unsupported_parameter", param="dimensions")
    assert embed(client, "a", dimensions=32).status_code == 200
    assert_error(embed(client, "a", input_type="query"), 400, "unsupported_parameter", param="input_type")


def test_embeddings_of_matryoshka_models_are_cut(tmp_path: Path) -> None:
    save_embedding_model(tmp_path, matryoshka_dimensions=[8, 16])
    with serving(tmp_path) as client:
        whole = np.array(embed(client, "abc").json()["data"][0]["embedding"])
        cut = np.array(embed(client, "abc", dimensions=8).json()["data"][0]["embedding"])
        np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
        assert_error(
            embed(client, "abc", dimensions=9), 400, "invalid_parameter", "8, 16", param="dimensions"
        )


def test_names_and_other_routes(client: httpx.Client) -> None:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny", "other"]
    assert client.get("/v1/models/other").json()["dimensions"] == 32
    assert embed(client, "a", model="other").json()["model"] == "other"
    assert_error(embed(client, "a", model="another"), 404, "model_not_found")
    assert client.get("/health").json()["alive"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        assert_error(
            client.post(path, json={}), 400, "unsupported_parameter", "embedding model", "/v1/embeddings"
        )


def test_a_key_is_required(directory: Path) -> None:
    with serving(directory, api_key="secret") as client:
        assert_error(embed(client, "a"), 401, "invalid_api_key")
        headers = {"Authorization": "Bearer secret"}
        assert client.post("/v1/embeddings", json={"input": "a"}, headers=headers).status_code == 200


def test_a_generation_model_has_no_embeddings(served: Served) -> None:
    response = served.client.post("/v1/embeddings", json={"input": "a"})
    assert_error(response, 400, "unsupported_parameter", "generates text", param="model")


def test_a_tenants_limits_hold_for_embeddings(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("keys: [{key: k, tenant: a}]\ntenants: {a: {models: [tiny], tokens_per_minute: 10}}\n")
    with serving(directory, api_keys=file, aliases=("other",)) as client:
        client.headers["Authorization"] = "Bearer k"
        assert_error(embed(client, "a", model="other"), 403, "model_not_allowed", param="model")
        assert embed(client, [[2, 4, 5, 3]], model="tiny").status_code == 200
        assert embed(client, [[2, 4, 5, 3]]).status_code == 200
        assert_error(embed(client, [[2, 4, 5, 3]]), 429, "rate_limit_exceeded", "tokens_per_minute")
