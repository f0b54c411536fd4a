"""OpenTelemetry spans around the stages of a request, for who traces: nothing to set here, and nothing needed.

A process that wants spans has set up a tracer provider before its first request, with the OpenTelemetry SDK. Spans are
called `kvstore.lookup`, `kvstore.read`, ... after the stages in `timings`, and lie in the caller's span.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol


class Span(Protocol):
    def end(self) -> None: ...


def begin_span(stage: str) -> Span | None:
    """A span that began now; None where nobody traces."""
    api: Any = sys.modules.get("opentelemetry.trace")  # who traces has imported it
    if api is None or isinstance(provider := api.get_tracer_provider(), api.ProxyTracerProvider):
        return None
    found: Span = provider.get_tracer("kvstore").start_span(f"kvstore.{stage}")
    return found
