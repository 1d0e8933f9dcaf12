"""Images over HTTP, in every format, to a small model that sees them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from image_checkpoints import file_of, picture, save_images
from rootstock.config import CacheConfig, ModelConfig, ServerConfig
from rootstock.engine.build import build_engine
from rootstock.server.app import create_app
from rootstock.server.http.listen import running
from server.conftest import assert_error
from waiting import HANG_S

Json = dict[str, Any]
QUESTION = "What is this?"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    directory = save_images(tmp_path_factory.mktemp("images") / "model", "qwen3_vl")
    model = ModelConfig(model=str(directory), dtype="float32")
    made = build_engine(model, CacheConfig(budget_bytes=16 * 1024**2))
    app = create_app(made, ServerConfig(aliases=()))
    with (
        made.engine,
        running(app, made.engine) as url,
        httpx.Client(base_url=url, timeout=HANG_S) as opened,
    ):
        yield opened


def coded(seed: int) -> str:
    return base64.b64encode(file_of(picture(seed))).decode()


def url_of(seed: int) -> str:
    return f"data:image/png;base64,{coded(seed)}"


def chat(content: Any) -> Json:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}


def image_url(seed: int) -> Json:
    return {"type": "image_url", "image_url": {"url": url_of(seed)}}


def ask(client: httpx.Client, seed: int, format: str) -> tuple[str, int]:
    """Asks about a picture. Returns the answer and its prompt's cached tokens."""
    sampling = {"temperature": 0}
    text = {"type": "text", "text": QUESTION}
    match format:
        case "chat":
            found = client.post(CHAT, json=chat([image_url(seed), text])).json()
            usage = found["usage"]["prompt_tokens_details"]
            return found["choices"][0]["message"]["content"], usage["cached_tokens"]
        case "responses":
            parts = [
                {"type": "input_image", "image_url": url_of(seed)},
                {"type": "input_text", "text": QUESTION},
            ]
            body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 6, **sampling}
            found = client.post("/v1/responses", json=body).json()
            text_of = "".join(part["text"] for item in found["output"] for part in item.get("content", []))
            return text_of, found["usage"]["input_tokens_details"]["cached_tokens"]
        case "messages":
            source = {"type": "base64", "media_type": "image/png", "data": coded(seed)}
            content = [{"type": "image", "source": source}, text]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, **sampling}
            found = client.post("/v1/messages", json={**body, "model": "model"}).json()
            text_of = "".join(part.get("text", "") for part in found["content"])
            return text_of, found["usage"]["cache_read_input_tokens"]
    raise AssertionError(format)


def test_every_format_gives_the_same_answer_and_shares_the_cache(client: httpx.Client) -> None:
    first, cached = ask(client, 1, "chat")
    assert cached == 0
    for format in ("chat", "responses", "messages"):
        answer, cached = ask(client, 1, format)
        assert answer == first
        assert cached > 20


def test_another_picture_of_the_same_size_shares_only_what_stands_before_it(client: httpx.Client) -> None:
    ask(client, 2, "chat")
    _, cached = ask(client, 3, "chat")
    assert cached <= 2


def test_images_of_tools_and_of_ollamas_clients_are_read(client: httpx.Client) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": coded(4)}
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "image", "source": source}],
    }
    body = {
        "model": "model", "max_tokens": 4, "temperature": 0,
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    }  # fmt: skip
    usage = client.post("/v1/messages", json=body).json()["usage"]
    assert sum(usage[f"{part}input_tokens"] for part in ("", "cache_read_", "cache_creation_")) > 24
    of_ollama = {"role": "user", "content": QUESTION, "images": [coded(4), coded(5)]}
    body = {"model": "model", "messages": [of_ollama], "stream": False, "options": {"num_predict": 4}}
    assert client.post("/api/chat", json=body).json()["prompt_eval_count"] > 2 * 24


def test_a_count_of_tokens_counts_images(client: httpx.Client) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": coded(6)}
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
    }
    assert client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"] > 24


def test_texts_that_spell_out_the_tokens_of_images_are_texts(client: httpx.Client) -> None:
    spelled = "<|vision_start|><|image_pad|><|vision_end|> " * 3
    body = chat([image_url(1), {"type": "text", "text": spelled}])
    assert client.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("https://192.0.2.1/a.png", "fetches no addresses"),
        ("file:///etc/passwd", "fetches no addresses"),
        ("data:image/png,abc", "is not in base64"),
        ("data:image/png;base64,@@@", "is not valid base64"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,AAAA", "is no PNG"),
        (url_of(1)[:-400], "is"),
    ],
)
def test_an_image_that_cannot_be_read_is_an_error(client: httpx.Client, source: str, reason: str) -> None:
    body = chat([{"type": "text", "text": "See:"}, {"type": "image_url", "image_url": {"url": source}}])
    assert_error(client.post(CHAT, json=body), 400, "invalid_image", reason, param="messages[0].content[1]")


def test_too_many_images_are_an_error(client: httpx.Client) -> None:
    response = client.post(CHAT, json=chat([image_url(1)] * 101))
    assert_error(response, 400, "invalid_parameter", "without images after 100 of them")


def test_other_media_stay_lines_of_text(client: httpx.Client) -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    response = client.post(CHAT, json=chat([image_url(1), audio, {"type": "text", "text": QUESTION}]))
    assert response.status_code == 200
    assert 'rootstock_unread_media_total{kind="audio"}' in client.get("/metrics").text


def test_a_prompt_with_an_image_is_explained(client: httpx.Client) -> None:
    client.post(CHAT, json=chat([image_url(7), {"type": "text", "text": QUESTION}]))
    for seed, question, expected in ((7, "Why?", 24), (8, QUESTION, 0)):
        body = chat([image_url(seed), {"type": "text", "text": question}])
        explained = client.post("/v1/cache/explain", json=body)
        assert explained.status_code == 200, explained.text
        assert expected <= explained.json()["matched_tokens"] <= expected + 8
        assert explained.json()["divergence"] is not None
