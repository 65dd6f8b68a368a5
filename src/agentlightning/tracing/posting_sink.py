"""Posts spans to the server of their attempt over OTLP/HTTP, synchronously.

Used by programs and processes outside of the runner's agent hosts. Spans are posted before `emit_*` returns: a reward
is in the store before the program can make its next call, and nothing is lost when it exits.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Final
from urllib.parse import urlsplit

from agentlightning.span import Span

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS: Final = 10.0
RETRY_DELAYS_SECONDS: Final = (0.0, 0.1, 0.5, 2.0)
"""Delay before each attempt to post. Spans are dropped if the server is unreachable for longer."""


class PostingSink:
    """Posts spans to the server at `address` with the key of their attempt, in the thread that emits them. Spans
    that the server rejects or cannot receive are dropped, with one warning."""

    def __init__(self, address: str, key: str) -> None:
        self._address = address
        self._url = urlsplit(address)
        self._key = key
        self._lock = threading.Lock()
        self._connection: HTTPConnection | None = None
        self._process = os.getpid()
        self._warned = False

    def put(self, spans: Sequence[Span]) -> None:
        from agentlightning.tracing.otlp import encode  # imports protobuf, which most programs never need

        body = encode.encode(spans).SerializeToString()
        if os.getpid() != self._process:  # after a fork, lock and connection belong to the parent
            self._lock, self._connection, self._process = threading.Lock(), None, os.getpid()
        with self._lock:
            problem = self._post(body)
        if problem and not self._warned:
            self._warned = True
            logger.warning("%d spans could not be sent to %s: %s", len(spans), self._address, problem)

    def _post(self, body: bytes) -> str:
        """Post with retries; a description of the last problem, or "" if the server accepted the spans."""
        problem = ""
        for pause in RETRY_DELAYS_SECONDS:
            time.sleep(pause)
            try:
                status, answer = self._send(body)
            except (OSError, HTTPException) as error:
                self._close()
                problem = f"{type(error).__name__}: {error}"
                continue
            if status < 400:
                return ""
            problem = f"HTTP {status}: {answer[:200].decode(errors='replace')}"
            if status not in (429, 502, 503, 504):
                break
        return problem

    def _send(self, body: bytes) -> tuple[int, bytes]:
        if self._connection is None:
            kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
            self._connection = kind(self._url.hostname or "", self._url.port, timeout=TIMEOUT_SECONDS)
        headers = {"Content-Type": "application/x-protobuf", "Authorization": f"Bearer {self._key}"}
        self._connection.request("POST", f"{self._url.path}/v1/traces", body, headers)
        with self._connection.getresponse() as response:
            return response.status, response.read()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
