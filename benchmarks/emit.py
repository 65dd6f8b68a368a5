"""What recording costs the agent: `python benchmarks/emit.py [--rounds 15] [--calls 2000]`.

In one run and one thread, turn by turn: a bare span of OpenTelemetry's SDK, started and ended under a provider with a
BatchSpanProcessor, as any instrumented program makes them, and our `emit_reward` inside an attempt, whose span is with
its sink when the call returns; then the same where a processor of the user's own listens to our provider. Medians of
the rounds are compared.

Then sessions in an SQLite file, as a program without a server records them, written while they are measured: a
`track_session` block around a trivial agent, and each `emit_*` within one. Each call is timed by itself; the median and
the 99th percentile are printed beside those of an empty call, which is what timing costs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

import agentlightning as agl
from agentlightning.span import Span
from agentlightning.store.ids import new_id
from agentlightning.tracing.emit import emit_reward
from agentlightning.tracing.scope import scope


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
    sessions(options.calls)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere(), max_queue_size=2 * options.calls))
    tracer = provider.get_tracer("bare")
    attributes = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 0.5}

    def bare() -> None:
        tracer.start_span("gen_ai.evaluation.result", attributes=attributes).end()

    arms: dict[str, Callable[[], None]] = {"bare OpenTelemetry span": bare, "emit_reward": lambda: emit_reward(0.5)}
    with scope(new_id("ro"), new_id("at"), Sink()):
        report(rounds(arms, options))
    provider.shutdown()


def trivial_agent() -> int:
    return 6 * 7


def session() -> None:
    with agl.track_session("6 x 7?"):
        trivial_agent()


def session_with_calls() -> None:
    with agl.track_session("6 x 7?"), agl.track_agent("writer"):
        agl.emit_prompt("6 x 7?")
        agl.emit_response("42")
        agl.emit_reward(1.0)


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 x 7?"}]
EMITS: dict[str, Callable[[], None]] = {
    "emit_reward": lambda: agl.emit_reward(0.5),
    "emit_prompt, emit_response": lambda: (agl.emit_prompt("6 x 7?"), agl.emit_response("42"))[0],
    "emit_prompt with response": lambda: agl.emit_prompt(MESSAGES, "42"),
    "emit_tool_call": lambda: agl.emit_tool_call("times", {"a": 6, "b": 7}, 42),
    "emit_step": lambda: agl.emit_step("plan", output=["search", "answer"]),
    "emit_message": lambda: agl.emit_message("thinking"),
    "emit_object": lambda: agl.emit_object({"plan": ["search", "answer"]}),
    "emit_annotation": lambda: agl.emit_annotation({"user": {"plan": "free"}}),
}


def percentiles(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """The median and the 99th percentile, in microseconds. What gathered is written out every 200 calls."""
    times: list[float] = []
    for number in range(calls):
        if number % 200 == 0:
            agl.flush_recording()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    times.sort()
    return statistics.median(times), times[int(0.99 * len(times))]


def sessions(calls: int) -> None:
    with TemporaryDirectory() as folder:
        store = agl.LightningStore(Path(folder) / "store.db")
        agl.configure_recording(store=store)
        session()
        agl.flush_recording()
        print(f"{'':30} median   99 %")
        show("an empty call", lambda: None, calls)
        show("track_session", session, calls)
        show("track_session, a call, reward", session_with_calls, calls)
        for name, emit in EMITS.items():
            with agl.track_session("6 x 7?"):
                show(name, emit, calls)
        agl.flush_recording()
        status = agl.recording_status()
        print(f"{status.sessions_written} sessions, {status.spans_written} spans; {status.spans_dropped} were dropped")
        agl.configure_recording()
        asyncio.run(store.close())


def show(name: str, call: Callable[[], object], calls: int) -> None:
    percentiles(call, 200)
    median, high = percentiles(call, calls)
    print(f"{name:30} {median:6.1f} {high:6.1f} us")


def report(medians: dict[str, float]) -> None:
    (_, reference), (name, ours) = medians.items()
    print(f"bare OpenTelemetry span {reference:.1f} us; {name} {ours:.1f} us: {ours / reference:.2f} times as long")


if __name__ == "__main__":
    main()
