"""Environment variables that connect an agent to its attempt: model endpoint, events, tracing and proxies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, urlsplit

from agentlightning.attempt_address import (
    attempt_key,
    attempt_path,
    key_url,
    root_span_id_of,
    trace_id_of,
    worker_key,
    worker_path,
)

PATIENCE: Final = "AGL_PATIENCE"
"""Variable with the seconds for which what a program emits waits for a server that does not answer."""
PATIENCE_SECONDS: Final = 60.0
"""The default of it, of runners and of clients of a server: all of them survive the same restart."""


def in_process_environment(environment: Mapping[str, str], worker_id: str) -> dict[str, str]:
    """The variables of an attempt for an agent that shares its process with other attempts.

    The SDKs' base URL names the worker beside the attempt, so that calls of a client that is reused in later attempts
    are attributed to the attempt that makes them. Variables of OpenTelemetry SDKs are omitted: an SDK that is set up
    once in the process would record the spans of all later attempts under the first one."""
    variables = {name: value for name, value in environment.items() if not name.startswith("OTEL_")}
    if "OPENAI_BASE_URL" in variables:
        root = variables["OPENAI_BASE_URL"].rpartition("/key/")[0]
        variables |= sdk_environment(key_url(root + worker_path(worker_id), environment["AGL_KEY"]))
    return variables


def worker_environment(server_url: str, secret: str, worker_id: str) -> dict[str, str]:
    """The variables for a client that is created once in a process and shared by all of its attempts."""
    return {
        "AGL_WORKER_BASE_URL": f"{server_url.rstrip('/')}{worker_path(worker_id)}/v1",
        "AGL_WORKER_KEY": worker_key(secret, worker_id),
    }


def import_environment(server_url: str, secret: str, worker_id: str) -> dict[str, str]:
    """The variables during the import of an agent, before there is an attempt: clients created at import time are
    attributed to the attempt that the worker is running."""
    variables = worker_environment(server_url, secret, worker_id)
    return variables | sdk_environment(key_url(server_url, variables["AGL_WORKER_KEY"]))


PLACEHOLDER: Final = "sk-agentlightning"
"""The API key of SDKs, which need one. The key of the attempt stands in the base URL instead: a client whose code has
another address never sends it there."""


def sdk_environment(base_url: str) -> dict[str, str]:
    """The variables that SDKs of model providers read, for a base URL that holds the key."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": PLACEHOLDER,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": PLACEHOLDER,
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
    """The variables that connect an agent to its attempt.

    Events and traces go to `server_url`. With `redirect`, the variables of provider SDKs send model calls to
    `model_url` (default: `server_url`); without it, model calls are not redirected. OpenTelemetry SDKs mark their
    spans with the attempt, and export them to `server_url` unless `inherited` (default: this process's environment)
    names an OTLP endpoint.
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
    own |= _tracing_environment(server_url, key, rollout_id, attempt_id, known) | _no_proxy_for(server_url, known)
    if not redirect:
        return own
    models = key_url(model_url or server_url, key)
    own |= _no_proxy_for(models, {**known, **own})
    return own | {"AGL_OPENAI_BASE_URL": models} | sdk_environment(models)


def agent_process_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that runs agents of many attempts: without the server's access token, which agents
    must not see, and without the variables of an attempt that this process itself may run in."""
    allowed = {name: value for name, value in inherited.items() if name not in _WITHHELD}
    return allowed | telemetry_opt_outs(allowed)


_WITHHELD = frozenset(
    {"AGL_TOKEN", "AGL_EVENT_URL", "AGL_KEY", "AGL_ROLLOUT_ID", "AGL_ATTEMPT_ID", "AGL_OPENAI_BASE_URL", "TRACEPARENT"}
)


def telemetry_opt_outs(inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables that disable telemetry and start-up downloads of agent frameworks, except those already set."""
    return {name: value for name, value in _OPT_OUTS.items() if name not in inherited}


_OPT_OUTS: Final = {
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


def _no_proxy_for(server_url: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """If the environment sets a proxy: variables that exclude the server, which is local or in the cluster."""
    host = urlsplit(server_url).hostname
    if not host or not any(inherited.get(name) for name in _PROXIES):
        return {}
    excluded = inherited.get("NO_PROXY") or inherited.get("no_proxy") or ""
    hosts = [name.strip() for name in excluded.split(",") if name.strip()]
    listed = ",".join(hosts if host in hosts or "*" in hosts else [*hosts, host])
    return {"NO_PROXY": listed, "no_proxy": listed}


_PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy")
OTLP_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables that name the endpoint for traces, in order of precedence."""


def _tracing_environment(
    server_url: str, key: str, rollout_id: str, attempt_id: str, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The variables of OpenTelemetry SDKs. Only traces are exported: a store has no metrics or logs."""
    ids = f"agentlightning.rollout_id={quote(rollout_id)},agentlightning.attempt_id={quote(attempt_id)}"
    resource = ",".join(filter(None, (inherited.get("OTEL_RESOURCE_ATTRIBUTES", "").strip(), ids)))
    variables = {"OTEL_RESOURCE_ATTRIBUTES": resource}
    if (trace_id := trace_id_of(attempt_id)) is not None:
        variables["TRACEPARENT"] = f"00-{trace_id}-{root_span_id_of(attempt_id)}-01"
    if not server_url or any(inherited.get(name) for name in OTLP_ENDPOINTS):
        return variables
    return variables | {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{server_url.rstrip('/')}/v1/traces",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"authorization=Bearer%20{quote(key)}",
    }
