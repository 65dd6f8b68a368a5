"""Exports the spans of a store to an OTLP endpoint, such as Jaeger, Phoenix, Langfuse or a collector.

    exporter = OtlpExporter("http://127.0.0.1:4318")
    store = observed(LightningStore(), [exporter])          # from agentlightning.store.instrumented
    ...
    exporter.close()

An `Outbox` sends gzipped batches, and repeats those that failed after growing pauses, or as the endpoint's Retry-After
says. Exporting never delays or fails the writer of spans.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import httpx

from agentlightning.errors import ConfigError
from agentlightning.span import Span
from agentlightning.tracing.otlp.codec import EXPORTER_HEADER, PROCESS_ID, encode, rejected_spans
from agentlightning.tracing.outbox import Outbox, Unavailable
from agentlightning.transport.base import retry_after
from agentlightning.util.printable import shown_url

RETRYABLE_STATUSES: Final = frozenset({429, 502, 503, 504})
"""Statuses that the OTLP specification calls retryable."""
HEADERS: Final = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
_OWN_HEADERS: Final = {
    "content-type": "application/x-protobuf",
    "content-encoding": "gzip",
    EXPORTER_HEADER: PROCESS_ID,
}


class _TooLargeError(Exception):
    """The endpoint takes no body of this size."""


class OtlpExporter(Outbox[Span]):
    """Sends spans to an OTLP/HTTP endpoint. Pass it to `observed(store, [exporter])`, or `put` spans directly.

    endpoint: its base URL, or the full one that ends in /v1/traces. headers: sent with every request, as a mapping or
    as `name=value,...`; by default those of OTEL_EXPORTER_OTLP_HEADERS and OTEL_EXPORTER_OTLP_TRACES_HEADERS. A batch
    is sent when it is full or its first span is `delay_seconds` old, and dropped after `patience` seconds. Raises
    ConfigError for an invalid endpoint or invalid headers.
    """

    rejections = (ValueError, TypeError, ArithmeticError, RecursionError, _TooLargeError)
    """Mostly of encoding a span that OTLP cannot represent."""

    def __init__(
        self,
        endpoint: str,
        *,
        headers: Mapping[str, str] | str | None = None,
        batch_size: int = 512,
        delay_seconds: float = 1.0,
        queue_size: int = 20_000,
        patience: float = 300.0,
        timeout_seconds: float = 10.0,
    ) -> None:
        self.url = traces_url(endpoint)
        self._headers = _headers(headers) | _OWN_HEADERS
        self._timeout = timeout_seconds
        super().__init__(
            self.url,
            patience=patience,
            batch=batch_size,
            linger=delay_seconds,
            capacity=queue_size,
            thread="agl-otlp-export",
        )

    def on_start(self, method: str) -> None:
        """Observer method: a store call has started."""

    def on_end(self, call: Any) -> None:
        """Observer method: a store call (`CallRecord`) has ended. Queues the spans that it stored."""
        if call.spans:
            self.put(call.spans)

    async def run(self) -> None:
        async with httpx.AsyncClient(headers=self._headers, timeout=self._timeout) as self._client:
            await super().run()

    async def send(self, batch: list[Span]) -> int:
        try:
            answer = await self._client.post(self.url, content=gzip.compress(encode(batch).SerializeToString(), 1))
        except httpx.RequestError as error:
            raise Unavailable(f"the endpoint is unreachable: {type(error).__name__}: {error}") from error
        if answer.status_code in RETRYABLE_STATUSES:
            headers = [(name.lower(), value) for name, value in answer.headers.raw]
            raise Unavailable(f"the endpoint is overloaded: {_describe(answer)}", retry_after(headers))
        if answer.status_code == 413 and len(batch) > 1:
            raise _TooLargeError
        refused, why = (0, "") if answer.is_success else (len(batch), _describe(answer))
        if answer.is_success and answer.headers.get("content-type", "").startswith("application/x-protobuf"):
            refused, why = rejected_spans(answer.content) or (0, "")
        if refused:
            self.warn(f"{refused} spans for {self.name} were rejected: {why}")
        return refused


def traces_url(endpoint: str) -> str:
    """The URL to post traces to. Raises ConfigError for an invalid endpoint."""
    parts = urlsplit(endpoint)
    try:
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the port
        valid = False
    if not valid:
        raise ConfigError(
            f"{shown_url(endpoint)!r} is not an OTLP/HTTP endpoint; use a URL such as http://127.0.0.1:4318"
        )
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith("/v1/traces") else f"{path}/v1/traces").geturl()


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


def _describe(answer: httpx.Response) -> str:
    valid_text = answer.headers.get("content-type", "").startswith(("text/", "application/json"))
    return f"it answered {answer.status_code} {answer.reason_phrase} {answer.text[:200] if valid_text else ''}".strip()
