"""`OtelTracer` and `AgentOpsTracer` of 0.x. Agents are always traced with OpenTelemetry here, so that a trainer has
nothing to choose."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from opentelemetry import trace

from agentlightning.errors import ConfigError
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.tracing.scope import scope
from agentlightning.tracing.tracer import install_globally, tracer_provider


class _Collector:
    """A sink that keeps spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, spans: Sequence[Span]) -> None:
        self.spans.extend(spans)


class OtelTracer:
    """Records what a block of your own code traces or emits: `async with tracer.trace_context(): ...`, and then
    `tracer.get_last_trace()`. A trainer traces every attempt in this way, with this argument or without it.

        >>> tracer = agl.OtelTracer()
        >>> async def record():
        ...     async with tracer.trace_context():
        ...         agl.emit_reward(0.5)
        >>> asyncio.run(record())
        >>> agl.find_final_reward(tracer.get_last_trace())
        0.5
    """

    def __init__(self) -> None:
        self._last: list[Span] = []

    @asynccontextmanager
    async def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStoreBase | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AsyncGenerator[trace.Tracer]:
        """The spans of the block are those of an attempt of `store`, to which they are written at its end; without a
        store they are only remembered. Yields an OpenTelemetry tracer called `name`. Raises ConfigError where some of
        store, rollout_id and attempt_id are given, and not all of them."""
        given = {"store": store, "rollout_id": rollout_id, "attempt_id": attempt_id}
        missing = [key for key, value in given.items() if value is None]
        if missing and len(missing) < len(given):
            raise ConfigError(f"{', '.join(missing)} not given: spans are written with all of {', '.join(given)}")
        install_globally()
        collected = _Collector()
        try:
            with scope(
                rollout_id or f"ro-{secrets.token_hex(8)}", attempt_id or f"at-{secrets.token_hex(8)}", collected
            ):
                yield tracer_provider().get_tracer(name or "agentlightning")
        finally:
            self.remember(collected.spans)
            if store is not None and collected.spans:
                await store.add_many_spans(collected.spans)

    def get_last_trace(self) -> list[Span]:
        """The spans of the last block, or of the last step of a `LitAgentRunner` with this tracer."""
        return list(self._last)

    def remember(self, spans: Sequence[Span]) -> None:
        """Make these the last trace."""
        self._last = list(spans)

    def get_langchain_handler(self) -> None:
        """None: LangChain needs no callback handler, as the gateway records its model calls."""
        return None


class AgentOpsTracer(OtelTracer):
    """An `OtelTracer`. What AgentOps recorded, model calls, the gateway of a training run and `agl run` record. Where
    an agent calls a provider directly, `agl.track_all()` does; a `LitAgentRunner` says so.

    >>> agl.AgentOpsTracer().get_last_trace()
    []
    """


def check_tracer(tracer: Any) -> None:
    """Raises ConfigError for a tracer other than an OtelTracer, which says what is done anyway."""
    kind = tracer if isinstance(tracer, type) else type(tracer)
    if tracer is not None and kind.__name__ not in ("OtelTracer", "AgentOpsTracer"):
        raise ConfigError(
            f"tracer={tracer!r} has no place here: attempts are traced with OpenTelemetry, whatever records the spans."
            " Leave it out; instrument libraries in the agent, or export spans with OTEL_EXPORTER_OTLP_ENDPOINT"
            " (docs/guides/operations/opentelemetry.md)"
        )
