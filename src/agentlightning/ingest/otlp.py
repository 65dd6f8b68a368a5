"""Receives OTLP over HTTP, `POST /v1/traces`, from any OpenTelemetry SDK or collector.

traces.py finds the attempt of each span. A span without an attempt is rejected in `partial_success`, or stored in
a rollout of its own trace, depending on the `adopt` option.

Spans sent with the key of an attempt are not trusted: attributes that only the gateway may set are removed, spans that
arrive after the end of the attempt are marked, and a trace belongs to the attempt only if no other attempt claims it.

Responses have the encoding of the request and are sent when the spans are durable. The retryable status 503 is used
where a retry helps; retries are harmless, because a span is identified by its id.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import orjson
from msgspec.structs import replace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.attempt_address import read_attempt_key, root_span_id_of
from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    ConflictError,
    NotFoundError,
    StoreAuthError,
    StoreFullError,
)
from agentlightning.ingest.traces import AttemptIds, AttemptResolver, TraceOwners, UnknownTraces
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.encoding import MAX_BODY_BYTES
from agentlightning.store.http.endpoint import ClientDisconnected, receive_body
from agentlightning.store.http.errors import RequestError, status_of
from agentlightning.tracing.agent_spans import agent_attributes, late_mark
from agentlightning.tracing.otlp.decode import (
    EXPORTER_HEADER,
    PROCESS_ID,
    Request,
    decode_json,
    decode_protobuf,
)
from agentlightning.util.api_key import api_key
from agentlightning.util.decompression import CodingError, decompress, decompress_now

# -- otlp responses --------------------------------------------------------------------------------------------------

# Encodes the responses of the OTLP receiver: partial success and errors, in protobuf or JSON.

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"


def response(rejected: Counter[str], content_type: str, repaired: int = 0) -> Response:
    """The response to a request of which these spans, by reason, were rejected, and in which so many characters were
    replaced."""
    texts = [f"{count} refused: {reason}" for reason, count in rejected.most_common(5)]
    if repaired:
        texts.append(f"{repaired} characters that are not Unicode, such as half an emoji, were replaced by U+FFFD")
    message, count = "; ".join(texts), rejected.total()
    if content_type == JSON:
        partial = {"partialSuccess": {"rejectedSpans": str(count), "errorMessage": message}} if message else {}
        return Response(orjson.dumps(partial), media_type=JSON)
    result = ExportTraceServiceResponse()
    if message:
        result.partial_success.rejected_spans = count
        result.partial_success.error_message = message
    return Response(result.SerializeToString(), media_type=PROTOBUF)


_CODES: Final = {400: 3, 401: 16, 413: 8, 415: 3, 503: 14}
"""HTTP status -> code of google.rpc.Status, which OTLP uses for errors."""


def error_response(error: AgentLightningError, content_type: str) -> Response:
    """The response to a request that failed."""
    status, message = _status(error), str(error)
    headers = {401: {"www-authenticate": 'Bearer realm="agentlightning"'}, 503: {"retry-after": "1"}}.get(status)
    code = _CODES.get(status, 13)
    if content_type == PROTOBUF:  # This message is written as google.rpc.Status is, with code and text in its fields.
        body = ExportTracePartialSuccess(rejected_spans=code, error_message=message)
        return Response(body.SerializeToString(), status, headers, PROTOBUF)
    described = {"error": {"type": type(error).__name__, "message": message}, "detail": message}
    return Response(orjson.dumps({"code": code, "message": message, **described}), status, headers, JSON)


def _status(error: AgentLightningError) -> int:
    if isinstance(error, CodingError):
        return error.status
    return 503 if isinstance(error, StoreFullError) else status_of(error)


PATH: Final = "/v1/traces"
INLINE_BYTES: Final = 512 * 1024
"""Larger bodies are decoded in a thread."""
MAX_CONCURRENT: Final = 4
"""Requests of more than INLINE_BYTES that are decoded concurrently; others wait."""


@dataclass(slots=True)
class Counts:
    """What happened to the spans that were received; shown as metrics under these names."""

    requests: int = 0
    accepted: int = 0
    refused: int = 0
    repaired: int = 0
    """Characters that were not Unicode."""


class OtlpReceiver:
    """Receives traces. `secret` signs the keys of attempts, `token` is the access token of the server; `adopt` stores
    unknown traces as rollouts of their own. With `adopt`, use it as an async context manager."""

    def __init__(
        self,
        store: LightningStoreBase,
        secret: str,
        token: str | None = None,
        *,
        adopt: bool = False,
        max_body_bytes: int = MAX_BODY_BYTES,
        shared: Path | None = None,
    ) -> None:
        self._store = store
        self._secret = secret
        self._token = token
        self._max_body_bytes = max_body_bytes
        self._attempts = AttemptResolver(store, TraceOwners(shared))
        self._unknown = UnknownTraces(store) if adopt else None
        self._large = asyncio.Semaphore(MAX_CONCURRENT)
        self.counts = Counts()

    async def __aenter__(self) -> OtlpReceiver:
        if self._unknown is not None:
            await self._unknown.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._unknown is not None:
            await self._unknown.close()

    def routes(self) -> list[Route]:
        """Routes for a Starlette application."""
        return [Route(PATH, self._post, methods=["POST"])]

    # -- traces of model calls -------------------------------------------------------------------------------------

    async def owner_of(self, trace_id: str) -> AttemptIds | None:
        """The attempt of a trace. With `adopt`, an unknown trace gets a rollout now."""
        ids = await self._attempts.by_trace(trace_id)
        return await self._unknown.begin(trace_id) if ids is None and self._unknown is not None else ids

    def claim(self, trace_id: str, ids: AttemptIds) -> None:
        """Note that an attempt has made a call in this trace: other spans of it then belong to the attempt, unless two
        attempts claim the trace."""
        self._attempts.owners.note(trace_id, ids, by_token=False)

    # -- HTTP --------------------------------------------------------------------------------------------------------

    async def _post(self, http: HttpRequest) -> Response:
        content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            caller = self._authenticate(http.headers)
            if content_type not in (PROTOBUF, JSON):
                message = f"content-type={content_type!r} is not supported; send {PROTOBUF} or {JSON}"
                raise RequestError(message, 415)
            request = await self._read(http, content_type)
            rejected = await self.store_spans(request, caller)
        except ClientDisconnected:
            return Response(status_code=400)
        except AgentLightningError as error:
            return error_response(error, content_type)
        return response(rejected, content_type, request.repaired)

    def _authenticate(self, headers: Mapping[str, str]) -> AttemptIds | None:
        """The attempt whose key the request carries; None for the access token, and if the server has none."""
        if headers.get(EXPORTER_HEADER) == PROCESS_ID:  # each span would come back forever
            raise RequestError("this server sends its spans on to itself; give --otlp-export another address", 508)
        key = api_key(headers)
        ids = read_attempt_key(self._secret, key) if key.startswith("agl-") else None
        if ids is not None:
            return ids
        if self._token is None:
            if key.startswith("agl-"):
                raise StoreAuthError("the key is not that of an attempt of this server; use the AGL_KEY of the attempt")
            return None
        if not key:
            raise StoreAuthError("this server requires its access token, or the key of an attempt, as a bearer token")
        if not hmac.compare_digest(key.encode(), self._token.encode()):
            raise StoreAuthError("the bearer token is neither the access token of this server nor an attempt's key")
        return None

    async def _read(self, http: HttpRequest, content_type: str) -> Request:
        body, limit = await receive_body(http.headers, http.receive, self._max_body_bytes), self._max_body_bytes
        if body is None:
            raise RequestError(f"the body is larger than {limit} bytes; send fewer spans at once", 413)
        coding = http.headers.get("content-encoding", "")
        if len(body) <= INLINE_BYTES:
            body, coding = await decompress(body, coding, limit), ""
            if len(body) <= INLINE_BYTES:
                return decode(body, content_type)
        async with self._large:
            return await asyncio.to_thread(lambda: decode(decompress_now(body, coding, limit), content_type))

    # -- spans -------------------------------------------------------------------------------------------------------

    async def store_spans(self, request: Request, caller: AttemptIds | None = None) -> Counter[str]:
        """Store the spans of a request. Returns the number of rejected spans by reason. `caller` is the attempt whose
        key the request carried."""
        rejected = request.refused
        spans = request.spans if caller is None else await self._untrusted(request.spans, caller)
        attributed, unattributed = await self._attempts.resolve(spans, caller, rejected)
        if unattributed and self._unknown is not None:
            attributed += await self._unknown.adopt(unattributed)
        elif unattributed:
            rejected["it names no rollout: send agentlightning.rollout_id and agentlightning.attempt_id as resource or "
                    "span attributes, or start the server with --adopt-traces"] += len(unattributed)  # fmt: skip
        accepted = await self._add(_spans(attributed), rejected)
        if self._unknown is not None:
            await self._unknown.record(decoded for _, decoded in attributed)
        self.counts.requests += 1
        self.counts.accepted += accepted
        self.counts.refused += rejected.total()
        self.counts.repaired += request.repaired
        return rejected

    async def _untrusted(self, spans: Sequence[Span], caller: AttemptIds) -> list[Span]:
        """The spans without attributes that agents may not set, marked if the attempt has ended."""
        late = late_mark(await self._store.get_attempt(caller[1]))
        return [replace(span, attributes={**agent_attributes(span.attributes), **late}) for span in spans]

    async def _add(self, spans: Sequence[Span], rejected: Counter[str]) -> int:
        """Add the spans, and the valid ones if some are invalid. Returns the number of spans added."""
        if not spans:
            return 0
        try:
            await self._store.add_many_spans(spans)
            return len(spans)
        except (NotFoundError, ConflictError, ConfigError) as error:
            groups: dict[AttemptIds, list[Span]] = {}
            for span in spans:
                groups.setdefault((span.rollout_id, span.attempt_id), []).append(span)
            if len(spans) == 1 or (len(groups) == 1 and isinstance(error, NotFoundError)):
                rejected[str(error)] += len(spans)
                return 0
        parts = [[span] for span in spans] if len(groups) == 1 else groups.values()
        return sum([await self._add(part, rejected) for part in parts])


def _spans(attributed: Iterable[tuple[AttemptIds, Span]]) -> list[Span]:
    """The spans for the store. A parent that is the synthetic root span of TRACEPARENT is removed."""
    root_of = cache(root_span_id_of)
    return [
        replace(
            span,
            rollout_id=ids[0],
            attempt_id=ids[1],
            parent_id=None if span.parent_id == root_of(ids[1]) else span.parent_id,
        )
        for ids, span in attributed
    ]


def decode(body: bytes, content_type: str) -> Request:
    """The spans in a body. Raises OtlpError."""
    now = time.time()
    return decode_json(body, now) if content_type == JSON else decode_protobuf(body, now)
