"""Whose call it is: the rollout, the attempt and the agent, from the URL, the API key and the headers.

`Contexts` keeps what a call needs to know of its attempt: read once, kept while it is used, and asked again at most
every `recheck_seconds` whether the attempt still goes on.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

from agentlightning.gateway.problems import Problem
from agentlightning.resources import LLM
from agentlightning.rollouts import Attempt, Rollout, read_attempt_key, root_span_id_of, trace_id_of
from agentlightning.span import new_trace_id
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.routes import presented_key

AGENT_HEADER: Final = "x-agentlightning-agent"
_TRACEPARENT: Final = re.compile(r"^[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_ENDED: Final = frozenset({"succeeded", "failed", "timeout"})


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. Without an attempt the call is served (where that is allowed) and recorded nowhere."""

    rollout_id: str | None = None
    attempt_id: str | None = None
    agent: str | None = None
    trace_id: str | None = None
    parent_id: str | None = None


def attribute(
    headers: Mapping[str, str],
    path_params: Mapping[str, str],
    secret: str,
    *,
    require_key: bool = False,
    allow_unattributed: bool = False,
) -> Caller:
    """The caller, by the attempt in the URL or else by the one its API key names.

    Raises Problem 401 on a key of ours that is not valid or is another attempt's, on a URL without its key where keys
    are required, and where nothing names an attempt.
    """
    key = presented_key(headers)
    named = read_attempt_key(secret, key) if key else None
    if key.startswith("agl-") and named is None:
        raise Problem(401, "the API key is not valid here; use the AGL_KEY of this attempt", code="invalid_api_key")
    in_url = (path_params["rollout_id"], path_params["attempt_id"]) if "attempt_id" in path_params else None
    if in_url and named and in_url != named:
        raise Problem(401, "the API key belongs to another attempt than the URL", code="invalid_api_key")
    if in_url and not named and require_key:
        raise Problem(401, "this server asks for the AGL_KEY of the attempt as the API key", code="invalid_api_key")
    attempt = in_url or named
    if attempt is None and not allow_unattributed:
        raise Problem(
            401,
            "the call names no attempt, so it could not be recorded; use AGL_OPENAI_BASE_URL as the base URL, or "
            "AGL_KEY as the API key, from the environment of the attempt",
            code="invalid_api_key",
        )
    rollout_id, attempt_id = attempt or (None, None)
    trace_id, parent_id = _trace(headers.get("traceparent", ""))
    if attempt_id is not None and parent_id == root_span_id_of(attempt_id):  # a stand-in: no such span is kept
        parent_id = None
    return Caller(rollout_id, attempt_id, _agent(headers), trace_id, parent_id)


def _agent(headers: Mapping[str, str]) -> str | None:
    if name := headers.get(AGENT_HEADER):
        return name
    for entry in headers.get("baggage", "").split(","):
        key, _, value = entry.partition(";")[0].partition("=")
        if key.strip() == "agentlightning.agent" and value.strip():
            return unquote(value.strip())
    return None


def _trace(traceparent: str) -> tuple[str | None, str | None]:
    match = _TRACEPARENT.match(traceparent)
    return (match.group(1), match.group(2)) if match else (None, None)


@dataclass(slots=True)
class AttemptContext:
    """What a call needs to know of its attempt."""

    rollout_id: str
    attempt_id: str
    llms: dict[str, tuple[str, LLM]] = field(default_factory=dict[str, tuple[str, LLM]])
    """model -> (name of the resource, the resource)."""
    trace_id: str = ""
    checked: float = 0.0
    """When the store last said that the attempt goes on (monotonic seconds)."""

    def sampling_parameters(self, model: str) -> tuple[str, dict[str, Any]]:
        """(name of the resource, its sampling parameters) of the LLM resource of a model; empty where there is none."""
        name, llm = self.llms.get(model, ("", None))
        return (name, llm.sampling_parameters) if llm else ("", {})


class Contexts:
    """The attempts whose calls were served lately."""

    def __init__(self, store: LightningStoreBase, limit: int = 16384, recheck_seconds: float = 1.0) -> None:
        self._store = store
        self._limit = limit
        self._recheck = recheck_seconds
        self._known: OrderedDict[tuple[str, str], AttemptContext] = OrderedDict()

    async def get(self, rollout_id: str, attempt_id: str) -> AttemptContext:
        """Raises Problem 404 for unknown ids, 409 where the attempt has ended or was superseded."""
        key, now = (rollout_id, attempt_id), time.monotonic()
        context = self._known.get(key)
        if context is not None and now - context.checked < self._recheck:
            self._known.move_to_end(key)
            return context
        rollout = await self._check(rollout_id, attempt_id)
        context = self._known.get(key) or AttemptContext(
            rollout_id, attempt_id, await self._llms(rollout), trace_id_of(attempt_id) or new_trace_id()
        )
        context.checked = now
        self._known[key] = context
        self._known.move_to_end(key)
        while len(self._known) > self._limit:
            self._known.popitem(last=False)
        return context

    def doubt(self, rollout_id: str, attempt_id: str) -> None:
        """Ask the store again at the next call."""
        if context := self._known.get((rollout_id, attempt_id)):
            context.checked = float("-inf")

    def forget(self, rollout_id: str, attempt_id: str) -> None:
        self._known.pop((rollout_id, attempt_id), None)

    async def _check(self, rollout_id: str, attempt_id: str) -> Rollout:
        rollout = await self._store.get_rollout_by_id(rollout_id)
        if rollout is None:
            raise Problem(404, f"the store knows no rollout {rollout_id!r}", code="rollout_not_found")
        latest = await self._store.get_latest_attempt(rollout_id)
        if latest is None or latest.attempt_id != attempt_id:
            raise await self._not_latest(rollout_id, attempt_id)
        self._refuse_ended(rollout, latest)
        return rollout

    def _refuse_ended(self, rollout: Rollout, attempt: Attempt) -> None:
        if attempt.status in _ENDED or rollout.status == "cancelled":
            what = f"the rollout {rollout.rollout_id!r} was cancelled"
            if rollout.status != "cancelled":
                what = f"the attempt {attempt.attempt_id!r} of rollout {rollout.rollout_id!r} ended as {attempt.status}"
            raise Problem(409, f"{what}; it takes no more calls", code="attempt_ended", retry=False)

    async def _not_latest(self, rollout_id: str, attempt_id: str) -> Problem:
        known = {attempt.attempt_id for attempt in await self._store.query_attempts(rollout_id)}
        if attempt_id not in known:
            return Problem(404, f"rollout {rollout_id!r} has no attempt {attempt_id!r}", code="attempt_not_found")
        message = f"a later attempt of rollout {rollout_id!r} has taken the place of {attempt_id!r}; stop calling"
        return Problem(409, message, code="attempt_superseded", retry=False)

    async def _llms(self, rollout: Rollout) -> dict[str, tuple[str, LLM]]:
        if rollout.resources_id is None:
            update = await self._store.get_latest_resources()
        else:
            update = await self._store.get_resources_by_id(rollout.resources_id)
            if update is None:
                message = (
                    f"rollout {rollout.rollout_id!r} uses resources {rollout.resources_id!r}, which are not stored"
                )
                raise Problem(500, message, code="resources_not_found", retry=False)
        resources = update.resources if update else {}
        return {llm.model: (name, llm) for name, llm in resources.items() if isinstance(llm, LLM)}
