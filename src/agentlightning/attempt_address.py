"""The identity of an attempt outside of the store: URL paths, signed API keys, request headers and trace ids."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from typing import Final
from urllib.parse import quote

from agentlightning.util.random_ids import random_bits

_attempt_id = re.compile(r"at-([0-9a-f]{24})")

ATTEMPT_HEADER: Final = "x-agentlightning-attempt"
"""Header with the key of the attempt that makes the call."""
WORK_HEADER: Final = "x-agentlightning-work-of"
"""Header of a call whose maker may work for any attempt, with one of the reasons below. Without a URL or key of an
attempt it is rejected."""
UNCERTAIN: Final = "uncertain"
"""A task or thread that serves several attempts."""
ENDED: Final = "ended"
"""One that has outlived the attempt that started it."""
JUDGE_HEADER: Final = "x-agentlightning-judge"
"""Header of calls made by a reward function: the id of the attempt that it scores."""
ROLLOUT_BAGGAGE: Final = "agentlightning.rollout_id"
ATTEMPT_BAGGAGE: Final = "agentlightning.attempt_id"
AGENT_BAGGAGE: Final = "agentlightning.agent"
"""Entries of the W3C `baggage` header."""


def attempt_path(rollout_id: str, attempt_id: str) -> str:
    """The URL path prefix of all endpoints of an attempt."""
    return f"/rollout/{rollout_id}/attempt/{attempt_id}"


def attempt_key(secret: str, rollout_id: str, attempt_id: str) -> str:
    """An API key of one attempt, signed with `secret`, so that agents cannot impersonate each other."""
    return sign(secret, f"{rollout_id}.{attempt_id}")


def sign(secret: str, body: str) -> str:
    """A text from which the body is read back, and which nobody else can make."""
    signature = hmac.new(secret.encode(), body.encode(), hashlib.sha256).hexdigest()[:24]
    return f"agl-{body}.{signature}"


def attempt_secret(token: str | None) -> str:
    """The signing secret of attempt keys, derived from the access token that a server and its runners share. An agent
    cannot derive other keys from its own. Without a token, it only prevents accidental mix-ups."""
    return hmac.new(b"agentlightning attempt keys", (token or "").encode(), hashlib.sha256).hexdigest()


def trace_id_of(attempt_id: str) -> str | None:
    """The W3C trace id of an attempt (32 hexadecimal digits), from which `attempt_of_trace` recovers the attempt id
    without a lookup. None for an id that the store did not generate."""
    if (match := _attempt_id.fullmatch(attempt_id)) is None:
        return None
    digits = match[1]
    return digits + hashlib.blake2b(digits.encode(), digest_size=4).hexdigest()


def attempt_trace_id(attempt_id: str) -> str:
    """`trace_id_of`, or a new trace id for an attempt id that the store did not generate."""
    return trace_id_of(attempt_id) or f"{random_bits(128):032x}"


def root_span_id_of(attempt_id: str) -> str | None:
    """The parent span id in TRACEPARENT (16 hexadecimal digits). No such span exists, so its children are root spans.
    None for an id that the store did not generate."""
    trace_id = trace_id_of(attempt_id)
    return None if trace_id is None else hashlib.blake2b(trace_id.encode(), digest_size=8).hexdigest()


def attempt_of_trace(trace_id: str) -> str | None:
    """The id of the attempt with this trace id, or None."""
    attempt_id = f"at-{trace_id[:24]}"
    return attempt_id if trace_id_of(attempt_id) == trace_id else None


def read_signed(secret: str, text: str) -> str | None:
    """The body of a text that `sign` made with the same secret, or None."""
    body = text.removeprefix("agl-").rpartition(".")[0]
    # As bytes: `compare_digest` accepts only ASCII strings, and keys come from clients.
    given, made = (each.encode(errors="replace") for each in (text, sign(secret, body)))
    return body if hmac.compare_digest(given, made) else None


def read_attempt_key(secret: str, key: str) -> tuple[str, str] | None:
    """(rollout_id, attempt_id) of a key that `attempt_key` made with the same secret, or None."""
    rollout_id, dot, attempt_id = (read_signed(secret, key) or "").partition(".")
    return (rollout_id, attempt_id) if dot and "." not in attempt_id else None


def key_url(server_url: str, key: str) -> str:
    """The OpenAI base URL for model calls of the attempt or worker that the key belongs to."""
    return f"{server_url.rstrip('/')}/key/{key}/v1"


def without_key(path: str) -> str:
    """A URL path as messages and logs may show it.

    >>> without_key("/key/agl-ro-1.at-1.5ab013/v1/nothing")
    '/key/.../v1/nothing'
    """
    return re.sub("(?<=/key/)[^/]+", "...", path)


def worker_path(worker_id: str) -> str:
    """The URL path prefix for model calls of the attempt that a worker is running."""
    return f"/worker/{quote(worker_id, safe='')}"


def worker_key(secret: str, worker_id: str) -> str:
    """An API key of one worker, signed with `secret`; valid for the attempts of that worker."""
    return sign(secret, f"worker-{base64.urlsafe_b64encode(worker_id.encode()).decode().rstrip('=')}")


def read_worker_key(secret: str, key: str) -> str | None:
    """The worker id of a key that `worker_key` made with the same secret, or None."""
    prefix, _, encoded = (read_signed(secret, key) or "").partition("-")
    if prefix != "worker" or not encoded or "." in encoded:
        return None
    try:
        return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
    except ValueError:
        return None
