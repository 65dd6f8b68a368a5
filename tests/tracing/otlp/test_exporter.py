"""Promises about sending spans on: they arrive whole, and nobody waits or fails when they do not."""

from __future__ import annotations

import gzip
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from tests.support.waiting import wait_until

from agentlightning.attempt_address import trace_id_of
from agentlightning.errors import ConfigError
from agentlightning.span import LOGPROBS, PROMPT_TOKEN_IDS, REWARD, REWARD_VALUES, Span, SpanEvent
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.instrumented import instrument
from agentlightning.tracing.otlp import exporter as exporter_module
from agentlightning.tracing.otlp.codec import decode_protobuf, encode
from agentlightning.tracing.otlp.exporter import OtlpExporter, traces_url

ATTEMPT = "at-019de2b4c1a3f00c55d0e6b1"


class Endpoint(ThreadingHTTPServer):
    """Takes traces, answering with what it is told, then 200."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.requests: list[dict[str, str]] = []
        self.taken: list[ExportTraceServiceRequest] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def spans(self) -> list[Any]:
        return [span for taken in self.taken for span in spans_of(taken)]


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append({"path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
        status, headers, answer = self.server.answers.pop(0) if self.server.answers else (200, {}, b"")
        if status == 200:
            self.server.taken.append(ExportTraceServiceRequest.FromString(gzip.decompress(body)))
        self.send_response(status)
        for name, value in {"content-length": str(len(answer)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def spans_of(request: ExportTraceServiceRequest) -> list[Any]:
    return [span for group in request.resource_spans for scope in group.scope_spans for span in scope.spans]


def span(number: int = 1, **fields: Any) -> Span:
    return Span("ro-1", ATTEMPT, "work", 1.5, 2.5, sequence_id=number, span_id=f"{number:016x}", **fields)


# -- arriving --------------------------------------------------------------------------------------------------------


async def test_every_span_a_store_keeps_is_sent_on(endpoint: Endpoint) -> None:
    exporter = OtlpExporter(endpoint.url, headers="authorization=Basic%20abc,x-project=p")
    store = instrument(InMemoryLightningStore(), [exporter])
    started = await store.start_rollout({})
    ids = started.rollout_id, started.attempt.attempt_id
    await store.add_many_spans([Span(*ids, "one", 1.0), Span(*ids, "two", 2.0)])
    await store.add_span(Span(*ids, "three", 3.0))
    await store.close()
    assert exporter.close()
    assert [one.name for one in endpoint.spans()] == ["one", "two", "three"]
    assert exporter.counts.sent == 3
    (request,) = endpoint.requests
    assert (request["path"], request["content-encoding"]) == ("/v1/traces", "gzip")
    assert (request["authorization"], request["x-project"]) == ("Basic abc", "p")
    resource = {pair.key: pair.value.string_value for pair in endpoint.taken[0].resource_spans[0].resource.attributes}
    assert resource == {
        "service.name": "agentlightning",
        "agentlightning.rollout_id": ids[0],
        "agentlightning.attempt_id": ids[1],
    }


def test_a_full_batch_leaves_at_once_and_a_lonely_span_soon(endpoint: Endpoint) -> None:
    exporter = OtlpExporter(endpoint.url, batch_size=2, delay_seconds=0.05)
    exporter.put([span(1), span(2), span(3)])
    wait_until(lambda: len(endpoint.spans()) == 3)
    assert [len(spans_of(taken)) for taken in endpoint.taken] == [2, 1]
    assert exporter.close()


def test_what_was_written_is_read_back(endpoint: Endpoint) -> None:
    attributes = {
        "text": "a",
        "n": 3,
        "share": 0.5,
        "flag": True,
        "texts": ["a", "b"],
        "otel.scope.name": "shop",
        "otel.scope.version": "2",
        "span.kind": "client",
        "otel.links": [{"trace_id": "1" * 32, "span_id": "2" * 16, "attributes": {"why": "cause"}}],
        "w3c.tracestate": "a=b",
        REWARD_VALUES: {"format": 0.5},
    }
    written = span(
        4,
        trace_id="3" * 32,
        parent_id="4" * 16,
        status_code="ERROR",
        status_message="no",
        attributes=attributes,
        events=(SpanEvent("retry", 2.0, {"n": 1}),),
        resource={"service.name": "shop"},
    )
    (read,) = decode_protobuf(encode([written]).SerializeToString(), 0.0).spans
    ids = {"agentlightning.rollout_id": "ro-1", "agentlightning.attempt_id": ATTEMPT}
    place = {"agentlightning.span_sequence_id": 4}
    again = replace(read, rollout_id="ro-1", attempt_id=ATTEMPT)
    assert again == Span(
        **{name: getattr(written, name) for name in Span.__slots__}
        | {"attributes": attributes | place, "resource": {"service.name": "shop"} | ids}
    )


def test_tokens_are_left_out() -> None:
    (sent,) = spans_of(encode([span(attributes={PROMPT_TOKEN_IDS: [1, 2], LOGPROBS: [-0.5], "n": 1})]))
    assert [pair.key for pair in sent.attributes] == ["n", "agentlightning.span_sequence_id"]


def test_one_span_that_cannot_be_sent_holds_up_no_other(endpoint: Endpoint) -> None:
    exporter = OtlpExporter(endpoint.url, delay_seconds=0.01)
    far = Span("ro-1", ATTEMPT, "far", 1e308, 1e308, span_id=f"{7:016x}")
    exporter.put([span(1), far, replace(span(2), name="half a character: \ud800"), span(3)])
    wait_until(lambda: exporter.counts.sent + exporter.counts.dropped == 4)
    exporter.put([span(4)])
    wait_until(lambda: len(endpoint.spans()) == 4)
    assert exporter.close()
    assert (exporter.counts.sent, exporter.counts.dropped) == (4, 1)
    assert max(sent.start_time_unix_nano for sent in endpoint.spans()) == 2**64 - 1


def test_spans_that_have_no_form_together_are_sent_apart(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_only(spans: Sequence[Span], **options: Any) -> Any:
        if len(spans) > 1:
            raise ValueError("more than two gigabytes")
        return encode(spans, **options)

    monkeypatch.setattr(exporter_module, "encode", one_only)
    exporter = OtlpExporter(endpoint.url, delay_seconds=0.01)
    exporter.put([span(1), span(2), span(3)])
    assert exporter.close()
    assert (exporter.counts.sent, exporter.counts.dropped) == (3, 0)


def test_ids_that_opentelemetry_does_not_know_are_made_its_own() -> None:
    (sent,) = spans_of(encode([Span("ro-1", ATTEMPT, "work", 1.0, span_id="mine", parent_id="my parent")]))
    assert sent.trace_id.hex() == trace_id_of(ATTEMPT)
    assert (len(sent.span_id), len(sent.parent_span_id)) == (8, 8)
    assert sent.end_time_unix_nano == sent.start_time_unix_nano == 1_000_000_000


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_any_attribute_has_a_form_in_otlp(attributes: dict[str, Any]) -> None:
    request = encode([span(attributes=attributes)])
    assert decode_protobuf(request.SerializeToString(), 0.0).spans[0].span_id == f"{1:016x}"


# -- not arriving ----------------------------------------------------------------------------------------------------


def test_a_busy_endpoint_is_tried_again_when_it_says(endpoint: Endpoint) -> None:
    endpoint.answers = [
        (503, {"retry-after": "0"}, b""),
        (429, {"retry-after": "0"}, b""),
        (502, {"retry-after": "0"}, b""),
    ]
    exporter = OtlpExporter(endpoint.url)
    exporter.put([span()])
    assert exporter.close(timeout=20)
    assert len(endpoint.requests) == 4
    assert (exporter.counts.sent, exporter.counts.dropped) == (1, 0)


def test_what_the_endpoint_refuses_is_counted_and_mentioned_once(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    partial = ExportTraceServiceResponse()
    partial.partial_success.rejected_spans, partial.partial_success.error_message = 1, "too old"
    protobuf = {"content-type": "application/x-protobuf"}
    endpoint.answers = [(400, {"content-type": "text/plain"}, b"bad"), (200, protobuf, partial.SerializeToString())]
    exporter = OtlpExporter(endpoint.url, batch_size=2)
    with caplog.at_level(logging.WARNING):
        exporter.put([span(1), span(2), span(3), span(4)])
        assert exporter.close()
    assert (exporter.counts.sent, exporter.counts.refused) == (1, 3)
    assert [record.message for record in caplog.records] == [
        f"2 spans for {endpoint.url}/v1/traces were rejected: it answered 400 Bad Request bad; "
        "further ones are only counted"
    ]


def test_a_batch_that_is_too_large_is_halved(endpoint: Endpoint) -> None:
    endpoint.answers = [(413, {}, b"")]
    exporter = OtlpExporter(endpoint.url)
    exporter.put([span(number) for number in range(1, 6)])
    assert exporter.close()
    assert [len(spans_of(taken)) for taken in endpoint.taken] == [2, 3]


def test_an_endpoint_that_is_gone_costs_the_writer_nothing(caplog: pytest.LogCaptureFixture) -> None:
    exporter = OtlpExporter("http://127.0.0.1:9", batch_size=10, queue_size=100)
    with caplog.at_level(logging.WARNING):
        for number in range(1, 501):
            exporter.put([span(number)])
        assert not exporter.close(timeout=0.1)
    wait_until(lambda: exporter.counts.dropped == 500)  # the batch that was under way is given up last
    assert exporter.counts.sent == 0
    assert len([record for record in caplog.records if record.name.startswith("agentlightning.")]) == 1
    exporter.put([span()])
    assert exporter.counts.dropped == 501


def test_what_was_not_delivered_in_time_is_given_up(endpoint: Endpoint) -> None:
    endpoint.answers = [(503, {}, b"")]
    exporter = OtlpExporter(endpoint.url, patience=0.0, delay_seconds=0.01)
    exporter.put([span(1)])
    wait_until(lambda: len(endpoint.requests) == 1)
    exporter.put([span(2)])
    assert exporter.close()
    assert (exporter.counts.sent, exporter.counts.dropped) == (1, 1)


def test_nothing_runs_where_nothing_is_sent() -> None:
    before = threading.active_count()
    exporter = OtlpExporter("http://127.0.0.1:9")
    exporter.put([])
    assert threading.active_count() == before
    assert exporter.close()


# -- what it is told -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://127.0.0.1:6006/v1/traces", "http://127.0.0.1:6006/v1/traces"),
        ("https://cloud.langfuse.com/api/public/otel/", "https://cloud.langfuse.com/api/public/otel/v1/traces"),
    ],
)
def test_an_endpoint_is_a_base_or_the_full_address(given: str, url: str) -> None:
    assert traces_url(given) == url


def test_what_cannot_work_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in ("localhost:4317", "grpc://localhost", "http://", "http://localhost:99999", "http://h:x", ""):
        with pytest.raises(ConfigError, match="is not an OTLP/HTTP endpoint"):
            OtlpExporter(endpoint)
    for value in ("sécret", "secret\n"):
        with pytest.raises(ConfigError, match="the header 'authorization' has a value that cannot be sent"):
            OtlpExporter("http://127.0.0.1:9", headers={"authorization": value})
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "secret")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS has a part without") as error:
        OtlpExporter("http://127.0.0.1:9")
    assert "secret" not in str(error.value)


def test_headers_of_the_environment_are_sent(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-a=1,x-b=2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-b=3")
    exporter = OtlpExporter(endpoint.url)
    exporter.put([span(attributes={}, resource={}), Span("ro-1", ATTEMPT, REWARD, 1.0)])
    assert exporter.close()
    assert (endpoint.requests[0]["x-a"], endpoint.requests[0]["x-b"]) == ("1", "3")
