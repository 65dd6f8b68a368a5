"""Reads the claims of a request about its caller from its URL and headers, and verifies the keys among them.

Needs no store; `attribution` resolves the claims that do.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple
from urllib.parse import urlsplit

from msgspec import Struct

from agentlightning.attempt_address import (
    ATTEMPT_BAGGAGE,
    ATTEMPT_HEADER,
    ENDED,
    JUDGE_HEADER,
    ROLLOUT_BAGGAGE,
    UNCERTAIN,
    WORK_HEADER,
    attempt_of_trace,
    attempt_secret,
    read_attempt_key,
    read_worker_key,
)
from agentlightning.attempt_variables import PLACEHOLDER
from agentlightning.gateway.callers.agents import read_baggage
from agentlightning.gateway.callers.attempts import AttemptIds
from agentlightning.gateway.errors import ApiError
from agentlightning.transport.proxy import is_this_machine
from agentlightning.util.api_key import api_key

_TRACEPARENT: Final = re.compile(r"^[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")

Source = Literal["header", "url", "key", "trace", "baggage", "worker"]
"""The part of a request that names its attempt."""


class Hint(NamedTuple):
    """A claim without proof, from the trace or the baggage."""

    source: Source
    rollout_id: str | None
    attempt_id: str | None

    def matches(self, ids: AttemptIds) -> bool:
        return self.rollout_id in (None, ids[0]) and self.attempt_id in (None, ids[1])

    def __str__(self) -> str:
        return f"{self.attempt_id or self.rollout_id} of the {self.source}"


@dataclass(frozen=True, slots=True)
class KeyClaims:
    """What the API key proves."""

    attempt: AttemptIds | None = None
    worker_id: str | None = None

    def __bool__(self) -> bool:
        return self.attempt is not None or self.worker_id is not None


class RequestClaims(Struct, frozen=True):
    """All claims of a request about its caller."""

    mode: str | None
    temperature: float | None
    key: KeyClaims
    attempt: AttemptIds | None
    """The attempt that the header, the URL or the key names."""
    source: Source | None
    """Which of them."""
    trace_id: str | None
    parent_id: str | None
    hints: list[Hint]
    ignored: list[str]
    """Other attempts that the header, the URL or the key name."""
    works_for: AttemptIds | None
    """The attempt whose work the caller took over, unless the URL or the key names the attempt."""
    uncertain: str | None
    """Why the caller may work for any attempt (`uncertain`, `ended`), unless the URL or the key names one."""


def keep_keys(variables: dict[str, str], server_url: str, inherited: Mapping[str, str]) -> None:
    """Put the keys of an agent's own environment into the variables of its attempt, so that an address in the agent's
    code gets the key that it always got. For a server on another machine, where they must not be sent, the placeholder
    stays."""
    if "ANTHROPIC_AUTH_TOKEN" in inherited:
        del variables["ANTHROPIC_API_KEY"]
    is_here = is_this_machine(urlsplit(server_url).hostname or "")
    for name in _OWN_KEYS & inherited.keys():
        is_own = is_here and not inherited[name].startswith("agl-")
        variables[name] = inherited[name] if is_own and inherited[name] else PLACEHOLDER


_OWN_KEYS: Final = frozenset({"OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"})


class ClaimsReader:
    """Reads and verifies the claims of requests. `secret` signs the keys; `mode_temperatures` belong to 1.0's URLs."""

    def __init__(self, secret: str, mode_temperatures: Mapping[str, float], *, require_key: bool = False) -> None:
        self.require_key = require_key
        self._secret = secret
        self._modes = dict(mode_temperatures)

    def read(self, headers: Mapping[str, str], path_params: Mapping[str, str]) -> RequestClaims:
        """Raises ApiError 401 for an invalid or missing key, 404 for an unknown mode, 409 for a reward function that
        calls as the agent."""
        mode = path_params.get("mode")
        if mode is not None and mode not in self._modes:
            message = f"the URL has the unknown mode {mode!r}; use one of {', '.join(self._modes)}"
            raise ApiError(404, message, code="mode_not_found")
        key = path_params.get("key") or api_key(headers)
        _reject_reward_calls(headers, path_params, key)
        key_claims = self._read_key(key)
        attempt, source, ignored = self._explicit_attempt(headers, path_params, key_claims)
        trace_id, parent_id = _trace(headers.get("traceparent"))
        is_explicit = attempt is not None and not _may_be_stale(path_params)
        work = headers.get(WORK_HEADER)
        uncertain = work if work in (UNCERTAIN, ENDED) else None
        return RequestClaims(
            mode=mode,
            temperature=None if mode is None else self._modes[mode],
            key=key_claims,
            attempt=attempt,
            source=source,
            trace_id=trace_id,
            parent_id=parent_id,
            hints=_hints(trace_id, headers.get("baggage")),
            ignored=ignored,
            works_for=None if is_explicit or uncertain else self._attempt_from_header(headers, WORK_HEADER),
            uncertain=None if is_explicit else uncertain,
        )

    def is_access_token(self, headers: Mapping[str, str]) -> bool:
        """Whether the API key is the access token that the secret was derived from."""
        key = api_key(headers)
        return bool(key) and hmac.compare_digest(attempt_secret(key), self._secret)

    def _read_key(self, key: str) -> KeyClaims:
        if not key.startswith("agl-"):
            return KeyClaims()
        claims = KeyClaims(read_attempt_key(self._secret, key), read_worker_key(self._secret, key))
        if not claims:
            raise ApiError(
                401, "the API key is not valid here; use the AGL_KEY of this attempt", code="invalid_api_key"
            )
        return claims

    def _explicit_attempt(
        self, headers: Mapping[str, str], path_params: Mapping[str, str], key: KeyClaims
    ) -> tuple[AttemptIds | None, Source | None, list[str]]:
        """(attempt, source, other attempts named) from the header, the URL and the key."""
        from_header = self._attempt_from_header(headers, ATTEMPT_HEADER)
        from_url = _attempt_of_url(path_params)
        if from_url is not None and key.attempt is not None and from_url != key.attempt:
            raise ApiError(401, "the API key belongs to another attempt than the URL", code="invalid_api_key")
        worker = path_params.get("worker_id")
        if worker is not None and key.worker_id is not None and worker != key.worker_id:
            raise ApiError(401, "the API key belongs to another worker than the URL", code="invalid_api_key")
        candidates: list[tuple[AttemptIds | None, Source]] = [
            (from_url, "url"),
            (key.attempt, "key"),
            (from_header, "header"),
        ]
        if _may_be_stale(path_params):
            candidates.insert(0, candidates.pop())
        named: list[tuple[AttemptIds, Source]] = [(ids, source) for ids, source in candidates if ids is not None]
        attempt, source = named[0] if named else (None, None)
        if self.require_key and not key and (attempt is None or attempt != from_header):
            raise ApiError(
                401, "this server requires the AGL_KEY of the attempt as the API key", code="invalid_api_key"
            )
        return attempt, source, [f"{ids[1]} of the {other}" for ids, other in named[1:] if ids != attempt]

    def _attempt_from_header(self, headers: Mapping[str, str], name: str) -> AttemptIds | None:
        """The attempt whose key is the value of a header."""
        value = headers.get(name)
        if value is None:
            return None
        if (ids := read_attempt_key(self._secret, value)) is None:
            message = f"the header {name} holds no key of an attempt of this server"
            raise ApiError(401, message, code="invalid_api_key")
        return ids


def _may_be_stale(path_params: Mapping[str, str]) -> bool:
    """Whether the URL is of a process that runs several attempts: the client may be one of an earlier attempt."""
    return path_params.keys() >= {"worker_id", "key"}


def _attempt_of_url(path_params: Mapping[str, str]) -> AttemptIds | None:
    return (path_params["rollout_id"], path_params["attempt_id"]) if "attempt_id" in path_params else None


def _reject_reward_calls(headers: Mapping[str, str], path_params: Mapping[str, str], key: str) -> None:
    if JUDGE_HEADER in headers and (path_params.keys() & {"attempt_id", "worker_id"} or key.startswith("agl-")):
        message = (
            "a reward function called a model through a client that was made for the agent: the policy would answer "
            "and learn from it. Make a client in the reward function, where the environment is the one the runner was "
            "started with"
        )
        raise ApiError(409, message, code="judge_as_agent", retry=False)


def _trace(traceparent: str | None) -> tuple[str | None, str | None]:
    match = _TRACEPARENT.match(traceparent) if traceparent else None
    return (match.group(1), match.group(2)) if match else (None, None)


def _hints(trace_id: str | None, baggage: str | None) -> list[Hint]:
    """Claims of the trace and the baggage, by precedence."""
    hints: list[Hint] = []
    if trace_id is not None and (attempt_id := attempt_of_trace(trace_id)) is not None:
        hints.append(Hint("trace", None, attempt_id))
    if baggage:
        entries = read_baggage(baggage)
        hint = Hint("baggage", entries.get(ROLLOUT_BAGGAGE), entries.get(ATTEMPT_BAGGAGE))
        if hint.rollout_id is not None or hint.attempt_id is not None:
            hints.append(hint)
    return hints
