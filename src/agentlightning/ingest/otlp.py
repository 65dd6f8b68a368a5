"""`POST /v1/traces`: OTLP over HTTP, from any OpenTelemetry SDK or collector, into the store.

Whose a span is: the attempt whose key the request carries; else the ids among its own attributes, then among its
resource's; else the attempt its trace id was made from; else those of another span of its trace. A span of nobody is
refused by name in `partial_success`, or kept as part of a session of its own (see `adopt.py`), as the receiver is told.

What the key of an attempt sends is an agent's word: it is kept without what only the gateway records, it is marked
where the attempt has ended, and a trace is the attempt's only as long as no other attempt says so too.

Answers are in the encoding of the request. A request is answered once its spans are durable; the statuses that
OpenTelemetry repeats (503) are given where repeating helps, and repeating is harmless: a span is known by its id.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import orjson
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.attempt_address import attempt_of_trace, read_attempt_key, root_span_id_of
from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    ConflictError,
    NotFoundError,
    StoreAuthError,
    StoreClosedError,
    StoreFullError,
)
from agentlightning.ingest.unknown_traces import Adopter
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.encoding import MAX_BODY_BYTES
from agentlightning.tracing.agent_spans import agent_attributes, late_mark
from agentlightning.tracing.otlp.decode import Decoded, Request, decode_json, decode_protobuf
from agentlightning.tracing.otlp.exporter import EXPORTER_HEADER, PROCESS_ID
from agentlightning.util.api_key import api_key
from agentlightning.util.decompression import CodingError, decompress, decompress_now

PATH: Final = "/v1/traces"
PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
INLINE_BYTES: Final = 512 * 1024
"""Larger bodies are read in a thread, so that the event loop goes on meanwhile."""
MAX_UNDER_WAY: Final = 4
"""Requests of more than INLINE_BYTES that are read at the same time; the others wait."""
REMEMBERED: Final = 16384
"""Traces and attempts whose owner is remembered."""

ROLLOUT_IDS: Final = ("agentlightning.rollout_id", "agl.rollout_id")
ATTEMPT_IDS: Final = ("agentlightning.attempt_id", "agl.attempt_id")

T = TypeVar("T")
Ids = tuple[str, str]
"""(rollout_id, attempt_id)."""
Names = tuple[str | None, str | None]
"""Those of them that are named."""
NOBODY: Final[Names] = (None, None)


class _HttpError(AgentLightningError):
    """A request that is answered with a status of its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Counts:
    """What came of the spans that were sent here."""

    requests: int = 0
    accepted: int = 0
    refused: int = 0


class OtlpReceiver:
    """Takes traces in. `secret` is the one the attempts' keys are made with, `token` the access token of the server;
    `adopt` keeps traces of nobody as rollouts of their own. Used with `async with` where it adopts: what is open is
    then taken up again at the start, and finished at the end."""

    def __init__(
        self,
        store: LightningStoreBase,
        secret: str,
        token: str | None = None,
        *,
        adopt: bool = False,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._store = store
        self._secret = secret
        self._token = token
        self._max_body_bytes = max_body_bytes
        self._owners = Owners(store)
        self._adopter = Adopter(store) if adopt else None
        self._large = asyncio.Semaphore(MAX_UNDER_WAY)
        self.counts = Counts()

    async def __aenter__(self) -> OtlpReceiver:
        if self._adopter is not None:
            await self._adopter.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._adopter is not None:
            await self._adopter.close()

    def routes(self) -> list[Route]:
        """For a Starlette application."""
        return [Route(PATH, self._post, methods=["POST"])]

    # -- what model calls say of traces --------------------------------------------------------------------------------

    async def owner_of(self, trace_id: str) -> Ids | None:
        """The attempt that a trace belongs to. Where traces of nobody are kept, an unknown one begins now."""
        known = await self._owners.by_trace(trace_id)
        return await self._adopter.begin(trace_id) if known is None and self._adopter is not None else known

    def claim(self, trace_id: str, ids: Ids) -> None:
        """An attempt has made a call within this trace: what else is recorded of it is the attempt's, unless two of
        them say so."""
        self._owners.claim(trace_id, ids)

    # -- HTTP --------------------------------------------------------------------------------------------------------

    async def _post(self, http: HttpRequest) -> Response:
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            caller = self._admit(http.headers)
            if kind not in (PROTOBUF, JSON):
                raise _HttpError(415, f"content-type={kind!r} is not understood; send {PROTOBUF} or {JSON}")
            request = await self._read(http, kind)
            refused = await self.take(request, caller)
        except ClientDisconnect:
            return Response(status_code=400)
        except AgentLightningError as error:
            return _refusal(error, kind)
        return _answer(refused, kind)

    def _admit(self, headers: Mapping[str, str]) -> Ids | None:
        """The attempt that speaks; None for whoever knows the token, and for anybody where there is none."""
        if headers.get(EXPORTER_HEADER) == PROCESS_ID:  # each span would come back for ever
            raise _HttpError(508, "this server sends its spans on to itself; give --otlp-export another address")
        key = api_key(headers)
        named = read_attempt_key(self._secret, key) if key.startswith("agl-") else None
        if named is not None:
            return named
        if self._token is None:
            if key.startswith("agl-"):
                raise StoreAuthError("the key is no attempt's of this server; use the AGL_KEY of the attempt")
            return None
        if not key:
            raise StoreAuthError("this server wants its access token, or the key of an attempt, as a bearer token")
        if not hmac.compare_digest(key.encode(), self._token.encode()):
            raise StoreAuthError("the bearer token is neither the access token of this server nor an attempt's key")
        return None

    async def _read(self, http: HttpRequest, kind: str) -> Request:
        body, coding = await self._body(http), http.headers.get("content-encoding", "")
        if len(body) > INLINE_BYTES:
            async with self._large:
                return await asyncio.to_thread(lambda: decode(decompress_now(body, coding, self._max_body_bytes), kind))
        content = await decompress(body, coding, self._max_body_bytes)
        if len(content) <= INLINE_BYTES:
            return decode(content, kind)
        async with self._large:
            return await asyncio.to_thread(decode, content, kind)

    async def _body(self, http: HttpRequest) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in http.stream():
            size += len(part)
            if size > self._max_body_bytes:
                raise _too_large(self._max_body_bytes)
            parts.append(part)
        return b"".join(parts)

    # -- spans -------------------------------------------------------------------------------------------------------

    async def take(self, request: Request, caller: Ids | None = None) -> Counter[str]:
        """Keep the spans of a request; returns why how many were refused. `caller` is the attempt that sent them,
        where it has said so with its key."""
        refused = request.refused
        spans = request.spans if caller is None else await self._of_agent(request.spans, caller)
        owned, lost = await self._owners.find(spans, caller, refused)
        if lost and self._adopter is not None:
            owned += await self._adopter.adopt(lost)
        elif lost:
            refused["it names no rollout: send agentlightning.rollout_id and agentlightning.attempt_id as resource or "
                    "span attributes, or start the server with --adopt-traces"] += len(lost)  # fmt: skip
        accepted = await self._keep(_spans(owned), refused)
        if self._adopter is not None:
            await self._adopter.heard(decoded for _, decoded in owned)
        self.counts.requests += 1
        self.counts.accepted += accepted
        self.counts.refused += refused.total()
        return refused

    async def _of_agent(self, spans: Sequence[Decoded], caller: Ids) -> list[Decoded]:
        """The spans as the agent of this attempt may write them."""
        late = late_mark(await self._store.get_attempt(caller[1]))
        return [span._replace(attributes={**agent_attributes(span.attributes), **late}) for span in spans]

    async def _keep(self, spans: Sequence[Span], refused: Counter[str]) -> int:
        """Add the spans; where some cannot be, those of other attempts can. Returns how many were kept."""
        if not spans:
            return 0
        try:
            await self._store.add_many_spans(spans)
            return len(spans)
        except (NotFoundError, ConflictError, ConfigError) as error:
            groups = _by_attempt(spans)
            if len(groups) == 1 and isinstance(error, NotFoundError):
                refused[str(error)] += len(spans)
                return 0
            if len(spans) == 1:
                refused[str(error)] += 1
                return 0
        parts = [[span] for span in spans] if len(groups) == 1 else groups
        return sum([await self._keep(part, refused) for part in parts])


def _by_attempt(spans: Sequence[Span]) -> list[list[Span]]:
    groups: dict[Ids, list[Span]] = {}
    for span in spans:
        groups.setdefault((span.rollout_id, span.attempt_id), []).append(span)
    return list(groups.values())


def _spans(owned: Iterable[tuple[Ids, Decoded]]) -> list[Span]:
    """The spans of their attempts. One whose parent is the stand-in that TRACEPARENT names has none."""
    roots: dict[str, str | None] = {}
    spans: list[Span] = []
    for ids, decoded in owned:
        root = roots.get(ids[1], "")
        if root == "":
            root = roots[ids[1]] = root_span_id_of(ids[1])
        if root is not None and decoded.parent_id == root:
            decoded = decoded._replace(parent_id=None)
        spans.append(Span(*ids, *decoded))
    return spans


# -- whose a span is -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Owners:
    """Finds the attempt each span belongs to, and remembers those of the latest traces."""

    store: LightningStoreBase
    traces: OrderedDict[str, Ids] = field(default_factory=OrderedDict[str, Ids])
    attempts: OrderedDict[str, Ids] = field(default_factory=OrderedDict[str, Ids])
    claims: OrderedDict[str, Ids | None] = field(default_factory=OrderedDict[str, "Ids | None"])
    """Traces that attempts have made calls in, or sent spans of; None where several have."""

    def claim(self, trace_id: str, ids: Ids) -> None:
        known = self.claims.get(trace_id, ids)
        _remember(self.claims, trace_id, ids if known == ids else None)

    async def find(
        self, spans: Sequence[Decoded], caller: Ids | None, refused: Counter[str]
    ) -> tuple[list[tuple[Ids, Decoded]], list[Decoded]]:
        """(spans with their owner, in order, spans of nobody). What cannot be kept is counted in `refused`."""
        named = await self._by_name(spans, caller)
        traces = {span.trace_id: owner for span, owner in named if isinstance(owner, tuple)}
        unnamed = {span.trace_id for span, owner in named if owner is None} - traces.keys()
        found = traces | {trace_id: await self.by_trace(trace_id) for trace_id in unnamed}
        owned: list[tuple[Ids, Decoded]] = []
        lost: list[Decoded] = []
        for span, owner in named:
            owner = found[span.trace_id] if owner is None else owner
            if isinstance(owner, tuple):
                owned.append((owner, span))
            elif owner is None:
                lost.append(span)
            else:
                refused[owner] += 1
        for trace_id, ids in traces.items():
            if caller is None:
                _remember(self.traces, trace_id, ids)
            else:
                self.claim(trace_id, ids)
        return owned, lost

    async def _by_name(self, spans: Sequence[Decoded], caller: Ids | None) -> list[tuple[Decoded, Ids | str | None]]:
        """Each span with the owner it names, None where it names none, or why it cannot have the one it names."""
        owners: dict[Names, Ids | str | None] = {}
        resources: dict[int, Names] = {}
        found: list[tuple[Decoded, Ids | str | None]] = []
        for span in spans:
            names = _names_in(span.attributes)
            if names is NOBODY:
                key = id(span.resource)
                if key not in resources:
                    resources[key] = _names_in(span.resource)
                names = resources[key]
            if names not in owners:
                owner = await self._resolve(*names)
                owners[names] = owner if caller is None else _as_caller(caller, owner)
            found.append((span, owners[names]))
        return found

    async def _resolve(self, rollout_id: str | None, attempt_id: str | None) -> Ids | str | None:
        """The ids in full, or why there are none; None where nothing is named."""
        if rollout_id is not None and attempt_id is not None:
            return rollout_id, attempt_id
        if attempt_id is not None:
            return await self._of_attempt(attempt_id) or f"no attempt {attempt_id!r} in this store"
        if rollout_id is None:
            return None
        try:
            attempt = await self.store.get_latest_attempt(rollout_id)
        except NotFoundError as error:
            return str(error)
        return f"rollout {rollout_id!r} has no attempt yet" if attempt is None else (rollout_id, attempt.attempt_id)

    async def _of_attempt(self, attempt_id: str) -> Ids | None:
        known = self.attempts.get(attempt_id)
        if known is None and (attempt := await self.store.get_attempt(attempt_id)) is not None:
            known = attempt.rollout_id, attempt_id
            _remember(self.attempts, attempt_id, known)
        return known

    async def by_trace(self, trace_id: str) -> Ids | None:
        """The attempt a trace belongs to. What its id says nobody can claim; whoever knows the access token comes
        before what attempts say."""
        attempt_id = attempt_of_trace(trace_id)
        if attempt_id is not None and (owner := await self._of_attempt(attempt_id)) is not None:
            return owner
        return self.traces.get(trace_id) or self.claims.get(trace_id)


def _names_in(attributes: Mapping[str, Any]) -> Names:
    """The rollout and the attempt that attributes name; NOBODY itself where they name none."""
    rollout_id = attributes.get(ROLLOUT_IDS[0]) or attributes.get(ROLLOUT_IDS[1])
    attempt_id = attributes.get(ATTEMPT_IDS[0]) or attributes.get(ATTEMPT_IDS[1])
    if rollout_id is None and attempt_id is None:
        return NOBODY
    return _text(rollout_id), _text(attempt_id)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _as_caller(caller: Ids, owner: Ids | str | None) -> Ids | str:
    if owner is None or owner == caller:
        return caller
    return f"the key is that of attempt {caller[1]!r}, which speaks for no other"


def _remember(known: OrderedDict[str, T], key: str, ids: T) -> None:
    known[key] = ids
    known.move_to_end(key)
    if len(known) > REMEMBERED:
        known.popitem(last=False)


# -- bodies ----------------------------------------------------------------------------------------------------------


def decode(body: bytes, kind: str) -> Request:
    """The spans of a body of this content type. Raises OtlpError."""
    now = time.time()
    return decode_json(body, now) if kind == JSON else decode_protobuf(body, now)


def _too_large(limit: int) -> _HttpError:
    return _HttpError(413, f"the body is larger than {limit} bytes; send fewer spans at once")


def _answer(refused: Counter[str], kind: str) -> Response:
    reason = "; ".join(f"{count} refused: {why}" for why, count in refused.most_common(5))
    count = refused.total()
    if kind == JSON:
        partial = {"partialSuccess": {"rejectedSpans": str(count), "errorMessage": reason}} if count else {}
        return Response(orjson.dumps(partial), media_type=JSON)
    answer = ExportTraceServiceResponse()
    if count:
        answer.partial_success.rejected_spans = count
        answer.partial_success.error_message = reason
    return Response(answer.SerializeToString(), media_type=PROTOBUF)


_CODES: Final = {400: 3, 401: 16, 413: 8, 415: 3, 503: 14}
"""HTTP status -> code of google.rpc.Status, in which OTLP describes errors."""


def _refusal(error: AgentLightningError, kind: str) -> Response:
    status, message = _status(error), str(error)
    headers = {401: {"www-authenticate": 'Bearer realm="agentlightning"'}, 503: {"retry-after": "1"}}.get(status)
    code = _CODES.get(status, 13)
    if kind == PROTOBUF:
        return Response(_status_message(code, message), status, headers, PROTOBUF)
    body: dict[str, Any] = {"error": {"type": type(error).__name__.lstrip("_"), "message": message}, "detail": message}
    return Response(orjson.dumps({"code": code, "message": message, **body}), status, headers, JSON)


def _status(error: AgentLightningError) -> int:
    if isinstance(error, _HttpError | CodingError):
        return error.status
    if isinstance(error, StoreAuthError):
        return 401
    if isinstance(error, ConfigError):
        return 400
    return 503 if isinstance(error, StoreFullError | StoreClosedError) else 500


def _status_message(code: int, message: str) -> bytes:
    """A google.rpc.Status in protobuf: the code is field 1, the message field 2."""
    text = message.encode()
    size, length = len(text), b""
    while size >= 0x80:
        length += bytes((size & 0x7F | 0x80,))
        size >>= 7
    return bytes((0x08, code, 0x12)) + length + bytes((size,)) + text
