"""Promises about how an OpenTelemetry span reads in our form."""

from __future__ import annotations

import json
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from agentlightning.span import INPUT_MESSAGES, OPERATION_NAME, REQUEST_MODEL
from agentlightning.tracing.tracer import plain_attributes, to_span, tracer


def test_times_are_seconds_and_ids_are_hexadecimal() -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    span: Any = provider.get_tracer("test").start_span("call", start_time=1_500_000_000)
    span.end(end_time=2_500_000_000)
    ours = to_span(span, "ro", "at")
    assert (ours.start_time, ours.end_time) == (1.5, 2.5)
    context = span.get_span_context()
    assert int(ours.span_id, 16) == context.span_id
    assert len(ours.span_id) == 16
    assert int(ours.trace_id, 16) == context.trace_id
    assert len(ours.trace_id) == 32
    assert ours.sequence_id == 0
    assert ours.resource["telemetry.sdk.language"] == "python"


def test_status_events_and_attributes_survive(recorded: Any) -> None:
    span = tracer().start_span("call", attributes={"texts": ["a", "b"], "count": 3, "share": 0.5, "flag": True})
    span.add_event("retry", {"reasons": ["slow", "busy"]}, timestamp=2_000_000_000)
    span.set_status(Status(StatusCode.ERROR, "no answer"))
    span.end()
    ours = recorded[0]
    assert ours.attributes == {"texts": ["a", "b"], "count": 3, "share": 0.5, "flag": True}
    assert (ours.status_code, ours.status_message) == ("ERROR", "no answer")
    assert [(event.name, event.timestamp, event.attributes) for event in ours.events] == [
        ("retry", 2.0, {"reasons": ["slow", "busy"]})
    ]


def test_every_attribute_has_a_json_form() -> None:
    plain = plain_attributes({"bytes": b"\x00\xff", "nested": {"deep": (1, (2, None))}, "odd": complex(1, 2)})
    assert json.loads(json.dumps(plain)) == {"bytes": "AP8=", "nested": {"deep": [1, [2, None]]}, "odd": "(1+2j)"}
    assert plain_attributes(None) == {}


def test_what_a_library_recorded_reads_in_our_vocabulary() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("openinference.instrumentation.openai", "0.1")
    cause = tracer.start_span("cause")
    given = {"openinference.span.kind": "LLM", "llm.model_name": "m", "llm.input_messages.0.message.content": "6 x 7?"}
    span: Any = tracer.start_span(
        "ChatCompletion", kind=SpanKind.CLIENT, attributes=given, links=[Link(cause.get_span_context(), {"why": "it"})]
    )
    span.end()
    ours = to_span(span, "ro", "at")
    messages = json.loads(ours.attributes.pop(INPUT_MESSAGES))
    assert messages == [{"role": "user", "parts": [{"type": "text", "content": "6 x 7?"}]}]
    context = cause.get_span_context()
    link = {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}", "attributes": {"why": "it"}}
    assert ours.attributes == given | {
        OPERATION_NAME: "chat",
        REQUEST_MODEL: "m",
        "otel.scope.name": "openinference.instrumentation.openai",
        "otel.scope.version": "0.1",
        "span.kind": "client",
        "otel.links": [link],
    }


def test_what_we_record_ourselves_is_left_as_it_is(recorded: Any) -> None:
    tracer().start_span("call", attributes={"llm.model_name": "m"}).end()
    assert recorded[0].attributes == {"llm.model_name": "m"}
