"""What one `emit_reward` costs the agent: `python benchmarks/emit.py [--rounds 15] [--calls 2000]`.

In one run and one thread, turn by turn: a bare span of OpenTelemetry's SDK, started and ended under a provider with a
BatchSpanProcessor, as any instrumented program makes them, and our `emit_reward` inside an attempt, whose span is with
its sink when the call returns; then the same where a processor of the user's own listens to our provider. Medians of
the rounds are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from agentlightning.span import Span
from agentlightning.store.ids import new_id
from agentlightning.tracing.emit import emit_reward
from agentlightning.tracing.scope import scope
from agentlightning.tracing.tracer import tracer_provider


class Nowhere(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


class Sink:
    """As the runner's: it keeps a reference and returns."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, spans: Sequence[Span]) -> None:
        self.spans.extend(spans)


def microseconds(call: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def rounds(arms: dict[str, Callable[[], None]], options: argparse.Namespace) -> dict[str, float]:
    """The median of each arm, in microseconds for a call."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for call in arms.values():
        microseconds(call, options.calls)
    for _ in range(options.rounds):
        for name, call in arms.items():
            found[name].append(microseconds(call, options.calls))
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere(), max_queue_size=2 * options.calls))
    tracer = provider.get_tracer("bare")
    attributes = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 0.5}

    def bare() -> None:
        tracer.start_span("gen_ai.evaluation.result", attributes=attributes).end()

    arms: dict[str, Callable[[], None]] = {"bare OpenTelemetry span": bare, "emit_reward": lambda: emit_reward(0.5)}
    with scope(new_id("ro"), new_id("at"), Sink()):
        report(rounds(arms, options))
        tracer_provider().add_span_processor(SpanProcessor())
        arms["emit_reward, user's processor"] = arms.pop("emit_reward")
        report(rounds(arms, options))
    provider.shutdown()


def report(medians: dict[str, float]) -> None:
    (_, reference), (name, ours) = medians.items()
    print(f"bare OpenTelemetry span {reference:.1f} us; {name} {ours:.1f} us: {ours / reference:.2f} times as long")


if __name__ == "__main__":
    main()
