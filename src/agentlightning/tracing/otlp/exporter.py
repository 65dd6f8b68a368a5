"""Exports the spans of a store to an OTLP endpoint, such as Jaeger, Phoenix, Langfuse or a collector.

    exporter = OtlpExporter("http://127.0.0.1:4318")
    store = observed(LightningStore(), [exporter])          # from agentlightning.store.instrumented
    ...
    exporter.close()

Spans wait in a bounded queue; a thread sends them in gzipped batches and retries failed batches with exponential
backoff, or as the endpoint's Retry-After says. Exporting never delays or fails the writer of spans: spans that do not
fit into the queue or cannot be delivered are counted, with one warning.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final, Protocol, Self
from urllib.parse import SplitResult, unquote, urlsplit

import httpx
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from agentlightning.errors import ConfigError
from agentlightning.span import Span
from agentlightning.tracing.otlp.encode import encode

logger = logging.getLogger(__name__)

RETRYABLE_STATUSES: Final = frozenset({429, 502, 503, 504})
"""Statuses that the OTLP specification calls retryable."""
ENCODING_ERRORS: Final = (ValueError, TypeError, ArithmeticError, RecursionError)
"""Errors of encoding a span that OTLP cannot represent."""
FIRST_DELAY_SECONDS: Final = 0.5
MAX_DELAY_SECONDS: Final = 30.0
EXPORTER_HEADER: Final = "agentlightning-exporter"
"""Request header with the id of the exporting process."""
PROCESS_ID: Final = secrets.token_hex(8)
HEADERS: Final = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")


@dataclass(slots=True)
class ExportCounts:
    """Numbers of exported spans, by outcome."""

    sent: int = 0
    dropped: int = 0
    """The queue was full, or they could not be delivered in time."""
    refused: int = 0
    """The endpoint rejected them."""


class _Call(Protocol):
    """A finished store call, as reported by `agentlightning.store.instrumented`."""

    @property
    def spans(self) -> Sequence[Span]: ...


class OtlpExporter:
    """Sends spans to an OTLP/HTTP endpoint. Pass it to `observed(store, [exporter])`, or `put` spans directly.

    endpoint: its base URL, or the full one that ends in /v1/traces. headers: sent with every request, as a mapping or
    as `name=value,...`; by default those of OTEL_EXPORTER_OTLP_HEADERS and OTEL_EXPORTER_OTLP_TRACES_HEADERS. tokens:
    send token ids and log-probabilities too. A batch is sent when it is full or its first span is `delay_seconds` old,
    and dropped after `patience_seconds`. Raises ConfigError for an invalid endpoint or invalid headers.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        headers: Mapping[str, str] | str | None = None,
        tokens: bool = False,
        batch_size: int = 512,
        delay_seconds: float = 1.0,
        queue_size: int = 20_000,
        patience_seconds: float = 300.0,
        timeout_seconds: float = 10.0,
    ) -> None:
        self.url = traces_url(endpoint)
        self.counts = ExportCounts()
        self._headers = _headers(headers)
        self._tokens = tokens
        self._batch_size, self._delay = batch_size, delay_seconds
        self._queue_size, self._patience, self._timeout = queue_size, patience_seconds, timeout_seconds
        self._queue: deque[Span] = deque()
        self._changed = threading.Condition()
        self._deadline: float | None = None
        """Deadline of `close` (monotonic seconds); None before."""
        self._warned = False
        self._thread: threading.Thread | None = None

    # -- queueing ---------------------------------------------------------------------------------------------------

    def put(self, spans: Sequence[Span]) -> None:
        """Queue spans as far as there is room. Never blocks, never raises."""
        with self._changed:
            if self._deadline is not None:
                taken = 0
            else:
                taken = min(len(spans), max(0, self._queue_size - len(self._queue)))
                was_short = len(self._queue) < self._batch_size
                self._queue.extend(spans[:taken])
                if taken and self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="agl-otlp-export", daemon=True)
                    self._thread.start()
                if was_short:
                    self._changed.notify()
        if taken < len(spans):
            self._drop(len(spans) - taken, f"{self._queue_size} spans are queued already")

    def on_start(self, method: str) -> None:
        """Observer method: a store call has started."""

    def on_end(self, call: _Call) -> None:
        """Observer method: a store call has ended. Queues the spans that it stored."""
        if call.spans:
            self.put(call.spans)

    # -- closing ----------------------------------------------------------------------------------------------------

    def close(self, timeout: float = 5.0) -> bool:
        """Send the queued spans within `timeout` seconds; False if some could not be sent. Idempotent."""
        with self._changed:
            if self._deadline is None:
                self._deadline = time.monotonic() + timeout
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout + 0.5)
        with self._changed:
            left = len(self._queue)
            self._queue.clear()
        if left:
            self._drop(left, f"not sent within {timeout:g} s of closing")
        return left == 0 and not (self._thread and self._thread.is_alive())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with httpx.Client(headers=self._headers, timeout=self._timeout) as client:
            while batch := self._next_batch():
                try:
                    self._send(client, batch)
                except Exception as error:  # noqa: BLE001  the thread's boundary: the next batch is another's
                    self._drop(len(batch), f"{type(error).__name__}: {error}")

    def _next_batch(self) -> list[Span]:
        """Wait for a full batch or the delay, and take it; empty when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._deadline is not None)
            self._changed.wait_for(
                lambda: len(self._queue) >= self._batch_size or self._deadline is not None, self._delay
            )
            if self._deadline is not None and time.monotonic() > self._deadline:
                return []
            return [self._queue.popleft() for _ in range(min(self._batch_size, len(self._queue)))]

    def _send(self, client: httpx.Client, batch: list[Span]) -> None:
        try:
            body = self._encoded(batch)
        except ENCODING_ERRORS:
            encodable = [span for span in batch if self._is_encodable(span)]
            if len(encodable) == len(batch):
                self._send_halves(client, batch)
            elif encodable:
                self._send(client, encodable)
            return
        start, pause = time.monotonic(), FIRST_DELAY_SECONDS
        while True:
            answer = self._post(client, body)
            if isinstance(answer, httpx.Response) and answer.status_code not in RETRYABLE_STATUSES:
                self._handle_response(client, batch, answer)
                return
            wanted = _retry_after(answer) if isinstance(answer, httpx.Response) else None
            wait = pause * random.uniform(0.8, 1.2) if wanted is None else wanted
            if not self._wait(wait, start + self._patience):
                self._drop(len(batch), f"{self.url} is unreachable or overloaded: {_describe(answer)}")
                return
            pause = min(2 * pause, MAX_DELAY_SECONDS)

    def _send_halves(self, client: httpx.Client, batch: list[Span]) -> None:
        middle = len(batch) // 2
        self._send(client, batch[:middle])
        self._send(client, batch[middle:])

    def _encoded(self, batch: Sequence[Span]) -> bytes:
        return gzip.compress(encode(batch, tokens=self._tokens).SerializeToString(), compresslevel=1)

    def _is_encodable(self, span: Span) -> bool:
        """Whether a span can be encoded; drops it otherwise."""
        try:
            self._encoded([span])
        except ENCODING_ERRORS as error:
            self._drop(1, f"OTLP cannot represent it: {error}")
            return False
        return True

    def _post(self, client: httpx.Client, body: bytes) -> httpx.Response | httpx.RequestError:
        try:
            headers = {
                "content-type": "application/x-protobuf",
                "content-encoding": "gzip",
                EXPORTER_HEADER: PROCESS_ID,
            }
            return client.post(self.url, content=body, headers=headers)
        except httpx.RequestError as error:
            return error

    def _wait(self, seconds: float, until: float) -> bool:
        """Sleep before a retry; False if the deadline would pass."""
        with self._changed:
            closing = self._deadline is not None
            seconds = min(seconds, max(0.0, until - time.monotonic()))
            self._changed.wait_for(lambda: self._deadline is not None and not closing, seconds)
            limit = until if self._deadline is None else min(until, self._deadline)
            return time.monotonic() < limit

    def _handle_response(self, client: httpx.Client, batch: list[Span], answer: httpx.Response) -> None:
        if answer.status_code == 413 and len(batch) > 1:
            self._send_halves(client, batch)
        elif answer.is_success:
            refused, why = _rejected(answer)
            self.counts.sent += len(batch) - refused
            if refused:
                self._refuse(refused, why)
            else:
                self._warned = False
        else:
            self._refuse(len(batch), _describe(answer))

    # -- failures ----------------------------------------------------------------------------------------------------

    def _drop(self, count: int, why: str) -> None:
        with self._changed:
            self.counts.dropped += count
        self._warn_once("dropped", count, why)

    def _refuse(self, count: int, why: str) -> None:
        self.counts.refused += count
        self._warn_once("were rejected", count, why)

    def _warn_once(self, what: str, count: int, why: str) -> None:
        """Warn once until a batch is delivered again."""
        if not self._warned:
            self._warned = True
            logger.warning("%d spans for %s %s: %s; further ones are only counted", count, self.url, what, why)


def traces_url(endpoint: str) -> str:
    """The URL to post traces to. Raises ConfigError for an invalid endpoint."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or not _has_port(parts):
        raise ConfigError(f"{endpoint!r} is not an OTLP/HTTP endpoint; use a URL such as http://127.0.0.1:4318")
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith("/v1/traces") else f"{path}/v1/traces").geturl()


def _has_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False


def _headers(given: Mapping[str, str] | str | None) -> dict[str, str]:
    if given is None:
        found: dict[str, str] = {}
        for name in HEADERS:
            found |= _parse_headers(os.environ.get(name, ""), name)
    else:
        found = _parse_headers(given, "headers") if isinstance(given, str) else dict(given)
    for name, value in found.items():
        if not (name + value).isascii() or not (name + value).isprintable():
            raise ConfigError(f"the header {name!r} has a value that cannot be sent; use printable ASCII")
    return found


def _parse_headers(text: str, what: str) -> dict[str, str]:
    """Parse `name=value,...` with percent-encoded values, as OpenTelemetry defines it."""
    headers: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{what} has a part without a name or a value; write it as name=value,name=value")
        headers[unquote(name.strip()).lower()] = unquote(value.strip())
    return headers


def _retry_after(answer: httpx.Response) -> float | None:
    """Seconds of a Retry-After header, given as a number or a date."""
    value = answer.headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def _rejected(answer: httpx.Response) -> tuple[int, str]:
    """Number of rejected spans of a request, and the reason."""
    if answer.headers.get("content-type", "").partition(";")[0] != "application/x-protobuf":
        return 0, ""
    try:
        partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
    except DecodeError:
        return 0, ""
    return partial.rejected_spans, partial.error_message


def _describe(answer: httpx.Response | Exception) -> str:
    if not isinstance(answer, httpx.Response):
        return f"{type(answer).__name__}: {answer}"
    valid_text = answer.headers.get("content-type", "").startswith(("text/", "application/json"))
    return f"it answered {answer.status_code} {answer.reason_phrase} {answer.text[:200] if valid_text else ''}".strip()
