"""Receives OTLP over HTTP, `POST /v1/traces`, from any OpenTelemetry SDK or collector.

The attempt of a span is, in this order: the one whose key the request carries; that of the ids among the span's own
attributes; of those among the attributes of its resource; the attempt from which its trace id was made; that of another
span of its trace. A span without an attempt is rejected in `partial_success`, or stored in a rollout of its own trace,
depending on the `adopt` option.

Spans sent with the key of an attempt are not trusted: attributes that only the gateway may set are removed, spans that
arrive after the end of the attempt are marked, and a trace belongs to the attempt only if no other attempt claims it.

Responses have the encoding of the request and are sent when the spans are durable. The retryable status 503 is used
where a retry helps; retries are harmless, because a span is identified by its id.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Final

import orjson
from google.protobuf.json_format import MessageToJson
from msgspec.structs import replace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from agentlightning import span as names
from agentlightning.attempt_address import attempt_of_trace, read_attempt_key, root_span_id_of
from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    ConflictError,
    NotFoundError,
    StoreAuthError,
    StoreError,
    StoreFullError,
)
from agentlightning.rollouts import FINISHED
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.endpoint import MAX_BODY_BYTES, ClientDisconnected, RequestError, receive_body, status_of
from agentlightning.store.ids import claimed_id
from agentlightning.store.types import UNSET
from agentlightning.tracing.agent_spans import agent_attributes, late_mark
from agentlightning.tracing.otlp.codec import EXPORTER_HEADER, PROCESS_ID, Request, decode_json, decode_protobuf
from agentlightning.util.api_key import api_key
from agentlightning.util.decompression import CodingError, decompress
from agentlightning.util.shared_cache import open_cache

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
    result = ExportTraceServiceResponse()
    if texts:
        result.partial_success.rejected_spans = rejected.total()
        result.partial_success.error_message = "; ".join(texts)
    if content_type == PROTOBUF:
        return Response(result.SerializeToString(), media_type=PROTOBUF)
    return Response(MessageToJson(result, always_print_fields_with_no_presence=True, indent=None), media_type=JSON)


_CODES: Final = {400: 3, 401: 16, 413: 8, 415: 3, 503: 14}
"""HTTP status -> code of google.rpc.Status, which OTLP uses for errors."""


def error_response(error: AgentLightningError, content_type: str) -> Response:
    """The response to a request that failed."""
    status, message = status_of(error), str(error)
    if isinstance(error, CodingError):
        status = error.status
    elif isinstance(error, StoreFullError):
        status = 503
    headers = {401: {"www-authenticate": 'Bearer realm="agentlightning"'}, 503: {"retry-after": "1"}}.get(status)
    code = _CODES.get(status, 13)
    if content_type == PROTOBUF:  # This message is written as google.rpc.Status is, with code and text in its fields.
        body = ExportTracePartialSuccess(rejected_spans=code, error_message=message)
        return Response(body.SerializeToString(), status, headers, PROTOBUF)
    described = {"error": {"type": type(error).__name__, "message": message}, "detail": message}
    return Response(orjson.dumps({"code": code, "message": message, **described}), status, headers, JSON)


# -- the attempts of spans ---------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

CACHED: Final = 16384
"""Attempts whose rollout is cached."""
TRACES: Final = 65536
"""Traces whose attempt is kept, the latest."""

AttemptIds = tuple[str, str]
"""(rollout_id, attempt_id)."""
NamedIds = tuple[str | None, str | None]
"""The (rollout_id, attempt_id) that attributes name."""


class TraceOwners:
    """The attempts of the latest traces that are not an attempt's own, in memory or in a folder that several processes
    share."""

    def __init__(self, shared: Path | None = None) -> None:
        schema = (
            "CREATE TABLE IF NOT EXISTS owners (number INTEGER PRIMARY KEY, trace_id TEXT, by_token INTEGER,"
            " rollout_id TEXT, attempt_id TEXT, UNIQUE (trace_id, by_token))"
        )
        self._run = open_cache(shared, "traces.db", schema).execute

    def find(self, trace_id: str) -> AttemptIds | None:
        """The attempt of a trace. What holders of the access token sent takes precedence over claims of attempts."""
        query = (
            "SELECT rollout_id, attempt_id FROM owners WHERE trace_id = ? AND rollout_id > '' ORDER BY by_token DESC"
        )
        return self._run(query, (trace_id,)).fetchone()

    def note(self, trace_id: str, ids: AttemptIds, *, by_token: bool) -> None:
        """Note that an attempt has made a model call or sent spans in a trace, by its key; or that a holder of the
        access token said so. If several attempts claim a trace, it belongs to none of them."""
        columns, noted = "trace_id, by_token, rollout_id, attempt_id", (trace_id, by_token, *ids)
        if self._run(f"SELECT 1 FROM owners WHERE ({columns}) = (?, ?, ?, ?)", noted).fetchone():
            return
        changed = "excluded.rollout_id, excluded.attempt_id" if by_token else "NULL, NULL"
        change = f"ON CONFLICT DO UPDATE SET (rollout_id, attempt_id) = ({changed})"
        self._run(f"INSERT INTO owners ({columns}) VALUES (?, ?, ?, ?) {change}", noted)
        self._run("DELETE FROM owners WHERE number <= last_insert_rowid() - ?", (TRACES,))


def _named_ids(attributes: Mapping[str, Any]) -> NamedIds | None:
    """The ids that attributes name; None if they name none."""
    rollout_id = attributes.get("agentlightning.rollout_id") or attributes.get("agl.rollout_id")
    attempt_id = attributes.get("agentlightning.attempt_id") or attributes.get("agl.attempt_id")
    if rollout_id is None and attempt_id is None:
        return None
    return _text(rollout_id), _text(attempt_id)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


# -- unknown traces ----------------------------------------------------------------------------------------------------

QUEUE: Final = "traces"
SOURCE: Final = "otlp"
IDLE_SECONDS: Final = 600.0
CHECK_SECONDS: Final = 5.0
"""Time between two searches for idle traces."""
BATCH: Final = 256
"""Idle traces that are finished concurrently."""
MAX_OPEN: Final = 100_000
"""Beyond this number of open traces, those idle for longest are finished early."""
PAGE: Final = 1000


def ids_of_trace(trace_id: str) -> AttemptIds:
    """The ids of the rollout and the attempt of an unknown trace."""
    return f"ro-{trace_id}", claimed_id(_claim_id(trace_id), 0)


def _claim_id(trace_id: str) -> str:
    return f"trace-{trace_id}"


class UnknownTraces:
    """Creates rollouts for unknown traces and finishes them.

    Each becomes one rollout with one attempt, in the queue `traces`. Both ids follow from the trace id, so that a
    repeated request, another server on the same database, and this one after a restart use the same rollout. The
    status of the root span decides whether the attempt succeeded or failed; spans that arrive later still belong to
    it. A trace whose root span never arrives (because it began elsewhere, say) succeeds after `idle_seconds` without
    spans.
    """

    def __init__(self, store: LightningStoreBase, idle_seconds: float = IDLE_SECONDS) -> None:
        self._store = store
        self._idle = idle_seconds
        self._open: OrderedDict[str, float] = OrderedDict()
        """Trace id -> time of arrival of its last span (monotonic seconds), the one idle for longest first."""
        self._checking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Continue with the traces that were open when the last server stopped, and start looking for idle ones."""
        after = None
        while page := await self._store.query_rollouts(
            queue_in=[QUEUE], status_in=["preparing", "running"], after=after, limit=PAGE
        ):
            for rollout in page:
                trace_id = rollout.metadata.get("trace_id")
                if isinstance(trace_id, str) and rollout.metadata.get("source") == SOURCE:
                    self._open[trace_id] = time.monotonic()
            after = page[-1].rollout_id
        self._checking = asyncio.create_task(self._check_regularly())

    async def close(self) -> None:
        """Stop looking for idle traces. Open traces stay open for the next server."""
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait({self._checking})

    async def adopt(self, spans: Sequence[Span]) -> list[tuple[AttemptIds, Span]]:
        """The spans with the ids of their attempts, which are created if they do not exist."""
        services = {span.trace_id: span.resource.get("service.name") for span in reversed(spans)}
        await asyncio.gather(*(self.begin(*each) for each in services.items()))
        return [(ids_of_trace(span.trace_id), span) for span in spans]

    async def begin(self, trace_id: str, service: Any = None) -> AttemptIds:
        """The attempt of a trace, created if it does not exist."""
        rollout_id, attempt_id = ids = ids_of_trace(trace_id)
        if self._touch(trace_id):
            return ids
        metadata: dict[str, Any] = {"source": SOURCE, "trace_id": trace_id}
        if isinstance(service, str):
            metadata["service"] = service
        with suppress(ConflictError):  # the rollout has already finished
            started = await self._store.start_rollout(
                None, metadata=metadata, rollout_id=rollout_id, queue=QUEUE, claim_id=_claim_id(trace_id)
            )
            if started.attempt.attempt_id == attempt_id and started.status not in FINISHED:
                self._open[trace_id] = time.monotonic()
        return ids

    async def record(self, spans: Iterable[Span]) -> None:
        """Note that these spans were stored, and finish the traces whose root span is among them."""
        roots = [span for span in spans if self._touch(span.trace_id) and span.parent_id is None]
        await asyncio.gather(*(self._finish(root.trace_id, root) for root in roots))

    def _touch(self, trace_id: str) -> bool:
        """Note that a span of a trace has arrived. Whether the trace is open."""
        if is_open := trace_id in self._open:
            self._open[trace_id] = time.monotonic()
            self._open.move_to_end(trace_id)
        return is_open

    async def _finish(self, trace_id: str, root: Span | None) -> None:
        rollout_id, attempt_id = ids_of_trace(trace_id)
        status = "failed" if root is not None and root.status_code == "ERROR" else "succeeded"
        metadata = UNSET if root is not None else {"incomplete": "its root span has not arrived"}
        try:
            if root is not None and (task := _input(root)) is not None:
                await self._store.update_rollout(rollout_id, input=task)
            await self._store.update_attempt(rollout_id, attempt_id, status=status, metadata=metadata)
        except (ConflictError, NotFoundError) as error:
            logger.info("the trace %s has already been finished: %s", trace_id, error)
        self._open.pop(trace_id, None)

    async def _check_regularly(self) -> None:
        while True:
            await asyncio.sleep(min(CHECK_SECONDS, self._idle))
            while idle := self._idle_traces():
                try:
                    await asyncio.gather(*(self._finish(trace_id, None) for trace_id in idle))
                except StoreError as error:
                    logger.warning("could not finish %d idle traces, trying again: %s", len(idle), error)
                    break

    def _idle_traces(self) -> list[str]:
        """The next batch of traces that are idle for too long or exceed MAX_OPEN."""
        deadline, excess = time.monotonic() - self._idle, len(self._open) - MAX_OPEN
        first = list(islice(self._open.items(), BATCH))
        return [trace_id for index, (trace_id, last_span) in enumerate(first) if last_span < deadline or index < excess]


def _input(root: Span) -> Any:
    """The input of the program according to its root span."""
    values = (root.attributes.get(name) for name in (names.OPERATION_INPUT, names.INPUT_MESSAGES))
    return next((value for value in values if value is not None), None)


PATH: Final = "/v1/traces"
INLINE_BYTES: Final = 512 * 1024
"""Larger bodies are decoded in a thread."""
MAX_CONCURRENT: Final = 4
"""Requests of more than INLINE_BYTES that are decoded concurrently; others wait."""


class OtlpReceiver:
    """Receives traces. `secret` signs the keys of attempts, `token` is the access token of the server; `adopt` stores
    unknown traces as rollouts of their own. With `adopt`, `start` it."""

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
        self._owners = TraceOwners(shared)
        self._rollouts: dict[str, AttemptIds] = {}
        """By attempt: some of the latest."""
        self._unknown, self._adopts = UnknownTraces(store), adopt
        self._large = asyncio.Semaphore(MAX_CONCURRENT)
        self.counts = Counter(requests=0, accepted=0, refused=0, repaired=0)
        """What happened to the spans that were received; shown as metrics under these names."""

    async def start(self) -> None:
        """Take care of unknown traces, until `close`."""
        if self._adopts:
            await self._unknown.start()

    async def close(self) -> None:
        await self._unknown.close()

    def routes(self) -> list[Route]:
        """Routes for a Starlette application."""
        return [Route(PATH, self._post, methods=["POST"])]

    # -- traces of model calls -------------------------------------------------------------------------------------

    async def owner_of(self, trace_id: str) -> AttemptIds | None:
        """The attempt of a trace. With `adopt`, an unknown trace gets a rollout now."""
        ids = await self._by_trace(trace_id)
        return await self._unknown.begin(trace_id) if ids is None and self._adopts else ids

    def claim(self, trace_id: str, ids: AttemptIds) -> None:
        """Note that an attempt has made a call in this trace: other spans of it then belong to the attempt, unless two
        attempts claim the trace."""
        self._owners.note(trace_id, ids, by_token=False)

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
        ids = read_attempt_key(self._secret, key)
        if ids is not None or (self._token is None and not key.startswith("agl-")):
            return ids
        if self._token is None:
            raise StoreAuthError("the key is not that of an attempt of this server; use the AGL_KEY of the attempt")
        if not key:
            raise StoreAuthError("this server requires its access token, or the key of an attempt, as a bearer token")
        if not hmac.compare_digest(key.encode(), self._token.encode()):
            raise StoreAuthError("the bearer token is neither the access token of this server nor an attempt's key")
        return None

    async def _read(self, http: HttpRequest, content_type: str) -> Request:
        limit = self._max_body_bytes
        body = await receive_body(http.headers, http.receive, limit, "send fewer spans at once")
        coding = http.headers.get("content-encoding", "")
        if len(body) <= INLINE_BYTES:
            body, coding = await decompress(body, coding, limit), ""
            if len(body) <= INLINE_BYTES:
                return decode(body, content_type)
        async with self._large:
            body = await decompress(body, coding, limit)
            return await asyncio.to_thread(decode, body, content_type)

    # -- spans -------------------------------------------------------------------------------------------------------

    async def store_spans(self, request: Request, caller: AttemptIds | None = None) -> Counter[str]:
        """Store the spans of a request. Returns the number of rejected spans by reason. `caller` is the attempt whose
        key the request carried."""
        rejected, spans = request.refused, request.spans
        if caller is not None:  # Agents may not set all attributes; what comes after the end of the attempt is marked.
            late = late_mark(await self._store.get_attempt(caller[1]))
            spans = [replace(span, attributes={**agent_attributes(span.attributes), **late}) for span in spans]
        attributed, unattributed = await self._resolve(spans, caller, rejected)
        if unattributed and self._adopts:
            attributed += await self._unknown.adopt(unattributed)
        elif unattributed:
            rejected["it names no rollout: send agentlightning.rollout_id and agentlightning.attempt_id as resource or "
                    "span attributes, or start the server with --adopt-traces"] += len(unattributed)  # fmt: skip
        accepted = await self._add(_spans(attributed), rejected)
        await self._unknown.record(decoded for _, decoded in attributed)
        self.counts.update(requests=1, accepted=accepted, refused=rejected.total(), repaired=request.repaired)
        return rejected

    async def _add(self, spans: Sequence[Span], rejected: Counter[str]) -> int:
        """Add the spans, and the valid ones if some are invalid. Returns the number of spans added."""
        if not spans:
            return 0
        try:
            await self._store.add_many_spans(spans)
            return len(spans)
        except (NotFoundError, ConflictError, ConfigError) as error:
            attempts = {(span.rollout_id, span.attempt_id) for span in spans}
            if len(spans) == 1 or (len(attempts) == 1 and isinstance(error, NotFoundError)):
                rejected[str(error)] += len(spans)
                return 0
        middle = len(spans) // 2
        return await self._add(spans[:middle], rejected) + await self._add(spans[middle:], rejected)

    # -- their attempts ------------------------------------------------------------------------------------------------

    async def _resolve(
        self, spans: Sequence[Span], caller: AttemptIds | None, rejected: Counter[str]
    ) -> tuple[list[tuple[AttemptIds, Span]], list[Span]]:
        """(spans with their attempts, in order, spans without one). Counts spans that must be rejected in `rejected`,
        by reason."""
        known: dict[NamedIds | None, AttemptIds | str | None] = {}
        named: list[tuple[Span, AttemptIds | str | None]] = []
        for span in spans:
            given = _named_ids(span.attributes) or _named_ids(span.resource)
            if given not in known:
                ids = await self._complete(*given) if given else None
                if caller is not None and ids not in (None, caller):
                    ids = f"the key is that of attempt {caller[1]!r}, which may not send spans of another"
                known[given] = ids or caller
            named.append((span, known[given]))
        traces = {span.trace_id: ids for span, ids in named if isinstance(ids, tuple)}
        unnamed = {span.trace_id for span, ids in named if ids is None} - traces.keys()
        by_trace = traces | {trace_id: await self._by_trace(trace_id) for trace_id in unnamed}
        attributed: list[tuple[AttemptIds, Span]] = []
        unattributed: list[Span] = []
        for span, ids in named:
            ids = by_trace[span.trace_id] if ids is None else ids
            if isinstance(ids, tuple):
                attributed.append((ids, span))
            elif ids is None:
                unattributed.append(span)
            else:
                rejected[ids] += 1
        for trace_id, ids in traces.items():
            self._owners.note(trace_id, ids, by_token=caller is None)
        return attributed, unattributed

    async def _complete(self, rollout_id: str | None, attempt_id: str | None) -> AttemptIds | str | None:
        """Both ids, or the reason why there are none; None if no id is given."""
        if rollout_id is not None and attempt_id is not None:
            return rollout_id, attempt_id
        if attempt_id is not None:
            return await self._of_attempt(attempt_id) or f"no attempt {attempt_id!r} in this store"
        if rollout_id is None:
            return None
        try:
            attempt = await self._store.get_latest_attempt(rollout_id)
        except NotFoundError as error:
            return str(error)
        return f"rollout {rollout_id!r} has no attempt yet" if attempt is None else (rollout_id, attempt.attempt_id)

    async def _of_attempt(self, attempt_id: str) -> AttemptIds | None:
        ids = self._rollouts.get(attempt_id)
        if ids is None and (attempt := await self._store.get_attempt(attempt_id)) is not None:
            ids = attempt.rollout_id, attempt_id
            if len(self._rollouts) >= CACHED:
                self._rollouts.clear()
            self._rollouts[attempt_id] = ids
        return ids

    async def _by_trace(self, trace_id: str) -> AttemptIds | None:
        """The attempt of a trace. No claim can override the attempt from which the trace id was made; what holders of
        the access token sent takes precedence over claims of attempts."""
        attempt_id = attempt_of_trace(trace_id)
        if attempt_id is not None and (ids := await self._of_attempt(attempt_id)) is not None:
            return ids
        return self._owners.find(trace_id)


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
