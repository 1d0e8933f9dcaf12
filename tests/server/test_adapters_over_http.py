"""LoRA adapters over HTTP: models of their own in every API, loaded and unloaded by operators alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import tiny_model
from lora import linears_of, save_adapter
from rootstock.config import CacheConfig, ServerConfig
from rootstock.engine.build import assemble
from rootstock.errors import InvalidOption
from rootstock.server.app import create_app
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FakeRuntime
from server.conftest import GREEDY, Served, assert_error
from server.dashboard.browser import Browser

MODEL = tiny_model("llama")
PROMPT = list(range(40, 70))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("a", "b")):
        save_adapter(root / name, MODEL, linears_of(MODEL, "q_proj"), seed=seed)
    return root


@pytest.fixture
def start(serve: Callable[..., Any]) -> Iterator[Callable[[ServerConfig], Served]]:
    """Starts servers, and stops them after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda config: stack.enter_context(serve(server=config))


def load(served: Served, name: str, path: Path, **headers: str) -> Any:
    body = {"lora_name": name, "lora_path": str(path)}
    return served.client.post("/v1/load_lora_adapter", json=body, headers=headers)


def unload(served: Served, name: str, **headers: str) -> Any:
    return served.client.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=headers)


def expected(served: Served, name: str, count: int) -> list[int]:
    found = served.assembly.engine.adapters.find(name)
    fingerprint = "" if found is None else found.fingerprint
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(int(served.runtime.expected_logits(np.array(tokens, np.int32), fingerprint).argmax()))
    return tokens[len(PROMPT) :]


def test_the_model_of_a_request_chooses_an_adapter(start: Callable[..., Served], directory: Path) -> None:
    served = start(ServerConfig(adapter_directories=(directory,), aliases=()))
    for name in ("a", "b"):
        assert (
            load(served, name, directory / name).text == f"Success: LoRA adapter '{name}' added successfully."
        )
    listed = {model["id"]: model for model in served.client.get("/v1/models").json()["data"]}
    assert list(listed) == ["fake", "a", "b"]
    assert (listed["fake"]["parent"], listed["a"]["parent"], listed["b"]["root"]) == (None, "fake", "b")
    answers = []
    for turn in range(2):
        for name in ("fake", "a", "b"):
            answer = served.complete(PROMPT, model=name, max_tokens=6, ignore_eos=True, **GREEDY).json()
            assert answer["model"] == name
            tokenizer = served.assembly.tokenizer
            text = tokenizer.decode(expected(served, name, 6))
            assert answer["choices"][0]["text"] == text
            answers.append(text)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 0) == (turn > 0), "an adapter finds its own prefix, and no other's"
    assert len(set(answers)) == 3
    explained = served.client.post("/v1/cache/explain", json={"model": "a", "prompt": PROMPT}).json()
    assert explained["matched_tokens"] == len(PROMPT) - 1
    for path, body in (
        ("/v1/chat/completions", {"max_tokens": 4}),
        ("/v1/messages", {"max_tokens": 4}),
    ):
        messages = [{"role": "user", "content": "hello"}]
        texts = {
            name: served.client.post(
                path, json={"model": name, "messages": messages, **GREEDY, **body}
            ).json()
            for name in ("fake", "a")
        }
        assert texts["a"]["model"] == "a"
        assert str(texts["a"].get("choices", texts["a"].get("content"))) != str(
            texts["fake"].get("choices", texts["fake"].get("content"))
        )
    responses = [
        served.client.post(
            "/v1/responses", json={"model": name, "input": "hello", "max_output_tokens": 4, **GREEDY}
        )
        for name in ("fake", "a")
    ]
    assert responses[0].json()["output"][0]["content"] != responses[1].json()["output"][0]["content"]
    assert unload(served, "a").status_code == 200
    assert_error(served.complete(PROMPT, model="a"), 404, "model_not_found")
    assert_error(unload(served, "a"), 404, "adapter_not_loaded")


def test_names_are_taken_once(start: Callable[..., Served], directory: Path) -> None:
    served = start(ServerConfig(adapter_directories=(directory,), aliases=("other",)))
    load(served, "a", directory / "a")
    for name in ("a", "fake", "other"):
        assert_error(load(served, name, directory / "b"), 409, "adapter_exists")


def test_adapters_come_from_allowed_directories_only(
    start: Callable[..., Served], directory: Path, tmp_path: Path
) -> None:
    off = start(ServerConfig())
    assert_error(load(off, "a", directory / "a"), 400, "unsupported_parameter", "--adapter-directory")
    assert_error(unload(off, "a"), 400, "unsupported_parameter", "--adapter-directory")
    served = start(ServerConfig(adapter_directories=(directory,)))
    outside = save_adapter(tmp_path / "c", MODEL, linears_of(MODEL, "q_proj"))
    for path in (outside, directory / ".." / outside.parent.name / "c", Path("/etc")):
        assert_error(
            load(served, "c", path), 400, "invalid_parameter", "--adapter-directory", param="lora_path"
        )
    assert_error(load(served, "c", directory / "none"), 400, "adapter_unusable")
    assert_error(load(served, "x" * 300, directory / "a"), 400, "invalid_parameter", param="lora_name")
    assert_error(load(served, "a\nb", directory / "a"), 400, "invalid_parameter", param="lora_name")


def test_clients_load_no_adapters(start: Callable[..., Served], directory: Path) -> None:
    served = start(ServerConfig(adapter_directories=(directory,), api_key="client", admin_key="admin"))
    client, admin = {"Authorization": "Bearer client"}, {"Authorization": "Bearer admin"}
    assert_error(load(served, "a", directory / "a", **client), 403, "admin_only")
    assert load(served, "a", directory / "a", **admin).status_code == 200
    assert_error(unload(served, "a", **client), 403, "admin_only")
    assert unload(served, "a", **admin).status_code == 200


def test_an_adapter_named_as_its_model_stops_the_start(directory: Path) -> None:
    tokenizer = ByteTokenizer()
    made = assemble(FakeRuntime(tokenizer.vocab_size, 4096), tokenizer, CacheConfig(budget_bytes=1 << 20))
    made.engine.load_adapter("fake", directory / "a")
    with pytest.raises(InvalidOption, match="another name"):
        create_app(made, ServerConfig())


def test_a_prefix_of_an_adapter_is_pinned(start: Callable[..., Served], directory: Path) -> None:
    served = start(ServerConfig(adapter_directories=(directory,), aliases=()))
    load(served, "a", directory / "a")
    body = {"model": "a", "prompt": PROMPT, "max_tokens": 1}
    assert served.client.post("/v1/completions", json=body).status_code == 200
    pinned = served.client.post("/v1/cache/pin", json={"model": "a", "prompt": PROMPT})
    assert pinned.status_code == 200, pinned.text
    assert pinned.json()["tokens"] >= len(PROMPT) - 1
    browser = Browser(served.url)
    _, columns = browser.tree()
    (number,) = map(int, columns["number"])
    told = browser.post(f"/dashboard/tree/{number}/pin").json()["pinned"]
    assert (told["tenant"], told["tokens"] >= len(PROMPT)) == ("", True)
    unload(served, "a")
    refused = browser.post(f"/dashboard/tree/{number}/pin").json()
    assert refused == {
        "refused": True,
        "message": "Not pinned: the LoRA adapter of this prefix is not loaded.",
    }
