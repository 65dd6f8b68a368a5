"""Server-sent events in every dialect: a decoder for providers' streams, an encoder for ours, and the JSON inside."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from agentlightning.errors import AgentLightningError
from agentlightning.tracing.agent_spans import valid_text
from agentlightning.util.json_values import dumps
from agentlightning.util.json_values import loads as read_json_values

MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
"""Limit for one event. The last event of a response repeats all of it, including images in base64."""
DONE: Final = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams of chunks."""
_BOM: Final = b"\xef\xbb\xbf"
_LINE_END: Final = rb"(?:\r\n|\n|\r(?=[^\n]))"
_END: Final = re.compile(_LINE_END * 2)
"""The blank line that ends an event. A CR at the end of the data may be the first half of a CRLF."""
_OVERLAP: Final = 4


class EventTooLongError(AgentLightningError):
    """An event of a stream that does not end."""


class SSEDecoder:
    """Splits the bytes of a stream into events, in time linear in the bytes however they are chunked."""

    __slots__ = ("_limit", "_parts", "_size", "_tail")

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._tail = b""
        """The last bytes received: the end of an event may start there."""

    def feed(self, more: bytes) -> list[bytes]:
        """The events completed by `more`, each with the blank line that ends it. Raises EventTooLongError."""
        found: list[bytes] = []
        if not self._parts:
            rest = _split(more, found)
        elif _END.search(self._tail + more):
            rest = _split(b"".join([*self._parts, more]), found)
        else:
            self._buffer(more)
            return found
        self._parts, self._size, self._tail = [], 0, b""
        if rest:
            self._buffer(rest)
        return found

    def _buffer(self, more: bytes) -> None:
        self._parts.append(more)
        self._size += len(more)
        self._tail = (self._tail + more[-_OVERLAP:])[-_OVERLAP:]
        if self._size > self._limit:
            raise EventTooLongError(f"an event of its stream has more than {self._limit} bytes")

    @property
    def rest(self) -> bytes:
        """The received part of the next event."""
        return b"".join(self._parts)


def _split(data: bytes, found: list[bytes]) -> bytes:
    """Append the complete events of `data` to `found` and return the remainder."""
    start = 0
    if b"\r" in data:
        for match in _END.finditer(data):
            found.append(data[start : match.end()])
            start = match.end()
        return data[start:]
    while (end := data.find(b"\n\n", start) + 2) > 1:
        found.append(data[start:end])
        start = end
    return data[start:]


def encode_event(data: Mapping[str, Any], event: str = "") -> bytes:
    """One event with JSON data, named `event` in the dialects that name their events."""
    name = b"event: %b\n" % event.encode() if event else b""
    return b"%bdata: %b\n\n" % (name, dumps(data))


def event_data(event: bytes) -> Any:
    """The JSON of an event; None for events without JSON, such as `[DONE]` and comments. An event without data, or with
    `null`, is an object without fields."""
    try:
        if event.startswith(b"data: {") and event.find(b"\n") == len(event) - 2:  # nearly all
            return loads(event[6:])
        lines = [line[5:].strip() for line in event.removeprefix(_BOM).splitlines() if line.startswith(b"data:")]
        data = b"\n".join(lines)
        return (loads(data) if data else None) or {} if lines else None
    except ValueError:
        return None


def loads(data: bytes) -> Any:
    """Parse a provider's JSON, also after a byte order mark. Half a surrogate pair, which orjson rejects, becomes
    U+FFFD. Raises ValueError."""
    data = data.removeprefix(_BOM)
    try:
        return read_json_values(data)
    except orjson.JSONDecodeError:
        if b"\\u" not in data:
            raise
    try:
        text = json.dumps(json.loads(data, parse_constant=_reject), ensure_ascii=False)
        return read_json_values(valid_text(text).encode())
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None


def _reject(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
