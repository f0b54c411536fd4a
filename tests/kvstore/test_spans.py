"""Spans of a request's stages, in the caller's trace, where an application traces; nothing elsewhere."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvstore.watch.spans import begin_span

_TRACED = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvstore.watch.spans import begin_span
from kvstore.store import open_store
from tests.known_kv import identity, load, prompt, put, small_profile

assert begin_span("lookup") is None, "no provider is set"
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
with open_store(None, identity=identity(), profile=small_profile()) as store:
    with provider.get_tracer("app").start_as_current_span("request") as request:
        put(store, prompt(1, 40))
        load(store, prompt(1, 40))
spans = exporter.get_finished_spans()
names = {span.name for span in spans}
assert {"kvstore.put", "kvstore.lookup", "kvstore.lease", "kvstore.place"} <= names, names
lookup = next(span for span in spans if span.name == "kvstore.lookup")
assert lookup.parent.span_id == request.get_span_context().span_id
assert lookup.end_time >= lookup.start_time
"""


def test_no_span_where_nobody_traces() -> None:
    assert begin_span("lookup") is None


def test_the_stages_of_a_traced_request() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the OpenTelemetry SDK is not installed")
    subprocess.run([sys.executable, "-c", _TRACED], check=True, timeout=120)
