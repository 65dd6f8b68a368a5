"""Attributes a call to its rollout and attempt.

Runs for every model call, before its body is parsed. The first of these that names an attempt wins:

1. the attempt in the URL: `/rollout/{id}/attempt/{id}/v1`, or 1.0's `/proxy/rollout/.../mode/{mode}/openai/v1`;
2. the key in the URL `/key/{key}/v1` that agents get, beside which the API key counts for nothing, or the attempt that
   the API key is signed for;
3. the header `x-agentlightning-attempt`, an attempt's key, which our clients add to each call made inside an attempt;
4. the key in a URL that also names a worker: `/worker/{id}/key/{key}/v1`. Such a client was made from an attempt's
   environment in a process that runs several, and may outlive its attempt;
5. the trace that `traceparent` continues: an attempt's own, or one recorded here;
6. `baggage`: `agentlightning.attempt_id`, or `agentlightning.rollout_id` for its latest attempt;
7. the worker in the URL (`/worker/{id}/v1`), or that the API key is signed for: the attempt it is running now.

So the claims of the request itself precede those that its client inherited. A caller whose
`x-agentlightning-work-of` says that it may work for several attempts is rejected (409), unless its URL or key names the
attempt. A reward function that calls through a client of the agent is rejected (409), since its call is not part of the
attempt.

An API key of another attempt or worker than the URL names, or of another worker than the trace's, is rejected (401).
Other contradictions are recorded, counted and ignored. If keys are required, trace, baggage and worker count only with
the key of the worker.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Container, Mapping
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from msgspec import Struct, field
from msgspec.structs import replace

from agentlightning import span as names
from agentlightning.attempt_address import (
    ATTEMPT_BAGGAGE,
    ATTEMPT_HEADER,
    ENDED,
    JUDGE_HEADER,
    ROLLOUT_BAGGAGE,
    WORK_HEADER,
    attempt_of_trace,
    attempt_secret,
    read_attempt_key,
    read_worker_key,
    root_span_id_of,
    trace_id_of,
)
from agentlightning.attempt_variables import PLACEHOLDER
from agentlightning.gateway.callers.agents import UNKNOWN, Agent, read_baggage
from agentlightning.gateway.callers.attempts import AttemptIds, AttemptTable
from agentlightning.gateway.errors import ApiError, bad_key, conflict
from agentlightning.ingest.otlp import OtlpReceiver, ids_of_trace
from agentlightning.transport.connector import is_this_machine
from agentlightning.util.api_key import api_key

# -- claims ------------------------------------------------------------------------------------------------------------

# What a request says of its caller in its URL and headers.

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


Named = tuple[AttemptIds, Source]
"""An attempt, and the part of the request that names it."""


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


def _may_be_stale(path_params: Mapping[str, str]) -> bool:
    """Whether the URL is of a process that runs several attempts: the client may be one of an earlier attempt."""
    return path_params.keys() >= {"worker_id", "key"}


_REWARD_CALL: Final = (
    "a reward function called a model through a client that was made for the agent: the policy would answer and learn "
    "from it. Make a client in the reward function, where the environment is the one the runner was started with"
)


def _hints(trace_id: str | None, baggage: str | None) -> list[Hint]:
    """Claims of the trace and the baggage, by precedence."""
    entries = read_baggage(baggage or "")
    hints = (
        Hint("trace", None, trace_id and attempt_of_trace(trace_id)),
        Hint("baggage", entries.get(ROLLOUT_BAGGAGE), entries.get(ATTEMPT_BAGGAGE)),
    )
    return [hint for hint in hints if hint.rollout_id or hint.attempt_id]


# -- client retries --------------------------------------------------------------------------------------------------

# Identifies repeated requests of a client, for the span of the call.
#
# A client that lost the response to a request sends the request again, so one of the two responses never reached the
# agent. The gateway cannot know which one until the next request arrives, so it records the identity of each request;
# `assemble` leaves out the responses that were lost.

_RETRIES: Final = "x-stainless-retry-count"
"""The retry count of the official SDKs of OpenAI and Anthropic."""
_IDENTITIES: Final = ("idempotency-key", "x-claude-code-session-id", "x-claude-code-agent-id")
"""Claude Code sends no retry count, but repeats a request within a session only if it got no response."""


def repeat_attributes(headers: Mapping[str, str], path: str, body: bytes) -> dict[str, Any]:
    """Attributes of the call's span: a digest, equal for equal requests (`names.REQUEST`), and the number of times its
    client sent the request before. `path` is the API path, without the attempt."""
    digest = blake2b(body, digest_size=12, key=path.encode()[:64])
    identities = [headers[name] for name in _IDENTITIES if name in headers]
    for identity in identities:
        digest.update(b"\0" + identity.encode())
    attributes: dict[str, Any] = {names.REQUEST: f"{names.SENT_ONCE if identities else ''}{digest.hexdigest()}"}
    count = headers.get(_RETRIES, "")
    if count.isdecimal() and len(count) < 9 and (retries := int(count)):
        attributes[names.RETRIES] = retries
    return attributes


logger = logging.getLogger(__name__)

MODE_TEMPERATURES: Final[Mapping[str, float]] = {"train": 1.0, "val": 0.7}
"""The modes in 1.0's URLs, and the temperature that 1.0 samples with in each, whatever the agent asks for."""


class Caller(Struct, frozen=True):
    """The caller of a model call. A call without an attempt is served, where allowed, and not recorded."""

    rollout_id: str | None = None
    attempt_id: str | None = None
    trace_id: str | None = None
    parent_id: str | None = None
    source: Source | None = None
    """The part of the request that names the attempt."""
    mode: str | None = None
    """The mode in a URL of 1.0."""
    temperature: float | None = None
    """The temperature of this mode, unless the trainer sets another."""
    ignored: tuple[str, ...] = ()
    """Contradicting claims that were ignored."""
    agent: Agent = UNKNOWN
    """Set once the body is parsed."""
    repeat: dict[str, Any] = field(default_factory=dict[str, Any])
    """`repeat_attributes`, once the body is read."""

    @property
    def attempt(self) -> AttemptIds | None:
        """(rollout_id, attempt_id)."""
        if self.rollout_id is None or self.attempt_id is None:
            return None
        return self.rollout_id, self.attempt_id

    @property
    def affinity(self) -> str:
        """Calls with the same one go to the same server while it is healthy."""
        return "/".join(self.attempt or ())

    def with_agent(self, agent: Agent, served: Container[str]) -> Caller:
        """A copy with its agent. 1.0 had one model only, so a call to 1.0's URL may name any: a model that is not
        `served` counts as unnamed."""
        if self.mode is not None and agent.model is not None and agent.model not in served:
            agent = replace(agent, model=None)
        return replace(self, agent=agent)

    def attributes(self) -> dict[str, Any]:
        """Attributes of the call's span that describe the caller."""
        agent = self.agent
        attributes: dict[str, Any] = {
            names.ATTRIBUTION: self.source,
            names.AGENT_NAME: agent.name,
            names.AGENT_KEY: agent.key,
            names.ATTRIBUTION_IGNORED: [*self.ignored, *agent.ignored],
            names.MODE: self.mode,
        }
        return {name: value for name, value in attributes.items() if value} | self.repeat


class Attribution:
    """Finds the caller of each call.

    `secret` signs the keys. With `require_key` a URL alone is not enough; with `allow_unattributed` a call that names
    no attempt is served, for which the access token is key enough.
    """

    def __init__(
        self,
        attempts: AttemptTable,
        secret: str,
        *,
        require_key: bool = False,
        allow_unattributed: bool = False,
    ) -> None:
        self.traces: OtlpReceiver | None = None
        """Knows the owners of the traces that are not an attempt's own."""
        self.conflicts = 0
        """Calls whose URL or key names another attempt than their context."""
        self.refused = 0
        """Calls whose attempt is uncertain."""
        self.requires_key = require_key
        """Whether model calls without a key are rejected."""
        self._attempts, self._store = attempts, attempts.store
        self._secret = secret
        self._allow_unattributed = allow_unattributed

    async def caller(self, headers: Mapping[str, str], path_params: Mapping[str, str]) -> Caller:
        """The caller of a call. `headers` have lower-case names. Queries the store only if header, URL and key name no
        attempt, or if the key belongs to a worker.

        Raises ApiError 401 for an invalid, foreign or missing key and for a call that names no attempt; 404 for an
        unknown mode or worker; 409 if the worker runs no attempt, or several and the call does not say which.
        """
        named, worker_id = self._read(headers, path_params)
        traced = _TRACEPARENT.match(headers.get("traceparent", ""))
        trace_id, parent_id = traced.groups() if traced else (None, None)
        hints = _hints(trace_id, headers.get("baggage"))
        attempt, source = (
            named[0]
            if named
            else await self._resolve_attempt(hints, trace_id, worker_id or path_params.get("worker_id"))
        )
        if attempt is not None and worker_id is not None and source != "worker":
            await self._check_worker(worker_id, attempt[1])
        doubt = headers.get(WORK_HEADER)
        if doubt and (not named or _may_be_stale(path_params)):
            raise self._refuse(doubt, attempt)
        mode = path_params.get("mode")
        temperature = MODE_TEMPERATURES.get(mode or "")
        if attempt is None:
            return Caller(trace_id=trace_id, parent_id=parent_id, mode=mode, temperature=temperature)
        others = [f"{ids[1]} of the {part}" for ids, part in named[1:] if ids != attempt]
        if others and source != "header":
            self.conflicts += 1
            if self.conflicts == 1:
                logger.warning(
                    "the URL or key of a call names attempt %s, but its context is that of %s; the former is recorded",
                    attempt[1],
                    others[0],
                )
        mismatches = [hint for hint in hints if not hint.matches(attempt)]
        if any(hint.source == "trace" for hint in mismatches):  # The trace belongs to another attempt.
            trace_id = parent_id = None
        elif trace_id is not None and self.traces is not None and trace_id != trace_id_of(attempt[1]):
            self.traces.claim(trace_id, attempt)
        if parent_id is not None and parent_id == root_span_id_of(attempt[1]):  # A placeholder; no such span is stored.
            parent_id = None
        return Caller(*attempt, trace_id, parent_id, source, mode, temperature, (*others, *map(str, mismatches)))

    def check_key(self, headers: Mapping[str, str], path_params: Mapping[str, str]) -> None:
        """Check a request that is not a model call. Raises ApiError 401 if keys are required and it has none; the
        access token that the secret was derived from is accepted as well."""
        if self.requires_key and not self._is_access_token(api_key(headers)):
            self._read(headers, path_params)

    def _is_access_token(self, key: str) -> bool:
        """Whether it is the token that the secret was derived from."""
        return bool(key) and hmac.compare_digest(attempt_secret(key), self._secret)

    def _refuse(self, doubt: str, attempt: AttemptIds | None) -> ApiError:
        """`doubt`: why the attempt is uncertain (UNCERTAIN, ENDED)."""
        client = "" if attempt is None else f" with a client that was made in the attempt {attempt[1]!r}"
        maker, before = "a task or thread that serves several attempts", ""
        if doubt == ENDED:
            maker = "a task or thread that has outlived the attempt that started it"
            before = "; calls that it made before were recorded under that attempt"
        message = (
            f"{maker} made this call{client}, so the attempt of this call is uncertain: make the client in each "
            "attempt with the llm.base_url and llm.api_key that it is given, and pass it along with the work"
        )
        self.refused += 1
        if self.refused == 1:
            logger.warning("a model call is refused: %s%s", message, before)
        return conflict("attempt_ambiguous", message)

    # -- claims of a request -----------------------------------------------------------------------------------------

    def _read(self, headers: Mapping[str, str], path_params: Mapping[str, str]) -> tuple[list[Named], str | None]:
        """What header, URL and key name: (attempts, of which the first counts; the worker that the key belongs to).

        Raises ApiError 401 for an invalid or missing key, 404 for an unknown mode, 409 for a reward function that calls
        as the agent.
        """
        mode = path_params.get("mode")
        if mode is not None and mode not in MODE_TEMPERATURES:
            message = f"the URL has the unknown mode {mode!r}; use one of {', '.join(MODE_TEMPERATURES)}"
            raise ApiError(404, message, code="mode_not_found")
        key = path_params.get("key") or api_key(headers)
        is_ours = key.startswith("agl-")
        if JUDGE_HEADER in headers and (is_ours or path_params.keys() & {"attempt_id", "worker_id"}):
            raise conflict("judge_as_agent", _REWARD_CALL)
        of_key, worker_id = read_attempt_key(self._secret, key), read_worker_key(self._secret, key)
        has_key = of_key is not None or worker_id is not None
        has_key = has_key or (self._allow_unattributed and self._is_access_token(key))
        if is_ours and not has_key:
            raise bad_key("the API key is not valid here; use the AGL_KEY of this attempt")
        header = headers.get(ATTEMPT_HEADER)
        of_header = None if header is None else read_attempt_key(self._secret, header)
        if of_header is None and header is not None:
            raise bad_key(f"the header {ATTEMPT_HEADER} holds no key of an attempt of this server")
        in_url = "attempt_id" in path_params
        own = (path_params["rollout_id"], path_params["attempt_id"]) if in_url else of_key
        if of_key not in (None, own):
            raise bad_key("the API key belongs to another attempt than the URL")
        if worker_id not in (None, path_params.get("worker_id", worker_id)):
            raise bad_key("the API key belongs to another worker than the URL")
        candidates: list[tuple[AttemptIds | None, Source]] = [(own, "url" if in_url else "key"), (of_header, "header")]
        if _may_be_stale(path_params):
            candidates.reverse()
        named: list[Named] = [(ids, source) for ids, source in candidates if ids is not None]
        if self.requires_key and not has_key and (of_header is None or named[0][0] != of_header):
            raise bad_key("this server requires the AGL_KEY of the attempt as the API key")
        return named, worker_id

    # -- claims that need the store ----------------------------------------------------------------------------------

    async def _resolve_attempt(
        self, hints: list[Hint], trace_id: str | None, worker_id: str | None
    ) -> tuple[AttemptIds | None, Source | None]:
        for hint in hints:
            if (ids := await self._resolve_hint(hint)) is not None:
                return ids, hint.source
        if trace_id is not None:
            # A foreign trace: of the attempt that sent spans of it, or of the one it was stored as.
            owner = None if self.traces is None else await self.traces.owner_of(trace_id)
            if owner := owner or await self._resolve_hint(Hint("trace", *ids_of_trace(trace_id))):
                return owner, "trace"
        if worker_id is not None:
            return await self._attempt_of_worker(worker_id), "worker"
        if not self._allow_unattributed:
            raise bad_key(
                "the call names no attempt, so it cannot be recorded; use AGL_OPENAI_BASE_URL as the base URL, or "
                "AGL_KEY as the API key, from the environment of the attempt. `agl serve --allow-unattributed` answers "
                "calls of no attempt"
            )
        return None, None

    async def _resolve_hint(self, hint: Hint) -> AttemptIds | None:
        """The attempt of a hint; None if it does not exist."""
        if hint.attempt_id is not None:
            found = await self._attempts.find(hint.attempt_id)
        else:
            found = next(iter(await self._store.get_latest_attempts([hint.rollout_id or ""])), None)
        ids = None if found is None else (found.rollout_id, found.attempt_id)
        return ids if ids is not None and hint.matches(ids) else None

    async def _check_worker(self, worker_id: str, attempt_id: str) -> None:
        """Raises ApiError 401 unless the worker runs the attempt."""
        for find in (self._attempts.find, self._store.get_attempt):  # The worker may have started it just now.
            attempt = await find(attempt_id)
            if attempt is None or attempt.worker_id == worker_id:
                return
        raise bad_key(f"the API key belongs to the worker {worker_id!r}, which does not run the attempt {attempt_id!r}")

    async def _attempt_of_worker(self, worker_id: str) -> AttemptIds:
        """The attempt that a worker is running. Not cached, since the next call may belong to the next attempt."""
        worker = await self._store.get_worker(worker_id)
        if worker is None:
            raise ApiError(404, f"the store knows no worker {worker_id!r}", code="worker_not_found")
        if worker.current_rollout_id is None or worker.current_attempt_id is None:
            message = f"the worker {worker_id!r} runs no attempt at the moment, so a call to its URL belongs to none"
            raise conflict("worker_idle", message)
        if worker.open_attempts > 1:
            message = (
                f"the worker {worker_id!r} runs {worker.open_attempts} attempts at once, and the call does not say "
                "which it belongs to: use the AGL_OPENAI_BASE_URL of the attempt, send its traceparent, or run one at "
                "a time (--concurrency 1)"
            )
            raise conflict("worker_ambiguous", message)
        return worker.current_rollout_id, worker.current_attempt_id
