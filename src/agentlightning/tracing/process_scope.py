"""The attempt that a whole process runs for, and the way of its spans to the store.

A command that the runner or `agl run` starts, and a process that an agent starts, find the URL and the key of their
attempt in the environment. What they emit is posted to the server that the URL names, as OTLP, before `emit_*` returns:
a reward is in the store before the program can make its next call, and nothing is lost when it exits.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Final
from urllib.parse import unquote, urlsplit

from agentlightning.rollouts import trace_id_of
from agentlightning.span import Span, new_trace_id
from agentlightning.tracing.scope import Scope

logger = logging.getLogger(__name__)

EVENT_URL: Final = "AGL_EVENT_URL"
KEY: Final = "AGL_KEY"
TIMEOUT_SECONDS: Final = 10.0
PAUSES: Final = (0.0, 0.1, 0.5, 2.0)
"""Seconds before each try: a server that is away for longer than that loses what is emitted meanwhile."""
_EVENTS: Final = re.compile(r"^(https?://.+?)/(?:api/rollouts|rollout)/([^/]+)/attempt/([^/]+)/events/?$")


def scope_of_environment() -> Scope | None:
    """The scope of this process; None where its own environment names no attempt. What an attempt that shares the
    process with others has in *its* environment is not looked at."""
    url, key = _variable(EVENT_URL), _variable(KEY)
    return _scope_of(url, key) if url and key else None


def _variable(name: str) -> str:
    # Not `os.environ`, which a runner's host reads through the environment of the current attempt.
    values: dict[bytes, bytes] | None = getattr(os, "environb", None)
    return os.environ.get(name, "") if values is None else os.fsdecode(values.get(os.fsencode(name), b""))


@cache
def _scope_of(url: str, key: str) -> Scope | None:
    match = _EVENTS.match(url)
    if match is None:
        return None
    address, rollout_id, attempt_id = match[1], unquote(match[2]), unquote(match[3])
    trace_id = trace_id_of(attempt_id) or new_trace_id()
    sink = PostingSink(address, key)
    return Scope(rollout_id, attempt_id, sink, trace_id=trace_id, address=address, key=key)


class PostingSink:
    """Posts spans to the server at `address` with the key of their attempt, in the thread that emits them. What the
    server refuses, or what it is not there to take, is dropped with one warning."""

    def __init__(self, address: str, key: str) -> None:
        self._address = address
        self._url = urlsplit(address)
        self._key = key
        self._lock = threading.Lock()
        self._connection: HTTPConnection | None = None
        self._process = os.getpid()
        self._warned = False

    def put(self, spans: Sequence[Span]) -> None:
        from agentlightning.tracing.otlp import encode  # protobuf, which most programs never need

        body = encode.encode(spans).SerializeToString()
        if os.getpid() != self._process:  # the parent may hold the lock, and speaks on the connection
            self._lock, self._connection, self._process = threading.Lock(), None, os.getpid()
        with self._lock:
            problem = self._post(body)
        if problem and not self._warned:
            self._warned = True
            logger.warning("%d spans could not be sent to %s: %s", len(spans), self._address, problem)

    def _post(self, body: bytes) -> str:
        """What is wrong; nothing where the server has taken it."""
        problem = ""
        for pause in PAUSES:
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
