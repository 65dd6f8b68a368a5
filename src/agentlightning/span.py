"""Spans, and the one vocabulary of their attributes.

A span is one recorded operation, OpenTelemetry shaped. Names follow OTel GenAI where it has one; `agentlightning.*`
names what it lacks. Order within an attempt is `sequence_id`, given by the store; times are for people.
"""

from __future__ import annotations

import os
import random
from typing import Any, Final

import msgspec

from agentlightning.util.frozen_struct import FrozenStruct, as_dataclass

# -- names of spans --------------------------------------------------------------------------------------------------

REWARD: Final = "gen_ai.evaluation.result"
"""A reward. One span for each named dimension set; see `REWARD_VALUES`."""
MESSAGE: Final = "agentlightning.message"
OBJECT: Final = "agentlightning.object"
EXCEPTION: Final = "agentlightning.exception"
OPERATION: Final = "agentlightning.operation"
ANNOTATION: Final = "agentlightning.annotation"

# -- attributes from OTel GenAI --------------------------------------------------------------------------------------

OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_STOP: Final = "gen_ai.request.stop_sequences"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
AGENT_NAME: Final = "gen_ai.agent.name"
EVALUATION_NAME: Final = "gen_ai.evaluation.name"
SCORE_VALUE: Final = "gen_ai.evaluation.score.value"
ERROR_TYPE: Final = "error.type"

# -- attributes of our own -------------------------------------------------------------------------------------------

PROMPT_TOKEN_IDS: Final = "agentlightning.prompt_token_ids"
"""list[int]: every token the engine was given."""
RESPONSE_TOKEN_IDS: Final = "agentlightning.response_token_ids"
"""list[int]: every token the policy chose, the end-of-turn token included."""
LOGPROBS: Final = "agentlightning.logprobs"
"""list[float], one for each response token, under the distribution it was drawn from (natural logarithm)."""
RESHAPED: Final = "agentlightning.reshaped"
"""list[str]: what, beside temperature, top_p and top_k, changed the distribution that tokens were drawn from."""
OVERRIDDEN: Final = "agentlightning.sampling.overridden"
"""list[str]: sampling parameters that the call of a training rollout asked for and did not get
(gateway/on_policy.py)."""
POLICY_VERSION: Final = "agentlightning.policy_version"
"""Of the weights that drew the last token."""
POLICY_VERSIONS: Final = "agentlightning.policy_versions"
"""list[int], version and number of tokens by turns: which weights drew which tokens, where they changed under way."""
TOKENS: Final = "agentlightning.tokens"
"""Where the recorded tokens come from: absent where our own engine drew them, "provider" where a server reported them,
"none" where there are none, so that only algorithms that read text can learn from the call."""
PROVIDER_RETRIES: Final = "agentlightning.provider.retries"
"""How many times the call was sent again before it was answered, or given up."""
REQUEST: Final = "agentlightning.request"
"""What the caller sent, as a digest: two calls of an attempt with the same value are one request sent twice where the
second says so (`RETRIES`), or where the value begins with SENT_ONCE."""
SENT_ONCE: Final = "once-"
"""Of a client that never sends the same request twice unless it heard no answer to the first."""
RETRIES: Final = "agentlightning.retries"
"""How many times the caller had sent the request before, as it says itself; absent for none."""
AGENT_KEY: Final = "agentlightning.agent.key"
"""The same for all calls of one agent, named or not: made from its system prompt and its tools (gateway/agents.py)."""
ATTRIBUTION: Final = "agentlightning.attribution"
"""What a call was known by: "url", "key", "header", "worker", "trace" or "baggage"
(gateway/attribution.py)."""
ATTRIBUTION_IGNORED: Final = "agentlightning.attribution.ignored"
"""list[str]: what a call said besides of its rollout or its agent, and what was not followed."""
JUDGE: Final = "agentlightning.judge"
"""True where a reward function recorded the span: it is kept with the attempt that was judged, and is no call of it."""
MODE: Final = "agentlightning.mode"
"""The mode that the URL of the call names, as 1.0's URLs do: train or val."""
COST: Final = "agentlightning.cost"
"""What the call cost, in US dollars, at the price its provider is configured with."""
CONTINUES: Final = "agentlightning.continues"
"""span_id of the call whose tokens the prompt begins with; absent where a path starts."""
DRIFT: Final = "agentlightning.drift"
"""True where a call looked like a continuation that could not be proven, so that a new path was started."""
DRIFT_REASON: Final = "agentlightning.drift.reason"
"""Why it could not: template (it writes earlier turns otherwise now), tools (they or the model are others now), or
edited (an answer came back changed)."""
CONSTRAINT: Final = "agentlightning.constraint"
"""Whether an answer has the shape its request asked for: enforced, checked or violated (gateway/constraint.py)."""
VIOLATIONS: Final = "agentlightning.constraint.violations"
"""list[str]: the fields of the request that the answer fails."""
REWARD_VALUES: Final = "agentlightning.reward.values"
"""dict[str, float]: a reward of several named dimensions; `gen_ai.evaluation.score.value` holds a plain one."""
MESSAGE_BODY: Final = "agentlightning.message.body"
OBJECT_TYPE: Final = "agentlightning.object.type"
OBJECT_JSON: Final = "agentlightning.object.json"
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_MESSAGE: Final = "exception.message"
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"
OPERATION_LABEL: Final = "agentlightning.operation.name"
"""What the agent calls the step; `gen_ai.operation.name` is for the kinds OTel knows."""
OPERATION_INPUT: Final = "agentlightning.operation.input"
OPERATION_OUTPUT: Final = "agentlightning.operation.output"
SUPERSEDED: Final = "agentlightning.superseded"
"""True where the span was written by an attempt that was no longer the latest one; set by the store."""
LATE: Final = "agentlightning.late"
"""True where an agent sent the span after its attempt had ended; it is kept and counts for nothing."""
STRIPPED: Final = "agentlightning.stripped"
"""list[str]: attributes that only the gateway writes, which an agent had sent in this span and which were left out."""

MAX_REWARD: Final = 1e12
"""The largest reward, either way: sums and squares of many are still numbers, in float32 too."""

TOKEN_ATTRIBUTES: Final = (PROMPT_TOKEN_IDS, RESPONSE_TOKEN_IDS, LOGPROBS)
"""Stored in binary (int32 and float32, little endian), read back as lists."""


@as_dataclass
class SpanEvent(FrozenStruct, frozen=True, gc=False):
    """Something that happened within a span.

    >>> agl.SpanEvent("cache miss", timestamp=1.0).name
    'cache miss'
    """

    name: str
    timestamp: float
    attributes: dict[str, Any] = msgspec.field(default_factory=dict)


@as_dataclass
class Span(FrozenStruct, frozen=True, gc=False):
    """One recorded operation of one attempt.

    >>> span = agl.Span("ro-1", "at-1", "search", start_time=1.0, attributes={"query": "tea"})
    >>> span.attributes["query"]
    'tea'
    """

    rollout_id: str
    attempt_id: str
    name: str
    start_time: float
    """Seconds since the epoch."""
    end_time: float | None = None
    sequence_id: int = 0
    """Position within the attempt, from 1; 0 asks the store to give the next."""
    trace_id: str = ""
    span_id: str = ""
    parent_id: str | None = None
    status_code: str = "UNSET"
    """UNSET, OK or ERROR."""
    status_message: str | None = None
    attributes: dict[str, Any] = msgspec.field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    resource: dict[str, Any] = msgspec.field(default_factory=dict)


def usable_reward(value: Any) -> float | None:
    """The number of a reward; None for what is no number, or so large that nothing can be computed with it."""
    usable = isinstance(value, bool | int | float) and -MAX_REWARD <= value <= MAX_REWARD
    return float(value) if usable else None


def counts(span: Span) -> bool:
    """Whether the span counts: its attempt was the latest one, and had not ended, when it was written."""
    attributes = span.attributes
    return not attributes.get(SUPERSEDED) and not attributes.get(LATE)


_random = random.Random()
"""Ids need not be secret, and asking the system for each costs as much as making a span. One of our own: an agent that
seeds the module's would give its spans the ids of the last run."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_random.seed)


def new_span_id() -> str:
    """16 hexadecimal digits, as OpenTelemetry has them."""
    return f"{_random.getrandbits(64):016x}"


def new_trace_id() -> str:
    """32 hexadecimal digits, as OpenTelemetry has them."""
    return f"{_random.getrandbits(128):032x}"
