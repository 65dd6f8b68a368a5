"""Promises about OTLP: what an OpenTelemetry SDK sends is kept with the attempt it belongs to, or refused by name."""

from __future__ import annotations

import asyncio
import gzip
import os
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, use_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.applications import Starlette

from agentlightning import span as names
from agentlightning.attempt_address import attempt_key, trace_id_of
from agentlightning.attempt_variables import attempt_environment
from agentlightning.ingest.otlp import MAX_BODY_BYTES, PATH, OtlpReceiver
from agentlightning.server.app import Server
from agentlightning.store import InMemoryLightningStore, LightningStoreBase
from agentlightning.store.instrumented import instrument
from agentlightning.tracing.otlp.exporter import OtlpExporter
from agentlightning.tracing.rewards import find_reward_spans, get_reward_value

SECRET, TOKEN = "secret", "token"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Site:
    """A server with an attempt that runs."""

    def __init__(
        self,
        store: LightningStoreBase,
        receiver: OtlpReceiver,
        server: Server,
        client: httpx.AsyncClient,
        ids: tuple[str, str],
    ) -> None:
        self.store, self.receiver, self.server, self.client = store, receiver, server, client
        self.rollout_id, self.attempt_id = ids
        self.url = f"{server.url}/v1/traces"
        self.ids = {"agentlightning.rollout_id": ids[0], "agentlightning.attempt_id": ids[1]}

    async def post(self, content: bytes, kind: str = "application/x-protobuf", **headers: str) -> httpx.Response:
        headers = {"content-type": kind, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return await self.client.post(self.url, content=content, headers=headers)

    async def spans(self) -> list[names.Span]:
        return await self.store.query_spans(self.rollout_id)


async def opened(token: str | None = None) -> AsyncIterator[Site]:
    store = InMemoryLightningStore()
    started = await store.start_rollout({"question": "?"})
    server = Server(store, secret=SECRET, token=token)
    async with server, httpx.AsyncClient(verify=False) as client:
        yield Site(store, server.traces, server, client, (started.rollout_id, started.attempt.attempt_id))
    await store.close()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async for found in opened():
        yield found


@pytest.fixture
async def guarded() -> AsyncIterator[Site]:
    async for found in opened(TOKEN):
        yield found


def request(*spans: dict[str, Any], resource: dict[str, Any] | None = None) -> ExportTraceServiceRequest:
    message = ExportTraceServiceRequest()
    group = message.resource_spans.add()
    put(group.resource.attributes, resource or {})
    scope = group.scope_spans.add()
    for number, given in enumerate(spans):
        span = scope.spans.add()
        span.name = given.get("name", "work")
        span.trace_id = bytes.fromhex(given.get("trace_id", TRACE))
        span.span_id = bytes.fromhex(given.get("span_id", f"{number + 1:016x}"))
        span.parent_span_id = bytes.fromhex(given.get("parent_id", ""))
        span.start_time_unix_nano, span.end_time_unix_nano = 1_500_000_000, 2_500_000_000
        put(span.attributes, given.get("attributes", {}))
    return message


def put(pairs: Any, attributes: dict[str, Any]) -> None:
    for key, value in attributes.items():
        pair = pairs.add()
        pair.key = key
        kind = {str: "string_value", int: "int_value", float: "double_value", bool: "bool_value"}[type(value)]
        setattr(pair.value, kind, value)


def partial(answer: httpx.Response) -> tuple[int, str]:
    assert answer.status_code == 200
    found = ExportTraceServiceResponse.FromString(answer.content).partial_success
    return found.rejected_spans, found.error_message


# -- a real SDK ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip, Compression.Deflate])
async def test_what_a_real_sdk_sends_is_kept_whole(site: Site, compression: Compression) -> None:
    provider = TracerProvider(resource=Resource({"service.name": "shop", **site.ids}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=site.url, compression=compression)
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def work() -> None:
        tracer = provider.get_tracer("shop.checkout", "1.2")
        with tracer.start_as_current_span("outer", kind=SpanKind.CLIENT, attributes={"texts": ["a", "b"], "n": 3}):
            linked = SpanContext(int(TRACE, 16), int(SPAN, 16), is_remote=True, trace_flags=TraceFlags(1))
            inner = tracer.start_span("inner", links=[])
            inner.add_link(linked, {"why": "cause"})
            inner.add_event("retry", {"share": 0.5, "flag": True}, timestamp=2_000_000_000)
            inner.set_status(Status(StatusCode.ERROR, "no answer"))
            inner.end()
        provider.shutdown()

    await asyncio.to_thread(work)
    inner, outer = await site.spans()
    assert (outer.name, outer.parent_id, outer.status_code) == ("outer", None, "UNSET")
    assert outer.attributes == {
        "texts": ["a", "b"],
        "n": 3,
        "otel.scope.name": "shop.checkout",
        "otel.scope.version": "1.2",
        "span.kind": "client",
    }
    assert outer.resource["service.name"] == "shop"
    assert (inner.parent_id, inner.trace_id) == (outer.span_id, outer.trace_id)
    assert (inner.status_code, inner.status_message) == ("ERROR", "no answer")
    assert [(event.name, event.timestamp, event.attributes) for event in inner.events] == [
        ("retry", 2.0, {"share": 0.5, "flag": True})
    ]
    links = inner.attributes["otel.links"]
    assert [(link["trace_id"], link["span_id"], link["attributes"]) for link in links] == [
        (TRACE, SPAN, {"why": "cause"})
    ]
    assert outer.start_time <= inner.start_time <= (inner.end_time or 0) <= (outer.end_time or 0)


async def test_an_agents_environment_is_all_an_sdk_needs(guarded: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    url = guarded.server.url
    environment = attempt_environment(url, SECRET, guarded.rollout_id, guarded.attempt_id, inherited={})
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def work() -> None:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
        parent = TraceContextTextMapPropagator().extract({"traceparent": environment["TRACEPARENT"]})
        span = provider.get_tracer("agent").start_span("work", context=parent)
        with use_span(span, end_on_exit=True):
            pass
        provider.shutdown()

    await asyncio.to_thread(work)
    (span,) = await guarded.spans()
    assert (span.name, span.attempt_id, span.trace_id) == ("work", guarded.attempt_id, trace_id_of(guarded.attempt_id))
    assert span.parent_id is None  # the parent that TRACEPARENT names stands for the attempt


# -- whose a span is -------------------------------------------------------------------------------------------------


async def test_a_span_is_known_by_resource_or_span_attributes_and_the_span_wins(site: Site) -> None:
    other = await site.store.start_rollout({})
    own = {"agl.rollout_id": other.rollout_id, "agl.attempt_id": other.attempt.attempt_id}
    sent = request({}, {"attributes": own}, resource=site.ids)
    assert partial(await site.post(sent.SerializeToString())) == (0, "")
    assert [span.span_id for span in await site.spans()] == [f"{1:016x}"]
    assert [span.span_id for span in await site.store.query_spans(other.rollout_id)] == [f"{2:016x}"]


async def test_one_id_is_enough(site: Site) -> None:
    for number, name in enumerate(site.ids):
        sent = request({"span_id": f"{number + 1:016x}"}, resource={name: site.ids[name]})
        assert partial(await site.post(sent.SerializeToString())) == (0, "")
    assert [span.attempt_id for span in await site.spans()] == [site.attempt_id] * 2


async def test_children_follow_their_trace_within_a_request_and_after_it(site: Site) -> None:
    first = request({}, {"attributes": site.ids})
    assert partial(await site.post(first.SerializeToString())) == (0, "")
    later = request({"span_id": SPAN})
    assert partial(await site.post(later.SerializeToString())) == (0, "")
    assert len(await site.spans()) == 3


async def test_the_trace_of_an_attempt_names_it(site: Site) -> None:
    sent = request({"trace_id": trace_id_of(site.attempt_id)})
    assert partial(await site.post(sent.SerializeToString())) == (0, "")
    assert len(await site.spans()) == 1


async def test_an_attempts_key_names_it_and_no_other(guarded: Site) -> None:
    other = await guarded.store.start_rollout({})
    ids = {"agentlightning.rollout_id": other.rollout_id, "agentlightning.attempt_id": other.attempt.attempt_id}
    key = attempt_key(SECRET, guarded.rollout_id, guarded.attempt_id)
    sent = request({}, {"attributes": ids}).SerializeToString()
    rejected, why = partial(await guarded.post(sent, authorization=f"Bearer {key}"))
    assert rejected == 1
    assert "may not send spans of another" in why
    assert len(await guarded.spans()) == 1
    assert await guarded.store.query_spans(other.rollout_id) == []


async def test_an_attempts_key_cannot_claim_the_trace_of_another(guarded: Site) -> None:
    other = await guarded.store.start_rollout({})
    thief = {"authorization": f"Bearer {attempt_key(SECRET, other.rollout_id, other.attempt.attempt_id)}"}
    collector = {"authorization": f"Bearer {TOKEN}"}
    own = trace_id_of(guarded.attempt_id) or ""
    guarded.receiver.claim(TRACE, (guarded.rollout_id, guarded.attempt_id))
    for trace_id, span_id in ((own, f"{1:016x}"), (TRACE, f"{2:016x}")):
        await guarded.post(request({"trace_id": trace_id, "span_id": span_id}).SerializeToString(), **thief)
    rejected, _ = partial(
        await guarded.post(
            request({"trace_id": own, "span_id": SPAN}, {"trace_id": TRACE, "span_id": SPAN}).SerializeToString(),
            **collector,
        )
    )
    assert rejected == 1  # two attempts say that TRACE is theirs, so that nobody can tell
    assert [span.trace_id for span in await guarded.spans()] == [own]
    assert len(await guarded.store.query_spans(other.rollout_id)) == 2  # what it has sent itself


async def test_an_attempts_key_cannot_say_what_only_the_gateway_knows(guarded: Site) -> None:
    key = attempt_key(SECRET, guarded.rollout_id, guarded.attempt_id)
    forged = {"gen_ai.operation.name": "chat", names.PROVIDER_RETRIES: 0, names.COST: -1e6, "mine": 1}
    foreign = {"llm.hosted_vllm.prompt_token_ids": "[1]", "llm.hosted_vllm.response_token_ids": "[2]"}
    sent = request({"attributes": forged | foreign}).SerializeToString()
    assert partial(await guarded.post(sent, authorization=f"Bearer {key}")) == (0, "")
    (span,) = await guarded.spans()
    stripped = {names.PROVIDER_RETRIES, names.COST, names.PROMPT_TOKEN_IDS, names.RESPONSE_TOKEN_IDS}
    assert span.attributes.pop(names.STRIPPED) == sorted(stripped)
    assert span.attributes == {"gen_ai.operation.name": "chat", "mine": 1} | foreign


async def test_spans_that_come_with_a_key_after_the_attempt_has_ended_do_not_count(guarded: Site) -> None:
    key = attempt_key(SECRET, guarded.rollout_id, guarded.attempt_id)
    await guarded.store.update_attempt(guarded.rollout_id, guarded.attempt_id, status="succeeded")
    sent = request({"name": names.REWARD, "attributes": {names.SCORE_VALUE: 1.0}}).SerializeToString()
    assert partial(await guarded.post(sent, authorization=f"Bearer {key}")) == (0, "")
    assert find_reward_spans(await guarded.spans()) == []
    assert len(await guarded.spans()) == 1


async def test_spans_of_nobody_are_refused_and_the_others_kept(site: Site) -> None:
    unknown = {"agentlightning.rollout_id": "ro-none", "agentlightning.attempt_id": "at-none"}
    other = {"trace_id": "1" * 32}
    sent = request({"attributes": site.ids}, {"attributes": unknown}, other, other | {"span_id": SPAN})
    rejected, why = partial(await site.post(sent.SerializeToString()))
    assert rejected == 3
    assert "2 refused: it names no rollout: send agentlightning.rollout_id" in why
    assert "1 refused: no rollout 'ro-none'" in why
    assert len(await site.spans()) == 1
    counts = site.receiver.counts
    assert (counts["accepted"], counts["refused"]) == (1, 3)


async def test_spans_of_an_attempt_are_kept_beside_one_that_gives_it_to_another_rollout(site: Site) -> None:
    wrong = site.ids | {"agentlightning.rollout_id": "ro-none"}
    sent = request({"attributes": site.ids}, {"attributes": wrong}, {"attributes": site.ids})
    rejected, why = partial(await site.post(sent.SerializeToString()))
    assert (rejected, len(await site.spans())) == (1, 2)
    assert "1 refused: no rollout 'ro-none'" in why


async def test_a_repeated_request_changes_nothing(site: Site) -> None:
    sent = request({}, {}, resource=site.ids).SerializeToString()
    for _ in range(2):
        assert partial(await site.post(sent)) == (0, "")
    assert [span.sequence_id for span in await site.spans()] == [1, 2]


async def test_the_sequence_number_of_0x_is_honoured(site: Site) -> None:
    place = "agentlightning.span_sequence_id"
    sent = request(
        {"attributes": {place: 7}}, {"attributes": {place: "5"}}, {"attributes": {place: "soon"}}, resource=site.ids
    )
    assert partial(await site.post(sent.SerializeToString())) == (0, "")
    assert [(span.sequence_id, span.span_id[-1]) for span in await site.spans()] == [(5, "2"), (7, "1"), (8, "3")]


async def test_foreign_conventions_are_read_into_ours(site: Site) -> None:
    attributes = {"openinference.span.kind": "LLM", "llm.model_name": "m", "llm.token_count.prompt": 3}
    reward = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 0.5}
    sent = request({"attributes": attributes}, {"name": names.ANNOTATION, "attributes": reward}, resource=site.ids)
    assert partial(await site.post(sent.SerializeToString())) == (0, "")
    call, rewarded = await site.spans()
    assert call.attributes == attributes | {
        names.OPERATION_NAME: "chat",
        names.REQUEST_MODEL: "m",
        names.INPUT_TOKENS: 3,
    }
    assert (rewarded.name, rewarded.attributes[names.SCORE_VALUE]) == (names.REWARD, 0.5)


# -- JSON ------------------------------------------------------------------------------------------------------------


def json_request(site: Site, **span: Any) -> bytes:
    resource = {"attributes": [{"key": key, "value": {"stringValue": value}} for key, value in site.ids.items()]}
    given = {"traceId": TRACE.upper(), "spanId": SPAN, "name": "work", **span}
    return orjson.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": [given]}]}]})


async def test_json_is_read_and_answered_as_json(site: Site) -> None:
    values = {
        "text": {"stringValue": "a"},
        "int": {"intValue": "12"},
        "small": {"intValue": 1},
        "share": {"doubleValue": 0.5},
        "flag": {"boolValue": False},
        "list": {"arrayValue": {"values": [{"stringValue": "x"}, {"doubleValue": "NaN"}]}},
        "map": {"kvlistValue": {"values": [{"key": "k", "value": {"bytesValue": "AP8="}}]}},
        "nothing": {},
    }
    sent = json_request(
        site,
        parentSpanId="00f067aa0ba902b7",
        kind="SPAN_KIND_SERVER",
        startTimeUnixNano="1500000000",
        endTimeUnixNano=2_500_000_000,
        status={"code": 2, "message": "no"},
        attributes=[{"key": key, "value": value} for key, value in values.items()],
        events=[{"name": "retry", "timeUnixNano": "2000000000", "attributes": []}],
        links=[{"traceId": TRACE, "spanId": SPAN}],
        unknownField=[1],
    )
    answer = await site.post(sent, "application/json; charset=utf-8")
    assert (answer.status_code, answer.headers["content-type"], answer.json()) == (200, "application/json", {})
    (span,) = await site.spans()
    assert (span.trace_id, span.span_id, span.parent_id) == (TRACE, SPAN, "00f067aa0ba902b7")
    assert (span.start_time, span.end_time, span.status_code, span.status_message) == (1.5, 2.5, "ERROR", "no")
    assert span.events[0].timestamp == 2.0
    assert span.attributes == {
        "text": "a",
        "int": 12,
        "small": 1,
        "share": 0.5,
        "flag": False,
        "list": ["x", "NaN"],
        "map": {"k": "AP8="},
        "nothing": None,
        "span.kind": "server",
        "otel.links": [{"trace_id": TRACE, "span_id": SPAN, "attributes": {}}],
    }


async def test_json_says_what_was_refused(site: Site) -> None:
    answer = await site.post(json_request(site, spanId="zz"), "application/json")
    assert answer.json()["partialSuccess"]["rejectedSpans"] == "1"
    assert "16" in answer.json()["partialSuccess"]["errorMessage"]


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ({"name": 5}, "Failed to parse name field"),
        ({"attributes": {"a": 1}}, "attributes must be in [] which is {'a': 1}"),
        ({"attributes": [{"key": "a", "value": 5}]}, "Failed to parse value field"),
        ({"attributes": [{"key": "a", "value": {"intValue": 1.5}}]}, "Couldn't parse integer: 1.5"),
        (
            {"attributes": [{"key": "a", "value": {"intValue": "1" * 30}}]},
            "Failed to parse intValue field: Value out of",
        ),
        ({"startTimeUnixNano": -5}, "Failed to parse startTimeUnixNano field: Value out of range: -5"),
        ({"startTimeUnixNano": "2026-11-21T18:00:00"}, "Failed to parse startTimeUnixNano field"),
        ({"events": 3}, "events must be in [] which is 3"),
        ({"links": [3]}, "Failed to parse links field"),
        ({"status": 5}, "Failed to parse status field"),
        ({"traceId": 5}, "Failed to parse traceId field"),
    ],
)
async def test_json_of_another_shape_is_refused_by_name(site: Site, span: dict[str, Any], message: str) -> None:
    answer = await site.post(json_request(site, **span), "application/json")
    assert answer.status_code == 400
    assert message in answer.json()["message"]
    assert answer.json()["detail"] == answer.json()["error"]["message"] == answer.json()["message"]
    assert await site.spans() == []


# -- bad requests ----------------------------------------------------------------------------------------------------


async def test_a_value_of_an_unknown_kind_is_ignored_as_in_protobuf(site: Site) -> None:
    answer = await site.post(
        json_request(site, attributes=[{"key": "odd", "value": {"oddValue": 5}}], unknown={"a": [1]}),
        "application/json",
    )
    assert answer.status_code == 200
    (span,) = await site.spans()
    assert span.attributes["odd"] is None


async def test_json_without_end_is_refused(site: Site) -> None:
    for body in (b"[" * 300 + b"]" * 300, b'{"resourceSpans":' * 260 + b"1" + b"}" * 260):
        assert (await site.post(b'{"resourceSpans": %s}' % body, "application/json")).status_code == 400


async def test_garbage_is_refused(site: Site) -> None:
    whole = request({}, resource=site.ids).SerializeToString()
    for body, kind in (
        (b"\xff" * 10, "application/x-protobuf"),
        (whole[:-3], "application/x-protobuf"),
        (b"{", "application/json"),
        (b"[]", "application/json"),
    ):
        answer = await site.post(body, kind)
        assert (answer.status_code, answer.headers["content-type"]) == (400, kind)
        assert answer.content
    assert await site.spans() == []


CUT = "wo" + "\N{GRINNING FACE}"
"""A text that the tests cut within its emoji."""


def everywhere(site: Site, text: str) -> ExportTraceServiceRequest:
    """A request with a text at each place of a span that takes one, and a span without."""
    sent = request({"name": text, "attributes": {text: text}}, {}, resource={**site.ids, "host": text, text: "x"})
    first = sent.resource_spans[0].scope_spans[0].spans[0]
    event = first.events.add(name=text)
    put(event.attributes, {text: text})
    inner = first.attributes.add(key="deep").value.kvlist_value.values.add(key=text).value.array_value.values.add()
    inner.string_value = text
    first.status.code, first.status.message, first.trace_state = 2, text, text
    sent.resource_spans[0].scope_spans[0].scope.name = text
    sent.resource_spans[0].resource.entity_refs.add(type="host", id_keys=["host", text])
    return sent


async def test_half_an_emoji_is_replaced_wherever_it_stands_and_nothing_is_lost(site: Site) -> None:
    body = everywhere(site, CUT).SerializeToString()
    cut = body.replace(CUT.encode(), CUT.encode()[:-2] + b"..")
    rejected, why = partial(await site.post(cut))
    assert (rejected, why) == (0, "14 characters that are not Unicode, such as half an emoji, were replaced by U+FFFD")
    first, second = await site.spans()
    whole = "wo\ufffd.."
    assert (first.name, first.status_message, first.events[0].name) == (whole, whole, whole)
    assert first.attributes[whole] == first.events[0].attributes[whole] == whole
    assert first.attributes["deep"] == {whole: [whole]}
    assert (first.resource["host"], first.resource[whole], second.name) == (whole, "x", "work")
    assert site.server.traces.counts["repaired"] == 14


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\xbd", b"\xf0\x9f\x98", b"\xe9t\xe9"])
async def test_bytes_that_are_no_text_are_replaced_in_either_encoding(site: Site, bad: bytes) -> None:
    sent = request({"name": "NAME" * 40}, {}, resource=site.ids).SerializeToString()
    answers = [partial(await site.post(sent.replace(b"NAME" * 40, (bad + b"NAME" * 40)[:160])))]
    body = json_request(site, spanId="1" * 16, name="NAME").replace(b"NAME", bad)
    answer = (await site.post(body, "application/json")).json()["partialSuccess"]
    answers.append((int(answer["rejectedSpans"]), answer["errorMessage"]))
    assert [(rejected, "not Unicode" in why) for rejected, why in answers] == [(0, True)] * 2
    assert ["\ufffd" in each.name for each in await site.spans()] == [True, False, True]


@pytest.mark.parametrize(
    ("escaped", "read"),
    [
        (rb"a\ud83d", "a\ufffd"),
        (rb"\uDE00a", "\ufffda"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\N{GRINNING FACE}"),
        (rb"\\\ud83d\\ud83d\n", "\\\ufffd\\ud83d\n"),
    ],
)
async def test_half_an_emoji_in_json_is_replaced_and_named(site: Site, escaped: bytes, read: str) -> None:
    pair = {"key": "TEXT", "value": {"stringValue": "TEXT"}}
    sent = json_request(site, name="TEXT", attributes=[pair], events=[{"name": "TEXT", "attributes": [pair]}])
    sent = sent.replace(b"TEXT", escaped).replace(b'"resource":{"attributes":[', b'"resource":{"attributes":[%s,' % (
        orjson.dumps(pair).replace(b"TEXT", escaped)
    ))  # fmt: skip
    answer = (await site.post(sent, "application/json")).json()["partialSuccess"]
    assert (answer["rejectedSpans"], answer["errorMessage"][:20]) == ("0", "8 characters that ar")
    (span,) = await site.spans()
    assert (span.name, span.attributes, span.events[0].name) == (read, {read: read}, read)
    assert (span.events[0].attributes, span.resource[read]) == ({read: read}, read)


async def test_a_truncated_request_is_refused_even_where_a_text_is_cut(site: Site) -> None:
    cut = request({"name": "NAME"}, {}, resource=site.ids).SerializeToString().replace(b"NAME", b"NAM\xf0")
    for size in range(1, len(cut), 7):
        assert (await site.post(cut[:size])).status_code == 400
    assert (await site.post(cut + b"\x0a" + b"\xff" * 40)).status_code == 400
    assert await site.spans() == []


async def test_an_empty_request_is_fine(site: Site) -> None:
    assert partial(await site.post(b"")) == (0, "")


async def test_spans_without_ids_are_refused_alone(site: Site) -> None:
    sent = request({"span_id": ""}, {"trace_id": "0" * 32}, {"span_id": "1" * 18}, {}, resource=site.ids)
    rejected, why = partial(await site.post(sent.SerializeToString()))
    assert (rejected, "a trace id needs 16 bytes and a span id 8" in why) == (3, True)
    assert len(await site.spans()) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_numbers_json_cannot_hold_become_text(site: Site, value: float) -> None:
    assert (
        partial(await site.post(request({"attributes": {"n": value}}, resource=site.ids).SerializeToString()))[0] == 0
    )
    assert (await site.spans())[0].attributes["n"] in ("NaN", "Infinity", "-Infinity")


@pytest.mark.parametrize("coding", ["gzip", "deflate", "raw"])
async def test_compressed_bodies_are_read_and_broken_ones_refused(site: Site, coding: str) -> None:
    plain = request({}, resource=site.ids).SerializeToString()
    raw = zlib.compressobj(wbits=-15)
    body = {"gzip": gzip.compress(plain), "deflate": zlib.compress(plain)}.get(coding) or (
        raw.compress(plain) + raw.flush()
    )
    name = "deflate" if coding == "raw" else coding
    assert partial(await site.post(body, content_encoding=name)) == (0, "")
    assert (await site.post(body[:-4], content_encoding=name)).status_code == 400
    assert (await site.post(plain, content_encoding=name)).status_code == 400


async def test_what_it_cannot_read_it_says_so(site: Site) -> None:
    assert (await site.post(b"", "text/plain")).status_code == 415
    assert (await site.post(b"x", content_encoding="br")).status_code == 415


async def test_a_decompression_bomb_is_rejected() -> None:
    store = InMemoryLightningStore()
    app = Starlette(routes=OtlpReceiver(store, SECRET, max_body_bytes=1_000_000).routes())
    bomb = gzip.compress(b"\0" * 50_000_000, 1)
    assert len(bomb) < 1_000_000
    headers = {"content-type": "application/x-protobuf"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        for body, coding in ((bomb, "gzip"), (b"\0" * 1_000_001, "identity")):
            answer = await client.post(PATH, content=body, headers=headers | {"content-encoding": coding})
            assert answer.status_code == 413
    await store.close()
    assert MAX_BODY_BYTES == 64 * 1024 * 1024


async def test_without_the_token_nothing_is_taken(guarded: Site) -> None:
    sent = request({}, resource=guarded.ids).SerializeToString()
    forged = attempt_key("another secret", guarded.rollout_id, guarded.attempt_id)
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Bearer {forged}"}):
        answer = await guarded.post(sent, **headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Bearer realm="agentlightning"')
    assert await guarded.spans() == []
    assert partial(await guarded.post(sent, authorization=f"Bearer {TOKEN}")) == (0, "")
    assert len(await guarded.spans()) == 1


async def test_a_server_does_not_send_its_spans_to_itself(site: Site) -> None:
    exporter = OtlpExporter(site.server.url)
    store = instrument(site.store, [exporter])
    kept = await store.add_span(names.Span(site.rollout_id, site.attempt_id, "work", 1.0))
    assert await asyncio.to_thread(exporter.close)
    assert (exporter.counts.sent, exporter.counts.refused) == (0, 1)
    assert await site.spans() == [kept]


async def test_a_store_that_cannot_write_asks_for_patience(site: Site) -> None:
    await site.store.close()
    answer = await site.post(request({}, resource=site.ids).SerializeToString())
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_a_large_attribute_is_kept_whole(site: Site) -> None:
    sent = request({"attributes": {"text": "x" * 10_000_000}}, resource=site.ids)
    assert partial(await site.post(gzip.compress(sent.SerializeToString(), 1), content_encoding="gzip")) == (0, "")
    assert len((await site.spans())[0].attributes["text"]) == 10_000_000


# -- Agent Lightning 0.3 ---------------------------------------------------------------------------------------------

PEER = Path(os.environ.get("AGL_PEER_03") or Path(__file__).parents[2] / ".peers/agl03/bin/python")


@pytest.mark.slow
@pytest.mark.skipif(
    not PEER.exists(),
    reason=f"no agentlightning 0.3 at {PEER}; make it with benchmarks/peers.sh, or name its Python with AGL_PEER_03",
)
async def test_what_an_agent_of_0_3_emits_is_ours_and_still_its_own(site: Site) -> None:
    script = Path(__file__).with_name("interop_03_traces.py")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(PEER, script, site.server.url, stdout=pipe, stderr=pipe, cwd="/")
    printed, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()[-3000:]
    seen = orjson.loads(printed.splitlines()[-1])
    assert (seen["reward"], seen["spans"]) == (1.0, 3)  # read by its own rules
    spans = await site.store.query_spans(seen["rollout_id"])
    assert [get_reward_value(span) for span in find_reward_spans(spans)] == [0.25, 1.0]  # and by ours
    assert [span.attributes[names.MESSAGE_BODY] for span in spans if span.name == names.MESSAGE] == ["thinking"]
