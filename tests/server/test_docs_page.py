"""The OpenAPI document with every status that a route can answer, and the page of /docs, which loads nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from rootstock.config import ServerConfig
from rootstock.errors import EngineError, LLMClosed, Overloaded, RequestError, RootstockError
from rootstock.server.routes.docs_page import page_of

ERROR = {"$ref": "#/components/schemas/ErrorBody"}
ANTHROPIC_ERROR = {"$ref": "#/components/schemas/MessagesErrorBody"}
OLLAMA_ERROR = {"$ref": "#/components/schemas/OllamaErrorBody"}


@pytest.fixture(scope="module")
def document(served: Any) -> dict[str, Any]:
    found: dict[str, Any] = served.client.get("/openapi.json").json()
    return found


def errors_of_requests() -> Iterator[type[RootstockError]]:
    """Yields the classes of errors that an answer can have."""
    classes = [RequestError, Overloaded, EngineError]
    while classes:
        one = classes.pop()
        yield one
        classes += [each for each in one.__subclasses__() if each is not LLMClosed]


# Their 503 tells the server's state.
PROBES = {(path, "503") for path in ("/health", "/livez", "/ping", "/readyz")}


def test_a_route_of_the_model_documents_the_status_of_every_error(document: dict[str, Any]) -> None:
    statuses = {str(error.http_status) for error in errors_of_requests()} - {"405", "409"} | {"200"}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/cache/explain"):
        assert set(document["paths"][path]["post"]["responses"]) == statuses


def test_every_route_documents_the_errors_of_any_route_with_their_body(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            assert {"400", "401", "403", "408", "413", "414", "426", "431", "500", "503"} <= set(answers)
            assert "422" not in answers, "this server answers 400"
            assert ("415" in answers) == (method == "post")
            for status, answer in answers.items():
                if status != "200" and (path, status) not in PROBES:
                    error = ANTHROPIC_ERROR if path.startswith("/v1/messages") else ERROR
                    error = OLLAMA_ERROR if path.startswith("/api/") else error
                    assert answer["content"]["application/json"]["schema"] == error
                assert answer["description"]
            assert operation["description"]
    assert not {"HTTPValidationError", "ValidationError"} & set(document["components"]["schemas"])
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
        assert "text/event-stream" in document["paths"][path]["post"]["responses"]["200"]["content"]


def test_an_error_has_the_documented_fields(served: Any, document: dict[str, Any]) -> None:
    schema = document["components"]["schemas"]["ErrorDetail"]
    error = served.client.get("/v1/models/other").json()["error"]
    assert set(error) == set(schema["properties"]) == set(schema["required"])


def test_the_page_lists_every_route_field_and_status_and_loads_nothing(
    served: Any, document: dict[str, Any]
) -> None:
    answer = served.client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"].startswith("default-src 'none';")
    page = answer.text
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"<h3>{method.upper()} {path}</h3>" in page
    for name in document["components"]["schemas"]["ChatCompletionRequest"]["properties"]:
        assert f"<td><code>{name}</code></td>" in page
    assert "<td><code>stream_options.include_usage</code></td>" in page
    assert "number, ≥ 0, ≤ 1" in page
    assert page.index("<code>messages</code>") < page.index("<code>tools</code>"), "it is required"
    assert "<td>integer, ≥ -1</td><td>0 and -1: off</td>" in page, "2 ** 63 is no news"
    assert set(re.findall(r"https?://[^ /]+", page)) == {"http://HOST:PORT"}
    assert not re.search(r"<script|<link|<img|url\(|@import|\bon\w+=", page)
    assert page == served.client.get("/docs").text


def test_the_page_needs_a_key_where_the_server_has_one(serve: Any) -> None:
    with serve(server=ServerConfig(api_key="s3cret")) as served:
        assert served.client.get("/docs").status_code == 401
        assert served.client.get("/docs", headers={"x-api-key": "s3cret"}).status_code == 200


def test_text_of_the_document_is_escaped_in_the_page() -> None:
    mark = "<script>alert(1)</script>"
    schema = {"type": "object", "properties": {mark: {"type": mark, "description": mark}}, "required": [mark]}
    operation = {
        "tags": [mark],
        "description": mark,
        "parameters": [{"name": mark, "in": mark, "schema": {"enum": [mark]}, "description": mark}],
        "requestBody": {"content": {"application/json": {"schema": schema}}},
        "responses": {mark: {"description": mark, "content": {mark: {}}}},
    }
    page = page_of({"info": {"title": mark, "version": mark}, "paths": {mark: {"post": operation}}})
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
