"""Whose call it is: the rollout and the attempt, from what its headers and its URL say.

Called for every model call, before its body is read. What names the attempt; where several do, the first wins:

1. the attempt in the URL: `/rollout/{id}/attempt/{id}/v1`, or 1.0's `/proxy/rollout/.../mode/{mode}/openai/v1`;
2. the attempt that the API key is signed for;
3. the header `x-agentlightning-attempt`, an attempt's key, which code of ours adds to each call made inside an attempt;
4. the attempt in a URL that names a worker too: `/worker/{id}/rollout/{id}/attempt/{id}/v1`. A client that leads there
   was made from the environment of an attempt in a process of several, which may keep it for later ones. The same
   holds for the API key beside such a URL;
5. the trace that `traceparent` continues: an attempt's own, or one that was recorded here;
6. `baggage`: `agentlightning.attempt_id`, or `agentlightning.rollout_id` for the latest attempt of it;
7. the worker in the URL (`/worker/{id}/v1`), or that the API key is signed for: the one attempt it is running now.

So what a request itself says beats what it inherited from where it was made. A caller that says with
`x-agentlightning-work-of` that it was started by one attempt and works for another is refused (409) unless its URL or
its key names the attempt, or everything it says is the same. A reward function's call through a client of the agent's
is refused (409): it is no call of the attempt.

An API key that is signed for anybody but the attempt or worker in the URL, or that of a worker beside another worker's
trace, is refused (401). Whatever else says something different is recorded and counted, and not followed. Where keys
are asked for, traces, baggage and worker count only beside the key of the worker.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections import OrderedDict
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from agentlightning import span as names
from agentlightning.attempt_address import (
    ATTEMPT_BAGGAGE,
    ATTEMPT_HEADER,
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
from agentlightning.gateway.callers.agents import UNKNOWN, Agent, read_baggage
from agentlightning.gateway.callers.client_retries import RequestIdentity
from agentlightning.gateway.errors import ApiError
from agentlightning.ingest.unknown_traces import ids_of_trace
from agentlightning.store.base import LightningStoreBase
from agentlightning.util.api_key import api_key

logger = logging.getLogger(__name__)

MODE_TEMPERATURES: Final[Mapping[str, float]] = {"train": 1.0, "val": 0.7}
"""The modes of 1.0's URLs, and what 1.0 samples with in each, whatever the agent asks for."""
MAX_CACHED_ATTEMPTS: Final = 16384
"""Attempts whose rollout and worker are remembered."""
_TRACEPARENT: Final = re.compile(r"^[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")

AttemptIds = tuple[str, str]
"""(rollout_id, attempt_id)."""
Source = Literal["header", "url", "key", "trace", "baggage", "worker"]


class TraceOwners(Protocol):
    """Whoever takes traces in, and so knows whose they are."""

    async def owner_of(self, trace_id: str) -> AttemptIds | None:
        """The attempt that a trace belongs to."""
        ...

    def claim(self, trace_id: str, ids: AttemptIds) -> None:
        """Be told that an attempt has made a call within a trace."""
        ...


class Caller(Struct, frozen=True):
    """Who calls. Without an attempt the call is served (where that is allowed) and recorded nowhere."""

    rollout_id: str | None = None
    attempt_id: str | None = None
    trace_id: str | None = None
    parent_id: str | None = None
    source: Source | None = None
    """What names the attempt."""
    mode: str | None = None
    """The mode of a URL of 1.0."""
    temperature: float | None = None
    """What calls of this mode are sampled with, unless the trainer has set another."""
    ignored: tuple[str, ...] = ()
    """What else was said of the attempt, and not followed."""
    agent: Agent = UNKNOWN
    """Known once the body is read."""
    repeat: RequestIdentity | None = None
    """Likewise."""

    @property
    def attempt(self) -> AttemptIds | None:
        """(rollout_id, attempt_id)."""
        if self.rollout_id is None or self.attempt_id is None:
            return None
        return self.rollout_id, self.attempt_id

    def with_agent(self, agent: Agent, served: Container[str]) -> Caller:
        """The same with its agent. A call by 1.0's URL may name any model, as there was only one: a name that is not
        `served` is none."""
        if self.mode is not None and agent.model is not None and agent.model not in served:
            agent = replace(agent, model=None)
        return replace(self, agent=agent)

    def attributes(self) -> dict[str, Any]:
        """What the span of the call says of who made it."""
        agent = self.agent
        found: dict[str, Any] = {names.ATTRIBUTION: self.source} if self.source else {}
        if agent.name is not None:
            found[names.AGENT_NAME] = agent.name
        if agent.key is not None:
            found[names.AGENT_KEY] = agent.key
        if self.ignored or agent.ignored:
            found[names.ATTRIBUTION_IGNORED] = [*self.ignored, *agent.ignored]
        if self.mode is not None:
            found[names.MODE] = self.mode
        return found | self.repeat.attributes() if self.repeat else found


class _Hint(NamedTuple):
    """Something that says whose a call is and proves nothing."""

    source: Source
    rollout_id: str | None
    attempt_id: str | None

    def matches(self, ids: AttemptIds) -> bool:
        return self.rollout_id in (None, ids[0]) and self.attempt_id in (None, ids[1])

    def __str__(self) -> str:
        return f"{self.attempt_id or self.rollout_id} of the {self.source}"


@dataclass(frozen=True, slots=True)
class _KeyClaims:
    """What the API key proves."""

    attempt: AttemptIds | None = None
    worker_id: str | None = None

    def __bool__(self) -> bool:
        return self.attempt is not None or self.worker_id is not None


class _RequestClaims(Struct, frozen=True):
    """What a call says of whose it is."""

    mode: str | None
    temperature: float | None
    signed: _KeyClaims
    found: AttemptIds | None
    """The attempt that header, URL or key names."""
    source: Source | None
    trace_id: str | None
    parent_id: str | None
    hints: list[_Hint]
    ignored_claims: list[str]
    works_for: AttemptIds | None
    """The attempt whose work the caller has taken, where nothing explicit names the attempt."""


class Attribution:
    """Finds out who calls. `secret` is the one that keys are made with; with `require_key` a URL alone is not enough,
    and with `allow_unattributed` a call that names nobody is served. `traces` knows whose those are that are not an
    attempt's own; `mode_temperatures` are those of 1.0's URLs."""

    def __init__(
        self,
        store: LightningStoreBase,
        secret: str,
        *,
        require_key: bool = False,
        allow_unattributed: bool = False,
        mode_temperatures: Mapping[str, float] = MODE_TEMPERATURES,
    ) -> None:
        self.traces: TraceOwners | None = None
        self.conflicts = 0
        """Calls whose URL or key named one attempt, and the context they were made in another."""
        self._store = store
        self._secret = secret
        self._require_key = require_key
        self._allow_unattributed = allow_unattributed
        self._modes = dict(mode_temperatures)
        self._attempts: OrderedDict[str, tuple[str, str | None]] = OrderedDict()
        """attempt_id -> (rollout_id, worker_id)."""

    async def caller(self, headers: Mapping[str, str], path_params: Mapping[str, str]) -> Caller:
        """Who calls; `headers` by lower-case name. Asks the store only where neither header, URL nor key names an
        attempt, or where the key is that of a worker.

        Raises ApiError 401 on a key that is not valid here or is somebody else's, where one is asked for and missing,
        and where nothing names an attempt; 404 for a mode 1.0 does not have and a worker nobody has heard of; 409
        where the worker runs no attempt, or several and nothing says which.
        """
        said = self._read_claims(headers, path_params)
        found, source, worker_id = said.found, said.source, said.signed.worker_id
        if found is None:
            found, source = await self._resolve_attempt(
                said.hints, said.trace_id, worker_id, path_params.get("worker_id")
            )
        elif worker_id is not None:
            await self._check_worker(worker_id, found)
        if said.works_for is not None and found != said.works_for:
            raise _ambiguous_attempt(said.works_for, found)
        self._count_conflict(said, found)
        return self._make_caller(said, found, source)

    def try_caller(self, headers: Mapping[str, str], path_params: Mapping[str, str]) -> Caller | None:
        """The same, where the store need not be asked and nothing is in doubt; else None."""
        said = self._read_claims(headers, path_params)
        if said.found is None or said.signed.worker_id is not None:
            if not (said.signed or said.hints or said.trace_id or "worker_id" in path_params):
                self._check_unattributed()
            return None
        return (
            None
            if said.ignored_claims or said.works_for is not None
            else self._make_caller(said, said.found, said.source)
        )

    @property
    def requires_key(self) -> bool:
        """Model calls are refused without a key."""
        return self._require_key

    def check_key(self, headers: Mapping[str, str], path_params: Mapping[str, str]) -> None:
        """For a question that is no call. Raises ApiError 401 where keys are asked for and this is none; the access
        token that the secret was made from will do as well."""
        key = api_key(headers)
        if self._require_key and not (key and hmac.compare_digest(attempt_secret(key), self._secret)):
            self._read_claims(headers, path_params)

    def _count_conflict(self, said: _RequestClaims, found: AttemptIds | None) -> None:
        if said.ignored_claims and said.source in ("url", "key"):
            self.conflicts += 1
            if self.conflicts == 1:
                message = "a call that its URL or key says to be of attempt %s was made in the context of %s"
                logger.warning(
                    message + "; it is recorded under the former", found and found[1], said.ignored_claims[0]
                )

    def _make_caller(self, said: _RequestClaims, found: AttemptIds | None, source: Source | None) -> Caller:
        trace_id, parent_id = said.trace_id, said.parent_id
        if found is None:
            return Caller(trace_id=trace_id, parent_id=parent_id, mode=said.mode, temperature=said.temperature)
        ignored = [hint for hint in said.hints if not hint.matches(found)]
        if any(hint.source == "trace" for hint in ignored):  # it is another attempt's
            trace_id = parent_id = None
        elif trace_id is not None and self.traces is not None and trace_id != trace_id_of(found[1]):
            self.traces.claim(trace_id, found)
        if parent_id is not None and parent_id == root_span_id_of(found[1]):  # a stand-in: no such span is kept
            parent_id = None
        ignoring = (*said.ignored_claims, *map(str, ignored))
        return Caller(*found, trace_id, parent_id, source, said.mode, said.temperature, ignoring)

    # -- what the call itself says -----------------------------------------------------------------------------------

    def _read_claims(self, headers: Mapping[str, str], path_params: Mapping[str, str]) -> _RequestClaims:
        mode = path_params.get("mode")
        if mode is not None and mode not in self._modes:
            message = f"the URL says mode {mode!r}; use one of {', '.join(self._modes)}"
            raise ApiError(404, message, code="mode_not_found")
        _reject_reward_calls(headers, path_params, api_key(headers))
        signed = self._read_key(api_key(headers))
        found, source, passed_over = self._explicit_claims(headers, path_params, signed)
        trace_id, parent_id = _trace(headers.get("traceparent"))
        may_be_kept = path_params.keys() >= {"worker_id", "attempt_id"}
        explicit = found is not None and not may_be_kept
        return _RequestClaims(
            mode=mode,
            temperature=None if mode is None else self._modes[mode],
            signed=signed,
            found=found,
            source=source,
            trace_id=trace_id,
            parent_id=parent_id,
            hints=_hints(trace_id, headers.get("baggage")),
            ignored_claims=passed_over,
            works_for=None if explicit else self._attempt_from_header(headers, WORK_HEADER),
        )

    def _read_key(self, key: str) -> _KeyClaims:
        if not key.startswith("agl-"):
            return _KeyClaims()
        signed = _KeyClaims(read_attempt_key(self._secret, key), read_worker_key(self._secret, key))
        if not signed:
            raise ApiError(
                401, "the API key is not valid here; use the AGL_KEY of this attempt", code="invalid_api_key"
            )
        return signed

    def _explicit_claims(
        self, headers: Mapping[str, str], path_params: Mapping[str, str], signed: _KeyClaims
    ) -> tuple[AttemptIds | None, Source | None, list[str]]:
        """The attempt that header, URL or key names, which of them, and what the others said instead."""
        proven = self._attempt_from_header(headers, ATTEMPT_HEADER)
        in_url = _attempt_in(path_params)
        if in_url is not None and signed.attempt is not None and in_url != signed.attempt:
            raise ApiError(401, "the API key belongs to another attempt than the URL", code="invalid_api_key")
        worker = path_params.get("worker_id")
        if worker is not None and signed.worker_id is not None and worker != signed.worker_id:
            raise ApiError(401, "the API key belongs to another worker than the URL", code="invalid_api_key")
        named: list[tuple[AttemptIds | None, Source]] = [(in_url, "url"), (signed.attempt, "key"), (proven, "header")]
        if worker is not None and in_url is not None:  # a client that may be kept from an earlier attempt
            named.insert(0, named.pop())
        said: list[tuple[AttemptIds, Source]] = [(ids, source) for ids, source in named if ids is not None]
        found, source = said[0] if said else (None, None)
        if self._require_key and not signed and (found is None or found != proven):
            raise ApiError(
                401, "this server asks for the AGL_KEY of the attempt as the API key", code="invalid_api_key"
            )
        return found, source, [f"{ids[1]} of the {other}" for ids, other in said[1:] if ids != found]

    def _attempt_from_header(self, headers: Mapping[str, str], name: str) -> AttemptIds | None:
        """The attempt whose key a header of ours holds."""
        proof = headers.get(name)
        if proof is None:
            return None
        if (named := read_attempt_key(self._secret, proof)) is None:
            message = f"the header {name} holds no key of an attempt of this server"
            raise ApiError(401, message, code="invalid_api_key")
        return named

    # -- what the store knows ----------------------------------------------------------------------------------------

    async def _resolve_attempt(
        self, hints: list[_Hint], trace_id: str | None, signed_worker: str | None, worker_in_url: str | None
    ) -> tuple[AttemptIds | None, Source | None]:
        for hint in hints:
            if (found := await self._resolve_hint(hint)) is not None:
                if signed_worker is not None:
                    await self._check_worker(signed_worker, found)
                return found, hint.source
        if trace_id is not None and (found := await self._owner_of_trace(trace_id)) is not None:
            if signed_worker is not None:
                await self._check_worker(signed_worker, found)
            return found, "trace"
        if (worker_id := signed_worker or worker_in_url) is not None:
            return await self._attempt_of_worker(worker_id), "worker"
        self._check_unattributed()
        return None, None

    def _check_unattributed(self) -> None:
        if not self._allow_unattributed:
            raise ApiError(
                401,
                "the call names no attempt, so it could not be recorded; use AGL_OPENAI_BASE_URL as the base URL, or "
                "AGL_KEY as the API key, from the environment of the attempt",
                code="invalid_api_key",
            )

    async def _resolve_hint(self, hint: _Hint) -> AttemptIds | None:
        """The attempt that a hint means; None where there is none."""
        attempt_id = hint.attempt_id
        if attempt_id is None and hint.rollout_id is not None:
            if await self._store.get_rollout_by_id(hint.rollout_id) is None:
                return None
            latest = await self._store.get_latest_attempt(hint.rollout_id)
            return None if latest is None else (latest.rollout_id, latest.attempt_id)
        if attempt_id is None or (known := await self._attempt(attempt_id)) is None:
            return None
        ids = known[0], attempt_id
        return ids if hint.matches(ids) else None

    async def _owner_of_trace(self, trace_id: str) -> AttemptIds | None:
        """The attempt that a trace of somebody else's making belongs to: one that has sent spans of it, or the one it
        was kept as."""
        if self.traces is not None and (owner := await self.traces.owner_of(trace_id)) is not None:
            return owner
        rollout_id, attempt_id = ids_of_trace(trace_id)
        return None if await self._attempt(attempt_id) is None else (rollout_id, attempt_id)

    async def _attempt(self, attempt_id: str) -> tuple[str, str | None] | None:
        """(rollout_id, worker_id) of an attempt."""
        known = self._attempts.get(attempt_id)
        if known is None and (attempt := await self._store.get_attempt(attempt_id)) is not None:
            known = self._attempts[attempt_id] = attempt.rollout_id, attempt.worker_id
            while len(self._attempts) > MAX_CACHED_ATTEMPTS:
                self._attempts.popitem(last=False)
        return known

    async def _check_worker(self, worker_id: str, ids: AttemptIds) -> None:
        """A worker's key speaks for the attempts of that worker."""
        known = await self._attempt(ids[1])
        if known is not None and known[1] != worker_id:
            del self._attempts[ids[1]]  # it may have been given to the worker since
            known = await self._attempt(ids[1])
        if known is not None and known[1] != worker_id:
            message = f"the API key belongs to the worker {worker_id!r}, which does not run the attempt {ids[1]!r}"
            raise ApiError(401, message, code="invalid_api_key")

    async def _attempt_of_worker(self, worker_id: str) -> AttemptIds:
        """The one attempt a worker is running. Never remembered: the next call may be the next attempt's."""
        worker = await self._store.get_worker(worker_id)
        if worker is None:
            raise ApiError(404, f"the store knows no worker {worker_id!r}", code="worker_not_found")
        if worker.current_rollout_id is None or worker.current_attempt_id is None:
            message = f"the worker {worker_id!r} is between two attempts; a call to its URL belongs to none"
            raise ApiError(409, message, code="worker_idle", retry=False)
        if worker.open_attempts > 1:
            message = (
                f"the worker {worker_id!r} runs {worker.open_attempts} attempts at once, and nothing says whose call "
                "this is: use the AGL_OPENAI_BASE_URL of the attempt, send its traceparent, or run one at a time "
                "(--concurrency 1)"
            )
            raise ApiError(409, message, code="worker_ambiguous", retry=False)
        return worker.current_rollout_id, worker.current_attempt_id


def _attempt_in(path_params: Mapping[str, str]) -> AttemptIds | None:
    return (path_params["rollout_id"], path_params["attempt_id"]) if "attempt_id" in path_params else None


def _ambiguous_attempt(work_of: AttemptIds, found: AttemptIds | None) -> ApiError:
    client = "" if found is None else f", with a client that was made in the attempt {found[1]!r}"
    message = (
        f"a task or thread that another attempt has started works for the attempt {work_of[1]!r}{client}, and nothing "
        "proves whose call this is: make the client in each attempt with the llm.base_url and llm.api_key that it is "
        "given, and hand it over with the work"
    )
    return ApiError(409, message, code="attempt_ambiguous", retry=False)


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


def _hints(trace_id: str | None, baggage: str | None) -> list[_Hint]:
    """What trace and baggage say, in the order in which they are believed."""
    hints: list[_Hint] = []
    if trace_id is not None and (attempt_id := attempt_of_trace(trace_id)) is not None:
        hints.append(_Hint("trace", None, attempt_id))
    if baggage:
        entries = read_baggage(baggage)
        hint = _Hint("baggage", entries.get(ROLLOUT_BAGGAGE), entries.get(ATTEMPT_BAGGAGE))
        if hint.rollout_id is not None or hint.attempt_id is not None:
            hints.append(hint)
    return hints
