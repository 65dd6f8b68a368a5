"""Spans and the vocabulary of their names and attributes.

A span is one recorded operation in the shape of OpenTelemetry. Names follow OTel GenAI where it defines one, and
`agentlightning.*` otherwise. Spans of an attempt are ordered by `sequence_id`, which the store assigns, not by time.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from agentlightning.util.frozen_struct import FrozenStruct, as_dataclass
from agentlightning.util.random_ids import random_bits

# -- names of spans --------------------------------------------------------------------------------------------------

REWARD: Final = "gen_ai.evaluation.result"
"""A reward: one span per emitted reward, with one or several dimensions (`REWARD_VALUES`)."""
MESSAGE: Final = "agentlightning.message"
"""A line of text, or a message of a framework."""
PROMPT: Final = "agentlightning.prompt"
"""A prompt that was emitted without a response; with one it is a model call."""
RESPONSE: Final = "agentlightning.response"
"""A response that was emitted without a prompt."""
FEEDBACK: Final = "agentlightning.feedback"
"""What a person says of the rollout without a score; with one it is a reward."""
OBJECT: Final = "agentlightning.object"
"""A value that the agent recorded, as JSON."""
EXCEPTION: Final = "agentlightning.exception"
"""An exception that the agent has handled."""
OPERATION: Final = "agentlightning.operation"
"""A step of the agent with its input and output."""
ANNOTATION: Final = "agentlightning.annotation"
"""Attributes that the agent recorded."""
DAMAGED: Final = "agentlightning.damaged"
"""What a store returns in place of a span that it can no longer read; its status message says why."""

# -- attributes from OTel GenAI --------------------------------------------------------------------------------------

OPERATION_NAME: Final = "gen_ai.operation.name"
"""Kind of the operation: chat, text_completion, execute_tool, invoke_agent ..."""
PROVIDER_NAME: Final = "gen_ai.provider.name"
"""Who answered a model call: agentlightning for its own engine, else the name of the provider."""
REQUEST_MODEL: Final = "gen_ai.request.model"
"""Model name that the caller asked for."""
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
"""Sampling temperature of the call."""
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
"""Share of probability that was sampled from."""
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
"""Number of most likely tokens that were sampled from."""
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
"""Presence penalty that the caller asked for."""
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
"""Frequency penalty that the caller asked for."""
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
"""Most tokens of the answer."""
REQUEST_SEED: Final = "gen_ai.request.seed"
"""Seed that the caller asked for."""
REQUEST_STOP: Final = "gen_ai.request.stop_sequences"
"""list[str]: texts that end the answer."""
RESPONSE_ID: Final = "gen_ai.response.id"
"""Id of the answer, as the caller received it."""
RESPONSE_MODEL: Final = "gen_ai.response.model"
"""Model that answered."""
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
"""list[str]: why the answer ended: stop, length, tool_calls ..."""
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
"""Number of tokens of the prompt."""
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
"""Number of tokens of the answer."""
INPUT_MESSAGES: Final = "gen_ai.input.messages"
"""Messages of the prompt as JSON, in OpenTelemetry's form."""
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
"""Messages of the answer, likewise."""
TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
"""Tools that the model was offered, as JSON."""
AGENT_NAME: Final = "gen_ai.agent.name"
"""Who is speaking: the unit of selective optimisation."""
EVALUATION_NAME: Final = "gen_ai.evaluation.name"
"""Name of a reward: reward, human_feedback, or the rule that gave it."""
SCORE_VALUE: Final = "gen_ai.evaluation.score.value"
"""float: the value of a reward of one dimension."""
ERROR_TYPE: Final = "error.type"
"""Type of the error that ended the operation."""
HTTP_METHOD: Final = "http.request.method"
"""The method of a forwarded request that is no model call."""
URL_PATH: Final = "url.path"
"""Its path, from `/v1/` on."""
HTTP_STATUS: Final = "http.response.status_code"
"""The status of its response."""
TOOL_NAME: Final = "gen_ai.tool.name"
"""Name of the tool that was called."""
TOOL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
"""Arguments of the call, as JSON or text."""
TOOL_RESULT: Final = "gen_ai.tool.call.result"
"""Result of the call, as JSON or text."""
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
"""Id of the call, as the model gave it."""

# -- attributes of our own -------------------------------------------------------------------------------------------

PROMPT_TOKEN_IDS: Final = "agentlightning.prompt_token_ids"
"""list[int]: all tokens of the prompt."""
RESPONSE_TOKEN_IDS: Final = "agentlightning.response_token_ids"
"""list[int]: all tokens sampled from the policy, including the end-of-turn token."""
LOGPROBS: Final = "agentlightning.logprobs"
"""list[float]: natural log-probability of each response token under the distribution it was sampled from."""
KEPT_SETS: Final = "agentlightning.kept_sets"
"""str: the ids of the tokens that top_k and top_p kept at each response token (util/kept_sets.py)."""
TOP_LOGPROBS: Final = "agentlightning.top_logprobs"
"""str: the likeliest tokens at each response token with their log-probabilities, where the call asked for them or
`gateway.record_top_logprobs` does (engine/likeliest_tokens.py)."""
RESHAPED: Final = "agentlightning.reshaped"
"""list[str]: what changed the sampling distribution besides temperature, top_p and top_k."""
OVERRIDDEN: Final = "agentlightning.sampling.overridden"
"""list[str]: sampling parameters of the request that were ignored in a training rollout
(gateway/sampling.py)."""
POLICY_VERSION: Final = "agentlightning.policy_version"
"""Version of the weights that sampled the last token."""
POLICY_VERSIONS: Final = "agentlightning.policy_versions"
"""list[int]: alternating versions and token counts, if the weights changed while the response was sampled."""
TOKENS: Final = "agentlightning.tokens"
"""Source of the recorded tokens: absent for our own engine, "provider" if a server reported them, "none" if there are
none, so that only algorithms that read text can learn from the call."""
PROVIDER_RETRIES: Final = "agentlightning.provider.retries"
"""Number of retries of the call before it succeeded or failed."""
REQUEST: Final = "agentlightning.request"
"""Digest of the request. Two calls of an attempt with the same digest are one request sent twice if the second has
`RETRIES`, or if the digest begins with SENT_ONCE."""
SENT_ONCE: Final = "once-"
"""Prefix of the digest for clients that resend a request only if they got no response."""
RETRIES: Final = "agentlightning.retries"
"""Number of earlier sends of the request, as reported by the client; absent for none."""
AGENT_KEY: Final = "agentlightning.agent.key"
"""Key of the calling agent, named or not: a digest of its system prompt and tools (gateway/routing.py)."""
ATTRIBUTION: Final = "agentlightning.attribution"
"""How the call was attributed: "url", "key", "header", "worker", "trace" or "baggage"
(gateway/callers.py)."""
ATTRIBUTION_IGNORED: Final = "agentlightning.attribution.ignored"
"""list[str]: other claims of the call about its rollout or agent, which were ignored."""
JUDGE: Final = "agentlightning.judge"
"""True if a reward function recorded the span: it is stored with the scored attempt, and not part of it."""
MODE: Final = "agentlightning.mode"
"""Mode in the URL of the call, as in 1.0's URLs: train or val."""
COST: Final = "agentlightning.cost"
"""Cost of the call in US dollars, at the configured price of its provider."""
TURN_LIMIT: Final = "agentlightning.turn_limit"
"""int: the number of answers that the attempt may be given, where it is limited."""
TURN_LIMIT_REACHED: Final = "turn_limit_reached"
"""`error.type` of a call that was refused because the attempt has been given them all."""
REPLAYS: Final = "agentlightning.replays"
"""list[str]: rollout_id and span_id of the call whose recorded answer was given again (gateway/callers.py)."""
BEGUN: Final = "agentlightning.begun"
"""int: the number of tokens at the end of the prompt that were the beginning of a recorded answer, and are that of this
one."""
REPLAY_MISMATCH: Final = "agentlightning.replay.mismatch"
"""True if the request differs from the recorded ones, so that the answers from here on were sampled."""
CONTINUES: Final = "agentlightning.continues"
"""span_id of the call whose tokens the prompt continues; absent at the start of a path."""
DRIFT: Final = "agentlightning.drift"
"""True if the call looked like a continuation that could not be verified, so that a new path was started."""
DRIFT_REASON: Final = "agentlightning.drift.reason"
"""Reason of the drift: template (it renders earlier turns differently), tools (tools or model have changed) or edited
(an earlier response was modified)."""
CONSTRAINT: Final = "agentlightning.constraint"
"""Whether the response has the requested format: enforced, checked or violated
(gateway/dialects/base.py)."""
VIOLATIONS: Final = "agentlightning.constraint.violations"
"""list[str]: fields of the request that the response violates."""
REWARD_VALUES: Final = "agentlightning.reward.values"
"""dict[str, float]: a reward of several named dimensions; a plain one is in `gen_ai.evaluation.score.value`."""
REWARD_MISSING: Final = "agentlightning.reward.missing"
"""Why a reward function gave this attempt no reward."""
REWARD_AGENT: Final = "agentlightning.reward.agent"
"""The agent that a reward is for alone; without it a reward belongs to the rollout or a call."""
AIR_RULE: Final = "agentlightning.air.rule"
"""Name of the rule of an automatic intermediate reward (tracing/air.py); agents cannot write it."""
AIR_CALL: Final = "agentlightning.air.call"
"""span_id of the model call that an automatic intermediate reward belongs to."""
AIR_SOURCE: Final = "agentlightning.air.source"
"""span_id of the span that the rule rewarded."""
PROGRESS: Final = "agentlightning.progress"
"""float: how far the task has come, as the environment says; the AIR rule `progress` rewards its rise."""
RESCORED: Final = "agentlightning.rescored"
"""Name of the function that scored the rollout anew; such a reward replaces the attempt's own final one."""
MESSAGE_BODY: Final = "agentlightning.message.body"
"""Text of the message."""
MESSAGE_JSON: Final = "agentlightning.message.json"
"""The message of a framework, in OTel's form, as JSON; its text is the body."""
OBJECT_TYPE: Final = "agentlightning.object.type"
"""Type of the recorded value."""
OBJECT_JSON: Final = "agentlightning.object.json"
"""The recorded value, as JSON."""
EXCEPTION_TYPE: Final = "exception.type"
"""Type of the exception."""
EXCEPTION_MESSAGE: Final = "exception.message"
"""Message of the exception."""
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"
"""Traceback of the exception."""
OPERATION_LABEL: Final = "agentlightning.operation.name"
"""Name of the agent's step; `gen_ai.operation.name` is for the kinds that OTel defines."""
OPERATION_INPUT: Final = "agentlightning.operation.input"
"""Input of the step, as JSON or text."""
OPERATION_OUTPUT: Final = "agentlightning.operation.output"
"""Output of the step, as JSON or text."""
FEEDBACK_LABEL: Final = "agentlightning.feedback.label"
"""Label that a person gave."""
FEEDBACK_COMMENT: Final = "agentlightning.feedback.comment"
"""Comment that a person wrote."""
FEEDBACK_SOURCE: Final = "agentlightning.feedback.source"
"""Who gave the feedback: an id of the caller, or of the link."""
SUPERSEDED: Final = "agentlightning.superseded"
"""True if the attempt was no longer the latest one when the span was written; set by the store."""
LATE: Final = "agentlightning.late"
"""True if the span arrived after the end of its attempt; it is stored and otherwise ignored."""
STRIPPED: Final = "agentlightning.stripped"
"""list[str]: attributes of the agent's span that were removed, because only the gateway may write them."""

MAX_REWARD: Final = 1e12
"""Largest absolute value of a reward: sums and squares of many stay finite, even in float32."""

TOKEN_ATTRIBUTES: Final = (PROMPT_TOKEN_IDS, RESPONSE_TOKEN_IDS, LOGPROBS)
"""Stored in binary (int32 and float32, little endian), read back as lists."""


@as_dataclass
class SpanEvent(FrozenStruct, frozen=True, gc=False, omit_defaults=True):
    """An event within a span.

    >>> agl.SpanEvent("cache miss", timestamp=1.0).name
    'cache miss'
    """

    name: str
    timestamp: float
    attributes: dict[str, Any] = msgspec.field(default_factory=dict)


@as_dataclass
class Span(FrozenStruct, frozen=True, gc=False, omit_defaults=True):
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
    """Position within the attempt, from 1; 0 lets the store assign the next."""
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
    """The value as a float; None if it is not a number, or larger than MAX_REWARD."""
    usable = isinstance(value, bool | int | float) and -MAX_REWARD <= value <= MAX_REWARD
    return float(value) if usable else None


def counts(span: Span) -> bool:
    """Whether the span counts: neither superseded nor late."""
    attributes = span.attributes
    return not attributes.get(SUPERSEDED) and not attributes.get(LATE)


def new_span_id() -> str:
    """A span id of OpenTelemetry: 16 hexadecimal digits."""
    return f"{random_bits(64):016x}"
