"""Traces without their packages: the start is refused with the remedy."""

from __future__ import annotations

import sys

import pytest

from rootstock.errors import InvalidOption
from rootstock.server.observe.tracing import open_tracing


def test_traces_without_the_extra_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InvalidOption, match=r"--traces is 'on', but must be left out.*rootstock\[otel\]"):
        open_tracing()
