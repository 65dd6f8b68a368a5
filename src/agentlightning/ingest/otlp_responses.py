"""Encodes the responses of the OTLP receiver: partial success and errors, in protobuf or JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import orjson
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.responses import Response

from agentlightning.errors import AgentLightningError, ConfigError, StoreAuthError, StoreClosedError, StoreFullError
from agentlightning.util.decompression import CodingError

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"


class OtlpRequestError(AgentLightningError):
    """A request that cannot be served, with the HTTP status of the response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


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
    if content_type == PROTOBUF:
        return Response(_status_message(code, message), status, headers, PROTOBUF)
    body: dict[str, Any] = {"error": {"type": type(error).__name__.lstrip("_"), "message": message}, "detail": message}
    return Response(orjson.dumps({"code": code, "message": message, **body}), status, headers, JSON)


def _status(error: AgentLightningError) -> int:
    if isinstance(error, OtlpRequestError | CodingError):
        return error.status
    if isinstance(error, StoreAuthError):
        return 401
    if isinstance(error, ConfigError):
        return 400
    return 503 if isinstance(error, StoreFullError | StoreClosedError) else 500


def _status_message(code: int, message: str) -> bytes:
    """A google.rpc.Status in protobuf, with the code in field 1 and the message in field 2."""
    text = message.encode()
    size, length = len(text), b""
    while size >= 0x80:
        length += bytes((size & 0x7F | 0x80,))
        size >>= 7
    return bytes((0x08, code, 0x12)) + length + bytes((size,)) + text
