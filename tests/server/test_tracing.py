"""Spans of requests, held by the SDK's exporter in memory. A dead collector delays no answer."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra otel")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from rootstock.config import ServerConfig
from rootstock.server.observe.tracing import Tracing, open_tracing
from rootstock.server.request_info import RequestInfo
from server.conftest import served_by_oracle, user
from waiting import wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextlib.contextmanager
def traced() -> Iterator[tuple[str, InMemorySpanExporter]]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with served_by_oracle(server=ServerConfig(), tracing=Tracing(provider)) as served:
        yield served.url, exporter


def spans(exporter: InMemorySpanExporter, requests: int = 1) -> dict[str, ReadableSpan]:
    """Returns the spans by name when so many requests have ended."""
    wait_until(
        lambda: sum(span.kind is SpanKind.SERVER for span in exporter.get_finished_spans()) == requests
    )
    return {span.name: span for span in exporter.get_finished_spans()}


def test_every_route_with_a_body_has_a_span() -> None:
    with traced() as (url, exporter), httpx.Client(base_url=url) as client:
        paths = [
            path for path, methods in client.get("/openapi.json").json()["paths"].items() if "post" in methods
        ]
        assert {"/tokenize", "/v1/responses/compact"} <= set(paths)
        expected = {path for path in paths if path != "/ping" and not path.startswith("/dashboard/")}
        for path in paths:
            client.post(path, json={})
        spans(exporter, len(expected))
        found = [span.attributes or {} for span in exporter.get_finished_spans()]
        assert {span["http.route"] for span in found} == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_numbers_and_a_span_for_each_phase(stream: bool) -> None:
    with traced() as (url, exporter):
        body = {
            "messages": user("a secret"),
            "max_tokens": 4,
            "ignore_eos": True,
            "stream": stream,
            "model": "any",
        }
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers).status_code == 200
        found = spans(exporter)
        assert found.keys() == {"chat fake", "queue", "prefill", "decode"}
        span = found["chat fake"]
        assert span.context.trace_id == int(TRACE, 16)
        assert span.parent is not None
        assert span.parent.span_id == int(PARENT, 16)
        about = dict(span.attributes or {})
        assert about["gen_ai.usage.input_tokens"] > 8
        assert (
            about
            | {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "rootstock",
                "gen_ai.request.model": "any",
                "gen_ai.response.model": "fake",
                "gen_ai.request.max_tokens": 4,
                "gen_ai.request.stream": stream,
                "gen_ai.usage.output_tokens": 4,
                "gen_ai.usage.cache_read.input_tokens": 0,
                "gen_ai.response.finish_reasons": ("length",),
                "http.route": "/v1/chat/completions",
                "http.response.status_code": 200,
                "rootstock.request.id": "mine",
            }
            == about
        )
        assert "error.type" not in about
        phases = [found[name] for name in ("queue", "prefill", "decode")]
        assert all(phase.parent == span.context for phase in phases)
        times = [(phase.start_time, phase.end_time) for phase in phases]
        ends = [span.start_time, *(time for each in times for time in each), span.end_time]
        assert [end for end in ends if end is not None] == sorted(end for end in ends if end is not None)
        assert "secret" not in str([each.to_json() for each in exporter.get_finished_spans()])


def test_errors_are_named_and_only_the_servers_are_failures() -> None:
    with traced() as (url, exporter):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 5_000}).status_code == 400
        span = spans(exporter)["text_completion fake"]
        assert (span.attributes or {})["error.type"] == "context_length_exceeded"
        assert span.status.status_code is StatusCode.UNSET
        httpx.get(f"{url}/v1/models")
        httpx.get(f"{url}/metrics")
        assert len(exporter.get_finished_spans()) == 1, "only requests to models have spans"


@pytest.mark.parametrize("header", ["", "00-0-0-0", "x" * 10_000, f"00-{'0' * 32}-{PARENT}-01", "\xff"])
def test_a_wrong_traceparent_is_no_parent(header: str) -> None:
    with traced() as (url, exporter):
        headers = [(b"traceparent", header.encode("latin-1"))]
        body = {"prompt": "x", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200
        assert spans(exporter)["text_completion fake"].parent is None


def test_choices_have_spans_up_to_a_bound() -> None:
    with traced() as (url, exporter):
        body = {"prompt": "x", "max_tokens": 1, "n": 20}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        spans(exporter)
        assert sum(span.name == "decode" for span in exporter.get_finished_spans()) == 8


def test_a_collector_that_accepts_and_never_answers_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
        tracing = open_tracing()
        began = time.monotonic()
        for _ in range(100):  # far more than the queue holds
            tracing.begin([], time.time_ns()).end(_info())
        tracing.close()
        assert time.monotonic() - began < 30, "an export would take an hour"


def _info() -> RequestInfo:
    return RequestInfo("id", "POST", "/v1/completions", status=200)
