"""Makes spans of what happens to attempts, and valid ones of those that agents send: strips attributes that only the
gateway and the store may write, and replaces values that no store can hold. Pure.

Tokens, log-probabilities, policy versions, costs and retries determine what is learned and paid, so only the gateway
records them. Every receiver of agents' spans (events, OTLP with an attempt's key, the runner) passes them through
`agent_span`; an attribute of the span names what was stripped.

A span that a store has rejected is sanitized: a text cut in the middle of an emoji or a NaN score must not lose it.
Values that JSON cannot represent become text, as in OTLP; unpaired surrogates, and NUL in names, become U+FFFD.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from agentlightning import span as names
from agentlightning.attempt_address import attempt_trace_id
from agentlightning.rollouts import ATTEMPT_TRANSITIONS, Attempt
from agentlightning.span import Span, new_span_id
from agentlightning.util.json_values import Json

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
        names.TURN_LIMIT,
        names.REPLAYS,
        names.BEGUN,
        names.REPLAY_MISMATCH,
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


def agent_attributes(attributes: Json) -> Json:
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


def event_span(rollout_id: str, attempt_id: str, name: str, attributes: Json, error: str | None = None) -> Span:
    """A span of an attempt that begins and ends now; with `error`, its status is ERROR."""
    now, code = time.time(), "UNSET" if error is None else "ERROR"
    trace_id, span_id = attempt_trace_id(attempt_id), new_span_id()
    return Span(rollout_id, attempt_id, name, now, now, 0, trace_id, span_id, None, code, error, attributes)


# -- values that no store can hold -------------------------------------------------------------------------------------

_INT64: Final = 2**63
_DEEPEST: Final = 64
"""Maximum nesting of lists and objects; deeper values become text."""


def sanitize_span(span: Span) -> Span:
    """A span that every store accepts; equal to the given one if that is valid."""
    return replace(
        span,
        name=valid_text(span.name).replace("\0", "\N{REPLACEMENT CHARACTER}"),
        status_message=None if span.status_message is None else valid_text(span.status_message),
        attributes=_object(span.attributes, 0),
        resource=_object(span.resource, 0),
        events=tuple(
            replace(event, name=valid_text(event.name), attributes=_object(event.attributes, 0))
            for event in span.events
        ),
    )


def valid_text(text: str) -> str:
    """The text with unpaired surrogates replaced, so that it can be encoded as UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def number(value: float) -> float | str:
    """The number if JSON can represent it, else its name: "NaN", "Infinity" or "-Infinity"."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _object(values: Mapping[Any, Any], depth: int) -> Json:
    return {valid_text(str(name)): sanitize_value(value, depth + 1) for name, value in values.items()}


def sanitize_value(value: Any, depth: int = 0) -> Any:
    """A JSON value that every store accepts; equal to the given one if that is valid."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, int):
        return value if -_INT64 <= value < _INT64 else str(value)
    if isinstance(value, float):
        return number(value)
    if depth < _DEEPEST and isinstance(value, Mapping):
        return _object(cast("Mapping[Any, Any]", value), depth)
    if depth < _DEEPEST and isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [sanitize_value(item, depth + 1) for item in cast("Sequence[Any]", value)]
    return valid_text(str(value))
