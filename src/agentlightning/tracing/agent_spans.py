"""Makes spans of what happens to attempts, and strips attributes that only the gateway and the store may write.

Tokens, log-probabilities, policy versions, costs and retries determine what is learned and paid, so only the gateway
records them. Every receiver of agents' spans (events, OTLP with an attempt's key, the runner) passes them through
`agent_span`; an attribute of the span names what was stripped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from agentlightning import span as names
from agentlightning.attempt_address import attempt_trace_id
from agentlightning.rollouts import ATTEMPT_TRANSITIONS, Attempt
from agentlightning.span import Span, new_span_id

GATEWAY_ATTRIBUTES: Final = frozenset(
    {
        names.PROMPT_TOKEN_IDS,
        names.RESPONSE_TOKEN_IDS,
        names.LOGPROBS,
        names.KEPT_SETS,
        names.TOP_LOGPROBS,
        names.RESHAPED,
        names.OVERRIDDEN,
        names.POLICY_VERSION,
        names.POLICY_VERSIONS,
        names.TOKENS,
        names.PROVIDER_RETRIES,
        names.COST,
        names.REQUEST,
        names.RETRIES,
        names.AGENT_KEY,
        names.ATTRIBUTION,
        names.ATTRIBUTION_IGNORED,
        names.MODE,
        names.CONTINUES,
        names.DRIFT,
        names.DRIFT_REASON,
        names.CONSTRAINT,
        names.VIOLATIONS,
        names.SUPERSEDED,
        names.LATE,
        names.STRIPPED,
        names.AIR_RULE,
        names.AIR_CALL,
        names.AIR_SOURCE,
        names.RESCORED,
        names.FEEDBACK_SOURCE,
    }
)
"""Attributes that only the gateway or the store writes."""


def agent_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes that an agent may write; the same object if nothing is stripped."""
    if GATEWAY_ATTRIBUTES.isdisjoint(attributes):
        return attributes
    allowed = {name: value for name, value in attributes.items() if name not in GATEWAY_ATTRIBUTES}
    return allowed | {names.STRIPPED: sorted(GATEWAY_ATTRIBUTES & attributes.keys())}


def agent_span(span: Span) -> Span:
    """The span without the attributes that an agent must not write; the same object if it has none."""
    attributes = agent_attributes(span.attributes)
    return span if attributes is span.attributes else replace(span, attributes=attributes)


def late_mark(attempt: Attempt | None) -> Mapping[str, Any]:
    """Attributes to add to a span that arrives now: a mark if its attempt has ended."""
    return {names.LATE: True} if attempt is not None and not ATTEMPT_TRANSITIONS[attempt.status] else {}


def event_span(
    rollout_id: str, attempt_id: str, name: str, attributes: dict[str, Any], error: str | None = None
) -> Span:
    """A span of an attempt that begins and ends now; with `error`, its status is ERROR."""
    now, code = time.time(), "UNSET" if error is None else "ERROR"
    trace_id, span_id = attempt_trace_id(attempt_id), new_span_id()
    return Span(rollout_id, attempt_id, name, now, now, 0, trace_id, span_id, None, code, error, attributes)
