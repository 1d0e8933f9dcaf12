"""OpenTelemetry traces: a span for each request to a model, by the conventions for generative AI.

Spans hold names, numbers and times, and no text of prompts or answers. A span is exported by a thread of its own,
through a bounded queue: a collector that is slow or dead costs spans, and delays no answer.

The packages are an extra, `rootstock[otel]`, and are imported only with the option --traces.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rootstock._version import __version__
from rootstock.engine.request import Finished, Usage
from rootstock.errors import InvalidOption
from rootstock.server.request_info import DISCONNECTED, RequestInfo

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

_PROVIDER = "rootstock"
_SPANNED_CHOICES = 8  # of one request: each has spans of its phases
_CLOSE_S = 2.0  # to export the last spans


def open_tracing() -> Tracing:
    """Returns traces that are exported by OTLP over HTTP, as the OTEL_… environment variables say.

    Raises InvalidOption.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        remedy = f"left out, or with the package's extra: pip install 'rootstock[otel]' ({error})"
        raise InvalidOption("--traces", "on", remedy) from error
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come before these.
    own = Resource({SERVICE_NAME: "rootstock", SERVICE_VERSION: __version__})
    given = Resource.create()
    named = given.attributes.get(SERVICE_NAME, "")
    resource = given.merge(own) if str(named).startswith("unknown_service") else own.merge(given)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)


class Tracing:
    """Maker of the spans of requests."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.operations: dict[str, str] = {}  # by a route's path, as OpenTelemetry names operations of models
        self._provider = provider
        self._tracer = provider.get_tracer("rootstock", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Iterable[tuple[bytes, bytes]], began_ns: int) -> RequestSpan:
        """Begins the span of a request. A traceparent header of W3C's names its parent."""
        from opentelemetry.trace import SpanKind

        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name in (b"traceparent", b"tracestate")
        }
        context = self._propagator.extract(carrier)
        span = self._tracer.start_span("request", context, SpanKind.SERVER, start_time=began_ns)
        return RequestSpan(self, span)

    def child(
        self, parent: Span, name: str, begin_ns: int, end_ns: int, attributes: Mapping[str, Any]
    ) -> None:
        from opentelemetry.trace import set_span_in_context

        context: Context = set_span_in_context(parent)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=begin_ns)
        span.end(max(begin_ns, end_ns))

    def close(self) -> None:
        """Exports the last spans, within two seconds: a dead collector must not hold up the end of the process."""
        thread = threading.Thread(target=self._provider.shutdown, name="rootstock-traces", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)


class RequestSpan:
    """The span of one request."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span

    @property
    def trace_id(self) -> str:
        """The id of the trace, if it is recorded."""
        return f"{self._span.get_span_context().trace_id:032x}" if self._span.is_recording() else ""

    def end(self, info: RequestInfo) -> None:
        """Ends the span with all that is known about the request. Raises nothing."""
        try:
            if self._span.is_recording():
                self._describe(info)
            self._span.end()
        except Exception:
            log.exception("a span could not be recorded; its request has been answered")

    def _describe(self, info: RequestInfo) -> None:
        from opentelemetry.trace import Status, StatusCode

        operation = self._tracing.operations.get(info.route)
        about: dict[str, Any] = {
            "http.request.method": info.method,
            "http.response.status_code": info.status,
            "rootstock.request.id": info.id,
        }
        if info.route != "none":
            about["http.route"] = info.route
        name = f"{info.method} {info.route}"
        if operation is not None:
            name = f"{operation} {info.model}".rstrip()
            about |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": _PROVIDER}
        if info.model:
            about |= {
                "gen_ai.request.model": info.asked_model or info.model,
                "gen_ai.response.model": info.model,
            }
        self._span.update_name(name)
        self._span.set_attributes(about | _of_call(info) | _of_answer(info))
        if info.error or info.status >= 400 or not info.status:
            error = info.error or (str(info.status) if info.status else DISCONNECTED)
            self._span.set_attribute("error.type", error)
            # A client's mistake or its leaving is no error of the server. A stream fails after its status was sent.
            if error != DISCONNECTED and not 400 <= info.status < 500:
                self._span.set_status(Status(StatusCode.ERROR, error))
        for choice, end in enumerate(info.ends[:_SPANNED_CHOICES]):
            self._add_phases(info.submitted_ns, choice, end)
        if info.embedding is not None and info.usage is not None:
            self._add_phases_of_embedding(info.submitted_ns, info.usage)

    def _add_phases_of_embedding(self, submitted_ns: int, usage: Usage) -> None:
        computed_ns = submitted_ns + round(usage.queued_s * 1e9)
        end_ns = submitted_ns + round(usage.total_s * 1e9)
        self._tracing.child(self._span, "queue", submitted_ns, computed_ns, {})
        tokens = {"rootstock.computed_tokens": usage.prompt_tokens}
        self._tracing.child(self._span, "prefill", computed_ns, end_ns, tokens)

    def _add_phases(self, submitted_ns: int, choice: int, end: Finished) -> None:
        usage, begin_ns = end.usage, submitted_ns
        computed = usage.prompt_tokens - usage.cached_tokens
        admitted_s, computed_s = usage.queued_s, usage.queued_s + usage.loading_s
        for name, until_s, numbers in (
            ("queue", admitted_s, {}),
            ("load", computed_s, {"rootstock.loaded_tokens": usage.loaded_tokens}),
            ("prefill", usage.ttft_s, {"rootstock.computed_tokens": computed}),
            ("decode", usage.total_s, {"gen_ai.usage.output_tokens": usage.completion_tokens}),
        ):
            end_ns = submitted_ns + round(until_s * 1e9)
            if name != "load" or usage.loaded_tokens:
                self._tracing.child(
                    self._span, name, begin_ns, end_ns, {"rootstock.choice": choice, **numbers}
                )
            begin_ns = end_ns


def _of_call(info: RequestInfo) -> dict[str, Any]:
    """Returns the attributes of a request's parameters."""
    if info.call is None:
        return {}
    first = info.call.requests[0]
    sampling, about = first.sampling, dict[str, Any]()
    about["gen_ai.request.stream"] = info.call.stream
    about["gen_ai.request.temperature"] = sampling.temperature
    about["gen_ai.request.top_p"] = sampling.top_p
    if sampling.top_k:
        about["gen_ai.request.top_k"] = sampling.top_k
    if sampling.seed is not None and abs(sampling.seed) < 1 << 63:  # the protocol has 64 bits
        about["gen_ai.request.seed"] = sampling.seed
    if first.stop.max_tokens is not None:
        about["gen_ai.request.max_tokens"] = first.stop.max_tokens
    if info.call.choices_per_prompt > 1:
        about["gen_ai.request.choice.count"] = info.call.choices_per_prompt
    return about


def _of_answer(info: RequestInfo) -> dict[str, Any]:
    """Returns the attributes of a request's answer."""
    usage = info.usage
    if usage is not None and info.embedding is not None:
        return {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.embeddings.dimension.count": info.embedding.dimensions,
            "gen_ai.request.encoding_formats": [info.embedding.encoding_format],
        }
    if usage is None or not info.ends:
        return {}
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.finish_reasons": [end.reason for end in info.ends[:128]],
        "gen_ai.response.time_to_first_chunk": info.ends[0].usage.ttft_s,
        "rootstock.usage.loaded_tokens": max(end.usage.loaded_tokens for end in info.ends),
    }
