"""The `tracer=` of 0.x. Agents are always traced with OpenTelemetry here, so that there is nothing to choose."""

from __future__ import annotations

from typing import Any

from agentlightning.errors import ConfigError


def check_tracer(tracer: Any) -> None:
    """Raises ConfigError for a tracer other than an OtelTracer, which says what is done anyway."""
    kind = tracer if isinstance(tracer, type) else type(tracer)
    if tracer is not None and kind.__name__ != "OtelTracer":
        raise ConfigError(
            f"tracer={tracer!r} has no place here: attempts are traced with OpenTelemetry, whatever records the spans."
            " Leave it out; instrument libraries in the agent, or export spans with OTEL_EXPORTER_OTLP_ENDPOINT"
            " (docs/opentelemetry.md)"
        )
