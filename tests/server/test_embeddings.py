"""OpenAI's embeddings over HTTP: a served embedding model, its limits, and models that have none."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from embedding_models import own_embedding, save_embedding_model
from rootstock.cache.families import row_bytes
from rootstock.cache.shared_budget import SharedBudget
from rootstock.config import CacheConfig, EngineConfig, ModelConfig, ServedModelConfig, ServerConfig
from rootstock.engine import embedding
from rootstock.engine.build import Assembly, assemble
from rootstock.logs import ACCESS_LOGGER
from rootstock.runtime.base import Embedder
from rootstock.runtime.embedding_files import is_embedding_model
from rootstock.runtime.torch.embedder import load_embedder
from rootstock.server.app import create_app
from rootstock.server.http.listen import running
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.observe.tracing import Tracing
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FULL, FakeRuntime
from server.conftest import GREEDY, Served, assert_error, user
from waiting import HANG_S, wait_for, wait_until


def embedding_config(directory: Path, name: str = "tiny", **fields: Any) -> ServedModelConfig:
    model = ModelConfig(str(directory), device="cpu", dtype="float32", threads=1)
    return ServedModelConfig(name, model, task="embed", **fields)


class Loads:
    """A loader: of embedding models by the real loader, of generation models as oracles. It notes the names."""

    def __init__(self) -> None:
        self.budget = SharedBudget(400 * row_bytes(FULL, 8))
        self.asked: list[str] = []

    def __call__(self, config: ServedModelConfig) -> Assembly | Embedder:
        self.asked.append(config.name)
        directory = Path(config.model.model)
        if is_embedding_model(directory):
            return load_embedder(config.model, directory)
        tokenizer = ByteTokenizer()
        runtime = FakeRuntime(tokenizer.vocab_size, 4096, eos_token_ids=tokenizer.eos_token_ids)
        return assemble(runtime, tokenizer, CacheConfig(block_size=8), EngineConfig(), shared=self.budget)


@dataclass(frozen=True)
class Several:
    registry: ModelRegistry
    loads: Loads
    client: httpx.Client


@contextlib.contextmanager
def serving_models(
    *models: ServedModelConfig, tracing: Tracing | None = None, **fields: Any
) -> Iterator[Several]:
    loads = Loads()
    if len(models) > 1:
        fields = {"aliases": (), **fields}
    config = ServerConfig(**fields)
    registry = ModelRegistry.of_several(models, loads, config, EngineConfig(), loads.budget)
    app = create_app(registry, config, tracing=tracing)
    registry.start()
    with (
        registry,
        running(app, registry) as url,
        httpx.Client(base_url=url, timeout=HANG_S) as client,
    ):
        yield Several(registry, loads, client)


@contextlib.contextmanager
def serving(directory: Path, **fields: Any) -> Iterator[httpx.Client]:
    with serving_models(embedding_config(directory), **fields) as served:
        yield served.client


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedding_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def client(directory: Path) -> Iterator[httpx.Client]:
    with serving(directory, aliases=("other",)) as one:
        yield one


GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": user("Hi")},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
}


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
    for path, body in GENERATING.items():
        answer = client.post(path, json=body)
        assert_error(answer, 400, "unsupported_parameter", "embedding model", "/v1/embeddings", param="model")
    messages = {"max_tokens": 1, "messages": user("Hi"), "model": "tiny"}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = client.post(path, json=messages)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert "embedding model" in answer.json()["error"]["message"]
    for path, refused in (
        ("/v1/cache/explain", {"prompt": "a"}),
        ("/v1/cache/pin", {"prompt": "a"}),
        ("/v1/cache/clear", {"model": "tiny"}),
    ):
        assert_error(client.post(path, json=refused), 400, "unsupported_parameter", "embedding model")
    assert_error(client.get("/v1/cache/stats?model=tiny"), 400, "unsupported_parameter", "no KV cache")
    for path in ("/metrics", "/livez", "/readyz", "/v1/cache/pins", "/docs"):
        assert client.get(path).status_code == 200, path


def test_a_key_is_required(directory: Path) -> None:
    with serving(directory, api_key="secret") as client:
        assert_error(embed(client, "a"), 401, "invalid_api_key")
        headers = {"Authorization": "Bearer secret"}
        assert client.post("/v1/embeddings", json={"input": "a"}, headers=headers).status_code == 200


def test_a_generation_model_alone_has_no_embeddings(served: Served) -> None:
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


# ---- beside a generation model


def generation_config(name: str = "text", **fields: Any) -> ServedModelConfig:
    return ServedModelConfig(name, ModelConfig("no directory"), task="generate", **fields)


def chat(client: httpx.Client, model: str | None = "text", **fields: Any) -> httpx.Response:
    body = {"messages": user("Hello"), "max_tokens": 5, "ignore_eos": True, **GREEDY, **fields}
    return client.post("/v1/chat/completions", json=body if model is None else {"model": model, **body})


@pytest.fixture(scope="module")
def both(directory: Path) -> Iterator[Several]:
    embedding = embedding_config(directory, aliases=("ada",))
    with serving_models(generation_config(), embedding, aliases=("small=tiny", "gpt=text")) as served:
        yield served


def test_a_model_of_each_kind_in_one_server(both: Several, client: httpx.Client) -> None:
    texts = ["abc", "the quick brown fox", "x"]
    alone = embed(client, texts, model="tiny").json()
    for name in ("tiny", "ada", "small"):
        answer = embed(both.client, texts, model=name)
        assert answer.json() == alone | {"model": name}
    for name in ("text", "gpt"):
        assert chat(both.client, name).json()["usage"]["completion_tokens"] == 5
    assert_error(embed(both.client, "a"), 400, "missing_parameter", param="model")
    assert_error(embed(both.client, "a", model="none"), 404, "model_not_found", param="model")
    listed = {model["id"]: model for model in both.client.get("/v1/models").json()["data"]}
    assert list(listed) == ["text", "tiny", "ada", "small", "gpt"]
    assert {name: model["task"] for name, model in listed.items()} == {
        "text": "generate", "tiny": "embed", "ada": "embed", "small": "embed", "gpt": "generate",
    }  # fmt: skip
    ada = listed["ada"]
    assert (ada["root"], ada["dimensions"], ada["max_model_len"], ada["pooling"]) == (
        "tiny",
        32,
        48,
        ["mean"],
    )
    assert "bytes_per_token" not in ada


def test_a_model_of_the_other_kind_is_refused(both: Several) -> None:
    for name in ("text", "gpt"):
        answer = embed(both.client, "a", model=name)
        assert_error(answer, 400, "unsupported_parameter", "generates text", param="model")
    for path, body in GENERATING.items():
        answer = both.client.post(path, json={"model": "ada", **body})
        assert_error(answer, 400, "unsupported_parameter", "'tiny' is an embedding model", param="model")


def test_both_kinds_answer_at_once(both: Several) -> None:
    ids = [[2, *[4 + at % 26] * 40, 3] for at in range(100)]
    expected = embed(both.client, ids, model="tiny").json()["data"]

    def embedded(_: int) -> bool:
        found = embed(both.client, ids, model="tiny").json()["data"]
        return np.allclose(
            [one["embedding"] for one in found], [one["embedding"] for one in expected], atol=1e-5
        )

    with ThreadPoolExecutor(6) as pool:
        embeds = [pool.submit(embedded, at) for at in range(3)]
        chats = [pool.submit(chat, both.client, max_tokens=50) for _ in range(6)]
        assert all(one.result(HANG_S) for one in embeds)
        assert {one.result(HANG_S).text.count('"length"') for one in chats} == {1}


def test_forwards_run_on_the_thread_of_the_steps(both: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    slot = both.registry.slot("tiny")
    assert slot.loaded_embedding is not None
    embedder = slot.loaded_embedding.embedder
    compute = embedder.embed

    def noted(*inputs: Any) -> Any:
        threads.append(threading.current_thread())
        return compute(*inputs)

    monkeypatch.setattr(embedder, "embed", noted)
    assert embed(both.client, "abc", model="tiny").status_code == 200
    model = both.registry.find("text")
    assert threads == [model.engine.call(threading.current_thread)]


def test_an_embedding_model_is_loaded_on_demand_and_unloaded_when_idle(directory: Path) -> None:
    models = (
        generation_config(load="demand"),
        embedding_config(directory, load="demand", idle_unload_s=1.0),
    )
    with serving_models(*models) as served:

        def status() -> Any:
            return served.client.get("/v1/models/tiny").json()["status"]["value"]

        assert (status(), served.loads.asked) == ("unloaded", [])
        assert_error(chat(served.client, "tiny"), 400, "unsupported_parameter", "embedding model")
        assert_error(embed(served.client, "a", model="text"), 400, "unsupported_parameter", "generates text")
        assert served.loads.asked == [], "a refusal loads no model"
        first = embed(served.client, "abc", model="tiny").json()
        wait_until(lambda: status() == "unloaded")
        assert served.client.get("/v1/models/tiny").json()["dimensions"] == 32, "as it was loaded last"
        assert embed(served.client, "abc", model="tiny").json() == first
        assert served.loads.asked == ["tiny", "tiny"]


def test_a_model_whose_task_is_not_known_before_it_is_loaded(directory: Path) -> None:
    unknown = ServedModelConfig("tiny", embedding_config(directory).model, load="demand")
    with serving_models(generation_config(), unknown) as served:
        assert served.client.get("/v1/models/tiny").json()["task"] is None
        for _ in range(2):
            assert_error(chat(served.client, "tiny"), 400, "unsupported_parameter", "embedding model")
        assert served.loads.asked == ["text", "tiny"]
        assert served.client.get("/v1/models/tiny").json()["task"] == "embed"
        body = {"model": "tiny"}
        assert served.client.post("/v1/models/unload", json=body).json()["status"] == {"value": "unloaded"}
        assert served.client.post("/v1/models/load", json=body).json()["status"] == {"value": "loaded"}


def test_a_tenants_list_of_models_holds_for_both_kinds(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("keys: [{key: k, tenant: a}]\ntenants: {a: {models: [tiny]}}\n")
    with serving_models(generation_config(), embedding_config(directory), api_keys=file) as served:
        served.client.headers["Authorization"] = "Bearer k"
        assert embed(served.client, "a", model="tiny").status_code == 200
        assert_error(chat(served.client), 403, "model_not_allowed", param="model")
        assert [one["id"] for one in served.client.get("/v1/models").json()["data"]] == ["tiny"]


def test_a_stopped_server_ends_its_requests(directory: Path) -> None:
    with serving_models(embedding_config(directory)) as served:
        slot = served.registry.slot("tiny")
        assert slot.loaded_embedding is not None
        reached, goes_on = threading.Event(), threading.Event()
        compute = slot.loaded_embedding.embedder.embed

        def held(*inputs: Any) -> Any:
            reached.set()
            wait_for(goes_on)
            return compute(*inputs)

        slot.loaded_embedding.embedder.embed = held  # type: ignore[method-assign]
        with ThreadPoolExecutor(2) as pool:
            answer = pool.submit(embed, served.client, [[4] * 40] * 2000)
            wait_for(reached)
            stopping = pool.submit(served.registry.stop)
            wait_until(lambda: not slot.loaded_embedding or not slot.loaded_embedding.engine.health().alive)
            goes_on.set()
            stopping.result(HANG_S)
            assert_error(answer.result(HANG_S), 503, "engine_stopped")


def test_inputs_of_a_client_that_leaves_are_dropped(directory: Path) -> None:
    with serving_models(embedding_config(directory)) as served:
        model = served.registry.slot("tiny").loaded_embedding
        assert model is not None
        reached, goes_on = threading.Event(), threading.Event()
        compute = model.embedder.embed

        def held(*inputs: Any) -> Any:
            reached.set()
            wait_for(goes_on)
            return compute(*inputs)

        model.embedder.embed = held  # type: ignore[method-assign]
        body = json.dumps({"input": [[4] * 40] * 2000}).encode()
        address = urlsplit(str(served.client.base_url))
        with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
            head = f"Host: {address.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\n" + head.encode() + body)
            wait_for(reached)
        line = 'rootstock_requests_total{outcome="disconnected",route="/v1/embeddings"} 1.0'
        wait_until(lambda: line in served.client.get("/metrics").text)
        goes_on.set()
        wait_until(lambda: not model.engine.has_requests)
        assert model.engine.stats().steps == 1, "the rest of the inputs was not computed"


@pytest.mark.usefixtures("no_garbage_collector")
def test_answers_that_clients_do_not_read_are_bounded(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "_MOST_BYTES", 4 * 32 * 2048)  # of one request with the most inputs
    body = json.dumps({"input": [[4]] * 2048}).encode()
    with serving_models(embedding_config(directory)) as served:
        address = urlsplit(str(served.client.base_url))
        head = (
            f"Host: {address.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(HANG_S)
            connection.connect((address.hostname, address.port))
            connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\n" + head.encode() + body)
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
            for _ in range(3):
                assert_error(embed(served.client, "a"), 429, "embeddings_full", param=None)
        for _ in range(3):
            wait_until(lambda: embed(served.client, [[4]] * 2048).status_code == 200)


# ---- seen by the operator


def test_metrics_of_embeddings(both: Several) -> None:
    def value(name: str, **labels: str) -> float:
        found = [
            float(line.rpartition(" ")[2])
            for line in both.client.get("/metrics").text.splitlines()
            if line.startswith((name + "{", name + " "))
            and all(f'{key}="{text}"' in line for key, text in labels.items())
        ]
        assert len(found) == 1, (name, found)
        return found[0]

    tiny = {"model_name": "tiny"}
    names = (
        "rootstock_request_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_queue_time_seconds_count",
        "vllm:request_prompt_tokens_sum",
        "vllm:prompt_tokens_total",
        "rootstock_prompt_tokens_total",
        "rootstock_steps_total",
    )
    assert embed(both.client, "abc", model="tiny").status_code == 200
    before = {name: value(name, **tiny) for name in names}
    ended = value("vllm:request_success_total", finished_reason="stop", **tiny)
    assert embed(both.client, ["abc", "de"], model="ada").status_code == 200
    after = {name: value(name, **tiny) - before[name] for name in names}
    assert after == dict(zip(names, (1, 1, 1, 9, 9, 9, 1), strict=True))
    assert value("vllm:request_success_total", finished_reason="stop", **tiny) == ended + 1
    assert value("vllm:time_to_first_token_seconds_count", **tiny) == 0, "an embedding has no tokens"
    assert value("vllm:num_requests_running", **tiny) == 0
    assert value("rootstock_alive", **tiny) == 1
    answered = value("rootstock_requests_total", route="/v1/embeddings", outcome="ok")
    assert answered >= 2
    embed(both.client, "", model="tiny")
    assert value("rootstock_errors_total", route="/v1/embeddings", code="empty_prompt") >= 1


def test_ids_and_log_lines_of_embeddings(both: Several, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, ACCESS_LOGGER):
        body = {"input": "abc", "model": "ada"}
        answer = both.client.post("/v1/embeddings", json=body, headers={"X-Request-Id": "mine"})
        assert answer.headers["X-Request-Id"] == "mine"

        def lines() -> list[dict[str, Any]]:
            found = [vars(each)["fields"] for each in caplog.records if each.name == ACCESS_LOGGER]
            return [line for line in found if line["route"] == "/v1/embeddings"]

        wait_until(lines)
    (line,) = lines()
    assert (line["status"], line["model"], line["prompt_tokens"]) == (200, "tiny", 5)
    assert line["total_s"] >= line["queue_s"] >= 0


def test_the_span_of_a_request_for_embeddings(directory: Path) -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra otel")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving_models(embedding_config(directory), tracing=Tracing(provider)) as served:
        assert embed(served.client, "abc", encoding_format="base64").status_code == 200
        wait_until(lambda: len(exporter.get_finished_spans()) == 3)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert sorted(spans) == ["embeddings tiny", "prefill", "queue"]
    attributes = dict(spans["embeddings tiny"].attributes or {})
    expected = {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.embeddings.dimension.count": 32,
        "gen_ai.request.encoding_formats": ("base64",),
    }
    assert attributes.items() >= expected.items()
