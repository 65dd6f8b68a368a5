"""Rollouts and attempts: what they are, which states they pass through, and the addresses of an attempt.

A *rollout* is one execution of an agent on one task; an *attempt* is one try of it. The store alone changes their
status; this module states the rules it follows.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from typing import Any, Final, Literal
from urllib.parse import quote, urlsplit

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from agentlightning.util.frozen_struct import FrozenStruct, as_dataclass

RolloutStatus = Literal["queuing", "preparing", "running", "succeeded", "failed", "cancelled", "requeuing"]
AttemptStatus = Literal["preparing", "running", "succeeded", "failed", "timeout", "unresponsive"]
RolloutMode = Literal["train", "val", "test"]

WAITING: frozenset[str] = frozenset({"queuing", "requeuing"})
"""A runner may claim these."""
FINISHED: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
PRIVATE_QUEUE: Final = "_"
"""What the name of a private queue begins with: only those who name it claim from it."""


def is_private_queue(name: str) -> bool:
    """Whether claims that name no queue leave this one alone."""
    return name.startswith(PRIVATE_QUEUE)


ROLLOUT_TRANSITIONS: dict[str, frozenset[str]] = {
    "queuing": frozenset({"preparing", "cancelled", "failed"}),
    "requeuing": frozenset({"preparing", "cancelled", "failed"}),
    "preparing": frozenset({"running", "succeeded", "failed", "cancelled", "requeuing"}),
    "running": frozenset({"succeeded", "failed", "cancelled", "requeuing"}),
    "succeeded": frozenset(),
    "failed": frozenset({"requeuing"}),
    "cancelled": frozenset({"requeuing"}),
}
"""Legal next states. A finished rollout moves only when someone explicitly queues it again."""

ATTEMPT_TRANSITIONS: dict[str, frozenset[str]] = {
    "preparing": frozenset({"running", "succeeded", "failed", "timeout", "unresponsive"}),
    "running": frozenset({"succeeded", "failed", "timeout", "unresponsive"}),
    "unresponsive": frozenset({"running", "succeeded", "failed", "timeout"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "timeout": frozenset(),
}
"""Legal next states. An unresponsive attempt may come back while it is still the latest one."""


class RolloutConfig(BaseModel):
    """Time limits and retry policy of one rollout; the store enforces them.

    >>> agl.RolloutConfig(timeout_seconds=60, max_attempts=2).retry_condition
    ('failed', 'timeout', 'unresponsive')
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout_seconds: float | None = Field(default=None, gt=0)
    """An attempt older than this becomes `timeout`."""
    unresponsive_seconds: float | None = Field(default=None, gt=0)
    """An attempt with no heartbeat or span for this long becomes `unresponsive`."""
    max_attempts: int = Field(default=1, ge=1)
    """How many attempts a rollout may have in all."""
    retry_condition: tuple[AttemptStatus, ...] = ("failed", "timeout", "unresponsive")
    """Attempt states after which the rollout is queued again, while attempts are left."""


@as_dataclass
class Attempt(FrozenStruct, frozen=True, gc=False):
    """One try of a rollout.

    >>> agl.Attempt("ro-1", "at-1", 1, start_time=0.0).status
    'preparing'
    """

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """1 for the first attempt of the rollout."""
    start_time: float
    status: AttemptStatus = "preparing"
    end_time: float | None = None
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    """`error` holds type, message and traceback of a failure."""


@as_dataclass
class Rollout(FrozenStruct, frozen=True, gc=False):
    """One execution of an agent on one task.

    >>> agl.Rollout("ro-1", {"question": "6 x 7"}, start_time=0.0).finished
    False
    """

    rollout_id: str
    input: Any
    """The task: any JSON value."""
    start_time: float
    status: RolloutStatus = "queuing"
    mode: RolloutMode | None = None
    resources_id: str | None = None
    """The version of the resources to use; None means the latest when it is claimed."""
    end_time: float | None = None
    config: RolloutConfig = msgspec.field(default_factory=RolloutConfig)
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    queue: str = "default"
    """The queue it waits in: the one named when it was made, else its mode, else "default"."""
    priority: int = 0
    """Higher is claimed first."""

    @property
    def finished(self) -> bool:
        return self.status in FINISHED


@as_dataclass
class AttemptedRollout(Rollout, frozen=True, kw_only=True, gc=False):
    """A rollout together with the attempt that was just started for it.

    >>> attempt = agl.Attempt("ro-1", "at-1", 1, start_time=0.0)
    >>> agl.AttemptedRollout("ro-1", {"question": "6 x 7"}, start_time=0.0, attempt=attempt).attempt.attempt_id
    'at-1'
    """

    attempt: Attempt


@as_dataclass
class EnqueueRolloutRequest(FrozenStruct, frozen=True, gc=False):
    """What `enqueue_many_rollouts` takes for each rollout.

    >>> requests = [agl.EnqueueRolloutRequest({"number": number}, mode="train") for number in range(3)]
    >>> store = agl.InMemoryLightningStore()
    >>> len(asyncio.run(store.enqueue_many_rollouts(requests)))
    3
    >>> asyncio.run(store.close())
    """

    input: Any
    mode: RolloutMode | None = None
    resources_id: str | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None
    rollout_id: str | None = None
    """Made by the caller to make a repeated request harmless; the store makes one otherwise."""
    queue: str | None = None
    """None: the mode's name, or "default"."""
    priority: int = 0
    """Higher is claimed first."""


_attempt_digits = re.compile(r"[0-9a-f]{24}")

# -- the addresses of an attempt -------------------------------------------------------------------------------------

ATTEMPT_HEADER: Final = "x-agentlightning-attempt"
"""Holds the key of the attempt a call is made in, whatever client makes it."""
WORK_HEADER: Final = "x-agentlightning-work-of"
"""Holds the key of the attempt that put into a queue what the caller took from it, where the caller was started by
another attempt: a call that nothing else says to be that attempt's is refused."""
JUDGE_HEADER: Final = "x-agentlightning-judge"
"""On a call that a reward function makes: the id of the attempt it judges."""
ROLLOUT_BAGGAGE: Final = "agentlightning.rollout_id"
ATTEMPT_BAGGAGE: Final = "agentlightning.attempt_id"
AGENT_BAGGAGE: Final = "agentlightning.agent"
"""Entries of the W3C `baggage` header."""


def attempt_path(rollout_id: str, attempt_id: str) -> str:
    """The URL path under which everything of one attempt is served."""
    return f"/rollout/{rollout_id}/attempt/{attempt_id}"


def attempt_key(secret: str, rollout_id: str, attempt_id: str) -> str:
    """An API key that names one attempt and is signed with `secret`, so that no agent can speak for another."""
    body = f"{rollout_id}.{attempt_id}"
    signature = hmac.new(secret.encode(), body.encode(), hashlib.sha256).hexdigest()[:24]
    return f"agl-{body}.{signature}"


def attempt_secret(token: str | None) -> str:
    """The secret that attempts' keys are signed with where a server and its runners share an access token: both can
    make it, and an agent that knows its own key can make no other. Without a token it protects from mix-ups only."""
    return hmac.new(b"agentlightning attempt keys", (token or "").encode(), hashlib.sha256).hexdigest()


def trace_id_of(attempt_id: str) -> str | None:
    """The W3C trace id of an attempt (32 hexadecimal digits), from which `attempt_of_trace` gets its id back without
    looking anything up. None for an id the store did not make."""
    digits = attempt_id.removeprefix("at-")
    if not attempt_id.startswith("at-") or not _attempt_digits.fullmatch(digits):
        return None
    return digits + hashlib.blake2b(digits.encode(), digest_size=4).hexdigest()


def root_span_id_of(attempt_id: str) -> str | None:
    """The span id that TRACEPARENT names as the parent of what an agent records (16 hexadecimal digits). No such span
    is kept: a child of it has no parent. None for an id the store did not make."""
    trace_id = trace_id_of(attempt_id)
    return None if trace_id is None else hashlib.blake2b(trace_id.encode(), digest_size=8).hexdigest()


def attempt_of_trace(trace_id: str) -> str | None:
    """The attempt whose `trace_id_of` this is, else None."""
    attempt_id = f"at-{trace_id[:24]}"
    return attempt_id if trace_id_of(attempt_id) == trace_id else None


def read_attempt_key(secret: str, key: str) -> tuple[str, str] | None:
    """(rollout_id, attempt_id) of a key made by `attempt_key` with the same secret, else None."""
    parts = key.removeprefix("agl-").split(".")
    if not key.startswith("agl-") or len(parts) != 3:
        return None
    rollout_id, attempt_id, _ = parts
    return (rollout_id, attempt_id) if _is_same(attempt_key(secret, rollout_id, attempt_id), key) else None


def _is_same(key: str, given: str) -> bool:
    """As bytes: strangers send whatever they like, and texts are compared only where they are ASCII."""
    return hmac.compare_digest(key.encode(errors="replace"), given.encode(errors="replace"))


def worker_path(worker_id: str) -> str:
    """The URL path for model calls of whatever attempt a worker is running."""
    return f"/worker/{quote(worker_id, safe='')}"


def worker_key(secret: str, worker_id: str) -> str:
    """An API key that names one worker and is signed with `secret`; it speaks for the attempts of that worker."""
    body = f"worker-{base64.urlsafe_b64encode(worker_id.encode()).decode().rstrip('=')}"
    signature = hmac.new(secret.encode(), body.encode(), hashlib.sha256).hexdigest()[:24]
    return f"agl-{body}.{signature}"


def read_worker_key(secret: str, key: str) -> str | None:
    """The worker_id of a key made by `worker_key` with the same secret, else None."""
    encoded, dot, _ = key.removeprefix("agl-worker-").partition(".")
    if not key.startswith("agl-worker-") or not dot:
        return None
    try:
        worker_id = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
    except (binascii.Error, ValueError):
        return None
    return worker_id if _is_same(worker_key(secret, worker_id), key) else None


def in_process_environment(environment: Mapping[str, str], worker_id: str) -> dict[str, str]:
    """The environment variables of an attempt for an agent that shares its process with other attempts.

    What the SDKs read leads to the worker *and* the attempt: a client made from it by code that keeps it for later
    attempts is recognised as such, and its calls belong to the attempt that makes them. What OpenTelemetry SDKs read
    is left out: one that is set up once in this process would give the spans of every later attempt to the first."""
    variables = {name: value for name, value in environment.items() if not name.startswith("OTEL_")}
    if "OPENAI_BASE_URL" in variables:
        path = attempt_path(environment["AGL_ROLLOUT_ID"], environment["AGL_ATTEMPT_ID"])
        root = variables["OPENAI_BASE_URL"].removesuffix(f"{path}/v1")
        variables |= _sdk_environment(f"{root}{worker_path(worker_id)}{path}/v1", environment["AGL_KEY"])
    return variables


def worker_environment(server_url: str, secret: str, worker_id: str) -> dict[str, str]:
    """The environment variables for a client that is made once in a process and used by all its attempts."""
    return {
        "AGL_WORKER_BASE_URL": f"{server_url.rstrip('/')}{worker_path(worker_id)}/v1",
        "AGL_WORKER_KEY": worker_key(secret, worker_id),
    }


def import_environment(server_url: str, secret: str, worker_id: str) -> dict[str, str]:
    """The environment variables that an agent is imported with, before there is an attempt: a client made then, from
    the environment alone, leads to the attempt its worker is running."""
    variables = worker_environment(server_url, secret, worker_id)
    return variables | _sdk_environment(variables["AGL_WORKER_BASE_URL"], variables["AGL_WORKER_KEY"])


def _sdk_environment(base_url: str, key: str) -> dict[str, str]:
    """What every SDK is known to read."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
    }


def attempt_environment(
    server_url: str,
    secret: str,
    rollout_id: str,
    attempt_id: str,
    redirect: bool = True,
    inherited: Mapping[str, str] | None = None,
    model_url: str | None = None,
) -> dict[str, str]:
    """The environment variables that lead an agent to its own attempt.

    With `redirect`, every name an SDK is known to read leads its model calls to `model_url`, the server of the policy
    where that is another one than `server_url`, which events and traces go to; without, they go where they always go,
    and only events and traces have an address. What an OpenTelemetry SDK records says which attempt it
    belongs to, and comes here unless `inherited` (by default this process's own environment) names an OTLP endpoint.
    """
    root = server_url.rstrip("/") + attempt_path(rollout_id, attempt_id)
    key = attempt_key(secret, rollout_id, attempt_id)
    own = {
        "AGL_EVENT_URL": f"{root}/events",
        "AGL_KEY": key,
        "AGL_ROLLOUT_ID": rollout_id,
        "AGL_ATTEMPT_ID": attempt_id,
    }
    known = os.environ if inherited is None else inherited
    own |= _tracing_environment(server_url, key, rollout_id, attempt_id, known) | _past_proxies(server_url, known)
    if not redirect:
        return own
    models = (model_url or server_url).rstrip("/") + attempt_path(rollout_id, attempt_id) + "/v1"
    own |= _past_proxies(models, {**known, **own})
    return own | {"AGL_OPENAI_BASE_URL": models} | _sdk_environment(models, key)


def agent_process_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that runs agents for many attempts: without the access token of the server, which is
    no business of theirs, and without the addresses of an attempt that we may run in ourselves."""
    kept = {name: value for name, value in inherited.items() if name not in _NOT_FOR_AGENTS}
    return kept | quiet_environment(kept)


_NOT_FOR_AGENTS = frozenset(
    {"AGL_TOKEN", "AGL_EVENT_URL", "AGL_KEY", "AGL_ROLLOUT_ID", "AGL_ATTEMPT_ID", "AGL_OPENAI_BASE_URL", "TRACEPARENT"}
)


def quiet_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep agent frameworks from telemetry and from downloads at start-up; what is set already
    stays."""
    return {name: value for name, value in _QUIET.items() if name not in inherited}


_QUIET: Final = {
    "DO_NOT_TRACK": "1",
    "ANONYMIZED_TELEMETRY": "False",  # browser-use, Chroma, mem0
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_TRACKING": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}


def _past_proxies(server_url: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Where calls go through a proxy: the server, which is on this machine or in the cluster, is reached without."""
    host = urlsplit(server_url).hostname
    if not host or not any(inherited.get(name) for name in _PROXIES):
        return {}
    excepted = inherited.get("NO_PROXY") or inherited.get("no_proxy") or ""
    hosts = [name.strip() for name in excepted.split(",") if name.strip()]
    listed = ",".join(hosts if host in hosts or "*" in hosts else [*hosts, host])
    return {"NO_PROXY": listed, "no_proxy": listed}


_PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy")
OTLP_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The environment variables that say where traces go, the first that is set."""


def _tracing_environment(
    server_url: str, key: str, rollout_id: str, attempt_id: str, inherited: Mapping[str, str]
) -> dict[str, str]:
    """What OpenTelemetry SDKs read. Only traces are sent here, as metrics and logs have no place in a store."""
    ids = f"agentlightning.rollout_id={quote(rollout_id)},agentlightning.attempt_id={quote(attempt_id)}"
    resource = ",".join(filter(None, (inherited.get("OTEL_RESOURCE_ATTRIBUTES", "").strip(), ids)))
    variables = {"OTEL_RESOURCE_ATTRIBUTES": resource}
    trace_id, parent_id = trace_id_of(attempt_id), root_span_id_of(attempt_id)
    if trace_id is not None and parent_id is not None:
        variables["TRACEPARENT"] = f"00-{trace_id}-{parent_id}-01"
    if not server_url or any(inherited.get(name) for name in OTLP_ENDPOINTS):
        return variables
    return variables | {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{server_url.rstrip('/')}/v1/traces",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"authorization={quote(f'Bearer {key}')}",
    }
