"""Who makes a call: the rollout and attempt that it belongs to, and what the store says of them.

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

import asyncio
import hmac
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from msgspec import Struct

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
    attempt_trace_id,
    read_attempt_key,
    read_worker_key,
    root_span_id_of,
    trace_id_of,
)
from agentlightning.attempt_variables import PLACEHOLDER
from agentlightning.engine.base import FinishReason, Sample, SamplingParams
from agentlightning.engine.likeliest_tokens import likeliest_from_text
from agentlightning.errors import StoreError
from agentlightning.gateway.errors import ApiError, bad_key, conflict
from agentlightning.ingest.otlp import OtlpReceiver, ids_of_trace
from agentlightning.resources import LLM
from agentlightning.rollouts import BRANCH, Attempt, Rollout, RolloutMode
from agentlightning.span import SUPERSEDED, TURN_LIMIT_REACHED, Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.transport.options import is_this_machine
from agentlightning.util.api_key import api_key
from agentlightning.util.json_values import Json, loads
from agentlightning.util.kept_sets import KeptSets

logger = logging.getLogger(__name__)

AttemptIds = tuple[str, str]
"""(rollout_id, attempt_id)."""

CHECK_SECONDS: Final = 2.0
"""Seconds between two checks of the table."""
_TRUSTED_CHECKS: Final = 2.5
"""For how many times as long an attempt counts as running after the store said so."""
IDLE_SECONDS: Final = 3600.0
"""Without a call for so long, an attempt is not watched."""
_ATTEMPTS_PER_QUERY: Final = 256


# -- recorded answers --------------------------------------------------------------------------------------------------

# An attempt that branches off another one is given the recorded answers of the calls before the branch, token for
# token, and, where it branches inside an answer, the beginning of that one. A request is answered from the record if
# its prompt is that of a recorded call. The first one that is not ends the replay: from there on, everything is
# sampled. So an agent that does something else this time is served as any other.


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """An answer of another rollout, or its beginning."""

    model: str
    prompt: tuple[int, ...]
    begun: tuple[int, ...]
    """The tokens that the sample goes on from, after the prompt."""
    sample: Sample | None
    """None: the rest is to be sampled."""
    replays: list[str] | None = None
    """rollout_id and span_id of a whole answer, as it was sampled."""
    call_ids: tuple[str, ...] = ()
    """Of its tool calls."""

    @classmethod
    def of(cls, span: Span, beginning: int | None = None) -> RecordedAnswer:
        """`beginning`: only so many tokens of it are given again."""
        found = span.attributes
        tokens = tuple(found[names.RESPONSE_TOKEN_IDS])
        reason: FinishReason = "length" if "length" in found.get(names.FINISH_REASONS, ()) else "stop"
        kept, top = found.get(names.KEPT_SETS), found.get(names.TOP_LOGPROBS)
        versions: Sequence[int] = found.get(names.POLICY_VERSIONS, ())
        sample = Sample(
            tokens,
            tuple(found[names.LOGPROBS]),
            reason,
            found[names.POLICY_VERSION],
            tuple(zip(versions[::2], versions[1::2], strict=True)),
            top_logprobs=() if top is None else tuple(likeliest_from_text(top, len(tokens))),
            kept_sets=None if kept is None else KeptSets.from_text(kept, len(tokens)),
        )
        before = tuple(found[names.PROMPT_TOKEN_IDS])
        place = len(before) - found.get(names.BEGUN, 0)
        prompt, begun = before[:place], before[place:]
        model = found[names.RESPONSE_MODEL]
        if beginning is not None:
            return cls(model, prompt, begun + tokens[:beginning], None)
        replays = [*found.get(names.REPLAYS, (span.rollout_id, span.span_id))]
        messages: Any = loads(found[names.OUTPUT_MESSAGES])
        parts = [part for message in messages for part in message["parts"]]
        call_ids = tuple(part["id"] for part in parts if part["type"] == "tool_call")
        return cls(model, prompt, begun, sample, replays, call_ids)


@dataclass(slots=True)
class Replay:
    """The recorded answers that an attempt has not been given yet, in their order."""

    left: list[RecordedAnswer] = field(default_factory=list)

    def take(
        self, model: str, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams
    ) -> tuple[RecordedAnswer | None, bool]:
        """(the answer to a request, whether the request is the first one that has no recorded answer). One that asks
        for likeliest tokens is sampled, since the record may have none; and so is the whole of an answer that a grammar
        describes."""
        if not self.left:
            return None, False
        if len(prompts) == n == 1 and not params.top_logprobs:
            for answer in self.left:
                if answer.model == model and answer.prompt == tuple(prompts[0]):
                    self.left.remove(answer)
                    if answer.sample is None and params.constraint is not None:
                        break
                    return answer, False
        self.left.clear()
        return None, True


async def load_replay(store: LightningStoreBase, branch: Any) -> Replay:
    """What is recorded of the calls that a rollout's metadata names under `BRANCH`; those that are gone are sampled.
    Anything else there is of the user's own."""
    if not isinstance(branch, dict) or not branch.keys() >= {"rollout_id", "span_ids"}:
        return Replay()
    spans = {span.span_id: span for span in await store.query_spans(branch["rollout_id"])}
    wanted = [(span_id, None) for span_id in branch["span_ids"]] + [*branch.get("kept", {}).items()]
    return Replay([RecordedAnswer.of(spans[span_id], beginning) for span_id, beginning in wanted if span_id in spans])


# -- the table of attempts ---------------------------------------------------------------------------------------------

# An attempt is read from the store at its first call. From then on a watch keeps the table true, so that a call reads
# nothing: every `check_seconds` it asks the store, in few queries, which attempts still run. One that has ended is
# forgotten, and its calls in progress end with 409: an agent that was killed at its time limit may leave a call behind,
# since a proxy keeps the connection open, and the provider or the engine would continue in vain.
#
# So an attempt takes calls for at most `check_seconds` after its end, and the time of one check. While the store is
# slow or away, calls rely on what it said for 2.5 times as long; after that, each call asks the store itself, and fails
# if that does. Calls in progress continue then. The watch leaves out attempts that made no call for `idle_seconds`; the
# next call of such an attempt asks the store.


@dataclass(slots=True, eq=False)
class AttemptContext:
    """What a call needs to know of its attempt."""

    rollout_id: str
    attempt_id: str
    llms: dict[str, tuple[str, LLM]]
    """model -> (name of the resource, the resource)."""
    names_resources: bool
    """Whether the rollout names its resources, as those of training runs do; others get the latest."""
    trace_id: str
    mode: RolloutMode | None
    """The mode of the rollout."""
    replay: Replay
    """The answers of another rollout that it is given."""
    answered: int = 0
    """Calls of the policy that were answered or are being answered."""
    worker_id: str | None = None
    """The worker that runs it."""
    checked_at: float = -math.inf
    """When the store last said that the attempt is running (monotonic seconds)."""
    called_at: float = 0.0
    """When the last call began."""
    ended: ApiError | None = None
    """Why the attempt takes no more calls."""
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    """The calls in progress."""

    def sampling_parameters(self, model: str) -> tuple[str, Json]:
        """(name of the resource, its sampling parameters) of the LLM resource of a model; empty if there is none."""
        name, llm = self.llms.get(model, ("", None))
        return (name, llm.sampling_parameters) if llm else ("", {})

    def begin_turn(self, model: str) -> int | None:
        """Count a call of the policy; returns the limit on them, None where there is none. Raises ApiError 409 if it
        has been reached."""
        _, llm = self.llms.get(model, ("", None))
        if llm is None or llm.max_calls is None:
            return None
        if self.answered >= llm.max_calls:
            message = (
                f"the rollout {self.rollout_id!r} has been given the {llm.max_calls} answers that it may have"
                " (runner.max_calls, or curriculum.turns); it ends here"
            )
            raise conflict(TURN_LIMIT_REACHED, message)
        self.answered += 1
        return llm.max_calls


class AttemptTable:
    """The attempts that made calls and still run, as far as the store said. Beyond `limit`, those whose last call is
    longest ago leave the table. `forget(rollout_id, attempt_id)` is called for each attempt that has ended."""

    def __init__(
        self,
        store: LightningStoreBase,
        forget: Callable[[str, str], object],
        *,
        check_seconds: float = CHECK_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
        limit: int = 16384,
    ) -> None:
        self.store = store
        self._forget, self._limit = forget, limit
        self._check_seconds, self._idle_seconds = check_seconds, idle_seconds
        self._contexts: OrderedDict[str, AttemptContext] = OrderedDict()
        """By attempt_id."""
        self._loading: dict[AttemptIds, asyncio.Task[AttemptContext]] = {}
        self._watcher: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._contexts)

    async def get(self, attempt: AttemptIds) -> AttemptContext:
        """The context of an attempt that runs. Concurrent callers share one query.

        Raises ApiError 404 for unknown ids, 409 if the attempt has ended or was superseded.
        """
        context, now = self._contexts.get(attempt[1]), time.monotonic()
        trusted = now - self._check_seconds * _TRUSTED_CHECKS
        if context is not None and context.rollout_id == attempt[0] and context.checked_at > trusted:
            self._contexts.move_to_end(attempt[1])
            context.called_at = now
            return context
        if (loading := self._loading.get(attempt)) is None:
            loading = self._loading[attempt] = asyncio.create_task(self._load(*attempt))
            loading.add_done_callback(lambda _: self._loading.pop(attempt))
        # A client that disconnects must not cancel it for the others.
        return await asyncio.shield(loading)

    async def find(self, attempt_id: str) -> AttemptContext | Attempt | None:
        """An attempt by its id alone, also one that has ended. None for an unknown id."""
        return self._contexts.get(attempt_id) or await self.store.get_attempt(attempt_id)

    @contextmanager
    def track(self, context: AttemptContext | None) -> Generator[None]:
        """Within it, the end of the attempt cancels the current task and raises ApiError."""
        if context is None:
            yield
            return
        call = asyncio.current_task()
        assert call is not None
        context.calls.add(call)
        if context.ended is not None:
            call.cancel(context.ended)
        try:
            yield
        except asyncio.CancelledError:
            if context.ended is None:
                raise
            call.uncancel()
            raise context.ended from None
        finally:
            context.calls.discard(call)

    def recheck_superseded(self, stored: Iterable[Span]) -> None:
        """Ask for an attempt again at its next call if the store has marked its spans as superseded."""
        for span in stored:
            if SUPERSEDED in span.attributes and (context := self._contexts.get(span.attempt_id)):
                context.checked_at = -math.inf

    async def close(self) -> None:
        """Stop the watch. A later call starts it again."""
        if self._watcher is not None and not self._watcher.done():
            self._watcher.cancel()
            await asyncio.wait({self._watcher})

    # -- what the store says -----------------------------------------------------------------------------------------

    async def _load(self, rollout_id: str, attempt_id: str) -> AttemptContext:
        context = self._contexts.get(attempt_id)
        if context is None or context.rollout_id != rollout_id:
            context = await self._read(rollout_id, attempt_id)
        await self._check([context])
        if context.ended is not None:
            raise context.ended
        self._contexts[attempt_id], context.called_at = context, context.checked_at
        self._contexts.move_to_end(attempt_id)
        if len(self._contexts) > self._limit:
            self._contexts.pop(next((name for name, each in self._contexts.items() if not each.calls), ""), None)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        return context

    async def _read(self, rollout_id: str, attempt_id: str) -> AttemptContext:
        rollout = await self.store.get_rollout_by_id(rollout_id)
        if rollout is None:
            raise _unknown_rollout(rollout_id)
        if rollout.resources_id is None:
            update = await self.store.get_latest_resources()
        else:
            update = await self.store.get_resources_by_id(rollout.resources_id)
            if update is None:
                message = (
                    f"rollout {rollout.rollout_id!r} uses resources {rollout.resources_id!r}, which are not stored"
                )
                raise ApiError(500, message, code="resources_not_found", retry=False)
        resources = update.resources if update else {}
        return AttemptContext(
            rollout_id,
            attempt_id,
            {llm.model: (name, llm) for name, llm in resources.items() if isinstance(llm, LLM)},
            rollout.resources_id is not None,
            attempt_trace_id(attempt_id),
            rollout.mode,
            await load_replay(self.store, rollout.metadata.get(BRANCH)),
        )

    async def _watch(self) -> None:
        """While the store does not answer, the log says so."""
        is_blind = False
        while self._contexts:
            await asyncio.sleep(self._check_seconds)
            since = time.monotonic() - self._idle_seconds
            contexts = [each for each in self._contexts.values() if each.calls or each.called_at > since]
            try:
                for start in range(0, len(contexts), _ATTEMPTS_PER_QUERY):
                    await self._check(contexts[start : start + _ATTEMPTS_PER_QUERY])
            except Exception as error:
                if not is_blind:
                    unexpected = None if isinstance(error, StoreError) else error
                    message = "the store does not say which attempts have ended, so calls ask it themselves: %s"
                    logger.warning(message, error, exc_info=unexpected)
                is_blind = True
            else:
                if is_blind:
                    logger.warning("the store says again which attempts have ended")
                is_blind = False

    async def _check(self, contexts: Sequence[AttemptContext]) -> None:
        """Confirm the attempts that run, and end the others. One query, and another one where the latest attempt of a
        rollout is not clear."""
        now = time.monotonic()
        found = await self.store.get_latest_attempts([each.rollout_id for each in contexts])
        latest = {each.rollout_id: each for each in found}
        clear = {each.attempt_id for each in found if each.status != "unresponsive"}
        unclear = [each.rollout_id for each in contexts if each.attempt_id not in clear]
        rollouts = await self.store.query_rollouts(rollout_id_in=unclear) if unclear else []
        rollout_of = {each.rollout_id: each for each in rollouts}
        for context in contexts:
            attempt = latest.get(context.rollout_id)
            reason = await self._end_reason(context, attempt, rollout_of.get(context.rollout_id))
            if reason is None:
                context.checked_at, context.worker_id = now, attempt and attempt.worker_id
            elif context.ended is None:
                self._end(context, reason)

    async def _end_reason(
        self, context: AttemptContext, latest: Attempt | None, rollout: Rollout | None
    ) -> ApiError | None:
        """Why an attempt takes no more calls; None while it does. `latest` is the latest attempt of its rollout."""
        rollout_id, attempt_id = context.rollout_id, context.attempt_id
        if latest is not None and latest.attempt_id == attempt_id:
            if latest.status in ("succeeded", "failed", "timeout"):
                message = f"the attempt {attempt_id!r} of rollout {rollout_id!r} ended as {latest.status}"
            elif rollout is not None and rollout.finished:
                outcome = "was cancelled" if rollout.status == "cancelled" else "has ended"
                message = f"the rollout {rollout_id!r} {outcome}"
            else:
                return None
            return conflict("attempt_ended", f"{message}; it takes no more calls")
        if rollout is None:
            return _unknown_rollout(rollout_id)
        known = await self.find(attempt_id)
        if known is None or known.rollout_id != rollout_id:
            return ApiError(404, f"rollout {rollout_id!r} has no attempt {attempt_id!r}", code="attempt_not_found")
        message = f"a later attempt of rollout {rollout_id!r} has taken the place of {attempt_id!r}; stop calling"
        return conflict("attempt_superseded", message)

    def _end(self, context: AttemptContext, reason: ApiError) -> None:
        context.ended = reason
        if self._contexts.get(context.attempt_id) is context:
            del self._contexts[context.attempt_id]
        self._forget(context.rollout_id, context.attempt_id)
        for call in context.calls:
            call.cancel(reason)


def _unknown_rollout(rollout_id: str) -> ApiError:
    return ApiError(404, f"the store knows no rollout {rollout_id!r}", code="rollout_not_found")


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


def read_baggage(header: str) -> dict[str, str]:
    """The decoded entries of a W3C `baggage` header, without properties and malformed entries."""
    entries: dict[str, str] = {}
    for entry in header.split(","):
        key, equals, value = entry.partition(";")[0].partition("=")
        if equals and key.strip() and value.strip():
            entries[key.strip()] = unquote(value.strip())
    return entries


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


def repeat_attributes(headers: Mapping[str, str], path: str, body: bytes) -> Json:
    """Attributes of the call's span: a digest, equal for equal requests (`names.REQUEST`), and the number of times its
    client sent the request before. `path` is the API path, without the attempt."""
    digest = blake2b(body, digest_size=12, key=path.encode()[:64])
    identities = [headers[name] for name in _IDENTITIES if name in headers]
    for identity in identities:
        digest.update(b"\0" + identity.encode())
    attributes: Json = {names.REQUEST: f"{names.SENT_ONCE if identities else ''}{digest.hexdigest()}"}
    count = headers.get(_RETRIES, "")
    if count.isdecimal() and len(count) < 9 and (retries := int(count)):
        attributes[names.RETRIES] = retries
    return attributes


MODE_TEMPERATURES: Final = {"train": 1.0, "val": 0.7}
"""The modes in 1.0's URLs, and the temperature that 1.0 samples with in each, whatever the agent asks for."""


class Agent(Struct, frozen=True):
    """The agent behind a call, and the model it asks for."""

    name: str | None = None
    key: str | None = None
    """12 hexadecimal digits, a digest of the system prompt and the names of the tools; None if a call has neither."""
    model: str | None = None
    """The model to serve, with aliases resolved; None if the call names none."""
    ignored: tuple[str, ...] = ()
    """Other names in the call that were ignored."""


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
    ignored: tuple[str, ...] = ()
    """Contradicting claims that were ignored."""
    agent: Agent = Agent()
    """Set once the body is parsed."""
    repeat: Json = {}
    """`repeat_attributes`, once the body is read."""

    @property
    def attempt(self) -> AttemptIds | None:
        """(rollout_id, attempt_id)."""
        if self.rollout_id is None or self.attempt_id is None:
            return None
        return self.rollout_id, self.attempt_id

    @property
    def temperature(self) -> float | None:
        """The temperature of the mode, unless the trainer sets another."""
        return MODE_TEMPERATURES.get(self.mode or "")

    @property
    def affinity(self) -> str:
        """Calls with the same one go to the same server while it is healthy."""
        return "/".join(self.attempt or ())

    def attributes(self) -> Json:
        """Attributes of the call's span that describe the caller."""
        agent = self.agent
        attributes: Json = {
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
        self, attempts: AttemptTable, secret: str, *, require_key: bool = False, allow_unattributed: bool = False
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
        baggage = read_baggage(headers.get("baggage", ""))
        claims = (
            Hint("trace", None, trace_id and attempt_of_trace(trace_id)),
            Hint("baggage", baggage.get(ROLLOUT_BAGGAGE), baggage.get(ATTEMPT_BAGGAGE)),
        )
        hints = [claim for claim in claims if claim.rollout_id or claim.attempt_id]
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
        if attempt is None:
            return Caller(trace_id=trace_id, parent_id=parent_id, mode=mode)
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
        return Caller(*attempt, trace_id, parent_id, source, mode, (*others, *map(str, mismatches)))

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
        of_key = read_attempt_key(self._secret, key) if is_ours else None
        worker_id = read_worker_key(self._secret, key) if is_ours and of_key is None else None
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
