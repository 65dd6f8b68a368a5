"""Posts spans to the server of their attempt over OTLP/HTTP, synchronously.

Used by programs and processes outside of the runner's agent hosts. Spans are posted before `emit_*` returns: a reward
is in the store before the program can make its next call, and nothing is lost when it exits. While the server is away
they wait for as long as the runner does. What cannot be delivered then makes the program fail: an attempt must not
succeed without the reward that it was given.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Final
from urllib.parse import urlsplit

from agentlightning.attempt_variables import PATIENCE, PATIENCE_SECONDS
from agentlightning.errors import StoreServerError
from agentlightning.span import Span
from agentlightning.tracing.outbox import Tries

TIMEOUT_SECONDS: Final = 10.0


class PostingSink:
    """Posts spans to the server at `address` with the key of their attempt, in the thread that emits them. Spans that
    the server rejects, or cannot receive within `patience` seconds (AGL_PATIENCE, else 60), raise StoreServerError,
    and the program ends with a non-zero exit code even if it goes on."""

    def __init__(self, address: str, key: str, patience: float | None = None) -> None:
        self._address, self._url = address, urlsplit(address)
        self._headers = {"Content-Type": "application/x-protobuf", "Authorization": f"Bearer {key}"}
        self._patience = _patience() if patience is None else patience
        self._open()

    def _open(self) -> None:
        """After a fork, lock and connection belong to the parent."""
        self._lock, self._process = threading.Lock(), os.getpid()
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        self._connection = kind(self._url.hostname or "", self._url.port, timeout=TIMEOUT_SECONDS)

    def put(self, spans: Sequence[Span]) -> None:
        from agentlightning.tracing.otlp.encode import encode  # imports protobuf, which most programs never need

        body, tries = encode(spans).SerializeToString(), Tries(self._patience)
        if os.getpid() != self._process:
            self._open()
        with self._lock:
            problem = self._post(body, tries)
        if problem:
            names = ", ".join(sorted({span.name for span in spans}))
            lost = f"{len(spans)} spans ({names}) could not be sent to {self._address} and are lost: {problem}"
            _lost.append(lost)
            raise StoreServerError(lost)

    def _post(self, body: bytes, tries: Tries) -> str:
        """Post with retries; a description of the last problem, or "" if the server accepted the spans."""
        while True:
            try:
                status, answer = self._send(body)
            except (OSError, HTTPException) as error:
                self._connection.close()
                problem = f"{type(error).__name__}: {error}"
            else:
                if status < 400:
                    return _rejection(answer)
                problem = f"HTTP {status}: {answer[:200].decode(errors='replace')}"
                if status < 500 and status != 429:
                    return problem
            pause = tries.pause()
            if pause is None:
                return f"{problem} (for {self._patience:g} s, see {PATIENCE})"
            time.sleep(pause)

    def _send(self, body: bytes) -> tuple[int, bytes]:
        self._connection.request("POST", f"{self._url.path}/v1/traces", body, self._headers)
        with self._connection.getresponse() as response:
            return response.status, response.read()


def _patience() -> float:
    try:
        return float(os.environ[PATIENCE])
    except (KeyError, ValueError):
        return PATIENCE_SECONDS


def _rejection(answer: bytes) -> str:
    """What the server says of spans that it did not take; "" if it took all."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    partial = ExportTraceServiceResponse.FromString(answer).partial_success
    return f"{partial.rejected_spans} were rejected: {partial.error_message}" if partial.rejected_spans else ""


_lost: list[str] = []
"""What this program has emitted in vain."""


@atexit.register
def _fail_if_lost() -> None:
    """A program that handles the exception of `emit_*` and goes on fails as well."""
    if _lost:
        print(f"error: {_lost[-1]}", file=sys.stderr)  # noqa: T201  the traceback that the runner stores ends with it
        sys.stdout.flush()
        logging.shutdown()
        sys.stderr.flush()
        os._exit(1)
