"""What an agent may write of its own attempt: everything but what the gateway alone knows.

Tokens, log-probabilities, the weights that drew them, costs and repeated requests decide what is learned and what is
paid, so only the gateway records them. Whoever takes spans from an agent (events, OTLP sent with an attempt's key, a
runner) passes them through `agent_span`; what is stripped is named in an attribute of the span. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from agentlightning import span as names
from agentlightning.rollouts import ATTEMPT_TRANSITIONS, Attempt
from agentlightning.span import Span

GATEWAY_ATTRIBUTES: Final = frozenset(
    {
        names.PROMPT_TOKEN_IDS,
        names.RESPONSE_TOKEN_IDS,
        names.LOGPROBS,
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
    }
)
"""Attributes that are the gateway's or the store's to write."""


def agent_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes an agent may write; the same object where all of them are."""
    if GATEWAY_ATTRIBUTES.isdisjoint(attributes):
        return attributes
    kept = {name: value for name, value in attributes.items() if name not in GATEWAY_ATTRIBUTES}
    return kept | {names.STRIPPED: sorted(GATEWAY_ATTRIBUTES & attributes.keys())}


def agent_span(span: Span) -> Span:
    """The span as an agent may write it; the same object where nothing had to be stripped."""
    attributes = agent_attributes(span.attributes)
    return span if attributes is span.attributes else replace(span, attributes=attributes)


def late_mark(attempt: Attempt | None) -> Mapping[str, Any]:
    """What is added to the attributes of a span that an agent sends now: a mark, where its attempt has ended."""
    return {names.LATE: True} if attempt is not None and not ATTEMPT_TRANSITIONS[attempt.status] else {}
