"""Promises about how spans travel from the agent to the sink."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from agentlightning.attempt_address import trace_id_of
from agentlightning.span import AGENT_NAME, MESSAGE_BODY, Span
from agentlightning.store.ids import new_id
from agentlightning.tracing.emit import emit_message, emit_reward, operation, track_agent
from agentlightning.tracing.outbox import counters
from agentlightning.tracing.scope import scope
from agentlightning.tracing.tracer import ScopeProcessor, flush, tracer, tracer_provider

pytestmark = pytest.mark.integration


def run_python(script: str, **environment: str) -> Any:
    import os

    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    return json.loads(done.stdout)


def test_a_span_is_with_its_sink_as_soon_as_it_ends(recorded: Any) -> None:
    emit_reward(0.5)
    assert len(recorded) == 1
    assert flush()


def test_the_provider_is_a_real_opentelemetry_one_and_there_is_one() -> None:
    assert isinstance(tracer_provider(), TracerProvider)
    assert tracer_provider() is tracer_provider()


def test_a_span_belongs_to_the_attempt_it_started_in(recorded: Any) -> None:
    with scope("ro-2", "at-2", recorded):
        span = tracer().start_span("late")
    span.end()
    emit_message("now")
    assert [(span.name, span.rollout_id) for span in recorded] == [("agentlightning.message", "ro-1")]
    # The attempt of `late` is over and nobody remembers it: it is dropped, not given to another attempt.


def test_a_span_that_outlives_its_block_is_kept_while_anything_remembers_the_attempt(recorded: Any) -> None:
    with scope("ro-2", "at-2", recorded) as inside:
        span = tracer().start_span("late")
    span.end()
    assert [(span.name, span.rollout_id) for span in recorded] == [("late", inside.rollout_id)]


def test_spans_of_no_attempt_are_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    counters.settle("outside")
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(ScopeProcessor())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            provider.get_tracer("test").start_span("lost").end()
    (record,) = caplog.records
    assert record.message.startswith("Span 'lost' was emitted outside of any rollout")


def test_children_know_their_parent_and_come_before_it(recorded: Any) -> None:
    with operation("outer"):
        emit_message("inner")
    inner, outer = recorded
    assert inner.parent_id == outer.span_id
    assert inner.trace_id == outer.trace_id
    assert outer.parent_id is None


def test_a_seeded_agent_does_not_repeat_span_ids(recorded: Any) -> None:
    for _ in range(2):
        random.seed(0)
        emit_message("hello")
        with operation("step"):
            pass
    assert len({span.span_id for span in recorded}) == 4


def test_an_attempt_is_one_trace_whoever_starts_its_spans() -> None:
    kept: list[Span] = []

    class Sink:
        def put(self, spans: Any) -> None:
            kept.extend(spans)

    attempt_id = new_id("at")
    for _ in range(2):  # another process, perhaps
        with scope("ro", attempt_id, Sink()):
            emit_message("one")
            with operation("step"):
                emit_message("two")
            tracer().start_span("three").end()
    assert {span.trace_id for span in kept} == {trace_id_of(attempt_id)}
    assert len({span.span_id for span in kept}) == len(kept) == 8


def test_an_agent_name_that_a_library_gave_is_kept(recorded: Any) -> None:
    with track_agent("writer"):
        tracer().start_span("call", attributes={AGENT_NAME: "its own"}).end()
    assert recorded[0].attributes[AGENT_NAME] == "its own"


def test_a_forked_host_keeps_emitting_with_ids_of_its_own() -> None:
    spans = run_python("""
import json, os, random
from agentlightning.tracing.scope import scope
from agentlightning.tracing.emit import emit_reward

class Pipe:
    def __init__(self, fd): self.fd = fd
    def put(self, spans):
        for span in spans: os.write(self.fd, (span.rollout_id + " " + span.span_id + "\\n").encode())

read, write = os.pipe()
with scope("parent", "at", Pipe(write)):
    emit_reward(1.0)
    for number in range(3):
        if os.fork() == 0:
            random.seed(0)
            with scope(f"child-{number}", "at", Pipe(write)):
                emit_reward(0.5)
            os._exit(0)
        os.wait()
os.close(write)
print(json.dumps([line.split() for line in os.fdopen(read)]))
""")
    assert [rollout for rollout, _ in spans] == ["parent", "child-0", "child-1", "child-2"]
    assert len({span_id for _, span_id in spans}) == 4


EMIT_ONE = """
import json
from agentlightning.tracing.scope import scope
from agentlightning.tracing.emit import emit_message
kept = []
class Sink:
    def put(self, spans): kept.extend(spans)
with scope("ro", "at", Sink()):
    emit_message("a long message")
print(json.dumps([span.attributes["agentlightning.message.body"] for span in kept]))
"""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_SDK_DISABLED", "true"),
        ("OTEL_TRACES_SAMPLER", "always_off"),
        ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "3"),
        ("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "3"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "0"),
    ],
)
def test_switches_meant_for_telemetry_do_not_lose_what_the_agent_says(name: str, value: str) -> None:
    assert run_python(EMIT_ONE, **{name: value}) == ["a long message"]


INSTALL = """
import json
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from agentlightning.tracing.scope import scope
from agentlightning.tracing.tracer import install_globally, tracer_provider
kept = []
class Sink:
    def put(self, spans): kept.extend(spans)
{before}
install_globally(); install_globally()
with scope("ro", "at", Sink()):
    with trace.get_tracer("some library").start_as_current_span("theirs"):
        tracer_provider().get_tracer("ours").start_span("ours").end()
print(json.dumps([[span.name, span.parent_id is None] for span in kept]))
"""


@pytest.mark.parametrize("before", ["", "trace.set_tracer_provider(TracerProvider())"])
def test_installed_globally_it_records_what_libraries_trace(before: str) -> None:
    assert run_python(INSTALL.format(before=before)) == [["ours", False], ["theirs", True]]


def test_it_is_not_installed_globally_unless_asked() -> None:
    script = INSTALL.format(before="").replace("install_globally(); install_globally()", "tracer_provider()")
    assert run_python(script) == [["ours", True]]


def test_a_long_message_arrives_whole(recorded: Any) -> None:
    emit_message("x" * 1_000_000)
    assert len(recorded[0].attributes[MESSAGE_BODY]) == 1_000_000
